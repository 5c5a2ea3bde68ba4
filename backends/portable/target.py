"""The arch that kernels are made for: that of the device, or one that a dry run pretends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from dsv41.hal.arch import ARCHS, arch_from_torch

_pretended: list[str] = []


def arch_of(device: torch.device) -> str:
    """Such as "sm_90", "gfx942" or "cpu"."""
    if _pretended:
        return _pretended[-1]
    return _arch_of(device) if device.type == "cuda" else "cpu"


def native_fp8(device: torch.device) -> str | None:
    """The e4m3 dialect that the device's own instructions convert, "ocp" or "fnuz"; None where there are none."""
    facts = ARCHS.get(arch_of(device))
    return facts.fp8_dialect if facts is not None else None


@contextmanager
def pretending(arch: str) -> Iterator[None]:
    """Have every device taken for one of `arch`, to list what would be launched there."""
    _pretended.append(arch)
    try:
        yield
    finally:
        _pretended.pop()


@cache
def _arch_of(device: torch.device) -> str:
    return arch_from_torch(torch.cuda.get_device_properties(device))
