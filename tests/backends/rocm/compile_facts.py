"""Run as a script, in a process where kernels are compiled and not interpreted: prints what the tests look at."""

from __future__ import annotations

import json

import torch

from dsv41.backends.portable import aot
from dsv41.backends.portable.launch import Launch, watching
from dsv41.backends.rocm.group_quantize import quantize_groups
from dsv41.backends.rocm.ragged import pack_ragged


def launches(tokens: int, width: int, *, fnuz: bool) -> list[Launch]:
    found: list[Launch] = []

    def note(launch: Launch) -> bool:
        found.append(launch)
        return False

    with watching(note):
        pack_ragged(torch.zeros(tokens, width).long())
        quantize_groups(torch.zeros(tokens, 5120, dtype=torch.bfloat16), fnuz)
    return found


if __name__ == "__main__":
    spills, builds = {}, {}
    for target in ("gfx942", "gfx950"):
        shapes = ((16, 512), (1, 128), (7, 133))
        for same in zip(*(launches(*shape, fnuz=target == "gfx942") for shape in shapes), strict=True):
            name = f"{target} {same[0].kernel.fn.__name__}"
            builds[name] = len({aot.jit_key(launch, target) for launch in same})
            figures, _ = aot.compile_build(aot.specialize(same[0], target))
            spills[name] = figures.spill_bytes
    print(json.dumps({"spills": spills, "builds": builds}))
