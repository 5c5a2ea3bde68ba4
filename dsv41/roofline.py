"""Floors: the least time that an operation can take on a device, in closed form.

Bytes count each thing once that must pass memory. The latent is shared by all heads, so a selected row is read once a
token and not once a head.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIM = 512
INDEX_BYTES = 4
"""An index of 32 bits is the least that names a row; a kernel that reads 64 is charged no less time for it."""


@dataclass(frozen=True)
class DeviceRates:
    """What a device can do: memory bytes and dense bf16 matrix FLOPs a second. `measured` says whether the two were
    measured by a device copy and a large matrix product, or are the vendor's, which no program reaches."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    measured: bool = False


# Measured on an H200; the others from the vendors' data sheets (memory bandwidth, dense bf16 without sparsity).
RATES = (
    DeviceRates("H200", 4.3e12, 790e12, measured=True),
    DeviceRates("A100", 2.039e12, 312e12),
    DeviceRates("H100", 3.35e12, 989e12),
    DeviceRates("B200", 8.0e12, 2250e12),
    DeviceRates("B300", 8.0e12, 2250e12),
    DeviceRates("RTX PRO 6000", 1.792e12, 503.8e12),
    DeviceRates("RTX 5090", 1.792e12, 209.5e12),
    DeviceRates("GB10", 0.273e12, 125e12),
    DeviceRates("MI300X", 5.3e12, 1307.4e12),
    DeviceRates("MI325X", 6.0e12, 1307.4e12),
    DeviceRates("MI355X", 8.0e12, 2516.6e12),
    DeviceRates("MI350X", 8.0e12, 2309.6e12),
)
_OTHER_NAMES = {"GB200": "B200", "GB300": "B300", "GH200": "H200"}


@dataclass(frozen=True)
class Work:
    """What an operation must read and write, and compute."""

    bytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Floor:
    """The least time for some work, in seconds: memory and matrix units run at once, so the longer of the two."""

    memory: float
    compute: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.compute)

    @property
    def bound(self) -> str:
        """ "memory" or "compute": which of the two it is."""
        return "memory" if self.memory >= self.compute else "compute"


def attention_work(
    tokens: int,
    heads: int,
    rows: tuple[tuple[int, int], ...],
    *,
    head_dim: int = HEAD_DIM,
    activation_bytes: int = 2,
    distinct: tuple[int, ...] | None = None,
) -> Work:
    """Sparse attention of `tokens` queries, each over its own `rows`: pairs (keys, bytes of a key's record).

    Bytes: each token's records, once, with an index each; its query read and its output written, once. FLOPs: one
    multiplication and one addition for each key, dim and head, in the scores and again in the sum of the values, so
    4 * keys * heads * head_dim a token. Random tokens share no rows. Where tokens do, `distinct` says for each pair of
    `rows` how many records all of them read together, and each of those counts once.
    """
    keys = sum(count for count, _ in rows)
    counts = distinct or tuple(tokens * count for count, _ in rows)
    records = sum(count * size for count, (_, size) in zip(counts, rows, strict=True))
    others = keys * INDEX_BYTES + 2 * heads * head_dim * activation_bytes
    return Work(bytes=float(records + tokens * others), flops=float(tokens * 4 * keys * heads * head_dim))


def matmul_work(
    tokens: int, out_features: int, in_features: int, weight_bytes: float, *, activation_bytes: int = 2
) -> Work:
    """`[tokens, in] x [in, out]`: the weights once (`weight_bytes` an element), input and output once."""
    moved = out_features * in_features * weight_bytes + tokens * (in_features + out_features) * activation_bytes
    return Work(bytes=float(moved), flops=2.0 * tokens * out_features * in_features)


def floor(work: Work, rates: DeviceRates) -> Floor:
    return Floor(work.bytes / rates.bytes_per_second, work.flops / rates.flops_per_second)


def rates_of(device_name: str) -> DeviceRates | None:
    """The rates of a device by the name that its driver gives, such as "NVIDIA H200"; None where it is not listed."""
    words = f" {device_name.replace('-', ' ')} "
    for other, name in _OTHER_NAMES.items():
        words = words.replace(f" {other} ", f" {name} ")
    return next((rates for rates in RATES if f" {rates.name} " in words), None)
