"""However requests are cut, mixed, paged and poisoned, each gets what one full prefill of it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv41.attention import Tap
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.backends.reference.layouts import INDEX_RECORDS, KV_RECORDS
from dsv41.checkpoint import Checkpoint
from dsv41.config import DeepseekV41Config
from dsv41.hal.types import (
    AttnInputs,
    AttnOutput,
    ForwardBatch,
    LayerState,
    Selection,
    StepPlan,
)
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.verify import relative_error

from .toys import (
    MAX_LEN,
    TOY,
    Watch,
    WatchedBackend,
    dyadic_checkpoint,
    noise,
    one_prefill,
    plain_checkpoint,
    quarter_turns,
    signs,
)

LONGEST = 33
LAYERS = TOY.num_hidden_layers
NAN = float("nan")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# Any chunks, any order, any pages


@dataclass(frozen=True)
class Schedule:
    """Steps of {request: tokens}, and the rows of a window page and of a compressed page.

    Tokens beyond a request's length are left out, and what is left after the last step comes in one more. Two requests
    run at once; the others wait until one is done and freed.
    """

    lengths: tuple[int, ...]
    steps: tuple[dict[int, int], ...]
    pages: tuple[int, int]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    lengths = tuple(draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=3)))
    sizes = st.sampled_from([0, 1, 1, 2, 3, 5, 8, 13])
    step = st.dictionaries(st.integers(0, len(lengths) - 1), sizes, min_size=1)
    page = st.sampled_from([1, 2, 3, 5, 8, 64])
    return Schedule(lengths, tuple(draw(st.lists(step, max_size=10))), (draw(page), draw(page)))


def serve(stack: AttentionStack, hidden: Sequence[Tensor], schedule: Schedule) -> list[dict[str, Tensor]]:
    """What each request of a schedule gave; `hidden[i]` `[L, >= lengths[i], hidden]`."""
    backend, (window, compressed) = stack.backend, schedule.pages
    backend.layouts = backend.layouts.with_page_size(window=window, compressed=compressed)
    session = Session(stack, max_requests=2, max_tokens=2 * LONGEST)
    watch = Watch(session)
    waiting = list(range(len(schedule.lengths)))
    ids, done = dict[int, int](), dict[int, int]()
    results = dict[int, dict[str, Tensor]]()
    rest = dict.fromkeys(range(len(schedule.lengths)), LONGEST)
    for step in (*schedule.steps, rest, rest):
        while waiting and len(ids) < 2:
            ids[waiting[0]], done[waiting[0]] = session.add_request(), 0
            waiting.pop(0)
        spans = {r: (done[r], min(done[r] + size, schedule.lengths[r])) for r, size in step.items() if r in ids}
        watch.step({ids[r]: hidden[r][:, start:stop] for r, (start, stop) in spans.items()})
        for r, (_, stop) in spans.items():
            done[r] = stop
            assert session.length(ids[r]) == stop
            if stop == schedule.lengths[r]:
                results[r] = watch.rows(ids[r])
                session.free(ids.pop(r))
    assert all(pool.free_pages == pool.num_pages for pool in session.pages.pools.values())
    return [results[r] for r in range(len(schedule.lengths))]


@dataclass(frozen=True)
class Model:
    """A checkpoint, the inputs of three requests, and how a stack is made of it."""

    checkpoint: Checkpoint
    hidden: list[Tensor]
    make: Callable[[], AttentionStack]

    def __post_init__(self) -> None:
        object.__setattr__(self, "expected", cache(self._expected))

    def _expected(self, request: int, length: int) -> dict[str, Tensor]:
        return one_prefill(self.make(), self.hidden[request][:, :length])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Realistic weights and inputs, nothing quantised."""
    checkpoint = plain_checkpoint(tmp_path_factory.mktemp("plain") / "toy")

    def make() -> AttentionStack:
        backend = WatchedBackend(kv_cache_dtype="float32", index_cache_dtype="float32")
        return AttentionStack(checkpoint, backend, max_len=MAX_LEN)

    return Model(checkpoint, [noise(LAYERS, LONGEST, TOY.hidden_size, seed=i) for i in range(3)], make)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dyadic(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Weights and inputs on which every sum is exact, over the release's records."""
    return dyadic_model(tmp_path_factory, request.param)


def dyadic_model(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, config: DeepseekV41Config = TOY
) -> Model:
    checkpoint = dyadic_checkpoint(tmp_path_factory.mktemp("dyadic") / "toy", dtype, config)

    def make() -> AttentionStack:
        stack = AttentionStack(checkpoint, WatchedBackend(), max_len=MAX_LEN)
        quarter_turns(stack)
        return stack

    hidden = [signs(LAYERS, LONGEST, TOY.hidden_size, seed=i).to(dtype) for i in range(3)]
    return Model(checkpoint, hidden, make)


# Has all that matters: odd cuts, a token and a chunk in one step, an empty one, a request that waits for the slot of
# another, pages of different sizes.
EVENTFUL = Schedule(
    (33, 20, 27), ({0: 5, 1: 0}, {1: 1, 0: 1}, {0: 3, 1: 8}, {1: 1}, {1: 13, 0: 2}, {2: 7, 0: 1}), (3, 5)
)
SETTINGS = settings(
    max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@SETTINGS
@example(schedule=EVENTFUL)
@given(schedule=schedules())
def test_any_schedule_gives_what_one_prefill_gives(plain: Model, schedule: Schedule) -> None:
    found = serve(plain.make(), plain.hidden, schedule)
    for request, length in enumerate(schedule.lengths):
        expected = plain.expected(request, length)
        assert found[request].keys() == expected.keys()
        for what, rows in expected.items():
            if rows.dtype == torch.bool:
                assert torch.equal(found[request][what], rows), what
            else:
                assert relative_error(found[request][what], rows) <= 1e-5, what


@SETTINGS
@example(schedule=EVENTFUL)
@given(schedule=schedules())
def test_any_schedule_gives_what_one_prefill_gives_bit_for_bit(dyadic: Model, schedule: Schedule) -> None:
    found = serve(dyadic.make(), dyadic.hidden, schedule)
    for request, length in enumerate(schedule.lengths):
        expected = dyadic.expected(request, length)
        assert found[request].keys() == expected.keys()
        different = [what for what, rows in expected.items() if not torch.equal(found[request][what], rows)]
        assert not different


def test_the_schedules_mean_something(plain: Model, dyadic: Model) -> None:
    """Rows are left out by the top-k and by the candidates, ties occur, and no choice hangs on a last bit."""
    tied = 0
    for model in (plain, dyadic):
        stack = model.make()
        stack.backend = scored = ScoredBackend(
            kv_cache_dtype=stack.backend.kv_cache_dtype, index_cache_dtype=stack.backend.index_cache_dtype
        )
        for layer in stack.layers:
            layer.backend = scored
        full = one_prefill(stack, model.hidden[0])
        visible = torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()
        of_candidates = full["4 candidates"][:, : -(-LONGEST // 4)].repeat_interleave(4, 1)[:, :LONGEST]
        assert (of_candidates & visible).sum(1).max() < LONGEST - 12
        chosen = full["5 topk"][:, :LONGEST]
        assert not (chosen & ~of_candidates).any()
        for layer, allowed in ((4, visible), (5, visible & of_candidates)):
            scores = scored.scores[layer].float().masked_fill(~allowed, -torch.inf)
            best = scores.sort(dim=1, descending=True).values[:, TOY.index_topk - 1 : TOY.index_topk + 1]
            gap = (best[:, 0] - best[:, 1])[LONGEST // 2 :]
            tied += int((gap == 0).sum())
            assert ((gap == 0) | (gap > 1e-4)).all()
        # Without the filter the second indexer would have chosen otherwise.
        unfiltered = scored.scores[5].float().masked_fill(~visible, -torch.inf).topk(TOY.index_topk).values[:, -1:]
        assert ((scored.scores[5] > unfiltered) & visible & ~of_candidates).any()
    assert tied > 5


class ScoredBackend(WatchedBackend):
    """The reference, keeping the scores of a run of one step by layer."""

    def index_scores(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan) -> Tensor:
        scores = super().index_scores(inputs, layer, plan)
        self.scores = {**getattr(self, "scores", {}), layer.spec.layer_id: scores}
        return scores


def test_candidates_may_be_fewer_than_the_top_k(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Then a query that sees no more rows than the top-k still may not choose among all of them."""
    config = replace(TOY, candidate_topk_blocks=1)
    model = dyadic_model(tmp_path_factory, torch.float32, config)
    schedule = Schedule((20,), ({0: 5}, {0: 1}, {0: 1}, {0: 2}), (3, 5))
    (found,), expected = serve(model.make(), model.hidden, schedule), model.expected(0, 20)
    assert [what for what in expected if not torch.equal(found[what], expected[what])] == []
    newest = torch.arange(20)[:, None] // 4 == torch.arange(MAX_LEN) // 4
    assert (found["4 topk"].sum(1) == torch.arange(1, 21).clamp(max=6)).all()  # the source does not restrict itself
    assert torch.equal(found["5 topk"], newest & (torch.arange(MAX_LEN) <= torch.arange(20)[:, None]))


# Groups of two across step borders


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_group_that_a_step_leaves_open_is_closed_by_the_next(dyadic: Model, cut: int) -> None:
    """Compressed rows and index keys have the same bytes wherever 8 tokens are cut; an open group writes no row."""
    stack, hidden = dyadic.make(), dyadic.hidden[0][:, :8]
    stack.backend.layouts = stack.backend.layouts.with_page_size(compressed=1)
    whole, halves = (Session(dyadic.make(), max_requests=1, max_tokens=8, max_draft=0) for _ in range(2))
    for session in (whole, halves):
        poison(session)
        session.add_request()
    whole.step({0: hidden})
    halves.step({0: hidden[:, :cut]})
    rows, written = halves.caches[1], cut // 2
    for cache_ in (rows.compressed, rows.index):
        assert cache_ is not None
        values, _ = cache_.read_bytes(torch.arange(4))
        assert (values == 255).all(1).tolist() == [row >= written for row in range(4)]
    halves.step({0: hidden[:, cut:]})
    for mine, theirs in ((rows.compressed, whole.caches[1].compressed), (rows.index, whole.caches[1].index)):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine.data, theirs.data)
    # The raw rows of the last two tokens, of which a later step may need either.
    assert rows.compressor_state is not None
    assert not rows.compressor_state.isnan().any()
    assert torch.equal(rows.compressor_state, whole.caches[1].compressor_state)


def test_groups_close_token_by_token_in_a_slot_that_another_request_left_open(dyadic: Model) -> None:
    stack = dyadic.make()
    session = Session(stack, max_requests=2, max_tokens=2 * LONGEST)
    watch = Watch(session)
    first, other = session.add_request(), session.add_request()
    watch.step({first: dyadic.hidden[0][:, :7], other: dyadic.hidden[1][:, :4]})  # both rings hold rows, one is open
    session.free(first)
    second = session.add_request()
    for token in range(LONGEST):
        step = {second: dyadic.hidden[2][:, token : token + 1]}
        if token % 3 == 0:
            step = {other: dyadic.hidden[1][:, 4 + token // 3 : 5 + token // 3], **step}
        watch.step(step)
    for request, (model, length) in {second: (2, LONGEST), other: (1, 15)}.items():
        found, expected = watch.rows(request), dyadic.expected(model, length)
        assert [what for what in expected if not torch.equal(found[what], expected[what])] == []


def test_a_group_is_closed_by_its_own_request_whoever_stands_before_it(dyadic: Model) -> None:
    """The token before, in the step, stands at the position before, and is another request's."""
    session = Session(dyadic.make(), max_requests=2, max_tokens=2 * LONGEST)
    watch = Watch(session)
    one, two = session.add_request(), session.add_request()
    watch.step({one: dyadic.hidden[0][:, :5], two: dyadic.hidden[1][:, :7]})
    watch.step({one: dyadic.hidden[0][:, 5:7], two: dyadic.hidden[1][:, 7:20]})
    watch.step({one: dyadic.hidden[0][:, 7:20]})
    for request, model in ((one, 0), (two, 1)):
        found, expected = watch.rows(request), dyadic.expected(model, 20)
        assert [what for what in expected if not torch.equal(found[what], expected[what])] == []


# Poison


def poison(session: Session) -> None:
    """Every byte of the caches, tails included, and every state becomes NaN, in whatever record."""
    for caches in session.caches.values():
        for cache_ in (caches.window, caches.compressed, caches.index):
            if cache_ is not None:
                cache_.data.fill_(255)
                if cache_.scale_pool is not None:
                    cache_.scale_pool.fill_(255)
        if caches.compressor_state is not None:
            caches.compressor_state.fill_(NAN)


class PoisonedBackend(ReferenceBackend):
    """Padded heads, output buffers and the rows of padding tokens are NaN wherever a backend leaves them be."""

    def get_padded_num_q_heads(self, num_heads: int) -> int:
        return num_heads + 3

    def prepare_inputs(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> AttnInputs:
        inputs = super().prepare_inputs(hidden, layer, plan)
        inputs.q[:, layer.spec.num_heads :] = NAN
        return inputs

    def alloc_attn_out(self, inputs: AttnInputs, layer: LayerState) -> AttnOutput:
        out = super().alloc_attn_out(inputs, layer)
        out.data.fill_(NAN)
        return out

    def project(self, out: AttnOutput, layer: LayerState, plan: StepPlan) -> Tensor:
        assert out.data.shape[1] == layer.spec.num_heads + 3
        assert (out.data[:, layer.spec.num_heads :] == 0).all()
        assert (out.data[plan.token_request < 0] == 0).all()
        assert not out.data.isnan().any()
        return super().project(out, layer, plan)


class PaddedStack(AttentionStack):
    """Adds to every step padding tokens whose hidden states are NaN, and at `at` an empty request without pages."""

    at = 0

    def forward(self, hidden: Tensor, batch: ForwardBatch, *, tap: Tap | None = None) -> Tensor:
        live, extra = batch.num_tokens, 3
        padded = torch.cat((hidden, hidden.new_full((LAYERS, extra, TOY.hidden_size), NAN)), dim=1)
        output = super().forward(padded, self._with_empty_request(batch, live + extra), tap=tap)
        assert (output[:, live:] == 0).all()
        return output[:, :live]

    def _with_empty_request(self, batch: ForwardBatch, num_tokens: int) -> ForwardBatch:
        at = min(self.at, batch.num_requests)

        def insert(values: list[int], value: int) -> list[int]:
            return [*values[:at], value, *values[at:]]

        def row(table: Tensor) -> Tensor:
            return torch.cat((table[:at], torch.full_like(table[:1], -1), table[at:]))

        return ForwardBatch.from_host(
            query_lens=insert(batch.query_start_loc_cpu.diff().tolist(), 0),
            seq_lens=insert(batch.seq_lens_cpu.tolist(), 0),
            window_pages=row(batch.window_table.pages_cpu),
            window_page_size=batch.window_table.page_size,
            compressed_pages={ratio: row(table.pages_cpu) for ratio, table in batch.compressed_tables.items()},
            compressed_page_size={ratio: table.page_size for ratio, table in batch.compressed_tables.items()},
            state_slots=insert(batch.state_slots.tolist(), -1),
            num_tokens=num_tokens,
        )


CACHE_DTYPES = [*((kv, "auto") for kv in KV_RECORDS), *(("auto", index) for index in INDEX_RECORDS)]


@pytest.mark.parametrize(("kv", "index"), CACHE_DTYPES, ids=lambda name: name)
@pytest.mark.parametrize("at", [0, 1, 2], ids="empty request at {}".format)
def test_fr_41_fr_45_fr_49_fr_71_poison_never_reaches_a_result(
    poisoned_model: Model, kv: str, index: str, at: int
) -> None:
    """NaN in unwritten bytes, compressor states, padding tokens, padded heads and output buffers; every row of
    padding is exactly zero."""
    results = []
    for stack_type, backend_type in ((AttentionStack, ReferenceBackend), (PaddedStack, PoisonedBackend)):
        backend = backend_type(kv_cache_dtype=kv, index_cache_dtype=index)
        backend.layouts = backend.layouts.with_page_size(window=5, compressed=3)
        stack = stack_type(poisoned_model.checkpoint, backend, max_len=MAX_LEN)
        stack.at = at
        quarter_turns(stack)
        session = Session(stack, max_requests=2, max_tokens=2 * LONGEST)
        if backend_type is PoisonedBackend:
            poison(session)
        results.append([*two_requests(session, poisoned_model.hidden), session.caches[1].compressor_state])
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)
        assert not clean.isnan().any()


@pytest.fixture(scope="module")
def poisoned_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return dyadic_model(tmp_path_factory, torch.float32)


def two_requests(session: Session, hidden: Sequence[Tensor]) -> Iterator[Tensor]:
    """Outputs of a few steps of two requests: a prefill, chunks, decode tokens, and one with no token at all."""
    ids = [session.add_request(), session.add_request()]
    done = [0, 0]
    for step in ((11, 0), (1, 16), (9, 1), (0, 0), (1, 1)):
        parts = {ids[i]: hidden[i][:, done[i] : done[i] + size] for i, size in enumerate(step)}
        done = [a + b for a, b in zip(done, step, strict=True)]
        yield from session.step(parts).values()


@pytest.mark.parametrize("length", [1, 4, 5, 6, 9, 10, 11])
def test_fr_38_the_tail_of_the_last_page_may_be_nan(poisoned_model: Model, length: int) -> None:
    """A page less one row, a page, a page and one row; of the window and of the compressed rows."""
    outputs = []
    for fill in (False, True):
        stack = poisoned_model.make()
        session = Session(stack, max_requests=1, max_tokens=LONGEST, page_size=5)
        if fill:
            poison(session)
        request = session.add_request()
        hidden = poisoned_model.hidden[0]
        outputs.append(session.step({request: hidden[:, :length]})[request])
        outputs.append(session.step({request: hidden[:, length : length + 1]})[request])
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


def test_fr_42_padding_writes_no_row_and_slot_0_is_an_ordinary_slot(poisoned_model: Model) -> None:
    """The first token of a session goes to row 0 of page 0, and no byte changes but those of its row."""
    stack = PaddedStack(poisoned_model.checkpoint, PoisonedBackend(), max_len=MAX_LEN)
    quarter_turns(stack)
    session = Session(stack, max_requests=1, max_tokens=LONGEST, page_size=4)
    poison(session)
    session.step({session.add_request(): poisoned_model.hidden[0][:, :1]})
    for layer, caches in session.caches.items():
        for cache_, written in ((caches.window, True), (caches.compressed, layer == 4), (caches.index, layer == 4)):
            if cache_ is not None:
                values, scales = cache_.read_bytes(torch.arange(cache_.num_slots))
                changed = (torch.cat((values, scales), dim=1) != 255).any(1)
                assert changed.nonzero().flatten().tolist() == [0] * written


@pytest.mark.parametrize("live", [0, 2])
def test_fr_45_a_step_may_be_mostly_padding(poisoned_model: Model, live: int) -> None:
    """An idle rank runs padding alone: no request at all, or requests without tokens."""
    stack = poisoned_model.make()
    Session(stack, max_requests=2, max_tokens=LONGEST)
    pages = torch.full((live, 1), -1, dtype=torch.int32)
    batch = ForwardBatch.from_host(
        query_lens=[0] * live,
        seq_lens=[0] * live,
        window_pages=pages,
        window_page_size=64,
        compressed_pages={1: pages, 2: pages},
        compressed_page_size={1: 64, 2: 64},
        num_tokens=4,
    )
    output = stack.forward(torch.full((LAYERS, 4, TOY.hidden_size), NAN), batch)
    assert output.shape == (LAYERS, 4, TOY.hidden_size)
    assert (output == 0).all()


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 2), (2, 1)])
def test_tokens_at_position_minus_one_are_padding_inside_a_request_too(
    poisoned_model: Model, before: int, after: int
) -> None:
    """An engine that gives every request the same number of rows pads at either end of each."""
    hidden = poisoned_model.hidden[0]
    outputs = []
    for pad in (False, True):
        stack = poisoned_model.make()
        session = Session(stack, max_requests=1, max_tokens=LONGEST)
        request = session.add_request()
        session.step({request: hidden[:, :13]})
        if pad:
            front, back = (torch.full((LAYERS, n, TOY.hidden_size), NAN) for n in (before, after))
            batch = session._batch([session.find(request)], [3], [16], None, True, 0)
            position = torch.tensor([*[-1] * before, 13, 14, 15, *[-1] * after])
            ends = torch.tensor([0, len(position)], dtype=torch.int32)
            batch = replace(batch, positions=position, query_start_loc=ends, query_start_loc_cpu=ends)
            output = stack.forward(torch.cat((front, hidden[:, 13:16], back), dim=1), batch)
            assert (output[:, position < 0] == 0).all()
            outputs.append(output[:, position >= 0])
        else:
            outputs.append(session.step({request: hidden[:, 13:16]})[request])
    assert torch.equal(*outputs)


# What a selection may name


@pytest.mark.parametrize("invalid", [-1, -(2**31), 2**31 - 1, 2_147_480_000, "unwritten"], ids=str)
def test_fr_39_fr_48_an_invalid_index_gathers_nothing(poisoned_model: Model, invalid: int | str) -> None:
    """Negative, beyond the table, or naming a row that is allocated and holds NaN but is not visible: all the same."""

    class Scatter:
        def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None: ...

        def output(self, layer: LayerState, plan: StepPlan, output: Tensor) -> None: ...

        def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
            rows = selection.topk_indices
            row = plan.num_visible[layer.spec.ratio].max() if invalid == "unwritten" else torch.tensor(invalid)
            wrong = row.expand(len(rows), 2)
            return replace(selection, topk_indices=torch.cat((wrong, rows[:, :3], wrong, rows[:, 3:]), dim=1))

    outputs = []
    for tap in (None, Scatter()):
        session = Session(poisoned_model.make(), max_requests=1, max_tokens=MAX_LEN)
        poison(session)
        request = session.add_request()
        outputs.append(session.step({request: poisoned_model.hidden[0]}, tap=tap)[request])
    assert torch.equal(*outputs)


# Causality


@pytest.mark.parametrize("token", [0, 6, 7, 20, LONGEST - 1])
def test_fr_57_a_token_changes_no_output_before_it(poisoned_model: Model, token: int) -> None:
    """Neither by its numbers nor by NaN; and it does change its own and, through every cache, later ones."""
    stack, hidden = poisoned_model.make(), poisoned_model.hidden[0]
    clean = one_prefill(stack, hidden)
    for change in (lambda x: -x, lambda x: x * NAN):
        other = hidden.clone()
        other[:, token] = change(other[:, token])
        found = one_prefill(stack, other)
        for what, rows in clean.items():
            assert torch.equal(found[what][:token], rows[:token]), what
        for layer in range(LAYERS):
            mine, theirs = found[f"{layer} output"], clean[f"{layer} output"]
            assert not torch.equal(mine[token], theirs[token])
            assert token == LONGEST - 1 or not torch.equal(mine[token + 1], theirs[token + 1])


def test_fr_57_rows_behind_the_window_are_seen_through_the_compressed_rows_alone(poisoned_model: Model) -> None:
    stack, hidden = poisoned_model.make(), poisoned_model.hidden[0]
    other = hidden.clone()
    other[:, 2:4] = -other[:, 2:4]
    found, clean = one_prefill(stack, other), one_prefill(stack, hidden)
    late = slice(4 + TOY.sliding_window, None)
    assert torch.equal(found["0 attended"][late], clean["0 attended"][late])
    for layer in range(1, LAYERS):
        assert not torch.equal(found[f"{layer} attended"][late], clean[f"{layer} attended"][late])
