"""The builds of every kernel that selection can reach: what is compiled ahead of time, for each target.

A configuration says which layers run, in which records, on how many heads, in steps of what size; the builds are what
those steps launch (`dry_steps`). Every kernel is built for one target of each vendor, those that do multiplications
for all of them, and records and head counts are spread over the targets so that each is built for both vendors.

`python -m dsv41.backends.portable.variants` prints the names, which a test compares with its list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from dsv41.backends.portable import formats
from dsv41.backends.portable.aot import Build, jit_key, specialize
from dsv41.backends.portable.backend import PortableBackend
from dsv41.backends.portable.dry_steps import DryLayers, Step
from dsv41.backends.portable.formats import RowFormat
from dsv41.backends.portable.launch import Launch
from dsv41.backends.portable.target import pretending
from dsv41.hal.arch import vendor_of
from dsv41.hal.types import LayerSpec

NVIDIA, AMD = ("sm_80", "sm_90", "sm_100", "sm_120"), ("gfx942", "gfx950")
ALL = (*NVIDIA, *AMD)

MULTIPLYING = ("attention", "gemm", "scores")
"""Kernels that multiply matrices are called after their module; all others are "other"."""

DECODE = Step(requests=4, tokens=1, held=9000)
PREFILL = Step(requests=1, tokens=512, held=9000)


@dataclass(frozen=True)
class Configuration:
    """Layers of the release's geometry with `heads` of its 64 heads, and the steps that they run.

    `kinds` are the kernels that are built of what these launch, `targets` what they are built for.
    """

    heads: int
    kv_cache_dtype: str
    steps: tuple[Step, ...]
    targets: tuple[str, ...]
    index_cache_dtype: str = "auto"
    roles: tuple[str, ...] = ("window", "pooled", "plain", "reader")
    quantize: bool = False
    kinds: tuple[str, ...] = (*MULTIPLYING, "other")


LONGEST_DRAFT = 16
"""Tokens of a draft block that a warm-up reckons with; the release's have 5."""
_LEAST = ("sm_80", "gfx942")

CONFIGURATIONS = (
    # Every kernel, where the hardware has the least: no fp8 at all, and fp8 in the other dialect.
    Configuration(8, "auto", (DECODE, PREFILL), _LEAST, quantize=True),
    # What multiplies, elsewhere.
    Configuration(8, "auto", (DECODE, PREFILL), ("sm_90", "sm_100"), roles=("reader",), kinds=MULTIPLYING),
    Configuration(8, "auto", (DECODE, PREFILL), ("sm_120", "gfx950"), "fp8", roles=("reader",), kinds=MULTIPLYING),
    # The other records.
    Configuration(
        64, "fp8_ds_mla_v4", (PREFILL,), ("sm_90", "gfx950"), roles=("reader",), kinds=("attention",), quantize=True
    ),
    Configuration(128, "fp8_ds_mla", (PREFILL,), ("sm_100", "gfx942"), roles=("reader",), kinds=("attention",)),
    Configuration(64, "bfloat16", (PREFILL,), ("gfx950",), roles=("reader",), kinds=("attention",)),
    Configuration(32, "fp8_e4m3", (DECODE,), ("sm_120", "gfx942"), roles=("reader",), kinds=("attention",)),
)


@dataclass(frozen=True)
class Variant:
    """A build under a name: the kernel and its constants, so that it stays the same as long as they do."""

    name: str
    kind: str
    build: Build


def gate(target: str) -> list[Variant]:
    """The builds that are compiled for `target` and held to the budget. A target that is only compiled on request has
    those of the nearest one that always is."""
    listed = {"sm_103": "sm_100", "gfx1201": "gfx950", "gfx1250": "gfx950"}.get(target, target)
    found = []
    for configuration in CONFIGURATIONS:
        if listed in configuration.targets:
            launches = _launches(_layers(configuration), configuration.steps, target)
            found += [launch for launch in launches if _kind(launch) in configuration.kinds]
    # Builds that differ in nothing but what is known of alignments cost the same: one of them stands for all.
    first: dict[str, Variant] = {}
    for variant in _variants(found, target):
        first.setdefault(replace(variant.build, attrs={}).key, variant)
    return list(first.values())


