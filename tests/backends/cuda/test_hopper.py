"""Our kernels for Hopper: compiled anywhere, run against float64 where there is such a GPU."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.backends.cuda import nvrtc
from dsv41.backends.cuda.aot import BUILDS as ALL_BUILDS
from dsv41.backends.cuda.build import ARCH, Build, why_not
from dsv41.backends.cuda.hopper import BUILDS, attend, build_for
from dsv41.errors import BackendError
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import Dialect, v4_584

from ...wording import refused

MISSING = nvrtc.missing()
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER or MISSING is not None, reason=MISSING or "needs a Hopper GPU")
DEVICE = torch.device("cuda" if HOPPER else "cpu")
compiles = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")


# Anywhere


SIZED_BY_LAUNCH = ("products", "products_pack", "products_wide")
"""Kernels whose CTAs get the shared memory that a plan needs, or none."""


@compiles
@pytest.mark.parametrize("build", ALL_BUILDS, ids=lambda build: build.name)
def test_it_compiles_without_spills_and_fits_on_a_multiprocessor(build: Build, tmp_path: Path) -> None:
    knobs = pytest.importorskip("triton.knobs")
    path = tmp_path / "figures.cubin"
    path.write_bytes(build.cubin())
    tool = knobs.nvidia.cuobjdump.path
    said = subprocess.run([tool, "--dump-resource-usage", str(path)], capture_output=True, text=True, check=True).stdout
    figures = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    assert figures["STACK"] + figures["LOCAL"] == 0
    warps_a_scheduler = -(-build.threads // 32 * build.ctas_per_sm // 4)
    assert figures["REG"] <= 65536 // 4 // 32 // warps_a_scheduler // 8 * 8
    if build.kernel not in SIZED_BY_LAUNCH:
        assert build.ctas_per_sm * (build.shared_bytes + 1024) <= 228 * 1024


@compiles
@pytest.mark.parametrize("build", [build for build in ALL_BUILDS if build.kernel not in SIZED_BY_LAUNCH], ids=str)
def test_too_little_shared_memory_is_refused_by_the_source(build: Build) -> None:
    short = build.defines | {"SHARED_BYTES": build.shared_bytes - 64}
    with pytest.raises(BackendError, match="the launch gives less"):
        nvrtc.cubin(build.kernel, ARCH, short)


@compiles
def test_what_a_source_includes_is_part_of_it() -> None:
    assert "share_of(float top" in nvrtc.source("many_heads")
    assert "#include" not in nvrtc.source("few_heads")


@compiles
def test_what_was_compiled_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_CACHE_DIR", str(tmp_path))
    code = BUILDS[0].cubin()
    [kept] = tmp_path.iterdir()
    assert kept.read_bytes() == code
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("compiled again"))
    assert BUILDS[0].cubin() == code


@compiles
def test_a_cache_that_cannot_be_used_costs_time_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSV41_CACHE_DIR", str(tmp_path / "file" / "under"))
    with pytest.warns(UserWarning, match="cannot be kept .*set DSV41_CACHE_DIR"):
        assert BUILDS[0].cubin().startswith(b"\x7fELF")


@compiles
def test_a_broken_file_in_the_cache_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_CACHE_DIR", str(tmp_path))
    nvrtc.kept_at(BUILDS[0].kernel, ARCH, BUILDS[0].defines).write_bytes(b"")
    code = BUILDS[0].cubin()
    [kept] = tmp_path.iterdir()
    assert kept.read_bytes() == code != b""
    assert kept.stat().st_mode & 0o777 == 0o644


def test_without_a_compiler_the_reason_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise BackendError("no\n  compiler: expected one; install it")

    monkeypatch.setattr(nvrtc, "cubin", refuse)
    assert why_not(BUILDS) == "no compiler: expected one; install it"


def small_call() -> dict[str, Any]:
    window = torch.zeros(2, 64 * 584 + 64, dtype=torch.uint8)
    q = torch.zeros(3, 8, 512, dtype=torch.bfloat16)
    indices, lengths = torch.zeros(3, 64, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    return {
        "q": q, "num_heads": 8, "sink": torch.zeros(8), "scale": 1.0, "window": window, "window_page_size": 64,
        "window_indices": indices, "window_lengths": lengths, "compressed": None, "compressed_page_size": 1,
        "compressed_indices": None, "compressed_lengths": None, "out": torch.empty_like(q),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda x: x.float()),
        ("q", lambda x: x[:, :7]),
        ("q", lambda x: torch.zeros(3, 8, 1024).bfloat16()[:, :, ::2]),
        ("out", lambda x: torch.zeros(3, 8, 514).bfloat16()[:, :, :512]),
        ("out", lambda x: torch.zeros(3 * 8 * 512 + 1).bfloat16()[1:].view(3, 8, 512)),
        ("sink", lambda x: x.bfloat16()),
        ("window", lambda x: x[:, 8:]),
        ("window", lambda x: x.view(torch.int8)),
        ("window_indices", lambda x: x.long()),
        ("window_indices", lambda x: x[:, ::2]),
        ("window_indices", lambda x: x[:2]),
        ("window_lengths", lambda x: x.long()),
    ],
)
def test_what_the_kernel_would_misread_is_refused(name: str, change: Callable[[Tensor], Tensor]) -> None:
    arguments = small_call()
    arguments[name] = change(arguments[name])
    with refused(BackendError, name):
        attend(**arguments)


def test_a_compressed_cache_without_its_rows_is_refused() -> None:
    arguments = small_call()
    with refused(BackendError, "a compressed cache without its indices"):
        attend(**arguments | {"compressed": arguments["window"]})


def test_the_smallest_build_is_taken() -> None:
    assert [build_for(heads, 512).heads for heads in (1, 8, 9, 16, 17, 64)] == [8, 8, 16, 16, 64, 64]
    with pytest.raises(BackendError, match="given 65 query heads: expected at most 64"):
        build_for(65, 1)


# On a Hopper GPU, or emulated


def cache_of(pages: int, page_size: int, seed: int) -> PagedCache:
    """Normal rows in all pages but the last, whose bytes are all NaN or worse."""
    layout = CacheLayout(v4_584(Dialect.OCP), page_size, ScalePlacement.PAGE)
    cache = PagedCache.allocate(layout, pages, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    slots = torch.arange((pages - 1) * page_size, device=DEVICE)
    cache.write(slots, torch.randn(len(slots), 512, generator=generator, device=DEVICE))
    cache.data[-1] = 255
    return cache


def rows_of(cache: PagedCache, tokens: int, width: int, seed: int, holes: float = 0.2) -> tuple[Tensor, Tensor]:
    """Indices with holes, and lengths from nothing to everything."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    last = (cache.num_pages - 1) * cache.layout.page_size
    indices = torch.randint(last, (tokens, width), generator=generator, device=DEVICE, dtype=torch.int32)
    indices[torch.rand(tokens, width, generator=generator, device=DEVICE) < holes] = -1
    lengths = torch.randint(width + 1, (tokens,), generator=generator, device=DEVICE, dtype=torch.int32)
    lengths[: min(tokens, 3)] = torch.tensor([width, 0, 1], device=DEVICE, dtype=torch.int32)[: min(tokens, 3)]
    beyond = torch.arange(width, device=DEVICE) >= lengths[:, None]
    indices[beyond] = last + 1  # which is NaN, were it looked at
    return indices, lengths


