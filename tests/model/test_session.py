"""Sessions, and that a step which cannot be right is refused whole: nothing that it would have touched has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41 import attention
from dsv41.attention import DeepseekV41Attention
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.cache import WINDOW, bytes_per_token
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.errors import Dsv41Error, InputError, LayoutError, PoolExhausted, RequestError
from dsv41.hal.types import AttnInputs, ForwardBatch, LayerCaches, LayerState, Selection, StepPlan
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.verify import relative_error

from ..wording import refused
from .toys import MAX_LEN, TOY, dyadic_checkpoint, noise, quarter_turns, signs

LAYERS, HIDDEN = TOY.num_hidden_layers, TOY.hidden_size
TOKENS = 30


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return dyadic_checkpoint(tmp_path_factory.mktemp("session") / "toy", torch.float32)


@pytest.fixture
def stack(checkpoint: Checkpoint) -> AttentionStack:
    stack = AttentionStack(checkpoint, ReferenceBackend(), max_len=MAX_LEN)
    quarter_turns(stack)
    return stack


def hidden(seed: int, tokens: int = TOKENS) -> Tensor:
    return signs(LAYERS, tokens, HIDDEN, seed=seed)


def whole(stack: AttentionStack, inputs: Tensor) -> Tensor:
    session = Session(stack, max_requests=1, max_tokens=MAX_LEN)
    return session.step({session.add_request(): inputs})[0]


def state_of(session: Session) -> list[Any]:
    """Everything that a refused step must leave as it was, down to the bytes of the caches."""
    tensors: list[Tensor] = []
    for caches in session.caches.values():
        tensors += [cache.data for cache in (caches.window, caches.compressed, caches.index) if cache is not None]
        tensors += [caches.compressor_state] if caches.compressor_state is not None else []
    return [
        [tensor.clone() for tensor in tensors],
        {name: pool.free_pages for name, pool in session.pages.pools.items()},
        {request: r for request, r in session._requests.items()},
    ]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True)) and a[1:] == b[1:]


@contextmanager
def unchanged(session: Session) -> Iterator[None]:
    # As strings, since lists of pages would change along.
    before = state_of(session)
    before[2] = repr(before[2])
    yield
    after = state_of(session)
    after[2] = repr(after[2])
    assert same(before, after)


@pytest.fixture
def session(stack: AttentionStack) -> Session:
    """Request 0 holds 9 tokens, 1 was freed, 2 holds 4; room for one more request."""
    session = Session(stack, max_requests=3, max_tokens=60, page_size=4)
    for request, tokens in ((0, 9), (1, 3), (2, 4)):
        assert session.add_request() == request
        session.step({request: hidden(request)[:, :tokens]})
    session.free(1)
    return session


def goes_on(session: Session) -> None:
    """The session still gives what a straight run gives."""
    outputs = session.step({0: hidden(0)[:, 9:20], 2: hidden(2)[:, 4:5]})
    assert torch.equal(outputs[0], whole(session.stack, hidden(0)[:, :20])[:, 9:])
    assert torch.equal(outputs[2], whole(session.stack, hidden(2)[:, :5])[:, 4:])


# Bad input


def x(tokens: int = 1, *, width: int = HIDDEN, layers: int = LAYERS, **how: Any) -> Tensor:
    return torch.zeros(layers, tokens, width, **how)


BAD_STEPS: dict[str, tuple[dict[str, Any], type[Dsv41Error], list[str]]] = {
    "a freed request": ({"inputs": {1: x()}}, RequestError, ["request 1 was freed", "[0, 2]", "add_request"]),
    "an unknown request": ({"inputs": {7: x()}}, RequestError, ["request 7 is unknown", "[0, 2]", "add_request"]),
    "a request by another name": ({"inputs": {"0": x()}}, RequestError, ["request '0' is unknown"]),
    "a freed one beside a good one": ({"inputs": {0: x(), 1: x()}}, RequestError, ["request 1 was freed"]),
    "a gap": ({"inputs": {0: x()}, "positions": {0: [10]}}, InputError, ["request 0", "[10]", "expected 1 from 9 on"]),
    "an overlap": (
        {"inputs": {0: x(2)}, "positions": {0: torch.tensor([8, 9])}},
        InputError,
        ["[8, 9]", "expected 2 from 9 on"],
    ),
    "a gap inside": ({"inputs": {0: x(2)}, "positions": {0: [9, 11]}}, InputError, ["[9, 11]"]),
    "too few positions": ({"inputs": {0: x(3)}, "positions": {0: [9, 10]}}, InputError, ["[9, 10]", "expected 3"]),
    "positions of another request": (
        {"inputs": {0: x()}, "positions": {2: [4]}},
        InputError,
        ["positions are given for request 2", "expected those of [0]"],
    ),
    "past max_len": (
        {"inputs": {2: x(), 0: x(MAX_LEN - 9 + 1)}},
        InputError,
        ["request 0 holds 9 tokens", f"{MAX_LEN - 8} more", f"at most {MAX_LEN}"],
    ),
    "another width": ({"inputs": {0: x(width=HIDDEN + 1)}}, InputError, ["request 0", "[7, 1, 65]", "64"]),
    "another number of layers": ({"inputs": {0: x(layers=3)}}, InputError, ["[3, 1, 64]", "[7, tokens, 64]"]),
    "one dimension": ({"inputs": {0: torch.zeros(HIDDEN)}}, InputError, ["[64]", "[tokens, 64]"]),
    "bfloat16": ({"inputs": {0: x(dtype=torch.bfloat16)}}, InputError, ["torch.bfloat16", "expected torch.float32"]),
    "integers": ({"inputs": {0: x(dtype=torch.int64)}}, InputError, ["torch.int64", "expected torch.float32"]),
    "another device": ({"inputs": {0: x(device="meta")}}, InputError, ["on meta", "on cpu", ".to('cpu'"]),
    "two forms": ({"inputs": {0: x(), 2: torch.zeros(1, HIDDEN)}}, InputError, ["[tokens, hidden]", "one form"]),
    "more tokens than a step may have": (
        {"inputs": {2: x(20), 0: x(41)}},
        InputError,
        ["61 tokens", "at most 60", "max_step_tokens", "chunks"],
    ),
    "padded to less": ({"inputs": {2: x(2), 0: x(2)}, "pad_to": 3}, InputError, ["pad_to is 3", "expected 4", "to 60"]),
    "padded to more": ({"inputs": {0: x(2)}, "pad_to": 61}, InputError, ["pad_to is 61", "expected 2", "to 60"]),
    "padded to no number": ({"inputs": {0: x(2)}, "pad_to": 4.0}, InputError, ["pad_to is 4.0"]),
}


@pytest.mark.parametrize("what", BAD_STEPS)
def test_a_bad_step_is_refused_whole(session: Session, what: str) -> None:
    arguments, error, named = BAD_STEPS[what]
    with unchanged(session), refused(error, *named):
        session.step(**arguments)
    goes_on(session)


def test_good_positions_are_accepted(session: Session) -> None:
    session.step({0: x(2), 2: x(0)}, positions={0: torch.tensor([9, 10]), 2: []})
    assert session.length(0) == 11


def test_a_step_without_enough_pages_can_be_retried_after_a_free(stack: AttentionStack) -> None:
    """Whichever pool is short; nothing is taken from the other one."""
    session = Session(stack, max_requests=3, max_tokens=24, page_size=4)
    first, second = session.add_request(), session.add_request()
    session.step({first: hidden(0)[:, :20]})
    session.step({second: hidden(1)[:, :9]})
    with unchanged(session), refused(PoolExhausted, "needs 4 compressed (ratio 1) pages", "at most 2", "free a"):
        session.step({second: hidden(1)[:, 9:26]})
    session.free(first)
    found = session.step({second: hidden(1)[:, 9:26]})[second]
    assert torch.equal(found, whole(stack, hidden(1)[:, :26])[:, 9:])


@pytest.mark.parametrize("pool", [WINDOW, 1, 2])
def test_whichever_pool_is_short_the_step_is_refused_whole(session: Session, pool: int) -> None:
    """The others have pages; they keep them."""
    pages_ = session.pages.pools[pool]
    taken = [pages_.take() for _ in range(pages_.free_pages)]
    name = "window" if pool == WINDOW else f"compressed (ratio {pool})"
    with unchanged(session), refused(PoolExhausted, f"{name} pages", "at most 0"):
        session.step({2: hidden(2)[:, 4:5], 0: hidden(0)[:, 9:20]})
    for page in taken:
        pages_.give_back(page)
    goes_on(session)


def test_every_request_has_a_state_slot_of_its_own(stack: AttentionStack) -> None:
    """After any order of frees, so that no two turn one ring."""
    session = Session(stack, max_requests=3, max_tokens=40)
    held = [session.add_request() for _ in range(3)]
    for gone in (1, 0, 2, 1):
        session.free(held.pop(gone))
        held.append(session.add_request())
        assert sorted(session.find(request).state_slot for request in held) == [0, 1, 2]
    session.step({request: hidden(i)[:, :7] for i, request in enumerate(held)})
    found = session.step({request: hidden(i)[:, 7:8] for i, request in enumerate(held)})
    for i, request in enumerate(held):
        assert torch.equal(found[request], whole(stack, hidden(i)[:, :8])[:, 7:])


def test_requests_beyond_max_requests_are_refused(session: Session) -> None:
    third = session.add_request()
    with unchanged(session), refused(RequestError, "this session holds 3 requests", "max_requests"):
        session.add_request()
    session.free(third)
    assert session.add_request() == third + 1  # ids are never used again
    for call in (session.free, session.length):
        with unchanged(session), refused(RequestError, f"request {third} was freed"):
            call(third)


@pytest.mark.parametrize("name", ["max_requests", "max_tokens", "page_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8"])
def test_sizes_of_a_session_are_counts(stack: AttentionStack, name: str, value: Any) -> None:
    with refused(InputError, f"{name} is {value!r}", "at least 1"):
        Session(stack, **{name: value})


@pytest.mark.parametrize("max_len", [0, -1, TOY.max_position_embeddings + 1, 2.5])
def test_max_len_is_within_the_model(checkpoint: Checkpoint, max_len: Any) -> None:
    with refused(InputError, f"max_len is {max_len!r}", f"1 to {TOY.max_position_embeddings}"):
        AttentionStack(checkpoint, ReferenceBackend(), max_len=max_len)


def test_a_chunk_is_at_least_a_token(session: Session) -> None:
    with unchanged(session), refused(InputError, "chunk is 0"):
        session.prefill(0, x(3), chunk=0)


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("kv_cache_dtype", "fp8_ds_ml", "nvfp4_ds_mla"),
        ("kv_cache_dtype", "mxfp4", "fp8_ds_mla"),
        ("kv_cache_dtype", "", "bfloat16"),
        ("index_cache_dtype", "nvfp4_ds_mla", "mxfp4"),
    ],
)
def test_unknown_dtype_names_are_refused_with_the_known_ones(name: str, value: str, known: str) -> None:
    with pytest.raises(LayoutError, match=f"{name} {value!r} is unknown.*{known}"):
        ReferenceBackend(**{name: value})


# Bad batches: what an engine may do wrong that a session does not


def batch_of(session: Session, **changes: Any) -> ForwardBatch:
    """Request 0 gets 2 tokens more: in the pages that it holds, and in a free one for the fifth row of ratio 2."""
    request = session.find(0)
    tables = {pool: torch.tensor([held], dtype=torch.int32) for pool, held in request.pages.tables.items()}
    tables[2] = pages(*request.pages.tables[2], 10)
    values: dict[str, Any] = {
        "query_lens": [2],
        "seq_lens": [11],
        "window_pages": tables[WINDOW],
        "window_page_size": 4,
        "compressed_pages": {1: tables[1], 2: tables[2]},
        "compressed_page_size": {1: 4, 2: 4},
        "state_slots": [request.state_slot],
    }
    return ForwardBatch.from_host(**values | changes)


def pages(*numbers: int) -> Tensor:
    return torch.tensor([numbers], dtype=torch.int32)


BAD_BATCHES: dict[str, tuple[dict[str, Any], type[Dsv41Error], list[str]]] = {
    "a page beyond the pool": ({"window_pages": pages(0, 1, 34)}, InputError, ["page 34", "request 0", "0 to 33"]),
    "a missing page": ({"window_pages": pages(0, -1, 2)}, InputError, ["page -1", "logical page 1", "0 to 33"]),
    "a page below -1": ({"compressed_pages": {1: pages(0, 1, -7), 2: pages(0, 1)}}, InputError, ["page -7", "ratio 1"]),
    "a compressed page beyond the pool": (
        {"compressed_pages": {1: pages(0, 1, 2), 2: pages(2**31 - 1, 1)}},
        InputError,
        ["page 2147483647", "ratio 2", "0 to 11"],
    ),
    "a narrow window table": ({"window_pages": pages(0, 1)}, InputError, ["2 pages", "at least 3", "widen"]),
    "a narrow compressed table": (
        {"compressed_pages": {1: pages(0, 1, 2), 2: pages(0)}},
        InputError,
        ["ratio 2", "1 pages", "at least 2"],
    ),
    "a table of no width": ({"window_pages": pages()}, InputError, ["0 pages", "at least 3"]),
    "a ratio without a table": (
        {"compressed_pages": {1: pages(0, 1, 2)}},
        InputError,
        ["ratios [1]", "ratio 2", "layers.1.attn"],
    ),
    "another page size": ({"window_page_size": 8}, LayoutError, ["8 rows a page", "expected 4", "layers.0.attn"]),
    "another compressed page size": (
        {"compressed_page_size": {1: 4, 2: 16}},
        LayoutError,
        ["16 rows a page", "expected 4", "layers.1.attn"],
    ),
    "past max_len": (
        {"seq_lens": [MAX_LEN + 1], "window_pages": pages(*range(17))},
        InputError,
        [f"position {MAX_LEN}", f"at most {MAX_LEN - 1}", "max_len"],
    ),
    "a batch that is not causal": ({"causal": False}, InputError, ["causal=False", "expected True"]),
    "a bound that does not hold": ({"max_seq_len": 10}, InputError, ["11 tokens", "max_seq_len is 10"]),
}


@pytest.mark.parametrize("what", BAD_BATCHES)
def test_a_bad_batch_is_refused_before_anything_is_written(session: Session, what: str) -> None:
    changes, error, named = BAD_BATCHES[what]
    batch = batch_of(session, **changes)
    with unchanged(session), refused(error, *named):
        session.stack.forward(hidden(0)[:, 9:11], batch)
    goes_on(session)


def test_the_batch_that_these_spoil_is_good(session: Session) -> None:
    found = session.stack.forward(hidden(0)[:, 9:11], batch_of(session))
    assert torch.equal(found, whole(session.stack, hidden(0)[:, :11])[:, 9:])


def test_what_layers_share_is_checked_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's host work does not grow with the layers: one look at the lengths, the slots and each table."""
    looked: list[str] = []
    for name in ("_check_length", "_check_table", "_check_slots"):
        look = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *a, name=name, look=look: (looked.append(name), look(*a)))
    session.stack.forward(hidden(0)[:, 9:11], batch_of(session))
    assert sorted(looked) == ["_check_length", "_check_slots", "_check_table", "_check_table", "_check_table"]
    looked.clear()
    session.stack.insert_window(hidden(0)[:, 9:11], batch_of(session))
    assert looked.count("_check_table") == 3


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        (x(3), ["[7, 3, 64]", "[2, 64]"]),
        (torch.zeros(2, HIDDEN - 1), ["[2, 63]"]),
        (x(2, layers=2), ["[2, 2, 64]", "7 layers"]),
        (x(2, dtype=torch.float16), ["torch.float16", "expected torch.float32"]),
        (x(2, device="meta"), ["meta", "expected cpu"]),
    ],
    ids=["tokens", "width", "layers", "dtype", "device"],
)
def test_hidden_states_that_do_not_fit_the_batch_are_refused(
    session: Session, inputs: Tensor, named: list[str]
) -> None:
    batch = batch_of(session)
    with unchanged(session), refused(InputError, *named):
        session.stack.forward(inputs, batch)
    goes_on(session)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"query_lens": [2, 1]}, ["1 entries for 2 requests"]),
        ({"query_lens": [-1]}, ["query_lens [-1]", "0 <= query_len <= seq_len"]),
        ({"query_lens": [12]}, ["query_lens [12]", "seq_lens [11]"]),
        ({"num_tokens": 1}, ["num_tokens is 1", "at least 2"]),
        ({"state_slots": [0, 1]}, ["state_slots has 2 entries for 1 requests"]),
        ({"window_starts": [0, 4]}, ["window_starts has 2 entries for 1 requests"]),
        ({"shared_lens": []}, ["shared_lens has 0 entries for 1 requests"]),
        ({"compressed_page_size": {1: 4}}, ["lacks the ratios [2]"]),
        ({"window_pages": pages(0, 1, 2).long()}, ["window_pages", "torch.int64", "expected int32 [1, pages]"]),
        ({"window_pages": pages(0, 1, 2)[0]}, ["window_pages", "[3]"]),
        ({"window_pages": pages(0, 1, 2).expand(2, 3)}, ["window_pages", "[2, 3]", "[1, pages]"]),
        ({"compressed_pages": {1: pages(0, 1, 2).float(), 2: pages(0, 1)}}, ["compressed_pages[1]", "float32"]),
        ({"window_page_size": 0}, ["page size of window_pages is 0"]),
    ],
)
def test_fr_43_arrays_that_disagree_make_no_batch(session: Session, changes: dict[str, Any], named: list[str]) -> None:
    with unchanged(session), refused(InputError, *named):
        batch_of(session, **changes)


