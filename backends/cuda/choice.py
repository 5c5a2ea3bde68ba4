"""Which attention kernel a call of the FlashMLA backend takes, by its heads and tokens."""

from __future__ import annotations

import os

from dsv41.errors import BackendError

ENV_KERNEL = "DSV41_FLASHMLA_KERNEL"
FLASHMLA, PORTABLE = "flashmla", "portable"
KERNELS = (FLASHMLA, PORTABLE)

_EVER = 1 << 62
# For at most so many heads: the kernel for at most so many tokens. Typed by hand from docs/performance.md, "Attention
# of the portable backend on one H200": FlashMLA, padded to 64 heads, is faster than the portable kernels at every
# measured size (8, 16 and 64 heads, 1 to 4096 tokens), by 1.07 at 32 tokens with 16 heads to 2.08 at 128 with 64.
# Larger head counts were not measured; they go with 64.
_TABLE: dict[int, dict[int, str]] = {
    16: {_EVER: FLASHMLA},
    128: {_EVER: FLASHMLA},
}


def choose(num_heads: int, num_tokens: int) -> str:
    """The name of the kernel for a call of `num_tokens` tokens with `num_heads` live heads: what DSV41_FLASHMLA_KERNEL
    names, or else the fastest that was measured.

    Raises BackendError where the variable names no kernel.
    """
    if (named := os.environ.get(ENV_KERNEL, "").strip().lower()) and named != "auto":
        if named not in KERNELS:
            raise BackendError(
                f"{ENV_KERNEL} is {os.environ[ENV_KERNEL]!r}: expected auto, {', '.join(KERNELS)}; name one of these, "
                "or unset it"
            )
        return named
    by_tokens = next(row for most, row in _TABLE.items() if num_heads <= most)
    return next(kernel for most, kernel in by_tokens.items() if num_tokens <= most)
