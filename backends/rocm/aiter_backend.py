"""aiter's sparse MLA (gfx942, gfx950), records in place; everything around it is the portable backend's.

Facts of `aiter.ops.triton.attention.sparse_mla.sparse_mla_fwd` as in the sources of autumn 2026. Prefill and decode are
one call: each token has a row of slots in a ragged stream for the window and in another for the compressed rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dsv41.backends.portable.output import empty_codes
from dsv41.backends.portable.weights import PortableWeights
from dsv41.backends.reference.layouts import resolve_layouts
from dsv41.backends.rocm.base import RocmBackend
from dsv41.backends.rocm.index_scores import ScoresByAiter
from dsv41.backends.rocm.layouts import check_readable, fp8_keys, mxfp4_keys
from dsv41.backends.rocm.ragged import Ragged
from dsv41.backends.vendor import call, expect_bfloat16, load
from dsv41.errors import BackendError, LayoutError
from dsv41.hal.builtin import INSTALL_AITER
from dsv41.hal.layout import CacheLayouts, PagedCache
from dsv41.hal.records import Dialect, plain_fp8
from dsv41.hal.request import UNSPECIFIC_KV_CACHE_DTYPES, V4_RECORD
from dsv41.hal.types import AttnInputs, AttnOutput, LayerCaches, LayerSpec, LayerState, Selection, StepPlan

_MODULE = "aiter.ops.triton.attention.sparse_mla"
_PACKED, _BF16, _FP8 = "fp8_ds_mla", "bfloat16", "fp8_e4m3"
_EPILOGUE = {"inv_rope_positions", "inv_rope_cos_sin_cache", "out_mxfp8"}
_CALL_BYTES = 2**31 - 1
"""Of queries, and of outputs: the library's offsets into them have 32 bits."""
_FARTHEST = 1e30
"""A sink at which nothing in float32 tells it from -inf or inf."""


@dataclass(frozen=True, kw_only=True)
class AiterWeights(PortableWeights):
    """With the `sink` float32 `[H]`, finite.

    A token without a row has its sink alone in the denominator. Where that is -inf the library divides 0 by 0, and at
    inf it subtracts inf from inf; at numbers as far away it gives what these mean.
    """

    sink: Tensor


@dataclass(frozen=True)
class AiterPlan:
    """`StepPlan.extra`: the window rows of all tokens, and `positions` int64 `[T]` to rotate back at, 0 for padding."""

    window: Ragged
    positions: Tensor


