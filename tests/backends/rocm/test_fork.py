"""The one fork of captured steps, over recorded streams, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dsv41.backends.portable.fork import Fork
from dsv41.backends.rocm.base import RocmBackend
from dsv41.checkpoint import load_checkpoint
from dsv41.hal.types import AttnInputs, LayerState, StepPlan
from dsv41.session import Session
from dsv41.stack import AttentionStack

from ...model.portables import Interpreted
from ...model.toys import MAX_LEN, TOY, signs
from ..portable.streams import Lifetimes, Streams

GPU = torch.cuda.is_available()
ON_CPU = pytest.mark.skipif(GPU, reason="streams are recorded where there are none")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Noting(RocmBackend, Interpreted):
    """Notes on which stream each branch runs, and where attention begins."""

    def note(self, what: str) -> None:
        streams: Any = self.fork._streams
        if streams is not None:
            streams.log.append(f"{what} on {streams.current.name}")

    def project_inputs(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> AttnInputs:
        self.note("queries")
        return super().project_inputs(hidden, layer, plan)

    def insert_compressed(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> Tensor:
        self.note("compressed")
        return super().insert_compressed(hidden, layer, plan)

    def forward_mqa(self, *given: Any) -> None:
        self.note("attention")
        super().forward_mqa(*given)


def step(path: Path, streams: Streams | None, tokens: int = 4, layers: tuple[int, ...] = (1, 2)) -> Tensor:
    backend = Noting()
    backend.fork = Fork(backend.device, streams)
    stack = AttentionStack(load_checkpoint(path, dtype=torch.float32, layers=list(layers)), backend, max_len=MAX_LEN)
    session = Session(stack, max_requests=1)
    return session.step({session.add_request(): signs(len(layers), tokens, TOY.hidden_size)})[0]


@ON_CPU
def test_under_capture_compression_runs_beside_the_queries_and_joins_before_attention(dyadic: Path) -> None:
    """Once a layer that compresses, each part once, and the step gives what it gives in one stream."""
    streams = Streams("side")
    found = step(dyadic, streams)
    assert streams.log == [
        "side waits for main",
        "compressed on side",
        "queries on main",
        "main waits for side",
        "attention on main",
        "queries on main",  # layer 2 reads the rows of layer 1
        "attention on main",
    ]
    assert torch.equal(found, step(dyadic, None))


@ON_CPU
def test_what_the_branch_reads_is_held_until_it_is_joined(dyadic: Path) -> None:
    streams = Streams("side")
    with Lifetimes(streams) as lifetimes:
        step(dyadic, streams)
    assert "main waits for side" in streams.log
    assert lifetimes.freed == []


@ON_CPU
@pytest.mark.parametrize(("capturing", "most"), [(False, 256), (True, 3)])
def test_otherwise_a_step_runs_in_one_stream(
    dyadic: Path, capturing: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside a graph, and with more tokens than the limit."""
    monkeypatch.setattr(RocmBackend, "max_tokens_for_overlap", most)
    streams = Streams("side", capturing=capturing)
    step(dyadic, streams, layers=(1,))
    assert streams.log == ["compressed on main", "queries on main", "attention on main"]


def test_without_streams_nothing_forks() -> None:
    assert not Fork.of(torch.device("cpu")).is_open


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_captured_step_with_a_fork_is_the_eager_one_bit_for_bit(dyadic: Path) -> None:
    """torch.cuda is the same interface on CUDA and on HIP. Every layer, and replays over other numbers."""
    opened: list[bool] = []

    class Forked(RocmBackend):
        fuses_rotation = False

        def insert_compressed(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> Tensor:
            opened.append(torch.cuda.current_stream() != torch.cuda.default_stream() and self.fork.is_open)
            return super().insert_compressed(hidden, layer, plan)

    checkpoint = load_checkpoint(dyadic, device="cuda", dtype=torch.float32)
    stack = AttentionStack(checkpoint, Forked(device="cuda"), max_len=MAX_LEN)
    eager, captured = (Session(stack, max_requests=2, max_step_tokens=8, page_size=4) for _ in range(2))
    captured.capture(4, num_requests=2, layer_inputs=True)
    assert any(opened)
    assert not all(opened), "the run before is eager"
    for session in (eager, captured):
        assert [session.add_request() for _ in range(2)] == [0, 1]
    for number, counts in enumerate(({0: 4}, {0: 3, 1: 1}, {0: 1}, {1: 2, 0: 2}, *[{0: 1, 1: 1}] * 8)):
        inputs = {r: signs(7, n, TOY.hidden_size, seed=10 * number + r).cuda() for r, n in counts.items()}
        expected, found = eager.step(inputs, pad_to=4), captured.step(inputs)
        assert all(torch.equal(found[r], expected[r]) for r in inputs)
