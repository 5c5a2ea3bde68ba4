"""Products of 33 to 256 tokens with block-scaled fp8 weights on Hopper: the launches of `kernels/products_pack.cu` and
`kernels/products_wide.cu`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dsv41.backends import vendor
from dsv41.backends.cuda.build import Build
from dsv41.backends.cuda.launch import int32, int64, pointer
from dsv41.backends.cuda.products import MOST_RANKS, MOST_SHARED, Plan, Room, loaded, misread_with
from dsv41.errors import BackendError

MOST_TOKENS = 256
ROWS = 64
"""Of a warp group's band."""
STEP = 64
"""Columns that are multiplied at a time."""
_ANY_COLUMNS = 1 << 31
_BARRIERS = 1024
_WARPS = 4
"""Of a group."""
_SLOT = 1024 + 128
"""Bytes of a step of a warp's weights, with a scale for each lane."""
_PITCH = ROWS + 4
"""Sums of a token and band."""

# What a plan goes by, in cycles of a multiprocessor: estimates, see docs/performance.md, "Products by wgmma".
_CACHE, _REMOTE, _OWN = 24, 16, 64
"""Bytes a cycle that a multiprocessor gets: of the L2 cache when all ask, of another's shared memory, of its own."""
_CHAIN = 600
"""Of a step of one warp group, beside its matrix instructions, from its wait for weights to the next."""
_BEGINS, _RANK = 3000, 300
"""Before and after all steps, and what each CTA of a cluster costs the others."""


class WideBuild(Build):
    """For CTAs of at most so many `tokens` and warp `groups` that multiply, with room for `stages` steps of activations
    and `depth` steps of each warp's weights."""

    @property
    def tokens(self) -> int:
        return self.own_defines["TOKENS"]

    @property
    def groups(self) -> int:
        return self.own_defines["GROUPS"]

    @property
    def stages(self) -> int:
        return self.own_defines["STAGES"]

    def shared(self, bands: int, slices: int) -> int:
        """Bytes of shared memory of a CTA: barriers, and activations and weights, or the sums that take their place."""
        activations = self.stages * self.tokens * STEP * 2
        weights = bands * slices * _WARPS * self.own_defines["DEPTH"] * _SLOT
        return _BARRIERS + max(activations + weights, bands * self.tokens * _PITCH * 4)


def build(tokens: int, *, stages: int, depth: int, groups: int = 4) -> WideBuild:
    """Of `tokens` 64 or 128. One warp group more copies activations."""
    defines = {"TOKENS": tokens, "GROUPS": groups, "STAGES": stages, "DEPTH": depth}
    return WideBuild("products_wide", "gemm", (groups + 1) * 128, 1, MOST_SHARED, defines)


BUILDS = (build(64, stages=8, depth=4), build(128, stages=6, depth=4))
PACK = Build("products_pack", "other", 256, 1, 0, {})
ALL_BUILDS: tuple[Build, ...] = (PACK, *BUILDS)


def build_for(tokens: int) -> WideBuild:
    """With more than 128 tokens, several CTAs have the same rows."""
    return next((build for build in BUILDS if tokens <= build.tokens), BUILDS[-1])


