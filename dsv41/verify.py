"""Does a run agree with the reference backend? What a run did is recorded at the layers' segment borders."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from dsv41.checkpoint import Checkpoint
from dsv41.choices import TIE, as_sets, block_scores, invalid_rows, untied_rows
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.layout import CacheLayouts
from dsv41.hal.records import INDEX_FP32, PLAIN_FP32
from dsv41.hal.select import select_backend
from dsv41.hal.types import AttnInputs, LayerState, Selection, StepPlan
from dsv41.session import Session
from dsv41.stack import AttentionStack

TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 2e-2}
"""Largest relative error of a layer against the reference, by activation dtype. Both quantise their caches, so one
element on a rounding border (a code step is 1/16) shows in every query that sees it: 1.7e-3 was seen over a few float32
tokens on one H200. Golden vectors, where choices between equals are settled, bind much closer."""
QUANTISED_TOLERANCE = 8e-2
"""The same where activations are rounded to MXFP8. Attention outputs that differ by 2e-3, as those of two right kernels
do, then fall on other codes, which are a step of up to 1/8 apart, twice until the layer's output: 4e-2 of small models'
outputs, as the reference shows when its own attention is perturbed by as much (`tests/model/test_verify.py`)."""
UNQUANTISED_TOLERANCE = 1e-5
"""The same in float32 where no cache quantises."""
MAX_UNTIED = 0.02
"""Share of choices that may differ by more than a tie: a query or key element on a rounding border moves a score by far
more than the last bits that moved the element."""


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
        self._kept: dict[tuple[str, int, int], list[Tensor]] = defaultdict(list)

    def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None:
        self._keep("hidden", layer, plan, inputs.hidden)

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        self.keep_selection("chosen", layer, plan, selection)
        self.keep_selection("used", layer, plan, selection)
        return selection

    def output(self, layer: LayerState, plan: StepPlan, output: Tensor) -> None:
        self._keep("output", layer, plan, output)

    def keep_selection(self, what: str, layer: LayerState, plan: StepPlan, selection: Selection) -> None:
        """Keep a selection as what the backend has "chosen" or as what the layers have "used"."""
        self._keep(what, layer, plan, selection.topk_indices)
        if selection.candidates is not None:
            self._keep(f"{what} candidates", layer, plan, selection.candidates)

    def _keep(self, what: str, layer: LayerState, plan: StepPlan, rows: Tensor) -> None:
        starts = plan.batch.query_start_loc_cpu.tolist()
        for request, (start, stop) in enumerate(pairwise(starts)):
            self._kept[what, layer.spec.layer_id, request].append(rows[start:stop])

    def hidden(self, layer: int, request: int) -> Tensor:
        return torch.cat(self._kept["hidden", layer, request])

    def output_of(self, layer: int, request: int) -> Tensor:
        return torch.cat(self._kept["output", layer, request])

    def selection_of(self, what: str, layer: int, request: int) -> Selection:
        """What was "chosen" or "used"."""
        candidates = self._kept.get((f"{what} candidates", layer, request))
        return Selection(
            pad_columns(self._kept[what, layer, request]), pad_columns(candidates) if candidates is not None else None
        )


@dataclass
class Comparison:
    """Largest relative error over layers, and that of each layer."""

    max_relative_error: float = 0.0
    layers: dict[int, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """What is past its tolerance, empty if nothing."""

    def note(self, layer: int, error: float) -> None:
        # NaN is the largest error of all; `max` would drop it, and so would the next layer.
        error = math.inf if math.isnan(error) else error
        self.layers[layer] = max(self.layers.get(layer, 0.0), error)
        self.max_relative_error = max(self.max_relative_error, error)

    def hold(self, name: str, value: float, limit: float) -> None:
        """Note a failure where `value` is above `limit`."""
        if not value <= limit:
            self.failures.append(f"{name} is {value:.3g}, above {limit:.3g}")


@dataclass
class ReferenceComparison(Comparison):
    """Of the choices made (a top-k, or the candidate blocks, of one token), how many differ from the reference's, how
    many of those by more than ties, and how many are none that anyone could make."""

    selections: int = 0
    selections_differing: int = 0
    selections_untied: int = 0
    selections_invalid: int = 0


class _Follow:
    """A tap that makes a one-request run of the reference take over the selections of a recorded one, and judges what
    that one had chosen by the reference's scores."""

    def __init__(self, reference: AttentionBackend, trace: Trace, request: int, result: ReferenceComparison) -> None:
        self.reference, self.trace, self.request, self.result = reference, trace, request, result
        self._inputs: AttnInputs | None = None
        self._candidates: Tensor | None = None

    def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None:
        self._inputs = inputs
        if layer.spec.owns_compressed:
            self._candidates = None

    def output(self, layer: LayerState, plan: StepPlan, output: Tensor) -> None: ...

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        spec = layer.spec
        chosen = self.trace.selection_of("chosen", spec.layer_id, self.request)
        used = self.trace.selection_of("used", spec.layer_id, self.request)
        assert self._inputs is not None
        visible = plan.num_visible[spec.ratio]
        scores = self.reference.index_scores(self._inputs, layer, plan).float()
        seen = torch.arange(scores.shape[1], device=scores.device) < visible[:, None]
        allowed = seen
        if spec.reads_candidates and self._candidates is not None:
            blocks = as_sets(self._candidates, -(-scores.shape[1] // spec.candidate_block_size))
            allowed = seen & blocks.repeat_interleave(spec.candidate_block_size, dim=1)[:, : scores.shape[1]]
        self._judge(chosen.topk_indices, selection.topk_indices, scores, allowed, visible)
        if spec.publishes_candidates:
            assert selection.candidates is not None
            best, blocks_seen = block_scores(scores, visible, spec.candidate_block_size)
            theirs = chosen.candidates if chosen.candidates is not None else torch.full_like(selection.candidates, -1)
            self._judge(theirs, selection.candidates, best, blocks_seen, blocks_seen.sum(-1))
            self._candidates = used.candidates
        return replace(selection, topk_indices=used.topk_indices, candidates=used.candidates)

    def _judge(self, theirs: Tensor, own: Tensor, scores: Tensor, allowed: Tensor, visible: Tensor) -> None:
        result, width = self.result, scores.shape[1]
        assert self._inputs is not None
        margin = TIE[self._inputs.hidden.dtype]
        invalid = invalid_rows(theirs, visible, (own >= 0).sum(-1))
        result.selections += len(theirs)
        result.selections_invalid += int(invalid.sum())
        result.selections_differing += int((as_sets(theirs, width) != as_sets(own, width)).any(-1).sum())
        result.selections_untied += int((untied_rows(theirs, own, scores, allowed, margin) & ~invalid).sum())


def compare_with_reference(
    checkpoint: Checkpoint,
    backend: AttentionBackend,
    trace: Trace,
    requests: int,
    *,
    prompt: int | None = None,
    quantize_activations: bool = False,
) -> ReferenceComparison:
    """Run the reference in the same records, each request in one prefill, and compare layer by layer.

    Each layer is given the inputs and the selection that the recorded run had, so an error shows in the layer that
    made it, and a choice is judged where it was made. Tokens before and after `prompt` are compared apart, so that a
    long prefill does not hide a wrong decode.
    """
    reference = select_backend("reference", device=backend.device)
    reference.layouts = backend.layouts
    result = ReferenceComparison()
    layers = [spec.layer_id for spec in checkpoint.specs]
    for request in range(requests):
        inputs = torch.stack([trace.hidden(layer, request) for layer in layers])
        tokens = inputs.shape[1]
        stack = AttentionStack(checkpoint, reference, max_len=tokens, quantize_activations=quantize_activations)
        session = Session(stack, max_requests=1, max_tokens=tokens, max_step_tokens=tokens, max_draft=0)
        outputs = session.step({session.add_request(): inputs}, tap=_Follow(reference, trace, request, result))[0]
        for layer, expected in zip(layers, outputs, strict=True):
            found = trace.output_of(layer, request)
            for part in (slice(0, prompt or tokens), slice(prompt or tokens, tokens)):
                result.note(layer, relative_error(found[part], expected[part]))
    exact = checkpoint.dtype == torch.float32 and _unquantised(backend.layouts)
    limit = UNQUANTISED_TOLERANCE if exact else TOLERANCE[checkpoint.dtype]
    if quantize_activations and checkpoint.dtype == torch.bfloat16:
        limit = QUANTISED_TOLERANCE
    result.hold("reference max_relative_error", result.max_relative_error, limit)
    result.hold("reference selections_invalid", result.selections_invalid, 0)
    result.hold("reference selections_untied", result.selections_untied, MAX_UNTIED * result.selections)
    return result


def _unquantised(layouts: CacheLayouts) -> bool:
    records = (layouts.window.record, layouts.compressed.record, layouts.index.record)
    return records == (PLAIN_FP32, PLAIN_FP32, INDEX_FP32)
