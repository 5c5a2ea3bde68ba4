"""Streams that are recorded, where there are none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Streams:
    """`torch.cuda` as far as forks need it, whose new streams have these `names`; `log` holds what was asked of it, and
    whatever else is put there."""

    def __init__(self, *names: str, capturing: bool = True) -> None:
        self.capturing, self.log = capturing, list[str]()
        self._names = iter(names)
        self.current = Streams.One(self, "main")

    class One:
        def __init__(self, of: Streams, name: str) -> None:
            self.of, self.name = of, name

        def wait_stream(self, other: Streams.One) -> None:
            self.of.log.append(f"{self.name} waits for {other.name}")

    def Stream(self, device: torch.device) -> One:
        return Streams.One(self, next(self._names))

    def current_stream(self, device: torch.device) -> One:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def stream(self, stream: One) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before
