"""Every kernel launch passes here, so that what a step launches can also be listed, and compiled ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from dsv41.backends.portable.early import launches_early
from dsv41.backends.portable.target import arch_of


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel (a `triton.jit` function), its arguments by name, and compile options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


_watchers: list[Callable[[Launch], bool]] = []
_settled: set[int] = set()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *,
    num_warps: int = 4,
    num_stages: int = 2,
    max_registers: int | None = None,
    fp_fusion: bool = False,
    overlaps: bool = True,
    **arguments: Any,
) -> None:
    """Run `kernel` on `grid` with `arguments` by name, on the device of its tensors. An empty grid runs nothing.

    `max_registers` bounds those of a thread where the compiler can be told (CUDA). `fp_fusion` lets the compiler
    contract a product and a sum, which rounds once where torch rounds twice. `overlaps` may begin before the launch
    ahead has ended, where the kernel waits for it itself: see `early`.
    """
    settle_key(kernel)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fp_fusion}
    if max_registers and torch.version.hip is None:
        options["maxnreg"] = max_registers
    device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
    if "EARLY" in kernel.arg_names:
        arguments["EARLY"] = launches_early(arch_of(device))
        if arguments["EARLY"] and overlaps:
            options["launch_pdl"] = True
    if _watchers:
        found = Launch(kernel, arguments, options)
        if not all([watch(found) for watch in _watchers]):
            return
    if 0 in grid:
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](**arguments, **options)


def settle_key(kernel: Any) -> None:
    """Give a kernel the key in Triton's cache that it has in every process, those of the functions that it calls first.

    Triton 3.6 hashes into the key those globals of a called function that are known when the caller is hashed, and
    they are not before the called function has been: without this, the key depends on what a process compiled before,
    and what a warm-up compiled is compiled again.
    """
    if id(kernel) in _settled or not isinstance(kernel, JITFunction):  # the second where it is interpreted
        return
    _settled.add(id(kernel))  # not the kernel: to hash it is to ask for its key
    for name in kernel.fn.__code__.co_names:
        settle_key(kernel.fn.__globals__.get(name))
    kernel.cache_key  # noqa: B018  (computed on first access)


@contextmanager
def watching(watch: Callable[[Launch], bool]) -> Iterator[None]:
    """Show every launch to `watch` first; where it returns False, nothing is run."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)
