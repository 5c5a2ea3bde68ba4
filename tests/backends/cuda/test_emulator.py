"""Our kernels for Hopper on the emulator, and whether the emulator can fail."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv41.backends.cuda import nvrtc
from dsv41.backends.cuda.hopper import attend
from dsv41.backends.cuda.launch import int32, pointer
from dsv41.hal.layout import PagedCache

from . import test_hopper as attention
from . import test_products as products
from .emulator import build
from .emulator.fixture import EmulatedGPU
from .emulator.kernel import EmulatedKernel, EmulationError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here")
Part = tuple[PagedCache, Tensor, Tensor]


def rows_of(cache: PagedCache, lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    """Indices with holes, which are NaN past the lengths."""
    last = (cache.num_pages - 1) * cache.layout.page_size
    indices = torch.randint(last, (len(lengths), width), dtype=torch.int32)
    indices[torch.rand(indices.shape) < 0.2] = -1
    beyond = torch.arange(width) >= torch.tensor(lengths)[:, None]
    indices[beyond] = last + 1
    return indices, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("heads", "multiprocessors", "window_lengths", "compressed_lengths"),
    [
        (8, 1, [70, 0, 1], [40, 3, 0]),
        (7, 8, [128], [200]),
        (8, 2, [128, 1, 33, 0, 65, 90], [200, 129, 31, 64, 0, 97]),  # tokens that follow each other in a CTA
        (16, 4, [96, 33], None),
        (16, 9, [100, 128], [200, 30]),
        (64, 1, [70, 0, 1], [40, 3, 0]),  # tiles of 32 keys
        (64, 16, [128, 10, 70], [90, 200, 3]),  # which clusters share
        (64, 2, [128, 0, 64, 65], None),
        (64, 16, [128, 1, 63, 90, 5, 128, 128, 64, 2], None),  # tiles of 64
    ],
)
def test_attention_agrees_with_float64(
    emulated_gpu: EmulatedGPU,
    heads: int,
    multiprocessors: int,
    window_lengths: list[int],
    compressed_lengths: list[int] | None,
    seed: int,
) -> None:
    torch.manual_seed(1)
    emulated_gpu.resize(multiprocessors)
    emulated_gpu.schedule(seed)
    parts = [(cache := attention.cache_of(3, 64, 1), *rows_of(cache, window_lengths, 128))]
    given = [cache.data, 64, *parts[0][1:], None, 1, None, None]
    if compressed_lengths is not None:
        parts.append((cache := attention.cache_of(5, 16, 2), *rows_of(cache, compressed_lengths, 200)))
        given[4:] = [cache.data, 16, *parts[1][1:]]
    q = torch.randn(len(window_lengths), heads + 3, 512).bfloat16()
    q[:, heads:] = math.nan
    sink = torch.randn(heads)
    sink[0] = -math.inf
    out = torch.full_like(q, math.nan)
    attend(q, heads, sink, 512**-0.5, *given, out)
    assert out[:, heads:].isnan().all()
    expected = attention.exact(q[:, :heads], sink, 512**-0.5, parts)
    found = out[:, :heads].double()
    assert (found - expected).norm() < 4e-3 * expected.norm()


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("preset", attention.RANGES)
def test_attention_of_any_range(emulated_gpu: EmulatedGPU, preset: str, heads: int) -> None:
    attention.agree_in_range(preset, 17 if heads == 16 else 2, heads)  # from 17 tokens on by the build for 16 heads


@pytest.mark.parametrize("tokens", [1, 11, 29])
@pytest.mark.parametrize("shape", products.SMALL.values(), ids=products.SMALL)
def test_products_agree_with_float64(emulated_gpu: EmulatedGPU, tokens: int, shape: tuple[int, int, int]) -> None:
    emulated_gpu.schedule(tokens)
    arguments = products.call(tokens, shape, apart=8)
    emulated_gpu.keep(arguments["weight"], arguments["weight_scale"])
    products.agree(arguments, repeats=1)


@pytest.mark.parametrize("scales", [(3, 20), (60, 200), (130, 140), (180, 210)], ids=str)
def test_products_of_any_range(emulated_gpu: EmulatedGPU, scales: tuple[int, int]) -> None:
    arguments = products.call(9, products.SMALL["ragged"], dtype=torch.float32, scales=scales)
    arguments["x"].mul_(2.0 ** max(90 - sum(scales) // 2, -45))
    emulated_gpu.keep(arguments["weight"], arguments["weight_scale"])
    products.agree(arguments)


# What the emulator finds

SMALL = """
extern "C" __global__ void small(int* out, const int* in, int n) {
    extern __shared__ int memory[];
    int i = threadIdx.x;
    BODY
}
"""


def small(body: str, seed: int) -> Tensor:
    """What two warps make of 0 to 63."""
    code = build.compile_to_ptx("small", SMALL.replace("BODY", body), "sm_90a", {})
    EmulatedKernel.seed = seed
    out, given = torch.full((64,), -1, dtype=torch.int32), torch.arange(64, dtype=torch.int32)
    EmulatedKernel("small", code, None, 64, 256).launch(None, 1, pointer(out), pointer(given), int32(64))
    return out


REVERSED = torch.arange(63, -1, -1, dtype=torch.int32)


def test_a_barrier_orders_and_its_absence_shows(emulated_gpu: EmulatedGPU) -> None:
    right = [small("memory[i] = in[i]; __syncthreads(); out[i] = memory[63 - i];", seed) for seed in range(8)]
    wrong = [small("memory[i] = in[i]; out[i] = memory[63 - i];", seed) for seed in range(8)]
    assert all(torch.equal(out, REVERSED) for out in right)
    assert not any(torch.equal(out, REVERSED) for out in wrong)


COPY = """
unsigned to = (unsigned)__cvta_generic_to_shared(memory + i);
asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\\ncp.async.commit_group;" ::"r"(to), "l"(in + i) : "memory");
WAIT
__syncthreads();
out[i] = memory[63 - i];
"""


def test_a_copy_is_there_when_it_was_waited_for_and_else_at_times(emulated_gpu: EmulatedGPU) -> None:
    waits = COPY.replace("WAIT", 'asm volatile("cp.async.wait_group 0;" ::: "memory");')
    assert all(torch.equal(small(waits, seed), REVERSED) for seed in range(8))
    assert not all(torch.equal(small(COPY.replace("WAIT", ""), seed), REVERSED) for seed in range(8))


BARRIER = """
unsigned at = (unsigned)__cvta_generic_to_shared(memory);
if (i == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(n));
__syncthreads();
asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
asm volatile("{\\n.reg .pred p;\\nagain:\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\\n"
             "@!p bra again;\\n}" ::"r"(at) : "memory");
