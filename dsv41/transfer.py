"""Moving requests between sessions, machines and layouts.

What is on the other side of a file is not trusted: everything is checked before a page is taken, and every number that
comes in is looked at, whether the backend would mind it or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv41.cache import WINDOW, CacheSpec
from dsv41.config import DeepseekV41Config
from dsv41.errors import InputError, TransferError
from dsv41.hal.layout import CacheLayout, CacheLayouts, PagedCache
from dsv41.hal.scrub import scrub
from dsv41.hal.transcode import TranscodeReport, transcode
from dsv41.transfer_file import Held, RequestFile, dense, keeps_raw_rows, open_request, write_request

if TYPE_CHECKING:
    from dsv41.session import Session

_STATE_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "head_dim",
    "qk_rope_head_dim",
    "index_head_dim",
    "sliding_window",
    "compress_ratios",
    "kv_source_layer_ids",
    "rope_theta",
    "compress_rope_theta",
    "rope_scaling",
    "rms_norm_eps",
)
"""What cached rows depend on, and so must be the same on both sides. Heads and index queries are not among them."""


@dataclass(frozen=True)
class ExportReport:
    """What was written: a request of `length` tokens in `bytes` bytes."""

    length: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ImportReport:
    """What became of a request that was moved in. `caches` tells for each what conversion cost; `scrubbed` counts the
    groups that held NaN or infinite numbers and were zeroed, by cache, and lacks those that had none."""

    request: int
    length: int
    caches: dict[str, TranscodeReport]
    scrubbed: dict[str, int]

    @property
    def max_relative_error(self) -> float:
        """The largest of a group in any cache."""
        return max((report.max_relative_error for report in self.caches.values()), default=0.0)


@dataclass(frozen=True)
class ConvertReport:
    """What a file became. `layouts` are each cache's before and after; the rest is as in the other two reports."""

    length: int
    bytes: int
    sha256: str
    layouts: dict[str, tuple[CacheLayout, CacheLayout]]
    caches: dict[str, TranscodeReport]
    scrubbed: dict[str, int]


# Out of a session


def export_request(session: Session, request: int, path: str | Path) -> ExportReport:
    """`Session.export_request`."""
    known = session.find(request)
    held = Held(known.length, known.window_start, known.raw_start, session.ring, session.max_draft)
    specs = [replace(spec, layout=dense(spec.layout)) for spec in session.cache_specs]

    def pages_of(spec: CacheSpec) -> PagedCache:
        source = _cache_of(session, spec)
        slots = _slots(session, known.pages.tables[spec.pool], spec, held.rows(spec))
        pages = _empty_pages(spec, held)
        if source.tensor_scale is not None and pages.tensor_scale is not None:
            pages.tensor_scale.copy_(source.tensor_scale)
        values, scales = (part.cpu() for part in source.read_bytes(slots))
        scales[:, scales.shape[1] - spec.layout.record.scale_pad :] = 0
        pages.write_bytes(held.file_slots(spec), values, scales)
        return pages

    def raw_rows_of(spec: CacheSpec) -> Tensor:
        ring = _ring_of(session, spec)
        return ring[
            known.state_slot, torch.arange(held.raw_start, held.length, device=ring.device) % session.ring
        ].cpu()

    size, digest = write_request(Path(path), session.stack.config, held, specs, pages_of, raw_rows_of)
    return ExportReport(held.length, size, digest)


# Into a session


