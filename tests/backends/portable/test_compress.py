"""Pooling against the reference's, over steps of every kind, with the state that they leave behind."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.backends.portable.caches import flat
from dsv41.backends.portable.compress import compress_rows
from dsv41.backends.portable.launch import watching
from dsv41.backends.reference import compress as reference
from dsv41.backends.reference.norm import rms_norm, rotate
from dsv41.backends.reference.planning import make_plan
from dsv41.hal.layout import CacheLayout, PagedCache
from dsv41.hal.records import INDEX_FP32
from dsv41.hal.types import ForwardBatch, StepPlan

from .common import DEVICE, close, copy_of, covering, layout_of, make_cache, memory, name_of, noise
from .test_insert import KEYS, TABLE

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-20
DIM, RING = 128, 5
WEIGHT = noise(DIM, seed=9)


def plan_of(
    query_lens: list[int], seq_lens: list[int], padded: int = 0, state_slots: list[int] | None = None
) -> StepPlan:
    pages = torch.arange(len(query_lens) * 16, dtype=torch.int32).view(len(query_lens), 16)
    batch = ForwardBatch.from_host(
        query_lens=query_lens,
        seq_lens=seq_lens,
        window_pages=pages,
        window_page_size=4,
        state_slots=state_slots,
        num_tokens=sum(query_lens) + padded,
        device=DEVICE,
    )
    return make_plan(batch, 8)


def expect(raw: Tensor, state: Tensor, plan: StepPlan, ratio: int, dtype: torch.dtype) -> Tensor:
    """What the reference makes of it; updates `state`."""
    layer: Any = SimpleNamespace(
        caches=SimpleNamespace(compressor_state=state), spec=SimpleNamespace(ratio=ratio, eps=EPS)
    )
    pooled = reference._pool(raw, layer, plan)
    return rms_norm(pooled.to(dtype), WEIGHT, EPS)


def closing(plan: StepPlan, ratio: int) -> Tensor:
    """Whether each token closes a group."""
    return (plan.token_request >= 0) & ((plan.batch.positions + 1) % ratio == 0)


def run(raw: Tensor, state: Tensor, plan: StepPlan, ratio: int, dtype: torch.dtype) -> Tensor:
    """The latents, of which a cache has those of closed groups, rotated: a row for each token."""
    cache = make_cache(layout_of(INDEX_FP32))
    closes = closing(plan, ratio)
    slots = torch.where(closes, torch.arange(len(closes), device=DEVICE), -1)
    found = run_into(cache, slots, raw, state, plan, ratio, dtype)
    rotated = rotate(found, plan.batch.positions.clamp(min=0) // ratio * ratio, TABLE)
    torch.testing.assert_close(cache.read(slots[closes]), rotated[closes].float(), rtol=0, atol=0, equal_nan=True)
    return found


def run_into(
    cache: PagedCache, slots: Tensor, raw: Tensor, state: Tensor, plan: StepPlan, ratio: int, dtype: torch.dtype
) -> Tensor:
    batch = plan.batch
    return compress_rows(
        raw,
        state,
        plan.token_request,
        batch.positions,
        batch.state_slots,
        batch.query_start_loc,
        batch.seq_lens,
        WEIGHT,
        EPS,
        ratio,
        dtype,
        TABLE,
        slots,
        *flat(cache),
    )


def check(plan: StepPlan, found: Tensor, expected: Tensor, ratio: int) -> None:
    """Closed groups as the reference has them, but for exponentials and values that cancel; zeros elsewhere."""
    closes = closing(plan, ratio)
    close(found[closes], expected[closes], rtol=1e-5, atol=1e-5)
    assert (found[~closes] == 0).all()


def states() -> tuple[Tensor, Tensor]:
    """Two states alike that hold NaN where nobody wrote, each slot a view into a wider row."""
    wide = torch.full((2, 6, RING + 1, 2, DIM), torch.nan, device=DEVICE)
    return wide[0, :, :RING], wide[1, :, :RING]


STEPS = [
    ([3, 1, 0, 6], [3, 1, 0, 6]),
    ([1, 1, 1, 1], [4, 2, 1, 7]),  # groups that the step before opened
    ([2, 9, 0, 3], [6, 11, 1, 10]),  # a step that is longer than the ring
    ([5, 1, 12, 0], [11, 12, 13, 10]),
    ([1, 0, 1, 2], [12, 12, 14, 12]),
]
"""Query lengths, and lengths after the step."""


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("ratio", [2, 4])
def test_groups_are_pooled_across_steps(ratio: int, dtype: torch.dtype) -> None:
    """The state is read as it was before the step, although a long step overwrites what its first token needs."""
    state, expected_state = states()
    for number, (query_lens, seq_lens) in enumerate(STEPS):
        plan = plan_of(query_lens, seq_lens, padded=number % 3, state_slots=[4, 0, 5, 2])
        raw = noise(plan.batch.num_tokens, 2, DIM, seed=number) * 3
        raw[sum(query_lens) :] = torch.nan
        expected = expect(raw, expected_state, plan, ratio, dtype)
        check(plan, run(raw, state, plan, ratio, dtype), expected, ratio)
        torch.testing.assert_close(state, expected_state, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(state[[1, 3]].isnan(), torch.ones_like(state[[1, 3]], dtype=torch.bool))


@pytest.mark.parametrize("ratio", [2, 4])
def test_a_token_alone_is_pooled_and_kept_by_one_launch(ratio: int) -> None:
    """Steps of one token, and of padding alone: the ring turns more than once."""
    state, expected_state = states()
    launched: list[str] = []

    def note(launch: Any) -> bool:
        launched.append(launch.kernel.__name__)
        return True

    for length in range(1, 14):
        plan = plan_of([1], [length], state_slots=[3]) if length != 6 else plan_of([], [], padded=1)
        raw = noise(1, 2, DIM, seed=length) * 3
        expected = expect(raw, expected_state, plan, ratio, BF16)
        with watching(note):
            check(plan, run(raw, state, plan, ratio, BF16), expected, ratio)
        torch.testing.assert_close(state, expected_state, rtol=0, atol=0, equal_nan=True)
    assert launched == ["_pool"] * 13


@pytest.mark.parametrize(("layout", "ratio", "dtype"), covering(KEYS, (2, 4), (BF16, FP32)), ids=name_of)
def test_rows_are_inserted_where_their_slots_say(layout: CacheLayout, ratio: int, dtype: torch.dtype) -> None:
    """At the position of the group's first token; all memory around the written rows stays as it was."""
    plan, (state, _) = plan_of([8, 4], [8, 7], padded=1), states()
    state.fill_(0.25)
    closes = closing(plan, ratio)
    slots = torch.where(closes, 3 + 5 * torch.arange(13, device=DEVICE), -1)
    slots[7] = -1  # a group of nobody's
    expected = make_cache(layout)
    found = copy_of(expected)
    latent = run_into(found, slots, noise(13, 2, DIM), state, plan, ratio, dtype)
    rows = rotate(latent, plan.batch.positions.clamp(min=0) // ratio * ratio, TABLE)
    assert latent[7].any()
    expected.write(slots[slots >= 0], rows[slots >= 0])
    assert torch.equal(memory(found), memory(expected))


def test_padding_may_stand_inside_a_request() -> None:
    """Then the row before is not that of the token before: the state has it."""
    plan = plan_of([4, 3], [7, 5])
    positions = torch.tensor([-1, 3, -1, 4, 2, -1, 3], device=DEVICE)
    plan = make_plan(replace(plan.batch, positions=positions), 8)
    state, expected_state = states()
    for held in (state, expected_state):
        held.copy_(noise(6, RING, 2, DIM, seed=5))
    raw = noise(7, 2, DIM)
    raw[positions < 0] = torch.nan
    expected = expect(raw, expected_state, plan, 2, FP32)
    found = run(raw, state, plan, 2, FP32)
    check(plan, found, expected, 2)
    assert not found.isnan().any()
    assert torch.equal(state, expected_state)


def test_gates_that_are_equal_or_far_apart_average_exactly() -> None:
    """On such inputs nothing is rounded, so results are the same in any chunking, bit for bit."""
    plan = plan_of([8], [8])
    values = torch.where(noise(8, DIM) < 0, -1.0, 1.0)
    raw = torch.stack((values, values * torch.where(noise(DIM, seed=1) < 0, -256.0, 256.0)), 1)
    state, expected_state = states()
    expected = expect(raw, expected_state, plan, 2, BF16)
    assert torch.equal(run(raw, state, plan, 2, BF16)[1::2], expected[1::2])


def test_nan_and_infinity_stay_in_their_channel_of_the_pool() -> None:
    """A norm spreads NaN over its row, so the other rows are what is looked at."""
    plan = plan_of([8], [8])
    raw = noise(8, 2, DIM)
    raw[0, 0, 3], raw[3, 1, 4], raw[4, 1, 5] = torch.nan, torch.inf, -torch.inf
    state, expected_state = states()
    expected = expect(raw, expected_state, plan, 2, FP32)
    found = run(raw, state, plan, 2, FP32)
    assert found[1].isnan().all()
    assert found[3].isnan().all()
    check(plan, found, expected, 2)


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_step_of_padding_alone_changes_nothing(tokens: int) -> None:
    plan, (state, _) = plan_of([], [], padded=tokens), states()
    found = run(torch.full((tokens, 2, DIM), torch.nan, device=DEVICE), state, plan, 2, BF16)
    assert torch.equal(found, torch.zeros(tokens, DIM, dtype=BF16, device=DEVICE))
    assert state.isnan().all()


def test_the_op_keeps_the_rules_of_custom_ops() -> None:
    plan, state = plan_of([3, 1], [3, 2]), noise(2, RING, 2, DIM)
    batch = plan.batch
    arguments = (plan.token_request, batch.positions, batch.state_slots, batch.query_start_loc, batch.seq_lens)
    step = (TABLE, torch.tensor([-1, 0, -1, 3], device=DEVICE), *flat(make_cache(layout_of(INDEX_FP32))))
    torch.library.opcheck(compress_rows, (noise(4, 2, DIM), state, *arguments, WEIGHT, EPS, 2, BF16, *step))
