"""Scratch memory that outlives a step, so that a step in steady state, and a captured one, allocates none."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv41.errors import BackendError


def capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into a graph of this device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Workspace:
    """Flat buffers of one device, by name. One that is too small is replaced by a larger one.

    A backend has one, so its steps, captured ones too, may follow one another but not overlap: steps on several streams
    at once take a backend each.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, Tensor] = {}
        # A graph goes on writing to the memory that it was captured with, also when a buffer has been replaced since.
        self._captured: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """What steps have now; buffers that only graphs still use not counted."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def reserve(self, name: str, size: int) -> Tensor:
        """The buffer `name`, uint8 of at least `size` bytes. Raises BackendError where it would have to grow while a
        graph is captured."""
        if self._held(name) < size:
            if capturing(self.device):
                raise BackendError(
                    f"the workspace for {name} has {self._held(name)} bytes, and the step being captured needs {size}: "
                    "expected it allocated before; call reserve first, with the most tokens, requests and length that "
                    "the graph will see"
                )
            self._buffers.pop(name, None)  # before the new one is made, so that both need not fit
            self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=self.device)
        buffer = self._buffers.setdefault(name, torch.empty(0, dtype=torch.uint8, device=self.device))
        if capturing(self.device) and not any(buffer is kept for kept in self._captured):
            self._captured.append(buffer)
        return buffer

    def _held(self, name: str) -> int:
        return self._buffers[name].numel() if name in self._buffers else 0

    def take(self, name: str, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor on the buffer `name`, holding whatever the last one there left. Raises as `reserve` does."""
        size = math.prod(shape) * dtype.itemsize
        return self.reserve(name, size)[:size].view(dtype).view(shape)
