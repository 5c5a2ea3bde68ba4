"""FlashMLA without a GPU: its functions by their signatures, every rule of its documents checked, answers in torch.

Written from the rules of the library and from the bytes of the record, and from nothing of ours. What the real one
would refuse or misread raises AssertionError with the rule.
"""

# ruff: noqa: PT018  (a rule is one assertion, however many parts it has)

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_BF16, _INT32 = torch.bfloat16, torch.int32


class Schedule:
    """Scheduler metadata: empty when it is made, planned by the first call, then only for calls like that one."""

    def __init__(self) -> None:
        self.plan: dict[str, Any] | None = None
        self.calls = 0

    def use(self, **facts: Any) -> None:
        self.calls += 1
        if self.plan is None:
            self.plan = {name: value.clone() if isinstance(value, Tensor) else value for name, value in facts.items()}
        for name, planned in self.plan.items():
            same = torch.equal(planned, facts[name]) if isinstance(planned, Tensor) else planned == facts[name]
            assert same, f"a schedule planned for {name} = {planned} is reused with {facts[name]}"


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have every call among the `calls` of the module, by the keywords that it was made with."""

    @wraps(function)
    def recording(self: FlashMLA, *args: Any, **kwargs: Any) -> Any:
        assert not args, "calls are made by keyword"
        self.calls.append((function.__name__, kwargs))
        return function(self, **kwargs)

    return recording


class FlashMLA:
    """The module. `calls` holds the name and the keyword arguments of every call."""

    def __init__(self, arch: str = "sm_90") -> None:
        self.sm100 = arch.startswith("sm_10")
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.schedules: list[Schedule] = []

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def get_mla_metadata(self, *args: Any, **kwargs: Any) -> tuple[Schedule, None]:
        self.schedules.append(Schedule())
        return self.schedules[-1], None

    @_recorded
    def flash_mla_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor | None,
        cache_seqlens: Tensor | None,
        head_dim_v: int,
        tile_scheduler_metadata: Schedule,
        num_splits: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        is_fp8_kvcache: bool = False,
        indices: Tensor | None = None,
        attn_sink: Tensor | None = None,
        extra_k_cache: Tensor | None = None,
        extra_indices_in_kvcache: Tensor | None = None,
        topk_length: Tensor | None = None,
        extra_topk_length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert block_table is None, "sparse decode takes no block table"
        assert cache_seqlens is None, "sparse decode takes no lengths"
        assert num_splits is None, "num_splits is None"
        assert head_dim_v == 512, "head_dim_v is 512"
        assert not causal, "causal is False"
        assert is_fp8_kvcache, "packed records are fp8"
        assert indices is not None, "sparse decode needs indices"
        assert isinstance(tile_scheduler_metadata, Schedule), "the metadata is what get_mla_metadata returned"
        assert q.dtype == _BF16 and q.ndim == 4 and q.shape[3] == 512, "q is bf16 [b, s_q, Hq, 512]"
        assert q.stride(3) == 1, "the last dim of q is contiguous"
        assert q.shape[0] > 0, "a call has tokens"
        b, s_q, heads, _ = q.shape
        assert heads in (64, 128), "64 or 128 heads"
        if self.sm100 and heads == 128:
            assert q.stride(0) % q.stride(1) == 0, "SM100 with 128 heads: q.stride(0) is a multiple of q.stride(1)"
        self._check_sink(attn_sink, heads)
        assert (extra_k_cache is None) == (extra_indices_in_kvcache is None), "an extra cache comes with its indices"
        assert extra_topk_length is None or extra_k_cache is not None, "an extra length goes with an extra cache"
        parts = []
        for cache, chosen, length, mandatory in (
            (k_cache, indices, topk_length, True),
            (extra_k_cache, extra_indices_in_kvcache, extra_topk_length, self.sm100),
        ):
            if cache is not None:
                assert chosen is not None
                self._check_cache(cache)
                self._check_indices(chosen, (b, s_q), 64 if mandatory else 1)
                self._check_length(length, b)
                parts.append((cache, chosen, length))
        if q.is_meta:
            return q.new_empty(q.shape), q.new_empty(b, heads, s_q, dtype=torch.float32)
        tile_scheduler_metadata.use(
            b=b,
            s_q=s_q,
            heads=heads,
            topk=indices.shape[2],
            page=k_cache.shape[1],
            extra_topk=extra_indices_in_kvcache.shape[2] if extra_indices_in_kvcache is not None else 0,
            extra_page=extra_k_cache.shape[1] if extra_k_cache is not None else 0,
            topk_length=topk_length,
            extra_topk_length=extra_topk_length,
        )
        keys, valid = [], []
        for cache, chosen, length in parts:
            slots = chosen.flatten(0, 1).long()
            if length is not None:
                seen = torch.arange(slots.shape[1], device=q.device) < length.repeat_interleave(s_q)[:, None]
                slots = torch.where(seen, slots, -1)
            assert (slots >= -1).all(), "an invalid entry inside the length is exactly -1"
            assert (slots < cache.shape[0] * cache.shape[1]).all(), "an index lies inside the cache"
            keys.append(_records(cache, slots))
            valid.append(slots >= 0)
        out, lse = self._attend(
            q.flatten(0, 1), torch.cat(keys, 1), torch.cat(valid, 1), softmax_scale or 512**-0.5, attn_sink
        )
        return out.view(b, s_q, heads, 512), lse.view(b, s_q, heads).transpose(1, 2)

    @_recorded
    def flash_mla_sparse_fwd(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        sm_scale: float,
        d_v: int = 512,
        attn_sink: Tensor | None = None,
        topk_length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert d_v == 512, "d_v is 512"
        assert q.dtype == _BF16 and q.ndim == 3 and q.shape[2] == 512, "q is bf16 [s_q, Hq, 512]"
        assert q.stride(2) == 1, "the last dim of q is contiguous"
        assert q.shape[0] > 0, "a call has tokens"
        assert q.shape[1] in (64, 128), "64 or 128 heads"
        assert kv.dtype == _BF16 and kv.ndim == 3 and kv.shape[1:] == (1, 512), "kv is bf16 [s_kv, 1, 512]"
        assert kv.is_contiguous(), "kv is dense"
        self._check_indices(indices, (q.shape[0], 1), 128)
        self._check_length(topk_length, q.shape[0])
        self._check_sink(attn_sink, q.shape[1])
        if q.is_meta:
            statistics = q.new_empty(q.shape[:2], dtype=torch.float32)
            return q.new_empty(q.shape), statistics, statistics
        rows = indices[:, 0].long()
        valid = (rows >= 0) & (rows < len(kv))
        assert (kv[:, 0][rows[valid]].isfinite()).all(), "an index that is valid, inside a length or not, names numbers"
        if topk_length is not None:
            valid &= torch.arange(rows.shape[1], device=q.device) < topk_length[:, None]
        keys = torch.zeros(*rows.shape, 512, device=q.device)
        keys[valid] = kv[:, 0][rows[valid]].float()
        out, lse = self._attend(q, keys, valid, sm_scale, attn_sink)
        return out, lse, lse

    def _attend(
        self, q: Tensor, keys: Tensor, valid: Tensor, scale: float, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """bf16 `[n, H, 512]` and the logarithm of the sum without the sink, `[n, H]`; +inf where there is no key."""
        scores = torch.einsum("nhd,nkd->nhk", q.float(), keys) * scale
        scores = scores.masked_fill(~valid[:, None], -math.inf)
        lse = scores.logsumexp(-1)
        # Relative to the largest: next to large scores, their logarithm has no bits left for how many there are.
        last = torch.full_like(lse, -math.inf) if sink is None else sink.expand_as(lse)
        weights = torch.cat((scores, last[..., None]), dim=-1).softmax(-1)[..., :-1]
        weights = weights.masked_fill((last == math.inf)[..., None], 0)
        lonely = ~valid.any(1)
        out = torch.einsum("nhk,nkd->nhd", weights, keys)
        out[lonely] = 0  # as the library documents, and as was seen on one H200 (test_flashmla_gpu.py)
        return out.to(_BF16), lse.masked_fill(lonely[:, None], math.inf)

    def _check_cache(self, cache: Tensor) -> None:
        assert cache.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn), "records are bytes"
        assert cache.ndim == 4 and cache.shape[2:] == (1, 584), "a cache is [pages, page, 1, 584]"
        assert cache.stride(1) == 584 and cache.stride(3) == 1, "a page is dense inside"
        assert cache.stride(0) >= cache.shape[1] * 584, "pages do not overlap"
        if self.sm100:
            assert cache.data_ptr() % 16 == 0, "SM100: a cache begins at a multiple of 16 bytes"
            assert cache.stride(0) % 576 == 0, "SM100: pages lie a multiple of 576 bytes apart"
            assert cache.shape[0] * (cache.stride(0) // 576) < 2**31, "SM100: a cache's rows fit int32"

    def _check_indices(self, indices: Tensor, shape: tuple[int, int], multiple: int) -> None:
        assert indices.dtype == _INT32, "indices are int32"
        assert indices.ndim == 3 and tuple(indices.shape[:2]) == shape, "indices are one row a query"
        assert indices.stride(2) == 1, "the last dim of indices is contiguous"
        assert indices.shape[2] > 0 and indices.shape[2] % multiple == 0, f"topk is a multiple of {multiple} and not 0"

    def _check_length(self, length: Tensor | None, rows: int) -> None:
        if length is not None:
            assert length.dtype == _INT32 and tuple(length.shape) == (rows,), "lengths are int32, one a row"
            assert length.is_contiguous(), "lengths are contiguous"

    def _check_sink(self, sink: Tensor | None, heads: int) -> None:
        if sink is not None:
            assert sink.dtype == torch.float32 and tuple(sink.shape) == (heads,), "the sink is fp32 [Hq]"


class WithOut(FlashMLA):
    """The newer builds, which also write into a tensor that they are given."""

    def flash_mla_with_kvcache(  # type: ignore[override]
        self, *args: Any, out: Tensor | None = None, enable_batch_invariant: bool = False, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._into(out, super().flash_mla_with_kvcache, *args, **kwargs)

    def flash_mla_sparse_fwd(  # type: ignore[override]
        self, *args: Any, out: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._into(out, super().flash_mla_sparse_fwd, *args, **kwargs)

    def _into(self, out: Tensor | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made, *others = function(*args, **kwargs)
        if out is None:
            return made, *others
        assert out.shape == made.shape and out.dtype == made.dtype, "out has the shape of the result"
        return out.copy_(made), *others


def _records(cache: Tensor, slots: Tensor) -> Tensor:
    """float32 `[n, k, 512]` of the records in `slots`, from their bytes; zeros, and nothing read, where it is -1.

    A page of P tokens is P rows of 448 e4m3 and 64 bf16 (576 bytes), then P rows of 7 UE8M0 scales and a zero byte.
    """
    pages, size = cache.shape[:2]
    data = cache.as_strided((pages, size * 584), (cache.stride(0), 1)).view(torch.uint8)
    valid = slots >= 0
    page, row = slots[valid] // size, slots[valid] % size
    values = data[page[:, None], row[:, None] * 576 + torch.arange(576, device=cache.device)]
    scales = data[page[:, None], size * 576 + row[:, None] * 8 + torch.arange(7, device=cache.device)]
    exponents = scales.double() - 127
    factors = torch.where(scales == 255, math.nan, torch.exp2(exponents)).repeat_interleave(64, 1)
    coded = values[:, :448].contiguous().view(torch.float8_e4m3fn).double() * factors
    rotary = values[:, 448:].contiguous().view(_BF16).float()
    found = torch.zeros(*slots.shape, 512, device=cache.device)
    found[valid] = torch.cat((coded.to(_BF16).float(), rotary), dim=1)
    return found
