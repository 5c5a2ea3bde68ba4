"""The backend under check: how one is made, what it declares, and the layers that are run on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any

import torch

from dsv41.attention import DeepseekV41Attention
from dsv41.checkpoint import Checkpoint
from dsv41.config import DeepseekV41Config
from dsv41.errors import BackendError, LayoutError
from dsv41.hal import registry
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.layout import CacheLayouts
from dsv41.hal.probe import probe
from dsv41.hal.request import INDEX_CACHE_DTYPES, KV_CACHE_DTYPES
from dsv41.hal.select import explain_backends, select_backend
from dsv41.hal.types import LayerWeights
from dsv41.rope import cos_sin_table
from dsv41.testing.case import Case
from dsv41.testing.clause import Inapplicable
from dsv41.testing.geometry import GEOMETRIES, ROLES, checkpoint

Factory = Callable[..., AttentionBackend]
"""Takes `device`, `kv_cache_dtype`, `index_cache_dtype` and `facts`, as a backend's class does."""

_INTERPRETER = "TRITON_INTERPRET"


class Subject:
    """A backend on one device.

    `make` makes it, `name` is what it was asked for by, `geometry` the name of the models that it is checked on.
    `unsupported` is what its port declares not to support: a reason for each named capability. `notes` are for the
    report.
    """

    def __init__(
        self,
        name: str,
        make: Factory,
        device: torch.device | str = "cpu",
        *,
        geometry: str = "small",
        facts: Any = None,
        unsupported: Mapping[str, str] | None = None,
        notes: tuple[str, ...] = (),
        spec: registry.BackendSpec | None = None,
        seed: int = 0,
    ) -> None:
        self.name, self.device, self.geometry, self.spec, self.seed = name, torch.device(device), geometry, spec, seed
        self.unsupported, self.notes = dict(unsupported or {}), notes
        self._make = make
        self.facts = facts
        """The `Device`, where the machine was asked."""
        self._backends: dict[Any, AttentionBackend] = {}
        self._layers: dict[Any, DeepseekV41Attention] = {}
        self.answers: dict[str, str | None] = {}
        """What `needs.py` found out, by capability."""
        self.kept: dict[Any, Any] = {}
        """What clauses made and others look at again."""

    @staticmethod
    def of(target: str | Factory | None, device: str | None = None, **options: Any) -> Subject:
        """The subject of a name, a class or factory, "module:Class", or None, which is what this machine would use.

        A class is made as it is, whatever selection would say of it. Raises BackendError for a name that is unknown or
        cannot run on the device.
        """
        if isinstance(target, str) and ":" in target:
            target = _imported(target)
        if target is None or isinstance(target, str):
            return _of_name(target, device, **options)
        where = torch.device(device or "cpu")
        facts = probe().device(str(where)) if where.type == "cuda" else None
        name = f"{target.__module__}:{getattr(target, '__qualname__', repr(target))}"
        return Subject(name, target, where, facts=facts, **options)

    @property
    def device_key(self) -> str:
        """What `--device` takes for its device, which torch may know by another name."""
        return self.facts.key if self.facts is not None else str(self.device)

    # What it declares

    @cached_property
    def plain(self) -> AttentionBackend:
        """The backend as it is without any wish."""
        return self.backend("auto", "auto")

    def backend(self, kv: str, index: str) -> AttentionBackend:
        """With these cache dtypes. Raises Inapplicable where it refuses them."""
        if (kv, index) not in self._backends:
            try:
                self._backends[kv, index] = self.fresh(kv, index)
            except LayoutError as error:
                raise Inapplicable(f"it refuses kv {kv}, index {index}: {error}") from error
        return self._backends[kv, index]

    def fresh(self, kv: str = "auto", index: str = "auto") -> AttentionBackend:
        """Another instance, which nothing has used."""
        return self._make(device=self.device, kv_cache_dtype=kv, index_cache_dtype=index, facts=self.facts)

    def takes(self, kv: str = "auto", index: str = "auto") -> bool:
        try:
            self.backend(kv, index)
        except Inapplicable:
            return False
        return True

    @cached_property
    def kv_cache_dtypes(self) -> list[str]:
        """The specific names that it takes, each once."""
        taken = [self.backend(name, "auto").kv_cache_dtype for name in KV_CACHE_DTYPES if self.takes(name)]
        return list(dict.fromkeys(taken))

    @cached_property
    def index_cache_dtypes(self) -> list[str]:
        taken = [self.backend("auto", name).index_cache_dtype for name in INDEX_CACHE_DTYPES if self.takes(index=name)]
        return list(dict.fromkeys(taken))

    @cached_property
    def head_counts(self) -> list[int]:
        """Of 1 to 128, those that it takes."""
        return [heads for heads in range(1, 129) if self.padded(heads) is not None]

    def padded(self, heads: int) -> int | None:
        """What a head count is padded to; None where it is refused as the contract says."""
        try:
            return self.plain.get_padded_num_q_heads(heads)
        except BackendError:
            return None

    @property
    def default_heads(self) -> int:
        """2, or the fewest that it takes above."""
        return next((heads for heads in self.head_counts if heads >= 2), 1)

    @property
    def interpreted(self) -> bool:
        """Whether kernels run in Triton's interpreter."""
        return os.environ.get(_INTERPRETER) == "1"

    # What is run on it

    def config(self, heads: int) -> DeepseekV41Config:
        return GEOMETRIES[self.geometry](heads)

    def checkpoint(self, heads: int, dtype: str, seed: int = 0) -> Checkpoint:
        """Weights of the statistics of real ones, in fp8."""
        return checkpoint(self.geometry, heads, dtype, seed, self.device)

    def weights(self, case: Case, seed: int = 0) -> LayerWeights:
        """Those of a case's layer, as in the checkpoint. A layer gets a copy, in case its backend spoils it."""
        found = self.checkpoint(case.heads, case.dtype, seed).weights[ROLES[case.layer]]
        if case.sinks == "mixed":
            found = replace(found, attn_sink=_mixed_sinks(found.attn_sink))
        return found

    def layer(
        self, backend: AttentionBackend, case: Case, role: str | None = None, seed: int = 0
    ) -> DeepseekV41Attention:
        """A layer of a case's model on a backend, the same one for the same question.

        Raises Inapplicable for heads that the backend refuses.
        """
        number = ROLES[role or case.layer]
        key = (id(backend), number, case.heads, case.dtype, case.quantize, case.sinks, seed)
        if key not in self._layers:
            if self.padded(case.heads) is None:
                raise Inapplicable(f"it refuses {case.heads} heads")
            loaded = self.checkpoint(case.heads, case.dtype, seed)
            spec = replace(loaded.specs[number], quantize_activations=case.quantize)
            table = cos_sin_table(loaded.config, spec.ratio, 4096, self.device)
            weights = copied(self.weights(replace(case, layer=role or case.layer), seed))
            self._layers[key] = DeepseekV41Attention(spec, weights, backend, table)
        return self._layers[key]

    def reference(self, layouts: CacheLayouts) -> AttentionBackend:
        """The reference, in the same records."""
        key = ("reference", layouts)
        if key not in self._backends:
            spec = next(spec for spec in registry.all_specs() if spec.name == registry.FALLBACK)
            self._backends[key] = registry.load(spec)(device=self.device)
            self._backends[key].layouts = layouts
        return self._backends[key]


