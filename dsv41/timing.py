"""How long calls take on a GPU: a CUDA graph of several, replayed with a cold cache. And what memory they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

Call = Callable[[], object]

REPLAYS = 15
_FILLER_BYTES = 256 << 20
"""More than any L2 or last-level cache of a GPU."""


def graph_seconds(calls: Sequence[Call], *, warm: bool = True, replays: int = REPLAYS) -> float:
    """Seconds of one call: the median over `replays` of a graph of all `calls`, divided by their number.

    Calls that read different memory keep each other from finding it in the cache; before each replay the cache is
    filled with what a kernel reads. (Filled with what one writes, the calls would also pay for its way to memory: 18
    us of a graph on an H200.) `warm` makes every call once before the capture, so that what a call does only the first
    time is not timed; without it, one that was never made before has that in the graph.
    """
    if warm:
        _warm(calls)
    graph = _captured(calls)
    filler = torch.zeros(_FILLER_BYTES // 4, dtype=torch.int32, device="cuda")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    seconds: list[float] = []
    for _ in range(replays + 2):
        filler.max()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return median(seconds[2:]) / len(calls)


def graph_launches(call: Call) -> list[tuple[str, int, float]]:
    """Kernels that a graph of one call runs, by name, with their number and their seconds together, longest first, as
    torch's profiler sees them in one replay."""
    _warm([call])
    graph = _captured([call])
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            count, seconds = found.get(event.name, (0, 0.0))
            found[event.name] = count + 1, seconds + event.time_range.elapsed_us() / 1e6
    return sorted(((name, *figures) for name, figures in found.items()), key=lambda row: -row[2])


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """GPU memory that one call holds at most beyond what was held before, its result included, in bytes as torch's
    allocator hands them out; None where `device` is no GPU. The call is made once before, so what the first one makes
    and keeps is not counted."""
    if device.type != "cuda":
        return None
    call()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def _warm(calls: Sequence[Call]) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph
