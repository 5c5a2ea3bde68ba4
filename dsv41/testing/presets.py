"""Distributions that inputs are drawn from: those on which kernels that are right on noise go wrong."""

from __future__ import annotations

import torch
from torch import Tensor

PRESETS = {
    "normal": "standard normal numbers",
    "outliers": "one channel in 32 is 16 to 64 times as large, always the same ones",
    "extremes": "rows of sizes from 2**-12 to 2**8, and within a row groups of 16 from 2**-6 to 1; some rows are zero",
    "ties": "rows are one of three, or the negative of one, so that scores tie and half of them are cut by a ReLU",
}


def rows(preset: str, count: int, width: int, seed: int) -> Tensor:
    """float32 `[count, width]` on the CPU, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, width, generator=generator)
    match preset:
        case "normal":
            return noise
        case "outliers":
            channels = torch.randperm(width, generator=generator)[: max(1, width // 32)]
            noise[:, channels] *= 2.0 ** torch.randint(4, 7, (len(channels),), generator=generator)
            return noise
        case "extremes":
            sizes = 2.0 ** torch.randint(-12, 9, (count, 1), generator=generator)
            groups = 2.0 ** torch.randint(-6, 1, (count, -(-width // 16)), generator=generator)
            noise *= sizes * groups.repeat_interleave(16, 1)[:, :width]
            noise[torch.rand(count, generator=generator) < 0.1] = 0
            return noise
        case "ties":
            kinds = torch.randint(3, (count,), generator=generator)
            signs = torch.randint(2, (count, 1), generator=generator) * 2.0 - 1
            return torch.randn(3, width, generator=torch.Generator().manual_seed(seed % 7))[kinds] * signs
    raise ValueError(f"preset {preset!r}: expected one of {', '.join(PRESETS)}")
