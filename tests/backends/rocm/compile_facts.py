"""Run as a script, in a process where kernels are compiled and not interpreted: prints what the tests look at."""

from __future__ import annotations

import json

import torch

from dsv41.backends.portable import aot
from dsv41.backends.portable.caches import flat
from dsv41.backends.portable.formats import RowFormat
from dsv41.backends.portable.index_inputs import index_queries
from dsv41.backends.portable.insert import insert_rows
from dsv41.backends.portable.launch import Launch, watching
from dsv41.backends.portable.scores import index_scores
from dsv41.backends.rocm.group_quantize import quantize_groups
from dsv41.backends.rocm.index_scores import query_codes
from dsv41.backends.rocm.layouts import fp8_keys, mxfp4_keys
from dsv41.backends.rocm.ragged import pack_ragged
from dsv41.hal.layout import CacheLayout, PagedCache
from dsv41.hal.records import Dialect


def launches(tokens: int, width: int, *, fnuz: bool) -> list[Launch]:
    found: list[Launch] = []

    def note(launch: Launch) -> bool:
        found.append(launch)
        return False

    with watching(note):
        pack_ragged(torch.zeros(tokens, width).long())
        quantize_groups(torch.zeros(tokens, 5120, dtype=torch.bfloat16), fnuz)
        for dialect in Dialect:
            queries = torch.zeros(tokens, 32, 128, dtype=torch.bfloat16)
            query_codes(queries, queries[..., 0].contiguous(), RowFormat.of(fp8_keys(dialect)).numbers())
    return found


KEYS = {"gfx942": [fp8_keys(Dialect.FNUZ)], "gfx950": [fp8_keys(Dialect.OCP), mxfp4_keys()]}


def of_keys(layout: CacheLayout) -> list[Launch]:
    """What writes, reads and rounds like keys in this layout: portable kernels with other constants."""
    found: list[Launch] = []

    def note(launch: Launch) -> bool:
        found.append(launch)
        return False

    cache, rows, table = PagedCache.allocate(layout, 2), torch.zeros(16, dtype=torch.int64), torch.zeros(16, 64)
    queries = torch.zeros(16, 32, 128, dtype=torch.bfloat16)
    weights, pages = queries[..., 0].contiguous(), torch.zeros(1, 2, dtype=torch.int32)
    with watching(note):
        insert_rows(queries[:, 0], None, 1e-20, rows, 1, table, rows, *flat(cache))
        index_queries(queries, weights, rows, table, 1.0, flat(cache)[3])
        for tokens in (1, 16):
            scores = torch.zeros(tokens, 128, dtype=torch.bfloat16)
            part = queries[:tokens], weights[:tokens], pages, rows[:tokens], rows[:tokens]
            index_scores(*part, None, 0, *flat(cache), scores)
    return found


if __name__ == "__main__":
    spills, builds, keys = {}, {}, {}
    for target, layouts in KEYS.items():
        for layout in layouts:
            for number, launch in enumerate(of_keys(layout)):
                figures, _ = aot.compile_build(aot.specialize(launch, target))
                name = f"{target} {layout.record.name} {number} {launch.kernel.fn.__name__}"
                keys[name] = [figures.spill_bytes, figures.shared_bytes, figures.matrix]
    for target in ("gfx942", "gfx950"):
        shapes = ((16, 512), (1, 128), (7, 133))
        for same in zip(*(launches(*shape, fnuz=target == "gfx942") for shape in shapes), strict=True):
            name = f"{target} {same[0].kernel.fn.__name__} {len(builds)}"
            builds[name] = len({aot.jit_key(launch, target) for launch in same})
            figures, _ = aot.compile_build(aot.specialize(same[0], target))
            spills[name] = figures.spill_bytes
    print(json.dumps({"spills": spills, "builds": builds, "keys": keys}))
