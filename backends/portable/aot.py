"""Kernels compiled ahead of time for any target, without a GPU, and what the binaries say about themselves.

`python -m dsv41.backends.portable.aot` is a worker: it answers one JSON request a line. `dsv41 compile` and
`dsv41 warmup` run several, so that a compiler that crashes takes a worker with it and nothing else.

    {"list": ["sm_90", ...]}        -> {"variants": [...], "skipped": {what: reason}, "triton": "3.9.0", "cache": ...}
    {"meet": {...}, "backend": name} -> the same, for `variants.meet`
    {"compile": payload}            -> {"figures": {...}, "cached": bool}

Every answer may be {"error": "..."} instead.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from dsv41.backends.portable.launch import Launch, settle_key
from dsv41.hal.arch import ARCHS, vendor_of
from dsv41.hal.types import LayerSpec

if TYPE_CHECKING:
    from dsv41.backends.portable.variants import Variant

_MATRIX = {
    "ptx": re.compile(r"^\s*(?:@%p\d+ )?(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b", re.MULTILINE),
    "amdgcn": re.compile(r"^\s*v_(?:mfma|smfmac|wmma|swmmac)_", re.MULTILINE),
}


@dataclass(frozen=True)
class Build:
    """One kernel as Triton compiles it for a target: what the JIT would make of one launch there.

    `kernel` is "module:function"; `signature`, `constexprs`, `attrs` and `options` are Triton's.
    """

    kernel: str
    target: str
    signature: dict[str, str]
    constexprs: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """The same for builds that are the same binary."""
        return repr((self.kernel, self.target, self.signature, self.constexprs, self.attrs, self.options))

    def source(self) -> ASTSource:
        """What Triton compiles."""
        module, _, name = self.kernel.partition(":")
        kernel = getattr(import_module(module), name)
        settle_key(kernel)
        return ASTSource(kernel, self.signature, self.constexprs, self.attrs)

    def pack(self) -> str:
        return base64.b64encode(pickle.dumps(self)).decode()

    @staticmethod
    def unpack(payload: str) -> Build:
        build: Build = pickle.loads(base64.b64decode(payload))
        return build


@dataclass(frozen=True)
class Figures:
    """What a binary costs. `registers` are those of a thread (vector registers on AMD, accumulators included);
    `spill_bytes` a thread keeps in memory for want of them; `shared_bytes` of a block; `matrix` counts the matrix
    instructions in the assembly, `code_bytes` the machine code."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix: int
    code_bytes: int


def gpu_target(target: str) -> GPUTarget:
    """Triton's name for an arch."""
    if vendor_of(target) == "nvidia":
        return GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    return GPUTarget("hip", target, ARCHS[target].warp_size)


def jit_key(launch: Launch, target: str) -> str:
    """The same for launches that run the same build on `target`, as Triton's JIT tells them apart."""
    _, bind = _binder(launch.kernel, target)
    _, specialization, _ = bind(**_keywords(launch))
    return repr((_name(launch.kernel), specialization, launch.options))


def specialize(launch: Launch, target: str) -> Build:
    """The build that a launch needs on `target`. Triton's own binder decides, so it is what the JIT would compile."""
    kernel, (backend, bind) = launch.kernel, _binder(launch.kernel, target)
    keywords = _keywords(launch)
    bound, specialization, rest = bind(**keywords)
    options, signature, constexprs, attrs = kernel._pack_args(backend, keywords, bound, specialization, rest)
    return Build(_name(kernel), target, signature, constexprs, attrs, options.__dict__)


def _name(kernel: Any) -> str:
    return f"{kernel.fn.__module__}:{kernel.fn.__name__}"


def _keywords(launch: Launch) -> dict[str, Any]:
    """What the JIT makes of a launch before it looks at the arguments."""
    keywords = {**launch.arguments, **launch.options, "debug": launch.kernel.debug or knobs.runtime.debug}
    for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):  # the second is newer than Triton 3.6
        if hasattr(knobs.compilation, name):
            keywords[name] = getattr(knobs.compilation, name)
    return keywords


