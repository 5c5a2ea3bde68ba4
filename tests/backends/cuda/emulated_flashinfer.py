"""FlashInfer in torch, written from its rules alone: what the real one would refuse or silently misread is an
AssertionError that names the rule, and answers come from the raw bytes of caches and scales by another way than ours.

`calls` holds the name and the keyword arguments of every call since it was last cleared.
"""

from __future__ import annotations

import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.hal.device import Library

calls: list[tuple[str, dict[str, Any]]] = []

# Parameters of `trtllm_batch_decode_sparse_mla_dsv4`, of which the first three have no default
FIRST = [
    "query",
    "swa_kv_cache",
    "workspace_buffer",
    "sparse_indices",
    "compressed_kv_cache",
    "sparse_topk_lens",
    "seq_lens",
    "out",
    "bmm1_scale",
    "bmm2_scale",
    "sinks",
    "kv_layout",
    "cum_seq_lens_q",
    "max_q_len",
    "enable_pdl",
    "swa_topk_lens",
    "extra_sparse_indices",
    "extra_sparse_topk_lens",
    "backend",
    "hca_swa_indices",
    "hca_compressed_block_tables",
    "hca_seq_lens",
    "hca_is_causal",
    "hca_use_persistent",
    "hca_sparse_indices_format",
]
SINCE_070 = [
    "remapped_sparse_indices_buffer",
    "sparse_indices_are_storage_offsets",
    "dsv4_inv_rope_cos_sin_cache",
    "dsv4_output_scale",
]
SINCE_071 = ["sparse_topk_lens_offset", "multi_ctas_kv_counter_buffer"]
FORMATS = {
    "0.6.18": (),
    "0.7.0": ("fp8", "nvfp4"),
    "0.7.1": ("fp8", "nvfp4", "fp8_dsv41", "fp8_dsv41_fp4_ca"),
    "0.7.4": ("fp8", "nvfp4", "fp8_dsv41", "fp8_dsv41_fp4_ca", "fp8_dsv41_inline", "fp8_dsv41_inline_fp4_ca"),
}
POSITIONAL = {
    "0.6.18": FIRST,
    "0.7.0": FIRST + SINCE_070,
    "0.7.1": FIRST + SINCE_070 + SINCE_071,
    "0.7.4": FIRST + SINCE_070 + SINCE_071,
}
MM_MXFP8 = ["a", "b", "a_descale", "b_descale", "out", "out_dtype", "use_8x4_sf_layout", "backend"]
FEATURES = {
    "0.6.18": {"sparse-mla", "record-v4", "small-heads"},
    "0.7.0": {"sparse-mla", "record-v4", "small-heads"},
    "0.7.1": {"sparse-mla", "record-v4", "small-heads", "record-v41", "record-nvfp4", "placement-page"},
    "0.7.4": {
        "sparse-mla",
        "record-v4",
        "small-heads",
        "record-v41",
        "record-nvfp4",
        "placement-page",
        "placement-token",
    },
}
INT_MAX = 2**31 - 1
ENTRY = "flashinfer.mla.trtllm_batch_decode_sparse_mla_dsv4"


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.7.4") -> None:
    """Put this in the library's place, for imports and for what is said of its version."""
    calls.clear()
    _workspaces.clear()
    attention = _named(
        "flashinfer.mla.trtllm_batch_decode_sparse_mla_dsv4", _attention, entry_signature(version), version
    )
    product = _named("flashinfer.gemm.mm_mxfp8", _mm_mxfp8, _plain(MM_MXFP8, required=4), version)
    counters = _named(
        "flashinfer.utils.get_trtllm_gen_multi_ctas_kv_counter_bytes",
        _counter_bytes,
        _plain(["batch_size", "num_qo_heads", "sm_count"], required=3),
        version,
    )
    modules = {
        "flashinfer": {},
        "flashinfer.mla": {"trtllm_batch_decode_sparse_mla_dsv4": attention},
        "flashinfer.gemm": {"mm_mxfp8": product},
        "flashinfer.utils": {"get_trtllm_gen_multi_ctas_kv_counter_bytes": counters},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    found = Library(True, version, frozenset(FEATURES[version]))
    monkeypatch.setattr("dsv41.backends.cuda.flashinfer_sm120.inspect", lambda name, torch_version: found)


def entry_signature(version: str) -> inspect.Signature:
    keyword = inspect.Parameter("kv_cache_format", inspect.Parameter.KEYWORD_ONLY, default="fp8")
    plain = list(_plain(POSITIONAL[version], required=3).parameters.values())
    return inspect.Signature([*plain, keyword] if FORMATS[version] else plain)


def _plain(names: list[str], required: int) -> inspect.Signature:
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=empty if i < required else None)
            for i, name in enumerate(names)
        ]
    )


