"""Tokens are appended, cut back and appended again, as speculative decoding does; nothing of the cut ones is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.checkpoint import Checkpoint
from dsv41.errors import RequestError
from dsv41.session import Session
from dsv41.stack import AttentionStack

from ..wording import refused
from .test_session import unchanged
from .toys import MAX_LEN, TOY, Ledger, all_free, dyadic_checkpoint, quarter_turns

LONGEST = 40
REQUESTS = 3
DRAFTS = range(9)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return dyadic_checkpoint(tmp_path_factory.mktemp("speculation") / "toy", torch.float32)


def make_stack(checkpoint: Checkpoint) -> AttentionStack:
    stack = AttentionStack(checkpoint, ReferenceBackend(), max_len=MAX_LEN)
    quarter_turns(stack)
    return stack


def make_ledger(checkpoint: Checkpoint, max_draft: int, page_size: int | None = 4) -> Ledger:
    session = Session(
        make_stack(checkpoint),
        max_requests=REQUESTS,
        max_tokens=REQUESTS * LONGEST,
        max_draft=max_draft,
        page_size=page_size,
    )
    return Ledger(session, make_stack(checkpoint))


# Any order

Op = tuple[Any, ...]
COUNT = st.sampled_from([0, 1, 1, 2, 3, 4, 5, 9, 14])
WHO = st.integers(0, REQUESTS - 1)
OPS = st.one_of(
    st.tuples(st.just("step"), st.dictionaries(WHO, COUNT, min_size=1), st.sampled_from([None, 0, 1, 5])),
    st.tuples(st.just("cut"), WHO, st.integers(0, 8)),
    st.tuples(st.just("cut"), WHO, st.integers(0, 8)),
    st.tuples(st.just("fork"), WHO, st.integers(0, 8)),
    st.tuples(st.just("free"), WHO),
)
# A verify step after a prefill, tokens refused from an odd and an even place, a fork from within the refused ones, a
# group that is opened twice, requests of unequal, zero and padded counts.
EVENTFUL: list[Op] = [
    ("step", {0: 14, 1: 9}, None),
    ("step", {0: 9, 1: 0, 2: 3}, 5),
    ("cut", 0, 8),
    ("fork", 0, 3),
    ("step", {0: 4, 1: 5, 2: 1}, 1),
    ("cut", 0, 3),
    ("cut", 1, 5),
    ("step", {0: 1, 1: 2}, 0),
    ("cut", 0, 1),
    ("step", {0: 2}, None),
    ("free", 1),
    ("fork", 0, 1),
    ("step", {0: 5, 1: 4, 2: 2}, None),
]


def act(ledger: Ledger, op: Op) -> None:
    """Do what can be done of it: requests are counted among the live ones, lengths kept within what is promised."""
    kind, *rest = op
    while len(ledger.given) < REQUESTS - 1:
        ledger.add()
    live = sorted(ledger.given)
    match kind:
        case "step":
            counts, padding = rest
            wanted = {live[i]: n for i, n in counts.items() if i < len(live)}
            ledger.step({r: min(n, LONGEST - len(ledger.given[r])) for r, n in wanted.items()}, padding=padding)
        case "cut" | "fork":
            request = live[rest[0] % len(live)]
            length = max(len(ledger.given[request]) - rest[1], ledger.shortest(request))
            if kind == "cut":
                ledger.truncate(request, length)
            elif len(live) < REQUESTS:
                ledger.fork(request, length)
        case "free":
            request = live[rest[0] % len(live)]
            ledger.check(request)
            ledger.free(request)


@pytest.mark.parametrize("max_draft", DRAFTS)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(ops=EVENTFUL, page_size=3)
@given(ops=st.lists(OPS, min_size=4, max_size=14), page_size=st.sampled_from([1, 2, 3, 4, 8, 64]))
def test_append_cut_and_append_in_any_order_is_a_straight_run(
    checkpoint: Checkpoint, max_draft: int, ops: list[Op], page_size: int
) -> None:
    play(make_ledger(checkpoint, max_draft, page_size), ops)


def test_the_same_in_bfloat16(tmp_path: Path) -> None:
    for max_draft in (2, 5):
        play(make_ledger(dyadic_checkpoint(tmp_path / f"{max_draft}", torch.bfloat16), max_draft), EVENTFUL)


def play(ledger: Ledger, ops: list[Op]) -> None:
    for op in ops:
        act(ledger, op)
    for request in list(ledger.given):
        ledger.step({request: min(3, LONGEST - len(ledger.given[request]))})
        ledger.check(request)
        ledger.free(request)
    assert all_free(ledger.session)


@pytest.mark.parametrize("max_draft", DRAFTS)
@pytest.mark.parametrize("length", [7, 22])
def test_every_cut_up_to_max_draft_is_possible(checkpoint: Checkpoint, max_draft: int, length: int) -> None:
    """Each from a fork of its own, then a fork of the cut one, and both go on differently."""
    ledger = make_ledger(checkpoint, max_draft)
    source = ledger.add()
    ledger.step({source: length})
    for back in range(min(max_draft, length) + 1):
        cut = ledger.fork(source)
        ledger.truncate(cut, length - back)
        twin = ledger.fork(cut)
        ledger.step({cut: back + 1, twin: 2})
        for request in (cut, twin):
            ledger.check(request)
            ledger.free(request)
    ledger.step({source: 1})
    ledger.check(source)


@pytest.mark.parametrize("accepted", range(6))
def test_fr_45_rounds_of_unequal_drafts_accepted_in_part(checkpoint: Checkpoint, accepted: int) -> None:
    """One step verifies drafts of 5, 2 and 0 tokens and one token more each, padded as a captured graph is."""
    ledger = make_ledger(checkpoint, 5)
    drafts = {ledger.add(): draft for draft in (5, 2, 0)}
    ledger.step(dict(zip(drafts, (9, 12, 3), strict=True)))
    for _ in range(4):
        ledger.step({request: draft + 1 for request, draft in drafts.items()}, padding=18 - 10)
        for request, draft in drafts.items():
            ledger.truncate(request, len(ledger.given[request]) - draft + min(draft, accepted))
            if accepted == 5 and len(ledger.given[request]) > 25:
                ledger.truncate(request, len(ledger.given[request]) - 5)
    for request in drafts:
        ledger.check(request)


def test_a_request_cut_to_nothing_starts_again(checkpoint: Checkpoint) -> None:
    ledger = make_ledger(checkpoint, 8)
    request = ledger.add()
    for tokens in (7, 8, 1):
        ledger.step({request: tokens})
        ledger.truncate(request, 0)
        assert all_free(ledger.session)
    ledger.step({request: 11})
    ledger.check(request)


def test_cutting_nothing_changes_nothing(checkpoint: Checkpoint) -> None:
    """At any length, also right after a fork of a request that was longer, and after that one was freed."""
    ledger = make_ledger(checkpoint, 2)
    request = ledger.add()
    for _ in range(20):
        ledger.step({request: 1})
        with unchanged(ledger.session):
            ledger.truncate(request, len(ledger.given[request]))
    child = ledger.fork(request, 19)
    ledger.free(request)
    with unchanged(ledger.session):
        ledger.truncate(child, 19)
    ledger.step({child: 6})
    ledger.truncate(child, 23)
    ledger.step({child: 3})
    ledger.check(child)


def test_a_short_fork_of_a_long_request_can_be_cut_back_like_any_other(checkpoint: Checkpoint) -> None:
    """What it can be cut to follows from what it holds, not from how long its source was."""
    ledger = make_ledger(checkpoint, 2)
    source = ledger.add()
    ledger.step({source: 10})  # all of it still in the window cache
    child = ledger.fork(source, 4)
    for _ in range(3):
        ledger.step({child: 3})
        ledger.truncate(child, len(ledger.given[child]) - 2)
    ledger.check(child)
    ledger.truncate(source, 2)
    for _ in range(3):
        ledger.step({source: 3})
        ledger.truncate(source, len(ledger.given[source]) - 2)
    ledger.check(source)


# Limits


@pytest.fixture(scope="module")
def plain_ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    """Request 0 holds 30 tokens, 1 holds 9, all of which are within the window and max_draft 2; 2 was freed."""
    with torch.no_grad():
        ledger = make_ledger(dyadic_checkpoint(tmp_path_factory.mktemp("limits") / "toy", torch.float32), 2)
        for tokens in (30, 9, 1):
            ledger.step({ledger.add(): tokens})
        ledger.free(2)
    return ledger


@pytest.mark.parametrize("how", ["truncate", "fork"])
@pytest.mark.parametrize(
    ("request_", "length", "named"),
    [
        (0, 27, ["request 0", "no window rows before 20", "from 19 on for 27 tokens", "max_draft is 2"]),
        (0, 26, ["no window rows before 20", "from 18 on"]),
        (0, 1, ["no window rows before 20", "from 0 on for 1 tokens", "replay"]),
        (1, 5, ["request 1", "raw row of token 4", "expected 5 or later", "larger max_draft"]),
        (1, 3, ["raw row of token 2", "expected 5 or later", "multiple of the ratio"]),
        (1, 10, ["request 1", "10 tokens", "expected 0 to 9"]),
        (1, -1, ["-1 tokens", "expected 0 to 9"]),
        (1, 4.0, ["4.0 tokens", "expected 0 to 9"]),
        (1, True, ["True tokens", "expected 0 to 9"]),
        (2, 0, ["request 2 was freed", "[0, 1]"]),
        (7, 0, ["request 7 is unknown", "[0, 1]"]),
    ],
)
def test_what_is_no_longer_held_is_refused(
    plain_ledger: Ledger, how: str, request_: int, length: Any, named: list[str]
) -> None:
    session = plain_ledger.session
    with unchanged(session), refused(RequestError, *named):
        getattr(session, how)(request_, length)


def test_what_the_limits_leave_is_possible(plain_ledger: Ledger) -> None:
    """An even length opens no group, so of request 1 any will do."""
    for length in (8, 6, 4, 2, 0):
        child = plain_ledger.fork(1, length)
        plain_ledger.step({child: 5})
        plain_ledger.check(child)
        plain_ledger.free(child)
    child = plain_ledger.fork(0, 28)
    plain_ledger.step({child: 3})
    plain_ledger.check(child)
    plain_ledger.free(child)


def test_without_max_draft_nothing_can_be_cut_once_the_window_is_full(checkpoint: Checkpoint) -> None:
    ledger = make_ledger(checkpoint, 0)
    request = ledger.add()
    ledger.step({request: 20})
    with unchanged(ledger.session), refused(RequestError, "no window rows before 12", "max_draft is 0"):
        ledger.session.truncate(request, 19)
    ledger.step({request: 1})
    ledger.check(request)


# What is unwritten


def test_the_rows_of_cut_tokens_are_never_read(checkpoint: Checkpoint) -> None:
    """Bytes past the cut become NaN in every cache, as does every raw row past it, and nothing differs."""
    ledger = make_ledger(checkpoint, 4, page_size=4)
    request = ledger.add()
    ledger.step({request: 22})
    ledger.truncate(request, 19)
    session = ledger.session
    held = session.find(request)
    for spec in session.cache_specs:
        cache = getattr(session.caches[spec.layer_id], spec.kind)
        rows = torch.arange(19 // spec.ratio, 24)
        fill_rows(cache, held.pages.tables[spec.pool], rows)
    for caches in session.caches.values():
        if caches.compressor_state is not None:
            caches.compressor_state[held.state_slot, torch.arange(19, 22) % session.ring] = torch.nan
    for _ in range(4):
        ledger.step({request: 2})
    ledger.check(request)


def fill_rows(cache: Any, table: list[int], rows: Tensor) -> None:
    size = cache.layout.page_size
    slots = torch.tensor([table[row // size] * size + row % size for row in rows.tolist() if row // size < len(table)])
    record = cache.layout.record
    cache.write_bytes(
        slots,
        torch.full((len(slots), record.value_bytes), 255, dtype=torch.uint8),
        torch.full((len(slots), record.scale_bytes), 255, dtype=torch.uint8),
    )


@pytest.mark.parametrize("max_draft", DRAFTS)
def test_a_ring_holds_what_a_cut_may_need_and_no_more(checkpoint: Checkpoint, max_draft: int) -> None:
    session = make_ledger(checkpoint, max_draft).session
    (state,) = (c.compressor_state for c in session.caches.values() if c.compressor_state is not None)
    assert list(state.shape) == [REQUESTS, max_draft + 2, 2, TOY.head_dim]
