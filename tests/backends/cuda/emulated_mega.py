"""FlashMLA's fused kernel in torch, written from the library's rules: every call is checked and then computed.

It stands in for the module `flash_mla.fused_norm_rope_attn_rope_cast` and shares nothing with the kernels of this
package: records are taken apart byte by byte here. What the library would refuse or silently misread raises
AssertionError, naming the rule. `calls` are the name and the arguments of every call. Numbers are rounded where the
reference rounds them, so that what differs from it is no matter of rounding; where the kernel does is not documented.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.backends.cuda import flashmla_mega
from dsv41.hal.device import Library

BUILDS = {"page": "1.0.0.post20260924", "token": "1.0.0.post20260930"}
"""A build for each placement of the scales of the 528 and 288 byte records."""
DIM, ROPE, GROUP_HEADS = 512, 64, 8

calls: list[tuple[str, dict[str, Any]]] = []
_installed = SimpleNamespace(placement="page")


def install(monkeypatch: pytest.MonkeyPatch, placement: str = "page") -> None:
    """Put this module in the library's place, as a build that reads scales in `placement`."""
    calls.clear()
    monkeypatch.setattr(_installed, "placement", placement)
    monkeypatch.setitem(sys.modules, flashmla_mega.MODULE, sys.modules[__name__])
    features = frozenset({"mega", "record-v4", "record-v41", "record-nvfp4", f"placement-{placement}"})
    library = Library(True, BUILDS[placement], features)
    monkeypatch.setattr(flashmla_mega, "inspect", lambda name, version: library)


