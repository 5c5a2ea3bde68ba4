"""safetensors files: a header that is checked before anything trusts it, and a writer that holds one tensor at a time.

A file is 8 bytes of header length, a JSON header, and the tensors' bytes, each entry naming its span of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv41.errors import CheckpointError

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes an element takes, by the type names of safetensors: of the types that a checkpoint of V4.1 may use, and others
that it may hold beside attention."""

_SHORTEST_FILE = 10  # with the header "{}"
_LONGEST_HEADER = 100_000_000  # the limit of the safetensors library itself


@dataclass(frozen=True)
class Entry:
    """What a header says of one tensor: its type and shape, and the span of its bytes after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The front of a file: its bytes up to those of the tensors, what they say of each tensor, and its metadata as it
    stands there, unchecked."""

    raw: bytes
    entries: dict[str, Entry]
    metadata: Any


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, by name. Raises as `read_front` does."""
    return read_front(path).entries


def read_front(path: Path) -> Header:
    """Everything before the tensors of a safetensors file.

    Raises CheckpointError, naming the file and the tensor, unless the header is well formed and its spans fill the
    file exactly, without gap or overlap.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            front = file.read(8)
            length = int.from_bytes(front, "little")
            if size < _SHORTEST_FILE:
                raise CheckpointError(
                    f"{path} has {size} bytes: expected at least {_SHORTEST_FILE}, the length of a header and the "
                    "header; it is truncated or no safetensors file, fetch it again"
                )
            most = min(size - 8, _LONGEST_HEADER)
            if not 2 <= length <= most:
                raise CheckpointError(
                    f"{path} has {size} bytes and a header of {length} by its first 8: expected 2 to {most}; it is "
                    "truncated or no safetensors file, fetch it again"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): expected a safetensors file; check the path and its permissions"
        ) from error
    try:
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the header of {path} is not JSON ({error}): expected a safetensors file; fetch it again"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(
            f"the header of {path} is a {type(header).__name__}: expected a JSON object of tensors; fetch it again"
        )
    metadata = header.pop("__metadata__", None)
    entries = {name: _read_entry(path, name, value) for name, value in header.items()}
    _check_spans(path, entries, size - 8 - length)
    return Header(front + text, entries, metadata)


def _read_entry(path: Path, name: str, value: Any) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"tensor {name} in {path} has the header entry {value!r:.200}: expected dtype, shape and two data_offsets; "
            "fetch the file again"
        ) from error
    if not isinstance(shape, list) or any(type(number) is not int or number < 0 for number in numbers):
        raise CheckpointError(
            f"tensor {name} in {path} has shape {shape!r:.200} at {begin!r:.20} .. {end!r:.20}: expected integers from "
            "0 up; fetch the file again"
        )
    if not isinstance(dtype, str):
        raise CheckpointError(
            f"tensor {name} in {path} has dtype {dtype!r:.200}: expected a name such as BF16; fetch the file again"
        )
    # Other tensors than those of attention may have types of which we know no size; whoever loads one checks its type.
    due = math.prod(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else max(0, end - begin)
    if end - begin != due:
        raise CheckpointError(
            f"tensor {name} in {path} spans {end - begin} bytes: expected {due} for {dtype} {shape}; its header lies, "
            "fetch the file again"
        )
    return Entry(dtype, tuple(shape), begin, end)


def _check_spans(path: Path, entries: Mapping[str, Entry], size: int) -> None:
    for name, entry in entries.items():
        if entry.end > size:
            raise CheckpointError(
                f"tensor {name} in {path} ends at byte {entry.end} of the data: expected at most its {size} bytes; the "
                "file is truncated or its header lies, fetch it again"
            )
    filled = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != filled:
            raise CheckpointError(
                f"tensor {name} in {path} begins at byte {entry.begin} of the data: expected {filled}, where the "
                "tensor before it ends; its header lies, fetch the file again"
            )
        filled = entry.end
    if filled != size:
        raise CheckpointError(
            f"{path} has {size} bytes of data, of which its header names {filled}: expected all; its header lies or "
            "the file was appended to, fetch it again"
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says against writing `path` into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror}): expected a path of a disk with room, where this user may "
            "write; choose another"
        ) from error


def make_front(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, int]:
    """Header length and header of a file, and how many bytes of tensors must follow. `tensors` as for `write_shard`."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def write_shard(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], data: Iterable[bytes | memoryview]
) -> int:
    """Write a safetensors file and return the bytes of its tensors.

    `tensors` gives each one's (type, shape) in the order in which `data` yields their bytes, one tensor at a time, so
    a shard may be larger than memory. Raises CheckpointError where it cannot be written.
    """
    front, end = make_front(tensors)
    written = 0
    with writing(path), path.open("wb") as file:
        file.write(front)
        for part in data:
            written += file.write(part)
    assert written == end, f"wrote {written} bytes of tensors under a header of {end}"
    return written
