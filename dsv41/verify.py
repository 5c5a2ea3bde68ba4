"""Does a run agree with the reference backend? What a run did is recorded at the layers' segment borders."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from dsv41.checkpoint import Checkpoint
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.select import select_backend
from dsv41.hal.types import AttnInputs, LayerState, Selection, StepPlan
from dsv41.session import Session
from dsv41.stack import AttentionStack

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
"""Largest relative error of a layer against the reference, by activation dtype. Both quantise their caches, so one
element on a rounding border (a code step is 1/16) shows in every query that sees it."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected; 0 for nothing at all."""
    difference, norm = (found.float() - expected.float()).norm(), expected.float().norm()
    return float(difference / norm) if norm > 0 else float(difference)


def pad_columns(rows: list[Tensor], fill: int = -1) -> Tensor:
    """Concatenate `[n, K]` tensors of different K, filling on the right."""
    width = max((part.shape[1] for part in rows), default=0)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1]), value=fill) for part in rows])


class Trace:
    """A tap that keeps each layer's inputs, selections and outputs, by layer id and place of the request in the step.

    Every step must name the same requests in the same order.
    """

    def __init__(self) -> None:
        self._hidden: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self._output: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self._topk: dict[tuple[int, int], list[Tensor]] = defaultdict(list)

    def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None:
        self._keep(self._hidden, layer, plan, inputs.hidden)

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        self._keep(self._topk, layer, plan, selection.topk_indices)
        return selection

    def output(self, layer: LayerState, plan: StepPlan, output: Tensor) -> None:
        self._keep(self._output, layer, plan, output)

    @staticmethod
    def _keep(store: dict[tuple[int, int], list[Tensor]], layer: LayerState, plan: StepPlan, rows: Tensor) -> None:
        starts = plan.batch.query_start_loc_cpu.tolist()
        for request, (start, stop) in enumerate(pairwise(starts)):
            store[layer.spec.layer_id, request].append(rows[start:stop])

    def hidden(self, layer: int, request: int) -> Tensor:
        return torch.cat(self._hidden[layer, request])

    def output_of(self, layer: int, request: int) -> Tensor:
        return torch.cat(self._output[layer, request])

    def topk(self, layer: int, request: int) -> Tensor:
        return pad_columns(self._topk[layer, request])


class _Follow:
    """A tap that makes a one-request run take over the selections of a recorded one."""

    def __init__(self, trace: Trace, request: int) -> None:
        self.trace, self.request, self.differing = trace, request, 0

    def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None: ...

    def output(self, layer: LayerState, plan: StepPlan, output: Tensor) -> None: ...

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        theirs = self.trace.topk(layer.spec.layer_id, self.request)
        width = plan.max_visible[layer.spec.ratio]
        self.differing += int((as_sets(theirs, width) != as_sets(selection.topk_indices, width)).any(-1).sum())
        return replace(selection, topk_indices=theirs)


def as_sets(indices: Tensor, width: int) -> Tensor:
    """bool `[T, width]`: which positions each row of `indices` (-1 = none) names."""
    member = torch.zeros(indices.shape[0], width + 1, dtype=torch.bool, device=indices.device)
    member.scatter_(1, torch.where(indices >= 0, indices.long(), width), True)
    return member[:, :width]


@dataclass
class Comparison:
    """Largest relative error over layers, that of each layer, and in how many tokens the selections differ."""

    max_relative_error: float = 0.0
    layers: dict[int, float] = field(default_factory=dict)
    selections_differing: int = 0

    def note(self, layer: int, error: float) -> None:
        # NaN is the largest error of all; `max` would drop it, and so would the next layer.
        error = math.inf if math.isnan(error) else error
        self.layers[layer] = max(self.layers.get(layer, 0.0), error)
        self.max_relative_error = max(self.max_relative_error, error)


def compare_with_reference(
    checkpoint: Checkpoint,
    backend: AttentionBackend,
    trace: Trace,
    requests: int,
    *,
    quantize_activations: bool = False,
) -> Comparison:
    """Run the reference in the same records, each request in one prefill, and compare layer by layer.

    Each layer is given the inputs and the selection that the recorded run had, so an error shows in the layer that
    made it.
    """
    reference = select_backend("reference", device=backend.device)
    reference.layouts = backend.layouts
    result = Comparison()
    layers = [spec.layer_id for spec in checkpoint.specs]
    for request in range(requests):
        inputs = torch.stack([trace.hidden(layer, request) for layer in layers])
        tokens = inputs.shape[1]
        stack = AttentionStack(checkpoint, reference, max_len=tokens, quantize_activations=quantize_activations)
        session = Session(stack, max_requests=1, max_tokens=tokens, max_step_tokens=tokens, max_draft=0)
        follow = _Follow(trace, request)
        outputs = session.step({session.add_request(): inputs}, tap=follow)[0]
        for layer, expected in zip(layers, outputs, strict=True):
            result.note(layer, relative_error(trace.output_of(layer, request), expected))
        result.selections_differing += follow.differing
    return result