def meet(
    target: str,
    specs: Sequence[LayerSpec],
    *,
    make: Callable[..., PortableBackend] = PortableBackend,
    kv_cache_dtype: str = "auto",
    index_cache_dtype: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    block: tuple[int, int] | None = (32, 32),
    max_tokens: int = 2048,
    max_requests: int = 64,
    max_len: int = 65536,
) -> list[Variant]:
    """The builds that layers can meet on `target` in steps of up to `max_tokens` tokens, on the backend that
    `make` makes, which must run without a device.

    What makes a difference: the tokens of a step by powers of two, requests that see no more rows than are selected,
    just more, and as many as can be, the types that norms and
    compressors may be stored in, and, on AMD, caches of more than 2**31 bytes.
    """
    found: list[Launch] = []
    larges = (False, True) if vendor_of(target) == "amd" else (False,)
    for large, kept, causal in product(larges, (torch.bfloat16, torch.float32), (True, False)):
        if chosen := [spec for spec in specs if spec.causal is causal]:
            layers = DryLayers(
                make(kv_cache_dtype=kv_cache_dtype, index_cache_dtype=index_cache_dtype),
                _distinct(chosen),
                dtype=dtype,
                block=block,
                norms=kept,
                compressors=kept,
                max_len=max_len,
                large=large,
            )
            longest = max_tokens if causal else min(max_tokens, LONGEST_DRAFT)
            scored = min(max((spec.topk + 1) * max(spec.ratio, 1) for spec in chosen), max_len)
            steps = _steps(longest, max_requests, (1, scored, max_len))
            if not causal:  # blocks of all requests at once: a step of many tokens
                steps += [Step(max_requests, longest, max(longest, length)) for length in (1, max_len)]
            found += _launches(layers, steps, target)
    return _variants(found, target)


def _steps(max_tokens: int, max_requests: int, lengths: Sequence[int]) -> list[Step]:
    def powers(limit: int) -> list[int]:
        return sorted({min(1 << power, limit) for power in range(limit.bit_length() + 1)})

    decode = [Step(count, 1, length) for count in powers(max_requests) for length in lengths]
    return decode + [Step(1, count, max(count, length)) for count in powers(max_tokens) for length in lengths]