def test_a_window_table_needs_only_the_pages_in_the_window(session: Session) -> None:
    """Token 9 sees back to 2, so page 0 is needed, tokens 16 and on see nothing of the first two pages."""
    session.step({0: hidden(0)[:, 9:16]})
    free = list(session.find(0).pages.tables[WINDOW])
    session.step({0: hidden(0)[:, 16:17]})
    held = session.find(0).pages.tables
    tables = {pool: torch.tensor([numbers], dtype=torch.int32) for pool, numbers in held.items()}
    tables[WINDOW][0, :2] = -1
    batch = batch_of(
        session,
        query_lens=[1],
        seq_lens=[17],
        window_pages=tables[WINDOW],
        compressed_pages={1: tables[1], 2: tables[2]},
    )
    assert len(free) == 4
    found = session.stack.forward(hidden(0)[:, 16:17], batch)
    assert torch.equal(found, whole(session.stack, hidden(0)[:, :17])[:, 16:])
    tables[WINDOW][0, 2] = -1
    session.stack.bind(session.caches)
    with refused(InputError, "page -1", "logical page 2"):
        session.stack.forward(
            hidden(0)[:, 16:17], replace(batch, window_table=replace(batch.window_table, pages_cpu=tables[WINDOW]))
        )


# Layers by themselves


