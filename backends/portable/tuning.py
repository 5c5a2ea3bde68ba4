"""Tile sizes per architecture, from measurements (`docs/performance.md`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv41.backends.portable.target import arch_of


@dataclass(frozen=True)
class ScoreTiles:
    """Heads of a program that scores a tile of keys."""

    heads: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@dataclass(frozen=True)
class MixTiles:
    """Heads of a program that sums rows, the `keys` that it takes at a time, and its slices of 64 dims."""

    heads: int
    keys: int
    slices: int
    num_warps: int
    num_stages: int


# For at most 16, 32 and 128 heads: the launch that scores, and the one that sums rows. Measured on an H200 (sm_90);
# elsewhere chosen so that nothing spills.
_WGMMA = {
    16: (ScoreTiles(16, 2, 4), MixTiles(16, 32, 4, 4, 2)),
    32: (ScoreTiles(32, 4, 3), MixTiles(32, 32, 4, 4, 2)),
    128: (ScoreTiles(64, 4, 3, 128), MixTiles(64, 32, 4, 4, 3)),
}
_MMA = {
    16: (ScoreTiles(16, 4, 3), MixTiles(16, 32, 4, 4, 2)),
    32: (ScoreTiles(32, 4, 3), MixTiles(32, 32, 2, 4, 2)),
    128: (ScoreTiles(64, 8, 3), MixTiles(64, 32, 1, 8, 2)),
}
_MFMA = {
    16: (ScoreTiles(16, 4, 2), MixTiles(16, 32, 2, 4, 2)),
    32: (ScoreTiles(32, 4, 2), MixTiles(32, 32, 2, 4, 2)),
    128: (ScoreTiles(64, 8, 2), MixTiles(64, 32, 2, 8, 2)),
}
_BY_GROUPS = MixTiles(64, 32, 2, 4, 2)
"""Instead of the last, where rows are of groups of less than 64 dims: their decoding takes more registers."""
_FEW_TOKENS = {
    16: MixTiles(16, 64, 1, 4, 3),
    32: MixTiles(32, 64, 1, 4, 2),
    128: MixTiles(64, 64, 1, 8, 2),
}
"""The sum of rows where there are too few tokens to fill a GPU with larger pieces."""
_FEW = 32
_WGMMA_ARCHS = ("sm_90", "sm_100", "sm_103")


def attention_tiles(
    num_tokens: int, num_heads: int, small_groups: bool, device: torch.device
) -> tuple[ScoreTiles, MixTiles]:
    """For the two launches of attention."""
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
