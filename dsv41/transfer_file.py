"""Requests as files: what one says of itself, and everything that is checked before any of it is believed.

A safetensors file. Its metadata has two entries: `dsv41_request`, a JSON header that names the version, the model, how
much of the request is held and the layout of every cache, and `sha256`, over the whole file with its own digits as
zeros. Tensors are the pages of each cache, dense, with zeros in every row that the request does not hold, and the raw
rows of each compressor in order of position. Nothing in it is split by head, so every tensor-parallel rank has it all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv41.cache import WINDOW, CacheSpec
from dsv41.config import DeepseekV41Config
from dsv41.errors import CheckpointError, TransferError
from dsv41.hal.layout import CacheLayout, PagedCache
from dsv41.shards import Header, make_front, read_front
from dsv41.topology import layer_specs

FORMAT = "dsv41-request"
VERSION = 1
"""Raised by one whenever a reader of the version before would misread a file."""

_HEADER, _DIGEST = "dsv41_request", "sha256"
_ZEROS = "0" * 64
_MOST_PAGE_ROWS = 1 << 20  # no cache has such pages, and shapes stay within what a tensor can have


@dataclass(frozen=True)
class Held:
    """How much of a request is held: `length` tokens, window rows from `window_start` on, raw rows of the compressors
    from `raw_start` on. `ring` and `max_draft` are those of the session that wrote it."""

    length: int
    window_start: int
    raw_start: int
    ring: int
    max_draft: int

    def rows(self, cache: CacheSpec) -> range:
        """The rows of a cache that are held."""
        return range(self.window_start if cache.pool == WINDOW else 0, self.length // cache.ratio)

    def num_pages(self, cache: CacheSpec) -> int:
        rows, size = self.rows(cache), cache.layout.page_size
        return -(-rows.stop // size) - rows.start // size if rows else 0

    def file_slots(self, cache: CacheSpec, rows: range | None = None) -> Tensor:
        """Where rows lie among the pages of the file, int64; by default all that are held."""
        held, size = self.rows(cache), cache.layout.page_size
        rows = held if rows is None else rows
        return torch.arange(rows.start, rows.stop) - held.start // size * size


def dense(layout: CacheLayout) -> CacheLayout:
    """A layout as a file has it: the same pages, one right after the other."""
    return replace(layout, alignment=1, page_stride=None)


def keeps_raw_rows(cache: CacheSpec) -> bool:
    return cache.kind == "compressed" and cache.ratio > 1


def _tensors(caches: Sequence[CacheSpec], held: Held) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of every tensor of a file, in order."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for cache in caches:
        layout, pages = cache.layout, held.num_pages(cache)
        found[f"{cache.name}.pages"] = ("U8", (pages, layout.page_bytes))
        if layout.pool_page_bytes:
            found[f"{cache.name}.scale_pool"] = ("U8", (pages, layout.pool_page_bytes))
        if layout.record.tensor_scale:
            found[f"{cache.name}.tensor_scale"] = ("F32", (1,))
        if keeps_raw_rows(cache):
            found[f"{cache.name}.raw_rows"] = ("F32", (held.length - held.raw_start, 2, layout.record.dim))
    return found


# Writing


def write_request(
    path: Path,
    config: DeepseekV41Config,
    held: Held,
    caches: Sequence[CacheSpec],
    pages_of: Callable[[CacheSpec], PagedCache],
    raw_rows_of: Callable[[CacheSpec], Tensor],
) -> tuple[int, str]:
    """Write a file, one cache in memory at a time, and return its size and its SHA-256.

    `caches` have layouts that are `dense`; `pages_of` gives a cache with the pages of one, `raw_rows_of` float32
    `[rows, 2, D]`, both on the CPU. Raises TransferError where the file cannot be written; none is left then.
    """
    metadata = {_HEADER: _make_header(config, held, caches), _DIGEST: _ZEROS}
    front, _ = make_front(_tensors(caches, held), metadata)
    digest, size = hashlib.sha256(front), len(front)
    partial = path.with_name(f"{path.name}.partial")
    try:
        try:
            with partial.open("wb") as file:
                file.write(front)
                for part in _parts(caches, pages_of, raw_rows_of):
                    digest.update(part)
                    size += file.write(part)
                file.seek(_digest_at(front, _ZEROS))
                file.write(digest.hexdigest().encode())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise TransferError(
            f"{path} cannot be written ({error.strerror}): expected a folder with room for it; check the path"
        ) from error
    return size, digest.hexdigest()


def _parts(
    caches: Sequence[CacheSpec],
    pages_of: Callable[[CacheSpec], PagedCache],
    raw_rows_of: Callable[[CacheSpec], Tensor],
) -> Iterator[memoryview]:
    for cache in caches:
        pages = pages_of(cache)
        for tensor in (pages.data, pages.scale_pool, pages.tensor_scale):
            if tensor is not None:
                yield _bytes_of(tensor)
        if keeps_raw_rows(cache):
            yield _bytes_of(raw_rows_of(cache))


def _bytes_of(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    return view


def _make_header(config: DeepseekV41Config, held: Held, caches: Sequence[CacheSpec]) -> str:
    header = {
        "format": FORMAT,
        "version": VERSION,
        "config": config.to_dict(),
        "layers": sorted({cache.layer_id for cache in caches}),
        "request": asdict(held),
        "caches": {cache.name: _describe(cache, held) for cache in caches},
    }
    return json.dumps(header, separators=(",", ":"), allow_nan=False)


def _describe(cache: CacheSpec, held: Held) -> dict[str, Any]:
    rows = held.rows(cache)
    return {
        "layer": cache.layer_id,
        "kind": cache.kind,
        "ratio": cache.ratio,
        "rows": [rows.start, rows.stop],
        "layout": cache.layout.to_dict(),
    }


def _digest_at(front: bytes, digest: str) -> int:
    """Where the digits of the digest begin. Quotes within the JSON header are escaped, so this stands there once."""
    key = f'"{_DIGEST}":"'.encode()
    return front.index(key + digest.encode() + b'"') + len(key)


# Reading


@dataclass
class RequestFile:
    """A file whose header is true to itself. `load` reads the rest."""

    path: Path
    config: DeepseekV41Config
    held: Held
    specs: dict[str, CacheSpec]
    front: Header = field(repr=False)
    caches: dict[str, PagedCache] = field(default_factory=dict, repr=False)
    """Name -> pages, on the CPU."""
    raw_rows: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """Name of a compressed cache -> float32 `[rows, 2, D]`."""

    def load(self) -> None:
        """Read pages and raw rows into memory. Raises TransferError where bytes are not those that were written."""
        data = self._read()
        raw, digest = self.front.raw, self.front.metadata[_DIGEST]
        start = _digest_at(raw, digest)
        found = hashlib.sha256(raw[:start] + _ZEROS.encode() + raw[start + len(_ZEROS) :])
        found.update(data)
        if found.hexdigest() != digest:
            raise TransferError(
                f"{self.path} has the SHA-256 {found.hexdigest()[:16]}...: expected {digest[:16]}..., which it was "
                "written with; it was damaged or changed, export the request again"
            )
        for name, spec in self.specs.items():
            scale = self._tensor(data, f"{name}.tensor_scale")
            if scale is not None and not (bool(scale.isfinite().all()) and float(scale) > 0):
                raise TransferError(
                    f"{name} in {self.path} has the tensor_scale {float(scale)}: expected a finite number above 0; "
                    "export the request again"
                )
            pages = self._tensor(data, f"{name}.pages")
            assert pages is not None
            cache = PagedCache(spec.layout, pages, self._tensor(data, f"{name}.scale_pool"), scale)
            self._check_unheld_rows(spec, cache)
            self.caches[name] = cache
            if keeps_raw_rows(spec):
                rows = self._tensor(data, f"{name}.raw_rows")
                assert rows is not None
                self.raw_rows[name] = rows

    def _read(self) -> bytearray:
        size = max(entry.end for entry in self.front.entries.values())
        try:
            data = bytearray(size)
            with self.path.open("rb") as file:
                file.seek(len(self.front.raw))
                count = file.readinto(data)
        except (OSError, MemoryError) as error:
            raise TransferError(
                f"{self.path} cannot be read ({error}): expected {size} bytes of tensors; check the file and the memory"
            ) from error
        if count != size:
            raise TransferError(
                f"{self.path} has {count} bytes of tensors: expected {size}, as a moment ago; export the request again"
            )
        return data

    def _tensor(self, data: bytearray, name: str) -> Tensor | None:
        entry = self.front.entries.get(name)
        if entry is None:
            return None
        count = entry.end - entry.begin
        part = torch.frombuffer(data, dtype=torch.uint8, count=count, offset=entry.begin) if count else torch.empty(0)
        if entry.dtype == "F32":
            part = part.clone().view(torch.float32)
        return part.to(torch.float32 if entry.dtype == "F32" else torch.uint8).reshape(entry.shape)

    def _check_unheld_rows(self, spec: CacheSpec, cache: PagedCache) -> None:
        """Only the first and the last page have rows that the request does not hold. They are zeros, as are the pad
        bytes of rows, so that a file neither depends on nor shows what was in memory, and a length that is too short
        does not pass."""
        size, slots, pad = spec.layout.page_size, self.held.file_slots(spec), spec.layout.record.scale_pad
        if pad and bool(cache.read_bytes(slots)[1][:, -pad:].any()):
            raise TransferError(
                f"{spec.name} in {self.path} has something in the pad bytes of {spec.layout.record.name}: expected "
                "zeros, since readers may take them for scales; export the request again"
            )
        for page in {0, cache.num_pages - 1} if cache.num_pages else ():
            live = slots[slots // size == page]
            clean = PagedCache.allocate(spec.layout, 1)
            clean.write_bytes(live - page * size, *cache.read_bytes(live))
            same = torch.equal(clean.data[0], cache.data[page])
            if clean.scale_pool is not None and cache.scale_pool is not None:
                same = same and torch.equal(clean.scale_pool[0], cache.scale_pool[page])
            if not same:
                rows = self.held.rows(spec)
                raise TransferError(
                    f"{spec.name} in {self.path} has bytes outside the rows {rows.start} to {rows.stop - 1}: expected "
                    "zeros, since it holds no others; its header lies, export the request again"
                )


def open_request(path: Path) -> RequestFile:
    """Read and check a file's header, its tensors' shapes included; no tensor is read.

    Raises TransferError for a file that is missing, truncated, of another format or version, or that contradicts
    itself.
    """
    try:
        front = read_front(path)
    except CheckpointError as error:
        raise TransferError(str(error)) from error
    header = _read_metadata(path, front)
    try:
        config, held, specs = _read_header(path, front.metadata[_HEADER], header)
        expected = _tensors(list(specs.values()), held)
    except TransferError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise TransferError(
            f"the header of {path} is broken ({type(error).__name__}: {error}): expected one of `export_request`; "
            "export the request again"
        ) from error
    found = {name: (entry.dtype, entry.shape) for name, entry in front.entries.items()}
    for name in {**expected, **found}:
        if found.get(name) != expected.get(name):
            raise TransferError(
                f"tensor {name} in {path} is {_shown(found.get(name))}: expected {_shown(expected.get(name))} by its "
                "header; one of the two lies, export the request again"
            )
    return RequestFile(path, config, held, specs, front)


def _shown(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if tensor is None else f"{tensor[0]} {list(tensor[1])}"


def _read_metadata(path: Path, front: Header) -> Mapping[str, Any]:
    data = front.metadata
    if not isinstance(data, dict) or _HEADER not in data:
        raise TransferError(
            f"{path} has no {_HEADER!r} in its metadata: expected a file of `export_request`, which says what its "
            "bytes are; export a request, other files cannot be told"
        )
    try:
        header = json.loads(data[_HEADER])
    except (ValueError, TypeError, RecursionError) as error:
        raise TransferError(
            f"the header of {path} is not JSON ({error}): expected one of `export_request`; export the request again"
        ) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TransferError(f"the header of {path} names no format {FORMAT!r}: expected it; export the request again")
    if type(version := header.get("version")) is not int or version != VERSION:
        raise TransferError(
            f"{path} has version {version!r:.40}: expected {VERSION}, which this dsv41 reads; export the request with "
            "the same version of dsv41"
        )
    digest = data.get(_DIGEST)
    if set(data) != {_HEADER, _DIGEST} or not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise TransferError(
            f"{path} has the metadata {sorted(data)} with {_DIGEST} {digest!r:.80}: expected {_HEADER} and 64 digits; "
            "export the request again"
        )
    if front.raw.count(f'"{_DIGEST}":"{digest}"'.encode()) != 1:
        raise TransferError(f"{path} does not have its {_DIGEST} once: expected it so; export the request again")
    return header


def _read_header(
    path: Path, text: str, header: Mapping[str, Any]
) -> tuple[DeepseekV41Config, Held, dict[str, CacheSpec]]:
    """What a header says, where it does not contradict itself."""

    def demand(condition: bool, found: str, expected: str) -> None:
        if not condition:
            raise TransferError(f"{path} has {found}: expected {expected}; its header lies, export the request again")

    config = DeepseekV41Config.from_dict(header["config"])
    request = header["request"]
    names = [f.name for f in fields(Held)]
    demand(
        isinstance(request, dict)
        and set(request) == set(names)
        and all(type(request[name]) is int and request[name] >= 0 for name in names),
        f"request {request!r:.200}",
        f"{', '.join(names)}, whole numbers from 0 up",
    )
    held = Held(**request)
    limit = config.max_position_embeddings
    demand(held.length <= limit, f"length {held.length}", f"at most {limit}, by its config")
    latest = max(0, held.length - config.sliding_window)
    demand(held.window_start <= latest, f"window rows from {held.window_start} on", f"{latest} or less")
    demand(held.ring == held.max_draft + 2, f"ring {held.ring}", f"{held.max_draft + 2}, its max_draft and 2")
    demand(
        held.length - held.ring <= held.raw_start <= held.length,
        f"raw rows from {held.raw_start} on",
        f"{held.length - held.ring} to {held.length}, by length and ring",
    )

    layers = header["layers"]
    demand(isinstance(layers, list), f"layers {layers!r:.200}", "a list of ids")
    specs: dict[str, CacheSpec] = {}
    for layer in layer_specs(config, layers=layers):
        for kind in ("window", "compressed", "index") if layer.owns_compressed else ("window",):
            name = f"{layer.name}.{kind}"
            demand(name in header["caches"], f"no cache {name}", "it, by its config")
            entry = header["caches"][name]
            layout = CacheLayout.from_dict(entry["layout"])
            demand(
                layout == dense(layout) and layout.page_size <= _MOST_PAGE_ROWS,
                f"{name} in pages {layout.stride} bytes apart of {layout.page_size} rows",
                f"dense pages of at most {_MOST_PAGE_ROWS} rows",
            )
            dim = config.index_head_dim if kind == "index" else config.head_dim
            demand(layout.record.dim == dim, f"{name} in rows of {layout.record.dim} dims", f"{dim}")
            window = kind == "window"
            spec = CacheSpec(
                name, layer.layer_id, kind, layout, 1 if window else layer.ratio, WINDOW if window else layer.ratio
            )
            truth = _describe(spec, held)
            for key in truth:
                demand(entry[key] == truth[key], f"{name} with {key} {entry[key]!r:.80}", f"{truth[key]!r:.80}")
            open_group = held.length // spec.ratio * spec.ratio
            demand(
                held.raw_start <= open_group or held.length == open_group,
                f"raw rows from {held.raw_start} on",
                f"{open_group} or less, where a group of {name} is open",
            )
            specs[name] = spec
    # What is left: entries that no one reads, numbers of another type, another order.
    canonical = _make_header(config, held, list(specs.values()))
    if canonical != text:
        pairs = enumerate(zip(canonical, text, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(canonical), len(text)))
        demand(False, f"a header with {text[same:]!r:.80}", f"{canonical[same:]!r:.80}, as it is written")
    return config, held, specs
