"""Our products for Hopper: planned and compiled anywhere, run against float64 where there is such a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.backends.cuda import nvrtc
from dsv41.backends.cuda.products import (
    BUILDS,
    Plan,
    Room,
    build_for,
    most_columns,
    plan,
    products,
)
from dsv41.errors import BackendError

from ...wording import refused

MISSING = nvrtc.missing()
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER or MISSING is not None, reason=MISSING or "needs a Hopper GPU")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here")
compiles = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
builds = pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.name)

RELEASE = {
    "wq_a, wkv": (1, 1792, 5120),
    "wq_b": (1, 32768, 1280),
    "indexer's wq_b": (1, 4096, 1280),
    "wo_a": (8, 1024, 4096),
    "wo_b": (1, 5120, 8192),
    "wo_a of a rank of 8": (1, 1024, 4096),
    "wo_b of a rank of 8": (1, 5120, 1024),
}
"""Groups, rows of each, columns."""
SMALL = {
    "one step": (1, 16, 128),
    "ragged": (1, 48, 640),
    "groups": (2, 80, 384),
    "groups that share scales": (3, 16, 256),
    "long": (1, 64, 2560),
}
H200 = Room(132, (66, 39, 30, 22, 21, 14, 15))
"""As measured with one CTA on a multiprocessor, the clusters of 6 and 7 estimated."""


MISREAD: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("x", lambda x: x.float()),
    ("x", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    ("x", lambda x: torch.zeros(3, 2, 388).bfloat16()[:, :, :384]),
    ("x", lambda x: torch.zeros(3 * 2 * 384 + 1).bfloat16()[1:].view(3, 2, 384)),
    ("weight", lambda x: x.view(torch.int8)),
    ("weight", lambda x: x[:, :256]),
    ("weight", lambda x: x[:-8]),
    ("weight", lambda x: x.repeat(1, 2)[:, ::2]),
    ("weight_scale", lambda x: x.float()),
    ("weight_scale", lambda x: x[1:]),
    ("weight_scale", lambda x: x.t().contiguous().t()),
    ("out", lambda x: x.half()),
    ("out", lambda x: x[:, :-16]),
    ("out", lambda x: torch.zeros(3, 162).bfloat16()[:, :160]),
]
"""Of the arguments that `call` makes."""


# Anywhere


def test_the_smallest_build_is_taken() -> None:
    assert [build_for(tokens).tokens for tokens in (0, 1, 8, 9, 16, 17, 32)] == [8, 8, 8, 16, 16, 32, 32]
    with pytest.raises(BackendError, match="given 33 tokens: expected at most 32"):
        build_for(33)


def slices_of(chosen: Plan, steps: int) -> list[int]:
    """Steps of each slice of the columns, as the kernel cuts them."""
    share, extra = divmod(steps, chosen.ranks * chosen.slices)
    return [share + (part < extra) for part in range(chosen.ranks * chosen.slices)]


@pytest.mark.parametrize("tokens", [1, 7, 8, 16, 32])
@pytest.mark.parametrize("shape", [*RELEASE.values(), *SMALL.values()], ids=[*RELEASE, *SMALL])
def test_a_plan_covers_everything_in_what_a_cta_has(tokens: int, shape: tuple[int, int, int]) -> None:
    (groups, rows, columns), build = shape, build_for(tokens)
    chosen = plan(build, tokens, rows, columns, groups, H200)
    assert chosen.clusters * chosen.bands * 16 >= rows > (chosen.clusters - 1) * chosen.bands * 16
    assert chosen.bands * chosen.slices <= build.warps
    parts = slices_of(chosen, columns // 128)
    assert min(parts) >= 1
    assert max(parts) <= 32  # a lane of a warp has the scales of a step
    for rank in range(chosen.ranks):
        own = parts[rank * chosen.slices : (rank + 1) * chosen.slices]
        assert sum(own) <= build.steps
        assert build.shared(tokens, chosen.bands * chosen.slices, sum(own)) <= 227 << 10


@pytest.mark.parametrize("tokens", [1, 16, 32])
@pytest.mark.parametrize("shape", RELEASE.values(), ids=RELEASE)
def test_the_release_keeps_most_multiprocessors_busy(tokens: int, shape: tuple[int, int, int]) -> None:
    groups, rows, columns = shape
    chosen = plan(build_for(tokens), tokens, rows, columns, groups, H200)
    assert groups * chosen.clusters * chosen.ranks > 60


@pytest.mark.parametrize("tokens", [1, 16, 32])
@pytest.mark.parametrize("shape", RELEASE.values(), ids=RELEASE)
def test_what_was_not_measured_runs_at_once_too(tokens: int, shape: tuple[int, int, int]) -> None:
    groups, rows, columns = shape
    chosen = plan(build_for(tokens), tokens, rows, columns - 128, groups, H200)
    clusters = groups * chosen.clusters
    assert clusters <= (132, *H200.clusters)[chosen.ranks - 1]
    assert clusters * chosen.ranks > 60


def test_where_no_cluster_runs_none_is_planned() -> None:
    alone = plan(BUILDS[0], 8, 1792, 5120, 1, replace(H200, clusters=(0,) * 7))
    assert alone.ranks == 1


def call(
    tokens: int = 3,
    shape: tuple[int, int, int] = SMALL["groups"],
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    scales: tuple[int, int] = (110, 130),
    apart: int = 0,
) -> dict[str, Tensor]:
    """Random arguments. Tokens lie `apart` elements further apart than they must, around them NaN; scale bytes are from
    `scales`."""
    groups, rows, columns = shape
    random = torch.Generator(device).manual_seed(tokens)
    x = torch.full((tokens, groups, columns + apart), math.nan, dtype=torch.bfloat16, device=device)[..., :columns]
    x.copy_(torch.randn(x.shape, generator=random, device=device))
    weight = torch.randint(256, (groups * rows, columns), generator=random, dtype=torch.uint8, device=device)
    weight[weight & 127 == 127] = 0
    blocks = (-(-groups * rows // 32), columns // 32)
    scale = torch.randint(scales[0], scales[1] + 1, blocks, generator=random, dtype=torch.uint8, device=device)
    out = torch.full((tokens, groups * rows + apart), math.nan, dtype=dtype, device=device)[:, : groups * rows]
    return {"x": x, "weight": weight, "weight_scale": scale, "out": out}


@pytest.mark.parametrize(("name", "change"), MISREAD)
def test_what_the_kernel_would_misread_is_refused(name: str, change: Callable[[Tensor], Tensor]) -> None:
    arguments = call()
    arguments[name] = change(arguments[name])
    with refused(BackendError, f"products was given {name}"):
        products(**arguments)


def test_columns_that_are_no_whole_steps_or_too_many_are_refused() -> None:
    for columns in (192, most_columns(32) + 128):
        with refused(BackendError, "weight"):
            products(**call(32, (1, 16, columns)))


def test_no_tokens_are_no_launch() -> None:
    products(**call(0))


# On a Hopper GPU


def exact(x: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor) -> Tensor:
    """In float64."""
    groups = x.shape[1]
    powers = 2.0 ** (weight_scale.double() - 127)
    wide = powers.repeat_interleave(32, 0)[: len(weight)].repeat_interleave(32, 1)
    rows = (weight.view(torch.float8_e4m3fn).double() * wide).view(groups, -1, weight.shape[1])
    return torch.einsum("tgk,grk->tgr", x.double(), rows).reshape(out.shape)


def agree(arguments: dict[str, Tensor], repeats: int = 0, multiply: Callable[..., None] = products) -> None:
    """With float64, and with itself."""
    out = arguments["out"]
    multiply(**arguments)
    expected = exact(**arguments)
    assert out.isfinite().all()
    worst = 3e-5 if out.dtype == torch.float32 else 3e-3  # the matrix unit adds with fewer bits than fp32 has
    assert float((out.double() - expected).norm() / expected.norm()) < worst
    again = dict(arguments, out=torch.full_like(out, math.nan))
    for _ in range(repeats):
        multiply(**again)
        assert torch.equal(again["out"], out)


def on_gpu(*arguments: Any, **options: Any) -> dict[str, Tensor]:
    made = call(*arguments, device="cuda", **options)
    torch.cuda.synchronize()  # weights must not be written by the launch ahead
    return made


@on_hopper
@pytest.mark.parametrize("tokens", [1, 5, 8, 13, 16, 29, 32])
@pytest.mark.parametrize("shape", [*RELEASE.values(), *SMALL.values()], ids=[*RELEASE, *SMALL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_agrees_with_float64(tokens: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    agree(on_gpu(tokens, shape, dtype=dtype, apart=8), repeats=20)


@on_hopper
@pytest.mark.parametrize("tokens", [1, 16, 32])
@pytest.mark.parametrize("scales", [(3, 20), (60, 200), (130, 140), (180, 210)], ids=str)
def test_no_range_is_too_wide(tokens: int, scales: tuple[int, int]) -> None:
    arguments = on_gpu(tokens, SMALL["long"], dtype=torch.float32, scales=scales)
    arguments["x"].mul_(2.0 ** max(90 - sum(scales) // 2, -45))
    torch.cuda.synchronize()
    agree(arguments, repeats=2)


@on_hopper
@pytest.mark.parametrize("tokens", [1, 32])
def test_subnormal_codes_count(tokens: int) -> None:
    arguments = on_gpu(tokens, SMALL["long"], dtype=torch.float32)
    arguments["weight"].copy_(torch.randint_like(arguments["weight"], 1, 8))
    torch.cuda.synchronize()
    agree(arguments)


@on_hopper
@pytest.mark.parametrize("tokens", [1, 16, 32])
def test_launches_of_a_graph_wait_for_each_other(tokens: int) -> None:
    wait_for_each_other(tokens, products)


def wait_for_each_other(tokens: int, multiply: Callable[..., None]) -> None:
    """Each reads what the one ahead wrote."""
    first = on_gpu(tokens, (1, 5120, 1280), scales=(118, 118))
    second = on_gpu(tokens, (1, 1280, 5120), scales=(118, 118))

    def chain() -> None:
        for _ in range(6):
            second["x"] = first["out"].unsqueeze(1)
            multiply(**first)
            multiply(**second)
            first["x"].copy_(second["out"].unsqueeze(1) * 2.0**-4)

    start = first["x"].clone()
    chain()
    torch.cuda.synchronize()
    expected = first["x"].clone()
    first["x"].copy_(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(5):
        first["x"].copy_(start)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first["x"], expected)


@on_hopper
def test_the_op_is_declared_right() -> None:
    torch.library.opcheck(products, tuple(on_gpu().values()))
