"""Captured steps with the independent chains of a layer side by side, as branches of the graph.

Most launches of a decode step neither fill the GPU nor keep its memory busy, so what each takes adds up along a chain
of them. A layer that chooses rows has three from its hidden states to attention, or two where it compresses none:

    hidden -> compressed rows ------------> index keys -.
          `-> latents, window rows -> index queries -----+-> scores -> top-k -> slots -> attention
                                 `--> queries, rotated ---------------------------------^

The first and the last have a side stream each; the middle one, the longest, stays on the step's own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from dsv41.backends.portable.backend import Codes, PortableBackend
from dsv41.backends.portable.fork import Fork
from dsv41.hal.types import AttnInputs, AttnOutput, LayerState, Selection, StepPlan


class Overlapping(PortableBackend):
    """The portable backend's segments, of which a captured step of at most `max_tokens_for_overlap` tokens runs parts
    beside one another.

    What branches read is in `AttnInputs`, which the layer holds until `attend` has joined them: a graph of
    `prepare_inputs` has `attend` too.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows, self.queries = Fork.of(self.device), Fork.of(self.device)

    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        selection = super().select(inputs, layer, plan, published)
        self.rows.join()  # also where nothing had to be scored
        return selection

    def attend(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, selection: Selection | None) -> AttnOutput:
        self.rows.join()
        self.queries.join()
        return super().attend(inputs, layer, plan, selection)

    # Parts of the segments

    def insert_compressed(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> Tensor:
        with self._beside(self.rows, len(hidden)):
            return super().insert_compressed(hidden, layer, plan)

    def _insert_index_keys(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan) -> None:
        with self._beside(self.rows, len(inputs.hidden)):
            super()._insert_index_keys(inputs, layer, plan)

    def project_queries(self, qr: Tensor, codes: Codes | None, layer: LayerState, positions: Tensor) -> Tensor:
        if not layer.spec.owns_selection:  # nothing would run beside it
            return super().project_queries(qr, codes, layer, positions)
        with self._beside(self.queries, len(qr)):
            return super().project_queries(qr, codes, layer, positions)

    def _index_queries(self, inputs: AttnInputs, layer: LayerState) -> tuple[Tensor, Tensor]:
        queries = super()._index_queries(inputs, layer)
        self.rows.join()  # here, since whatever scores comes next, and reads the keys
        return queries

    def _beside(self, fork: Fork, tokens: int) -> AbstractContextManager[None]:
        return fork.branch() if tokens <= self.max_tokens_for_overlap and fork.is_open else nullcontext()