def test_forward_without_bind_is_refused(stack: AttentionStack, session: Session) -> None:
    fresh = AttentionStack(_checkpoint_of(stack), ReferenceBackend(), max_len=MAX_LEN)
    with refused(Dsv41Error, "layers.0.attn has no caches", "bind"):
        fresh.forward(hidden(0)[:, :2], batch_of(session))
    plan = stack.backend.plan(batch_of(session), stack.specs)
    with refused(Dsv41Error, "layers.3.attn has no caches", "bind"):
        fresh.layers[3].forward(hidden(0)[3, :2], plan)


def _checkpoint_of(stack: AttentionStack) -> Checkpoint:
    weights = {layer.spec.layer_id: layer.state.weights for layer in stack.layers}
    return Checkpoint(stack.config, weights, stack.specs, Path(), stack.dtype, 0)


@pytest.mark.parametrize("layer", [2, 6])
def test_a_consumer_without_its_selection_is_refused(session: Session, layer: int) -> None:
    plan = session.stack.backend.plan(batch_of(session), session.stack.specs)
    source = {2: 1, 6: 5}[layer]
    with refused(InputError, f"layers.{layer}.attn", f"layer {source}", "run that"):
        session.stack.layers[layer].forward(hidden(0)[layer, 9:11], plan)


