"""Verification itself: it finds a fault in each stage, and in the layer that made it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.choices import as_sets, invalid_rows, untied_rows
from dsv41.hal.types import AttnInputs, AttnOutput, LayerState, Selection, StepPlan
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.verify import (
    QUANTISED_TOLERANCE,
    TOLERANCE,
    Comparison,
    Trace,
    compare_with_reference,
    pad_columns,
    relative_error,
)

from .toys import MAX_LEN, TOY, noise, plain_checkpoint


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return plain_checkpoint(tmp_path_factory.mktemp("verify") / "toy")


def test_errors_are_relative_to_the_norm() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert relative_error(expected.bfloat16(), expected) == 0
    assert relative_error(torch.zeros(0, 4), torch.zeros(0, 4)) == 0
    assert relative_error(torch.tensor([0.5]), torch.zeros(1)) == 0.5
    assert math.isnan(relative_error(torch.tensor([math.nan, 4]), expected))
    assert math.isnan(relative_error(expected, torch.tensor([math.nan, 4])))


@pytest.mark.parametrize("order", [[math.nan, 1e-7], [1e-7, math.nan, 0.0], [math.nan]])
def test_a_nan_is_the_largest_error_of_all_and_stays_so(order: list[float]) -> None:
    comparison = Comparison()
    for layer, error in enumerate(order):
        comparison.note(layer, error)
        comparison.note(layer, 0.0)
    assert comparison.max_relative_error == math.inf
    assert comparison.layers[order.index(math.nan) if math.nan in order else 0] == math.inf


def test_sets_and_columns() -> None:
    rows = pad_columns([torch.tensor([[2, 0]]), torch.tensor([[-1, 1, 3], [-1, -1, -1]]), torch.zeros(0, 1)])
    assert rows.tolist() == [[2, 0, -1], [-1, 1, 3], [-1, -1, -1]]
    assert as_sets(rows, 4).nonzero().tolist() == [[0, 0], [0, 2], [1, 1], [1, 3]]


class LosesAKey(ReferenceBackend):
    """Of the rows that a token sees, one is left out."""

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        window = plan.window_indices.clone()
        if layer.spec.layer_id == 3:
            window[:, -2] = -1
        super().forward_mqa(inputs, layer, selection, replace(plan, window_indices=window), out)


class ForgetsTheSink(ReferenceBackend):
    def attend(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, selection: Selection | None) -> AttnOutput:
        if layer.spec.layer_id == 3:
            sink = torch.full_like(layer.weights.attn_sink, -math.inf)
            layer = replace(layer, weights=replace(layer.weights, attn_sink=sink))
        return super().attend(inputs, layer, plan, selection)


class RotatesTwice(ReferenceBackend):
    def o_proj(self, out: AttnOutput, layer: LayerState, positions: Tensor) -> Tensor:
        if layer.spec.layer_id == 3:
            return super().o_proj(replace(out, rotated_back=True), layer, positions)
        return super().o_proj(out, layer, positions)


class WritesOneRowLate(ReferenceBackend):
    """The compressed rows of layer 1 go to the slots of their neighbours, which layer 3 reads too."""

    def prepare_inputs(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> AttnInputs:
        if layer.spec.layer_id == 1:
            slots = dict(plan.compressed_slots)
            slots[2] = torch.where(slots[2] >= 0, slots[2] + 1, -1)
            plan = replace(plan, compressed_slots=slots)
        return super().prepare_inputs(hidden, layer, plan)


class GivesNan(ReferenceBackend):
    def o_proj(self, out: AttnOutput, layer: LayerState, positions: Tensor) -> Tensor:
        projected = super().o_proj(out, layer, positions)
        if layer.spec.layer_id == 3:
            projected[-1, 0] = math.nan
        return projected


def traced(checkpoint: Checkpoint, backend: ReferenceBackend) -> Trace:
    """Two requests, in chunks and decode steps."""
    stack = AttentionStack(checkpoint, backend, max_len=MAX_LEN)
    session, trace = Session(stack, max_requests=2, max_tokens=MAX_LEN), Trace()
    requests = [session.add_request(), session.add_request()]
    hidden = [noise(TOY.num_hidden_layers, 24, TOY.hidden_size, seed=seed) for seed in range(2)]
    for start, stop in ((0, 13), (13, 22), (22, 23), (23, 24)):
        session.step({r: x[:, start:stop] for r, x in zip(requests, hidden, strict=True)}, tap=trace)
    return trace


DTYPES = [("float32", "float32", 1e-5), ("auto", "auto", 1e-3), ("fp8", "fp8", 1e-3)]


@pytest.mark.parametrize(("kv", "index", "tolerance"), DTYPES, ids=lambda value: str(value))
def test_the_reference_agrees_with_itself(checkpoint: Checkpoint, kv: str, index: str, tolerance: float) -> None:
    backend = ReferenceBackend(kv_cache_dtype=kv, index_cache_dtype=index)
    found = compare_with_reference(checkpoint, backend, traced(checkpoint, backend), 2)
    assert sorted(found.layers) == list(range(TOY.num_hidden_layers))
    assert found.max_relative_error <= tolerance
    assert kv != "float32" or found.selections_differing == 0


@pytest.mark.parametrize("faulty", [LosesAKey, ForgetsTheSink, RotatesTwice, GivesNan])
def test_a_fault_shows_in_its_layer_alone(checkpoint: Checkpoint, faulty: type[ReferenceBackend]) -> None:
    backend = faulty(kv_cache_dtype="float32", index_cache_dtype="float32")
    found = compare_with_reference(checkpoint, backend, traced(checkpoint, backend), 2)
    assert [layer for layer, error in found.layers.items() if error > 1e-3] == [3]
    assert found.max_relative_error == found.layers[3]


def test_a_fault_in_a_cache_shows_in_every_reader_of_it(checkpoint: Checkpoint) -> None:
    backend = WritesOneRowLate(kv_cache_dtype="float32", index_cache_dtype="float32")
    found = compare_with_reference(checkpoint, backend, traced(checkpoint, backend), 2)
    assert [layer for layer, error in found.layers.items() if error > 1e-3] == [1, 2, 3]


class ChoosesTheFirst(ReferenceBackend):
    """No scoring at all in layer 4."""

    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        chosen = super().select(inputs, layer, plan, published)
        if layer.spec.layer_id != 4:
            return chosen
        rows = torch.arange(TOY.index_topk).expand(plan.batch.num_tokens, -1)
        return replace(chosen, topk_indices=torch.where(rows < plan.num_visible[1][:, None], rows, -1))


class RepeatsARow(ReferenceBackend):
    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        chosen = super().select(inputs, layer, plan, published)
        rows = chosen.topk_indices.clone()
        if rows.shape[1] > 1:
            rows[-1, 1] = rows[-1, 0]
        return replace(chosen, topk_indices=rows)


class SeesTheFuture(ReferenceBackend):
    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        later = {r: (n + 1).clamp(max=plan.max_visible[r]) for r, n in plan.num_visible.items()}
        return super().select(inputs, layer, replace(plan, num_visible=later), published)


class ForgetsTheFilter(ReferenceBackend):
    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        layer = replace(layer, spec=replace(layer.spec, reads_candidates=False))
        return super().select(inputs, layer, plan, published)


class KeepsOneBlockMore(ReferenceBackend):
    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        spec = replace(layer.spec, candidate_blocks=layer.spec.candidate_blocks + 1)
        return super().select(inputs, replace(layer, spec=spec), plan, published)


class Negates(ReferenceBackend):
    def index_scores(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan) -> Tensor:
        return -super().index_scores(inputs, layer, plan)


CHOICES = {
    ChoosesTheFirst: "selections_untied",
    RepeatsARow: "selections_invalid",
    SeesTheFuture: "selections_invalid",
    ForgetsTheFilter: "selections_untied",
    KeepsOneBlockMore: "selections_invalid",
    Negates: "selections_untied",
}


@pytest.mark.parametrize("faulty", CHOICES)
def test_a_wrong_choice_is_judged_where_it_was_made(checkpoint: Checkpoint, faulty: type[ReferenceBackend]) -> None:
    backend = faulty(kv_cache_dtype="float32", index_cache_dtype="float32")
    found = compare_with_reference(checkpoint, backend, traced(checkpoint, backend), 2)
    assert found.max_relative_error <= 1e-5, "the outputs of the layers behind it are right"
    assert [failure.split()[1] for failure in found.failures] == [CHOICES[faulty]]


def test_a_wrong_decode_is_not_hidden_by_a_long_prefill(checkpoint: Checkpoint) -> None:
    backend = ReferenceBackend(kv_cache_dtype="float32", index_cache_dtype="float32")
    trace = traced(checkpoint, backend)
    last = trace._kept["output", 3, 0][-1]
    last *= 1.01
    whole, apart = (compare_with_reference(checkpoint, backend, trace, 2, prompt=p).layers[3] for p in (None, 23))
    assert apart == pytest.approx(0.01, rel=1e-2)
    assert whole < 0.5 * apart


# Choices


def test_ties_excuse_an_exchange_and_nothing_else() -> None:
    scores = torch.tensor([[5.0, 1.0, 1.0, 0.99995, 0.5]])
    allowed = torch.tensor([[True] * 5])

    def untied(found: list[int], allowed: Tensor = allowed) -> bool:
        return bool(untied_rows(torch.tensor([found]), torch.tensor([[0, 1]]), scores, allowed, 1e-4))

    assert not untied([0, 1])
    assert not untied([2, 0])
    assert not untied([0, 3])
    assert untied([0, 4])
    assert untied([1, 2])
    assert untied([0, 2], torch.tensor([[True, True, False, True, True]]))


def test_what_no_choice_may_be() -> None:
    rows = torch.tensor([[2, -1, 0], [2, 2, 0], [3, 1, 0], [-1, -1, 0], [-2, 1, 0], [-1, -1, -1]])
    visible, count = torch.tensor([3, 3, 3, 3, 3, 0]), torch.tensor([2, 2, 3, 2, 2, 0])
    assert invalid_rows(rows, visible, count).tolist() == [False, True, True, True, True, False]
    assert invalid_rows(rows[:0], visible[:0], count[:0]).tolist() == []
    assert as_sets(torch.tensor([[7, 1, -3]]), 3).tolist() == [[False, True, False]]


class Perturbed(ReferenceBackend):
    """Attention as far off as that of kernels which sum bf16 products in another order."""

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        super().forward_mqa(inputs, layer, selection, plan, out)
        generator = torch.Generator().manual_seed(layer.spec.layer_id)
        out.data *= 1 + 2e-3 * torch.randn(out.data.shape, generator=generator)


@pytest.mark.parametrize("quantize", [False, True])
def test_rounded_activations_make_more_of_a_small_difference(tmp_path: Path, quantize: bool) -> None:
    coded = load_checkpoint(make_checkpoint(tmp_path / "toy", config=TOY))
    backend, trace = Perturbed(), Trace()
    stack = AttentionStack(coded, backend, max_len=64, quantize_activations=quantize)
    session = Session(stack, max_requests=1, max_tokens=64)
    session.step({session.add_request(): noise(7, 40, TOY.hidden_size).to(stack.dtype)}, tap=trace)
    found = compare_with_reference(coded, backend, trace, 1, quantize_activations=quantize)
    assert found.failures == []
    if quantize:
        assert TOLERANCE[torch.bfloat16] / 2 < found.max_relative_error < QUANTISED_TOLERANCE
    else:
        assert found.max_relative_error < TOLERANCE[torch.bfloat16] / 2