def exact(q: Tensor, sink: Tensor, scale: float, parts: list[tuple[PagedCache, Tensor, Tensor]]) -> Tensor:
    """In float64."""
    rows, live = [], []
    for cache, indices, lengths in parts:
        there = (torch.arange(indices.shape[1], device=DEVICE) < lengths[:, None]) & (indices >= 0)
        read = cache.read(torch.where(there, indices, 0).long().flatten()).double().view(*indices.shape, 512)
        rows.append(torch.where(there[:, :, None], read, 0.0))
        live.append(there)
    kv, there = torch.cat(rows, 1), torch.cat(live, 1)
    scores = (q.double() @ kv.transpose(1, 2) * scale).masked_fill(~there[:, None], -math.inf)
    with_sink = torch.cat((scores, sink.double()[None, :, None].expand(len(q), -1, 1)), dim=2)
    weights = torch.softmax(with_sink, -1)[:, :, :-1].nan_to_num(0.0)
    return weights @ kv


def run(
    q: Tensor, heads: int, sink: Tensor, scale: float, parts: list[tuple[PagedCache, Tensor, Tensor]], out: Tensor
) -> None:
    given: list[object] = []
    for cache, indices, lengths in parts:
        given += [cache.data, cache.layout.page_size, indices, lengths]
    given += [None, 1, None, None][: 8 - len(given)]
    attend(q, heads, sink, scale, *given, out)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@on_hopper