@cache
def plan(build: WideBuild, tokens: int, rows: int, columns: int, groups: int, room: Room) -> Plan:
    """The one of the fewest cycles. As `Plan` says, with warp groups for warps."""
    all_bands, steps = -(-rows // ROWS), columns // STEP
    possible = (
        Plan(-(-all_bands // bands), bands, ranks, slices)
        for ranks in range(1, min(MOST_RANKS, steps) + 1)
        if ranks == 1 or room.clusters[ranks - 2]
        for bands in range(1, min(build.groups, all_bands) + 1)
        for slices in range(1, min(build.groups // bands, steps // ranks, build.stages // 2) + 1)
        if build.stages % slices == 0  # else slices would meet at a stage's barrier
    )
    return min(possible, key=lambda each: cycles(each, build, tokens, columns, groups, room))


def cycles(chosen: Plan, build: WideBuild, tokens: int, columns: int, groups: int, room: Room) -> float:
    """Of a multiprocessor: for each step of a CTA the most of what its bytes, its matrix instructions and the chain of
    one group take, and adding up."""
    bands, ranks, slices, live = chosen.bands, chosen.ranks, chosen.slices, min(tokens, build.tokens)
    matrices = 2 * build.tokens  # of a group's step
    moved = (bands * ROWS * STEP + live * STEP * 2) / _CACHE
    step = max(bands * matrices, moved, (_CHAIN + matrices) / slices)
    sums = bands * ROWS * live * 4
    ends = _BEGINS + (2 * slices / bands + 1 / ranks) * sums / _OWN
    if ranks > 1:
        ends += ranks * _RANK + sums * (ranks - 1) / ranks / _REMOTE
    at_a_time = room.multiprocessors if ranks == 1 else room.clusters[ranks - 2]
    turns = -(-chosen.clusters * -(-tokens // build.tokens) * groups // at_a_time)
    return turns * (-(-(columns // STEP) // ranks) * step + ends)


@torch.library.custom_op("dsv41::products_wide", mutates_args=("out",))
def products_wide(x: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor) -> None:
    """What `products` computes, for more tokens and any multiple of 128 columns, from tensors of the same form. A
    weight past the range of bf16, which takes a scale byte of 247 or more, is infinite.

    Weights are read before the launch ahead of this one in the stream has ended, so that one must not write them.

    Raises BackendError for tensors that the kernel would misread.
    """
    if wrong := misread(x, weight, weight_scale, out):
        shown = {"x": x, "weight": weight, "weight_scale": weight_scale, "out": out}
        raise BackendError(
            f"products_wide was given {', '.join(wrong)} in another form ({vendor.words(shown)}): expected what the "
            "documentation of products says; give it so, or use the portable products"
        )
    tokens, groups, columns = x.shape
    if tokens == 0:
        return
    build = build_for(tokens)
    with torch.cuda.device(x.device):
        room = loaded(build, x.device.index).room
        chosen = plan(build, tokens, len(weight) // groups, columns, groups, room)
        launch(build, chosen, x, weight, weight_scale, out)


def launch(build: WideBuild, chosen: Plan, x: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor) -> None:
    """`products_wide` by this build and plan."""
    tokens, groups, columns = x.shape
    steps, tiles = columns // STEP, -(-tokens // build.tokens)
    # Not from the backend's workspace, since products on side streams may run beside each other.
    packed = x.new_empty(groups * tiles * build.tokens * columns)
    loaded(PACK, x.device.index).launch(
        x.device,
        (-(-tokens * steps * 4 // PACK.threads), 1, groups),
        pointer(x), int64(x.stride(0) * 2), int64(x.stride(1) * 2), int32(tokens), int32(steps), int32(build.tokens),
        pointer(packed),
        early=True,
    )  # fmt: skip
    share, extra = divmod(steps, chosen.ranks)
    loaded(build, x.device.index).launch(
        x.device,
        (1, chosen.clusters * tiles, groups),
        pointer(weight), pointer(weight_scale), int32(len(weight) // groups), int32(columns), int32(chosen.bands),
        int32(chosen.slices), int32(share), int32(extra), pointer(packed), int32(tokens),
        pointer(out), int64(out.stride(0)), int32(out.dtype == torch.float32),
        ranks=chosen.ranks,
        block=((chosen.bands * chosen.slices + 1) * 128, 1, 1),
        shared_bytes=build.shared(chosen.bands, chosen.slices),
        early=True,
    )  # fmt: skip


def misread(x: Tensor, weight: Tensor, weight_scale: Tensor | None, out: Tensor) -> list[str]:
    """The names of what `products_wide` would misread."""
    return misread_with(_ANY_COLUMNS, x, weight, weight_scale, out)
