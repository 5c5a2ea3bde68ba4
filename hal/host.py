"""What the operating system says of the GPUs of this machine, whether or not torch can use them.

Reads /proc, /sys and /dev only, except for `nvidia-smi` and hip-python, each run in a process of its own with a
timeout. `root` stands in for / in tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv41.errors import Dsv41Error
from dsv41.hal.device import Device

ROOT = Path("/")
_PCI_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # display controllers and processing accelerators
_TIMEOUT = 20.0


@dataclass(frozen=True)
class Host:
    """The drivers that are loaded, the GPUs on the bus, and the device nodes that a container may lack."""

    nvidia_driver: str | None
    amd_driver: str | None
    pci: frozenset[str]
    kfd_node: bool
    kfd_readable: bool
    nvidia_node: bool
    gpus: tuple[Device, ...]
    """Devices as the drivers describe them; facts that they do not tell come from the table of archs, or are 0."""
    hip_gpus: int = 0
    """How many AMD GPUs the HIP runtime sees, by hip-python; 0 where it was not asked."""
    hip_problem: str = ""
    """What hip-python said when it was asked and failed."""

    def has(self, vendor: str) -> bool:
        """Whether a GPU of the vendor is here, by its driver, the bus or a list of devices."""
        driver = self.nvidia_driver if vendor == "nvidia" else self.amd_driver
        return bool(driver) or vendor in self.pci or any(gpu.vendor == vendor for gpu in self.gpus)


NOTHING = Host(None, None, frozenset(), False, False, False, ())
"""A machine without a GPU."""


def read_host(root: Path = ROOT, *, ask_tools: bool = True) -> Host:
    """The facts of this machine. `ask_tools` also runs nvidia-smi and hip-python, which files alone do not replace."""
    nvidia, amd = _nvidia_driver(root), _amd_driver(root)
    kfd = root / "dev/kfd"
    gpus = _kfd_devices(root)
    seen, hip_problem = _ask_hip_python() if ask_tools and (amd or gpus) else ([], "")
    gpus = gpus or seen
    if ask_tools and not gpus and nvidia:
        gpus = _nvidia_smi_devices()
    return Host(
        nvidia_driver=nvidia,
        amd_driver=amd,
        pci=_pci_gpus(root),
        kfd_node=kfd.exists(),
        kfd_readable=os.access(kfd, os.R_OK | os.W_OK),
        nvidia_node=(root / "dev/nvidiactl").exists(),
        gpus=tuple(gpus),
        hip_gpus=len(seen),
        hip_problem=hip_problem,
    )


def cpu_device(root: Path = ROOT) -> Device:
    """The CPU as a device: its model, memory and the cores that this process may use."""
    model = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Device.cpu(model[1].strip() if model else "CPU", int(memory[1]) * 1024 if memory else 0, cores)


def _nvidia_driver(root: Path) -> str | None:
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+[\d.]*)\s", _text(root / "proc/driver/nvidia/version"))
    return match[1] if match else None


def _amd_driver(root: Path) -> str | None:
    module = root / "sys/module/amdgpu"
    return _text(module / "version").strip() or ("in the kernel" if module.is_dir() else None)


def _pci_gpus(root: Path) -> frozenset[str]:
    found = set()
    for device in _entries(root / "sys/bus/pci/devices"):
        vendor = _PCI_VENDORS.get(_text(device / "vendor").strip())
        if vendor and _text(device / "class").strip().startswith(_GPU_CLASSES):
            found.add(vendor)
    return frozenset(found)


def _kfd_devices(root: Path) -> list[Device]:
    """AMD GPUs from the kernel driver's topology, which a container sees even without /dev/kfd."""
    devices: list[Device] = []
    nodes = [node for node in _entries(root / "sys/class/kfd/kfd/topology/nodes") if node.name.isdecimal()]
    for node in sorted(nodes, key=lambda path: int(path.name)):
        facts = {
            key: int(value) for key, value in re.findall(r"^(\w+) (\d+)$", _text(node / "properties"), re.MULTILINE)
        }
        version = facts.get("gfx_target_version", 0)
        if not version:
            continue  # a CPU node
        memory = re.search(r"^size_in_bytes (\d+)$", _text(node / "mem_banks/0/properties"), re.MULTILINE)
        _add(
            devices,
            f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}",
            memory_bytes=int(memory[1]) if memory else 0,
            multiprocessors=facts.get("simd_count", 0) // (facts.get("simd_per_cu") or 1),
            shared_memory_bytes=facts.get("lds_size_in_kb", 0) * 1024,
            warp_size=facts.get("wave_front_size", 0),
        )
    return devices


def _nvidia_smi_devices() -> list[Device]:
    """NVIDIA GPUs from nvidia-smi, in its own order."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    devices: list[Device] = []
    for line in _output(query)[0].splitlines():
        match = re.fullmatch(r"(.+), (\d+)\.(\d), (.+)", line.strip())
        if match:
            # A GPU that shares the host's memory has "[N/A]" here.
            memory = int(match[4]) * 1024**2 if match[4].isdecimal() else 0
            _add(devices, f"sm_{match[2]}{match[3]}", name=match[1], memory_bytes=memory)
    return devices


def _add(devices: list[Device], arch: str, **facts: Any) -> None:
    """Append the next device, unless what a tool said of it makes none."""
    with suppress(Dsv41Error):
        devices.append(Device.gpu(arch, len(devices), **facts))


_HIP_PYTHON = """
import json
def call(result):
    error, *rest = result
    if int(error):
        raise RuntimeError(str(error))
    return rest[0] if rest else None
def ask(hip):
    found = []
    for index in range(call(hip.hipGetDeviceCount())):
        try:
            props = call(hip.hipGetDeviceProperties(index))
        except TypeError:
            props = hip.hipDeviceProp_t()
            call(hip.hipGetDeviceProperties(props, index))
        text = lambda value: value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        found.append([text(props.gcnArchName), text(props.name), int(props.totalGlobalMem),
                      int(props.multiProcessorCount), int(props.sharedMemPerBlock), int(props.warpSize)])
    return found
problem, found = "", []
try:
    from hip import hip
except ImportError:
    hip = None
try:
    found = ask(hip) if hip else []
except Exception as error:
    problem = f"{type(error).__name__}: {error}"
print("dsv41:" + json.dumps([found, problem]))
"""


def _ask_hip_python() -> tuple[list[Device], str]:
    """AMD GPUs by hip-python where it is installed, and what it says where it fails.

    Importing it proves nothing, since it opens the driver at the first call. 10.0 returns the properties, the lines
    before it fill a given struct.
    """
    printed, failure = _output([sys.executable, "-c", _HIP_PYTHON])
    answer = re.search(r"dsv41:(.*)", printed)  # libraries may print as well
    found, problem = json.loads(answer[1]) if answer else ([], failure)
    devices: list[Device] = []
    for arch, name, memory, units, lds, warp in found:
        facts = {"name": name, "memory_bytes": memory, "multiprocessors": units, "shared_memory_bytes": lds}
        _add(devices, arch, **facts, warp_size=warp)
    return devices, problem


def _output(command: list[str]) -> tuple[str, str]:
    """A command's standard output, and how it failed; one of the two is empty."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return "", f"it did not answer within {_TIMEOUT:.0f} s"
    except OSError as error:
        return "", f"it cannot be run ({error})"
    return (done.stdout, "") if done.returncode == 0 else ("", f"its process ended with status {done.returncode}")


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