def test_layers_one_by_one_are_the_stack(session: Session) -> None:
    batch = batch_of(session)
    ring = session.caches[1].compressor_state
    assert ring is not None
    before = ring.clone()
    together = session.stack.forward(hidden(0)[:, 9:11], batch)
    ring.copy_(before)
    plan, published = session.stack.backend.plan(batch, session.stack.specs), None
    for i, layer in enumerate(session.stack.layers):
        output, published = layer.forward(hidden(0)[i, 9:11], plan, published)
        assert torch.equal(output, together[i])


@pytest.mark.parametrize(
    ("layer", "missing", "named"),
    [
        (1, ["compressed"], "compressed"),
        (1, ["compressed", "index", "compressor_state"], "compressed, index, compressor_state"),
        (2, ["compressed"], "compressed"),
        (3, ["index"], "index"),
        (4, ["index"], "index"),
    ],
)
def test_caches_that_a_layer_needs_are_asked_for_at_bind(
    session: Session, layer: int, missing: list[str], named: str
) -> None:
    attention = session.stack.layers[layer]
    caches = attention.state.caches
    assert caches is not None
    with refused(LayoutError, f"layers.{layer}.attn", f"was given no {named}", "cache_specs"):
        attention.bind(replace(caches, **dict.fromkeys(missing)))
    attention.bind(caches)
    window_only = session.stack.layers[0]
    window_only.bind(LayerCaches(window=caches.window))


