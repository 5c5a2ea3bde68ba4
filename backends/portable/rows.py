"""Reading and writing cache rows inside kernels. Every offset comes from a `RowFormat`.

A cache is the tuple (data, pool, tensor_scale, page_stride, pool_stride): its two buffers' first bytes, its one scale,
and bytes from a page to the next. `pool` and `tensor_scale` are None where the layout has none.
"""

import triton
import triton.language as tl

from dsv41.backends.portable import formats
from dsv41.backends.portable.numbers import (
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    narrow,
    round_to,
    ue8m0_of,
)

_E2M1, _FNUZ = tl.constexpr(formats.E2M1), tl.constexpr(formats.FNUZ)
_BF16, _FP32 = tl.constexpr(formats.BF16), tl.constexpr(formats.FP32)
_NO_SCALE, _TENSOR_SCALE = tl.constexpr(formats.NO_SCALE), tl.constexpr(formats.TENSOR_SCALE)
_E4M3_SCALE, _FP32_SCALE = tl.constexpr(formats.E4M3_SCALE), tl.constexpr(formats.FP32_SCALE)

_LIMIT_OCP = tl.constexpr(0x43E00000)  # float32 bits of 448
_LIMIT_FNUZ = tl.constexpr(0x43700000)  # of 240
_LIMIT_E2M1 = tl.constexpr(0x40C00000)  # of 6


@triton.jit
def value_offset(row, byte, F: tl.constexpr):
    """Where value byte `byte` of the page's row `row` lies in its page."""
    if F.value_tile_rows == 0:
        offset = row * F.value_stride + byte
    else:
        offset = _in_tile(row, byte, F.value_bytes, F.value_tile_rows, F.value_tile_bytes)
    return offset


@triton.jit
def scale_offset(row, byte, F: tl.constexpr):
    """Where scale byte `byte` of the page's row `row` lies in its page, or in its page of the pool."""
    if F.scale_tile_rows == 0:
        offset = row * F.scale_stride + byte
    else:
        offset = _in_tile(row, byte, F.scale_bytes, F.scale_tile_rows, F.scale_tile_bytes)
    return F.scale_start + offset


