"""Our products of more tokens for Hopper: planned and emulated anywhere, run against float64 on such a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv41.backends.cuda import products_wide as wide
from dsv41.backends.cuda.products import Plan
from dsv41.backends.cuda.products_wide import BUILDS, build_for, plan, products_wide
from dsv41.errors import BackendError

from ...wording import refused
from .emulator.fixture import EmulatedGPU
from .test_products import (
    H200,
    MISREAD,
    RELEASE,
    SMALL,
    agree,
    call,
    on_gpu,
    on_hopper,
    wait_for_each_other,
    without_gpu,
)

TOKENS = [33, 64, 65, 130, 256]
PLANS = {
    "one group": Plan(1, 1, 1, 1),
    "bands": Plan(1, 4, 1, 1),
    "slices": Plan(3, 1, 1, 2),
    "ranks": Plan(3, 1, 5, 1),
    "all": Plan(2, 2, 3, 2),
}
"""Of up to 192 rows."""


# Anywhere


def test_calls_of_more_tokens_than_a_cta_takes_have_several() -> None:
    assert [build_for(tokens).tokens for tokens in (1, 64, 65, 128, 129, 256)] == [64, 64, 128, 128, 128, 128]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", [*RELEASE.values(), *SMALL.values()], ids=[*RELEASE, *SMALL])
def test_a_plan_covers_everything_in_what_a_cta_has(tokens: int, shape: tuple[int, int, int]) -> None:
    (groups, rows, columns), build = shape, build_for(tokens)
    chosen = plan(build, tokens, rows, columns, groups, H200)
    assert chosen.clusters * chosen.bands * 64 >= rows > (chosen.clusters - 1) * chosen.bands * 64
    assert chosen.bands * chosen.slices <= build.groups
    assert columns // 64 // chosen.ranks >= chosen.slices
    assert chosen.slices < build.stages
    assert build.stages % chosen.slices == 0
    assert build.shared(chosen.bands, chosen.slices) <= build.shared_bytes == 227 << 10


@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("shape", RELEASE.values(), ids=RELEASE)
def test_the_release_runs_at_once_and_keeps_most_multiprocessors_busy(tokens: int, shape: tuple[int, int, int]) -> None:
    groups, rows, columns = shape
    chosen = plan(build_for(tokens), tokens, rows, columns, groups, H200)
    clusters = groups * chosen.clusters
    assert clusters <= (132, *H200.clusters)[chosen.ranks - 1]
    assert clusters * chosen.ranks > 60


def test_where_no_cluster_runs_none_is_planned() -> None:
    assert plan(BUILDS[0], 64, 1792, 5120, 1, replace(H200, clusters=(0,) * 7)).ranks == 1


@pytest.mark.parametrize(("name", "change"), MISREAD)
def test_what_the_kernel_would_misread_is_refused(name: str, change: Callable[[Tensor], Tensor]) -> None:
    arguments = call()
    arguments[name] = change(arguments[name])
    with refused(BackendError, f"products_wide was given {name}"):
        products_wide(**arguments)


def test_columns_that_are_no_whole_steps_are_refused() -> None:
    with refused(BackendError, "weight"):
        products_wide(**call(64, (1, 16, 192)))


def test_no_tokens_are_no_launch() -> None:
    products_wide(**call(0))


# By emulation


def planned(build: wide.WideBuild, chosen: Plan) -> Callable[..., None]:
    return lambda **arguments: wide.launch(build, chosen, **arguments)


@without_gpu
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_emulated_it_agrees_with_float64(emulated_gpu: EmulatedGPU, tokens: int, shape: tuple[int, int, int]) -> None:
    emulated_gpu.schedule(tokens)
    agree(kept(emulated_gpu, call(tokens, shape, apart=8)), multiply=products_wide)


@without_gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chosen", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.name)
def test_emulated_any_plan_agrees_with_float64(
    emulated_gpu: EmulatedGPU, build: wide.WideBuild, chosen: Plan, seed: int
) -> None:
    emulated_gpu.schedule(seed)
    rows = chosen.clusters * chosen.bands * 64 - 48
    arguments = kept(emulated_gpu, call(build.tokens + 9, (1, rows, 1152), dtype=torch.float32))
    agree(arguments, multiply=planned(build, chosen))


@without_gpu
@pytest.mark.parametrize("scales", [(3, 20), (60, 200), (130, 140), (180, 210), (240, 246)], ids=str)
def test_emulated_no_range_is_too_wide(emulated_gpu: EmulatedGPU, scales: tuple[int, int]) -> None:
    arguments = kept(emulated_gpu, call(33, SMALL["ragged"], dtype=torch.float32, scales=scales))
    agree(ranging(arguments, scales), multiply=products_wide)


def kept(gpu: EmulatedGPU, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """With weights that may be read before the launch ahead has ended."""
    gpu.keep(arguments["weight"], arguments["weight_scale"])
    return arguments


def ranging(arguments: dict[str, Tensor], scales: tuple[int, int]) -> dict[str, Tensor]:
    """With activations for which sums of such weights are in the range of fp32."""
    arguments["x"].mul_(2.0 ** max(90 - sum(scales) // 2, -125 if scales[0] > 220 else -45))
    return arguments


# On a Hopper GPU


@on_hopper
@pytest.mark.parametrize("tokens", [1, *TOKENS, 128, 200, 300])
@pytest.mark.parametrize("shape", [*RELEASE.values(), *SMALL.values()], ids=[*RELEASE, *SMALL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_agrees_with_float64(tokens: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    agree(on_gpu(tokens, shape, dtype=dtype, apart=8), repeats=20, multiply=products_wide)


@on_hopper
@pytest.mark.parametrize("chosen", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.name)
def test_any_plan_agrees_with_float64(build: wide.WideBuild, chosen: Plan) -> None:
    rows = chosen.clusters * chosen.bands * 64 - 48
    arguments = on_gpu(build.tokens + 9, (1, rows, 1152), dtype=torch.float32)
    agree(arguments, repeats=20, multiply=planned(build, chosen))


@on_hopper
@pytest.mark.parametrize("tokens", [33, 128])
@pytest.mark.parametrize("scales", [(3, 20), (60, 200), (130, 140), (180, 210), (240, 246)], ids=str)
def test_no_range_is_too_wide(tokens: int, scales: tuple[int, int]) -> None:
    arguments = ranging(on_gpu(tokens, SMALL["long"], dtype=torch.float32, scales=scales), scales)
    torch.cuda.synchronize()
    agree(arguments, repeats=2, multiply=products_wide)


@on_hopper
def test_subnormal_codes_count() -> None:
    arguments = on_gpu(64, SMALL["long"], dtype=torch.float32)
    arguments["weight"].copy_(torch.randint_like(arguments["weight"], 1, 8))
    torch.cuda.synchronize()
    agree(arguments, multiply=products_wide)


@on_hopper
@pytest.mark.parametrize("tokens", [33, 128, 256])
def test_launches_of_a_graph_wait_for_each_other(tokens: int) -> None:
    wait_for_each_other(tokens, products_wide)


@on_hopper
def test_the_op_is_declared_right() -> None:
    torch.library.opcheck(products_wide, tuple(on_gpu(33).values()))
