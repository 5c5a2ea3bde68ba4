"""A branch of a step beside the rest of it, while a graph is captured; otherwise everything is in one stream.

Outside a captured graph streams wait for one another by events at run time, in which HIP was reported to hang.
Captured, a wait is an edge between two nodes of the graph, and nothing waits for an event when it is replayed.

Memory. The caching allocator gives a freed block to the next tensor of the stream that it came from. That is safe here
without `record_stream`: a branch begins by waiting for all that the main stream was given so far, so what it allocates
anew was last used before, on either stream; and `join` makes the main stream wait for all of the branch, so what the
main stream allocates afterwards is not read by it any more. Between the two, the main stream must free nothing that the
branch reads: callers hold the inputs of a branch until they have joined it. Several forks may be open at a time where
none reads what another allocates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Fork:
    """The side stream of a device. `streams` is `torch.cuda`, which is HIP's where torch is built for it; None where
    the device has no streams."""

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        self._device, self._streams = device, streams
        self._side = None if streams is None else streams.Stream(device)
        self._branched = False

    @staticmethod
    def of(device: torch.device) -> Fork:
        return Fork(device, torch.cuda if device.type == "cuda" else None)

    @property
    def is_open(self) -> bool:
        """Whether what is launched now is captured, so that a branch may run beside it."""
        return self._streams is not None and bool(self._streams.is_current_stream_capturing())

    @contextmanager
    def branch(self) -> Iterator[None]:
        """What is launched inside runs after all that was launched before, and beside what follows until `join`. A
        second branch before it follows the first."""
        assert self._side is not None
        self._branched = True
        self._side.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._side):
            yield

    def join(self) -> None:
        """What follows runs after the branches that were not joined yet, if there are any."""
        if self._branched:
            self._branched = False
            self._streams.current_stream(self._device).wait_stream(self._side)
