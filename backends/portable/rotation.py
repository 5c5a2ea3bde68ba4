"""Rotary embedding inside kernels: the interleaved form, pair i being dims 2i and 2i + 1 of the last `ROPE`.

`cos_sin` is float32 `[max_len, ROPE]`, dense: the cosines of a position, then its sines. Padding (position -1) turns by
position 0, as if it stood there.
"""

import triton
import triton.language as tl

from dsv41.backends.portable.numbers import round_to


@triton.jit
def turn(x, cos, sin):
    """The pairs of float32 `x` `[N, n]` by angles given as `cos` and `sin`, broadcast to `[N, n // 2]`.

    The inverse rotation is that by `-sin`.
    """
    ROWS: tl.constexpr = x.shape[0]
    PAIRS: tl.constexpr = x.shape[1] // 2
    even, odd = tl.split(tl.reshape(x, (ROWS, PAIRS, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (ROWS, 2 * PAIRS))


@triton.jit
def load_angles(cos_sin, position, ROPE: tl.constexpr):
    """`cos` and `sin`, each `[1, ROPE // 2]`, of one position (int64)."""
    angle = cos_sin + tl.maximum(position, 0) * ROPE + tl.arange(0, ROPE // 2)[None, :]
    return tl.load(angle), tl.load(angle + ROPE // 2)


@triton.jit
def rotate(x, cos_sin, position, ROPE: tl.constexpr, INVERSE: tl.constexpr = False):
    """Float32 `x` `[N, D]` with its last `ROPE` dims rotated at one position, or back; the others pass through."""
    PLAIN: tl.constexpr = x.shape[1] - ROPE
    pair = tl.arange(0, x.shape[1] // 2)[None, :] - PLAIN // 2
    angle = cos_sin + tl.maximum(position, 0) * ROPE + pair
    cos = tl.load(angle, pair >= 0, other=1.0)
    sin = tl.load(angle + ROPE // 2, pair >= 0, other=0.0)
    if INVERSE:
        sin = -sin
    # The pairs in front are taken as they are: NaN times a sine of zero is NaN.
    return tl.where(tl.arange(0, x.shape[1])[None, :] < PLAIN, x, turn(x, cos, sin))


@triton.jit
def rotated_row(x, cos_sin, position, DTYPE: tl.constexpr, ROPE: tl.constexpr):
    """Float32 `x` `[D]` rotated at `position` and rounded to `DTYPE`, in float32."""
    row = rotate(tl.reshape(x, (1, x.shape[0])), cos_sin, position, ROPE)
    return round_to(tl.reshape(row, (x.shape[0],)), DTYPE)