def _distinct(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """One layer of each kind. The sources of those that are kept are kept too."""
    seen: dict[LayerSpec, LayerSpec] = {}
    for spec in specs:
        role = replace(
            spec,
            layer_id=0,
            name="",
            kv_source=None if spec.kv_source is None else int(spec.owns_compressed),
            index_source=None if spec.index_source is None else int(spec.owns_selection),
        )
        seen.setdefault(role, spec)
    sources = {source for spec in seen.values() for source in (spec.kv_source, spec.index_source)}
    return [spec for spec in specs if spec in seen.values() or spec.layer_id in sources]


def _launches(layers: DryLayers, steps: Sequence[Step], target: str) -> list[Launch]:
    """What the steps would launch on a GPU of `target`."""
    with pretending(target):
        return layers.launches(steps)


@cache
def _layers(configuration: Configuration) -> DryLayers:
    """Layers 0, 2 and 20 of the release, and one that reads the last one's candidates."""
    heads = configuration.heads
    groups = max(1, heads // 8)
    common = LayerSpec(
        layer_id=0, name="", hidden_size=5120, q_lora_rank=1280, num_heads=heads, padded_heads=heads, head_dim=512,
        rope_dim=64, window=128, ratio=0, topk=512, scale=512**-0.5, eps=1e-20, o_groups=groups, o_lora_rank=1024,
        index_heads=32, index_dim=128, quantize_activations=configuration.quantize,
    )  # fmt: skip
    blocks: dict[str, Any] = {"candidate_blocks": 2048, "candidate_block_size": 8}
    of_20: dict[str, Any] = {"ratio": 1, "kv_source": 20, **blocks}
    roles = {
        "window": common,
        "pooled": replace(common, layer_id=2, ratio=2, kv_source=2, index_source=2),
        "plain": replace(common, layer_id=20, index_source=20, publishes_candidates=True, **of_20),
        "reader": replace(common, layer_id=24, index_source=24, reads_candidates=True, **of_20),
    }
    backend = PortableBackend(
        kv_cache_dtype=configuration.kv_cache_dtype, index_cache_dtype=configuration.index_cache_dtype
    )
    return DryLayers(backend, [roles[role] for role in configuration.roles])


def _kind(launch: Launch) -> str:
    function = launch.kernel.fn
    return function.__module__.rpartition(".")[2] if _multiplies(function) else "other"


def _multiplies(function: Any) -> bool:
    """Whether a kernel, or a device function that it calls, has a matrix product."""
    names = function.__code__.co_names
    called = (function.__globals__.get(name) for name in names)
    return "dot" in names or any(_multiplies(other.fn) for other in called if isinstance(other, JITFunction))


def _variants(launches: Iterable[Launch], target: str) -> list[Variant]:
    different = {jit_key(launch, target): launch for launch in launches}
    builds: dict[str, tuple[Build, str]] = {}
    for launch in different.values():
        build = specialize(launch, target)
        builds.setdefault(build.key, (build, _kind(launch)))
    named: dict[str, list[tuple[Build, str]]] = defaultdict(list)
    for build, kind in builds.values():
        named[name_of(build)].append((build, kind))
    found = []
    for name, same in named.items():
        extras = _differences([build for build, _ in same])
        found += [Variant(name + extra, kind, build) for (build, kind), extra in zip(same, extras, strict=True)]
    return found


def name_of(build: Build) -> str:
    """The kernel and those of its constants that are set, such as "attend w=mxfp8/token heads=16 split dtype=bf16"."""
    parts = [build.kernel.partition(":")[2].lstrip("_")]
    arguments = list(build.signature)
    for path, value in build.constexprs.items():
        argument = arguments[path[0]]
        if len(path) > 1 or not argument.isupper() or value is None or value is False or isinstance(value, float):
            continue
        parts.append(argument.lower() if value is True else f"{argument.lower()}={_text(value)}")
    return " ".join(parts)


def _text(value: Any) -> str:
    if isinstance(value, RowFormat):
        return describe(value)
    return str(value).removeprefix("triton.language.")


def describe(F: RowFormat) -> str:
    """A row's format in a word: what is stored, and where its scales lie."""
    code = {formats.OCP: "e4m3", formats.FNUZ: "fnuz", formats.E2M1: "e2m1", formats.BF16: "bf16", formats.FP32: "fp32"}
    plain = "+bf16" if F.coded < F.dim else ""
    group = f"x{F.group}" if F.group else ""
    if not F.scale_bytes:
        place = ""
    elif F.pooled:
        place = "/pool"
    else:
        place = "/token" if F.scale_stride > F.scale_bytes else "/page"
    tiles = "/tiled" if F.value_tile_rows or F.scale_tile_rows else ""
    return f"{code[F.code]}{group}{plain}{place}{tiles}"


def _differences(builds: list[Build]) -> list[str]:
    """What tells builds of the same name apart: types, then what is known of arguments, then options."""
    if len(builds) == 1:
        return [""]
    facts = []
    for build in builds:
        arguments = list(build.signature)
        constants = {arguments[path[0]]: str(value) for path, value in build.constexprs.items()}
        types = {
            name: constants.get(name, kind) if kind == "constexpr" else kind for name, kind in build.signature.items()
        }
        aligned = {f"{arguments[path[0]]}%": "16" for path, attrs in build.attrs.items() if attrs}
        facts.append((types, aligned, {name: str(value) for name, value in build.options.items()}))
    found = [""] * len(builds)
    for group in range(3):
        if len(set(found)) < len(builds):
            known = [fact[group] for fact in facts]
            names = [
                name for name in {k: None for fact in known for k in fact} if len({f.get(name) for f in known}) > 1
            ]
            found = [
                text + "".join(f" {name}={fact[name]}" for name in names if name in fact)
                for text, fact in zip(found, known, strict=True)
            ]
    return found


if __name__ == "__main__":
    for target in ALL:
        for variant in gate(target):
            print(f"{target}: {variant.name}")