def decode(
    enable_q_norm: bool,
    rms_norm_eps: float,
    token_positions: Tensor,
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: Tensor,
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    q: Tensor,
    k_cache: Tensor,
    indices_in_kvcache: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    calls.append(("decode", dict(locals())))
    demand(enable_q_norm is False, "V4.1 has no norm of a query head")
    demand(rms_norm_eps > 0, "rms_norm_eps is positive")
    demand(is_rope_neox_style is False, "pairs are interleaved (GPT-J)")
    demand(rope_dim == ROPE, "rope_dim is 64")
    demand(num_per_channels == 32, "num_per_channels is 32")
    demand(use_tma_aligned_col_major_sf is round_sf is use_packed_ue8m0 is True, "the three booleans are True")
    demand(d_v == DIM, "d_v is 512")
    demand(q.ndim == 3 and q.shape[1] in (64, 128) and q.shape[2] == DIM, "q is [s_q, 64 or 128, 512]")
    demand(q.dtype == torch.bfloat16 and q.is_contiguous(), "q is bf16 and dense")
    tokens, heads = q.shape[:2]
    demand(tokens > 0, "a launch has tokens")
    demand(n_wv_group * GROUP_HEADS == heads, "8 heads a wo_a group")
    demand(token_positions.dtype == torch.int32, "token_positions are int32")
    demand(token_positions.shape == (tokens,) and token_positions.is_contiguous(), "token_positions are [s_q]")
    demand(cos_sin_cache.dtype == torch.float32 and cos_sin_cache.shape[1:] == (ROPE,), "cos_sin_cache is fp32 [*, 64]")
    demand(cos_sin_cache.is_contiguous(), "cos_sin_cache is dense")
    sink = torch.full((heads,), -torch.inf, device=q.device) if attn_sink is None else attn_sink
    demand(sink.dtype == torch.float32 and sink.shape == (heads,) and sink.is_contiguous(), "attn_sink is fp32 [Hq]")
    extra = (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    demand(len({part is None for part in extra[:2]}) == 1, "an extra cache comes with its indices")
    record, extra_record = _check_cache(k_cache, (584, 528)), 0
    if extra_k_cache is not None:
        extra_record = _check_cache(extra_k_cache, (record, 288) if record == 528 else (record,))
    columns = {0: 1, 288: 8}.get(extra_record, 4)
    tables = [(k_cache, _check_table(k_cache, indices_in_kvcache, topk_length, tokens, columns))]
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        tables.append(
            (extra_k_cache, _check_table(extra_k_cache, extra_indices_in_kvcache, extra_topk_length, tokens, 1))
        )

    # Outputs as the library allocates them: what nobody writes is NaN.
    groups, padded = heads // GROUP_HEADS, -(-tokens // 4) * 4
    out = torch.full((tokens, groups, GROUP_HEADS * DIM), 0x7F, dtype=torch.uint8, device=q.device)
    words = torch.full((groups, GROUP_HEADS * DIM // 128, padded), -1, dtype=torch.int32, device=q.device)
    scales = words.permute(2, 0, 1)[:tokens]
    lse = torch.full((tokens, heads), torch.inf, device=q.device)
    if q.device.type == "meta":
        return out.view(torch.float8_e4m3fn), scales, lse
    demand(bool(((token_positions >= 0) & (token_positions < len(cos_sin_cache))).all()), "positions are in the table")
    with q.device:
        codes, exponents = _attend(q, sink, sm_scale, cos_sin_cache[token_positions.long()], tables, lse)
    out.copy_(codes.permute(0, 1, 3, 2, 4).reshape(out.shape))  # ((d // 32) * 8 + h) * 32 + d % 32
    for place in range(GROUP_HEADS * DIM // 32):
        run, member, word, shift = place // GROUP_HEADS, place % GROUP_HEADS, place // 4, 8 * (place % 4)
        if shift == 0:
            scales[:, :, word] = 0
        scales[:, :, word] |= exponents[:, :, member, run].int() << shift
    return out.view(torch.float8_e4m3fn), scales, lse


def _attend(
    q: Tensor, sink: Tensor, sm_scale: float, table: Tensor, tables: list[tuple[Tensor, list[Tensor]]], lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Codes `[T, groups, 8, 16, 32]` in standard order and their scale bytes. A row with a key has its lse written."""
    tokens, heads = q.shape[:2]
    head, dim = torch.arange(heads)[:, None], torch.arange(DIM)[None, :]
    standard = q.flatten(1).float()[:, (dim // 16) * (heads * 16) + head * 16 + dim % 16]
    queries = _turn(standard, table, 1.0).bfloat16().float()
    attended = torch.zeros(tokens, heads, DIM)
    for token in range(tokens):
        keys = torch.cat([_rows(cache, rows[token]) for cache, rows in tables])
        if len(keys) == 0:
            continue  # zeros, whatever the query holds
        scores = queries[token] @ keys.T * sm_scale
        lse[token] = scores.logsumexp(-1)
        share = 1 / (1 + torch.exp(sink - lse[token]))
        attended[token] = (scores.softmax(-1) @ keys) * share[:, None]
    turned = _turn(attended.bfloat16().float(), table, -1.0).bfloat16().float()
    return _mxfp8(turned.view(tokens, -1, GROUP_HEADS, DIM // 32, 32))


def permute_q_b_proj(weights: tuple[Tensor, Tensor], h_q: int, d_q: int) -> tuple[Tensor, Tensor]:
    """`w` e4m3 `[h_q * d_q, K]` with its rows in the order of q, and `sf` int32 `[h_q * d_q, K / 128]`, of whose four
    bytes each is the UE8M0 scale of 32 columns."""
    data, words = _check_weights(weights, h_q * d_q)
    source = [0] * (h_q * d_q)
    for h in range(h_q):
        for d in range(d_q):
            source[(d // 16) * (h_q * 16) + h * 16 + d % 16] = h * d_q + d
    return data[source].view(torch.float8_e4m3fn), words[source]


def permute_wv_proj(weights: tuple[Tensor, Tensor], wv_group_size: int, d_o: int) -> tuple[Tensor, Tensor]:
    """`w` e4m3 `[N, wv_group_size * d_o]` with `sf` int32 of 32 columns a byte: columns in the order of the output."""
    demand(wv_group_size == GROUP_HEADS, "8 heads a wo_a group")
    data, words = _check_weights(weights, weights[0].shape[0])
    scales = words.contiguous().view(torch.uint8)
    columns, groups = [0] * (wv_group_size * d_o), [0] * (wv_group_size * d_o // 32)
    for h in range(wv_group_size):
        for d in range(d_o):
            columns[((d // 32) * wv_group_size + h) * 32 + d % 32] = h * d_o + d
            groups[(d // 32) * wv_group_size + h] = (h * d_o + d) // 32
    return data[:, columns].view(torch.float8_e4m3fn), scales[:, groups].view(torch.int32)


def demand(condition: bool, rule: str) -> None:
    assert condition, f"flash_mla: {rule}"


def _check_weights(weights: tuple[Tensor, Tensor], rows: int) -> tuple[Tensor, Tensor]:
    data, words = weights
    demand(data.dtype == torch.float8_e4m3fn and data.shape[0] == rows, "w is e4m3 [out, in]")
    demand(words.dtype == torch.int32 and words.shape == (rows, data.shape[1] // 128), "sf is int32 [out, in / 128]")
    return data.view(torch.uint8), words


def _check_cache(cache: Tensor, records: tuple[int, ...]) -> int:
    demand(cache.ndim == 4 and cache.shape[2] == 1, "a cache is [pages, page, 1, record]")
    record = cache.shape[3]
    demand(record in records, f"a record of {records} bytes, and 288 as extra cache beside 528 only")
    demand(cache.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn), "a cache is of bytes")
    demand(cache.stride(3) == 1 and cache.stride(1) == record, "a page is dense inside")
    row = {584: 576, 528: 512, 288: 256}[record]
    footer = record == 584 or _installed.placement == "page"
    demand(cache.stride(0) % (row if footer else 512) == 0, "the page stride is a multiple of the data row")
    demand(cache.shape[0] * (cache.stride(0) // row) < 2**31, "rows are counted in int32")
    demand(cache.device.type == "meta" or cache.data_ptr() % 16 == 0, "a cache starts at 16 bytes")
    return record


def _check_table(cache: Tensor, indices: Tensor, lengths: Tensor | None, tokens: int, columns: int) -> list[Tensor]:
    """The slots that each token reads."""
    demand(
        indices.dtype == torch.int32 and indices.ndim == 2 and len(indices) == tokens, "indices are int32 [s_q, topk]"
    )
    demand(indices.stride(1) == 1 and indices.stride(0) % 8 == 0, "rows of indices start at 32 bytes")
    demand(indices.shape[1] > 0 and indices.shape[1] % columns == 0, f"topk is a multiple of {columns}")
    assert lengths is not None, "what this package always gives"
    demand(lengths.dtype == torch.int32 and lengths.shape == (tokens,), "lengths are int32 [s_q]")
    demand(lengths.is_contiguous(), "lengths are dense")
    if indices.device.type == "meta":
        return []
    demand(bool(((lengths >= 0) & (lengths <= indices.shape[1])).all()), "lengths are 0 to topk")
    inside = torch.arange(indices.shape[1], device=indices.device) < lengths[:, None]
    slots = cache.shape[0] * cache.shape[1]
    demand(bool((indices[inside] < slots).all() and (indices[inside] >= -1).all()), "indices are slots, or exactly -1")
    demand(bool((indices[~inside] == -1).all()), "what is past a length is -1")
    return [row[:length][row[:length] >= 0].long() for row, length in zip(indices, lengths.tolist(), strict=True)]


def _rows(cache: Tensor, slots: Tensor) -> Tensor:
    """float32 `[n, 512]` of the records in `slots`, from their bytes."""
    size, record = cache.shape[1], cache.shape[3]
    values, scales = {584: (576, 8), 528: (512, 16), 288: (256, 32)}[record]
    memory = cache.view(torch.uint8).as_strided((cache.shape[0], size * record), (cache.stride(0), 1))
    page, token = slots // size, slots % size
    if record == 584 or _installed.placement == "page":
        starts = (token * values, size * values + token * scales)
    else:
        starts = (token * record, token * record + values)
    data, factors = (
        memory[page[:, None], start[:, None] + torch.arange(n)]
        for start, n in zip(starts, (values, scales), strict=True)
    )
    if record == 288:
        nibbles = torch.stack((data & 15, data >> 4), dim=-1).flatten(1)
        return _e2m1(nibbles) * _e4m3(factors).repeat_interleave(16, 1)
    if record == 528:
        return _e4m3(data) * _power(factors).repeat_interleave(32, 1)
    plain = _e4m3(data[:, :448]) * _power(factors[:, :7]).repeat_interleave(64, 1)
    return torch.cat((plain, data[:, 448:].contiguous().view(torch.bfloat16).float()), dim=1)


def _e4m3(codes: Tensor) -> Tensor:
    code = codes.int()
    sign, exponent, mantissa = 1.0 - 2.0 * (code >> 7), (code >> 3) & 15, (code & 7).float()
    number = torch.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.float() - 10))
    return torch.where((code & 0x7F) == 0x7F, torch.nan, sign * number)


def _e2m1(codes: Tensor) -> Tensor:
    code = codes.int()
    exponent, mantissa = (code >> 1) & 3, (code & 1).float()
    number = torch.where(exponent == 0, mantissa / 2, (2 + mantissa) * 2.0 ** (exponent.float() - 2))
    return (1.0 - 2.0 * (code >> 3)) * number


def _power(codes: Tensor) -> Tensor:
    return torch.where(codes == 255, torch.nan, torch.exp2(codes.float() - 127))


def _turn(x: Tensor, table: Tensor, way: float) -> Tensor:
    """`x` `[T, H, 512]` with its last 64 dims turned by `table` `[T, 64]`, back where `way` is -1."""
    cos, sin = table[:, None, :32], table[:, None, 32:] * way
    even, odd = x[..., -ROPE::2], x[..., -ROPE + 1 :: 2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-ROPE], turned), dim=-1)


def _mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of `x` `[..., 32]` and one scale byte for each 32: 2 ** ceil(log2(amax / 448))."""
    fraction, exponent = torch.frexp(x.abs().amax(-1).clamp_min(1e-4) / 448)
    exponent = exponent - (fraction == 0.5).int()
    codes = (x / torch.exp2(exponent.float())[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), exponent + 127