class AiterBackend(ScoresByAiter, RocmBackend):
    """Attention by aiter, in bfloat16, of as many heads as there are. On gfx950 over 584-byte records, or plain rows in
    bf16 or fp8 (OCP); on gfx942 over plain fp8 rows in its own dialect, FNUZ, alone.

    Over 584-byte records the library also rotates its output back, and quantises it where the output projection wants
    MXFP8, if the installed version can. It is imported by the first step, or before by `library`.
    """

    name = "aiter"
    packed_kv_cache_dtype = _PACKED
    fuses_rotation = False
    trusts_cache_bytes = True

    @cached_property
    def library(self) -> Any:
        """The library's module of sparse MLA. Raises BackendError where it cannot be imported."""
        return load(_MODULE, INSTALL_AITER)

    @cached_property
    def finishes_output(self) -> bool:
        """Whether attention rotates its output back and can quantise it."""
        known = inspect.signature(self.library.sparse_mla_fwd).parameters.keys()
        return self.kv_cache_dtype == _PACKED and known >= _EPILOGUE

    # The contracts

    def resolve_layouts(self, kv_cache_dtype: str, index_cache_dtype: str) -> tuple[str, str, CacheLayouts]:
        """On gfx950 `auto`, `fp8` and the names of packed records all mean the 584-byte one. On gfx942 `fp8` means
        plain rows; `auto` is refused there, as one scale for all rows is coarser than what others make of it.

        Index keys in `fp8` lie as the paged logits of the arch read them, and on gfx950 those in `mxfp4` too.
        """
        packed = (*UNSPECIFIC_KV_CACHE_DTYPES, _PACKED, V4_RECORD)
        known = {
            "gfx942": dict.fromkeys(("fp8", _FP8), _FP8),
            "gfx950": {**dict.fromkeys(packed, _PACKED), _BF16: _BF16, _FP8: _FP8},
        }
        if self.arch not in known:
            raise BackendError(
                f"{self.name} was made for {self.arch}: expected {' or '.join(known)}, which its kernels are built "
                "for; use another backend"
            )
        names = known[self.arch]
        if kv_cache_dtype not in names:
            raise LayoutError(
                f"kv_cache_dtype {kv_cache_dtype!r} is none that {self.name} reads on {self.arch}: expected "
                f"{', '.join(names)}; ask for one of these, or use another backend"
            )
        name = names[kv_cache_dtype]
        record = V4_RECORD if name == _PACKED else name
        _, index, layouts = resolve_layouts(record, index_cache_dtype, reader=self.name)
        if self.arch == "gfx942":
            rows = replace(layouts.window, record=plain_fp8(Dialect.FNUZ))
            layouts = CacheLayouts(rows, rows, layouts.index)
        keys = {
            "gfx942": {"fp8": fp8_keys(Dialect.FNUZ)},
            "gfx950": {"fp8": fp8_keys(Dialect.OCP), "mxfp4": mxfp4_keys()},
        }
        return name, index, replace(layouts, index=keys[self.arch].get(index, layouts.index))

    def check_caches(self, spec: LayerSpec, caches: LayerCaches) -> None:
        super().check_caches(spec, caches)
        check_readable(f"the window cache of {spec.name}", caches.window, self.layouts.window)
        if spec.ratio and caches.compressed is not None:
            check_readable(f"the compressed cache of {spec.name}", caches.compressed, self.layouts.compressed)

    def alloc_attn_out(self, inputs: AttnInputs, layer: LayerState) -> AttnOutput:
        quantised = layer.spec.quantize_activations and _prepared(layer).wo_a.scale is not None
        if quantised and self.finishes_output:
            return empty_codes(inputs.q, layer.spec.num_heads)
        return super().alloc_attn_out(inputs, layer)

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        q = inputs.q
        expect_bfloat16(self.name, q)
        out.rotated_back = self.finishes_output
        tokens = max(1, _CALL_BYTES // (q.shape[1] * q.shape[2] * q.element_size()))
        for first in range(0, len(q), tokens):
            self._attend(q, layer, selection, plan, out, first, min(first + tokens, len(q)))

    # Hooks

    def prepare_weights(self, layer: LayerState) -> AiterWeights:
        sink = layer.weights.attn_sink.float().clamp(-_FARTHEST, _FARTHEST)
        return AiterWeights(**vars(super().prepare_weights(layer)), sink=sink)

    def attention_bytes(self, spec: LayerSpec, tokens: int) -> int:
        """None: the library takes what it needs from torch's allocator."""
        return 0

    def complete_plan(self, plan: StepPlan, specs: Sequence[LayerSpec]) -> StepPlan:
        window = Ragged.of(plan.window_indices)
        return replace(plan, extra=AiterPlan(window, plan.batch.positions.clamp(min=0)))

    def complete_selection(self, slots: Tensor) -> Ragged:
        return Ragged.of(slots)

    # The call

    def _attend(
        self,
        q: Tensor,
        layer: LayerState,
        selection: Selection | None,
        plan: StepPlan,
        out: AttnOutput,
        first: int,
        last: int,
    ) -> None:
        """The tokens `first : last` of a step."""
        spec, caches, step = layer.spec, layer.caches, plan.extra
        assert caches is not None and isinstance(step, AiterPlan)
        window = step.window.of_tokens(first, last)
        arguments: dict[str, Any] = {
            "q": q[first:last],
            "kv_buffer": _pages(caches.window),
            "kv_indptr": window.indptr,
            "kv_indices": window.indices,
            "softmax_scale": spec.scale,
            # All of a row is key and value; its rotated dims are no part behind it.
            "kv_lora_rank": spec.head_dim,
            "qk_rope_head_dim": 0,
            # A row that is missing is left out of the stream.
            "has_invalid": False,
            "attn_sink": _prepared(layer).sink,
        }
        if caches.window.tensor_scale is not None:
            arguments["kv_scale"] = caches.window.tensor_scale
        if selection is not None:
            assert caches.compressed is not None and isinstance(selection.derived, Ragged)
            chosen = selection.derived.of_tokens(first, last)
            arguments |= {
                "extra_kv": _pages(caches.compressed),
                "extra_indptr": chosen.indptr,
                "extra_indices": chosen.indices,
            }
            if caches.compressed.tensor_scale is not None:
                arguments["extra_kv_scale"] = caches.compressed.tensor_scale
        if out.rotated_back:
            arguments |= {
                "inv_rope_positions": step.positions[first:last],
                "inv_rope_cos_sin_cache": layer.cos_sin,
            }
        if out.scale is None:
            arguments["out"] = out.data[first:last]
        else:
            arguments["out_mxfp8"] = (out.data[first:last].view(torch.float8_e4m3fn), out.scale[first:last])
        call(self.library.sparse_mla_fwd, **arguments)


def _prepared(layer: LayerState) -> AiterWeights:
    assert isinstance(layer.prepared, AiterWeights)
    return layer.prepared


def _pages(cache: PagedCache) -> Tensor:
    """`[pages, page_size, 584]` uint8, or `[pages, page_size, 512]` in the dtype of plain rows, over the pages as they
    lie. fp8 says its dialect, so that the library refuses the one that its arch has not."""
    layout = cache.layout
    rows: Tensor = cache.data[:, : layout.page_bytes].unflatten(1, (layout.page_size, -1))
    match layout.record.dialect:
        case None:
            return rows.view(torch.bfloat16)
        case dialect if not layout.record.tensor_scale:
            assert dialect is Dialect.OCP
            return rows
        case Dialect.OCP:
            return rows.view(torch.float8_e4m3fn)
        case Dialect.FNUZ:
            return rows.view(torch.float8_e4m3fnuz)
