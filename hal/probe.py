"""Reading this machine: its devices, its torch and its kernel libraries, without importing a vendor's.

`probe()` reads metadata, files and what torch says of its devices. `probe(deep=True)` also imports each library that
is there, in a process of its own, so that an exit, a crash or a hang becomes a reason like any other.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from dsv41.hal.aiter_ops import ENV_AITER_PRODUCTS
from dsv41.hal.arch import ARCHS, arch_from_torch, runs_on
from dsv41.hal.device import LIBRARIES, TORCH_INSTALL, TORCH_VENDORS, Device, Platform, TorchBuild
from dsv41.hal.host import NOTHING, Host, cpu_device, read_host
from dsv41.hal.libraries import inspect
from dsv41.hal.registry import BackendSpec, all_specs

ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
    ENV_AITER_PRODUCTS,
)
"""The variables that a platform records."""
IMPORT_TIMEOUT = 120.0
"""Seconds that a library may take to import."""


def probe(*, deep: bool = False) -> Platform:
    """This machine as a platform, with the devices and libraries that the known backends speak of. Nothing that is
    missing or broken raises: it becomes a problem or a note."""
    torch_view = _ask_torch()
    specs = all_specs()
    try:
        host = read_host(ask_tools=not torch_view.devices)
    except Exception as error:  # files and tools of drivers that nobody has seen yet
        host = NOTHING
        torch_view.notes.append(
            f"the drivers of this machine cannot be read ({_words(error)}): please report it with this note"
        )
    build, devices, notes = _combine(torch_view, host)
    devices = _with_others(devices, specs, notes)
    libraries = {*LIBRARIES, *(library for spec in specs for library in spec.libraries)}
    platform = Platform(
        devices=(*devices, cpu_device()),
        torch=build,
        driver=host.nvidia_driver or host.amd_driver,
        libraries={name: inspect(name, build.version) for name in sorted(libraries)},
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        notes=tuple(notes),
    )
    return deepen(platform) if deep else platform


def deepen(platform: Platform) -> Platform:
    """The same platform after importing each library that looks usable; only sensible for this machine."""
    names = [name for name, facts in platform.libraries.items() if facts.installed and facts.problem is None]
    with ThreadPoolExecutor(max_workers=2) as pool:
        for name, problem in zip(names, pool.map(deep_check, names), strict=True):
            if problem:
                platform = platform.with_library(name, replace(platform.libraries[name], problem=problem))
    return platform


_FOREIGN_ABI = re.compile(r"undefined symbol: (_Z\w*?(3c10|2at|5torch)|(aoti_)?torch_)")
_ABI_ADVICE = ", a symbol of torch: it was built for another torch than this one"


@cache
def deep_check(module: str) -> str | None:
    """What goes wrong when a fresh process imports `module`; None where nothing does. Remembered for this process."""
    marker = "dsv41: imported"
    code = (
        "import importlib, json, sys\n"
        "sys.path[:] = json.loads(sys.argv[1])\n"
        "importlib.import_module(sys.argv[2])\n"
        f"print({marker!r}, flush=True)\n"
    )
    command = [sys.executable, "-c", code, json.dumps([str(entry) for entry in sys.path]), module]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=IMPORT_TIMEOUT, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"importing it did not finish in {IMPORT_TIMEOUT:g} seconds"
    except OSError as error:
        return f"no process could be started to import it ({error})"
    if marker in done.stdout:
        return None
    if done.returncode < 0:
        return f"importing it crashes the process with signal {-done.returncode}"
    last = next((line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    if "Traceback (most recent call last)" in done.stderr:
        return f"importing it fails with {last}{_ABI_ADVICE if _FOREIGN_ABI.search(last) else ''}"
    return f"importing it exits the process with status {done.returncode}" + (f" ({last})" if last else "")


@dataclass
class _TorchView:
    build: TorchBuild
    devices: list[Device] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str | None = None
    """What torch said when it was asked for its devices and failed."""


def _ask_torch() -> _TorchView:
    try:
        import torch

        build = TorchBuild(str(torch.__version__), torch.version.cuda, getattr(torch.version, "hip", None))
    except Exception as error:
        problem = f"torch cannot be imported ({_words(error)}): reinstall it with `pip install torch`"
        return _TorchView(TorchBuild(None, problem=problem))
    view = _TorchView(build)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count()
        except Exception as error:
            count, view.failure = 0, _words(error)
        try:
            targets = list(torch.cuda.get_arch_list()) if count else []
        except Exception:
            targets = []  # unknown, as is then whether it has kernels for a device
        for index in range(count):
            try:
                device = _torch_device(index, torch.cuda.get_device_properties(index))
            except Exception as error:
                view.failure = _words(error)
                view.notes.append(
                    f"torch cannot describe cuda:{index} ({view.failure}): check it with the vendor's tools"
                )
                continue
            if lacking := _kernel_problem(build, targets, device.arch):
                device = replace(device, problem=lacking)
                view.notes.append(f"{device.key}: {lacking}")
            view.devices.append(device)
    if not view.devices and caught:
        view.failure = view.failure or str(caught[-1].message)
    return view


def _kernel_problem(build: TorchBuild, targets: list[str], arch: str) -> str | None:
    """Why a torch with kernels for `targets` cannot compute on an arch; None where it can, or where that is unknown."""
    try:
        if not targets or any(runs_on(target.split(":")[0], arch) for target in targets):
            return None
    except ValueError:  # a target of a form that we do not know
        return None
    if arch.startswith("gfx"):
        which = f"such as one built from source with PYTORCH_ROCM_ARCH={arch}"
    else:
        numbers = [int("".join(filter(str.isdigit, target))) for target in targets]
        older = int(arch.removeprefix("sm_")) < min(numbers)
        which = f"built for {'an older' if older else 'a newer'} CUDA than {build.cuda}"
    return (
        f"torch {build.version} has no kernels for {arch}, only for {', '.join(targets)}: install one that has, "
        f"{which}, or use another device"
    )


def _torch_device(index: int, props: Any) -> Device:
    """A device from torch's properties; on ROCm they carry the gfx name."""
    optin = getattr(props, "shared_memory_per_block_optin", 0) or getattr(props, "shared_memory_per_block", 0)
    return Device.gpu(
        arch_from_torch(props),
        index,
        name=props.name,
        memory_bytes=props.total_memory,
        multiprocessors=props.multi_processor_count,
        shared_memory_bytes=optin,
        warp_size=getattr(props, "warp_size", 0),
    )


