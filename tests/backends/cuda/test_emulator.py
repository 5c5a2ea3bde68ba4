"""Our CUDA C++ kernels without a GPU: their results by emulation, and that the emulator sees faults."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv41.backends.cuda.build import ARCH
from dsv41.backends.cuda.launch import pointer

from . import test_hopper as attention
from . import test_products as products
from .emulator.gpu import EmulatedKernel, missing
from .emulator.ptx import of_source
from .emulator.translate import NotEmulated, translate

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of torch's own modules, when all objects are looked at
]
SEEDS = range(2)


# Kernels of the package


@pytest.mark.parametrize(
    ("heads", "tokens", "window", "compressed"),
    [
        (8, 1, 128, 0),
        (5, 2, 130, 96),
        (16, 20, 70, 0),
        (16, 3, 640, 0),
        (64, 1, 64, 64),
        (64, 4, 130, 0),
        (33, 9, 97, 96),
    ],
)
def test_attention_agrees_with_float64(
    heads: int, tokens: int, window: int, compressed: int, emulated_gpu: type[EmulatedKernel]
) -> None:
    """Holes, lengths from 0, pages of NaN, clusters of several sizes, padded heads."""
    parts = [(cache := attention.cache_of(5, 64, 1), *attention.rows_of(cache, tokens, window, 2))]
    if compressed:
        parts.append((cache := attention.cache_of(10, 16, 3), *attention.rows_of(cache, tokens, compressed, 4)))
    random = torch.Generator().manual_seed(heads)
    q = torch.randn(tokens, heads + 3, 512, generator=random).bfloat16()
    q[:, heads:] = math.nan
    sink = torch.randn(heads, generator=random)
    sink[0] = -math.inf
    expected = attention.exact(q[:, :heads], sink, 512**-0.5, parts)
    found = []
    for emulated_gpu.seed in SEEDS:
        out = torch.full_like(q, math.nan)
        attention.run(q, heads, sink, 512**-0.5, parts, out)
        assert out[:, heads:].isnan().all()
        assert attention.error(out[:, :heads], expected) < 4e-3
        found.append(out[:, :heads])
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("tokens", [1, 11, 29, 64])
@pytest.mark.parametrize("shape", products.SMALL.values(), ids=products.SMALL)
def test_products_agree_with_float64(
    tokens: int, shape: tuple[int, int, int], emulated_gpu: type[EmulatedKernel]
) -> None:
    emulated_gpu.seed = tokens
    products.agree(products.call(tokens, shape, apart=8), repeats=1)


@pytest.mark.parametrize("scales", [(3, 20), (60, 200), (200, 230)], ids=str)
def test_products_of_any_range(scales: tuple[int, int], emulated_gpu: type[EmulatedKernel]) -> None:
    arguments = products.call(9, products.SMALL["ragged"], dtype=torch.float32, scales=scales)
    arguments["x"].mul_(2.0 ** (90 - sum(scales) // 2))
    products.agree(arguments)


# Faults


def launched(body: str, data: Tensor, threads: int = 64, seed: int = 0, shared_bytes: int = 1024) -> Tensor:
    """What `body` makes of `data`, with `x` its numbers and `s` shared memory."""
    text = f'extern "C" __global__ void made(int* x) {{ extern __shared__ int s[]; int i = threadIdx.x; {body} }}'
    kernel = EmulatedKernel("made", of_source(text, ARCH, {}).encode(), None, threads, shared_bytes)
    kernel.seed = seed
    kernel.launch(torch.device("cpu"), 1, pointer(data))
    return data


def numbers() -> Tensor:
    return torch.arange(64, dtype=torch.int32)


def test_threads_meet_where_they_must() -> None:
    expected = numbers().roll(-33)
    for seed in range(5):
        good = launched("s[i] = x[i]; __syncthreads(); x[i] = s[(i + 33) % 64];", numbers(), seed=seed)
        assert torch.equal(good, expected)
    found = [launched("s[i] = x[i]; x[i] = s[(i + 33) % 64];", numbers(), seed=seed) for seed in range(5)]
    assert not any(torch.equal(each, expected) for each in found)


def test_a_copy_that_nobody_waited_for_is_seen() -> None:
    place = '"r"((int)__cvta_generic_to_shared(s + i)), "l"(x + i)'
    copy = f'asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: {place});'
    wait = 'asm volatile("cp.async.wait_all;" ::: "memory");'
    good = [launched(f"{copy} {wait} x[i] = s[i] + 1;", numbers(), seed=seed) for seed in range(5)]
    bad = [launched(f"{copy} x[i] = s[i] + 1;", numbers(), seed=seed) for seed in range(5)]
    assert all(torch.equal(each, numbers() + 1) for each in good)
    assert not all(torch.equal(each, numbers() + 1) for each in bad)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("x[i + 1] = 0;", "thread 63, .* 4 bytes of global memory at 0x[0-9a-f]+: in no tensor"),
        ("*(int*)((char*)x + 2 * i) = 0;", "global memory at 0x[0-9a-f]+: misaligned"),
        ("s[i + 193] = 0;", "thread 63, .* 4 bytes of shared memory at 0x800: .*of 1024 bytes"),
        ("if (i < 40) __syncthreads();", r"nothing can go on: 40 threads at PTX line \d+ \(bar.sync\)"),
        ("if (i & 1) x[i] = __shfl_sync(~0u, i, 0);", "nothing can go on: 32 threads .*shfl.sync"),
        ("x[i] = 5 / x[0];", "division of 5 by 0"),
    ],
)
def test_faults_are_named(body: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        launched(body, numbers())


def test_an_instruction_that_is_not_known_is_named() -> None:
    text = of_source('extern "C" __global__ void made(float* x) { *x = __sinf(*x); }', ARCH, {})
    with pytest.raises(NotEmulated, match=r"sin\.approx"):
        translate(text)
