"""Streams that are recorded, where there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Streams:
    """`torch.cuda` as far as forks need it, whose new streams have these `names`; `log` holds what was asked of it, and
    whatever else is put there. `joined` is told the name of each stream that the main one waits for."""

    joined: Callable[[str], None] = staticmethod(lambda name: None)

    def __init__(self, *names: str, capturing: bool = True) -> None:
        self.capturing, self.log = capturing, list[str]()
        self._names = iter(names)
        self.current = Streams.One(self, "main")

    class One:
        def __init__(self, of: Streams, name: str) -> None:
            self.of, self.name = of, name

        def wait_stream(self, other: Streams.One) -> None:
            self.of.log.append(f"{self.name} waits for {other.name}")
            if self.name == "main":
                self.of.joined(other.name)

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


class Lifetimes(TorchDispatchMode):
    """Notes in `freed` what a branch reads of the main stream's memory that is given back before the branch is joined:
    the main stream's next tensor may be put there while the branch still reads."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.freed: list[str] = []
        self._streams = streams
        self._of_main: set[StorageWeakRef] = set()
        self._read: dict[str, dict[StorageWeakRef, str]] = {}
        streams.joined = self._join

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream = self._streams.current.name
        for given in _storages((args, kwargs)):
            if stream != "main" and given in self._of_main:
                self._read.setdefault(stream, {})[given] = str(func)
        result = func(*args, **(kwargs or {}))
        if stream == "main":
            self._of_main |= _storages(result)
        return result

    def _join(self, name: str) -> None:
        self.freed += [func for storage, func in self._read.pop(name, {}).items() if storage.expired()]


def _storages(tree: Any) -> set[StorageWeakRef]:
    return {StorageWeakRef(leaf.untyped_storage()) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