@pytest.mark.parametrize("heads", [1, 2, 4, 7, 8, 9, 16, 17, 33, 64])
@pytest.mark.parametrize("tokens", [1, 3, 20, 47, 100, 300, 700])
@pytest.mark.parametrize("with_compressed", [True, False], ids=["both", "window only"])
def test_it_agrees_with_float64(heads: int, tokens: int, with_compressed: bool) -> None:
    parts = [(cache := cache_of(9, 64, 1), *rows_of(cache, tokens, 128, 2))]
    if with_compressed:
        parts.append((cache := cache_of(40, 16, 3), *rows_of(cache, tokens, 512, 4)))
    q = torch.randn(tokens, heads + 3, 512, device="cuda").bfloat16()
    q[:, heads:] = math.nan
    sink = torch.randn(heads, device="cuda")
    sink[0] = -math.inf
    out = torch.full_like(q, math.nan)
    run(q, heads, sink, 512**-0.5, parts, out)
    assert out[:, heads:].isnan().all()
    expected = exact(q[:, :heads], sink, 512**-0.5, parts)
    assert error(out[:, :heads], expected) < 4e-3
    again = torch.full_like(q, math.nan)
    for _ in range(20):
        run(q, heads, sink, 512**-0.5, parts, again)
        assert torch.equal(again[:, :heads], out[:, :heads])


RANGES = ["wide scales", "some wide scales", "smallest scales", "largest scales", "large queries", "outliers"]


def agree_in_range(preset: str, tokens: int, heads: int) -> None:
    torch.manual_seed(0)
    cache = cache_of(9, 64, 1)
    footer = cache.data[:-1, 64 * 576 : 64 * 584].view(-1, 64, 8)
    q = torch.randn(tokens, heads, 512, device=DEVICE)
    if preset == "wide scales":
        footer.copy_(torch.randint(87, 167, footer.shape, device=DEVICE, dtype=torch.uint8))
        q *= 2.0**-48  # for scores that leave more than one key a weight
    elif preset == "some wide scales":
        footer[:, 0] += 40  # one row of 64, so that slices with and without one follow each other
        q *= 2.0**-40
    elif preset == "smallest scales":
        footer.fill_(0)
        cache.data[:-1, : 64 * 576].view(-1, 64, 576)[:, :, 448:] = 0
    elif preset == "largest scales":
        footer.fill_(127 + 110)  # all weight is one key's
    elif preset == "large queries":
        q *= 1e4
    else:
        q[:, :, ::100] *= 100
    parts = [(cache, *rows_of(cache, tokens, 640, 2, holes=0.0))]
    q, sink = q.bfloat16(), torch.full((heads,), -math.inf, device=DEVICE)
    out = torch.full((tokens, heads, 512), math.nan, device=DEVICE).bfloat16()
    run(q, heads, sink, 512**-0.5, parts, out)
    assert error(out, exact(q, sink, 512**-0.5, parts)) < 4e-3


@on_hopper
@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("tokens", [2, 300])
@pytest.mark.parametrize("preset", RANGES)
def test_no_range_is_too_wide(preset: str, tokens: int, heads: int) -> None:
    agree_in_range(preset, tokens, heads)


