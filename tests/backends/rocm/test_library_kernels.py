"""aiter's own Triton product by blocks of 128, of its newest wheel, in the interpreter over the operands made here.

It takes weights that are not in tiles. The preshuffled products are not in that wheel as Triton, and `import aiter`
needs a ROCm installation, so the kernel's module is imported under packages that hold nothing but the wheel's folders.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from dsv41.backends.rocm.group_quantize import quantize_groups
from dsv41.backends.rocm.matrices import coarse
from dsv41.fp8 import dequantize_blocks
from dsv41.hal.records import Dialect
from dsv41.verify import relative_error

from ...model.toys import noise
from ..cuda import wheels
from .emulated_products import Products
from .test_contract import NEWEST_WHEEL
from .test_products import release_like

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and this one is AMD's")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    folder = wheels.sources_or_skip("amd-aiter", NEWEST_WHEEL)
    before = set(sys.modules)
    name, path = "aiter", folder / "aiter"
    for part in ("", "ops", "triton", "_triton_kernels"):
        name, path = (f"{name}.{part}", path / part) if part else (name, path)
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        monkeypatch.setitem(sys.modules, name, package)
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        module = importlib.import_module(f"{name}.gemm_a8w8_blockscale")
    yield module._gemm_a8w8_blockscale_kernel
    for other in set(sys.modules) - before:
        if other.startswith("aiter"):
            del sys.modules[other]


def test_the_librarys_kernel_makes_of_our_operands_what_the_emulated_one_does(kernel: Any) -> None:
    weight, x = release_like(64, 256), noise(5, 256, seed=7).bfloat16()
    matrix = coarse([weight], Dialect.OCP)
    assert matrix is not None
    assert matrix.scale is not None
    codes, scales = quantize_groups(x, False)
    plain = matrix.data.view(4, 16, 16, 16).transpose(1, 2).reshape(64, 256)
    found, scale = torch.empty(5, 64), matrix.scale
    a, b = codes.view(torch.float8_e4m3fn), plain.view(torch.float8_e4m3fn)
    kernel[(4,)](
        a,
        b,
        found,
        scales,
        scale,
        *(5, 64, 256),
        *(*a.stride(), b.stride(1), b.stride(0), 1, *found.stride()),
        *(*scales.stride(), scale.stride(1), scale.stride(0)),
        GROUP_K=128,
        GROUP_N=128,
        BLOCK_SIZE_M=16,
        BLOCK_SIZE_N=16,
        BLOCK_SIZE_K=128,
        GROUP_SIZE_M=1,
        NUM_KSPLIT=1,
        SPLITK_BLOCK_SIZE=256,
        cache_modifier="",
    )
    tiles = matrix.data.view(torch.float8_e4m3fn)
    emulated = Products("gfx950").gemm_a8w8_blockscale_bpreshuffle(a, tiles, scales, scale)
    torch.testing.assert_close(emulated, found.bfloat16(), rtol=2**-7, atol=1e-3)
    assert relative_error(found, x.float() @ dequantize_blocks(weight).T) < 6e-2
