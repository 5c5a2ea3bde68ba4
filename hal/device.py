"""A device, and the machine and software around it, as plain facts.

A `Platform` is all that selection looks at. It is read from this machine by `dsv41.hal.probe`, or from a JSON file, so
that any machine can be described and played back. Capability is a fact of one device: mixed nodes exist.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from dsv41.errors import BackendError, Dsv41Error
from dsv41.hal.arch import ARCHS, vendor_of
from dsv41.hal.plain import from_plain, to_plain

FP8_DIALECTS = ("ocp", "fnuz")
LIBRARIES = ("aiter", "flash_mla", "flashinfer", "hip", "triton")
"""The kernel libraries that every platform describes, by import name."""
TORCH_INSTALL = {
    "CUDA": "pip install torch --index-url https://download.pytorch.org/whl/cu130",
    "ROCm": "pip install torch --index-url https://download.pytorch.org/whl/rocm7.1",
}
TORCH_VENDORS = {"nvidia": "CUDA", "amd": "ROCm"}
"""The vendors whose devices torch calls cuda, and the build that each needs."""
_LARGEST = 2**60  # of anything that a device has


@dataclass(frozen=True)
class Device:
    """One device. `arch` is `sm_<number>`, `gfx<hex>`, `<vendor>-<model>` or `cpu`, with no feature suffix.

    `shared_memory_bytes` is the most that one block may use, `multiprocessors` SMs or CUs (0 where unknown).
    `fp8_dialect` is that of its matrix units: "ocp", "fnuz", or None where they have none. `problem` says why torch
    cannot compute on it although it computes on others, with the remedy.

    A vendor other than NVIDIA and AMD is called as torch calls its devices, such as "xpu". `host_memory` is for a
    device that torch has no name for, whose kernels work on tensors in the host's memory.
    """

    vendor: str
    index: int
    arch: str
    name: str
    memory_bytes: int
    multiprocessors: int
    shared_memory_bytes: int
    warp_size: int
    fp8_dialect: str | None
    problem: str | None = None
    host_memory: bool = field(default=False, metadata={"plain": "where set"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "arch", self.arch.split(":")[0])  # gcnArchName: gfx942:sramecc+:xnack-
        try:
            vendor = vendor_of(self.arch)
        except ValueError as error:
            raise Dsv41Error(f"device {self.name!r}: {error}") from None
        if vendor != self.vendor:
            raise Dsv41Error(
                f"device {self.name!r}: arch {self.arch!r} is not of vendor {self.vendor!r}: use {vendor!r}"
            )
        if self.fp8_dialect not in (None, *FP8_DIALECTS):
            raise Dsv41Error(
                f"device {self.name!r}: fp8_dialect {self.fp8_dialect!r} is none of {FP8_DIALECTS} or None"
            )
        for name in ("index", "memory_bytes", "multiprocessors", "shared_memory_bytes", "warp_size"):
            if not 0 <= (value := getattr(self, name)) <= _LARGEST:
                raise Dsv41Error(
                    f"device {self.name!r}: {name} is {value if value < 0 else 'huge'}: expected 0 to {_LARGEST}; "
                    "correct it, 0 where it is unknown"
                )

    @property
    def key(self) -> str:
        """The device's name: torch's, such as "cuda:0" (on ROCm as well) or "cpu", where torch has one."""
        if not self.is_gpu:
            return "cpu"
        return f"{'cuda' if self.vendor in TORCH_VENDORS else self.vendor}:{self.index}"

    @property
    def torch_device(self) -> str:
        """torch's name of where its tensors are."""
        return "cpu" if self.host_memory else self.key

    @property
    def is_gpu(self) -> bool:
        """Whether it is anything but the CPU."""
        return self.vendor != "cpu"

    @staticmethod
    def gpu(
        arch: str,
        index: int = 0,
        *,
        name: str = "",
        memory_bytes: int = 0,
        multiprocessors: int = 0,
        shared_memory_bytes: int = 0,
        warp_size: int = 0,
    ) -> Device:
        """A GPU whose remaining facts come from the table of archs; an arch that is not in it has no fp8."""
        arch = arch.split(":")[0]
        known = ARCHS.get(arch)
        vendor = "amd" if arch.startswith("gfx") else "nvidia"
        return Device(
            vendor=vendor,
            index=index,
            arch=arch,
            name=name or (known.product if known else arch),
            memory_bytes=memory_bytes,
            multiprocessors=multiprocessors,
            shared_memory_bytes=shared_memory_bytes or (known.shared_memory_bytes if known else 0),
            warp_size=warp_size or (known.warp_size if known else 32),
            fp8_dialect=known.fp8_dialect if known else None,
        )

    @staticmethod
    def cpu(name: str = "CPU", memory_bytes: int = 0, cores: int = 1) -> Device:
        return Device("cpu", 0, "cpu", name, memory_bytes, cores, 0, 1, None)


@dataclass(frozen=True)
class TorchBuild:
    """The torch that is installed. `problem` says why it cannot use the GPUs that are here, or cannot be imported.

    `version` is None where it cannot be imported; `cuda` and `hip` are the versions it was built for.
    """

    version: str | None
    cuda: str | None = None
    hip: str | None = None
    problem: str | None = None

    @property
    def kind(self) -> str:
        """What it can drive: "CUDA", "ROCm" or "CPU"."""
        return "CUDA" if self.cuda else "ROCm" if self.hip else "CPU"


