"""What dsv41 knows of this backend before it imports it. Nothing here imports torch or the vendor's library."""

import os
from collections.abc import Sequence
from pathlib import Path

from dsv41.hal.device import Device, Platform
from dsv41.hal.libraries import KINDS, LibraryKind
from dsv41.hal.registry import BackendSpec
from dsv41.hal.request import Reason, Request
from dsv41.hal.requirements import Requirement, arch, heads, library, released_head_dims

MOST_ROWS = 1024
HEADS = tuple(range(16, 129, 16))


def devices() -> Sequence[Device]:
    """The Toy A1s of this machine. A port for a real device would read its driver's files in /dev or /sys."""
    return [
        Device(
            vendor="toy",
            index=index,
            arch="toy-a1",
            name="Toy A1",
            memory_bytes=0,
            multiprocessors=1,
            shared_memory_bytes=0,
            warp_size=1,
            fp8_dialect="ocp",
            host_memory=True,
        )
        for index in range(int(os.environ.get("TOYACCEL_DEVICES", "1")))
    ]


def _features(folder: Path, version: str | None) -> set[str]:
    """What an installed toyaccel can do, from its files: importing it is left to dsv41, which does so apart."""
    return {"scores"} if (folder / "scores.py").is_file() else set()


KINDS["toyaccel"] = LibraryKind("toyaccel", ("dsv41-toy",), _features)


def rows_a_query(most: int) -> Requirement:
    """A query sees at most that many rows, window and selection together."""

    def check(device: Device, platform: Platform, request: Request) -> Reason | None:
        rows = request.geometry.window + request.geometry.topk
        if rows <= most:
            return None
        return Reason(
            "shape",
            f"its memory holds the rows of a query at once, {most} of them; a window of {request.geometry.window} and "
            f"a top-k of {request.geometry.topk} are {rows}: use another backend for this model",
        )

    return Requirement(f"at most {most} rows a query", check)


SPEC = BackendSpec(
    name="toy",
    summary="the Toy A1's sparse attention over tiled pages",
    contract_version=1,
    target="dsv41_toy.backend:ToyBackend",
    priority=70,
    kv_cache_dtypes=("fp8_ds_mla", "bfloat16"),
    packed_kv_cache_dtype="fp8_ds_mla",
    index_cache_dtypes=("fp8",),
    libraries=("toyaccel",),
    devices=devices,
    requirements=(
        arch("toy-a1"),
        library("toyaccel", features={"scores": "1.2"}, install="`pip install -U dsv41-toy`"),
        heads(*HEADS),
        rows_a_query(MOST_ROWS),
        released_head_dims(),
    ),
)
