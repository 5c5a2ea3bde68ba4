"""Index scores by aiter's paged logits (gfx942, gfx950), over fp8 keys in tiles, and the queries that it takes.

Facts of `aiter.ops.triton.attention.pa_mqa_logits.deepgemm_fp8_paged_mqa_logits` as in the sources of autumn 2026. It
gives `sum_h w[h] * relu(q[h] . k[j] * scale[j])` in float32. A query's own scale goes into its weight, which the ReLU
lets pass, as no scale is negative.
"""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.backends.portable import formats
from dsv41.backends.portable.backend import PortableBackend
from dsv41.backends.portable.caches import flat
from dsv41.backends.portable.formats import RowFormat
from dsv41.backends.portable.launch import launch
from dsv41.backends.portable.numbers import encode_e4m3
from dsv41.backends.portable.rows import group_scales
from dsv41.backends.rocm.layouts import reads_keys
from dsv41.backends.vendor import call, load
from dsv41.errors import BackendError
from dsv41.hal.builtin import INSTALL_AITER
from dsv41.hal.codecs import E4M3_DTYPES
from dsv41.hal.layout import PagedCache
from dsv41.hal.types import AttnInputs, LayerState, StepPlan

_MODULE = "aiter.ops.triton.attention.pa_mqa_logits"
_HEADS = (32, 64, 128)
"""Index heads that its tiles of queries hold."""
_DIM = 128
_FNUZ = tl.constexpr(formats.FNUZ)
_ROWS = 16
"""Queries that a program encodes."""


class ScoresByAiter(PortableBackend):
    """Index scores of decode steps, of a token a request at most, by the library where it reads the keys; what it does
    not, and prefill, where tokens share the keys that they read, and the scores of candidates alone, are the portable
    kernels'."""

    @cached_property
    def paged_logits(self) -> Any:
        """The library's function; None where what is installed has none that takes tiled keys, or the one of before
        it counted the processors itself, which takes rows of scores for columns."""
        try:
            function = load(_MODULE, INSTALL_AITER).deepgemm_fp8_paged_mqa_logits
        except (BackendError, AttributeError):
            return None
        known = inspect.signature(function).parameters
        counts = "TotalCuCount" in known and known["TotalCuCount"].default is None
        return function if "Preshuffle" in known and counts else None

    def score_dtype(
        self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, restriction: Tensor | None
    ) -> torch.dtype:
        """float32 where the library scores a step, else that of activations."""
        spec, caches = layer.spec, layer.caches
        assert caches is not None and caches.index is not None
        requests = plan.batch.compressed_tables[spec.ratio].pages.shape[0]
        given = (
            restriction is None
            and inputs.qr.shape[0] <= requests
            and inputs.qr.dtype != torch.float32
            and spec.index_heads in _HEADS
            and spec.index_dim == _DIM
            and reads_keys(caches.index, self.arch)
            and self.paged_logits is not None
        )
        return torch.float32 if given else super().score_dtype(inputs, layer, plan, restriction)

    def _score(
        self,
        queries: tuple[Tensor, Tensor],
        layer: LayerState,
        plan: StepPlan,
        part: slice,
        candidates: Tensor | None,
        out: Tensor,
    ) -> None:
        if out.dtype == queries[0].dtype:
            super()._score(queries, layer, plan, part, candidates, out)
            return
        request = plan.token_request[part]
        if len(request) == 0:  # the library divides its processors among the tokens
            return
        spec, caches = layer.spec, layer.caches
        assert caches is not None and caches.index is not None
        keys, dialect = caches.index, caches.index.layout.record.dialect
        assert dialect is not None
        codes, factors = query_codes(queries[0][part], queries[1][part], flat(keys)[3])
        visible = torch.where(request >= 0, plan.num_visible[spec.ratio][part], 0)
        pages = plan.batch.compressed_tables[spec.ratio].pages[request.clamp(min=0)]
        call(
            self.paged_logits,
            # Each token is a sequence of its own: those of one request see other lengths where a row is two tokens.
            q_fp8=codes.view(E4M3_DTYPES[dialect])[:, None],
            kv_cache=_pages(keys),
            weights=factors,
            # What lies behind a token's length is not read, so it need not be -inf.
            out_logits=out,
            context_lens=visible.int(),
            # Pages that a token sees are there, or the step would have been refused; the others must be no addresses.
            kv_indices=pages.clamp(min=0),
            max_model_len=out.shape[1],
            Preshuffle=True,
            KVBlockSize=keys.layout.page_size,
        )


def _pages(keys: PagedCache) -> Tensor:
    """uint8 `[pages, page_size, 1, 132]` over the pages as they lie, though only a whole page is in one piece."""
    layout = keys.layout
    pages: Tensor = keys.data[:, : layout.page_bytes].unflatten(1, (layout.page_size, 1, layout.row_bytes))
    return pages


@triton.jit(do_not_specialize=["rows"])
def _query_codes(queries, weights, codes, factors, rows, BLOCK: tl.constexpr, F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    place = row[:, None] * F.dim + tl.arange(0, F.dim)[None, :]
    x = tl.load(queries + place, live[:, None], other=0.0).to(tl.float32)
    _, scales = group_scales(x, F.scale, F.code, F.floor_bits)
    coded = encode_e4m3(tl.div_rn(x, scales[:, None] + tl.zeros_like(x)), F.code == _FNUZ)
    tl.store(codes + place, coded, live[:, None])
    weight = tl.load(weights + row, live, other=0.0).to(tl.float32)
    tl.store(factors + row, weight * scales, live)


@torch.library.custom_op("dsv41::query_codes", mutates_args=())
def query_codes(queries: Tensor, weights: Tensor, format: list[int]) -> tuple[Tensor, Tensor]:
    """Queries `[T, H, D]`, rounded like the keys of this format, as its codes: uint8 `[T, H, D]`, and the weights
    `[T, H]` of their heads times their scales: float32 `[T, H]`.

    The format has one scale a row. Numbers that were rounded to it come back exactly. All tensors are dense.
    """
    codes, factors = _empty(queries, weights, format)
    row_format = RowFormat.from_numbers(format)
    assert row_format.group == row_format.dim and queries.is_contiguous() and weights.is_contiguous()
    launch(
        _query_codes,
        (triton.cdiv(weights.numel(), _ROWS),),
        queries=queries,
        weights=weights,
        codes=codes,
        factors=factors,
        rows=weights.numel(),
        BLOCK=_ROWS,
        F=row_format,
    )
    return codes, factors


@query_codes.register_fake
def _empty(queries: Tensor, weights: Tensor, format: list[int]) -> tuple[Tensor, Tensor]:
    return queries.new_empty(queries.shape, dtype=torch.uint8), weights.new_empty(weights.shape, dtype=torch.float32)
