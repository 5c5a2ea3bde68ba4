"""aiter's paged fp8 logits without a GPU of AMD's: its signature, its rules checked, its answer in torch.

Written from the rules of the library and from raw bytes, and from nothing of ours. What the real one would refuse or
misread raises AssertionError with the rule.
"""

# ruff: noqa: PT018  (a rule is one assertion, however many parts it has)

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .emulated_aiter import e4m3

_DTYPES = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


class Logits:
    """The module. `calls` holds the keyword arguments of every call."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.calls: list[dict[str, Any]] = []

    def deepgemm_fp8_paged_mqa_logits(
        self,
        q_fp8: Tensor,
        kv_cache: Tensor,
        weights: Tensor,
        out_logits: Tensor,
        context_lens: Tensor,
        kv_indices: Tensor,
        max_model_len: int,
        Preshuffle: bool = False,
        KVBlockSize: int = 1,
        ChunkK: int = 256,
        TotalCuCount: int | None = None,
        WavePerEU: int = 2,
        VarCtxSchedule: Tensor | None = None,
    ) -> str:
        given = {name: value for name, value in locals().items() if name != "self"}
        self.calls.append({name: value for name, value in given.items() if value is not None})
        batch, next_n, heads, dim = q_fp8.shape
        assert TotalCuCount is VarCtxSchedule is None and (ChunkK, WavePerEU) == (256, 2)
        assert batch * next_n > 0, "the processors are divided among the queries"
        assert q_fp8.dtype == _DTYPES[self.arch], f"{q_fp8.dtype} is not the fp8 of {self.arch}"
        assert dim == 128 and heads >= 32 and heads & (heads - 1) == 0, "tiles of queries hold 32 heads or a double"
        assert q_fp8.is_contiguous() and weights.is_contiguous(), "queries and weights are dense"
        assert weights.dtype == torch.float32 and tuple(weights.shape) == (batch * next_n, heads)

        pages, size, one, width = kv_cache.shape
        assert Preshuffle and size == KVBlockSize and size % 16 == 0 and (one, width) == (1, dim + 4)
        assert ChunkK % size == 0 or size % ChunkK == 0, "pages fit chunks"
        assert kv_cache.element_size() == 1 and kv_cache[0].is_contiguous(), "a page is dense inside"
        stride = kv_cache.stride(0)
        assert kv_cache.data_ptr() % 16 == 0 and stride % 64 == 0, "the compiler is told of strides in 16 scales"
        assert pages * stride < 2**31, "offsets into keys have 32 bits in some builds"
        assert context_lens.dtype == torch.int32 and tuple(context_lens.shape) == (batch,)
        assert kv_indices.dtype == torch.int32 and kv_indices.shape[0] == batch and kv_indices.is_contiguous()
        assert out_logits.dtype == torch.float32 and len(out_logits) == batch * next_n and out_logits.stride(1) == 1
        if q_fp8.is_meta:
            return "key"
        for sequence, length in enumerate(context_lens.tolist()):
            if length == 0:
                continue
            assert length <= max_model_len
            blocks = -(-length // size)
            table = kv_indices[sequence, :blocks].long()
            assert len(table) == blocks and (table >= 0).all() and (table < pages).all(), "a page lies in the cache"
            keys, scales = _keys(kv_cache, table, 8 if self.arch == "gfx942" else 7)
            for n in range(next_n):
                row = sequence * next_n + n
                queries = e4m3(q_fp8[sequence, n].view(torch.uint8), 8 if self.arch == "gfx942" else 7)
                # This maximum drops a NaN.
                terms = torch.fmax(queries @ keys.T * scales, torch.zeros((), device=keys.device))
                logits = (terms * weights[row][:, None]).sum(0)
                logits[length - next_n + n + 1 :] = -math.inf
                # Whole pages are written, past the last column where the length ends inside one.
                assert blocks * size <= out_logits.stride(0) or row == 0, "a row has room for whole pages"
                place = out_logits.storage_offset() + row * out_logits.stride(0)
                assert place + blocks * size <= out_logits.untyped_storage().nbytes() // 4, "so has the last row"
                torch.as_strided(out_logits, (blocks * size,), (1,), place).copy_(logits)
        return "key"


def _keys(cache: Tensor, table: Tensor, bias: int) -> tuple[Tensor, Tensor]:
    """float32 `[n, 128]` of the rows of these pages, and their scales `[n]`, byte by byte by the library's formula."""
    size, device = cache.shape[1], cache.device
    data = cache.view(torch.uint8).as_strided((cache.shape[0], size * 132), (cache.stride(0), 1))[table]
    t, c = torch.arange(size, device=device)[:, None], torch.arange(128, device=device)
    codes = data[:, t // 16 * 2048 + c // 16 * 256 + t % 16 * 16 + c % 16]
    scales = data[:, size * 128 :].contiguous().view(torch.float32)
    return e4m3(codes, bias).flatten(0, 1), scales.flatten()
