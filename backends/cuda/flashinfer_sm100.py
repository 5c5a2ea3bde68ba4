"""FlashInfer's trtllm-gen sparse MLA on SM100, SM103 and SM107, over plain rows: bf16, or fp8 with one scale.

Facts of `flashinfer.mla.trtllm_batch_decode_sparse_mla_dsv4` with `backend="trtllm-gen"`, of versions 0.6.18 to 0.7.4.

Each token goes as a request of its own with one query. The library reads only the first
`clamp(seq_len - (q_len - 1 - query), 0, 128)` of a token's window columns, so a request of q queries could say no other
window than the causal one that ends with it. A request of one query says any: its `seq_len` is the number of its window
rows. Prefill and decode are then the same, and no index in use is ever -1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv41.backends.cuda.flashinfer_backend import FlashInferBackend, prepared_of, tables_of
from dsv41.backends.cuda.flashinfer_tables import clear_empty
from dsv41.backends.cuda.query import quantize_query
from dsv41.backends.reference.layouts import resolve_layouts
from dsv41.backends.vendor import call, expect_bfloat16, load
from dsv41.errors import BackendError, LayoutError
from dsv41.hal.builtin import INSTALL_FLASHINFER
from dsv41.hal.layout import CacheLayout, CacheLayouts, PagedCache
from dsv41.hal.types import AttnInputs, AttnOutput, LayerCaches, LayerSpec, LayerState, Selection, StepPlan

WINDOW_COLUMNS = 128
WORKSPACE_BYTES = 128 << 20
_COLUMNS = 4
"""Table widths are multiples of it."""


class FlashInferSM100(FlashInferBackend):
    """Over fp8 rows, queries are fp8 too, divided by `query_scale` float32 `[1]`, which may be set at any time. Numbers
    beyond the largest of fp8 are clamped; `clamped_queries` int64 `[1]` counts them on the device."""

    name = "flashinfer-sm100"
    packed_kv_cache_dtype = "fp8_e4m3"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.query_scale = torch.ones(1, device=self.device)
        self.clamped_queries = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._counter_bytes = load("flashinfer.utils", INSTALL_FLASHINFER).get_trtllm_gen_multi_ctas_kv_counter_bytes
        self._cleared: dict[str, Tensor] = {}

    def resolve_layouts(self, kv_cache_dtype: str, index_cache_dtype: str) -> tuple[str, str, CacheLayouts]:
        name = self.packed_kv_cache_dtype if kv_cache_dtype in ("auto", "fp8") else kv_cache_dtype
        if name not in ("bfloat16", "fp8_e4m3"):
            raise LayoutError(
                f"kv_cache_dtype {kv_cache_dtype!r} is not read by {self.name}: expected auto, fp8, bfloat16 or "
                "fp8_e4m3; ask for one of them, or use another backend"
            )
        return resolve_layouts(name, index_cache_dtype, reader=self.name)

    def check_caches(self, spec: LayerSpec, caches: LayerCaches) -> None:
        super().check_caches(spec, caches)
        window = caches.window.tensor_scale
        compressed = caches.compressed.tensor_scale if spec.ratio and caches.compressed is not None else None
        if window is None or compressed is None or window.is_meta:
            return
        if not torch.equal(window, compressed):
            raise LayoutError(
                f"the caches of {spec.name} have the tensor scales {window.item()} and {compressed.item()}: expected "
                "the same, since the library applies one to both; give both that"
            )

    def check_pool(self, what: str, cache: PagedCache, layout: CacheLayout) -> None:
        super().check_pool(what, cache, layout)
        stride = cache.data.stride(0) if cache.num_pages > 1 else layout.row_bytes
        if stride % layout.row_bytes:
            raise LayoutError(
                f"{what} has pages {stride} bytes apart: expected a whole number of rows of {layout.row_bytes} bytes, "
                "as the library counts them; change the page stride"
            )
        apart = cache.data.stride(0) != cache.layout.page_bytes
        if apart and "sparse_indices_are_storage_offsets" not in self.parameters:
            raise LayoutError(
                f"{what} has pages {cache.data.stride(0)} bytes apart: expected {cache.layout.page_bytes}, as this "
                "version of flashinfer knows no others; "
                f"upgrade it with {INSTALL_FLASHINFER}, or give the pages no padding"
            )

    def prepare_weights(self, layer: LayerState) -> Any:
        if layer.spec.window > WINDOW_COLUMNS:
            raise BackendError(
                f"{layer.spec.name} has a window of {layer.spec.window} rows: expected at most {WINDOW_COLUMNS}, as "
                "the kernel has built in; use another backend for this model"
            )
        return super().prepare_weights(layer)

    def attention_bytes(self, spec: LayerSpec, tokens: int) -> int:
        return WORKSPACE_BYTES

    def reserve(self, max_tokens: int, max_requests: int, max_len: int) -> int:
        super().reserve(max_tokens, max_requests, max_len)
        self._zeros("attention", WORKSPACE_BYTES)
        for heads in {spec.padded_heads for spec in self.specs}:
            self._counters(max_tokens, heads)
        return self.workspace.bytes

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        spec, caches, prepared = layer.spec, layer.caches, prepared_of(layer)
        assert caches is not None
        expect_bfloat16(self.name, inputs.q)
        out.rotated_back = False
        tokens, heads, _ = inputs.q.shape
        if tokens == 0:
            return
        seen = tables_of(plan.extra)
        keys = seen.slots.shape[1]
        if selection is None:
            # What does not fit the window's columns, as of a draft block, stands in those behind, in the same cache.
            second = caches.window
            table, counts = seen.alone(caches.window, max(WINDOW_COLUMNS, -(-keys // _COLUMNS) * _COLUMNS))
            lengths = counts.clamp(min=WINDOW_COLUMNS)
        else:
            assert caches.compressed is not None and keys <= WINDOW_COLUMNS
            second, chosen = caches.compressed, tables_of(selection.derived)
            window, counts = seen.alone(caches.window, WINDOW_COLUMNS)
            width = -(-chosen.slots.shape[1] // _COLUMNS) * _COLUMNS
            table, lengths = chosen.behind(window, caches.compressed, width)

        query = inputs.q
        scales: dict[str, float | Tensor] = {"bmm1_scale": spec.scale, "bmm2_scale": 1.0}
        scale = caches.window.tensor_scale
        if scale is not None:
            query = quantize_query(query, spec.num_heads, plan.token_request, self.query_scale, self.clamped_queries)
            scales = {"bmm1_scale": scale * self.query_scale * spec.scale, "bmm2_scale": scale}
        newer = {
            "sparse_indices_are_storage_offsets": True,
            "multi_ctas_kv_counter_buffer": self._counters(tokens, heads),
        }
        call(
            self.entry,
            query=query.unsqueeze(1),
            swa_kv_cache=_pool(caches.window),
            compressed_kv_cache=_pool(second),
            workspace_buffer=self._zeros("attention", WORKSPACE_BYTES),
            sparse_indices=table,
            sparse_topk_lens=lengths,
            # A request has at least its query; a token that sees nothing is cleared below.
            seq_lens=counts.clamp(1, WINDOW_COLUMNS),
            out=out.data.unsqueeze(1),
            sinks=prepared.sink,
            kv_layout="HND",
            backend="trtllm-gen",
            **scales,
            **{name: value for name, value in newer.items() if name in self.parameters},
        )
        clear_empty(out.data, counts, lengths, WINDOW_COLUMNS)

    def _counters(self, tokens: int, heads: int) -> Tensor:
        """Semaphores of the kernel, which leaves them zero."""
        return self._zeros("counters", int(self._counter_bytes(tokens, heads, self._multiprocessors())))

    def _multiprocessors(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).multi_processor_count
        return self.facts.multiprocessors if self.facts is not None else 0

    def _zeros(self, name: str, size: int) -> Tensor:
        """A workspace that held zeros when it was first given to the library."""
        buffer = self.workspace.reserve(name, size)
        if self._cleared.get(name) is not buffer:
            self._cleared[name] = buffer.zero_()
        return buffer


def _pool(cache: PagedCache) -> Tensor:
    """`[pages, page_size, 512]` in bf16 or e4m3, over the pages as they lie."""
    layout = cache.layout
    dtype = torch.float8_e4m3fn if layout.record.tensor_scale else torch.bfloat16
    rows: Tensor = cache.data[:, : layout.page_bytes].unflatten(1, (layout.page_size, layout.row_bytes))
    return rows.view(dtype)
