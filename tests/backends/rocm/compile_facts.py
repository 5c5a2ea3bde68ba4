"""Run as a script, in a process where kernels are compiled and not interpreted: prints what the tests look at."""

from __future__ import annotations

import json

import torch

from dsv41.backends.portable import aot
from dsv41.backends.portable.formats import RowFormat
from dsv41.backends.portable.launch import Launch, watching
from dsv41.backends.rocm.index_scores import query_codes
from dsv41.backends.rocm.layouts import fp8_keys
from dsv41.backends.rocm.ragged import pack_ragged
from dsv41.hal.records import Dialect


def launches(tokens: int, width: int) -> list[Launch]:
    found: list[Launch] = []

    def note(launch: Launch) -> bool:
        found.append(launch)
        return False

    with watching(note):
        pack_ragged(torch.zeros(tokens, width).long())
        for dialect in Dialect:
            queries = torch.zeros(tokens, 32, 128, dtype=torch.bfloat16)
            query_codes(queries, queries[..., 0].contiguous(), RowFormat.of(fp8_keys(dialect)).numbers())
    return found


if __name__ == "__main__":
    spills, builds = {}, {}
    for target in ("gfx942", "gfx950"):
        for same in zip(launches(16, 512), launches(1, 128), launches(7, 133), strict=True):
            name = f"{target} {same[0].kernel.fn.__name__} {len(builds)}"
            builds[name] = len({aot.jit_key(launch, target) for launch in same})
            figures, _ = aot.compile_build(aot.specialize(same[0], target))
            spills[name] = figures.spill_bytes
    print(json.dumps({"spills": spills, "builds": builds}))
