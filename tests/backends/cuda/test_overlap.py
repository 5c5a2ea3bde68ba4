"""Chains of a captured layer side by side: over recorded streams, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dsv41.backends.cuda.overlap import Overlapping
from dsv41.backends.portable.fork import Fork
from dsv41.backends.portable.launch import watching
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


class Overlapped(Overlapping, Interpreted):
    max_tokens_for_overlap = 32


def step(
    path: Path,
    streams: Streams | None,
    layers: tuple[int, ...],
    tokens: int = 16,
    kind: type[Overlapping] = Overlapped,
) -> Tensor:
    """The outputs of a step; `streams.log` has every launch with its stream."""
    backend = kind()
    backend.rows, backend.queries = (Fork(backend.device, streams) for _ in range(2))
    stack = AttentionStack(load_checkpoint(path, dtype=torch.float32, layers=list(layers)), backend, max_len=MAX_LEN)
    session = Session(stack, max_requests=1, max_step_tokens=32)

    def note(launch: Any) -> bool:
        if streams is not None:
            streams.log.append(f"{launch.kernel.__name__.lstrip('_')} on {streams.current.name}")
        return True

    with watching(note):
        return session.step({session.add_request(): signs(len(layers), tokens, TOY.hidden_size)})[0]


@ON_CPU
def test_under_capture_chains_run_beside_one_another_and_join_before_they_are_read(dyadic: Path) -> None:
    """Of a layer that compresses and chooses, and of one that takes both over; numbers are those of one stream."""
    streams = Streams("rows", "queries")
    found = step(dyadic, streams, layers=(1, 2))
    assert streams.log == [
        "rows waits for main",
        "pool on rows",
        "keep on rows",
        "norm_inputs on main",
        "queries waits for main",
        "rotate_heads on queries",
        "rows waits for main",
        "insert_rows on rows",
        "index_queries on main",
        "main waits for rows",
        "index_scores on main",
        "top_k on main",
        "selection_slots on main",
        "main waits for queries",
        "norm_inputs on main",
        "rotate_heads on main",
    ]
    assert torch.equal(found, step(dyadic, None, layers=(1, 2)))


@ON_CPU
def test_a_layer_that_chooses_among_the_rows_of_another_has_its_queries_beside_that(dyadic: Path) -> None:
    streams = Streams("rows", "queries")
    found = step(dyadic, streams, layers=(4, 5))
    own = streams.log[streams.log.index("norm_inputs on main", streams.log.index("main waits for queries")) :]
    assert own[:4] == [
        "norm_inputs on main",
        "queries waits for main",
        "rotate_heads on queries",
        "index_queries on main",
    ]
    assert "rows" not in " ".join(own)
    assert own[-1] == "main waits for queries"
    assert torch.equal(found, step(dyadic, None, layers=(4, 5)))


@ON_CPU
def test_what_branches_read_is_held_until_they_are_joined(dyadic: Path) -> None:
    """Of the memory of the main stream; and where it is not, that is seen."""

    class LetsGo(Overlapped):
        def project_inputs(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> AttnInputs:
            inputs = super().project_inputs(hidden, layer, plan)
            return replace(inputs, qr=inputs.qr.clone())

    for kind, freed in ((Overlapped, False), (LetsGo, True)):
        streams = Streams("rows", "queries")
        with Lifetimes(streams) as lifetimes:
            step(dyadic, streams, layers=(1, 2, 4, 5), kind=kind)
        assert {"rows waits for main", "queries waits for main"} <= set(streams.log)
        assert bool(lifetimes.freed) is freed, lifetimes.freed


@ON_CPU
def test_rows_are_joined_before_a_choice_of_any_backend(dyadic: Path) -> None:
    """One that scores by kernels of its own finds every key written."""
    joined = []

    class ChoosesItself(Overlapped):
        def _choose(self, *given: Any) -> tuple[Tensor, Tensor | None]:
            joined.append(not self.rows._branched)
            return super()._choose(*given)

    streams = Streams("rows", "queries")
    step(dyadic, streams, layers=(1,), kind=ChoosesItself)
    assert "rows waits for main" in streams.log
    assert joined == [True]


@ON_CPU
def test_rows_are_joined_where_all_are_chosen(dyadic: Path) -> None:
    """Then nothing is scored, and nobody waits for the keys before attention does."""
    streams = Streams("rows", "queries")
    step(dyadic, streams, layers=(1,), tokens=4)
    assert "index_scores on main" not in streams.log
    assert streams.log.index("main waits for rows") < streams.log.index("selection_slots on main")


@ON_CPU
@pytest.mark.parametrize(("capturing", "most"), [(False, 32), (True, 15)])
def test_otherwise_a_step_runs_in_one_stream(
    dyadic: Path, capturing: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside a graph, and with more tokens than the limit."""
    monkeypatch.setattr(Overlapped, "max_tokens_for_overlap", most)
    streams = Streams("rows", "queries", capturing=capturing)
    step(dyadic, streams, layers=(1,))
    assert "pool on main" in streams.log
    assert all(line.endswith("on main") for line in streams.log)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_captured_step_with_forks_is_the_eager_one_bit_for_bit(dyadic: Path) -> None:
    """Every layer, and replays over other numbers."""
    opened: list[tuple[bool, bool]] = []

    class Forked(Overlapping):
        fuses_rotation = False
        max_tokens_for_overlap = 32

        def _product(self, *given: Any) -> Tensor:
            opened.append((self.rows.is_open, torch.cuda.current_stream() == self.rows._side))
            return super()._product(*given)

    checkpoint = load_checkpoint(dyadic, device="cuda", dtype=torch.float32)
    stack = AttentionStack(checkpoint, Forked(device="cuda"), max_len=MAX_LEN)
    eager, captured = (Session(stack, max_requests=2, max_step_tokens=8, page_size=4) for _ in range(2))
    captured.capture(4, num_requests=2, layer_inputs=True)
    assert set(opened) == {(False, False), (True, False), (True, True)}, "the run before is eager"
    for session in (eager, captured):
        assert [session.add_request() for _ in range(2)] == [0, 1]
    for number, counts in enumerate(({0: 4}, {0: 3, 1: 1}, {0: 1}, {1: 2, 0: 2}, *[{0: 1, 1: 1}] * 8)):
        inputs = {r: signs(7, n, TOY.hidden_size, seed=10 * number + r).cuda() for r, n in counts.items()}
        expected, found = eager.step(inputs, pad_to=4), captured.step(inputs)
        assert all(torch.equal(found[r], expected[r]) for r in inputs)
