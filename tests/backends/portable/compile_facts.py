"""Run as a script, in a process where kernels are compiled and not interpreted: prints what the tests look at."""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from dsv41.backends.cuda.aot import DryFlashMLA
from dsv41.backends.portable import aot, variants
from dsv41.backends.portable.backend import PortableBackend
from dsv41.backends.portable.caches import flat
from dsv41.backends.portable.dry_steps import DryLayers, Step
from dsv41.backends.portable.launch import Launch, settle_key, watching
from dsv41.backends.portable.scores import index_scores
from dsv41.backends.portable.target import pretending
from dsv41.config import DeepseekV41Config
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import INDEX_MXFP4_68
from dsv41.hal.types import LayerSpec
from dsv41.run import RunOptions, run
from dsv41.synthetic import make_checkpoint, small_config
from dsv41.topology import layer_specs
from dsv41.warmup_cli import WarmupOptions, warmup

TARGET = "sm_90"
KEPT = (torch.bfloat16, torch.float32)


def specs(**changes: Any) -> list[LayerSpec]:
    """Every role of the release's schedule, and a draft layer, with the small matrices of one rank in eight."""
    config = replace(DeepseekV41Config(), hidden_size=256, q_lora_rank=64, o_lora_rank=64, **changes)
    return layer_specs(config, tp_size=8, layers=[0, 2, 3, 20, 21, 24, 40])


def keys(layers: DryLayers, steps: list[Step], target: str = TARGET) -> set[str]:
    return {aot.jit_key(launch, target) for launch in variants._launches(layers, steps, target)}


def names() -> list[str]:
    """What the gate compiles."""
    return [f"{target}: {variant.name}" for target in variants.ALL for variant in variants.gate(target)]


def sweep() -> dict[str, list[int]]:
    """How many builds the first and last, and how many all widths of the page table need; likewise all lengths around
    the top-k and the candidate limit, and all token counts."""
    backend = PortableBackend()
    layers = DryLayers(backend, [spec for spec in specs() if spec.layer_id in (2, 20, 24)], max_len=1 << 20)
    found = {}
    for what, few, many in (
        ("table widths", (7, 33), range(1, 126)),
        # Rows of one span, of a few, of so many that the best of them are cut into spans again.
        ("pages", (7, 35, 300, 16000), (7, 35, 256, 300, 1000, 4097, 8000, 16000)),
    ):
        found[what] = [len(keys(layers, [Step(2, 1, 64 * n) for n in widths])) for widths in (few, many)]
    few, many = (1, 16, 32, 64, 256, 512), (*range(1, 70), 255, 256, 257, 300, 511, 512)
    found["tokens"] = [len(keys(layers, [Step(1, n, 4096) for n in counts])) for counts in (few, many)]
    return found


