"""Draft layers: a block of queries sees the window before it and all of itself, whatever order its tokens stand in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.cache import WINDOW
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.errors import InputError
from dsv41.hal.types import ForwardBatch, LayerState
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.verify import relative_error

from ..wording import refused
from .test_session import state_of, unchanged
from .toys import MAX_LEN, TOY, Ledger, all_free, dyadic_checkpoint, noise, quarter_turns

CONFIG = replace(TOY, num_nextn_predict_layers=3)
FIRST = CONFIG.num_hidden_layers
DRAFTS = range(FIRST, FIRST + 3)
WINDOW_ROWS, HIDDEN = CONFIG.sliding_window, CONFIG.hidden_size
TOLERANCE = 1e-5
NAN = float("nan")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three draft layers and a target layer, in float32."""
    path = tmp_path_factory.mktemp("drafts") / "toy"
    return make_checkpoint(path, config=CONFIG, layers=[0, *DRAFTS], quantized=False, dtype=torch.float32)


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return load_checkpoint(folder, layers=list(DRAFTS))


def make_stack(checkpoint: Checkpoint) -> AttentionStack:
    backend = ReferenceBackend(kv_cache_dtype="float32", index_cache_dtype="float32")
    return AttentionStack(checkpoint, backend, max_len=MAX_LEN)


@pytest.fixture
def session(checkpoint: Checkpoint) -> Session:
    return Session(make_stack(checkpoint), max_requests=4, page_size=3)


def target(tokens: int, seed: int = 0) -> Tensor:
    """What the target's hidden states become for each draft layer."""
    return noise(3, tokens, HIDDEN, seed=seed)


# The layer, written out


