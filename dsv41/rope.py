"""Cosine and sine tables of the rotary embedding, plain and with YaRN frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv41.config import DeepseekV41Config, YarnScaling


def inverse_frequencies(dim: int, theta: float, yarn: YarnScaling | None) -> Tensor:
    """Radians a position for each of the `dim // 2` pairs, fp32.

    YaRN (Peng et al. 2023, section 3.2) divides the slow frequencies by `factor`, keeps the fast ones and ramps
    between the pairs that turn `beta_fast` and `beta_slow` times within the original context. V4.1 clamps the ramp's
    bounds to `dim - 1`, not `dim // 2 - 1`, and scales no magnitude.
    """
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequency = 1.0 / theta**exponent
    if yarn is None:
        return frequency

    def pair_that_turns(times: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequency / yarn.factor * ramp + frequency * (1 - ramp)


def cos_sin_table(config: DeepseekV41Config, ratio: int, max_len: int, device: torch.device | str = "cpu") -> Tensor:
    """float32 `[max_len, rope_dim]`: the cosines of a layer's positions, then the sines.

    The base belongs to the layer: with `ratio` 0 `rope_theta` without YaRN, else `compress_rope_theta` with it.
    """
    theta, yarn = (config.rope_theta, None) if ratio == 0 else (config.compress_rope_theta, config.rope_scaling)
    frequency = inverse_frequencies(config.qk_rope_head_dim, theta, yarn)
    angle = torch.arange(max_len, dtype=torch.float32)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(device)
