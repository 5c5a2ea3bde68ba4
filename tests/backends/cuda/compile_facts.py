"""Run as a script, in a process where kernels are compiled and not interpreted: prints what the tests look at."""

from __future__ import annotations

import json

import torch

from dsv41.backends.cuda.rows import gather_rows
from dsv41.backends.cuda.tables import pack_gathered, pack_selection, pack_slots
from dsv41.backends.portable import aot
from dsv41.backends.portable.caches import flat
from dsv41.backends.portable.launch import Launch, watching
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import Dialect, v4_584


def launches(first: int = 0, requests: int = 2) -> list[Launch]:
    """One of each kernel, as a prefill of the release launches them, whose run begins with token `first`."""
    found: list[Launch] = []

    def note(launch: Launch) -> bool:
        found.append(launch)
        return False

    tokens, long = torch.zeros(16).long(), torch.zeros(16, 512).long()
    cache = PagedCache.allocate(CacheLayout(v4_584(Dialect.OCP), 64, ScalePlacement.PAGE), 2)
    with watching(note):
        pack_selection(long, tokens, tokens, torch.zeros(requests, 15 + first).int(), 64, 64)  # of a whole step
    tokens, long = tokens[first:], long[first:]
    spans, pages = torch.zeros(requests, 2, 3).long(), torch.zeros(first + requests, 15 + first).int()[first:]
    with watching(note):
        pack_slots(long, 64)
        pack_gathered(tokens, tokens, spans, first, torch.zeros(16, 128).long()[first:], long, long, 128)
        gather_rows(*flat(cache), pages, spans, True, 300, torch.zeros(900, 512).bfloat16())
    return found


if __name__ == "__main__":
    spills, builds = {}, {}
    for target in ("sm_90", "sm_100"):
        for same in zip(launches(), launches(first=1, requests=1), launches(first=7, requests=16), strict=True):
            name = f"{target} {same[0].kernel.fn.__name__}"
            builds[name] = len({aot.jit_key(launch, target) for launch in same})
            figures, _ = aot.compile_build(aot.specialize(same[0], target))
            spills[name] = figures.spill_bytes
    print(json.dumps({"spills": spills, "builds": builds}))
