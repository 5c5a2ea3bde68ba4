"""Verification itself: it finds a fault in each stage, and in the layer that made it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.checkpoint import Checkpoint
from dsv41.hal.types import AttnInputs, AttnOutput, LayerState, Selection, StepPlan
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.verify import Comparison, Trace, as_sets, compare_with_reference, pad_columns, relative_error

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


def test_a_wrong_choice_is_counted_and_blamed_on_no_output(checkpoint: Checkpoint) -> None:
    class ChoosesTheWorst(ReferenceBackend):
        def select(
            self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None
        ) -> Selection:
            chosen = super().select(inputs, layer, plan, published)
            if layer.spec.layer_id != 4:
                return chosen
            rows = torch.arange(TOY.index_topk).expand(plan.batch.num_tokens, -1)
            return replace(chosen, topk_indices=torch.where(rows < plan.num_visible[1][:, None], rows, -1))

    backend = ChoosesTheWorst(kv_cache_dtype="float32", index_cache_dtype="float32")
    found = compare_with_reference(checkpoint, backend, traced(checkpoint, backend), 2)
    assert found.max_relative_error <= 1e-5
    assert found.selections_differing > 20
