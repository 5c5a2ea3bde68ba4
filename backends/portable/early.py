"""Programmatic dependent launch: on NVIDIA's SM90 and newer, a kernel is launched while the one ahead of it still runs.

A decode step is a chain of short launches, and what it costs to begin and to end one adds up along it. A kernel that
takes part has a constant `EARLY` and calls `wait_for_launch_ahead(EARLY)` before it does anything else; `launch` sees
the constant and sets it. After the wait everything that was launched before has ended and can be read, as after any
other launch: the launch ahead has ended, and that one ended after its own wait for the one ahead of it. So the wait
comes before the first load and the first store of anything that another launch touches.

Kernels of libraries need not keep that chain: the last launch of FlashMLA's decode may end without having waited for
the one ahead of it, which may still be writing. So a kernel that may come behind such a one is launched with
`overlaps=False`: in the ordinary way, which waits for all that is ahead. It still lets the next one begin.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv41.hal.arch import vendor_of

EARLY_LAUNCH = True
"""Off, every kernel is what it is on older GPUs."""
_FIRST = 90


def launches_early(arch: str) -> bool:
    """Whether kernels for `arch`, such as "sm_90", are launched so."""
    return EARLY_LAUNCH and vendor_of(arch) == "nvidia" and int(arch.removeprefix("sm_")) >= _FIRST


@triton.jit
def wait_for_launch_ahead(EARLY: tl.constexpr):
    """Let the next launch begin, then wait until all ahead of this one have ended. Does nothing unless `EARLY`."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
