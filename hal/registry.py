"""Every backend that is known by name. Knowing one imports none: a spec is data, and names its class by string."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from dsv41.errors import BackendError
from dsv41.hal.paths import Path
from dsv41.hal.request import INDEX_CACHE_DTYPES, KV_CACHE_DTYPES, UNSPECIFIC_KV_CACHE_DTYPES, Reason
from dsv41.hal.requirements import Check

if TYPE_CHECKING:
    from dsv41.hal.backend import AttentionBackend
    from dsv41.hal.device import Device

ENTRY_POINT_GROUP = "dsv41.backends"
FALLBACK = "reference"
"""The backend that is always a candidate, and always the last one."""


@dataclass(frozen=True)
class BackendSpec:
    """What selection knows of a backend before it imports it.

    `target` is "module:Class"; None is a backend that this version knows but does not contain. `contract_version` is
    the `dsv41.hal.backend.CONTRACT_VERSION` that it was written against. Among the usable backends the highest
    `priority` wins; built-in vendor backends have 70 to 90, the portable one 10. `kv_cache_dtypes` and
    `index_cache_dtypes` are the specific names that it reads somewhere; `packed_kv_cache_dtype` is the one that "auto"
    becomes. `paths` say what its ops use, where that differs. `libraries` are imported in a subprocess before the
    backend is. `devices` finds those devices of this machine that `torch.cuda` does not list, and imports no vendor's
    library. `slow_on_gpu` makes an automatic choice of it on a GPU say so. `fault` is why a spec found by entry point
    cannot be used at all.

    Raises BackendError for a name, target or format that cannot be.
    """

    name: str
    summary: str
    contract_version: int
    target: str | None
    kv_cache_dtypes: tuple[str, ...]
    packed_kv_cache_dtype: str
    index_cache_dtypes: tuple[str, ...] = ("mxfp4", "fp8")
    requirements: tuple[Check, ...] = ()
    paths: tuple[Path, ...] = ()
    libraries: tuple[str, ...] = ()
    devices: Callable[[], Sequence[Device]] | None = None
    priority: int = 50
    slow_on_gpu: bool = False
    fault: Reason | None = None

    def __post_init__(self) -> None:
        if self.fault:
            return
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", self.name) or self.name == "auto":
            raise BackendError(f"backend name {self.name!r}: use lower-case letters, digits, '-' and '_', not 'auto'")
        if self.target is not None and not re.fullmatch(r"[\w.]+:\w+", self.target):
            raise BackendError(f"target {self.target!r} of backend {self.name!r}: write it as 'package.module:Class'")
        for what, names, valid in (
            ("kv_cache_dtypes", self.kv_cache_dtypes, set(KV_CACHE_DTYPES) - set(UNSPECIFIC_KV_CACHE_DTYPES)),
            ("packed_kv_cache_dtype", (self.packed_kv_cache_dtype,), set(self.kv_cache_dtypes)),
            ("index_cache_dtypes", self.index_cache_dtypes, set(INDEX_CACHE_DTYPES) - {"auto"}),
        ):
            if not names or not set(names) <= valid:
                raise BackendError(f"{what} {names} of backend {self.name!r}: use names of {', '.join(sorted(valid))}")


_registered: dict[str, BackendSpec] = {}


def register(spec: BackendSpec) -> None:
    """Make a backend known to this process.

    Raises BackendError where its name is taken.
    """
    if any(known.name == spec.name for known in all_specs()):
        raise BackendError(
            f"a backend called {spec.name!r} is already known: choose another name, or unregister it first"
        )
    _registered[spec.name] = spec


def unregister(name: str) -> None:
    """Forget a backend that `register` made known.

    Raises BackendError for any other name.
    """
    if name not in _registered:
        raise BackendError(f"{name!r} was not registered in this process: it has {', '.join(_registered) or 'none'}")
    del _registered[name]


def all_specs() -> tuple[BackendSpec, ...]:
    """Every known backend: built in, registered, or found by entry point. Best first, the fallback last."""
    from dsv41.hal.builtin import BUILTIN

    known = {spec.name: spec for spec in (*BUILTIN, *_registered.values())}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        spec = _from_entry_point(point, known)
        known[spec.name] = spec
    return tuple(sorted(known.values(), key=lambda spec: (spec.name == FALLBACK, -spec.priority, spec.name)))


def readers(kv_cache_dtype: str, specs: Iterable[BackendSpec]) -> list[str]:
    """The names of those of `specs` that read a specific KV cache format somewhere."""
    return [spec.name for spec in specs if kv_cache_dtype in spec.kv_cache_dtypes]


def load(spec: BackendSpec) -> type[AttentionBackend]:
    """Import a backend's class.

    Raises BackendError saying what is wrong with the target: absent, failing at import, of another kind or contract.
    """
    from dsv41.hal.backend import CONTRACT_VERSION, AttentionBackend

    if spec.target is None:
        raise BackendError(f"backend {spec.name!r} is not part of this version")
    module, _, attribute = spec.target.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise BackendError(f"{spec.target} cannot be loaded: {_words(error)}") from error
    if not (isinstance(found, type) and issubclass(found, AttentionBackend)):
        raise BackendError(f"{spec.target} is no subclass of dsv41.hal.AttentionBackend")
    if found.contract_version != CONTRACT_VERSION:
        raise BackendError(f"{spec.target} has contract version {found.contract_version}, dsv41 has {CONTRACT_VERSION}")
    return found


def _from_entry_point(point: EntryPoint, known: dict[str, BackendSpec]) -> BackendSpec:
    """The spec that an entry point leads to, or a spec with a fault: a broken plug-in is listed, never raised."""
    owner = point.dist.name if point.dist else "an unknown distribution"
    name = point.name if point.name not in known else f"{point.name}@{owner}"
    try:
        spec = point.load()
    except ImportError as error:
        return _faulty(name, owner, Reason("library", f"{owner} cannot be imported ({_words(error)}): reinstall it"))
    except (Exception, SystemExit) as error:
        return _faulty(name, owner, Reason("bug", f"{point.value} fails with {_words(error)}: report it to {owner}"))
    if not isinstance(spec, BackendSpec):
        return _faulty(name, owner, Reason("bug", f"{point.value} is no BackendSpec: report it to {owner}"))
    if spec.name != point.name:
        text = f"{point.value} calls itself {spec.name!r}, its entry point {point.name!r}: report it to {owner}"
        return _faulty(name, owner, Reason("bug", text))
    if name != point.name:
        text = f"the name {point.name!r} is taken by another backend: report it to {owner}, which must choose another"
        return _faulty(name, owner, Reason("bug", text))
    return spec


def _faulty(name: str, owner: str, fault: Reason) -> BackendSpec:
    return BackendSpec(
        name=name,
        summary=f"from {owner}",
        contract_version=0,
        target=None,
        kv_cache_dtypes=(),
        packed_kv_cache_dtype="",
        fault=fault,
    )


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
