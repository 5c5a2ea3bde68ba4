"""FlashMLA's fused kernel for SM100 and SM103: queries as projected in, MXFP8 for `wo_a` out.

One call rotates the queries, attends over both caches, rotates the output back and casts it. It works token by token,
so prefill and decode are one call, and it does not split a token's keys: one cluster of SMs a token.

What needs permuted weights is in `mega_weights.py`; everything else of a layer is the portable backend's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv41.backends.cuda.layouts import record_view
from dsv41.backends.cuda.mega_weights import GROUP_HEADS, QUERY_RUN, MegaWeights
from dsv41.backends.portable.backend import Codes, PortableBackend
from dsv41.backends.portable.gemm import grouped_linear
from dsv41.backends.portable.quantize import GROUP, quantize_mxfp8
from dsv41.backends.vendor import call, load
from dsv41.errors import BackendError, InputError, LayoutError
from dsv41.hal.builtin import INSTALL_FLASHMLA
from dsv41.hal.device import Device
from dsv41.hal.layout import CacheLayout, CacheLayouts, PagedCache, ScalePlacement
from dsv41.hal.libraries import inspect
from dsv41.hal.records import HEAD_DIM, ROPE_DIM, Dialect, v4_584
from dsv41.hal.requirements import padded_heads
from dsv41.hal.types import AttnInputs, AttnOutput, LayerCaches, LayerSpec, LayerState, Selection, StepPlan

MODULE = "flash_mla.fused_norm_rope_attn_rope_cast"
SCALE_LAYOUT = "ue8m0_words_by_token"
"""`AttnOutput` of this backend: `data` uint8 e4m3 codes (OCP) `[T, Hp / 8, 8 * D]`, in runs as `mega_weights` says, and
`scale` int32 `[T, Hp / 8, 8 * D / 128]`, the UE8M0 bytes of four times 32 of them in a word, the first in the lowest
byte; the words of all tokens stand side by side."""
_HEADS = (64, 128)
_NAMES = {"auto": "nvfp4_ds_mla", "fp8": "fp8_ds_mla"}
_READS = ("nvfp4_ds_mla", "fp8_ds_mla", "fp8_ds_mla_v4")
_PLACEMENTS = {"placement-page": ScalePlacement.PAGE, "placement-token": ScalePlacement.TOKEN}
_V4 = v4_584(Dialect.OCP)
_COLUMNS = 8
"""Index tables are this many int32 wide, or a multiple: what the alignment of their rows and NVFP4 rows ask for."""
_BASE_ALIGNMENT = 16


@dataclass(frozen=True)
class IndexRows:
    """Rows that tokens read: int32 `indices` `[T, n]`, -1 = none, all -1 from int32 `lengths` `[T]` on."""

    indices: Tensor
    lengths: Tensor

    @staticmethod
    def of(slots: Tensor) -> IndexRows:
        """Of slots int64 `[T, K]`, -1 = none."""
        width = max(_COLUMNS, -(-slots.shape[1] // _COLUMNS) * _COLUMNS)
        indices = pad(slots.to(torch.int32), (0, width - slots.shape[1]), value=-1)
        count = torch.arange(1, width + 1, dtype=torch.int32, device=slots.device)
        return IndexRows(indices, torch.where(indices >= 0, count, 0).amax(1))


@dataclass(frozen=True)
class MegaPlan:
    """`StepPlan.extra`: int32 `positions` `[T]` (0 for padding, which has no rows) and what the window shows."""

    positions: Tensor
    window: IndexRows


class FlashMLAMegaBackend(PortableBackend):
    """FlashMLA's fused attention over packed records, between portable projections with permuted weights.

    Raises BackendError where the library is missing or has no such kernel.
    """

    name = "flashmla-mega"
    packed_kv_cache_dtype = "nvfp4_ds_mla"

    def __init__(
        self,
        *,
        device: torch.device | str = "cpu",
        kv_cache_dtype: str = "auto",
        index_cache_dtype: str = "auto",
        facts: Device | None = None,
    ) -> None:
        if not self.fuses_rotation:
            raise BackendError(
                f"{self.name} was asked to leave rotations out of attention: expected fuses_rotation, since its kernel "
                "has them inside; time it with rotations, or use another backend"
            )
        self.placement = _placement()
        super().__init__(device=device, kv_cache_dtype=kv_cache_dtype, index_cache_dtype=index_cache_dtype, facts=facts)
        self.library: Any = load(MODULE, f"mend it with {INSTALL_FLASHMLA}")

    # The contracts

    def get_padded_num_q_heads(self, num_heads: int) -> int:
        padded = padded_heads(_HEADS, num_heads) if num_heads > 0 and num_heads % GROUP_HEADS == 0 else None
        if padded is None:
            raise BackendError(
                f"{self.name} was given {num_heads} query heads on a rank: expected a multiple of {GROUP_HEADS} up to "
                f"{_HEADS[-1]}; use another tp_size, or another backend"
            )
        return padded

    def resolve_layouts(self, kv_cache_dtype: str, index_cache_dtype: str) -> tuple[str, str, CacheLayouts]:
        kv = _NAMES.get(kv_cache_dtype, kv_cache_dtype)
        if kv not in _READS:
            raise LayoutError(
                f"kv_cache_dtype {kv_cache_dtype!r} is nothing that {self.name} reads: expected one of "
                f"{', '.join([*_NAMES, *_READS])}; ask for one of these, or use another backend"
            )
        kv, index, layouts = super().resolve_layouts(kv, index_cache_dtype)
        window, compressed = (self._placed(layout) for layout in (layouts.window, layouts.compressed))
        return kv, index, CacheLayouts(window, compressed, layouts.index)

    def _placed(self, layout: CacheLayout) -> CacheLayout:
        """With scales where the installed build looks for them, which no size of a tensor tells."""
        return layout if layout.record == _V4 else replace(layout, scale_placement=self.placement)

    def check_caches(self, spec: LayerSpec, caches: LayerCaches) -> None:
        super().check_caches(spec, caches)
        for kind in ("window", "compressed"):
            if (cache := getattr(caches, kind)) is not None:
                layout: CacheLayout = getattr(self.layouts, kind)
                cache.expect(layout.with_page_size(cache.layout.page_size), self.name)
                _check_memory(f"the {kind} cache of {spec.name}", cache)

    def alloc_attn_out(self, inputs: AttnInputs, layer: LayerState) -> AttnOutput:
        """Of no token: the library brings its own memory, which `forward_mqa` puts in."""
        groups = layer.spec.padded_heads // GROUP_HEADS
        data, scale = (
            inputs.q.new_empty(0, groups, n, dtype=dtype) for n, dtype in zip(_widths(), _DTYPES, strict=True)
        )
        return AttnOutput(data.view(torch.uint8), True, scale, SCALE_LAYOUT, inputs.q.dtype)

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        tokens, heads = inputs.q.shape[:2]
        if tokens == 0:
            return
        spec, caches, step = layer.spec, layer.caches, plan.extra
        assert caches is not None and isinstance(step, MegaPlan)
        selected: dict[str, Any] = {}
        if selection is not None:
            rows = selection.derived
            assert caches.compressed is not None and isinstance(rows, IndexRows)
            selected = {
                "extra_k_cache": record_view(caches.compressed),
                "extra_indices_in_kvcache": rows.indices,
                "extra_topk_length": rows.lengths,
            }
        codes, scales, _ = call(
            self.library.decode,
            enable_q_norm=False,
            rms_norm_eps=spec.eps,
            token_positions=step.positions,
            is_rope_neox_style=False,
            rope_dim=spec.rope_dim,
            cos_sin_cache=layer.cos_sin,
            n_wv_group=heads // GROUP_HEADS,
            num_per_channels=GROUP,
            use_tma_aligned_col_major_sf=True,
            round_sf=True,
            use_packed_ue8m0=True,
            q=inputs.q,
            k_cache=record_view(caches.window),
            indices_in_kvcache=step.window.indices,
            sm_scale=spec.scale,
            d_v=spec.head_dim,
            attn_sink=_prepared(layer).sink,
            topk_length=step.window.lengths,
            **selected,
        )
        for what, found, width, dtype in zip(("codes", "scales"), (codes, scales), _widths(), _DTYPES, strict=True):
            expected = (tokens, heads // GROUP_HEADS, width)
            if found.shape != expected or found.dtype != dtype:
                raise BackendError(
                    f"the {what} that {MODULE}.decode returned are {found.dtype} {list(found.shape)}: expected {dtype} "
                    f"{list(expected)}; this build is newer than this backend, use another backend or build"
                )
        out.data, out.scale = codes.view(torch.uint8), scales

    def o_proj(self, out: AttnOutput, layer: LayerState, positions: Tensor) -> Tensor:
        """The scales become bytes row by row, one small copy; the codes go to `wo_a` as they are, whatever its form."""
        spec, prepared = layer.spec, _prepared(layer)
        assert out.scale_layout == SCALE_LAYOUT and out.scale is not None
        codes = out.data[:, : spec.o_groups]  # groups behind are padded heads
        scales = out.scale[:, : spec.o_groups].contiguous().view(torch.uint8)
        latent = torch.empty(len(codes), prepared.wo_a.rows, dtype=out.dtype, device=codes.device)
        wo_a = prepared.wo_a
        grouped_linear(codes, scales, wo_a.data, wo_a.scale, *wo_a.block, latent)
        quantize = spec.quantize_activations and prepared.wo_b.scale is not None
        return self._product(latent, prepared.wo_b, quantize_mxfp8(latent) if quantize else None)

    # Hooks

    def complete_plan(self, plan: StepPlan, specs: Sequence[LayerSpec]) -> StepPlan:
        positions = torch.where(plan.token_request >= 0, plan.batch.positions, 0).to(torch.int32)
        return replace(plan, extra=MegaPlan(positions, IndexRows.of(plan.window_indices)))

    def complete_selection(self, slots: Tensor) -> IndexRows:
        return IndexRows.of(slots)

    def prepare_weights(self, layer: LayerState) -> MegaWeights:
        """As `MegaWeights.made_of`. Raises BackendError too, for a layer that the kernel is not built for."""
        spec = layer.spec
        found = (spec.num_heads / spec.o_groups, spec.head_dim, spec.rope_dim)
        if found != (GROUP_HEADS, HEAD_DIM, ROPE_DIM):
            raise BackendError(
                f"{spec.name} has {spec.num_heads} heads of {spec.head_dim} with {spec.rope_dim} rotated, in "
                f"{spec.o_groups} groups: expected {GROUP_HEADS} heads of {HEAD_DIM} with {ROPE_DIM} rotated in each, "
                f"which the kernel of {self.name} has built in; use another backend for this model"
            )
        super().prepare_weights(layer)
        return MegaWeights.made_of(layer)

    def attention_bytes(self, spec: LayerSpec, tokens: int) -> int:
        """None: the library takes what it needs from torch's allocator."""
        return 0

    # Parts of the segments

    def _queries(self, qr: Tensor, codes: Codes | None, layer: LayerState) -> Tensor:
        """Unrotated queries in the kernel's order, and zeros for padded heads, which are between the others."""
        spec = layer.spec
        if qr.dtype != torch.bfloat16:
            raise InputError(
                f"activations of {spec.name} are {qr.dtype}: expected torch.bfloat16, the one type that {self.name} "
                "computes in; load the checkpoint with dtype=torch.bfloat16"
            )
        q = self._product(qr, _prepared(layer).wq_b, codes)
        if padding := spec.padded_heads - spec.num_heads:
            runs = q.view(len(q), spec.head_dim // QUERY_RUN, spec.num_heads * QUERY_RUN)
            q = pad(runs, (0, padding * QUERY_RUN))
        return q.view(len(q), spec.padded_heads, spec.head_dim)


_DTYPES = (torch.float8_e4m3fn, torch.int32)


def _widths() -> tuple[int, int]:
    """Codes of a group, and words of their scales."""
    codes = GROUP_HEADS * HEAD_DIM
    return codes, codes // GROUP // 4


def _prepared(layer: LayerState) -> MegaWeights:
    assert isinstance(layer.prepared, MegaWeights)
    return layer.prepared


def _placement() -> ScalePlacement:
    """Where the installed build looks for the scales of V4.1 records: builds read same-sized records in two ways."""
    found = inspect("flash_mla", torch.__version__)
    known = [place for feature, place in _PLACEMENTS.items() if feature in found.features]
    if found.problem or "mega" not in found.features or len(known) != 1:
        state = found.problem or (f"{found.version} has no such kernel" if found.installed else "is not installed")
        raise BackendError(
            f"flash_mla {state}: expected a build from 20260910 on, with fused attention; install one with "
            f"{INSTALL_FLASHMLA}"
        )
    return known[0]


def _check_memory(what: str, cache: PagedCache) -> None:
    """Raise LayoutError where the kernel could not walk the pages of a cache in the right record and placement."""
    layout, stride, unit = cache.layout, cache.data.stride(0), cache.layout.record.value_bytes
    # Pages whose scales follow all rows are walked in rows of values. Of builds that read scales after each row it is
    # not known: so whole rows that are aligned as well, which any way of walking them divides.
    by_token = layout.scale_placement is ScalePlacement.TOKEN
    step = math.lcm(layout.record.alignment, layout.record.bytes) if by_token else unit
    if stride % step:
        raise LayoutError(
            f"{what} ({layout.record.name}) has pages {stride} bytes apart: expected a multiple of {step}, as the "
            f"kernel walks them; use {-(-stride // step) * step}, or pages of 64 rows"
        )
    if cache.data.data_ptr() % _BASE_ALIGNMENT:
        raise LayoutError(
            f"{what} ({layout.record.name}) starts at address {cache.data.data_ptr():#x}: expected a multiple of "
            f"{_BASE_ALIGNMENT} bytes; align it"
        )
    if max(cache.num_slots, cache.num_pages * (stride // unit)) >= 2**31:
        raise LayoutError(
            f"{what} has {cache.num_pages} pages of {stride} bytes: expected fewer than 2**31 rows of {unit} bytes, "
            "which the kernel counts in int32; use fewer pages"
        )