def dense(state: LayerState, before: Tensor, block: Tensor, anchor: int, window: int = WINDOW_ROWS) -> Tensor:
    """float64 outputs `[n, hidden]` of one draft layer: `block` `[n, hidden]` starts at `anchor`, and `before`
    `[anchor, hidden]` are the projected hidden states of all tokens before it. No cache, no index, no page."""
    spec, weights = state.spec, state.weights
    before, block = before.double(), block.double()

    def matrix(name: str) -> Tensor:
        weight = getattr(weights, name)
        assert isinstance(weight, Tensor)
        return weight.double()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + spec.eps).sqrt() * weight.double()

    def turn(x: Tensor, position: Tensor, way: int = 1) -> Tensor:
        """Of the last 64 dims, pair i turns by `position * 10000 ** (-2 i / 64)`; a layer of ratio 0 has no YaRN."""
        angle = way * position.double()[:, None] * 10000.0 ** -(torch.arange(0, 64, 2).double() / 64)
        even, odd = x[..., -64::2], x[..., -63::2]
        cos, sin = (part if x.ndim == 2 else part[:, None] for part in (angle.cos(), angle.sin()))
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
        return torch.cat((x[..., :-64], turned), dim=-1)

    rows = torch.arange(max(0, anchor - window), anchor + len(block))
    at = rows[len(rows) - len(block) :]
    keys = turn(norm(torch.cat((before[rows[0] : anchor], block)) @ matrix("wkv").T, weights.kv_norm), rows)
    queries = norm(block @ matrix("wq_a").T, weights.q_norm) @ matrix("wq_b").T
    queries = turn(queries.view(len(block), spec.num_heads, spec.head_dim), at)
    scores = torch.einsum("nhd,kd->nhk", queries, keys) * spec.head_dim**-0.5
    sink = weights.attn_sink.double()[None, :, None].expand(len(block), -1, 1)
    weight = torch.cat((scores, sink), dim=2).softmax(dim=2)[..., :-1]
    attended = turn(torch.einsum("nhk,kd->nhd", weight, keys), at, -1)
    groups = attended.reshape(len(block), spec.o_groups, spec.num_heads // spec.o_groups * spec.head_dim)
    latent = torch.einsum("ngw,grw->ngr", groups, matrix("wo_a").view(spec.o_groups, spec.o_lora_rank, -1))
    return latent.flatten(1) @ matrix("wo_b").T


def check(session: Session, found: Tensor, before: Tensor, block: Tensor) -> None:
    for i, layer in enumerate(session.stack.layers):
        expected = dense(layer.state, before[i], block[i], before.shape[1])
        assert relative_error(found[i], expected) <= TOLERANCE, layer.spec.name


# Blocks


@pytest.mark.parametrize("anchor", [0, 1, 2, 7, 8, 9, 15, 16, 17, 25, 40])
def test_a_block_is_the_dense_softmax(session: Session, anchor: int) -> None:
    """At anchors around the window and its multiples, of 1 to 8 queries."""
    request, before = session.add_request(), target(anchor)
    session.insert_window({request: before})
    for queries in range(1, 9):
        block = target(queries, seed=queries)
        check(session, session.draft({request: block})[request], before, block)


@pytest.mark.parametrize("chunks", [(1,), (3, 5), (7, 1, 2), (25,)], ids=str)
def test_rows_may_be_inserted_in_any_steps(session: Session, chunks: tuple[int, ...]) -> None:
    request, rows, block = session.add_request(), target(25), target(5, seed=1)
    while (done := session.length(request)) < 25:
        count = chunks[done % len(chunks)]
        session.insert_window({request: rows[:, done : min(done + count, 25)]})
    check(session, session.draft({request: block})[request], rows, block)


def test_several_requests_and_blocks_of_unequal_length(session: Session) -> None:
    """Zero included; each sees its own window and its own block, in a step that is padded or not."""
    anchors, blocks = (11, 0, 8, 3), (5, 1, 0, 8)
    requests = [session.add_request() for _ in anchors]
    before = [target(anchor, seed=i) for i, anchor in enumerate(anchors)]
    session.insert_window(dict(zip(requests, before, strict=True)))
    given = [target(queries, seed=10 + i) for i, queries in enumerate(blocks)]
    plain = session.draft(dict(zip(requests, given, strict=True)))
    padded = session.draft(dict(zip(requests, given, strict=True)), pad_to=20)
    for request, rows, block in zip(requests, before, given, strict=True):
        check(session, plain[request], rows, block)
        check(session, padded[request], rows, block)


def test_many_rounds_of_drafting_and_accepting(session: Session) -> None:
    """Blocks of 5; of each some tokens are accepted, whose rows then come from the target."""
    requests = {session.add_request(): target(0), session.add_request(): target(0)}
    for number, accepted in enumerate((9, 1, 3, 5, 2, 1, 5, 4)):
        for seed, request in enumerate(requests):
            more = target(accepted + seed, seed=100 * number + seed)
            session.insert_window({request: more})
            requests[request] = torch.cat((requests[request], more), dim=1)
        blocks = {request: target(5, seed=number + 50 + request) for request in requests}
        for request, found in session.draft(blocks).items():
            check(session, found, requests[request], blocks[request])


def test_the_order_within_a_block_hides_nothing(session: Session) -> None:
    """The first query sees the last row of the block, and the last one the first of the window before it."""
    request, before, block = session.add_request(), target(12), target(4, seed=1)
    session.insert_window({request: before})
    found = session.draft({request: block})[request]
    other = block.clone()
    other[:, 3] = -other[:, 3]
    assert not torch.isclose(session.draft({request: other})[request][:, 0], found[:, 0]).all()
    request, earlier = session.add_request(), before.clone()
    earlier[:, :4] = NAN  # behind the window of every query of the block
    session.insert_window({request: earlier})
    assert torch.equal(session.draft({request: block})[request], found)


def test_fr_41_fr_45_padding_between_and_behind_blocks_is_not_seen(checkpoint: Checkpoint) -> None:
    """Tokens at position -1 at either end of a request, requests without tokens and pages, tokens behind all."""
    session = Session(make_stack(checkpoint), max_requests=1)
    request, before, block = session.add_request(), target(9), target(3, seed=1)
    session.insert_window({request: before})
    expected = session.draft({request: block})[request]
    for front, back, behind in ((0, 0, 2), (1, 0, 0), (0, 2, 1), (2, 1, 3)):
        positions = torch.tensor([*[-1] * front, 9, 10, 11, *[-1] * (back + behind)])
        pages = torch.tensor([[-1], [0], [-1]], dtype=torch.int32)
        batch = ForwardBatch.from_host(
            query_lens=[0, front + 3 + back, 0],
            seq_lens=[0, 12, 0],
            window_pages=pages,
            window_page_size=64,
            num_tokens=len(positions),
            causal=False,
        )
        batch = replace(batch, positions=positions)
        hidden = torch.full((3, len(positions), HIDDEN), NAN)
        hidden[:, front : front + 3] = block
        output = session.stack.forward(hidden, batch)
        assert relative_error(output[:, positions >= 0], expected) <= TOLERANCE
        assert (output[:, positions < 0] == 0).all()


# Rows apart from queries


def test_rows_are_written_without_a_query(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are those that a block of the same hidden states writes, and nothing is attended to or projected."""
    sessions = [Session(make_stack(checkpoint), max_requests=1, page_size=4) for _ in range(2)]
    rows = target(11)
    for session in sessions:
        session.add_request()
    sessions[1].draft({0: rows})
    for segment in ("prepare_inputs", "select", "attend", "project"):
        monkeypatch.setattr(sessions[0].stack.backend, segment, None)
    sessions[0].insert_window({0: rows})
    for layer in DRAFTS:
        mine, theirs = (session.caches[layer].window for session in sessions)
        assert mine.data.any()
        assert torch.equal(mine.data, theirs.data)
    assert sessions[0].length(0) == 11
    assert sessions[1].length(0) == 0


def test_one_tensor_serves_all_layers(session: Session) -> None:
    one, each = session.add_request(), session.add_request()
    rows = target(9)[0]
    session.insert_window({one: rows})
    session.insert_window({each: rows.expand(3, -1, -1)})
    block = target(4, seed=1)
    found = session.draft({one: block, each: block})
    assert torch.equal(found[one], found[each])


def test_a_layer_takes_rows_by_itself(checkpoint: Checkpoint) -> None:
    session = Session(make_stack(checkpoint), max_requests=1)
    stack, rows, block = session.stack, target(9), target(3, seed=1)
    table: dict[str, Any] = {"window_pages": torch.zeros(1, 1, dtype=torch.int32), "window_page_size": 64}
    plan = stack.backend.plan(ForwardBatch.from_host(query_lens=[9], seq_lens=[9], **table), stack.specs)
    asked = ForwardBatch.from_host(query_lens=[3], seq_lens=[12], causal=False, **table)
    for i, layer in enumerate(stack.layers):
        layer.insert_window(rows[i], plan)
        found, published = layer.forward(block[i], stack.backend.plan(asked, stack.specs))
        assert published is None
        assert relative_error(found, dense(layer.state, rows[i], block[i], 9)) <= TOLERANCE


# Drafts leave no trace


def test_a_draft_changes_neither_lengths_nor_pages_nor_what_follows(checkpoint: Checkpoint) -> None:
    results = []
    for drafts in (False, True):
        session = Session(make_stack(checkpoint), max_requests=2, page_size=2)
        requests = [session.add_request() for _ in range(2)]
        for number, count in enumerate((9, 1, 2, 5)):
            session.insert_window({r: target(count, seed=10 * number + r) for r in requests[:2]})
            if drafts:
                before = state_of(session)[1:], repr(session.find(0)), repr(session.find(1))
                session.draft({r: target(7, seed=99 + r) for r in requests[:2]})
                assert (state_of(session)[1:], repr(session.find(0)), repr(session.find(1))) == before
        results.append(session.draft({r: target(4, seed=77 + r) for r in requests}))
        for request in requests:
            session.free(request)
        assert all_free(session)
    for request, found in results[0].items():
        assert torch.equal(results[1][request], found)


def test_drafts_fit_beside_full_windows(checkpoint: Checkpoint) -> None:
    """However many requests draft, one after the other or at once."""
    session = Session(make_stack(checkpoint), max_requests=4, max_tokens=160, max_step_tokens=40, page_size=2)
    requests = [session.add_request() for _ in range(4)]
    for request in requests:
        session.insert_window({request: target(33, seed=request)})
    for _ in range(3):
        for request in requests:
            session.draft({request: target(8)})
        session.draft(dict.fromkeys(requests, target(10)))
    session.insert_window({requests[0]: target(20)})


def test_a_draft_of_requests_that_share_a_page_writes_into_neither(session: Session) -> None:
    request, before = session.add_request(), target(10)
    session.insert_window({request: before})
    twin = session.fork(request)
    blocks = {request: target(5, seed=1), twin: target(6, seed=2)}
    for _ in range(2):
        for who, found in session.draft(blocks).items():
            check(session, found, before, blocks[who])
    assert session.find(request).pages.tables == session.find(twin).pages.tables


def test_rows_are_cut_back_and_shared(session: Session) -> None:
    """A draft request is cut and forked as any other, at any length, and a replay inserts rows."""
    request, rows = session.add_request(), target(30)
    session.insert_window({request: rows})
    session.truncate(request, 25)
    more = target(2, seed=3)
    session.insert_window({request: more})
    held, block = torch.cat((rows[:, :25], more), dim=1), target(5, seed=1)
    check(session, session.draft({request: block})[request], held, block)
    for length in (0, 1, 7, 8, 9, 20, 27):
        child = session.fork(request, length, replay=held[:, max(0, length - WINDOW_ROWS) : length])
        check(session, session.draft({child: block})[child], held[:, :length], block)
        session.free(child)


# Refusals


def test_a_draft_layer_is_not_run_causally(session: Session) -> None:
    request = session.add_request()
    session.insert_window({request: target(4)})
    with unchanged(session), refused(InputError, "causal=True", "mtp.0.attn is a draft layer", "expected False"):
        session.step({request: target(3)})
    table: dict[str, Any] = {"window_pages": torch.zeros(1, 4, dtype=torch.int32), "window_page_size": 3}
    batch = ForwardBatch.from_host(query_lens=[1], seq_lens=[5], **table)
    plan = session.stack.backend.plan(batch, session.stack.specs)
    for layer in session.stack.layers:
        with unchanged(session), refused(InputError, "causal=True", f"{layer.spec.name} is a draft layer"):
            layer.forward(target(1)[0], plan)
    with unchanged(session), refused(InputError, "causal=False", "expected True", "mtp.0.attn"):
        session.stack.insert_window(target(1), replace(batch, causal=False))


def test_a_target_layer_runs_no_block(folder: Path) -> None:
    stack = make_stack(load_checkpoint(folder, layers=[0]))
    session = Session(stack, max_requests=1)
    request = session.add_request()
    session.step({request: noise(1, 4, HIDDEN)})
    with unchanged(session), refused(InputError, "causal=False", "expected True", "layers.0.attn is causal"):
        session.draft({request: noise(1, 3, HIDDEN)})


def test_target_and_draft_layers_do_not_run_in_one_step(folder: Path) -> None:
    session = Session(make_stack(load_checkpoint(folder, layers=[0, *DRAFTS])), max_requests=1)
    request = session.add_request()
    for run in (session.step, session.draft):
        with unchanged(session), refused(InputError, "causal"):
            run({request: noise(4, 3, HIDDEN)})


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ((3, 5, HIDDEN + 1), ["[3, 5, 65]"]),
        ((2, 5, HIDDEN), ["[2, 5, 64]", "[3, tokens, 64]"]),
        ((3, MAX_LEN - 3, HIDDEN), ["holds 4 tokens", f"at most {MAX_LEN}"]),
    ],
)
def test_a_block_that_does_not_fit_is_refused(session: Session, block: tuple[int, ...], named: list[str]) -> None:
    request = session.add_request()
    session.insert_window({request: target(4)})
    for call in (session.draft, session.insert_window):
        with unchanged(session), refused(InputError, *named):
            call({request: torch.zeros(block)})


def test_the_window_before_a_block_has_to_have_pages(session: Session) -> None:
    """A block at 11 sees row 3, the first of a page, and one at 10 row 2: one row more than a token there does."""
    request, rows, block = session.add_request(), target(11), target(1, seed=1)
    session.insert_window({request: rows})
    pages = torch.tensor([session.find(request).pages.tables[WINDOW]], dtype=torch.int32)
    pages[0, 0] = -1

    def run(anchor: int) -> Tensor:
        batch = ForwardBatch.from_host(
            query_lens=[1], seq_lens=[anchor + 1], window_pages=pages, window_page_size=3, causal=False
        )
        return session.stack.forward(block, batch)

    check(session, run(11), rows, block)
    with refused(InputError, "page -1", "logical page 0"):
        run(10)


# With the target


def test_fr_81_a_long_prefill_then_verified_drafts(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """The target verifies blocks of which some tokens are refused; the draft layers are told the accepted ones."""
    stacks = [
        AttentionStack(dyadic_checkpoint(tmp_path / name, torch.float32), ReferenceBackend(), max_len=MAX_LEN)
        for name in ("one", "two")
    ]
    for stack in stacks:
        quarter_turns(stack)
    ledger = Ledger(Session(stacks[0], max_requests=2, page_size=4, max_draft=5), stacks[1])
    drafts = Session(make_stack(checkpoint), max_requests=2, page_size=4)
    told = {}
    for prompt in (38, 17):
        request = ledger.add()
        assert drafts.add_request() == request
        ledger.step({request: prompt})
        told[request] = target(prompt, seed=request)
        drafts.insert_window({request: told[request]})
    for number, (first, second) in enumerate(((5, 0), (2, 3), (0, 5), (4, 4), (1, 2))):
        blocks = {request: target(5, seed=9 + number + request) for request in told}
        for request, found in drafts.draft(blocks).items():
            check(drafts, found, told[request], blocks[request])
        ledger.step(dict.fromkeys(told, 6), padding=4)
        for request, accepted in zip(told, (first, second), strict=True):
            ledger.truncate(request, len(ledger.given[request]) - 5 + accepted)
            more = target(accepted + 1, seed=70 + 2 * number + request)
            drafts.insert_window({request: more})
            told[request] = torch.cat((told[request], more), dim=1)
            assert drafts.length(request) == ledger.session.length(request)
    for request in told:
        ledger.check(request)