@on_hopper
@pytest.mark.parametrize("heads", [8, 64])
def test_subnormal_codes_count(heads: int) -> None:
    """Codes below 2**-6 are subnormals of e4m3, and of the bf16 that the kernel makes of them."""
    cache = cache_of(3, 64, 1)
    data = cache.data[:-1, : 64 * 576].view(-1, 64, 576)
    data[:, :, :448] = torch.randint(1, 8, (2, 64, 448), device="cuda", dtype=torch.uint8)
    data[:, :, 448:] = 0
    parts = [(cache, *rows_of(cache, 4, 128, 2))]
    q, sink = torch.randn(4, heads, 512, device="cuda").bfloat16(), torch.zeros(heads, device="cuda")
    out = torch.empty_like(q)
    run(q, heads, sink, 512**-0.5, parts, out)
    expected = exact(q, sink, 512**-0.5, parts)
    assert error(out, expected) < 4e-3
    assert expected.abs().max() > 0


@on_hopper
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("sink", [math.inf, -math.inf, 200.0, -200.0])
def test_any_sink(sink: float, heads: int) -> None:
    parts = [(cache := cache_of(9, 64, 1), *rows_of(cache, 5, 128, 2))]
    q, sinks = torch.randn(5, heads, 512, device="cuda").bfloat16(), torch.full((heads,), sink, device="cuda")
    out = torch.full_like(q, math.nan)
    run(q, heads, sinks, 512**-0.5, parts, out)
    assert out.isfinite().all()
    assert not out[1].any()  # the token of no keys
    if sink > 100:
        assert float(out.double().norm()) < 1e-1
    else:
        assert error(out, exact(q, sinks, 512**-0.5, parts)) < 4e-3


@on_hopper
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("tokens", [4, 300])
def test_a_graph_follows_its_tensors(tokens: int, heads: int) -> None:
    parts = [(cache := cache_of(9, 64, 1), *rows_of(cache, tokens, 128, 2))]
    q, sink = torch.randn(tokens, heads, 512, device="cuda").bfloat16(), torch.zeros(heads, device="cuda")
    out = torch.empty_like(q)
    run(q, heads, sink, 0.05, parts, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(q, heads, sink, 0.05, parts, out)
    for seed in range(3):
        indices, lengths = rows_of(cache, tokens, 128, 10 + seed)
        parts[0][1].copy_(indices)
        parts[0][2].copy_(lengths)
        q.normal_()
        graph.replay()
        found = out.clone()
        run(q, heads, sink, 0.05, parts, out)
        assert torch.equal(found, out)
        assert error(found, exact(q, sink, 0.05, parts)) < 4e-3


@on_hopper
@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("tokens", [1, 16, 100, 700])
def test_launches_of_a_graph_wait_for_each_other(tokens: int, heads: int) -> None:
    """Each reads what the one ahead wrote, and writes what that one read."""
    parts = [(cache := cache_of(9, 64, 1), *rows_of(cache, tokens, 128, 2))]
    start, sink = torch.randn(tokens, heads, 512, device="cuda").bfloat16(), torch.zeros(heads, device="cuda")
    q, out = start.clone(), torch.empty_like(start)

    def chain(between: Callable[[], None]) -> None:
        for i in range(12):
            run(*((q, heads, sink, 5.0, parts, out) if i % 2 == 0 else (out, heads, sink, 5.0, parts, q)))
            between()

    chain(torch.cuda.synchronize)
    expected = q.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(lambda: None)
    for _ in range(5):
        q.copy_(start)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(q, expected)


@on_hopper
def test_the_op_is_declared_right() -> None:
    parts = [(cache := cache_of(3, 64, 1), *rows_of(cache, 5, 128, 2))]
    q = torch.randn(5, 8, 512, device="cuda").bfloat16()
    arguments = (
        q,
        8,
        torch.zeros(8, device="cuda"),
        0.05,
        cache.data,
        64,
        *parts[0][1:],
        None,
        1,
        None,
        None,
        q.clone(),
    )
    torch.library.opcheck(attend, arguments)