out[i] = in[63 - i];
"""
MISUSE = {
    "a read past the end": (
        "out[i] = in[i + 1];",
        r"thread 63 at PTX line \d+ `ld.global.*in no tensor of the launch \(0 bytes past",
    ),
    "a read that is not aligned": (
        "out[i] = *(const int*)((const char*)in + i);",
        "4 bytes at global address .*: not aligned",
    ),
    "a store outside of shared memory": (
        "memory[i + 1] = in[i]; __syncthreads(); out[i] = memory[i];",
        r"thread 63 at PTX line \d+ `st.shared.*expected within the CTA's",
    ),
    "a lane that does not come": (
        "if (i != 40) __syncwarp(); out[i] = in[i]; if (i == 40) __syncthreads();",
        r"a deadlock(.|\n)*warp 1 lanes fffffeff wait for the warp at PTX line \d+ `bar.warp",
    ),
    "a barrier of one arrival too many": (
        BARRIER.replace('"r"(n)', '"r"(n + 1)'),
        r"a deadlock(.|\n)*warp 1 lanes ffffffff wait for a phase of a barrier .* `mbarrier.try_wait",
    ),
    "a barrier that nobody initialised": (BARRIER.replace("if (i == 0)", "if (n == 0)"), "it was not initialised"),
    "a barrier that is overwritten": (
        BARRIER.replace("__syncthreads();", "__syncthreads(); memory[1] = 0;"),
        "or was overwritten",
    ),
    "a division by 0": ("out[i] = in[i] / (n - 64);", "division of .* by 0"),
}


@pytest.mark.parametrize(("body", "said"), MISUSE.values(), ids=MISUSE)
def test_what_may_not_be_done_is_an_error(emulated_gpu: EmulatedGPU, body: str, said: str) -> None:
    for seed in range(4):
        with pytest.raises(EmulationError, match=said):
            small(body, seed)


def test_barriers_in_shared_memory(emulated_gpu: EmulatedGPU) -> None:
    for seed in range(4):
        assert torch.equal(small(BARRIER, seed), REVERSED)


def test_a_predicate_is_turned_over_by_minus_one(emulated_gpu: EmulatedGPU) -> None:
    body = """asm("{\\n.reg .pred p, q;\\nsetp.lt.s32 p, %1, 32;\\nxor.pred q, p, -1;\\nselp.s32 %0, 1, 0, q;\\n}"
                 : "=r"(out[i]) : "r"(in[i]));"""
    assert small(body, 0).tolist() == [0] * 32 + [1] * 32


def test_an_unknown_instruction_is_named(emulated_gpu: EmulatedGPU) -> None:
    with pytest.raises(NotImplementedError, match=r"the PTX instruction sin\.approx\.f32"):
        small("out[i] = (int)__sinf((float)in[i]);", 0)


def test_a_missing_fence_before_matrix_products_is_found(
    emulated_gpu: EmulatedGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = nvrtc.source("many_heads")
    fence = "fence.proxy.async.shared::cta;\\n"
    assert fence in text
    monkeypatch.setattr(nvrtc, "source", lambda _: text.replace(fence, ""))
    cache = attention.cache_of(3, 64, 1)
    indices, lengths = rows_of(cache, [32, 32, 32], 128)
    q = torch.randn(3, 64, 512).bfloat16()
    with pytest.raises(EmulationError, match=r"stored without fence\.proxy\.async since"):
        attend(q, 64, torch.zeros(64), 0.05, cache.data, 64, indices, lengths, None, 1, None, None, q.clone())


@pytest.mark.parametrize("heads", [8, 64])
def test_a_read_ahead_of_the_wait_for_the_launch_ahead_is_found(
    emulated_gpu: EmulatedGPU, monkeypatch: pytest.MonkeyPatch, heads: int
) -> None:
    text = nvrtc.source("few_heads" if heads == 8 else "many_heads")
    wait = "wait_for_launch_ahead();\n        fetch("
    assert wait in text
    monkeypatch.setattr(nvrtc, "source", lambda _: text.replace(wait, "fetch("))
    cache = attention.cache_of(3, 64, 1)
    indices, lengths = rows_of(cache, [32, 32, 32], 128)
    q = torch.randn(3, heads, 512).bfloat16()
    with pytest.raises(EmulationError, match=r"`ld\.global.*before the launch ahead was waited for"):
        attend(q, heads, torch.zeros(heads), 0.05, cache.data, 64, indices, lengths, None, 1, None, None, q.clone())


# Numbers

CONVERT = """
extern "C" __global__ void convert(const float* x, const float* y, unsigned* bf16, unsigned* f16,
                                   unsigned* product, unsigned* wide) {
    int i = threadIdx.x + blockIdx.x * 256;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bf16[i]) : "f"(y[i]), "f"(x[i]));
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(f16[i]) : "f"(y[i]), "f"(x[i]));
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(product[i]) : "r"(bf16[i]), "r"(bf16[i] >> 16 | bf16[i] << 16));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide[i]) : "h"((unsigned short)(i % 256 | i % 256 << 8)));
}
"""


def test_conversions_round_as_torch_does(emulated_gpu: EmulatedGPU) -> None:
    code = build.compile_to_ptx("convert", CONVERT, "sm_90a", {})
    torch.manual_seed(0)
    x, y = torch.randint(-(1 << 31), 1 << 31, (2, 1 << 14)).int().view(torch.float32)
    x[:4096] = torch.randn(4096) * 2.0 ** torch.randint(-30, 20, (4096,))
    y[:4096] = torch.randint(-(1 << 15), 1 << 15, (4096,)).short().view(torch.bfloat16).float() * (1 + 2**-8)  # ties
    out = torch.zeros(4, len(x), dtype=torch.int32)
    EmulatedKernel("convert", code, None, 256, 0).launch(None, len(x) // 256, *map(pointer, (x, y, *out)))
    pairs = torch.stack((x, y), 1)
    bf16, f16 = pairs.bfloat16(), pairs.half()
    wide = torch.arange(len(x)).remainder(256).to(torch.uint8).view(torch.float8_e4m3fn).half()
    expected = (bf16, f16, (bf16[:, :1] * bf16[:, 1:]).expand(-1, 2), wide[:, None].expand(-1, 2))
    for found, right in zip(out, expected, strict=True):
        numbers = found.view(right.dtype).view(-1, 2)
        torch.testing.assert_close(numbers, right, rtol=0, atol=0, equal_nan=True)
        assert (found.view(torch.int16).view(-1, 2)[right.isnan()] == 0x7FFF).all()
