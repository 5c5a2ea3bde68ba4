"""The choice of rows and candidate blocks by the kernels of `index.py`, for a backend on Hopper."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.backends.cuda import index
from dsv41.backends.portable.backend import SCORE_BYTES, PortableBackend
from dsv41.hal.layout import CacheLayout
from dsv41.hal.types import LayerSpec, LayerState, StepPlan


class ChoicesOnHopper(PortableBackend):
    """Index scores and top-k by our kernels where `chooses_on_hopper`, of MXFP4 keys; else by the portable ones."""

    @property
    def chooses_on_hopper(self) -> bool:
        """Whether the kernels can be used here at all."""
        raise NotImplementedError

    def reserve(self, max_tokens: int, max_requests: int, max_len: int) -> int:
        super().reserve(max_tokens, max_requests, max_len)
        for spec in self.specs:
            if spec.owns_selection and self._serves(spec, self.layouts.index, torch.bfloat16):
                columns, size = max_len // spec.ratio, torch.bfloat16.itemsize
                # Of steps that see less, more tokens are scored at a time, so rows are bounded as they are together.
                scored = min(max_tokens * columns, max(SCORE_BYTES // size, columns))
                self.workspace.reserve("blocks", (scored // index.BLOCK + max_tokens * index.PADDING) * size)
        return self.workspace.bytes

    # Parts of the portable backend's segments

    def _choose(
        self,
        queries: tuple[Tensor, Tensor],
        layer: LayerState,
        plan: StepPlan,
        part: slice,
        columns: int,
        candidates: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        spec, caches, visible = layer.spec, layer.caches, plan.num_visible[layer.spec.ratio][part]
        assert caches is not None and caches.index is not None
        restricts = candidates is not None
        if not self._serves(spec, caches.index.layout, dtype) or not index.holds(columns, restricts):
            return super()._choose(queries, layer, plan, part, columns, candidates, dtype)
        scores = self._scratch("scores", len(visible), columns, dtype)
        blocks = spec.candidate_blocks if spec.publishes_candidates else 0
        best = None
        if not restricts and index.chooses_blocks(columns, blocks):
            best = self._scratch("blocks", len(visible), -(-columns // index.BLOCK), dtype)
        self.score_on_hopper(queries, layer, plan, part, candidates, scores, best)
        restriction = candidates[part] if candidates is not None else None
        rows, chosen = self.choose_on_hopper(scores, best, visible, restriction, spec.topk, blocks)
        return rows, chosen if blocks else None

    def _score(
        self,
        queries: tuple[Tensor, Tensor],
        layer: LayerState,
        plan: StepPlan,
        part: slice,
        candidates: Tensor | None,
        out: Tensor,
    ) -> None:
        assert layer.caches is not None and layer.caches.index is not None
        if self._serves(layer.spec, layer.caches.index.layout, out.dtype):
            self.score_on_hopper(queries, layer, plan, part, candidates, out, None)
        else:
            super()._score(queries, layer, plan, part, candidates, out)

    def score_on_hopper(
        self,
        queries: tuple[Tensor, Tensor],
        layer: LayerState,
        plan: StepPlan,
        part: slice,
        candidates: Tensor | None,
        scores: Tensor,
        best: Tensor | None,
    ) -> None:
        assert layer.caches is not None and layer.caches.index is not None
        keys, ratio = layer.caches.index, layer.spec.ratio
        index.index_scores(
            queries[0][part],
            queries[1][part],
            plan.batch.compressed_tables[ratio].pages,
            plan.token_request[part],
            plan.num_visible[ratio][part],
            candidates[part] if candidates is not None else None,
            keys.data,
            keys.layout.page_size,
            scores,
            best,
        )

    def choose_on_hopper(
        self,
        scores: Tensor,
        best: Tensor | None,
        visible: Tensor,
        candidates: Tensor | None,
        num_rows: int,
        num_blocks: int,
    ) -> tuple[Tensor, Tensor]:
        chosen: tuple[Tensor, Tensor] = index.index_choice(scores, best, visible, candidates, num_rows, num_blocks)
        return chosen

    def _serves(self, spec: LayerSpec, layout: CacheLayout, dtype: torch.dtype) -> bool:
        return self.chooses_on_hopper and index.serves(spec, layout, dtype)