def test_a_draft_layer_is_not_run_as_a_causal_one(tmp_path: Path) -> None:
    config = replace(TOY, num_nextn_predict_layers=1)
    make_checkpoint(tmp_path / "draft", config=config, layers=[0, 7], quantized=False, dtype=torch.float32)
    stack = AttentionStack(load_checkpoint(tmp_path / "draft", layers=[0, 7]), ReferenceBackend(), max_len=MAX_LEN)
    session = Session(stack)
    request = session.add_request()
    with unchanged(session), refused(InputError, "causal=True", "mtp.0.attn is a draft layer", "expected False"):
        session.step({request: noise(2, 3, HIDDEN)})


# A step that dies half-way


class Dies:
    """A tap that raises at a border of a layer."""

    def __init__(self, border: str, layer: int, error: type[BaseException]) -> None:
        self.border, self.layer, self.error = border, layer, error

    def _at(self, border: str, layer: LayerState) -> None:
        if (border, layer.spec.layer_id) == (self.border, self.layer):
            raise self.error("on purpose")

    def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None:
        self._at("inputs", layer)

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        self._at("selection", layer)
        return selection

    def output(self, layer: LayerState, plan: StepPlan, output: Tensor) -> None:
        self._at("output", layer)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("border", "layer"),
    [("inputs", 0), ("inputs", 1), ("selection", 1), ("output", 1), ("selection", 5), ("output", 6)],
)
def test_a_step_that_dies_can_be_tried_again(
    session: Session, border: str, layer: int, error: type[BaseException]
) -> None:
    """Layer 1's compressor ring has turned by then: request 2 decodes a token that opens a group, 0 closes several."""
    before = state_of(session)
    before[2] = repr(before[2])
    with pytest.raises(error, match="on purpose"):
        session.step({0: hidden(0)[:, 9:20], 2: hidden(2)[:, 4:5]}, tap=Dies(border, layer, error))
    after = state_of(session)
    assert (after[1], repr(after[2])) == (before[1], before[2])
    states = [c.compressor_state for c in session.caches.values() if c.compressor_state is not None]
    assert len(states) == 1
    assert any(torch.equal(states[0], tensor) for tensor in before[0] if tensor.shape == states[0].shape)
    goes_on(session)


