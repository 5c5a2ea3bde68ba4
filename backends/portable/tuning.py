"""Tile sizes per architecture, from measurements (`docs/performance.md`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv41.backends.portable.target import arch_of


@dataclass(frozen=True)
class Tiles:
    """`heads` x `keys` of a program's tile, and `slices` of 64 dims that it handles at a time."""

    heads: int
    keys: int
    slices: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


# For at most 16, 32 and 128 heads: the launch that scores, and the one that sums rows. Measured on an H200 (sm_90);
# elsewhere chosen so that nothing spills.
_WGMMA = {
    16: (Tiles(16, 64, 1, 2, 4), Tiles(16, 32, 4, 4, 2)),
    32: (Tiles(32, 64, 1, 4, 3), Tiles(32, 32, 4, 4, 2)),
    128: (Tiles(64, 64, 1, 4, 3, 128), Tiles(64, 32, 4, 4, 3)),
}
_MMA = {
    16: (Tiles(16, 64, 1, 4, 3), Tiles(16, 32, 4, 4, 2)),
    32: (Tiles(32, 64, 1, 4, 3), Tiles(32, 32, 2, 4, 2)),
    128: (Tiles(64, 64, 1, 8, 3), Tiles(64, 32, 1, 8, 2)),
}
_MFMA = {
    16: (Tiles(16, 64, 1, 4, 2), Tiles(16, 32, 2, 4, 2)),
    32: (Tiles(32, 64, 1, 4, 2), Tiles(32, 32, 2, 4, 2)),
    128: (Tiles(64, 64, 1, 8, 2), Tiles(64, 32, 2, 8, 2)),
}
_BY_GROUPS = Tiles(64, 32, 2, 4, 2)
"""Instead of the last, where rows are of groups of less than 64 dims: their decoding takes more registers."""
_FEW_TOKENS = {
    16: Tiles(16, 64, 1, 4, 3),
    32: Tiles(32, 64, 1, 4, 2),
    128: Tiles(64, 64, 1, 8, 2),
}
"""The sum of rows where there are too few tokens to fill a GPU with larger pieces."""
_FEW = 32
_WGMMA_ARCHS = ("sm_90", "sm_100", "sm_103")


def attention_tiles(num_tokens: int, num_heads: int, small_groups: bool, device: torch.device) -> tuple[Tiles, Tiles]:
    """For the two launches of attention. A tile of the first has as many keys on every device, since the workspace
    depends on it."""
    arch = arch_of(device)
    wide = arch in _WGMMA_ARCHS
    table = _WGMMA if wide else _MFMA if arch.startswith("gfx") else _MMA
    most = next(most for most in table if num_heads <= most)
    score, mix = table[most]
    if num_tokens <= _FEW:
        mix = _FEW_TOKENS[most]
    elif wide and small_groups and most > 32:
        mix = _BY_GROUPS
    return score, mix
