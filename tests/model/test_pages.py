"""Pages: every one free or held, none written by two requests, and of the window never more than the window takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.cache import WINDOW
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.errors import PoolExhausted
from dsv41.hal.types import AttnInputs, LayerState, Selection, StepPlan
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint

from .test_session import Dies, unchanged
from .toys import MAX_LEN, TOY, Ledger, all_free, dyadic_checkpoint, noise, quarter_turns, signs

REQUESTS, TOKENS, LONGEST, MAX_DRAFT = 4, 56, 30, 3


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return dyadic_checkpoint(tmp_path_factory.mktemp("pages") / "toy", torch.float32)


def make_stack(checkpoint: Checkpoint) -> AttentionStack:
    stack = AttentionStack(checkpoint, ReferenceBackend(), max_len=MAX_LEN)
    quarter_turns(stack)
    return stack


# Any sequence of everything


def check_accounts(session: Session, requests: list[int]) -> None:
    """The pages that tables name are those that are not free, and have as many holders as tables name them."""
    for pool, pages in session.pages.pools.items():
        tables = [session.find(request).pages.tables[pool] for request in requests]
        named = Counter(page for table in tables for page in table if page >= 0)
        assert all(len(set(table) - {-1}) == len(table) - table.count(-1) for table in tables)
        assert pages._holders == [named[page] for page in range(pages.num_pages)]
        assert sorted(pages._free) == [page for page in range(pages.num_pages) if not named[page]]


def rows_held(session: Session, request: int, pool: int) -> set[int]:
    """The slots of the rows that a request holds."""
    known, size = session.find(request), session.pages.page_size[pool]
    first, last = (known.window_start, known.length) if pool == WINDOW else (0, known.length // pool)
    return {known.pages.tables[pool][row // size] * size + row % size for row in range(first, last)}


class Guard(Dies):
    """No layer may write a row that some request holds, nor one row twice; and the step may die."""

    def __init__(self, session: Session, requests: list[int], border: str = "", layer: int = 0) -> None:
        super().__init__(border, layer, RuntimeError)
        self.held = {
            pool: set().union(*(rows_held(session, request, pool) for request in requests))
            for pool in session.pages.pools
        }

    def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None:
        for pool, slots in {WINDOW: plan.window_slots, **plan.compressed_slots}.items():
            written = slots[slots >= 0].tolist()
            assert len(set(written)) == len(written)
            assert self.held[pool].isdisjoint(written)
        super().inputs(layer, plan, inputs)


class Everything(RuleBasedStateMachine):
    """Joins, steps, forks, cuts, frees, replays, steps that die and steps that find no pages."""

    checkpoint: Checkpoint

    @initialize(page_size=st.sampled_from([1, 2, 3, 5, 8]))
    def start(self, page_size: int) -> None:
        session = Session(
            make_stack(self.checkpoint),
            max_requests=REQUESTS,
            max_tokens=TOKENS,
            max_draft=MAX_DRAFT,
            page_size=page_size,
        )
        self.ledger = Ledger(session, make_stack(self.checkpoint))
        self.session = session
        for tokens in (13, 6):
            self.ledger.step({self.ledger.add(): tokens})

    @property
    def live(self) -> list[int]:
        return sorted(self.ledger.given)

    def one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self.live), label="request")

    def limited(self, counts: dict[int, int]) -> dict[int, int]:
        return {request: min(n, LONGEST - len(self.ledger.given[request])) for request, n in counts.items()}

    @precondition(lambda self: len(self.live) < REQUESTS)
    @rule()
    def join(self) -> None:
        self.ledger.add()

    def step(self, counts: dict[int, int], padding: int | None = None) -> None:
        counts = self.limited(counts)
        fits = sum(map(len, self.ledger.given.values())) + sum(counts.values()) <= TOKENS
        try:
            self.ledger.step(counts, padding=padding, tap=Guard(self.session, self.live))
        except PoolExhausted:
            assert not fits, "max_tokens fit however they are spread"

    @rule(tokens=st.integers(1, MAX_DRAFT + 1))
    def decode(self, tokens: int) -> None:
        self.step(dict.fromkeys(self.live, tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(1, 13))
    def prefill(self, data: st.DataObject, tokens: int) -> None:
        self.step({self.one(data): tokens})

    @precondition(lambda self: self.live)
    @rule(data=st.data(), padding=st.sampled_from([None, 0, 2]))
    def mix(self, data: st.DataObject, padding: int | None) -> None:
        count = st.sampled_from([0, 1, 1, 2, 3, 4, 7, 13])
        self.step(data.draw(st.dictionaries(st.sampled_from(self.live), count, min_size=1), label="counts"), padding)

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(), tokens=st.integers(1, 6), at=st.sampled_from([("inputs", 1), ("selection", 3), ("output", 6)])
    )
    def die(self, data: st.DataObject, tokens: int, at: tuple[str, int]) -> None:
        with pytest.raises((RuntimeError, PoolExhausted)):
            self.ledger.step(self.limited({self.one(data): tokens}), tap=Guard(self.session, self.live, *at))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), back=st.integers(0, MAX_DRAFT))
    def truncate(self, data: st.DataObject, back: int) -> None:
        request = self.one(data)
        self.ledger.truncate(request, max(len(self.ledger.given[request]) - back, self.ledger.shortest(request)))

    @precondition(lambda self: 0 < len(self.live) < REQUESTS)
    @rule(data=st.data(), back=st.integers(0, MAX_DRAFT))
    def fork(self, data: st.DataObject, back: int) -> None:
        request = self.one(data)
        self.ledger.fork(request, max(len(self.ledger.given[request]) - back, self.ledger.shortest(request)))

    @precondition(lambda self: 0 < len(self.live) < REQUESTS)
    @rule(data=st.data(), half=st.integers(0, LONGEST // 2))
    def replay(self, data: st.DataObject, half: int) -> None:
        request = self.one(data)
        length = min(2 * half, len(self.ledger.given[request]) // 2 * 2)
        hidden = self.ledger.hidden(self.ledger.given[request][:length])
        try:
            self.ledger.fork(request, length, replay=hidden)
        except PoolExhausted:
            assert sum(map(len, self.ledger.given.values())) + length > TOKENS

    @precondition(lambda self: len(self.live) > 2)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = self.one(data)
        self.ledger.check(request)
        self.ledger.free(request)

    @invariant()
    def accounts_are_exact(self) -> None:
        if hasattr(self, "session"):
            check_accounts(self.session, self.live)

    def teardown(self) -> None:
        if not hasattr(self, "session"):
            return
        for request in self.live:
            self.ledger.check(request)
            self.ledger.free(request)
            check_accounts(self.session, self.live)
        assert all_free(self.session)


def test_any_sequence_keeps_the_accounts_and_the_outputs(checkpoint: Checkpoint) -> None:
    Everything.checkpoint = checkpoint
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Everything,
        settings=settings(
            max_examples=30,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_requests_that_share_their_only_page_fit_too(checkpoint: Checkpoint) -> None:
    """In the step that parts them, two requests take a page each while the shared one is still held."""
    session = Session(make_stack(checkpoint), max_requests=4, max_tokens=8)
    ledger = Ledger(session, make_stack(checkpoint))
    requests = []
    for _ in range(2):
        first = ledger.add()
        ledger.step({first: 1})
        requests += [first, ledger.fork(first)]
    ledger.step(dict.fromkeys(requests, 1))
    check_accounts(session, requests)
    for request in requests:
        ledger.check(request)


@pytest.mark.parametrize("pad_to", [1, 1000])
def test_a_padding_that_cannot_be_costs_no_page(checkpoint: Checkpoint, pad_to: int) -> None:
    session = Session(make_stack(checkpoint), max_requests=1, max_tokens=40)
    request = session.add_request()
    with unchanged(session), pytest.raises(ValueError, match=f"pad_to is {pad_to}"):
        session.step({request: signs(TOY.num_hidden_layers, 3, TOY.hidden_size)}, pad_to=pad_to)


# The window alone


def window_pages(session: Session, request: int) -> int:
    return session.pages.held(session.find(request).pages, WINDOW)


@pytest.mark.parametrize(("page_size", "max_draft"), [(1, 3), (4, 0), (5, 3)])
def test_fr_98_what_is_kept_of_the_window_follows_from_the_length_alone(
    checkpoint: Checkpoint, page_size: int, max_draft: int
) -> None:
    """However a request was cut into steps: the pages of the last `window + max_draft` rows."""
    hidden = signs(TOY.num_hidden_layers, 27, TOY.hidden_size)
    for chunk in (1, 7, 13):
        session = Session(make_stack(checkpoint), max_requests=1, max_draft=max_draft, page_size=page_size)
        request = session.add_request()
        for part in hidden.split(chunk, dim=1):
            session.step({request: part})
            length = session.length(request)
            first = max(0, length - TOY.sliding_window - max_draft)
            assert window_pages(session, request) == -(-length // page_size) - first // page_size
            assert session.find(request).window_start == first


class Newest(ReferenceBackend):
    """Selects the newest rows without scoring the others, which would take minutes here."""

    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        self._insert_index_keys(inputs, layer, plan)
        rows = plan.num_visible[layer.spec.ratio][:, None] - torch.arange(1, layer.spec.topk + 1)
        return Selection(rows.clamp(min=-1))


def test_a_request_of_100k_tokens_holds_as_many_window_pages_as_a_short_one(tmp_path: Path) -> None:
    """Compressed rows of both ratios grow; those of the window do not, nor does the pool for them."""
    config = replace(
        TOY,
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=1,
        o_groups=1,
        sliding_window=4,
        index_n_heads=1,
        index_topk=2,
        compress_ratios=(2, 1),
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1),
        candidate_source_layer_id=-1,
        max_position_embeddings=2**17,
    )
    tokens, chunk, page_size = 100_000, 2000, 4
    path = make_checkpoint(tmp_path / "long", config=config, quantized=False, dtype=torch.float32)
    backend = Newest(kv_cache_dtype="bfloat16")
    backend.layouts = backend.layouts.with_page_size(window=page_size)
    session = Session(AttentionStack(load_checkpoint(path), backend), max_requests=1, max_tokens=tokens)
    request = session.add_request()
    held = set()
    for start in range(0, tokens, chunk):
        session.step({request: noise(chunk, config.hidden_size, seed=start)})
        held.add(window_pages(session, request))
    rows = config.sliding_window + session.max_draft
    assert session.length(request) == tokens
    assert held == {-(-rows // page_size)}
    pools = session.pages.pools
    assert pools[WINDOW].num_pages < 600
    assert pools[WINDOW].free_pages == pools[WINDOW].num_pages - window_pages(session, request)
    assert session.pages.held(session.find(request).pages, 1) == -(-tokens // 64)
    assert session.pages.held(session.find(request).pages, 2) == -(-tokens // 2 // 64)
    session.free(request)
    assert all_free(session)
