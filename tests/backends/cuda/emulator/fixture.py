"""A machine whose GPU is emulated, for the product's own launchers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType

import pytest
import torch
from torch import Tensor

from dsv41.backends.cuda import launch, nvrtc

from . import build
from .kernel import EmulatedKernel


class EmulatedGPU:
    """What a test chooses of it."""

    def schedule(self, seed: int) -> None:
        """Another order of threads and of asynchronous copies."""
        EmulatedKernel.seed = seed

    def resize(self, multiprocessors: int) -> None:
        """As many multiprocessors, by which launchers choose grids and clusters."""
        EmulatedKernel.multiprocessors = multiprocessors
        _forget()

    def keep(self, *constants: Tensor) -> None:
        """No launch writes these, so that an early one may read them at once."""
        EmulatedKernel.constants = constants


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGPU]:
    """Launches of our kernels on tensors of the CPU are emulated. Kernels loaded before or by it are forgotten."""
    if why := build.missing():
        pytest.skip(why)
    monkeypatch.setattr(nvrtc, "cubin", _ptx)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(EmulatedKernel, "seed", 0)
    monkeypatch.setattr(EmulatedKernel, "multiprocessors", 4)
    monkeypatch.setattr(EmulatedKernel, "constants", ())
    for module in _launchers():
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
    _forget()
    yield EmulatedGPU()
    _forget()


def _ptx(name: str, arch: str, defines: Mapping[str, int]) -> bytes:
    return build.compile_to_ptx(name, nvrtc.source(name), arch, defines)


def _launchers() -> list[ModuleType]:
    """The modules that load kernels of ours, among those that are imported."""
    kernels = (launch.Kernel, EmulatedKernel)
    names = [name for name in sys.modules if name.startswith("dsv41.backends.cuda.") and name != launch.__name__]
    return [sys.modules[name] for name in names if getattr(sys.modules[name], "Kernel", None) in kernels]


def _forget() -> None:
    """Kernels that a launcher keeps, and what it knows of them."""
    for module in _launchers():
        for thing in vars(module).values():
            if hasattr(thing, "cache_clear"):
                thing.cache_clear()
