"""Where the FlashMLA backend chooses by our kernels: with torch, or emulation, in their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dsv41.backends.cuda import index, index_choices
from dsv41.backends.cuda.choice import Choice
from dsv41.backends.cuda.flashmla import FlashMLABackend
from dsv41.backends.portable import backend as portable_backend
from dsv41.backends.portable.backend import PortableBackend
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.hal.device import Device
from dsv41.hal.types import AttnInputs, AttnOutput, LayerSpec, LayerState, Selection, StepPlan
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint, small_config

from ...model.portables import ChoosesByTorch
from ...model.toys import signs
from .common import BF16, POISON, OnCpu
from .emulator.fixture import EmulatedGPU
from .test_index import Choosing, best_of, expected_choice, positions_of

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are torch here: test_index.py runs ours"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:8 heads a rank are padded:UserWarning"),
]

FREE, PUBLISHES, RESTRICTED = 1, 4, 6
"""Layers that choose among all rows, and publish candidates, and are restricted to them."""
OURS, MISSING = Choice("sm_90", None), Choice("sm_90", "no compiler")


class Selects(FlashMLABackend):
    """With `choice` as it is told, and each selection compared with that of the portable kernels. `ours` are the calls
    of our kernels: (layer, tokens)."""

    def __init__(self, told: Choice = OURS) -> None:
        self.told = told
        super().__init__(device="cpu", facts=Device.gpu("sm_90", 0))
        self.ours: list[tuple[int, int]] = []
        self.selected: list[int] = []

    def read_choice(self) -> Choice:
        return self.told

    # What is before the choice by torch, which is faster than Triton's interpreter, and no attention after it.
    prepare_inputs = ReferenceBackend.prepare_inputs
    insert_window = ReferenceBackend.insert_window
    o_proj = OnCpu.o_proj
    _product = OnCpu._product

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        out.data.zero_()

    def complete_plan(self, plan: StepPlan, specs: Sequence[LayerSpec]) -> StepPlan:
        return plan

    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        found = super().select(inputs, layer, plan, published)
        self.selected.append(layer.spec.layer_id)
        if not self.told.ours:
            return found
        self.choice = MISSING
        expected = super().select(inputs, layer, plan, published)
        self.choice = self.told
        assert torch.equal(found.topk_indices, expected.topk_indices)
        assert (found.candidates is None) == (expected.candidates is None)
        if found.candidates is not None and expected.candidates is not None:
            assert torch.equal(found.candidates, expected.candidates)
        return found

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
        self.ours.append((layer.spec.layer_id, len(scores)))
        self.score(queries, layer, plan, part, candidates, scores, best)

    def score(
        self,
        queries: tuple[Tensor, Tensor],
        layer: LayerState,
        plan: StepPlan,
        part: slice,
        candidates: Tensor | None,
        scores: Tensor,
        best: Tensor | None,
    ) -> None:
        PortableBackend._score(self, queries, layer, plan, part, candidates, scores)
        if best is None:
            return
        for token, visible in enumerate(plan.num_visible[layer.spec.ratio][part].tolist()):
            end = -(-min(visible, scores.shape[1]) // index.BLOCK)
            _, seen = positions_of(scores.shape[1], visible, None, "cpu")
            best[token, :end] = best_of(scores[token], seen)[:end]

    def choose_on_hopper(
        self,
        scores: Tensor,
        best: Tensor | None,
        visible: Tensor,
        candidates: Tensor | None,
        num_rows: int,
        num_blocks: int,
    ) -> tuple[Tensor, Tensor]:
        index._check_choice(scores, best, visible, candidates, num_rows, num_blocks, scores.shape[1])
        case = Choosing(scores, best, visible, candidates, num_rows, num_blocks)
        rows, blocks = zip(*(expected_choice(case, token) for token in range(len(scores))), strict=True)
        return torch.stack(rows), torch.stack(blocks)


class Emulated(Selects):
    """With our kernels."""

    def score(self, *arguments: Any) -> None:
        FlashMLABackend.score_on_hopper(self, *arguments)

    choose_on_hopper = FlashMLABackend.choose_on_hopper


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = Path(tmp_path_factory.mktemp("choices"))
    layers = (FREE, PUBLISHES, RESTRICTED)
    config = replace(small_config(), candidate_block_size=8, index_topk=4, candidate_topk_blocks=5)
    make_checkpoint(path, layers=layers, seed=0, config=config)
    return load_checkpoint(path, dtype=BF16, layers=layers)


def run(on: Selects, checkpoint: Checkpoint, page_size: int = 64) -> Selects:
    """A request of 42 tokens and one of 3, whose rows are chosen by torch, then three more of the one and two of the
    other; in caches that hold NaN before."""
    stack = AttentionStack(checkpoint, on, max_len=64)
    session = Session(stack, max_requests=2, max_step_tokens=48, page_size=page_size)
    for caches in session.caches.values():
        for cache in (caches.window, caches.compressed, caches.index):
            if cache is not None:
                cache.data.fill_(POISON)
    requests = [session.add_request() for _ in range(2)]

    def step(*counts: int) -> None:
        drawn = [signs(3, count, checkpoint.config.hidden_size, seed=count).to(BF16) for count in counts]
        session.step(dict(zip(requests, drawn, strict=True)))

    by_torch = {name: getattr(ChoosesByTorch, name) for name in ("select", "index_scores", "_insert_index_keys")}
    with mock.patch.multiple(type(on), **by_torch):
        step(42, 3)
    step(3, 2)
    assert on.selected == [FREE, PUBLISHES, RESTRICTED]
    return on


def test_all_choices_are_ours(checkpoint: Checkpoint) -> None:
    assert run(Selects(), checkpoint).ours == [(layer, 5) for layer in (FREE, PUBLISHES, RESTRICTED)]


@pytest.mark.parametrize("told", [MISSING, replace(OURS, named="flashmla")], ids=str)
def test_else_they_are_the_portable_kernels(told: Choice, checkpoint: Checkpoint) -> None:
    assert not told.ours
    assert run(Selects(told), checkpoint).ours == []


def test_pages_that_ours_do_not_read_are_the_portable_kernels(checkpoint: Checkpoint) -> None:
    assert run(Selects(), checkpoint, page_size=8).ours == []
    assert run(Selects(), checkpoint, page_size=48).ours == []


def test_more_than_ours_hold_is_the_portable_kernels(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "holds", lambda columns, restricted: restricted and columns == 40)
    on = Selects()
    run(on, checkpoint)
    # Scores alone are ours, which have no such bound.
    assert on.ours == [(layer, 5) for layer in (FREE, PUBLISHES, RESTRICTED)]


def test_tokens_are_scored_in_parts(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_backend, "SCORE_BYTES", 2 * 128 * 2)
    assert run(Selects(), checkpoint).ours[:3] == [(FREE, 2), (FREE, 2), (FREE, 1)]


def test_emulated_kernels_select_what_the_portable_ones_do(checkpoint: Checkpoint, emulated_gpu: EmulatedGPU) -> None:
    assert len(run(Emulated(), checkpoint).ours) == 3


@pytest.mark.parametrize("tokens", [1, 7, 100, 5000])
def test_reserved_room_is_enough_for_every_step(
    tokens: int, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for those that see less, of which more tokens are scored at a time."""
    budget, longest = 1 << 17, 40000
    for module in (portable_backend, index_choices):
        monkeypatch.setattr(module, "SCORE_BYTES", budget)
    on = Selects()
    # A layer that publishes candidates has room for them in float32, so one that does not.
    AttentionStack(load_checkpoint(checkpoint.path, dtype=BF16, layers=(FREE,)), on, max_len=longest)
    on.reserve(tokens, 1, longest)
    reserved = on.workspace.bytes
    for columns in (1, 8, 9, 127, 128, 129, 500, 1024, 1025, 2049, 7999, longest // 2):
        for part in portable_backend._parts(tokens, columns, BF16):
            on._scratch("scores", part.stop - part.start, columns, BF16)
            on._scratch("blocks", part.stop - part.start, -(-columns // index.BLOCK), BF16)
    assert on.workspace.bytes == reserved