def test_a_step_that_dies_gives_its_pages_to_others(session: Session) -> None:
    with pytest.raises(RuntimeError):
        session.step({0: hidden(0)[:, 9:20]}, tap=Dies("output", 6, RuntimeError))
    new = session.add_request()
    found = session.step({new: hidden(5), 0: hidden(0)[:, 9:12]})
    assert torch.equal(found[new], whole(session.stack, hidden(5)))
    assert torch.equal(found[0], whole(session.stack, hidden(0)[:, :12])[:, 9:])


# Ordinary life


def test_fr_44_nothing_to_do_is_ordinary(session: Session) -> None:
    with unchanged(session):
        assert session.step({}) == {}
        assert session.step({0: x(0)})[0].shape == (LAYERS, 0, HIDDEN)
        both = session.step({0: torch.zeros(0, HIDDEN), 2: torch.zeros(0, HIDDEN)})
        assert [part.shape for part in both.values()] == [(0, HIDDEN)] * 2
        assert session.prefill(2, x(0)).shape == (LAYERS, 0, HIDDEN)
    goes_on(session)


def test_a_request_may_be_freed_before_its_first_token(stack: AttentionStack) -> None:
    session = Session(stack, max_requests=1)
    for _ in range(3):
        request = session.add_request()
        assert session.length(request) == 0
        session.step({request: x(0)})
        session.free(request)
    assert all(pool.free_pages == pool.num_pages for pool in session.pages.pools.values())


