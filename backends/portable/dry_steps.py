"""Steps of layers whose memory holds nothing, to see what a step would launch. Needs no GPU and runs no kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv41.backends.portable.launch import Launch, watching
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.layout import CacheLayout, PagedCache
from dsv41.hal.types import (
    BlockScaledWeight,
    CompressorWeights,
    ForwardBatch,
    IndexerWeights,
    LayerCaches,
    LayerSpec,
    LayerState,
    LayerWeights,
    Selection,
    Weight,
)
from dsv41.hal.weights import prepare

_PAGES = 2
_RING = 4


@dataclass(frozen=True)
class Step:
    """The size of a step: `requests` that hold `held` tokens each after it, of which the last `tokens` are new."""

    requests: int
    tokens: int
    held: int

    def batch(self, specs: Sequence[LayerSpec], backend: AttentionBackend) -> ForwardBatch:
        """Its pages are page 0, over and over."""
        layouts, ratios = backend.layouts, sorted({spec.ratio for spec in specs} - {0})

        def pages(rows: int, size: int) -> Tensor:
            return torch.zeros(self.requests, -(-rows // size), dtype=torch.int32)

        return ForwardBatch.from_host(
            query_lens=[self.tokens] * self.requests,
            seq_lens=[self.held] * self.requests,
            window_pages=pages(self.held, layouts.window.page_size),
            window_page_size=layouts.window.page_size,
            compressed_pages={ratio: pages(self.held // ratio, layouts.compressed.page_size) for ratio in ratios},
            compressed_page_size={ratio: layouts.compressed.page_size for ratio in ratios},
            device=backend.device,
            causal=specs[0].causal,
        )


class DryLayers:
    """Layers of `specs` on a backend, in memory of torch's default device.

    `block` is that of fp8 weights, None = plain ones in `dtype`. Norms and compressors are used in the type that they
    are stored in: `norms` and `compressors`. `large` gives caches of more than 2**31 bytes (of addresses, not of
    memory), which kernels for AMD address in another way.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        specs: Sequence[LayerSpec],
        *,
        dtype: torch.dtype = torch.bfloat16,
        block: tuple[int, int] | None = (32, 32),
        norms: torch.dtype = torch.bfloat16,
        compressors: torch.dtype = torch.float32,
        max_len: int = 1 << 16,
        max_requests: int = 64,
        large: bool = False,
    ) -> None:
        self.backend, self.dtype, self.block, self.large = backend, dtype, block, large
        self.norms, self.compressors = norms, compressors
        self._memory = torch.zeros(0, dtype=torch.uint8)
        padded = [replace(spec, padded_heads=backend.get_padded_num_q_heads(spec.num_heads)) for spec in specs]
        cos_sin = torch.zeros(max_len, specs[0].rope_dim)
        self.layers = [LayerState(spec, self._weights(spec), cos_sin) for spec in padded]
        owners: dict[int, LayerCaches] = {}
        for layer in self.layers:
            prepare(backend, layer)
            layer.caches = self._caches(layer.spec, owners, max_requests)

    def launches(self, steps: Sequence[Step]) -> list[Launch]:
        """What these steps would launch, in order."""
        found: list[Launch] = []

        def note(launch: Launch) -> bool:
            found.append(launch)
            return False

        with watching(note):
            self.run(steps)
        return found

    @torch.no_grad()
    def run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self._run(step)

    def _run(self, step: Step) -> None:
        """As a stack runs its layers."""
        specs = [layer.spec for layer in self.layers]
        plan = self.backend.plan(step.batch(specs, self.backend), specs)
        tokens, device = step.requests * step.tokens, self.backend.device
        hidden = torch.empty(tokens, specs[0].hidden_size, dtype=self.dtype, device=device)
        published: Selection | None = None
        for layer in self.layers:
            if layer.spec.owns_compressed:
                published = None
            if not layer.spec.causal:
                self.backend.insert_window(hidden, layer, plan)
            inputs = self.backend.prepare_inputs(hidden, layer, plan)
            if layer.spec.owns_selection:
                published = self.backend.select(inputs, layer, plan, published)
                published = self.backend.prepare_selection(published, layer, plan)
            attended = self.backend.attend(inputs, layer, plan, published if layer.spec.ratio else None)
            self.backend.project(attended, layer, plan)

    def _matrix(self, rows: int, columns: int) -> Weight:
        """Zeros, the same for every matrix."""
        if self.block is None:
            return self._zeros(rows * columns * self.dtype.itemsize).view(self.dtype).view(rows, columns)
        scales = [-(-size // unit) for size, unit in zip((rows, columns), self.block, strict=True)]
        data = self._zeros(rows * columns).view(torch.float8_e4m3fn).view(rows, columns)
        return BlockScaledWeight(data, self._zeros(scales[0] * scales[1]).view(scales), self.block)

    def _zeros(self, size: int) -> Tensor:
        if len(self._memory) < size:
            self._memory = torch.zeros(size, dtype=torch.uint8)
        return self._memory[:size]

    def _weights(self, spec: LayerSpec) -> LayerWeights:
        dim, hidden, matrix = spec.head_dim, spec.hidden_size, self._matrix
        compressor = indexer = None
        if spec.owns_compressed:
            compressor = CompressorWeights(
                wkv=torch.zeros(dim, hidden, dtype=self.compressors),
                norm=torch.zeros(dim, dtype=self.norms),
                wgate=torch.zeros(dim, hidden, dtype=self.compressors) if spec.ratio > 1 else None,
            )
        if spec.owns_selection:
            indexer = IndexerWeights(
                wq_b=matrix(spec.index_heads * spec.index_dim, spec.q_lora_rank),
                weights_proj=torch.zeros(spec.index_heads, hidden, dtype=self.dtype),
                wk=torch.zeros(spec.index_dim, dim, dtype=self.dtype) if spec.owns_compressed else None,
                k_norm=torch.zeros(spec.index_dim, dtype=self.norms) if spec.owns_compressed else None,
            )
        latent = spec.o_groups * spec.o_lora_rank
        return LayerWeights(
            wq_a=matrix(spec.q_lora_rank, hidden),
            wq_b=matrix(spec.num_heads * dim, spec.q_lora_rank),
            wkv=matrix(dim, hidden),
            wo_a=matrix(latent, spec.num_heads // spec.o_groups * dim),
            wo_b=matrix(hidden, latent),
            q_norm=torch.zeros(spec.q_lora_rank, dtype=self.norms),
            kv_norm=torch.zeros(dim, dtype=self.norms),
            attn_sink=torch.zeros(spec.num_heads),
            compressor=compressor,
            indexer=indexer,
        )

    def _caches(self, spec: LayerSpec, owners: dict[int, LayerCaches], max_requests: int) -> LayerCaches:
        """A window cache of its own, and the others of its KV source."""
        layouts = self.backend.layouts
        window = self._cache(layouts.window)
        if spec.ratio == 0:
            return LayerCaches(window)
        if spec.kv_source not in owners:
            state = torch.zeros(max_requests, _RING, 2, spec.head_dim) if spec.ratio > 1 else None
            owners[int(spec.kv_source or 0)] = LayerCaches(
                window, self._cache(layouts.compressed), self._cache(layouts.index), state
            )
        return replace(owners[int(spec.kv_source or 0)], window=window)

    def _cache(self, layout: CacheLayout) -> PagedCache:
        if not self.large:
            return PagedCache.allocate(layout, _PAGES)
        pages = 2**31 // min(size for size in (layout.stride, layout.pool_page_bytes) if size) + 1
        return PagedCache(
            layout,
            torch.empty(pages, layout.stride, dtype=torch.uint8),
            torch.empty(pages, layout.pool_page_bytes, dtype=torch.uint8) if layout.pool_page_bytes else None,
            torch.ones(1) if layout.record.tensor_scale else None,
        )
