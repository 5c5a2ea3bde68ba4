"""aiter's own kernel of paged logits, as the newest wheel has it for untiled keys in pure Triton, in the interpreter.

It computes what the backend takes later builds to compute over tiles, from the same queries and weights.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from dsv41.backends.portable.caches import flat
from dsv41.backends.reference.quantize import round_trip
from dsv41.backends.rocm.index_scores import query_codes
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import Dialect, ScaleFormat, index_fp8_132

from ..cuda import wheels
from .test_contract import NEWEST_WHEEL

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter")
CHUNK = 64


@pytest.fixture
def kernel() -> Iterator[Any]:
    folder = wheels.sources_or_skip("amd-aiter", NEWEST_WHEEL)
    path = folder / "aiter" / "ops" / "triton" / "_triton_kernels" / "pa_mqa_logits.py"
    spec = spec_from_file_location("aiters_paged_logits", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}), torch.no_grad():
        spec.loader.exec_module(module)
        yield module._deepgemm_fp8_paged_mqa_logits


def test_it_gives_the_models_index_scores(kernel: Any) -> None:
    """A page a key, out of order; two sequences, of which one ends inside a chunk."""
    layout = CacheLayout(index_fp8_132(Dialect.OCP, ScaleFormat.FP32), 1, ScalePlacement.PAGE)
    generator = torch.Generator().manual_seed(5)
    lengths, heads = [70, 33], 32
    cache = PagedCache.allocate(layout, sum(lengths), fill=0xFF)
    keys = torch.randn(sum(lengths), 128, generator=generator) * torch.logspace(-2, 2, sum(lengths))[:, None]
    order = torch.randperm(sum(lengths), generator=generator)
    cache.write(order, keys)
    table = torch.zeros(2, 128, dtype=torch.int32)
    table[0, :70], table[1, :33] = order[:70], order[70:]
    queries = round_trip(layout.record, torch.randn(2, heads, 128, generator=generator).bfloat16())
    weights = torch.randn(2, heads, generator=generator).bfloat16()
    codes, factors = query_codes(queries, weights, flat(cache)[3])
    values, scales = cache.data[:, :128].view(torch.float8_e4m3fn), cache.data[:, 128:132].view(torch.float32)
    out = torch.full((2, 2 * CHUNK), math.nan)
    q = codes.view(torch.float8_e4m3fn)[:, None]
    kernel[(2,)](
        2, 1, heads, q, q.stride(0), q.stride(1), q.stride(2), values, values.stride(0), scales, scales.stride(0),
        torch.tensor(lengths, dtype=torch.int32), table, factors, factors.stride(0), out, out.stride(0), 128, 128,
        ChunkQ=heads, ChunkK=CHUNK, HiddenDim=128, SplitKV=1,
    )  # fmt: skip
    for sequence, length in enumerate(lengths):
        stored = cache.read(table[sequence, :length].long()).double()
        dots = (queries[sequence].double() @ stored.T).relu()
        expected = (dots * weights[sequence].double()[:, None]).sum(0)
        torch.testing.assert_close(out[sequence, :length].double(), expected, rtol=1e-5, atol=1e-4)