def import_request(session: Session, paths: Sequence[str | Path], *, nan: str = "refuse") -> ImportReport:
    """`Session.import_request`."""
    _check_policy(nan)
    files = [open_request(Path(path)) for path in paths]
    source = _match(files, session)
    for file in files:
        file.load()
    scrubbed: dict[str, int] = {}
    for file in files:
        scrubbed |= _scrub(file, [spec for name, spec in file.specs.items() if source.get(name) is file], nan)

    held = files[0].held
    config = session.stack.config
    window_start = max(held.window_start, held.length - config.sliding_window - session.max_draft)
    raw_start = max(held.raw_start, held.length - session.ring)
    request = session.add_request()
    known = session.find(request)
    try:
        rows = {pool: range(held.length // max(pool, 1)) for pool in session.pages.pools}
        rows[WINDOW] = range(window_start, held.length)
        session.pages.make_writable(
            ((known.pages, pool, part.start, part.stop) for pool, part in rows.items()), "the import"
        ).commit()
        reports = {}
        for spec in session.cache_specs:
            file, cache = source[spec.name], _cache_of(session, spec)
            given = file.caches[spec.name]
            slots = held.file_slots(file.specs[spec.name], rows[spec.pool])
            target = _slots(session, known.pages.tables[spec.pool], spec, rows[spec.pool])
            reports[spec.name] = transcode(_to(given, cache.data.device), cache, slots.to(cache.data.device), target)
            if keeps_raw_rows(spec):
                ring = _ring_of(session, spec)
                place = torch.arange(raw_start, held.length, device=ring.device) % session.ring
                ring[known.state_slot, place] = file.raw_rows[spec.name][raw_start - held.raw_start :].to(ring.device)
    except BaseException:
        session.free(request)
        raise
    known.length, known.window_start, known.raw_start = held.length, window_start, raw_start
    return ImportReport(request, held.length, reports, scrubbed)


def _match(files: Sequence[RequestFile], session: Session) -> dict[str, RequestFile]:
    """Which file has each of the session's caches; everything that keeps a session from taking the files is refused."""
    if not files:
        raise TransferError("no file is given: expected at least one; give the path of an exported request")
    first = files[0]
    for file in files:
        mine, theirs = (_state_facts(config) for config in (session.stack.config, file.config))
        if wrong := [name for name in _STATE_FIELDS if mine[name] != theirs[name]]:
            found, due = (", ".join(f"{name} {facts[name]}" for name in wrong) for facts in (theirs, mine))
            raise TransferError(
                f"{file.path} comes from another model, with {found}: expected {due}; import it where that model runs"
            )
        if file.held.length > session.stack.max_len:
            raise TransferError(
                f"{file.path} holds {file.held.length} tokens: expected at most {session.stack.max_len}, the max_len "
                "of this stack; build it with a larger one"
            )
        if file.held != first.held:
            raise TransferError(
                f"{file.path} holds {file.held}: expected {first.held} as in {first.path}; give files of one request, "
                "exported at one time by sessions with the same max_draft"
            )
    source: dict[str, RequestFile] = {}
    wanted = [spec.name for spec in session.cache_specs]
    for file in files:
        for name in file.specs:
            if name in source:
                raise TransferError(
                    f"cache {name} is in {source[name].path} and in {file.path}: expected it once; leave one out"
                )
            source[name] = file
    if missing := [name for name in wanted if name not in source]:
        raise TransferError(
            f"{', '.join(str(file.path) for file in files)} lack {', '.join(missing)}: expected every cache of this "
            "session's layers; give the files of the other layers, too"
        )
    return {name: source[name] for name in wanted}


def _state_facts(config: DeepseekV41Config) -> dict[str, object]:
    facts = {name: getattr(config, name) for name in _STATE_FIELDS}
    facts["compress_ratios"] = config.compress_ratios[: config.num_hidden_layers]
    return facts


# From file to file


def convert_request(
    source: str | Path, target: str | Path, layouts: CacheLayouts, *, nan: str = "refuse"
) -> ConvertReport:
    """Write the request of one file to another in other layouts. `nan` as in `Session.import_request`.

    Raises TransferError for a file that is broken or cannot be written; `target` is as it was then.
    """
    _check_policy(nan)
    file = open_request(Path(source))
    file.load()
    scrubbed = _scrub(file, file.specs.values(), nan)
    held, reports = file.held, dict[str, TranscodeReport]()
    specs = [replace(spec, layout=dense(getattr(layouts, spec.kind))) for spec in file.specs.values()]

    def pages_of(spec: CacheSpec) -> PagedCache:
        pages = _empty_pages(spec, held)
        given = file.caches[spec.name]
        slots = held.file_slots(file.specs[spec.name])
        reports[spec.name] = transcode(given, pages, slots, held.file_slots(spec))
        return pages

    size, digest = write_request(
        Path(target), file.config, held, specs, pages_of, lambda spec: file.raw_rows[spec.name]
    )
    changed = {spec.name: (file.specs[spec.name].layout, spec.layout) for spec in specs}
    return ConvertReport(held.length, size, digest, changed, reports, scrubbed)


# Parts of these


def _check_policy(nan: str) -> None:
    if nan not in ("refuse", "scrub"):
        raise InputError(f"nan is {nan!r}: expected 'refuse' or 'scrub'; choose one")


def _scrub(file: RequestFile, specs: Iterable[CacheSpec], nan: str) -> dict[str, int]:
    """Count, and take out, the groups with NaN or infinite numbers. Raises TransferError where they are refused."""
    found: dict[str, int] = {}
    for spec in specs:
        slots = file.held.file_slots(spec)
        found[spec.name] = scrub(file.caches[spec.name], slots, repair=nan == "scrub")
        if keeps_raw_rows(spec):
            rows = file.raw_rows[spec.name]
            bad = ~rows.isfinite().all(-1, keepdim=True)
            found[f"{spec.name}.raw_rows"] = int(bad.sum())
            rows.masked_fill_(bad, 0.0)
    found = {name: count for name, count in found.items() if count}
    if found and nan == "refuse":
        listed = ", ".join(f"{name} ({count} groups)" for name, count in found.items())
        raise TransferError(
            f"{file.path} has NaN or infinite numbers in {listed}: expected finite ones; export the request again, or "
            "have these groups zeroed with nan='scrub'"
        )
    return found


def _empty_pages(spec: CacheSpec, held: Held) -> PagedCache:
    return PagedCache.allocate(spec.layout, held.num_pages(spec))


def _cache_of(session: Session, spec: CacheSpec) -> PagedCache:
    cache: PagedCache = getattr(session.caches[spec.layer_id], spec.kind)
    return cache


def _ring_of(session: Session, spec: CacheSpec) -> Tensor:
    """The raw rows that a compressor keeps of each request: float32 `[slots, ring, 2, D]`."""
    ring = session.caches[spec.layer_id].compressor_state
    assert ring is not None
    return ring


def _slots(session: Session, table: Sequence[int], spec: CacheSpec, rows: range) -> Tensor:
    """Where a request's rows lie in a cache of the session."""
    size = spec.layout.page_size
    row = torch.arange(rows.start, rows.stop)
    slots = torch.tensor(list(table), dtype=torch.int64)[row // size] * size + row % size
    return slots.to(session.stack.backend.device)


def _to(cache: PagedCache, device: torch.device) -> PagedCache:
    moved = (None if part is None else part.to(device) for part in (cache.scale_pool, cache.tensor_scale))
    return PagedCache(cache.layout, cache.data.to(device), *moved)