def copied(tree: Any) -> Any:
    """Weights in memory of their own."""
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{part.name: copied(getattr(tree, part.name)) for part in fields(tree)})
    return tree


def _mixed_sinks(sinks: torch.Tensor) -> torch.Tensor:
    """Of which each head's differs from its neighbours' by far, and every third head has none."""
    heads = torch.arange(len(sinks), device=sinks.device)
    return torch.where(heads % 3 == 1, -torch.inf, 3.0 * (heads % 2) + 1.0).to(sinks.dtype)


def _selected(backend: AttentionBackend | None) -> str | None:
    """The name that selection knows a backend by, which its class may not."""
    return backend.selection.chosen if backend is not None and backend.selection is not None else None


def _imported(path: str) -> Factory:
    module, _, name = path.partition(":")
    try:
        found: Factory = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BackendError(f"backend {path!r} cannot be imported ({error}): expected 'package.module:Class'") from error
    if not (isinstance(found, type) and issubclass(found, AttentionBackend)):
        raise BackendError(f"backend {path!r} is {found!r}: expected a class that derives from AttentionBackend")
    return found


def _of_name(name: str | None, device: str | None, **options: Any) -> Subject:
    chosen, geometry = None, options.pop("geometry", None)
    problem: BackendError | None = None
    for candidate in [geometry] if geometry else GEOMETRIES:
        config = GEOMETRIES[candidate](8)
        try:
            chosen = select_backend(name, device=device, config=config)
        except BackendError as error:
            problem = problem or error
            continue
        geometry = candidate
        break
    spec = next((spec for spec in registry.all_specs() if spec.name == (_selected(chosen) or name)), None)
    if chosen is None:
        assert problem is not None
        if spec is None or os.environ.get(_INTERPRETER) != "1" or device not in (None, "cpu"):
            raise BackendError(
                f"{problem}\nA backend of Triton kernels alone can be checked without a GPU: set {_INTERPRETER}=1"
            ) from problem
        reasons = explain_backends(name, device="cpu").candidate(spec.name).reasons
        notes = ("interpreter: selection would not choose it here: " + " ".join(map(str, reasons)),)
        return Subject(spec.name, registry.load(spec), "cpu", notes=notes, spec=spec, **options)
    return Subject(
        chosen.name,
        type(chosen),
        chosen.device,
        geometry=geometry or "small",
        facts=chosen.facts,
        spec=spec,
        **options,
    )
