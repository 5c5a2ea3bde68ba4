"""Dataclasses to plain data and back, read strictly: every field is there, none is unknown, each has its type."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from dsv41.errors import Dsv41Error


def to_plain(value: Any) -> Any:
    """Dicts, lists, strings and numbers; sets are sorted. Fields with metadata `plain=False` are left out, and those
    with `plain="where set"` where they have their default."""
    if is_dataclass(value):
        found = {item.name: getattr(value, item.name) for item in _stored(value)}
        left_out = {item.name for item in _stored(value) if _may_lack(item) and found[item.name] == item.default}
        return {name: to_plain(part) for name, part in found.items() if name not in left_out}
    if isinstance(value, Mapping):
        return {key: to_plain(value[key]) for key in sorted(value)}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: Any, data: Any, where: str) -> Any:
    """A value of the type `kind` (a dataclass of these, tuple, frozenset, mapping, optional, or a plain type).

    Raises Dsv41Error naming the first field, by its path from `where`, that is unknown, missing or of another type.
    """
    if is_dataclass(kind):
        return _read_dataclass(kind, data, where)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if data is None else from_plain(next(arg for arg in args if arg is not type(None)), data, where)
    if origin in (tuple, frozenset):
        items = [from_plain(args[0], item, f"{where}[{i}]") for i, item in enumerate(_expect(list, data, where))]
        return origin(items)
    if origin is Mapping:
        return {key: from_plain(args[1], item, f"{where}.{key}") for key, item in _expect(dict, data, where).items()}
    return _expect(kind, data, where)


def _read_dataclass(kind: Any, data: Any, where: str) -> Any:
    _expect(dict, data, where)
    names = [item.name for item in _stored(kind)]
    if unknown := sorted(set(data) - set(names)):
        raise Dsv41Error(f"{where}: unknown field {unknown[0]!r}: use {', '.join(names)}")
    needed = [item.name for item in _stored(kind) if not _may_lack(item)]
    if missing := [name for name in needed if name not in data]:
        raise Dsv41Error(f"{where}: field {missing[0]!r} is missing: give every one of {', '.join(needed)}")
    hints = get_type_hints(kind)
    return kind(**{name: from_plain(hints[name], data[name], f"{where}.{name}") for name in names if name in data})


def _stored(kind: Any) -> list[Field[Any]]:
    return [item for item in fields(kind) if item.metadata.get("plain", True)]


def _may_lack(item: Field[Any]) -> bool:
    return item.metadata.get("plain") == "where set"


def _expect(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise Dsv41Error(f"{where}: expected {kind.__name__}, found {type(data).__name__} {data!r}")
    return data