def _with_others(devices: list[Device], specs: Iterable[BackendSpec], notes: list[str]) -> list[Device]:
    """The devices and, behind them, those that backends find for themselves, each once."""
    found = {device.key: device for device in devices}
    for spec in specs:
        try:
            for device in spec.devices() if spec.devices else ():
                if device.vendor in ("cpu", *TORCH_VENDORS):
                    raise ValueError(f"it found {device.key}, which is torch's to find")
                found.setdefault(device.key, device)
        except (Exception, SystemExit) as error:
            notes.append(f"backend {spec.name} cannot look for its devices ({_words(error)}): report it to its author")
    return list(found.values())


def _combine(view: _TorchView, host: Host) -> tuple[TorchBuild, list[Device], list[str]]:
    """torch's devices, or those that the host has and torch cannot use, with a sentence that says why."""
    notes = list(view.notes)
    devices = view.devices or list(host.gpus)
    problem = None if view.devices else _why_no_device(view, host)
    if problem:
        notes.append(problem)
    for device in devices:
        if device.arch not in ARCHS:
            notes.append(
                f"{device.key} is {device.arch} ({device.name}), which is in no table of this package: it is taken to "
                "have no fp8 units; please report it with the output of `dsv41 probe --json`"
            )
    build = view.build
    return (replace(build, problem=problem) if problem and build.version else build), devices, notes


def _why_no_device(view: _TorchView, host: Host) -> str | None:
    """Why torch sees no GPU although there is one, and the remedy; None where there is none to see."""
    build = view.build
    if build.version is None:
        return build.problem
    nvidia, amd = host.has("nvidia"), host.has("amd")
    if not (nvidia or amd):
        if build.kind == "CPU":
            return None
        asked = f"torch {build.version} is a {build.kind} build, but no GPU of its vendor is on this machine"
        return f"{asked}{_said(view)}: use the CPU, or start the container with its GPUs"
    if build.kind == "CPU" or (build.kind == "CUDA" and not nvidia) or (build.kind == "ROCm" and not amd):
        vendor, needed = ("NVIDIA", "CUDA") if nvidia else ("AMD", "ROCm")
        driver = host.nvidia_driver if nvidia else host.amd_driver
        state = f"driver {driver}" if driver else f"no driver loaded, so install {vendor}'s first"
        return (
            f"an {vendor} GPU is here ({state}), but torch {build.version} is a {build.kind} build and cannot use it: "
            f"`{TORCH_INSTALL[needed]}`"
        )
    return _why_no_cuda_device(view, host) if build.kind == "CUDA" else _why_no_rocm_device(view, host)


def _why_no_cuda_device(view: _TorchView, host: Host) -> str:
    torch = f"torch {view.build.version}"
    if host.nvidia_driver is None:
        return f"an NVIDIA GPU is on the bus, but no NVIDIA driver is loaded, so {torch} sees none: install the driver"
    if "too old" in (view.failure or ""):
        return (
            f"NVIDIA driver {host.nvidia_driver} is too old for {torch}, built for CUDA {view.build.cuda}: update the "
            "driver, or install a torch built for an older CUDA"
        )
    if not host.nvidia_node:
        return (
            f"the NVIDIA driver is loaded but /dev/nvidiactl is not here, so {torch} sees no GPU: start the container "
            "with `--gpus all`"
        )
    advice = _hidden("CUDA_VISIBLE_DEVICES")
    return f"NVIDIA driver {host.nvidia_driver} is loaded, but {torch} sees no GPU{_said(view)}: {advice}"


def _why_no_rocm_device(view: _TorchView, host: Host) -> str:
    torch = f"torch {view.build.version}"
    if not host.kfd_node:
        return (
            f"an AMD GPU is here but /dev/kfd is not, so {torch} sees none: start the container with "
            "`--device=/dev/kfd --device=/dev/dri`, or load the amdgpu driver"
        )
    if not host.kfd_readable:
        return (
            f"this user may not open /dev/kfd, so {torch} sees no AMD GPU: add the user to the groups render and "
            "video, or start the container with `--group-add render --group-add video`"
        )
    if host.hip_gpus:
        return (
            f"hip-python finds the AMD GPUs of this machine ({host.hip_gpus}), but {torch}, built for ROCm "
            f"{view.build.hip}, sees none{_said(view)}: install a torch built for the ROCm of this machine"
        )
    runtime = f"; hip-python says {host.hip_problem}" if host.hip_problem else ""
    advice = _hidden("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    return f"an AMD GPU is here, but {torch} sees none{_said(view)}{runtime}: {advice}"


def _hidden(*variables: str) -> str:
    """Advice on variables that hide devices."""
    if hiding := [f"{name}={os.environ[name]!r}" for name in variables if name in os.environ]:
        return f"{' and '.join(hiding)} may hide it, unset that"
    return "check that the driver is as new as this torch needs, then reboot or restart the container"


def _said(view: _TorchView) -> str:
    return f" ({view.failure})" if view.failure else ""


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
