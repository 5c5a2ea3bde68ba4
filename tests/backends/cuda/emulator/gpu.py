"""Launches by emulation, in place of those on a GPU."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv41.backends.cuda import hopper, index, launch, nvrtc, products

from .ptx import ptx
from .translate import translate

_HERE = Path(__file__).parent
_COMPILER = ("g++", "-std=c++17", "-O1", "-w", "-fPIC", "-fno-strict-aliasing")


def missing() -> str | None:
    """Why kernels cannot be emulated here; None where they can."""
    return nvrtc.missing() or (None if shutil.which(_COMPILER[0]) else f"needs {_COMPILER[0]}")


class EmulatedKernel:
    """As `launch.Kernel`; `code` is PTX. `seed` is that of the order of threads, of the next launch of any kernel."""

    seed = 0
    multiprocessors = 3

    def __init__(self, name: str, code: bytes, device: int | None, threads: int, shared_bytes: int) -> None:
        self._name, self._block, self._shared_bytes = name, (threads, 1, 1), shared_bytes
        self._library = _library(code.decode())

    def most_clusters(self, ranks: int) -> int:
        return max(1, 12 // ranks)

    def launch(
        self,
        device: torch.device,
        grid: int | tuple[int, int, int],
        *arguments: Any,
        ranks: int = 1,
        block: tuple[int, int, int] | None = None,
        early: bool = False,
    ) -> None:
        """Raises RuntimeError with what went wrong: the PTX line, the thread, and an address or who waits where."""
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        parameters = _array(ctypes.c_uint64, [_bits(argument) for argument in arguments])
        ranges = [bound for extent in _live_memory() for bound in extent]
        said = self._library.run(
            self._name.encode(),
            _array(ctypes.c_uint32, [x * ranks, y, z]),
            _array(ctypes.c_uint32, block or self._block),
            ranks,
            self._shared_bytes,
            parameters,
            _array(ctypes.c_uint64, ranges),
            len(ranges) // 2,
            self.seed,
        )
        if said:
            raise RuntimeError(said.decode())


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> type[EmulatedKernel]:
    """Our launchers take tensors on the CPU, and their kernels are emulated."""
    if (why := missing()) is not None:
        pytest.skip(why)
    monkeypatch.setattr(nvrtc, "cubin", lambda name, arch, defines: _kept(name, arch, tuple(sorted(defines.items()))))
    for module in (hopper, index, launch, products):
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
    for loaded in (hopper._loaded, index._loaded, index._chooser, products._loaded):
        loaded.cache_clear()
        monkeypatch.setattr(loaded.__module__ + "." + loaded.__name__, cache(loaded.__wrapped__))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(EmulatedKernel, "seed", 0)
    return EmulatedKernel


@cache
def _kept(name: str, arch: str, defines: tuple[tuple[str, int], ...]) -> bytes:
    return ptx(name, arch, dict(defines)).encode()


@cache
def _library(text: str) -> ctypes.CDLL:
    """The translated kernel with the machine, compiled once for each text and kept with the temporary files."""
    source = translate(text)
    machine = [_HERE / "machine.hpp", _HERE / "machine.cpp"]
    key = hashlib.sha256("".join([source, *(path.read_text() for path in machine)]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"dsv41-emulated-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    kept = folder / f"{key}.so"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=folder) as name:
            part = Path(name)
            (part / "kernel.cpp").write_text(source)
            command = [*_COMPILER, "-shared", f"-I{_HERE}", "kernel.cpp", str(machine[1]), "-o", "kernel.so"]
            subprocess.run(command, cwd=part, check=True, capture_output=True, text=True)
            os.replace(part / "kernel.so", kept)
    library = ctypes.CDLL(str(kept))
    library.run.restype = ctypes.c_char_p
    return library


def _live_memory() -> list[tuple[int, int]]:
    """First and last address of all tensors that there are."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu" and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return [(first, first + size) for first, size in storages.items() if size]


def _bits(argument: Any) -> int:
    """A launch's argument as the 8 bytes that its parameter is read from."""
    if isinstance(argument, int):
        return argument
    raw = bytes(argument).ljust(8, b"\0")
    return int.from_bytes(raw, "little")


def _array(kind: Any, values: Mapping[int, int] | Any) -> Any:
    return (kind * len(values))(*values)
