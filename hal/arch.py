"""Every architecture number of the package, and the rules that say which binary runs where.

An arch is written as its vendor writes it: `sm_90`, `sm_121`, `gfx942`; that of a vendor which only a backend from
elsewhere knows, as `<vendor>-<model>`. A build target is what a kernel was compiled
for, in nvcc's spelling (`sm_90a`, `sm_100f`) or a gfx name. One target rarely runs on a whole generation, so a major
number alone is never compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

KIB = 1024
_CUDA_TARGET = re.compile(r"(?:sm|compute)_(\d+)([af]?)")
_GFX = re.compile(r"gfx[0-9a-f]{3,4}")
_OTHER = re.compile(r"([a-z]+)-[a-z0-9._-]+")


@dataclass(frozen=True)
class ArchFacts:
    """What is true of every chip of one arch. `fp8_dialect` is that of its matrix units, None where they have none."""

    product: str
    shared_memory_bytes: int
    warp_size: int
    fp8_dialect: str | None


# Shared memory is the most that one block may ask for (opt-in on NVIDIA, LDS of a workgroup on AMD).
# Sources: the CUDA programming guide's table of compute capabilities; AMD's accelerator and GPU hardware tables.
ARCHS: dict[str, ArchFacts] = {
    "sm_80": ArchFacts("A100", 163 * KIB, 32, None),
    "sm_86": ArchFacts("RTX 30, A40", 99 * KIB, 32, None),
    "sm_89": ArchFacts("RTX 40, L40S", 99 * KIB, 32, "ocp"),
    "sm_90": ArchFacts("H100, H200", 227 * KIB, 32, "ocp"),
    "sm_100": ArchFacts("B200, GB200", 227 * KIB, 32, "ocp"),
    "sm_103": ArchFacts("B300, GB300", 227 * KIB, 32, "ocp"),
    "sm_110": ArchFacts("Thor", 227 * KIB, 32, "ocp"),
    "sm_120": ArchFacts("RTX 50, RTX PRO", 99 * KIB, 32, "ocp"),
    "sm_121": ArchFacts("GB10", 99 * KIB, 32, "ocp"),
    "gfx90a": ArchFacts("MI200", 64 * KIB, 64, None),
    "gfx942": ArchFacts("MI300", 64 * KIB, 64, "fnuz"),
    "gfx950": ArchFacts("MI350", 160 * KIB, 64, "ocp"),
    "gfx1100": ArchFacts("RX 7900", 64 * KIB, 32, None),
    "gfx1151": ArchFacts("Ryzen AI Max", 64 * KIB, 32, None),
    "gfx1200": ArchFacts("RX 9060", 64 * KIB, 32, "ocp"),
    "gfx1201": ArchFacts("RX 9070", 64 * KIB, 32, "ocp"),
    "gfx1250": ArchFacts("MI400", 320 * KIB, 32, "ocp"),
}

# An "f" target runs on its own family, from its own minor number up; "a" targets run on one arch only.
_FAMILIES: tuple[tuple[int, ...], ...] = ((100, 103), (110,), (120, 121))


def vendor_of(arch: str) -> str:
    """The vendor that an arch name belongs to: "nvidia", "amd", "cpu" or, of "<vendor>-<model>", that one.

    Raises ValueError for a name of no known form.
    """
    if arch == "cpu":
        return "cpu"
    if re.fullmatch(r"sm_\d{2,3}", arch):
        return "nvidia"
    if _GFX.fullmatch(arch):
        return "amd"
    if (match := _OTHER.fullmatch(arch)) and match[1] not in ("nvidia", "amd", "cpu", "cuda"):
        return match[1]
    raise ValueError(f"arch {arch!r} is none of 'sm_<number>', 'gfx<hex>', '<vendor>-<model>' or 'cpu'")


def arch_from_torch(props: Any) -> str:
    """The arch of a device by torch's properties of it; a ROCm build gives the gfx name, others anything."""
    gfx = str(getattr(props, "gcnArchName", "")).partition(":")[0]
    return gfx if gfx.startswith("gfx") else f"sm_{props.major}{props.minor}"


def runs_on(target: str, arch: str) -> bool:
    """Whether machine code built for `target` runs on a device of `arch`.

    NVIDIA's rules: `sm_90a` on 9.0 only; `sm_100f` on its family from its own minor number up (10.0 and 10.3);
    a plain `sm_80` on the same major number from its own minor number up. `compute_*` (PTX) also on anything newer,
    unless it carries an `a` or `f`, which bind it as they bind machine code. AMD and any other vendor: the same name.

    Raises ValueError for a target of no known form.
    """
    if _GFX.fullmatch(target) or _OTHER.fullmatch(target):
        return target == arch
    match = _CUDA_TARGET.fullmatch(target)
    if match is None:
        raise ValueError(
            f"build target {target!r} is none of 'sm_<number>[a|f]', 'compute_<number>[a|f]', 'gfx<hex>', "
            "'<vendor>-<model>'"
        )
    if not arch.startswith("sm_"):
        return False
    built, here, suffix = int(match[1]), int(arch.removeprefix("sm_")), match[2]
    if suffix == "a":
        return here == built
    if suffix == "f":
        return any(built in family and here in family and here >= built for family in _FAMILIES)
    if target.startswith("compute_"):
        return here >= built
    return here // 10 == built // 10 and here >= built