@cache
def _binder(kernel: Any, target: str) -> tuple[Any, Any]:
    backend = make_backend(gpu_target(target))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def compile_build(build: Build) -> tuple[Figures, bool]:
    """Compile, or find in Triton's cache, and read the figures; whether it was there. Raises what Triton raises."""
    source = build.source()
    found: list[bool] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        found.append(cache_hit)

    with knobs.compilation.scope():
        knobs.compilation.listener = listen
        compiled = triton.compile(source, target=gpu_target(build.target), options=build.options)
    return read_figures(compiled), all(found)


def read_figures(compiled: Any) -> Figures:
    """From a compiled kernel that was never loaded on a device."""
    if "cubin" in compiled.asm:
        usage = cuda_usage(compiled.asm["cubin"])
        text, binary = "ptx", compiled.asm["cubin"]
    else:
        usage = _hip_usage(compiled.asm["amdgcn"])
        text, binary = "amdgcn", compiled.asm["hsaco"]
    return Figures(
        registers=usage[0],
        spill_bytes=usage[1],
        shared_bytes=compiled.metadata.shared,
        matrix=len(_MATRIX[text].findall(compiled.asm[text])),
        code_bytes=code_bytes(binary),
    )


def cuda_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def _hip_usage(assembly: str) -> tuple[int, int]:
    def number(name: str) -> int:
        match = re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
        return int(match[1]) if match else 0

    # Registers that spill into accumulators of the same thread never reach memory, but cost moves: they count too.
    return number("vgpr_count"), max(number("private_segment_fixed_size"), 4 * number("vgpr_spill_count"))


def code_bytes(elf: bytes) -> int:
    """Of the machine code in a cubin or a code object."""
    return sum(size for section, size in _sections(elf) if section.startswith(".text"))


def _sections(elf: bytes) -> Iterator[tuple[str, int]]:
    """Names and sizes of the sections of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + index * size) for index in range(count)]
    strings = headers[names][4]
    for name, *_, length in headers:
        start = strings + name
        yield elf[start : elf.index(b"\0", start)].decode(), length


@triton.jit
def _nothing(x):
    tl.store(x, 0)


def why_unknown(target: str) -> str | None:
    """Why this Triton compiles nothing for `target`; None where it does."""
    try:
        triton.compile(ASTSource(_nothing, {"x": "*i32"}), target=gpu_target(target))
    except Exception as error:
        return f"Triton {triton.__version__} compiles nothing for {target}: {first_line(error)}"
    return None


def first_line(error: BaseException) -> str:
    """What an exception says, on one line: the innermost cause of a compiler's, without the source that it quotes."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = getattr(error, "error_message", None) or str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """One request, as the module says."""
    if "compile" in request:
        figures, cached = compile_build(Build.unpack(request["compile"]))
        return {"figures": asdict(figures), "cached": cached}
    from dsv41.backends.portable import variants

    if "list" in request:
        skipped = {target: why for target in request["list"] if (why := why_unknown(target))}
        found = [v for target in request["list"] if target not in skipped for v in variants.gate(target)]
    else:
        skipped, found = {}, variants.meet(**typed(request["meet"]))
    return {
        "variants": [listed(variant) for variant in found],
        "skipped": skipped,
        "triton": triton.__version__,
        "cache": knobs.cache.dir,
    }


def listed(variant: Variant) -> dict[str, str]:
    """A build as an answer lists it."""
    return {
        "name": variant.name, "target": variant.build.target, "kind": variant.kind, "payload": variant.build.pack()
    }  # fmt: skip


def typed(meeting: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `variants.meet` out of JSON."""
    block = meeting["block"]
    return meeting | {
        "specs": [LayerSpec(**spec) for spec in meeting["specs"]],
        "dtype": getattr(torch, meeting["dtype"]),
        "block": None if block is None else tuple(block),
    }


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests from stdin until it ends. Whatever compilers print goes to stderr."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            try:
                reply = answer(json.loads(line))
            except Exception as error:
                reply = {"error": first_line(error)}
            print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    serve(answer)