def _named(name: str, function: Callable[..., Any], signature: inspect.Signature, version: str) -> Callable[..., Any]:
    """`function`, with the library's name and signature, noting every call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if name.endswith("_counter_bytes"):
            return function(*args, **kwargs)
        assert not args, f"{name} is called by keywords, as the order of its parameters is not the library's promise"
        signature.bind(**kwargs)
        calls.append((name, kwargs))
        return function(version, **kwargs)

    run.__name__ = name.rpartition(".")[2]
    run.__module__ = name.rpartition(".")[0]
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


# Attention


def _attention(
    version: str,
    *,
    query: Tensor,
    out: Tensor,
    backend: str,
    kv_layout: str,
    sinks: Tensor,
    kv_cache_format: str = "fp8",
    **rest: Any,
) -> Tensor:
    heads = query.shape[-2]
    assert kv_layout == "HND", "the caches that are given have one order of dims"
    assert query.is_contiguous(), "query is dense"
    assert out.is_contiguous(), "out is dense"
    assert out.shape == query.shape, "out has the shape of the query"
    assert out.dtype == torch.bfloat16, "out is bf16"
    assert query.shape[-1] == 512, "query has 512 dims"
    assert heads in (8, 16, 32, 64, 128), "query has 8, 16, 32, 64 or 128 heads"
    assert sinks.dtype == torch.float32, "sinks are fp32"
    assert sinks.shape == (heads,), "there is a sink for each head"
    assert sinks.is_contiguous(), "sinks are dense"
    if FORMATS[version]:
        assert kv_cache_format in FORMATS[version], f"kv_cache_format is one of {FORMATS[version]}"
    if backend == "sparse":
        return _sparse(version, query=query, out=out, sinks=sinks, form=kv_cache_format, **rest)
    assert backend == "trtllm-gen", "backend is one of those that these tests know"
    assert kv_cache_format == "fp8", "trtllm-gen reads plain rows"
    return _trtllm_gen(query=query, out=out, sinks=sinks, **rest)


def _softmax(q: Tensor, rows: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """float32 `[H, 512]` of one token, in float64."""
    scores = q.double() @ rows.double().T * scale
    logits = torch.cat((scores, sinks.double()[:, None]), dim=1)
    return (logits.softmax(dim=1)[:, :-1] @ rows.double()).float()


def _sparse(
    version: str,
    *,
    query: Tensor,
    out: Tensor,
    sinks: Tensor,
    form: str,
    swa_kv_cache: Tensor,
    workspace_buffer: Tensor,
    sparse_indices: Tensor,
    swa_topk_lens: Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    compressed_kv_cache: Tensor | None = None,
    extra_sparse_indices: Tensor | None = None,
    extra_sparse_topk_lens: Tensor | None = None,
) -> Tensor:
    assert query.dtype == torch.bfloat16, "sparse takes a bf16 query"
    assert query.ndim == 3, "query is [T, H, 512]"
    tokens, heads, _ = query.shape
    assert tokens > 0, "the runner rejects no tokens"
    assert type(bmm1_scale) is float, "bmm1_scale is a float"
    assert type(bmm2_scale) is float, "bmm2_scale is a float"
    assert bmm2_scale == 1.0, "sparse has no bmm2_scale"
    assert (extra_sparse_indices is None) == (extra_sparse_topk_lens is None), "extra indices and lengths go together"
    assert (extra_sparse_indices is None) == (compressed_kv_cache is None), "extra indices name rows of a cache"
    widths = [sparse_indices.shape[1], 0 if extra_sparse_indices is None else extra_sparse_indices.shape[1]]
    v4 = form == "fp8"
    if version == "0.6.18":
        assert widths[0] in (128, 192, 256, 512, 1024), "0.6.18 has kernels for few widths"
    if tokens > 64:
        assert widths[0] % 64 == 0, "above 64 tokens the main top-k is a multiple of 64"
        assert v4 or heads <= 64, "above 64 tokens, 528-byte records take up to 64 heads"
    splits = sum(-(-width // 64) for width in widths)
    partial = tokens * max(heads, 16) * splits * (512 * 2 + 4) if tokens <= 64 else 0
    need = partial + tokens * heads * 4
    assert workspace_buffer.dtype == torch.uint8, "the workspace is bytes"
    assert workspace_buffer.is_contiguous(), "the workspace is dense"
    assert workspace_buffer.numel() >= need + 3 * 16, "a workspace that is too small raises while a graph is captured"
    workspace_buffer.fill_(0xFF)  # whatever it held is lost

    pools = [(sparse_indices, swa_topk_lens, _packed(swa_kv_cache, form, main=True))]
    if extra_sparse_indices is not None and extra_sparse_topk_lens is not None and compressed_kv_cache is not None:
        pools.append((extra_sparse_indices, extra_sparse_topk_lens, _packed(compressed_kv_cache, form, main=False)))
    for indices, lengths, _ in pools:
        assert indices.dtype == lengths.dtype == torch.int32, "indices and lengths are int32"
        assert indices.shape[0] == tokens, "there is a row of indices for each token"
        assert indices.stride(1) == 1, "indices of a token are dense"
        assert tokens <= 64 or indices.is_contiguous(), "above 64 tokens, rows of indices are contiguous"
        assert lengths.shape == (tokens,), "there is a length for each token"
        assert lengths.is_contiguous(), "lengths are dense"
        assert bool(((lengths >= 0) & (lengths <= indices.shape[1])).all()), "lengths are within the table"
    for token in range(tokens):
        rows = [
            read(int(index))
            for indices, lengths, read in pools
            for index in indices[token, : int(lengths[token])]
            if index != -1
        ]
        found = _softmax(query[token], torch.stack(rows), bmm1_scale, sinks) if rows else torch.zeros(heads, 512)
        out[token] = found.bfloat16()
    return out


def _packed(pool: Tensor, form: str, *, main: bool) -> Callable[[int], Tensor]:
    """What reads the row of an index as float32 `[512]`, after the rules of the cache are checked."""
    values, scales = (576, 8) if form == "fp8" else (512, 16)
    if form.endswith("_fp4_ca") and not main:
        values, scales = 256, 32
    width, inline = values + scales, "inline" in form
    assert pool.dtype == torch.uint8, "packed caches are bytes"
    assert pool.ndim == 3, "a cache is [pages, page, record]"
    assert pool.shape[2] == width, f"a record of {form} has {width} bytes"
    pages, page_size, _ = pool.shape
    page_stride, pitch, dense = pool.stride()
    assert dense == 1, "records are dense"
    assert pool.data_ptr() % 16 == 0, "a cache begins at a multiple of 16 bytes"
    assert pages == 1 or page_stride % 16 == 0, "the page stride is a multiple of 16 bytes"
    assert pages == 1 or page_stride >= page_size * width, "pages do not overlap"
    if inline:
        assert pitch % 16 == 0, "the pitch of inline records is a multiple of 16 bytes"
        assert pages == 1 or page_stride % pitch == 0, "a page stride is a whole number of inline records"
    else:
        assert pitch == width, "records with a footer are tight"
    if form == "fp8":
        assert page_size == 64, "584-byte records have pages of 64"
    memory = torch.tensor([], dtype=torch.uint8).set_(pool.untyped_storage())[pool.storage_offset() :]
    slots = page_size if not inline or pages == 1 else page_stride // pitch

    @cache
    def read(index: int) -> Tensor:
        page, slot = divmod(index, slots)
        assert 0 <= page < pages, f"row {index} is in the cache"
        assert slot < page_size, f"row {index} is in no page but between two"
        start = page * page_stride + slot * (pitch if inline else values)
        scale = start + values if inline else page * page_stride + page_size * values + slot * scales
        return _record(memory[start : start + values].clone(), memory[scale : scale + scales].clone())

    return read


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _record(values: Tensor, scales: Tensor) -> Tensor:
    match len(values):
        case 576:  # 448 e4m3 in groups of 64, 64 bf16
            coded = values[:448].view(torch.float8_e4m3fn).float().view(7, 64)
            return torch.cat(((coded * _ue8m0(scales[:7])).flatten(), values[448:].view(torch.bfloat16).float()))
        case 512:
            return (values.view(torch.float8_e4m3fn).float().view(16, 32) * _ue8m0(scales)).flatten()
        case _:  # two e2m1 a byte, the first in the low half
            pairs = torch.stack((values & 15, values >> 4), dim=1).flatten().long()
            return (_E2M1[pairs].view(32, 16) * scales.view(torch.float8_e4m3fn).float()[:, None]).flatten()


def _ue8m0(scales: Tensor) -> Tensor:
    return torch.tensor([math.nan if byte == 255 else 2.0 ** (byte - 127) for byte in scales.tolist()])[:, None]


def _trtllm_gen(
    *,
    query: Tensor,
    out: Tensor,
    sinks: Tensor,
    swa_kv_cache: Tensor,
    compressed_kv_cache: Tensor,
    workspace_buffer: Tensor,
    sparse_indices: Tensor,
    sparse_topk_lens: Tensor,
    seq_lens: Tensor,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    sparse_indices_are_storage_offsets: bool | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
) -> Tensor:
    """Rows that attend to nothing come out as NaN, since the library promises nothing of them."""
    assert query.dtype in (torch.bfloat16, torch.float8_e4m3fn), "query is bf16 or e4m3"
    heads = query.shape[-2]
    starts = _query_starts(query, cum_seq_lens_q, max_q_len)
    q, attended = query.reshape(-1, heads, 512).float(), out.view(-1, heads, 512)
    tokens, width = sparse_indices.shape
    assert tokens == len(q) >= 1, "there is a row of indices for each token, and one at least"
    assert width >= 128, "128 columns are the window's"
    assert width % 4 == 0, "columns are a multiple of 4"
    for what in (sparse_indices, sparse_topk_lens, seq_lens):
        assert what.dtype == torch.int32, "indices and lengths are int32"
        assert what.is_contiguous(), "indices and lengths are dense"
    assert sparse_topk_lens.shape == (tokens,), "there is a length for each token"
    assert seq_lens.shape == (len(starts) - 1,), "there is a sequence length for each request"
    assert bool(((sparse_topk_lens >= 128) & (sparse_topk_lens <= width)).all()), "lengths count the 128 columns"
    assert workspace_buffer.numel() >= 128 << 20, "the workspace has 128 MiB"
    assert _held_zeros(workspace_buffer), "the workspace held zeros when it was first given"
    if multi_ctas_kv_counter_buffer is not None:
        assert multi_ctas_kv_counter_buffer.numel() >= _counter_bytes(len(seq_lens), heads, 148), "counters fit"
        assert not multi_ctas_kv_counter_buffer.any(), "counters are zero between launches"
    if query.dtype == torch.float8_e4m3fn:
        for scale in (bmm1_scale, bmm2_scale):
            assert isinstance(scale, float) or scale.dtype == torch.float32, "a scale is a float or fp32"
    pools = [
        _plain_rows(cache, query.dtype, sparse_indices_are_storage_offsets)
        for cache in (swa_kv_cache, compressed_kv_cache)
    ]
    for request, (start, stop) in enumerate(pairwise(starts)):
        length, count = int(seq_lens[request]), stop - start
        assert length >= count, "a sequence has its queries at least"
        for token in range(start, stop):
            seen = min(max(length - (stop - 1 - token), 0), 128)
            table = sparse_indices[token].tolist()
            live = [table[:seen], table[128 : int(sparse_topk_lens[token])]]
            rows = [pool(index) for pool, part in zip(pools, live, strict=True) for index in part if index != -1]
            assert len(rows) + (table[0] == -1) >= len(live[0]) + len(live[1]), "what is behind a hole is still read"
            if not rows:
                attended[token] = math.nan
                continue
            found = _softmax(q[token], torch.stack(rows), float(bmm1_scale), sinks)
            attended[token] = (found * float(bmm2_scale)).bfloat16()
    return out


def _query_starts(query: Tensor, cum_seq_lens_q: Tensor | None, max_q_len: int | None) -> list[int]:
    if cum_seq_lens_q is None:
        assert query.ndim == 4, "a dense query is [b, q_len, H, 512]"
        batch, length = query.shape[:2]
        assert max_q_len in (None, length), "max_q_len is that of the dense query"
        return list(range(0, batch * length + 1, length))
    assert query.ndim == 3, "a ragged query is [sum_q, H, 512]"
    assert max_q_len is not None, "a ragged query needs max_q_len"
    assert cum_seq_lens_q.dtype == torch.int32, "cum_seq_lens_q is int32"
    return cum_seq_lens_q.tolist()


_workspaces: list[Tensor] = []


def _held_zeros(workspace: Tensor) -> bool:
    """Checked once for each buffer, since the library writes to it."""
    if any(workspace is known for known in _workspaces):
        return True
    _workspaces.append(workspace)
    return not bool(workspace.any())


def _plain_rows(pool: Tensor, dtype: torch.dtype, storage_offsets: bool | None) -> Callable[[int], Tensor]:
    assert pool.dtype == dtype, "caches have the type of the query"
    assert pool.ndim == 3, "a cache is [pages, page, 512]"
    assert pool.shape[2] == 512, "a row has 512 dims"
    pages, page_size, _ = pool.shape
    page_stride, pitch, dense = pool.stride()
    assert (pitch, dense) == (512, 1), "rows are dense"
    assert pool.data_ptr() % 16 == 0, "a cache begins at a multiple of 16 bytes"
    assert page_stride % pitch == 0, "a page stride is a whole number of rows"
    padded = page_stride != page_size * pitch
    assert not padded or storage_offsets is not None, "padded pages need sparse_indices_are_storage_offsets"
    slots = page_stride // pitch if storage_offsets else page_size
    assert pages * slots <= INT_MAX, "rows are reached by int32"

    @cache
    def read(index: int) -> Tensor:
        page, slot = divmod(index, slots)
        assert 0 <= page < pages, f"row {index} is in the cache"
        assert slot < page_size, f"row {index} is in no page but between two"
        return pool[page, slot].float()

    return read


def _counter_bytes(batch_size: int, num_qo_heads: int, sm_count: int) -> int:
    return -(-max(batch_size * num_qo_heads, sm_count) // 8) * 8 * 4


# The product


def _mm_mxfp8(
    version: str,
    *,
    a: Tensor,
    b: Tensor,
    a_descale: Tensor,
    b_descale: Tensor,
    out: Tensor,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    (m, k), (_, n) = a.shape, b.shape
    assert a.dtype == b.dtype == torch.float8_e4m3fn, "a and b are e4m3"
    assert a.is_contiguous(), "a is row-major"
    assert b.shape[0] == k, "a and b share k"
    assert b.stride() == (1, k), "b is column-major"
    assert m >= 1, "there is a row"
    assert n >= 128, "n is 128 at least"
    assert k >= 128, "k is 128 at least"
    assert k % 32 == n % 32 == 0, "cutlass on SM120 wants multiples of 32"
    assert out.shape == (m, n), "out is [m, n]"
    assert out.dtype == out_dtype == torch.bfloat16, "out is bf16"
    assert backend == "cutlass", "of the backends, these rules are cutlass's"
    left, right = (_dequantised(values.contiguous(), scales) for values, scales in ((a, a_descale), (b.T, b_descale)))
    out.copy_((left @ right.T).bfloat16())
    return out


def _dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """float64 `[rows, k]`, each scale fetched from its place."""
    rows, k = values.shape
    columns = -(-(k // 32) // 4) * 4
    assert scales.dtype == torch.uint8, "scales are bytes"
    assert scales.ndim == 1, "scales are in tiles, which is 1-D; 2-D ones are refused"
    assert scales.numel() == -(-rows // 128) * 128 * columns, "scales are padded to 128 rows and 4 columns"
    powers = torch.empty(rows, k // 32, dtype=torch.float64)
    used = torch.zeros(scales.numel(), dtype=torch.bool)
    for row, column in _places(rows, k // 32):
        byte = ((row // 128) * (columns // 4) + column // 4) * 512
        byte += (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
        powers[row, column], used[byte] = 2.0 ** (int(scales[byte]) - 127), True
    assert not scales[~used].any(), "bytes of the padding are zero"
    return values.double() * powers.repeat_interleave(32, dim=1)


def _places(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    return ((row, column) for row in range(rows) for column in range(columns))
