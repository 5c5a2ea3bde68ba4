"""A kernel that runs on the CPU, in place of `dsv41.backends.cuda.launch.Kernel`."""

from __future__ import annotations

import ctypes
import gc
import re
import struct
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import build, ptx

_MOST_SHARED = 227 * 1024


class EmulationError(Exception):
    """A kernel did what it may not do, or threads wait for each other."""


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("ranks", ctypes.c_uint32),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("parameters", ctypes.c_void_p),
        ("ranges", ctypes.c_uint64),
        ("bounds", ctypes.c_void_p),
        ("early", ctypes.c_uint64),
        ("constants", ctypes.c_uint64),
        ("constant_bounds", ctypes.c_void_p),
    )


class EmulatedKernel:
    """The function `name` of PTX, with `threads` and `shared_bytes` of dynamic memory in a CTA.

    The CTAs of a cluster run at a time, their threads in an order that `seed` gives, and clusters one after another.
    Shared memory begins as NaN. Asynchronous copies and matrix products happen at any time until they are waited for.
    A launch raises EmulationError for an access outside of the tensors whose storages the arguments point into, or
    outside of shared memory, for one that is not aligned, for wrong use of barriers, and for a deadlock; an early
    launch also for an access to others than `constants` before it has waited for the launch ahead.
    """

    seed: ClassVar[int] = 0
    constants: ClassVar[tuple[Tensor, ...]] = ()
    multiprocessors = 4

    def __init__(self, name: str, cubin: bytes, device: int | None, threads: int, shared_bytes: int) -> None:
        if threads % 32 or not 0 < threads <= 1024 or shared_bytes > _MOST_SHARED:
            raise ValueError(
                f"{name} was given {threads} threads and {shared_bytes} bytes: expected whole warps, at most 1024 "
                f"threads and {_MOST_SHARED} bytes"
            )
        self._text = cubin.decode()
        kernel = ptx.read(self._text, name)
        starts, end = _places(kernel)
        self._library = build.compile_kernel(kernel, starts)
        self._library.emulate.restype = ctypes.c_char_p
        self._parameters = len(kernel.parameters)
        self._ctas_per_sm = kernel.ctas_per_sm
        self._threads, self._shared_before, self._shared_bytes = threads, end, shared_bytes
        self.multiprocessors = type(self).multiprocessors

    def most_clusters(self, ranks: int) -> int:
        """As if any CTAs could be a cluster, as many on a multiprocessor as the kernel says."""
        return self.multiprocessors * self._ctas_per_sm // ranks

    def launch(
        self,
        device: torch.device | None,
        grid: int | tuple[int, int, int],
        *arguments: Any,
        ranks: int = 1,
        block: tuple[int, int, int] | None = None,
        shared_bytes: int | None = None,
        early: bool = False,
    ) -> None:
        """`grid` CTAs, or clusters where `ranks` CTAs make one. A plain int is a pointer, 0 for none."""
        if len(arguments) != self._parameters:
            raise EmulationError(f"{len(arguments)} arguments for a kernel of {self._parameters}")
        shape = (grid, 1, 1) if isinstance(grid, int) else grid
        if min(shape) < 1:
            raise EmulationError(f"a grid of {shape}")
        parameters = (ctypes.c_uint64 * len(arguments))(*map(_bits, arguments))
        ranges = _ranges([argument for argument in arguments if isinstance(argument, int) and argument])
        bounds, constants = _flat(ranges), _ranges([tensor.data_ptr() for tensor in type(self).constants])
        constant_bounds = _flat(constants)
        sizes = (ctypes.c_uint32 * 3)(*(block or (self._threads, 1, 1)))
        memory = self._shared_before + (shared_bytes or self._shared_bytes)
        launch = _Launch(
            (ctypes.c_uint32 * 3)(*shape), ranks, sizes, memory, type(self).seed,
            ctypes.addressof(parameters), len(ranges), ctypes.addressof(bounds), early, len(constants),
            ctypes.addressof(constant_bounds),
        )  # fmt: skip
        said = self._library.emulate(ctypes.byref(launch))
        if said is not None:
            raise EmulationError(self._with_lines(said.decode()))

    def _with_lines(self, said: str) -> str:
        lines = self._text.splitlines()
        return re.sub(r"PTX line (\d+)", lambda found: f"{found[0]} `{lines[int(found[1]) - 1].strip()}`", said)


def _places(kernel: ptx.Kernel) -> tuple[dict[str, int], int]:
    """Where arrays in shared memory begin, the one whose size a launch gives behind all others, and where it begins."""
    starts, end = {}, 0
    for name, (align, size) in sorted(kernel.shared.items(), key=lambda item: item[1][1] == 0):
        starts[name] = end = -(-end // align) * align
        end += size
    return starts, end


def _bits(argument: Any) -> int:
    if isinstance(argument, int):
        return argument
    if isinstance(argument, ctypes.c_float):
        return int(struct.unpack("<I", struct.pack("<f", argument.value))[0])
    return int(argument.value) % (1 << 64)


def _flat(ranges: list[tuple[int, int]]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * (2 * len(ranges)))(*(bound for pair in ranges for bound in pair))


def _ranges(pointers: list[int]) -> list[tuple[int, int]]:
    """Begin and end of the storages of live tensors that pointers point into, ascending. Raises EmulationError for a
    pointer that points into none."""
    storages = set()
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.layout == torch.strided and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    found = set()
    for pointer in pointers:
        around = [bounds for bounds in storages if bounds[0] <= pointer < bounds[1]]
        if not around:
            raise EmulationError(f"the argument 0x{pointer:x} points into no tensor of the CPU that is alive")
        found.update(around)
    return sorted(found)