def test_prefill_decode_and_several_tokens_a_step_mix(stack: AttentionStack) -> None:
    session = Session(stack, max_requests=3, max_tokens=100)
    a, b, c = (session.add_request() for _ in range(3))
    found: dict[int, list[Tensor]] = {a: [], b: [], c: []}
    for step in ({a: 12}, {b: 5, a: 1}, {a: 3, c: 17, b: 0}, {c: 1, a: 1, b: 4}, {a: 13, b: 21, c: 12}):
        parts = {r: hidden(r)[:, session.length(r) : session.length(r) + n] for r, n in step.items()}
        outputs = session.step(parts)
        assert list(outputs) == list(step)
        for request, output in outputs.items():
            found[request].append(output)
    for request, parts_ in found.items():
        assert session.length(request) == TOKENS
        assert torch.equal(torch.cat(parts_, dim=1), whole(stack, hidden(request)))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_is_steps(stack: AttentionStack, chunk: int) -> None:
    session = Session(stack)
    request = session.add_request()
    found = session.prefill(request, hidden(0)[:, :20], chunk=chunk)
    assert torch.equal(found, whole(stack, hidden(0)[:, :20]))
    assert session.length(request) == 20


def test_one_tensor_runs_through_a_plain_residual_stream(checkpoint: Checkpoint) -> None:
    """`x + attention(x)` from layer to layer, whatever the chunks; a layer's output is that of its own input."""
    backend = ReferenceBackend(kv_cache_dtype="float32", index_cache_dtype="float32")
    stack = AttentionStack(checkpoint, backend, max_len=MAX_LEN)
    inputs = noise(TOKENS, HIDDEN)
    session = Session(stack, max_tokens=100)
    found = session.step({session.add_request(): inputs})[0]
    stream = [inputs]

    class Follow(Dies):
        def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None:
            torch.testing.assert_close(inputs.hidden, stream[-1])

        def output(self, layer: LayerState, plan: StepPlan, output: Tensor) -> None:
            stream.append(stream[-1] + output)

    again = session.step({session.add_request(): inputs}, tap=Follow("", 0, RuntimeError))[1]
    assert torch.equal(again, found)
    assert len(stream) == LAYERS + 1
    torch.testing.assert_close(stream[-1], found)
    assert found.shape == inputs.shape


def test_max_tokens_fit_however_they_are_spread(stack: AttentionStack) -> None:
    """Every request may leave a page half empty."""
    for spread in ([33], [1] * 8 + [25], [5, 5, 5, 5, 5, 5, 3], [31, 1, 1]):
        session = Session(stack, max_requests=9, max_tokens=33, page_size=8)
        for i, tokens in enumerate(spread):
            session.step({session.add_request(): hidden(i, 33)[:, :tokens]})
        assert all(pool.free_pages >= 0 for pool in session.pages.pools.values())


def test_pages_come_back(stack: AttentionStack) -> None:
    session = Session(stack, max_requests=2, max_tokens=40, page_size=4)
    for seed in range(6):
        request = session.add_request()
        found = session.prefill(request, hidden(seed), chunk=11)
        assert torch.equal(found, whole(stack, hidden(seed)))
        session.free(request)
    assert all(pool.free_pages == pool.num_pages for pool in session.pages.pools.values())


