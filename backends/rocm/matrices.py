"""fp8 weights as aiter's preshuffled products take them: 16 x 16 tiles, one behind the other, row of tiles by row.

Row n and column k of a matrix of K columns lie at ((n // 16) * (K // 16) + k // 16) * 256 + n % 16 * 16 + k % 16, which
is what `aiter.ops.shuffle.shuffle_weight` makes of fp8 with its layout (16, 16).

Scales stay as the checkpoint has them, one UE8M0 byte for 32 x 32, where the product knows these. Where it knows only
128 x 128, with a float32, the scale of a block is its largest: codes of smaller scales move down by as many powers of
two. That is exact until a code loses bits, which e4m3 has no room for below 2**-9 of the scale; then it is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv41.backends.portable.weights import Matrix, joined
from dsv41.errors import BackendError, InputError
from dsv41.hal.codecs import decode_e4m3, decode_ue8m0, double_ue8m0, e4m3_ocp_to_fnuz, encode_e4m3
from dsv41.hal.records import Dialect
from dsv41.hal.types import Weight

TILE = 16
COLUMNS = 128
"""What the columns of a weight are a multiple of, whichever product."""
FINE, COARSE = 32, 128
"""Rows and columns that one scale is for."""
_VANISHED = 30
"""Powers of two below a scale at which no code is worth half of the smallest one."""


@dataclass(frozen=True)
class TiledMatrix(Matrix):
    """A matrix whose codes are in tiles, which no portable product takes."""


@dataclass(frozen=True)
class CoarseMatrix(TiledMatrix):
    """With codes in `dialect`, and in `scale` a float32 for each 128 x 128."""

    dialect: Dialect = Dialect.OCP


def tiled(codes: Tensor) -> Tensor:
    """`codes` uint8 `[N, K]`, N and K multiples of 16, in tiles: the same shape and bytes, in another order."""
    rows, columns = codes.shape
    cut = codes.view(rows // TILE, TILE, columns // TILE, TILE)
    return cut.transpose(1, 2).reshape(rows, columns)


# Which weights the products take


def has_tiles(matrix: Matrix) -> bool:
    return matrix.rows % TILE == 0 and matrix.data.shape[1] % COLUMNS == 0


def has_fine_scales(matrix: Matrix, groups: int) -> bool:
    """One scale for each 32 x 32, none of which belongs to two groups of rows."""
    return matrix.scale is not None and matrix.block == (FINE, FINE) and matrix.rows % (groups * FINE) == 0


def has_blocks_within_coarse_ones(matrix: Matrix) -> bool:
    return matrix.scale is not None and all(COARSE % size == 0 for size in matrix.block)


# What they make of these


def fine(weights: Sequence[Weight], groups: int = 1) -> TiledMatrix | None:
    """The rows of all `weights` in tiles, their scales as they are; None where the product takes no such matrix.

    Raises BackendError for a matrix that is prepared already.
    """
    matrix = _one(weights)
    if matrix is None or not has_tiles(matrix) or not has_fine_scales(matrix, groups):
        return None
    return TiledMatrix(tiled(matrix.data), matrix.scale, matrix.block)


def coarse(weights: Sequence[Weight], dialect: Dialect) -> CoarseMatrix | None:
    """The rows of all `weights` in tiles and `dialect`, with the largest scale of each 128 x 128, scales of zeros alone
    not counted; None where the product takes no such matrix.

    Raises BackendError for a matrix that is prepared already, InputError for scales that FNUZ needs twice of and that
    are the largest there are.
    """
    matrix = _one(weights)
    if matrix is None or not has_tiles(matrix) or not has_blocks_within_coarse_ones(matrix):
        return None
    codes, exponents = _with_largest_scales(matrix)
    if dialect is Dialect.FNUZ:
        if bool((exponents >= 254).any()):
            raise InputError(
                "a weight has scales of 2**127: expected less, since its numbers are halved for this GPU's fp8 and the "
                "scales doubled; the checkpoint is damaged, or take the portable backend"
            )
        codes, exponents = e4m3_ocp_to_fnuz(codes), double_ue8m0(exponents)
    scale = decode_ue8m0(exponents)
    return CoarseMatrix(tiled(codes[: matrix.rows]), scale, (COARSE, COARSE), dialect)


def _one(weights: Sequence[Weight]) -> Matrix | None:
    for weight in weights:
        if isinstance(weight, Matrix):
            raise BackendError(
                f"a {type(weight).__name__} {list(weight.data.shape)} was given to be put in tiles: expected a weight "
                "in checkpoint layout, since a second time would mix all rows; take the layer's own"
            )
    matrices = joined(weights)
    return matrices[0] if len(matrices) == 1 else None


def _with_largest_scales(matrix: Matrix) -> tuple[Tensor, Tensor]:
    """OCP codes `[N, K]`, N rounded up to 128, and UE8M0 bytes `[N / 128, K / 128]`."""
    assert matrix.scale is not None
    high, wide = matrix.block
    codes = F.pad(matrix.data, (0, 0, 0, -matrix.rows % COARSE))
    scale = F.pad(matrix.scale, (0, 0, 0, len(codes) // high - len(matrix.scale))).int()
    blocks = codes.view(len(codes) // high, high, -1, wide)
    live = (blocks & 0x7F).amax((1, 3)) > 0
    within = (COARSE // high, COARSE // wide)
    largest = (scale * live).unflatten(1, (-1, within[1])).unflatten(0, (-1, within[0])).amax((1, 3))
    down = scale - largest.repeat_interleave(within[0], 0).repeat_interleave(within[1], 1)
    factor = decode_ue8m0((127 + down.clamp(-_VANISHED, 0)).to(torch.uint8))
    numbers = decode_e4m3(blocks, Dialect.OCP) * factor[:, None, :, None]
    return encode_e4m3(numbers, Dialect.OCP).view(codes.shape), largest.to(torch.uint8)
