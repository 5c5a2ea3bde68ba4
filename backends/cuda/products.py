"""Products of at most 32 tokens with block-scaled fp8 weights on Hopper: the launch of `kernels/products.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dsv41.backends import vendor
from dsv41.backends.cuda.build import Build
from dsv41.backends.cuda.launch import Kernel, int32, int64, pointer
from dsv41.errors import BackendError

MOST_TOKENS = 32
BLOCK = (32, 32)
"""Rows and columns that share a scale."""
_ROWS = 16
"""Of a band: those of a matrix instruction."""
_STEP = 128
"""Columns that are read at a time, of which a row must have a multiple."""
_LANES = 32
"""That keep the scales of a warp, a step each."""
MOST_SHARED = 227 << 10
"""Bytes of shared memory that a CTA can have."""
MOST_RANKS = 8
_IN_FLIGHT = 1 << 16
"""Bytes that keep a multiprocessor's share of the memory busy."""
_MOST_STEPS = 64
"""Steps of columns in a CTA."""
_BEGINS, _RANK = 1 << 15, 1 << 14
"""What a multiprocessor could read while a CTA begins, and in the time that each CTA of a cluster costs the others, who
wait for the slowest and fetch its sums: one microsecond and a half."""


class ProductsBuild(Build):
    """For at most so many `tokens`: at most so many `warps`, each with `depth` steps of a band in flight, and at most
    so many `steps` of a CTA."""

    @property
    def tokens(self) -> int:
        return self.own_defines["TOKENS"]

    @property
    def warps(self) -> int:
        return self.own_defines["MOST_WARPS"]

    @property
    def depth(self) -> int:
        return self.own_defines["DEPTH"]

    @property
    def steps(self) -> int:
        return self.own_defines["MOST_STEPS"]

    def shared(self, tokens: int, warps: int, steps: int) -> int:
        """Bytes of shared memory of a CTA: barriers, and weights and activations, or the sums that take their place."""
        weights = warps * self.depth * _ROWS * _STEP
        # 16 bytes more a token and step, so that tokens that are read together start in different banks.
        activations = steps * (tokens if self.tokens == 8 else self.tokens) * (_STEP * 2 + 16)
        sums = warps * self.tokens * (_ROWS + 4) * 4
        return -(-self.steps * 8 // 16) * 16 + max(weights + activations, sums)


def build(tokens: int, *, depth: int, warps: int = 16, ctas_per_sm: int = 1) -> ProductsBuild:
    """With registers for `ctas_per_sm`."""
    defines = {
        "TOKENS": tokens, "MOST_WARPS": warps, "DEPTH": depth, "MOST_STEPS": _MOST_STEPS, "CTAS_PER_SM": ctas_per_sm,
    }  # fmt: skip
    return ProductsBuild("products", "gemm", warps * 32, ctas_per_sm, MOST_SHARED, defines)


# Chosen by a sweep on one H200, as are the plans below.
BUILDS = (build(8, depth=3, ctas_per_sm=2), build(16, depth=4), build(32, depth=2))


def build_for(tokens: int) -> ProductsBuild:
    """Raises BackendError for more than 32 tokens."""
    for each in BUILDS:
        if tokens <= each.tokens:
            return each
    raise BackendError(
        f"the products for Hopper were given {tokens} tokens: expected at most {MOST_TOKENS}; use the portable ones"
    )


@cache
def most_columns(tokens: int) -> int:
    """What a cluster holds the activations of. Raises as `build_for` does."""
    build = build_for(tokens)
    steps = next(n for n in range(build.steps, 0, -1) if build.shared(tokens, 1, n) <= MOST_SHARED)
    return MOST_RANKS * min(steps, _LANES) * _STEP


@dataclass(frozen=True)
class Plan:
    """How a product is shared: `clusters` of a group, each with `bands` of rows, whose `ranks` CTAs cut the columns,
    each into `slices`. A warp has one band and one slice."""

    clusters: int
    bands: int
    ranks: int
    slices: int


@dataclass(frozen=True)
class Room:
    """What runs at a time: CTAs, one on each of the `multiprocessors`, and `clusters` of 2, 3, ... CTAs."""

    multiprocessors: int
    clusters: tuple[int, ...]


# Clusters, bands, ranks and slices of the release's products, by groups, rows and columns, and by build: the fastest of
# a sweep on one H200 (docs/performance.md).
_MEASURED: dict[tuple[int, int, int, int], Plan] = {
    (tokens, *shape): Plan(*chosen)
    for shape, by_tokens in {
        (1, 1792, 5120): {8: (112, 1, 1, 12), 16: (56, 2, 2, 4), 32: (28, 4, 4, 2)},
        (1, 32768, 1280): {8: (256, 8, 1, 2), 16: (128, 16, 1, 1), 32: (128, 16, 1, 1)},
        (1, 4096, 1280): {8: (86, 3, 1, 5), 16: (64, 4, 1, 2), 32: (64, 4, 1, 3)},
        (8, 1024, 4096): {8: (16, 4, 1, 4), 16: (8, 8, 2, 1), 32: (8, 8, 2, 2)},
        (1, 5120, 8192): {8: (54, 6, 4, 2), 16: (27, 12, 4, 1), 32: (30, 11, 4, 1)},
    }.items()
    for tokens, chosen in by_tokens.items()
}


@cache
def plan(build: ProductsBuild, tokens: int, rows: int, columns: int, groups: int, room: Room) -> Plan:
    """The plan that was measured to be fastest, or else the one by which a multiprocessor moves the fewest bytes:
    weights, counted as if all warps that the memory needs had as many as the one with the most, and activations and
    sums."""
    measured = _MEASURED.get((build.tokens, groups, rows, columns))
    if measured is not None and room.multiprocessors == 132 and all(room.clusters):
        return measured
    all_bands, steps, step = -(-rows // _ROWS), columns // _STEP, _STEP * _ROWS
    needed = min(build.warps, _IN_FLIGHT // (build.depth * step))
    found: list[tuple[int, Plan]] = []
    for ranks in range(1, MOST_RANKS + 1):
        for slices in range(1, build.warps + 1):
            share, extra = divmod(steps, ranks * slices)
            longest = slices * share + min(extra, slices)
            if not share or share + (extra > 0) > _LANES or longest > build.steps:
                continue
            for bands in range(1, min(build.warps // slices, all_bands) + 1):
                if build.shared(tokens, bands * slices, longest) > MOST_SHARED:
                    continue
                clusters = -(-all_bands // bands)
                turns = -(-clusters * groups * ranks // room.multiprocessors)
                weights = (share + (extra > 0)) * step * max(needed, bands * slices)
                moved = _BEGINS + weights + longest * _STEP * 2 * tokens
                if ranks > 1:
                    if not (at_a_time := room.clusters[ranks - 2]):
                        continue
                    turns = max(turns, -(-clusters * groups // at_a_time))
                    moved += bands * _ROWS * tokens * 4 + ranks * _RANK
                found.append((turns * moved, Plan(clusters, bands, ranks, slices)))
    return min(found, key=lambda each: each[0])[1]


@torch.library.custom_op("dsv41::products", mutates_args=("out",))
def products(x: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor) -> None:
    """`x` bf16 `[N, G, K]` times a block-diagonal `weight` `[G * M, K]` into `out` `[N, G * M]` (bf16 or float32),
    group g by its own rows: summed in fp32, in the same order in every call, and rounded once.

    `weight` holds e4m3 codes (OCP, uint8, no NaN), `weight_scale` `[ceil(G * M / 32), K / 32]` UE8M0 bytes of blocks
    of 32 x 32. N is at most 32, K a multiple of 128 and at most `most_columns(N)`, M a multiple of 16. Tokens and
    groups of `x` lie multiples of 8 elements apart, tokens of `out` multiples of 4, both from an address on of which
    that is true; the rest is contiguous.

    Weights are read before the launch ahead of this one in the stream has ended, so that one must not write them; nor
    must those before it, back to one that did not begin early itself (`portable/early.py`).

    Raises BackendError for more than 32 tokens, and for tensors that the kernel would misread.
    """
    build = build_for(len(x))
    if wrong := misread(x, weight, weight_scale, out):
        shown = {"x": x, "weight": weight, "weight_scale": weight_scale, "out": out}
        raise BackendError(
            f"products was given {', '.join(wrong)} in another form ({vendor.words(shown)}): expected what its "
            "documentation says; give it so, or use the portable products"
        )
    tokens, groups, columns = x.shape
    if tokens == 0:
        return
    rows = len(weight) // groups
    with torch.cuda.device(x.device):
        kernel = loaded(build, x.device.index)
        chosen = plan(build, tokens, rows, columns, groups, kernel.room)
        share, extra = divmod(columns // _STEP, chosen.ranks * chosen.slices)
        steps = chosen.slices * share + min(extra, chosen.slices)
        arguments = [
            pointer(weight), pointer(weight_scale), int32(rows), int32(columns), int32(share), int32(extra),
            pointer(x), int64(x.stride(0)), int64(x.stride(1)), int32(tokens),
            pointer(out), int64(out.stride(0)), int32(out.dtype == torch.float32),
        ]  # fmt: skip
        kernel.launch(
            x.device,
            (1, chosen.clusters, groups),
            *arguments,
            ranks=chosen.ranks,
            block=(32, chosen.slices, chosen.bands),
            shared_bytes=build.shared(tokens, chosen.slices * chosen.bands, steps),
            early=True,
        )


def misread(x: Tensor, weight: Tensor, weight_scale: Tensor | None, out: Tensor) -> list[str]:
    """The names of what `products` would misread."""
    return misread_with(most_columns(len(x)), x, weight, weight_scale, out)


def misread_with(most: int, x: Tensor, weight: Tensor, weight_scale: Tensor | None, out: Tensor) -> list[str]:
    """The names of what a kernel of that form would misread that takes at most so many columns."""
    groups, columns = x.shape[1:]
    wrong = []
    if x.dtype != torch.bfloat16 or x.stride(2) != 1 or any(at % 8 for at in (*x.stride()[:2], _elements(x))):
        wrong.append("x")
    if (
        weight.dtype != torch.uint8
        or not weight.is_contiguous()
        or weight.data_ptr() % 16
        or weight.shape[1] != columns
        or columns % _STEP
        or columns > most
        or len(weight) % (groups * _ROWS)
        or weight.numel() >= 1 << 32
    ):
        wrong.append("weight")
    scales = (-(-len(weight) // BLOCK[0]), columns // BLOCK[1])
    if (
        weight_scale is None
        or weight_scale.dtype != torch.uint8
        or not weight_scale.is_contiguous()
        or weight_scale.shape != scales
        or weight_scale.data_ptr() % 4
    ):
        wrong.append("weight_scale")
    if (
        out.dtype not in (torch.bfloat16, torch.float32)
        or out.shape != (len(x), len(weight))
        or out.stride(1) != 1
        or any(at % 4 for at in (out.stride(0), _elements(out)))
    ):
        wrong.append("out")
    given = [tensor.device for tensor in (x, weight, weight_scale, out) if tensor is not None]
    if len(set(given)) > 1:
        wrong.append("a device")
    return wrong


def _elements(x: Tensor) -> int:
    """Its address, counted in elements."""
    return x.data_ptr() // x.element_size()


class _Kernel:
    """A build, loaded on one device."""

    def __init__(self, build: Build, device: int) -> None:
        kernel = Kernel(build.kernel, build.cubin(), device, build.threads, build.shared_bytes)
        self.launch = kernel.launch
        clusters = tuple(kernel.most_clusters(ranks) for ranks in range(2, MOST_RANKS + 1))
        self.room = Room(kernel.multiprocessors, clusters)


@cache
def loaded(build: Build, device: int) -> _Kernel:
    return _Kernel(build, device)
