"""Activations in groups of 128, in both dialects, beside torch's own rounding."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dsv41.backends.rocm.group_quantize import quantize_groups

from ...model.toys import noise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("fnuz", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (5, 384), (3, 2176)])
def test_codes_and_scales_are_those_of_torch(rows: int, columns: int, fnuz: bool) -> None:
    x = noise(rows, columns + 8).mul(torch.exp2(noise(rows, 1, seed=3) * 4)).bfloat16()[:, :columns].to(DEVICE)
    x[0, :128] = 0
    x[-1, -1] = 3e4
    codes, scales = quantize_groups(x, fnuz)
    assert scales.shape == (rows, columns // 128)
    assert scales.stride(0) == 1 or rows == 1
    groups = x.float().cpu().view(rows, -1, 128)  # on a GPU, torch multiplies by a rounded 1 / limit
    limit, dtype = (240.0, torch.float8_e4m3fnuz) if fnuz else (448.0, torch.float8_e4m3fn)
    due = groups.abs().amax(-1).clamp(min=1e-4) / limit
    assert torch.equal(scales.cpu(), due)
    expected = (groups / due[..., None]).clamp(-limit, limit).to(dtype).view(torch.uint8)
    assert torch.equal(codes.cpu(), expected.flatten(1))
