"""One case of a clause: a small point in a lattice of sizes, which has a text form and smaller neighbours."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from dsv41.errors import InputError
from dsv41.hal.request import INDEX_CACHE_DTYPES, KV_CACHE_DTYPES
from dsv41.testing.caches import VARIANTS
from dsv41.testing.geometry import DTYPES, ROLES
from dsv41.testing.presets import PRESETS

Requests = tuple[tuple[int, int], ...]
"""Of each request, the tokens that it holds before the step and those that the step adds."""


_SINKS = ("own", "mixed")
_NAMES: dict[str, Collection[str]] = {
    "layer": ROLES,
    "kv": KV_CACHE_DTYPES,
    "index": INDEX_CACHE_DTYPES,
    "layout": VARIANTS,
    "dtype": DTYPES,
    "preset": PRESETS,
    "sinks": _SINKS,
}
_MOST_TOKENS = 4096
_MOST = {"heads": 128, "padding": _MOST_TOKENS, "quantize": 1, "first_seen": 1 << 20}


@dataclass(frozen=True)
class Case:
    """What a clause is checked on. Clauses use of it what concerns them.

    `layer` names a role (`geometry.ROLES`), `layout` a variant of the backend's layouts (`caches.VARIANTS`), `preset` a
    distribution (`presets.py`). `padding` counts padding tokens after the last request. `quantize` rounds activations
    to MXFP8. `sinks` are the weights' own, or "mixed": large ones and, of some heads, none (-inf). `first_seen` is the
    first position whose window row any token may see, as a prefix hit sets it. The text form names what differs from
    the defaults: "heads=1,requests=7+1/0+3".
    """

    heads: int = 2
    requests: Requests = ((5, 1),)
    padding: int = 0
    layer: str = "consumer"
    kv: str = "auto"
    index: str = "auto"
    layout: str = "own"
    dtype: str = "bfloat16"
    preset: str = "normal"
    quantize: bool = False
    sinks: str = "own"
    first_seen: int = 0

    def __str__(self) -> str:
        default = Case()
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return ",".join(f"{name}={_shown(value)}" for name, value in parts.items() if value != getattr(default, name))

    @staticmethod
    def parse(text: str) -> Case:
        """The case of a text form. Raises InputError for one that is none."""
        known = {f.name: getattr(Case(), f.name) for f in fields(Case)}
        values: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in known or name in values:
                raise InputError(f"case {text!r} names {name!r}: expected some of {', '.join(known)}, each once")
            values[name] = _read(name, value, known[name])
        return Case(**values)

    def smaller(self) -> Iterator[Case]:
        """Neighbours that are smaller in one respect, boldest first."""
        for count in range(1, len(self.requests)):
            yield replace(self, requests=self.requests[:count])
            yield replace(self, requests=self.requests[-count:])
        for place, (held, new) in enumerate(self.requests):
            for fewer in dict.fromkeys(((0, new), (held // 2, new), (held, min(new, 1)), (held, new // 2 or new))):
                if fewer != (held, new):
                    yield replace(self, requests=(*self.requests[:place], fewer, *self.requests[place + 1 :]))
        if self.padding:
            yield replace(self, padding=0)
        if self.heads > 1:
            yield replace(self, heads=1)
            yield replace(self, heads=self.heads // 2)
        if self.quantize:
            yield replace(self, quantize=False)
        if self.first_seen:
            yield replace(self, first_seen=0)
        if self.preset != "normal":
            yield replace(self, preset="normal")


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(f"{held}+{new}" for held, new in value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def _read(name: str, value: str, default: object) -> Any:
    try:
        if isinstance(default, tuple):
            pairs = [tuple(map(int, part.split("+"))) for part in value.split("/") if part]
            if any(len(pair) != 2 or min(pair) < 0 for pair in pairs):
                raise ValueError
            if any(sum(pair) > _MOST_TOKENS for pair in pairs):
                raise ValueError
            return tuple(pairs)
        if isinstance(default, str):
            if value not in _NAMES[name]:
                raise ValueError
            return value
        number = int(value)
        if not (name == "heads") <= number <= _MOST[name]:
            raise ValueError
    except ValueError:
        if isinstance(default, tuple):
            shape = f"requests such as 7+1/0+3, held+new, of at most {_MOST_TOKENS} tokens"
        elif isinstance(default, str):
            shape = f"one of {', '.join(_NAMES[name])}"
        else:
            shape = f"a number from {int(name == 'heads')} to {_MOST[name]}"
        raise InputError(f"{name}={value!r} in a case: expected {shape}") from None
    return bool(number) if isinstance(default, bool) else number
