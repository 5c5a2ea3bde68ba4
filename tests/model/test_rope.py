"""The rotary tables: which base a layer has, and YaRN's ramp by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dsv41.config import DeepseekV41Config, YarnScaling
from dsv41.rope import cos_sin_table, inverse_frequencies

RELEASE = DeepseekV41Config()
PAIR = torch.arange(32)


def plain(theta: float) -> torch.Tensor:
    return (theta ** (-PAIR.double() / 32)).float()


def test_the_base_belongs_to_the_layer() -> None:
    """Ratio 0: theta 10000 without YaRN. Ratios 1 and 2: one table, theta 160000 with YaRN."""
    window, full, half = (cos_sin_table(RELEASE, ratio, 300) for ratio in (0, 1, 2))
    assert torch.equal(full, half)
    for table, frequency in ((window, plain(10000.0)), (full, inverse_frequencies(64, 160000.0, YarnScaling()))):
        angle = torch.arange(300)[:, None].double() * frequency.double()
        torch.testing.assert_close(table.double(), torch.cat((angle.cos(), angle.sin()), 1), rtol=0, atol=3e-5)
        assert table.dtype == torch.float32
        assert table.shape == (300, 64)


def test_without_yarn_a_compressed_layer_has_its_base_alone() -> None:
    table = cos_sin_table(replace(RELEASE, rope_scaling=None), 2, 2)
    torch.testing.assert_close(table[1, 32:], plain(160000.0).sin())


def test_yarn_ramps_between_the_pairs_that_turn_32_times_and_once() -> None:
    """In 65536 positions pair 15.45 turns 32 times and pair 24.71 once: the ramp runs from 15 to 25."""
    ratio = inverse_frequencies(64, 160000.0, YarnScaling()) / plain(160000.0)
    torch.testing.assert_close(ratio[:16], torch.ones(16))
    torch.testing.assert_close(ratio[25:], torch.full((7,), 1 / 16))
    ramp = torch.arange(1, 10) / 10
    torch.testing.assert_close(ratio[16:25], ramp / 16 + 1 - ramp)


def test_yarn_scales_no_magnitude() -> None:
    table = cos_sin_table(RELEASE, 1, 64)
    torch.testing.assert_close(table[:, :32] ** 2 + table[:, 32:] ** 2, torch.ones(64, 32))


def test_yarns_upper_bound_is_clamped_to_63_and_not_to_31() -> None:
    """Where even the slowest pair turns more than once, the ramp ends beyond the last pair: at dim - 1."""
    yarn = YarnScaling(original_max_position_embeddings=1 << 40, beta_fast=5e8)
    pairs = [64 * math.log((1 << 40) / (turns * 2 * math.pi)) / (2 * math.log(10000.0)) for turns in (5e8, 1)]
    assert pairs[1] > 63
    ratio = inverse_frequencies(64, 10000.0, yarn) / plain(10000.0)
    low = math.floor(pairs[0])
    ramp = ((PAIR - low) / (63 - low)).clamp(0, 1)
    assert 0 < ramp[31] < 1
    torch.testing.assert_close(ratio, ramp / 16 + 1 - ramp, rtol=1e-5, atol=0)


@pytest.mark.parametrize("original", [1, 6])
def test_yarns_lower_bound_is_clamped_to_0(original: int) -> None:
    """Where no pair turns even once, all are slow, and the ramp is a step at pair 0."""
    ratio = inverse_frequencies(64, 10000.0, YarnScaling(original_max_position_embeddings=original)) / plain(10000.0)
    torch.testing.assert_close(ratio[1:], torch.full((31,), 1 / 16))
    torch.testing.assert_close(ratio[0], torch.tensor(1.0))