class CountingJit:
    """Triton's JIT on a pretended GPU, with a double for the compiler that only notes what it is asked for."""

    def __init__(self) -> None:
        self.compiled: set[str] = set()
        self.asked: list[str] = []

    def compile(self, source: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        options = options if isinstance(options, dict) else dict(options or {})
        parsed = triton.compiler.make_backend(target).parse_options(options)
        key = f"{source.hash()} {parsed.hash()} {target}"
        if key not in self.compiled:
            self.compiled.add(key)
            self.asked.append(source.name)
        return mock.Mock()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return aot.gpu_target(TARGET)

    def launch(self, launch: Launch) -> None:
        launch.kernel.run(grid=(1,), warmup=True, **launch.arguments, **launch.options)


def warmed() -> dict[str, list[str]]:
    """Which kernels 40 random steps compile after a warm-up, and which without one."""
    jit, cold = CountingJit(), CountingJit()
    sizes = {"max_tokens": 256, "max_requests": 16, "max_len": 20000}
    for variant in variants.meet(TARGET, specs(), **sizes):
        jit.compile(variant.build.source(), aot.gpu_target(TARGET), variant.build.options)
    jit.asked.clear()
    rng = random.Random(0)
    for causal in (True, False):
        backend = PortableBackend()
        kept = {"norms": rng.choice(KEPT), "compressors": rng.choice(KEPT)}
        layers = DryLayers(backend, [spec for spec in specs() if spec.causal is causal], max_len=20000, **kept)
        steps = []
        for _ in range(20):
            requests = rng.choice((1, 1, 2, 3, 5, 11, 16))
            longest = 256 // requests if causal else 7
            tokens = rng.randint(1, longest) if rng.random() < 0.5 else 1
            steps.append(Step(requests, tokens, rng.randint(tokens, 20000)))
        for launch in variants._launches(layers, steps, TARGET):
            for double in (jit, cold):
                with (
                    mock.patch("triton.compiler.compile", double.compile),
                    mock.patch.object(triton.runtime.driver, "_active", double, create=True),
                ):
                    launch.kernel.device_caches.clear()
                    double.launch(launch)
    return {"warm": jit.asked, "cold": cold.asked}


def device() -> dict[str, list[str]]:
    """On a GPU: what the warm-up compiles, what a run after it still compiles, and what failed in either."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder) / "small", config=small_config())
        sizes = {"max_tokens": 64, "max_requests": 2, "max_len": 64}
        report = warmup(WarmupOptions(path, backend="portable", kv_cache_dtype="auto", **sizes))
        compiled: list[str] = []

        def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
            if not cache_hit:
                compiled.append(src.name)

        triton.knobs.compilation.listener = listen
        options = {"prompt": 40, "decode": 4, "requests": 2, "chunk": 32}
        found = run(RunOptions(path, backend="portable", device="cuda", **options))
    first = [row.name for row in report.rows if not row.cached]
    return {"warmup": first, "after": compiled, "failures": report.failures + found.failures}


def copies() -> list[int]:
    """Bytes of each copy into shared memory where index keys lie in rows of 68 bytes, whose slots are consecutive."""
    layout = CacheLayout(INDEX_MXFP4_68, 16, ScalePlacement.TOKEN)
    launches: list[Launch] = []
    bf16, numbers = torch.zeros(2, 5, 128, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)

    def note(launch: Launch) -> bool:
        launches.append(launch)
        return False

    with watching(note), pretending(TARGET):
        index_scores(
            bf16, bf16[:, :, 0], torch.zeros(3, 3, dtype=torch.int32), numbers, numbers, None, 0,
            *flat(PagedCache.allocate(layout, 4)), torch.zeros(2, 40, dtype=torch.bfloat16),
        )  # fmt: skip
    build = aot.specialize(launches[0], TARGET)
    ptx = triton.compile(build.source(), target=aot.gpu_target(TARGET), options=build.options).asm["ptx"]
    return [int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.[^;]*\], (0x[0-9a-f]+)", ptx)]


def taking_part(target: str) -> list[Launch]:
    """What steps of the release's layers launch that can begin early: by the portable kernels alone, and around
    FlashMLA's."""
    configuration, found = variants.CONFIGURATIONS[0], []
    specs = [layer.spec for layer in variants._layers(configuration).layers]
    for backend in (PortableBackend(), DryFlashMLA(target)):
        found += variants._launches(DryLayers(backend, specs), configuration.steps, target)
    return [launch for launch in found if "EARLY" in launch.kernel.arg_names]


def early() -> dict[str, dict[str, Any]]:
    """By target and kernel, whether it waits for the launch ahead, and whether it begins before that has ended."""
    return {
        target: {
            launch.kernel.fn.__name__: {
                "waits": launch.arguments["EARLY"], "overlaps": launch.options.get("launch_pdl", False)
            }
            for launch in taking_part(target)
        }
        for target in ("sm_80", "sm_90", "sm_100", "gfx942")
    }  # fmt: skip


def waits() -> dict[str, dict[str, list[str]]]:
    """By target and build, the first three operations that wait or touch memory: of one build of each kernel that can
    begin early and of what is compiled ahead of time, and of one kernel where none does."""
    found: dict[str, dict[str, list[str]]] = {}
    for target in ("sm_80", "sm_90"):
        one = {launch.kernel.fn.__name__: aot.specialize(launch, target) for launch in taking_part(target)}
        builds = [*one.values(), *(variant.build for variant in variants.gate(target))]
        found[target] = {}
        for build in builds if target == "sm_90" else builds[:1]:
            compiled = triton.compile(build.source(), target=aot.gpu_target(target), options=build.options)
            operations = re.findall(r"griddepcontrol\.\w+|\b(?:ld|st|cp|atom|red)\.[\w.:]*global", compiled.asm["ptx"])
            found[target][variants.name_of(build)] = operations[:3]
    return found


def keys_of_helpers() -> dict[str, list[str]]:
    """Globals that the key of a kernel knows of, and those that the keys of the functions that it calls do."""
    from dsv41.backends.portable.inputs import _norm_inputs
    from dsv41.backends.portable.quantize import store_mxfp8

    settle_key(_norm_inputs)
    found = ({name for name, _ in function.used_global_vals} for function in (_norm_inputs, store_mxfp8))
    return dict(zip(("kernel", "called"), map(sorted, found), strict=True))


if __name__ == "__main__":
    made = {
        "keys": keys_of_helpers,
        "names": names,
        "sweep": sweep,
        "warmed": warmed,
        "device": device,
        "copies": copies,
        "early": early,
        "waits": waits,
    }
    print(json.dumps(made[sys.argv[1]]()))
