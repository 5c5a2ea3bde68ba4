"""Which attention kernel a call of the FlashMLA backend takes, by its heads and tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dsv41.errors import BackendError

ENV_KERNEL = "DSV41_FLASHMLA_KERNEL"
FLASHMLA, HOPPER, PORTABLE = "flashmla", "hopper", "portable"
KERNELS = (FLASHMLA, HOPPER, PORTABLE)
MOST_OVERLAPPING = 256
"""Tokens of a captured step up to which independent chains run side by side; with more, each fills the GPU alone."""
MOST_OURS = 64
"""Heads that our kernels for Hopper take."""

_EVER = 1 << 62
# By architecture, for at most so many heads: the kernel for at most so many tokens. Typed by hand from
# docs/performance.md. "Few heads on one H200": 0.37 to 0.67 of the time of FlashMLA, which pads to 64 heads, at 1 to
# 512 tokens. "Up to 64 heads on one H200": 0.51 to 0.80 of its time at 1 to 512 tokens, 0.66 at 4096; its kernel for
# prefill takes 2.3 times ours there with the gather of random rows, and 0.81 of ours for one request's chunk.
# "Attention of the portable backend on one H200":
# FlashMLA is faster than the portable kernels at every size, by 1.07 at 32 tokens with 16 heads to 2.08 at 128 with 64.
# Head counts over 64 and SM100 were not measured.
_TABLES: dict[str, dict[int, dict[int, str]]] = {
    "sm_90": {
        MOST_OURS: {_EVER: HOPPER},
        128: {_EVER: FLASHMLA},
    },
    "sm_100": {128: {_EVER: FLASHMLA}},
    "sm_103": {128: {_EVER: FLASHMLA}},
}


@dataclass(frozen=True)
class Choice:
    """The kernel of each call on `arch`: what DSV41_FLASHMLA_KERNEL named when this was made, or else the fastest that
    was measured, of those that are there: `missing` is why our kernels for Hopper are not, None where they are."""

    arch: str
    missing: str | None
    named: str | None = None

    @staticmethod
    def read(arch: str, missing: str | None) -> Choice:
        """Raises BackendError where the variable names no kernel, or one that is not there."""
        named = os.environ.get(ENV_KERNEL, "").strip().lower()
        if named in ("", "auto"):
            return Choice(arch, missing)
        if named not in KERNELS:
            raise BackendError(
                f"{ENV_KERNEL} is {os.environ[ENV_KERNEL]!r}: expected auto, {', '.join(KERNELS)}; name one of these, "
                "or unset it"
            )
        if named == HOPPER and missing is not None:
            raise BackendError(
                f"{ENV_KERNEL} is {HOPPER!r}, which does not run here ({missing}): expected one of the others; name "
                "one, or unset it"
            )
        return Choice(arch, missing, named)

    def kernel(self, num_heads: int, num_tokens: int) -> str:
        """Of a call of `num_tokens` tokens with `num_heads` live heads. HOPPER by name serves what it can."""
        if self.named is not None and (self.named != HOPPER or num_heads <= MOST_OURS):
            return self.named
        table = _TABLES.get(self.arch, _TABLES["sm_100"])
        by_tokens = next(row for most, row in table.items() if num_heads <= most)
        best = next(kernel for most, kernel in by_tokens.items() if num_tokens <= most)
        return best if best != HOPPER or self.missing is None else FLASHMLA

    @property
    def ours(self) -> bool:
        """Whether products of few tokens with fp8 weights, index scores of MXFP4 keys and the choices by them are ours:
        where our kernels are there, and no other was named. They were measured to be faster at every size
        (docs/performance.md)."""
        return self.missing is None and self.named in (None, HOPPER)

    @property
    def max_tokens_for_overlap(self) -> int:
        """That of the backend: only where HOPPER is named, until replays were seen on a GPU to be eager steps again
        since scores wait for the index keys of a branch (docs/performance.md)."""
        return MOST_OVERLAPPING if self.named == HOPPER else 0

    def kernels(self, num_heads: int) -> set[str]:
        """Of all calls with so many heads."""
        table = _TABLES.get(self.arch, _TABLES["sm_100"])
        return {self.kernel(num_heads, tokens) for row in table.values() for tokens in row}

    def pads(self, num_heads: int) -> bool:
        """Whether some call with so many heads is FlashMLA's, which takes 64 or 128."""
        return FLASHMLA in self.kernels(num_heads)
