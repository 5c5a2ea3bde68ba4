"""Norms and rotations, by the definition and with their roundings."""

from __future__ import annotations

import pytest
import torch

from dsv41.backends.reference.norm import rms_norm, rotate
from dsv41.config import DeepseekV41Config
from dsv41.rope import cos_sin_table

TABLES = {ratio: cos_sin_table(DeepseekV41Config(), ratio, 4096) for ratio in (0, 1)}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("ratio", TABLES)
def test_a_rotation_multiplies_adjacent_pairs_as_complex_numbers(ratio: int) -> None:
    """The last 64 dims, pair i by angle i; the others pass through untouched, at every place of a `[T, H, D]`."""
    x, positions = random(5, 3, 512), torch.tensor([0, 1, 7, 4095, 130])
    cos, sin = TABLES[ratio][positions].double().chunk(2, dim=-1)
    pairs = torch.view_as_complex(x[..., 448:].double().reshape(5, 3, 32, 2))
    turned = torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(-2)
    found = rotate(x, positions, TABLES[ratio])
    assert torch.equal(found[..., :448], x[..., :448])
    torch.testing.assert_close(found[..., 448:].double(), turned, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[0], x[0])  # position 0 turns nothing


@pytest.mark.parametrize("ratio", TABLES)
def test_the_inverse_rotation_undoes_it(ratio: int) -> None:
    x, positions = random(6, 2, 512), torch.tensor([0, 1, 2, 77, 2049, 4095])
    back = rotate(rotate(x, positions, TABLES[ratio]), positions, TABLES[ratio], inverse=True)
    torch.testing.assert_close(back, x, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(rotate(x, positions, TABLES[ratio], inverse=True)[1:], x[1:])


def test_a_rotation_depends_on_distance_only() -> None:
    """What RoPE is for: the dot product of two rotated rows is that of their distance."""
    a, b = random(2, 128).unbind(0)
    table = TABLES[1]

    def dot(p: int, q: int) -> torch.Tensor:
        rows = rotate(torch.stack((a, b)), torch.tensor([p, q]), table)
        return rows[0] @ rows[1]

    torch.testing.assert_close(dot(3, 10), dot(2003, 2010), rtol=1e-3, atol=1e-3)
    assert abs(dot(3, 10) - dot(10, 3)) > 0.1


def test_a_rotation_is_rounded_once_from_fp32() -> None:
    x, positions = random(4, 512).bfloat16(), torch.arange(4) * 500
    expected = rotate(x.float(), positions, TABLES[0]).bfloat16()
    assert torch.equal(rotate(x, positions, TABLES[0]), expected)


def test_padding_is_rotated_without_harm() -> None:
    x = random(2, 512)
    found = rotate(x, torch.tensor([-1, 5]), TABLES[0])
    assert torch.equal(found[1:], rotate(x[1:], torch.tensor([5]), TABLES[0]))
    assert rotate(x[:0], torch.zeros(0, dtype=torch.int64), TABLES[0]).shape == (0, 512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_computed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    x, weight = (random(3, 128) * 100).to(dtype), random(128).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-20).sqrt() * weight.double()
    found = rms_norm(x, weight, 1e-20)
    assert found.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    else:
        # Of numbers that are no tie, the one rounding of the exact result; twice rounded, many would differ.
        assert (found != expected.to(dtype)).float().mean() < 0.01


def test_a_norm_has_its_epsilon_inside_the_root() -> None:
    found = rms_norm(torch.full((1, 4), 1e-3), torch.ones(4), 1e-3)
    torch.testing.assert_close(found, torch.full((1, 4), 1e-3 / (1e-6 + 1e-3) ** 0.5))
    assert (rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-20) == 0).all()
