"""CUDA C++ kernels of ours as they are compiled, for Hopper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dsv41.backends.cuda import nvrtc
from dsv41.errors import BackendError

TARGET, ARCH = "sm_90", "sm_90a"


@dataclass(frozen=True)
class Build:
    """The file of a kernel, what a CTA of it has, and what is defined when it is compiled. `shared_bytes` are those of
    `Shared` in the source, which checks them; `kind` is as the budget of `dsv41 compile` names it."""

    kernel: str
    kind: str
    threads: int
    ctas_per_sm: int
    shared_bytes: int
    own_defines: Mapping[str, int] = field(hash=False)

    @property
    def name(self) -> str:
        return " ".join((self.kernel, *(f"{key.lower()}={value}" for key, value in self.own_defines.items())))

    @property
    def defines(self) -> dict[str, int]:
        return {"SHARED_BYTES": self.shared_bytes, **self.own_defines}

    def cubin(self) -> bytes:
        """Raises as `nvrtc.cubin` does."""
        return nvrtc.cubin(self.kernel, ARCH, self.defines)


def why_not(builds: Iterable[Build]) -> str | None:
    """Why they cannot be compiled here, None where they can; compiles all that are not in the cache."""
    try:
        for build in builds:
            build.cubin()
    except BackendError as error:
        return " ".join(str(error).split())
    return None