@triton.jit
def _in_tile(row, byte, WIDTH: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """The same in rows of `WIDTH` bytes cut into tiles of `ROWS` x `BYTES`, as `CacheLayout` says."""
    tile = row // ROWS * (ROWS * WIDTH) + byte // BYTES * (ROWS * BYTES)
    return tile + row % ROWS * BYTES + byte % BYTES


@triton.jit
def row_of(slot, F: tl.constexpr):
    """The row of each slot in its page, int32.

    Told to be a multiple of 1, for the compiler takes what it knows of the first of several consecutive slots for true
    of all, and then loads rows of 68 bytes by eight at a time (seen in Triton 3.6 and 3.9).
    """
    row = (slot % F.page_size).to(tl.int32)
    if len(row.shape) == 2:
        row = tl.multiple_of(row, (1, 1))
    elif len(row.shape) == 1:
        row = tl.multiple_of(row, (1,))
    return row


@triton.jit
def _values(cache, slot, F: tl.constexpr):
    """The page of each slot (uint8 pointers), and the row in it."""
    return cache[0] + slot // F.page_size * cache[3], row_of(slot, F)


@triton.jit
def scale_rows(cache, slot, F: tl.constexpr):
    """The page of each slot's scales (uint8 pointers), and the row in it that they lie in."""
    page, row = _values(cache, slot, F)
    if F.pooled:
        page = cache[1] + slot // F.page_size * cache[4]
    if F.scale_lanes > 1:
        row = row % F.scale_lanes * (F.page_size // F.scale_lanes) + row // F.scale_lanes
    return page, row


@triton.jit
def _wide_values(page, row, first, number, TYPE: tl.constexpr, F: tl.constexpr):
    """Pointers to the row's numbers of `TYPE`, counted from value byte `first` on. Counted in numbers where they are
    consecutive, since the compiler loads bytes with gaps one by one."""
    if F.value_tile_rows == 0:
        where = (page + row * F.value_stride + first).to(tl.pointer_type(TYPE)) + number
    else:
        BYTES: tl.constexpr = TYPE.primitive_bitwidth // 8
        where = (page + value_offset(row, first + number * BYTES, F)).to(tl.pointer_type(TYPE))
    return where


@triton.jit
def load_codes(cache, slot, live, dim, F: tl.constexpr):
    """float32 of the coded dims `dim` of the rows in `slot` (int64), their scales not applied.

    `slot`, `live` and `dim` are broadcast; what is not `live` is not read and gives 0.
    """
    page, row = _values(cache, slot, F)
    if F.code == _FP32:
        where = _wide_values(page, row, 0, dim, tl.float32, F)
        x = tl.load(where, live, other=0.0)
    elif F.code == _BF16:
        where = _wide_values(page, row, 0, dim, tl.bfloat16, F)
        x = tl.load(where, live, other=0.0).to(tl.float32)
    elif F.code == _E2M1:
        byte = tl.load(page + value_offset(row, dim // 2, F), live, other=0)
        x = decode_e2m1(byte.to(tl.int32) >> (dim % 2 * 4))
    elif F.native:
        byte = tl.load(page + value_offset(row, dim, F), live, other=0)
        x = byte.to(tl.float8e4b8 if F.code == _FNUZ else tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        x = decode_e4m3(tl.load(page + value_offset(row, dim, F), live, other=0), F.code == _FNUZ)
    return x


@triton.jit
def load_plain(cache, slot, live, dim, F: tl.constexpr):
    """float32 of the bf16 dims `dim` behind the coded ones."""
    page, row = _values(cache, slot, F)
    where = _wide_values(page, row, F.coded, dim - F.coded, tl.bfloat16, F)
    return tl.load(where, live, other=0.0).to(tl.float32)


@triton.jit
def load_scales(cache, slot, live, group, F: tl.constexpr):
    """float32 of the scales of the groups `group`; 1 where the layout has no scale at all."""
    if F.scale == _NO_SCALE:
        scales = 1.0
    elif F.scale == _TENSOR_SCALE:
        scales = tl.load(cache[2])
    elif F.scale == _FP32_SCALE:
        page, row = scale_rows(cache, slot, F)
        where = (page + scale_offset(row, group * 4, F)).to(tl.pointer_type(tl.float32))
        scales = tl.load(where, live, other=0.0)
    else:
        page, row = scale_rows(cache, slot, F)
        codes = tl.load(page + scale_offset(row, group, F), live, other=0)
        scales = decode_e4m3(codes, False) if F.scale == _E4M3_SCALE else decode_ue8m0(codes)
    return scales


@triton.jit
def load_rows(cache, slot, live, START: tl.constexpr, WIDTH: tl.constexpr, F: tl.constexpr):
    """float32 `[N, WIDTH]`: dims from `START` on of the rows in `slot` `[N]`, scaled; zeros where not `live` `[N]`.

    The dims are coded or plain alike: `F.coded` is no dim between the first and the last.
    """
    dim = START + tl.arange(0, WIDTH)[None, :]
    slots, lives = slot[:, None], live[:, None]
    if START >= F.coded:
        x = load_plain(cache, slots, lives, dim, F)
    elif F.group == 0:
        x = load_codes(cache, slots, lives, dim, F) * load_scales(cache, slots, lives, 0, F)
    elif WIDTH <= F.group:
        x = load_codes(cache, slots, lives, dim, F) * load_scales(cache, slots, lives, START // F.group, F)
    else:
        x = load_codes(cache, slots, lives, dim, F) * load_scales(cache, slots, lives, dim // F.group, F)
    return x


@triton.jit
def store_row(cache, slot, x, F: tl.constexpr):
    """Quantise `x` float32 `[F.dim]` and write it into `slot`, one int64 >= 0."""
    page, row = _values(cache, slot, F)
    dim = tl.arange(0, F.dim)
    if F.code == _FP32:
        tl.store((page + value_offset(row, dim * 4, F)).to(tl.pointer_type(tl.float32)), x)
    elif F.code == _BF16:
        _store_bf16(page + value_offset(row, dim * 2, F), x, dim >= 0)
    else:
        if F.group:
            coded = _store_scales(cache, slot, x, F)
        else:
            coded = tl.div_rn(x, tl.zeros_like(x) + load_scales(cache, slot, True, 0, F))
        if F.code == _E2M1:
            low, high = tl.split(tl.reshape(encode_e2m1(coded), (F.dim // 2, 2)))
            byte = tl.arange(0, F.dim // 2)
            tl.store(page + value_offset(row, byte, F), (low | high << 4).to(tl.uint8))
        else:
            tl.store(page + value_offset(row, dim, F), encode_e4m3(coded, F.code == _FNUZ), dim < F.coded)
        if F.coded < F.dim:
            _store_bf16(page + value_offset(row, F.coded + (dim - F.coded) * 2, F), x, dim >= F.coded)


@triton.jit
def _store_bf16(where, x, live):
    tl.store(where.to(tl.pointer_type(tl.bfloat16)), narrow(x, tl.bfloat16), live)


@triton.jit
def _store_scales(cache, slot, x, F: tl.constexpr):
    """Write the scales of a row, padding bytes too, and return its coded dims divided by them."""
    GROUPS: tl.constexpr = F.dim // F.group
    grouped = tl.reshape(x, (GROUPS, F.group))
    page, row = scale_rows(cache, slot, F)
    group = tl.arange(0, GROUPS)
    codes, scales = group_scales(grouped, F.scale, F.code, F.floor_bits)
    live = group < F.coded // F.group
    if F.scale == _FP32_SCALE:
        tl.store((page + scale_offset(row, group * 4, F)).to(tl.pointer_type(tl.float32)), scales, live)
    else:
        PADDED: tl.constexpr = F.scale_bytes  # a pad byte is zero
        tl.store(page + scale_offset(row, group, F), tl.where(live, codes, 0).to(tl.uint8), group < PADDED)
    divisor = tl.where(live, scales, 1.0)[:, None] + tl.zeros_like(grouped)
    return tl.reshape(tl.div_rn(grouped, divisor), (F.dim,))


@triton.jit
def group_scales(grouped, SCALE: tl.constexpr, CODE: tl.constexpr, FLOOR_BITS: tl.constexpr):
    """The scales that bring each row of `grouped` `[groups, n]` to the largest number of `CODE`: int32 bytes and their
    float32 values. A group with a NaN gets a NaN scale."""
    floor = tl.full((1,), FLOOR_BITS, tl.int32).to(tl.float32, bitcast=True)
    amax = tl.maximum(tl.max(tl.abs(grouped), axis=1), floor)
    nan = tl.max((grouped != grouped).to(tl.int32), axis=1) > 0
    if SCALE == _E4M3_SCALE:
        codes = encode_e4m3(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), False).to(tl.int32)
        codes = tl.where(nan, 0x7F, codes)
        scales = decode_e4m3(codes.to(tl.uint8), False)
    else:
        LIMIT: tl.constexpr = _LIMIT_E2M1 if CODE == _E2M1 else _LIMIT_FNUZ if CODE == _FNUZ else _LIMIT_OCP
        codes = tl.where(nan, 255, ue8m0_of(amax, LIMIT))
        scales = decode_ue8m0(codes.to(tl.uint8))
    return codes, scales


@triton.jit
def round_trip(x, F: tl.constexpr):
    """`x` float32 `[N, F.dim]` as it would come back from rows of this format, which has no tensor scale."""
    tl.static_assert(F.scale != _TENSOR_SCALE, "a round trip knows no tensor scale")
    if F.code == _FP32:
        back = x
    elif F.code == _BF16:
        back = round_to(x, tl.bfloat16)
    else:
        grouped = tl.reshape(x, (x.shape[0] * (F.dim // F.group), F.group))
        _, scales = group_scales(grouped, F.scale, F.code, F.floor_bits)
        factor = scales[:, None] + tl.zeros_like(grouped)
        coded = tl.div_rn(grouped, factor)
        if F.code == _E2M1:
            coded = decode_e2m1(encode_e2m1(coded))
        else:
            coded = decode_e4m3(encode_e4m3(coded, F.code == _FNUZ), F.code == _FNUZ)
        back = tl.reshape(coded * factor, (x.shape[0], F.dim))
        if F.coded < F.dim:
            dim = tl.arange(0, F.dim)[None, :]
            back = tl.where(dim < F.coded, back, round_to(x, tl.bfloat16))
    return back
