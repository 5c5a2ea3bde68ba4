"""FlashInfer's sparse MLA on SM120 and SM121 (RTX 50, RTX PRO, GB10), over packed records in place.

Facts of `flashinfer.mla.trtllm_batch_decode_sparse_mla_dsv4` with `backend="sparse"`, of versions 0.6.18 to 0.7.4. The
record of 288 bytes is computed on as fp8, which loses what fp8 has not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dsv41.backends.cuda.flashinfer_backend import FlashInferBackend, FlashInferWeights, prepared_of, tables_of
from dsv41.backends.reference.layouts import resolve_layouts
from dsv41.backends.vendor import call, expect_bfloat16
from dsv41.errors import BackendError, LayoutError
from dsv41.hal.layout import CacheLayout, CacheLayouts, PagedCache, ScalePlacement
from dsv41.hal.libraries import inspect
from dsv41.hal.records import NVFP4_288, Dialect, v4_584, v41_528
from dsv41.hal.request import V4_RECORD
from dsv41.hal.types import AttnInputs, AttnOutput, LayerSpec, LayerState, Selection, StepPlan

WIDTHS = (128, 192, 256, 512, 1024)
"""Of index tables, as the oldest version has kernels for."""
_V4 = v4_584(Dialect.OCP)
_MXFP8 = v41_528(Dialect.OCP)
_V4_PAGE = 64
_DECODE_TOKENS = 64
"""Up to here the decode kernel runs, above it the prefill kernel."""
_PREFILL_HEADS = 64
"""The most that the prefill kernel takes over 528-byte records."""
_KEYS = 64
"""Of one split, whose partial output the workspace holds."""


class FlashInferSM120(FlashInferBackend):
    """`fp8_ds_mla` is the release's 528-byte record where the version reads it, with the scales where it looks for
    them, and else the 584-byte one, which `fp8_ds_mla_v4` always is."""

    name = "flashinfer-sm120"
    packed_kv_cache_dtype = "fp8_ds_mla"

    def resolve_layouts(self, kv_cache_dtype: str, index_cache_dtype: str) -> tuple[str, str, CacheLayouts]:
        found = inspect("flashinfer", None)
        name = self.packed_kv_cache_dtype if kv_cache_dtype in ("auto", "fp8") else kv_cache_dtype
        if name == self.packed_kv_cache_dtype and "record-v41" not in found.features:
            name = V4_RECORD
        readable = {V4_RECORD: "record-v4", "fp8_ds_mla": "record-v41", "nvfp4_ds_mla": "record-nvfp4"}
        if readable.get(name) not in found.features:
            names = [name for name, feature in readable.items() if feature in found.features]
            raise LayoutError(
                f"kv_cache_dtype {kv_cache_dtype!r} is not read by {self.name} with flashinfer {found.version}: "
                f"expected auto, fp8, {', '.join(names)}; ask for one of them, or upgrade flashinfer"
            )
        kv, index, layouts = resolve_layouts(name, index_cache_dtype, reader=self.name)
        if "placement-token" not in found.features:
            layouts = replace(layouts, window=_by_page(layouts.window), compressed=_by_page(layouts.compressed))
        return kv, index, layouts

    def check_pool(self, what: str, cache: PagedCache, layout: CacheLayout) -> None:
        super().check_pool(what, cache, layout)
        page_size, stride, row = cache.layout.page_size, cache.data.stride(0), layout.row_bytes
        if layout.record == _V4 and page_size != _V4_PAGE:
            raise LayoutError(
                f"{what} has pages of {page_size} rows: expected {_V4_PAGE} for {_V4.name}; allocate it so"
            )
        if layout.scale_placement is ScalePlacement.TOKEN and cache.num_pages > 1 and stride % row:
            raise LayoutError(
                f"{what} has pages {stride} bytes apart: expected a whole number of rows of {row} bytes, as the "
                "library counts them; change the page stride"
            )

    def prepare_weights(self, layer: LayerState) -> FlashInferWeights:
        for keys in (layer.spec.window, layer.spec.topk if layer.spec.ratio else 0):
            table_width(keys, self.name)  # refuses here what no step could run
        return super().prepare_weights(layer)

    def attention_bytes(self, spec: LayerSpec, tokens: int) -> int:
        # A draft block adds its own queries to the window; up to 64 of them come with the next width.
        window = table_width(spec.window + (not spec.causal), self.name)
        extra = table_width(spec.topk, self.name) if spec.ratio else 0
        return _workspace_bytes(tokens, spec.padded_heads, window, extra)

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        spec, caches, prepared = layer.spec, layer.caches, prepared_of(layer)
        assert caches is not None
        expect_bfloat16(self.name, inputs.q)
        out.rotated_back = False
        tables = tables_of(plan.extra)
        window, window_counts = tables.alone(caches.window, table_width(tables.slots.shape[1], self.name))
        compressed = None
        if selection is not None:
            assert caches.compressed is not None
            tables = tables_of(selection.derived)
            compressed = tables.alone(caches.compressed, table_width(tables.slots.shape[1], self.name))
        extra_width = compressed[0].shape[1] if compressed is not None else 0
        for part in self._parts(inputs.q):
            q = inputs.q[part]
            size = _workspace_bytes(len(q), spec.padded_heads, window.shape[1], extra_width)
            second = {}
            if compressed is not None:
                assert caches.compressed is not None
                second = {
                    "compressed_kv_cache": _pool(caches.compressed),
                    "extra_sparse_indices": compressed[0][part],
                    "extra_sparse_topk_lens": compressed[1][part],
                }
            form = {"kv_cache_format": cache_format(layer)} if "kv_cache_format" in self.parameters else {}
            call(
                self.entry,
                query=q,
                swa_kv_cache=_pool(caches.window),
                workspace_buffer=self.workspace.take("attention", size, dtype=torch.uint8),
                sparse_indices=window[part],
                swa_topk_lens=window_counts[part],
                out=out.data[part],
                bmm1_scale=spec.scale,
                bmm2_scale=1.0,
                sinks=prepared.sink,
                kv_layout="HND",
                backend="sparse",
                **second,
                **form,
            )

    def _parts(self, q: Tensor) -> Iterator[slice]:
        """The tokens of each call: all, or as many as the decode kernel takes where the prefill kernel has no room for
        so many heads."""
        tokens, heads, _ = q.shape
        narrow = heads > _PREFILL_HEADS and self.layouts.window.record == _MXFP8
        step = _DECODE_TOKENS if narrow else max(tokens, 1)
        for start in range(0, tokens, step):
            yield slice(start, min(start + step, tokens))


def table_width(keys: int, reader: str) -> int:
    """The narrowest table that holds so many keys. Raises BackendError where there is none."""
    width = next((width for width in WIDTHS if width >= keys), None)
    if width is None:
        raise BackendError(
            f"{reader} was given {keys} keys of one cache for a token: expected at most {max(WIDTHS)}; use a smaller "
            "window, top-k or draft block, or another backend"
        )
    return width


def cache_format(layer: LayerState) -> str:
    """The library's name of what a layer reads, which it could not tell from shapes."""
    caches = layer.caches
    assert caches is not None
    if caches.window.layout.record == _V4:
        return "fp8"
    mixed = layer.spec.ratio and caches.compressed is not None and caches.compressed.layout.record == NVFP4_288
    inline = caches.window.layout.scale_placement is ScalePlacement.TOKEN
    return f"fp8_dsv41{'_inline' if inline else ''}{'_fp4_ca' if mixed else ''}"


def _by_page(layout: CacheLayout) -> CacheLayout:
    return replace(layout, scale_placement=ScalePlacement.PAGE)


def _pool(cache: PagedCache) -> Tensor:
    """uint8 `[pages, page_size, record]` over the pages as they lie; where scales stand behind the rows, these borders
    are the library's idea of them alone."""
    layout = cache.layout
    rows: Tensor = cache.data[:, : layout.page_bytes].unflatten(1, (layout.page_size, layout.row_bytes))
    return rows


def _workspace_bytes(tokens: int, heads: int, window: int, extra: int) -> int:
    """For the decode kernel, a partial output (bf16) and a sum (float32) of each split, for 16 heads at least; for
    either, a sum of each head; each of these three aligned."""
    splits = -(-window // _KEYS) + -(-extra // _KEYS)
    partial = min(tokens, _DECODE_TOKENS) * max(heads, 16) * splits * (512 * 2 + 4)
    return partial + tokens * max(heads, 16) * 4 + 3 * 256
