"""aiter's sparse MLA without a GPU of AMD's: its signature, its rules checked, its answer in torch.

Written from the rules of the library and from the bytes of the records, and from nothing of ours. What the real one
would refuse or misread raises AssertionError with the rule. Where the real one divides 0 by 0, so does this one.
"""

# ruff: noqa: PT018  (a rule is one assertion, however many parts it has)

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_PACKED, _FP8, _BF16 = "fp8_dsv4_mla", "fp8_scalar", "bf16"
_DTYPES = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


class Aiter:
    """The module. `calls` holds the keyword arguments of every call."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.calls: list[dict[str, Any]] = []

    def sparse_mla_fwd(
        self,
        q: Tensor,
        kv_buffer: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        softmax_scale: float,
        *,
        kv_scale: Tensor | None = None,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        kv_splits: int | None = None,
        skip_reduce: bool = False,
        has_invalid: bool = False,
        dot_precision: str = "bf16",
        q_scale: Tensor | None = None,
        out: Tensor | None = None,
        return_lse: bool = False,
        attn_sink: Tensor | None = None,
        extra_kv: Tensor | None = None,
        extra_indptr: Tensor | None = None,
        extra_indices: Tensor | None = None,
        extra_kv_scale: Tensor | None = None,
        inv_rope_positions: Tensor | None = None,
        inv_rope_cos_sin_cache: Tensor | None = None,
        out_mxfp8: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        given = {name: value for name, value in locals().items() if name != "self"}
        self.calls.append({name: value for name, value in given.items() if value is not None})
        assert kv_splits is None and not skip_reduce and dot_precision == "bf16" and q_scale is None and not return_lse
        assert q.dtype == torch.bfloat16 and q.ndim == 3 and q.shape[2] == 512, "q is bf16 [C, H, 512]"
        assert q.stride(2) == 1, "the last dim of q is contiguous"
        tokens, heads, _ = q.shape
        assert tokens > 0, "a grid has programs"
        assert 2 * tokens * q.stride(0) < 2**31, "offsets into q have 32 bits"

        kind = self._kind(kv_buffer, kv_scale)
        self._check_stream(q, kv_buffer, kv_indptr, kv_indices, has_invalid)
        segments = [(kv_buffer, kv_indptr, kv_indices, kv_scale)]
        extra = (extra_kv, extra_indptr, extra_indices)
        assert len({value is None for value in extra}) == 1, "the three of the extra segment go together"
        if extra_kv is not None:
            assert extra_indptr is not None and extra_indices is not None
            scale = extra_kv_scale if extra_kv_scale is not None else kv_scale
            pair = {kind, self._kind(extra_kv, scale)}
            assert pair == {_FP8} or _FP8 not in pair, "both segments are fp8_scalar, or neither is"
            self._check_stream(q, extra_kv, extra_indptr, extra_indices, has_invalid)
            segments.append((extra_kv, extra_indptr, extra_indices, scale))
        v4 = kind == _PACKED or (extra_kv is not None and kind != _FP8)
        assert not v4 or self.arch == "gfx950", "packed caches and pairs in 584 or bf16 are for gfx950 alone"
        if kind != _PACKED:
            assert (kv_lora_rank, qk_rope_head_dim) == (512, 0), "plain rows of 512 have their rotated dims inside"
        if attn_sink is not None:
            assert attn_sink.dtype == torch.float32 and tuple(attn_sink.shape) == (heads,), "one fp32 sink a head"

        assert (inv_rope_positions is None) == (inv_rope_cos_sin_cache is None), "positions go with angles"
        assert v4 or (inv_rope_positions is None and out_mxfp8 is None), "the epilogue is for V4 caches"
        assert out is None or out_mxfp8 is None, "out_mxfp8 is in place of out"
        if inv_rope_positions is not None:
            assert inv_rope_cos_sin_cache is not None
            assert inv_rope_positions.dtype == torch.int64 and tuple(inv_rope_positions.shape) == (tokens,)
            assert inv_rope_cos_sin_cache.dtype == torch.float32 and inv_rope_cos_sin_cache.shape[1] == 64
        if out is not None:
            assert out.dtype == torch.bfloat16 and tuple(out.shape[:2]) == (tokens, heads) and out.shape[2] >= 512
            assert out.stride(2) == 1, "the last dim of out is contiguous"
            assert 2 * tokens * out.stride(0) < 2**31, "offsets into out have 32 bits"
        if out_mxfp8 is not None:
            codes, scales = out_mxfp8
            assert codes.dtype == torch.float8_e4m3fn and tuple(codes.shape) == (tokens, heads * 512)
            assert scales.dtype == torch.uint8 and tuple(scales.shape) == (tokens, heads * 16)
            assert codes.is_contiguous() and scales.is_contiguous()
        if q.is_meta:
            return out if out is not None else q.new_empty(q.shape), None

        sink = torch.full((heads,), -math.inf, device=q.device) if attn_sink is None else attn_sink
        found = torch.stack(
            [
                _attend(
                    q[token].float(),
                    torch.cat([self._rows(*segment, token, has_invalid) for segment in segments]),
                    softmax_scale,
                    sink.float(),
                    joins=attn_sink is not None,
                )
                for token in range(tokens)
            ]
        )
        if inv_rope_positions is not None:
            assert inv_rope_cos_sin_cache is not None
            assert (inv_rope_positions >= 0).all() and (inv_rope_positions < len(inv_rope_cos_sin_cache)).all()
            found = _rotated_back(found, inv_rope_cos_sin_cache[inv_rope_positions])
        if out_mxfp8 is not None:
            _quantise(found, *out_mxfp8)
            return out_mxfp8[0].view(tokens, heads, 512), None
        made = q.new_empty(tokens, heads, 512) if out is None else out
        made[..., :512] = found.to(torch.bfloat16)
        return made, None

    def _kind(self, cache: Tensor, scale: Tensor | None) -> str:
        assert cache.ndim == 3, "the caches of V4 are pages"
        assert cache.stride(2) == 1 and cache.stride(1) == cache.shape[2], "a page is dense inside"
        assert cache.stride(0) >= cache.shape[1] * cache.shape[2], "pages do not overlap"
        if cache.dtype == torch.uint8 and cache.shape[2] == 584:
            assert scale is None, "packed caches carry their own scales"
            assert cache.stride(0) % 2 == 0 and cache.storage_offset() % 2 == 0, "a packed cache has a view in bf16"
            return _PACKED
        assert cache.shape[2] == 512, "plain rows are as wide as q"
        if cache.dtype == torch.bfloat16:
            return _BF16
        assert cache.dtype in (_DTYPES[self.arch], torch.uint8), f"{cache.dtype} is not the fp8 of {self.arch}"
        assert scale is not None and scale.dtype == torch.float32 and scale.numel() == 1, "fp8 rows have one fp32 scale"
        return _FP8

    def _check_stream(self, q: Tensor, cache: Tensor, indptr: Tensor, indices: Tensor, has_invalid: bool) -> None:
        for stream in (indptr, indices):
            assert stream.dtype == torch.int32 and stream.ndim == 1 and stream.is_contiguous(), "streams are flat int32"
            assert stream.device == q.device, "streams lie where q does"
        assert len(indptr) == len(q) + 1, "indptr has C + 1 entries"
        assert indices.numel() > 0, "a stream has an address"
        if q.is_meta:
            return
        assert indptr[0] >= 0 and (indptr.diff() >= 0).all() and indptr[-1] <= len(indices), "indptr is a prefix sum"
        live = indices[indptr[0] : indptr[-1]]
        assert has_invalid or (live >= 0).all(), "-1 only with has_invalid"
        assert (live >= -1).all() and (live < cache.shape[0] * cache.shape[1]).all(), "a slot lies inside the cache"

    def _rows(
        self, cache: Tensor, indptr: Tensor, indices: Tensor, scale: Tensor | None, token: int, has_invalid: bool
    ) -> Tensor:
        """float32 `[n, 512]`: what a token sees of one cache."""
        slots = indices[indptr[token] : indptr[token + 1]].long()
        slots = slots[slots >= 0] if has_invalid else slots
        size = cache.shape[1]
        page, row = slots // size, slots % size
        if cache.dtype == torch.bfloat16:
            return cache[page, row].float()
        if scale is not None:
            return e4m3(cache.view(torch.uint8)[page, row], 8 if self.arch == "gfx942" else 7) * scale
        data = cache.as_strided((len(cache), size * 584), (cache.stride(0), 1))
        byte = torch.arange(576, device=data.device)
        values = data[page[:, None], row[:, None] * 576 + byte]
        exponents = data[page[:, None], size * 576 + row[:, None] * 8 + byte[:7]].double() - 127
        coded = e4m3(values[:, :448], 7) * torch.exp2(exponents).repeat_interleave(64, 1)
        rotary = values[:, 448:].contiguous().view(torch.bfloat16)
        return torch.cat((coded.to(torch.bfloat16), rotary), 1).float()


class WithoutEpilogue(Aiter):
    """An earlier state of the function, which only writes what attention gives."""

    def sparse_mla_fwd(  # type: ignore[override]
        self,
        q: Tensor,
        kv_buffer: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        softmax_scale: float,
        *,
        kv_scale: Tensor | None = None,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        has_invalid: bool = False,
        out: Tensor | None = None,
        attn_sink: Tensor | None = None,
        extra_kv: Tensor | None = None,
        extra_indptr: Tensor | None = None,
        extra_indices: Tensor | None = None,
        extra_kv_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        return super().sparse_mla_fwd(**given)


def e4m3(codes: Tensor, bias: int) -> Tensor:
    """float32 of e4m3 bytes by arithmetic: OCP has bias 7 and NaN at 0x7f and 0xff, FNUZ bias 8 and NaN at 0x80."""
    code = torch.arange(256)
    sign = 1.0 - 2.0 * (code >> 7)
    exponent, mantissa = (code >> 3) & 15, code & 7
    power = torch.exp2((exponent.clamp(min=1) - bias).float())
    table = sign * power * (mantissa + 8 * (exponent > 0)) / 8
    table[[0x7F, 0xFF] if bias == 7 else [0x80]] = math.nan
    return table.to(codes.device)[codes.long()]


def _attend(q: Tensor, rows: Tensor, scale: float, sink: Tensor, *, joins: bool) -> Tensor:
    """float32 `[H, 512]`, by the library's formula, in which a sink of -inf is 0 / 0 where there is no row."""
    scores = q @ rows.T * scale
    empty = torch.full((len(q), 1), -math.inf, device=q.device)
    largest = torch.cat((scores, empty), 1).amax(1)
    weights = torch.exp(scores - largest[:, None])
    last = torch.maximum(largest, sink) if joins else largest
    shrink = torch.exp(largest - last)
    total = weights.sum(1) * shrink + (torch.exp(sink - last) if joins else 0)
    return weights @ rows * shrink[:, None] / total[:, None]


def _rotated_back(x: Tensor, angles: Tensor) -> Tensor:
    """The last 64 numbers as 32 adjacent pairs, each turned by minus its angle; `angles` are cosines, then sines."""
    cos, sin = angles[:, None, :32], angles[:, None, 32:]
    one, two = x[..., 448::2], x[..., 449::2]
    turned = torch.stack((one * cos + two * sin, two * cos - one * sin), -1).flatten(-2)
    return torch.cat((x[..., :448], turned), -1)


def _quantise(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    groups = x.to(torch.bfloat16).float().view(len(x), -1, 32)
    exponent = (groups.abs().amax(-1).clamp(min=1e-4) / 448).log2().ceil()
    scales.copy_((exponent + 127).to(torch.uint8))
    scaled = groups / torch.exp2(exponent)[..., None]
    codes.copy_(scaled.clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn))
