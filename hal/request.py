"""What a backend is asked for, and why it may say no."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv41.errors import BackendError, ConfigError, Dsv41Error, LayoutError
from dsv41.hal.names import suggest

if TYPE_CHECKING:
    from dsv41.hal.types import Geometry

UNQUANTISED = "float32"
"""The cache dtype of exact comparisons, which no vendor's kernel reads."""
V4_RECORD = "fp8_ds_mla_v4"
"""The 584-byte record by a name of its own, where `fp8_ds_mla` is the release's: for comparisons, too."""
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla", "bfloat16", "fp8_e4m3", V4_RECORD, UNQUANTISED)
UNSPECIFIC_KV_CACHE_DTYPES = ("auto", "fp8")
"""Requests that each backend resolves to a specific name of its own."""
INDEX_CACHE_DTYPES = ("auto", "mxfp4", "fp8", UNQUANTISED)
PHASES = ("decode", "prefill", "verify", "draft")
"""One token a request; many; a few that are checked together; a block whose queries see each other."""

REASON_CLASSES = ("arch", "platform", "library", "shape", "dtype", "phase", "switch", "planned", "bug")
"""What kind of thing a reason is about, and so what kind of thing helps:

arch: the device itself; another backend or device. platform: torch, driver or container, which keep torch from the
device; mend the machine. library: something to install, upgrade or rebuild. shape: heads, widths, geometry; another
`tp_size` or backend. dtype: another cache dtype. phase: other phases. switch: an environment variable. planned: known,
but not part of this version. bug: a check of the backend itself failed; report it.
"""


@dataclass(frozen=True)
class Reason:
    """One thing that keeps a backend from a request. `text` says what is wrong and what to do."""

    cls: str
    text: str

    def __post_init__(self) -> None:
        if self.cls not in REASON_CLASSES:
            raise Dsv41Error(f"reason class {self.cls!r} is none of {', '.join(REASON_CLASSES)}")

    def __str__(self) -> str:
        return f"[{self.cls}] {self.text}"

    def to_dict(self) -> dict[str, str]:
        return {"class": self.cls, "text": self.text}


@dataclass(frozen=True)
class Request:
    """The shape and the formats that a backend is judged by, known before any weight is touched.

    `cache_bytes` is the largest single cache that will be bound, None where it is not known yet. Raises ConfigError
    for a `tp_size` that does not divide the heads and the output groups, LayoutError for an unknown cache dtype and
    BackendError for an unknown phase, each with the valid values.
    """

    geometry: Geometry
    tp_size: int = 1
    kv_cache_dtype: str = "auto"
    index_cache_dtype: str = "auto"
    phases: tuple[str, ...] = ("decode", "prefill")
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        heads, groups = self.geometry.num_heads, self.geometry.o_groups
        common = math.gcd(heads, groups)
        if type(self.tp_size) is not int or self.tp_size < 1 or common % self.tp_size:
            fitting = [tp for tp in range(1, common + 1) if common % tp == 0]
            raise ConfigError(
                f"tp_size {self.tp_size!r} must divide num_heads {heads} and o_groups {groups}: use one of "
                f"{', '.join(map(str, fitting))}"
            )
        _check("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES, LayoutError)
        _check("index_cache_dtype", self.index_cache_dtype, INDEX_CACHE_DTYPES, LayoutError)
        if not self.phases:
            raise BackendError(f"phases is empty: name at least one of {', '.join(PHASES)}")
        for phase in self.phases:
            _check("phase", phase, PHASES, BackendError)

    @property
    def num_heads(self) -> int:
        """Query heads on one tensor-parallel rank."""
        return self.geometry.num_heads // self.tp_size

    def __str__(self) -> str:
        return (
            f"{self.num_heads} heads a rank (tp_size {self.tp_size}), head_dim {self.geometry.head_dim}, window "
            f"{self.geometry.window}, top-k {self.geometry.topk}, kv_cache_dtype {self.kv_cache_dtype}, "
            f"index_cache_dtype {self.index_cache_dtype}, phases {'+'.join(self.phases)}"
        )


def _check(what: str, value: str, valid: Collection[str], error: type[Dsv41Error]) -> None:
    if value not in valid:
        raise error(f"{what} {value!r} is unknown: {suggest(str(value), valid)}use one of {', '.join(valid)}")
