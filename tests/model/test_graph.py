"""A captured step gives what the eager one gives, bit for bit, whatever it holds, and refuses what it cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv41
from dsv41 import graph
from dsv41.attention import Tap
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.cache import WINDOW
from dsv41.checkpoint import load_checkpoint
from dsv41.config import DeepseekV41Config
from dsv41.errors import BackendError, Dsv41Error, InputError
from dsv41.graph import CapturedStep
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.types import ForwardBatch, StepPlan
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint

from .test_session import refused
from .toys import MAX_LEN, TOY, dyadic_checkpoint, quarter_turns, signs

LAYERS = TOY.num_hidden_layers


class Capturable(ReferenceBackend):
    """The reference, on which a capture can be rehearsed."""

    name = "capturable"
    supports_graph_capture = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.plans: list[StepPlan] = []

    def plan(self, batch: ForwardBatch, specs: Any) -> StepPlan:
        self.plans.append(super().plan(batch, specs))
        return self.plans[-1]


class Rehearsal:
    """Stands in for a graph: a replay runs the step again, eagerly, over the same tensors."""

    def __init__(self, run: Callable[[], Tensor], device: torch.device) -> None:
        self.run, self.output = run, run()

    def replay(self) -> None:
        self.output.copy_(self.run())


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_Recording", Rehearsal)


def interpreted() -> AttentionBackend:
    pytest.importorskip("triton")
    from .portables import Interpreted

    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here; the test on the device takes the place of this one")
    return Interpreted()


# Backends, their layers, and how many tokens one request grows by in each step
KINDS: dict[str, tuple[Callable[[], AttentionBackend], list[int] | None, list[int]]] = {
    "reference": (Capturable, None, [7, 1, 1, 3, 2, 1, 4, *[1] * 17]),
    "portable": (interpreted, [4, 5], [4, 4, 1, 4, 1]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "toy"
    dyadic_checkpoint(path, torch.float32)
    return path


def make_stack(folder: Path, backend: AttentionBackend, layers: list[int] | None = None) -> AttentionStack:
    stack = AttentionStack(load_checkpoint(folder, dtype=torch.float32, layers=layers), backend, max_len=MAX_LEN)
    quarter_turns(stack)
    return stack


def token(request: int, start: int, count: int = 1) -> Tensor:
    return signs(LAYERS, MAX_LEN, TOY.hidden_size, seed=request)[:, start : start + count]


# What is replayed is what is computed


@pytest.mark.usefixtures("rehearsed")
@pytest.mark.parametrize("kind", KINDS)
def test_fr_79_fr_80_replays_are_eager_steps_bit_for_bit(folder: Path, kind: str) -> None:
    """One request grows across the window, the top-k and the candidate limit while others come, pause and go."""
    backend, layers, lengths = KINDS[kind]
    stack = make_stack(folder, backend(), layers)
    eager, captured = (Session(stack, max_requests=3, max_step_tokens=32, page_size=4) for _ in range(2))
    captured.capture(4, layer_inputs=True)
    for session in (eager, captured):
        assert [session.add_request() for _ in range(3)] == [0, 1, 2]
    held = dict.fromkeys(range(3), 0)
    for number, count in enumerate(lengths):
        counts = {0: count} | ({1: 1} if number % 3 == 1 else {}) | ({2: 2} if number % 4 == 3 and count < 3 else {})
        inputs = {r: token(r, held[r], n)[: len(stack.layers)] for r, n in counts.items()}
        expected, found = eager.step(inputs), captured.step(inputs)
        assert all(torch.equal(found[r], expected[r]) for r in counts)
        held |= {r: held[r] + n for r, n in counts.items()}
    assert held[0] > max(TOY.index_topk, TOY.sliding_window, TOY.candidate_topk_blocks * TOY.candidate_block_size)
    for layer in captured.caches:
        mine, theirs = captured.caches[layer].window.data, eager.caches[layer].window.data
        assert torch.equal(mine, theirs)


@pytest.mark.usefixtures("rehearsed")
def test_a_step_that_fits_is_a_replay_of_the_smallest_that_it_fits(folder: Path) -> None:
    stack = make_stack(folder, Capturable())
    session = Session(stack, max_requests=3, max_step_tokens=32)
    wide, narrow = session.capture(8, layer_inputs=True), session.capture(2, layer_inputs=True)
    assert (wide.num_requests, narrow.num_requests) == (3, 2)
    assert wide.max_seq_len == session.max_seq_len == MAX_LEN
    replayed: list[int] = []
    for step in (wide, narrow):
        recording, size = step._recording, step.num_tokens
        recording.replay = lambda run=recording.replay, size=size: (replayed.append(size), run())  # type: ignore[method-assign, misc]
    requests = [session.add_request() for _ in range(3)]

    def step(*counts: int, tap: Tap | None = None) -> list[int]:
        replayed.clear()
        pairs = list(zip(requests, counts, strict=False))
        session.step({r: token(r, session.length(r), n) for r, n in pairs}, tap=tap)
        return list(replayed)

    class Nothing:
        def inputs(self, *_: Any) -> None: ...
        def selection(self, layer: Any, plan: Any, selection: Any) -> Any:
            return selection

        def output(self, *_: Any) -> None: ...

    assert step(9) == []
    assert step(1) == [2]
    assert step(1, 1) == [2]
    assert step(1, 1, 0) == [8]  # three requests, though only two tokens
    assert step(3) == [8]
    assert step(1, 1, 1) == [8]
    assert step(1, tap=Nothing()) == []
    session.step({0: token(0, session.length(0))[0]})
    assert session.length(0) == 18


@pytest.mark.usefixtures("rehearsed")
def test_fr_79_a_replay_reads_the_tensors_of_the_capture(folder: Path) -> None:
    """At the same addresses, with nothing of an earlier step left; and what it returned stays as it was."""
    backend = Capturable()
    session = Session(make_stack(folder, backend), max_requests=3, page_size=4)
    step = session.capture(6, layer_inputs=True)
    requests = [session.add_request() for _ in range(3)]

    def addresses() -> list[int]:
        batch = step._batch
        tables = [batch.window_table, *batch.compressed_tables.values()]
        own = [getattr(batch, name) for name in vars(batch) if isinstance(getattr(batch, name), Tensor)]
        return [tensor.data_ptr() for tensor in [step._hidden, *own, *(table.pages for table in tables)]]

    before = addresses()
    first = session.step({r: token(r, 0, 2) for r in requests})
    kept = {r: output.clone() for r, output in first.items()}
    session.step({1: token(1, 2)})
    assert addresses() == before
    assert all(torch.equal(first[r], kept[r]) for r in requests)
    batch = backend.plans[-1].batch
    assert batch is step._batch
    assert batch.positions.tolist() == [2, -1, -1, -1, -1, -1]
    assert batch.query_start_loc.tolist() == [0, 1, 1, 1]
    assert batch.seq_lens.tolist() == [3, 0, 0]
    assert batch.state_slots.tolist() == [session.find(1).state_slot, -1, -1]
    for pool, table in ((WINDOW, batch.window_table), *batch.compressed_tables.items()):
        held = session.find(1).pages.tables[pool]
        assert table.pages[0].tolist() == held + [-1] * (table.pages.shape[1] - len(held))
        assert (table.pages[1:] == -1).all()


@pytest.mark.usefixtures("rehearsed")
def test_a_plan_bounded_for_a_graph_decides_nothing_by_one_step(folder: Path) -> None:
    backend = Capturable()
    session = Session(make_stack(folder, backend), max_requests=2)
    session.capture(2, layer_inputs=True)
    session.step({session.add_request(): token(0, 0)})
    assert {plan.max_visible[1] for plan in backend.plans} == {session.max_seq_len}
    assert {plan.max_visible[2] for plan in backend.plans} == {session.max_seq_len // 2}


@pytest.mark.usefixtures("rehearsed")
def test_capturing_writes_nothing_that_a_request_holds(folder: Path) -> None:
    session = Session(make_stack(folder, Capturable()), max_requests=2)
    session.step({session.add_request(): token(0, 0, 20)})
    caches = [cache for c in session.caches.values() for cache in (c.window, c.compressed, c.index) if cache]
    states = [c.compressor_state for c in session.caches.values() if c.compressor_state is not None]
    before = [tensor.clone() for tensor in (*(cache.data for cache in caches), *states)]
    session.capture(4, layer_inputs=True)
    assert all(map(torch.equal, (*(cache.data for cache in caches), *states), before))


# What is refused


def test_a_backend_or_device_on_which_nothing_can_be_captured_is_refused(folder: Path) -> None:
    with refused(BackendError, "'reference' cannot be captured", "supports_graph_capture"):
        Session(make_stack(folder, ReferenceBackend())).capture(1)
    with refused(BackendError, "cannot be captured on cpu", "CUDA or HIP"):
        Session(make_stack(folder, Capturable())).capture(1)
    unbound = make_stack(folder, Capturable())
    with refused(BackendError, "no caches", "bind"):
        CapturedStep(unbound, num_tokens=1, num_requests=1, max_seq_len=8)


@pytest.mark.usefixtures("rehearsed")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_tokens", 0),
        ("num_tokens", True),
        ("num_requests", 0),
        ("num_requests", "2"),
        ("max_seq_len", 0),
        ("max_seq_len", MAX_LEN + 1),
    ],
)
def test_a_size_that_cannot_be_is_refused(folder: Path, name: str, value: Any) -> None:
    session = Session(make_stack(folder, Capturable()))
    sizes = {"num_tokens": 2, "num_requests": 1, "max_seq_len": 8, name: value}
    with refused(InputError, f"{name} is {value!r}"):
        CapturedStep(session.stack, **sizes)


def batch_of(session: Session, *, requests: int = 1, held: int = 4, tokens: int = 1, **changes: Any) -> ForwardBatch:
    """A batch that the session's stack would run: pages 0, 1, ... of each pool."""
    pages = {
        pool: torch.arange(requests * -(-held // size)).view(requests, -1).int()
        for pool, size in session.pages.page_size.items()
    }
    given: dict[str, Any] = {
        "query_lens": [tokens] * requests,
        "seq_lens": [held] * requests,
        "window_pages": pages.pop(WINDOW),
        "window_page_size": session.pages.page_size[WINDOW],
        "compressed_pages": pages,
        "compressed_page_size": session.pages.page_size,
    }
    return ForwardBatch.from_host(**given | changes)


MISFITS: dict[str, tuple[dict[str, Any], tuple[int, ...], type[Dsv41Error], str]] = {
    "too many tokens": ({"tokens": 3}, (LAYERS, 3), InputError, "it has 3 tokens, at most 2 were captured"),
    "too many requests": ({"requests": 3, "tokens": 0}, (LAYERS, 0), InputError, "it has 3 requests, at most 2"),
    "a request too long": ({"held": 17}, (LAYERS, 1), InputError, "17 tokens in its longest request, at most 16"),
    "another form": ({}, (1,), InputError, "an input for each layer"),
    "hidden states of another shape": ({}, (LAYERS, 2), InputError, "have shape"),
    "a draft block": ({"causal": False}, (LAYERS, 1), InputError, "causal=False"),
    "pages of others": ({"window_pages": torch.tensor([[999]]).int()}, (LAYERS, 1), InputError, "names page 999"),
}


@pytest.mark.usefixtures("rehearsed")
@pytest.mark.parametrize("what", MISFITS)
def test_a_step_that_cannot_be_replayed_is_refused_and_nothing_is_run(folder: Path, what: str) -> None:
    changes, shape, error, words = MISFITS[what]
    backend = Capturable()
    session = Session(make_stack(folder, backend), max_requests=4)
    step = CapturedStep(session.stack, num_tokens=2, num_requests=2, max_seq_len=16, layer_inputs=True)
    assert step.replay(torch.ones(LAYERS, 1, TOY.hidden_size), batch_of(session)).shape[1] == 1
    plans, filled = len(backend.plans), step._batch.positions.clone()
    with refused(error, words):
        step.replay(torch.ones(*shape, TOY.hidden_size), batch_of(session, **changes))
    assert len(backend.plans) == plans
    assert torch.equal(step._batch.positions, filled)


@pytest.mark.usefixtures("rehearsed")
def test_a_step_is_out_of_use_with_other_caches_or_weights(folder: Path) -> None:
    stack = make_stack(folder, Capturable())
    session = Session(stack)
    step = session.capture(1, layer_inputs=True)
    batch, hidden = batch_of(session), torch.ones(LAYERS, 1, TOY.hidden_size)
    other = Session(stack)
    assert not step.is_valid
    with refused(BackendError, "other caches", "capture it again"):
        step.replay(hidden, batch)
    request = session.add_request()
    session.step({request: token(0, 0)})  # binds its own caches again
    assert step.is_valid
    assert torch.equal(step.replay(hidden, batch), stack.forward(hidden, batch))

    stack.update_weights(load_checkpoint(folder, dtype=torch.float32))
    assert step.is_valid
    stack.sleep()
    with refused(BackendError, "asleep"):
        step.replay(hidden, batch)
    stack.wake(load_checkpoint(folder, dtype=torch.float32))
    with refused(BackendError, "weights in other memory", "wake"):
        step.replay(hidden, batch)
    session.step({request: token(0, 1)})  # eagerly
    assert session.capture(1, layer_inputs=True).is_valid
    assert session._captured[0].is_valid
    assert len(session._captured) == 1
    assert other.stack is stack


def test_it_is_public() -> None:
    assert dsv41.CapturedStep is CapturedStep


# On a device, in earnest

RELEASE = replace(
    TOY, sliding_window=128, index_topk=512, candidate_topk_blocks=2048, candidate_block_size=8, index_n_heads=32
)
"""The release's limits, in a small model."""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("config", "grows"),
    [(TOY, (1, 1)), (TOY, (2, 0, 1)), (RELEASE, (95,)), (RELEASE, (90, 3))],
    ids=["small, two", "small, three", "release", "release, two"],
)
def test_fr_80_200_replays_on_the_device_are_eager_steps_bit_for_bit(
    tmp_path: Path, config: DeepseekV41Config, grows: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Requests that grow by so many tokens a step, across every limit; eager steps padded to the same tokens."""
    backend = pytest.importorskip("dsv41.backends.portable.backend").PortableBackend(device="cuda")
    tokens, longest = sum(grows), 200 * max(grows) + 1
    path = make_checkpoint(tmp_path / "model", config=config)
    checkpoint = load_checkpoint(path, device=backend.device, dtype=dtype)
    stack = AttentionStack(checkpoint, backend, max_len=longest)
    limits = {"max_requests": len(grows), "max_tokens": longest * len(grows), "max_step_tokens": tokens}
    eager, captured = Session(stack, **limits), Session(stack, **limits)
    step = captured.capture(tokens, num_requests=len(grows), layer_inputs=True)
    pointers = [step._hidden.data_ptr(), step._batch.positions.data_ptr(), step._recording.output.data_ptr()]
    for session in (eager, captured):
        for _ in grows:
            session.add_request()
    generator = torch.Generator().manual_seed(0)
    for number in range(200):
        drawn = torch.randn(len(stack.layers), tokens, config.hidden_size, generator=generator)
        parts = drawn.to(backend.device, dtype).split(list(grows), dim=1)
        inputs = dict(enumerate(parts))
        expected, found = eager.step(inputs, pad_to=tokens), captured.step(inputs)
        assert all(torch.equal(found[r], expected[r]) for r in inputs), number
    assert pointers == [step._hidden.data_ptr(), step._batch.positions.data_ptr(), step._recording.output.data_ptr()]
    length = eager.length(grows.index(max(grows)))
    assert length > config.candidate_topk_blocks * config.candidate_block_size
    assert length > 2 * config.index_topk > config.sliding_window