def test_max_len_may_be_reached(stack: AttentionStack) -> None:
    session = Session(stack)
    request = session.add_request()
    session.step({request: hidden(0, MAX_LEN)[:, :-1]})
    session.step({request: hidden(0, MAX_LEN)[:, -1:]})
    with refused(InputError, f"at most {MAX_LEN}"):
        session.step({request: x()})


def test_two_sessions_may_share_a_stack(stack: AttentionStack) -> None:
    """Each keeps its own caches, whichever ran last."""
    one, two = Session(stack, page_size=4), Session(stack, page_size=8)
    a, b = one.add_request(), two.add_request()
    one.step({a: hidden(0)[:, :9]})
    two.step({b: hidden(1)[:, :12]})
    found = one.step({a: hidden(0)[:, 9:]})[a], two.step({b: hidden(1)[:, 12:]})[b]
    assert torch.equal(found[0], whole(stack, hidden(0))[:, 9:])
    assert torch.equal(found[1], whole(stack, hidden(1))[:, 12:])


def test_a_session_says_what_a_token_costs(stack: AttentionStack) -> None:
    session = Session(stack)
    assert bytes_per_token(session.cache_specs) == {"window": 7 * 528, "compressed": 288 * 1.5, "index": 68 * 1.5}
    kinds: dict[str, list[str]] = {}
    for cache in session.cache_specs:
        kinds.setdefault(cache.name.rsplit(".", 1)[0], []).append(cache.kind)
    sources = {f"layers.{layer}.attn": ["window"] for layer in range(7)}
    sources["layers.1.attn"] = sources["layers.4.attn"] = ["window", "compressed", "index"]
    assert kinds == sources


def test_a_layer_reads_the_caches_of_its_source(session: Session) -> None:
    bound = [layer.state.caches for layer in session.stack.layers]
    for layer, source in ((2, 1), (3, 1), (5, 4), (6, 4)):
        mine, theirs = bound[layer], bound[source]
        assert mine is not None
        assert theirs is not None
        assert mine.compressed is theirs.compressed is not None
        assert mine.index is theirs.index is not None
        assert mine.window is not theirs.window


def test_an_indexer_is_given_a_selection_over_its_own_keys_or_none(checkpoint: Checkpoint) -> None:
    """A KV source discards what was published before it: those rows were another's."""
    given: dict[int, Selection | None] = {}

    class Records(ReferenceBackend):
        def select(
            self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None
        ) -> Selection:
            given[layer.spec.layer_id] = published
            return super().select(inputs, layer, plan, published)

    session = Session(AttentionStack(checkpoint, Records(), max_len=MAX_LEN))
    session.step({session.add_request(): hidden(0)})
    assert [layer for layer, published in given.items() if published is None] == [1, 4]
    assert list(given) == [1, 3, 4, 5]


def test_the_attention_layer_pads_to_what_the_backend_asks_for(stack: AttentionStack) -> None:
    class Wide(ReferenceBackend):
        def get_padded_num_q_heads(self, num_heads: int) -> int:
            return 64

    state = stack.layers[1].state
    layer = DeepseekV41Attention(state.spec, state.weights, Wide(), state.cos_sin)
    assert layer.spec.padded_heads == 64
    assert layer.spec.num_heads == 4


def test_hidden_states_of_another_precision_are_computed_alike(tmp_path: Path) -> None:
    """bfloat16 activations give the float32 result to bfloat16's precision."""
    path = tmp_path / "toy"
    make_checkpoint(path, config=TOY)
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        stack = AttentionStack(
            load_checkpoint(path, layers=[0], dtype=dtype),
            ReferenceBackend(kv_cache_dtype="bfloat16"),
            max_len=MAX_LEN,
        )
        session = Session(stack)
        outputs.append(session.step({session.add_request(): noise(1, 20, HIDDEN).to(dtype)})[0].float())
    assert 0 < relative_error(outputs[1], outputs[0]) < 0.02