@dataclass(frozen=True)
class Library:
    """One kernel library: whether it is there, what it can do, and why it cannot be used although it is there."""

    installed: bool = False
    version: str | None = None
    features: frozenset[str] = frozenset()
    problem: str | None = None


@dataclass(frozen=True)
class Platform:
    """Every device of a machine, the CPU last, and the software that could drive them.

    `notes` are sentences for a person, each about something that keeps this machine from its best. `environment`
    holds the variables that selection may look at. `origin` is the file that a played-back platform was read from,
    None for this machine.
    """

    devices: tuple[Device, ...]
    torch: TorchBuild
    driver: str | None = None
    libraries: Mapping[str, Library] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    about: str = ""
    origin: str | None = field(default=None, compare=False, metadata={"plain": False})

    def __post_init__(self) -> None:
        keys = [device.key for device in self.devices]
        if not keys or keys[-1] != "cpu" or len(set(keys)) != len(keys):
            raise Dsv41Error(f"a platform lists each device once and the CPU last, found {keys}")

    @property
    def gpus(self) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.is_gpu)

    def library(self, name: str) -> Library:
        """The facts of a library; one that the platform does not mention is not installed."""
        return self.libraries.get(name, Library())

    def reach_problem(self, device: Device) -> str | None:
        """Why torch cannot compute on `device`, with the remedy; None where it can."""
        torch = self.torch
        if torch.version is None:
            return torch.problem or "torch cannot be imported: reinstall it with `pip install torch`"
        if not device.is_gpu:
            return None
        needed = TORCH_VENDORS.get(device.vendor)
        if needed is None:
            return device.problem
        if torch.kind != needed:
            return (
                f"torch {torch.version} is a {torch.kind} build and cannot use this {needed} device: install a "
                f"{needed} build with `{TORCH_INSTALL[needed]}`"
            )
        return torch.problem or device.problem

    def default_device(self) -> Device:
        """The first GPU that torch can use, else the CPU."""
        return next((gpu for gpu in self.gpus if self.reach_problem(gpu) is None), self.devices[-1])

    def device(self, key: str | None) -> Device:
        """The device that `key` names ("cuda" is "cuda:0"); None is the default device.

        Raises BackendError listing the devices, and what keeps others away.
        """
        if key is None:
            return self.default_device()
        wanted = {"cuda": "cuda:0", "cpu:0": "cpu"}.get(key, key)
        for device in self.devices:
            if device.key == wanted:
                return device
        have = ", ".join(f"{device.key} ({device.name})" for device in self.devices)
        notes = "".join(f"; {note}" for note in self.notes)
        raise BackendError(f"device {key!r} is not on this platform: use one of {have}{notes}")

    def with_library(self, name: str, library: Library) -> Platform:
        """The same platform with one library replaced."""
        return replace(self, libraries={**self.libraries, name: library})

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads back to an equal platform."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    @staticmethod
    def from_json(data: Any, origin: str = "platform") -> Platform:
        """A platform from plain data, or from the output of `dsv41 probe --json`, which carries one.

        Raises Dsv41Error naming the first field that is unknown, missing or of the wrong type.
        """
        if isinstance(data, dict) and "platform" in data and "backends" in data:
            data = data["platform"]
        platform: Platform = from_plain(Platform, data, origin)
        if missing := sorted(set(LIBRARIES) - set(platform.libraries)):
            raise Dsv41Error(f"{origin}.libraries: {missing[0]!r} is missing: describe each of {', '.join(LIBRARIES)}")
        return replace(platform, origin=origin)

    @staticmethod
    def load(name_or_path: str | Path) -> Platform:
        """A platform that ships with the package, by name (`h200`), or one from a JSON file.

        Raises Dsv41Error, listing the names, where there is none, and for a file that does not describe a platform.
        """
        text = str(name_or_path).strip()
        names = platform_names()
        if text.lower() in names:
            return _parse((files("dsv41.platforms") / f"{text.lower()}.json").read_text(encoding="utf-8"), text.lower())
        path = Path(text)
        try:
            content = path.read_text(encoding="utf-8") if path.is_file() else None
        except (OSError, UnicodeDecodeError) as error:
            raise Dsv41Error(
                f"platform {text!r:.200} cannot be read ({getattr(error, 'strerror', error)}): expected a name or a "
                "JSON file; write one with `dsv41 probe --json`"
            ) from None
        if content is not None:
            return _parse(content, text)
        close = difflib.get_close_matches(text.lower(), names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise Dsv41Error(
            f"{text!r} is neither a platform nor a file: {hint}use one of {', '.join(names)}, or the path of a JSON "
            "file"
        )


def platform_names() -> list[str]:
    """The platforms that ship with the package."""
    return sorted(item.name[:-5] for item in files("dsv41.platforms").iterdir() if item.name.endswith(".json"))


def _parse(text: str, origin: str) -> Platform:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Dsv41Error(f"platform {origin!r} is not JSON ({error}): write one with `dsv41 probe --json`") from None
    return Platform.from_json(data, origin)
