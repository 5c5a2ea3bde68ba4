"""Run as a script, in a process where kernels are compiled and not interpreted: prints how many bytes each keeps in
memory for want of registers, by target and kernel."""

from __future__ import annotations

import json

import torch

from dsv41.backends.cuda.rows import clear_unseeing, gather_rows
from dsv41.backends.cuda.tables import pack_gathered, pack_slots
from dsv41.backends.portable import aot
from dsv41.backends.portable.caches import flat
from dsv41.backends.portable.launch import Launch, watching
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import Dialect, v4_584


def launches() -> list[Launch]:
    """One of each kernel, as a prefill of the release launches them."""
    found: list[Launch] = []

    def note(launch: Launch) -> bool:
        found.append(launch)
        return False

    tokens, long, counts = torch.zeros(16).long(), torch.zeros(16, 512).long(), torch.zeros(16).int()
    cache = PagedCache.allocate(CacheLayout(v4_584(Dialect.OCP), 64, ScalePlacement.PAGE), 2)
    spans, pages = torch.zeros(2, 2, 3).long(), torch.zeros(2, 16).int()
    with watching(note):
        pack_slots(long, 64)
        pack_gathered(tokens, tokens, spans, 0, long[:, :128].contiguous(), long, long, 128)
        gather_rows(*flat(cache), pages, spans, True, 300, torch.zeros(900, 512).bfloat16())
        clear_unseeing(torch.zeros(16, 64, 512).bfloat16(), counts, counts)
    return found


if __name__ == "__main__":
    spills = {}
    for target in ("sm_90", "sm_100"):
        for launch in launches():
            figures, _ = aot.compile_build(aot.specialize(launch, target))
            spills[f"{target} {launch.kernel.fn.__name__}"] = figures.spill_bytes
    print(json.dumps(spills))
