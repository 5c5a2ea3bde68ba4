"""What the operating system says, from a fake root."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv41.hal import host
from dsv41.hal.host import cpu_device, read_host
from dsv41.hal.probe import _torch_device

NVIDIA_VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"
    "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0)\n"
)


def write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def kfd_node(root: Path, number: int, version: int, *, simds: int = 0, lds: int = 64, wave: int = 64) -> None:
    node = f"sys/class/kfd/kfd/topology/nodes/{number}"
    facts = {
        "simd_count": simds,
        "simd_per_cu": 4,
        "lds_size_in_kb": lds,
        "wave_front_size": wave,
        "gfx_target_version": version,
    }
    write(root, f"{node}/properties", "".join(f"{key} {value}\n" for key, value in facts.items()))
    write(root, f"{node}/mem_banks/0/properties", "heap_type 1\nsize_in_bytes 206141652992\nflags 0\n")


def test_an_empty_machine_has_nothing(tmp_path: Path) -> None:
    found = read_host(tmp_path)
    assert found.gpus == ()
    assert not found.has("nvidia")
    assert not found.has("amd")


def test_the_nvidia_driver_tells_its_version(tmp_path: Path) -> None:
    write(tmp_path, "proc/driver/nvidia/version", NVIDIA_VERSION)
    found = read_host(tmp_path, ask_tools=False)
    assert found.nvidia_driver == "580.95.05"
    assert found.has("nvidia")
    assert not found.nvidia_node


@pytest.mark.parametrize(
    ("version", "arch"),
    [
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
        (120500, "gfx1250"),
    ],
)
def test_amd_gpus_come_from_the_kernels_topology(tmp_path: Path, version: int, arch: str) -> None:
    kfd_node(tmp_path, 0, 0)  # the CPU is a node as well
    kfd_node(tmp_path, 1, version, simds=1216)
    (gpu,) = read_host(tmp_path, ask_tools=False).gpus
    assert (gpu.arch, gpu.key, gpu.multiprocessors) == (arch, "cuda:0", 304)
    assert (gpu.shared_memory_bytes, gpu.warp_size, gpu.memory_bytes) == (65536, 64, 206141652992)


def test_amd_nodes_keep_their_numeric_order(tmp_path: Path) -> None:
    for number in range(11):
        kfd_node(tmp_path, number, 90500 if number == 10 else 90402)
    assert [gpu.arch for gpu in read_host(tmp_path, ask_tools=False).gpus] == ["gfx942"] * 10 + ["gfx950"]


@pytest.mark.parametrize(
    ("vendor", "kind", "expected"),
    [
        ("0x10de", "0x030000", {"nvidia"}),
        ("0x10de", "0x030200", {"nvidia"}),
        ("0x1002", "0x120000", {"amd"}),
        ("0x1002", "0x040300", set()),  # the sound device of a graphics card
        ("0x8086", "0x030000", set()),
    ],
)
def test_gpus_are_found_on_the_bus(tmp_path: Path, vendor: str, kind: str, expected: set[str]) -> None:
    write(tmp_path, "sys/bus/pci/devices/0000:01:00.0/vendor", vendor + "\n")
    write(tmp_path, "sys/bus/pci/devices/0000:01:00.0/class", kind + "\n")
    assert read_host(tmp_path, ask_tools=False).pci == expected


def test_odd_entries_of_the_topology_are_passed_over(tmp_path: Path) -> None:
    kfd_node(tmp_path, 1, 90402)
    kfd_node(tmp_path, 2, 999999999)  # no gfx name
    kfd_node(tmp_path, 3, 90500)
    write(tmp_path, "sys/class/kfd/kfd/topology/nodes/power/properties", "gfx_target_version 90402\n")
    write(tmp_path, "sys/bus/pci/devices", "no folder")
    assert [gpu.arch for gpu in read_host(tmp_path, ask_tools=False).gpus] == ["gfx942", "gfx950"]


def test_the_amd_driver_and_its_node(tmp_path: Path) -> None:
    write(tmp_path, "sys/module/amdgpu/version", "6.16.6\n")
    found = read_host(tmp_path, ask_tools=False)
    assert (found.amd_driver, found.kfd_node) == ("6.16.6", False)
    write(tmp_path, "dev/kfd")
    assert read_host(tmp_path, ask_tools=False).kfd_node


def test_the_cpu_is_described(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "processor : 0\nmodel name\t: AMD EPYC 9654\n")
    write(tmp_path, "proc/meminfo", "MemTotal:       16384 kB\n")
    cpu = cpu_device(tmp_path)
    assert (cpu.name, cpu.memory_bytes, cpu.arch) == ("AMD EPYC 9654", 16384 * 1024, "cpu")
    assert cpu_device(tmp_path / "absent").name == "CPU"


def test_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin/nvidia-smi"
    write(tmp_path, "bin/nvidia-smi", "#!/bin/sh\necho 'NVIDIA H200, 9.0, 143771'\necho 'NVIDIA GB10, 12.1, 122502'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    write(tmp_path, "proc/driver/nvidia/version", NVIDIA_VERSION)
    assert [(gpu.key, gpu.arch, gpu.name, gpu.fp8_dialect) for gpu in read_host(tmp_path).gpus] == [
        ("cuda:0", "sm_90", "NVIDIA H200", "ocp"),
        ("cuda:1", "sm_121", "NVIDIA GB10", "ocp"),
    ]


def test_a_gpu_whose_memory_nvidia_smi_does_not_tell_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """GB10 shares its host's memory, so nvidia-smi has none to tell."""
    lines = "NVIDIA GB10, 12.1, [N/A]\nNVIDIA H200, 9.0, 143771\nNVIDIA old, [N/A], 80\nFailed to initialise\n"
    monkeypatch.setattr(host, "_output", lambda command: (lines, ""))
    monkeypatch.setattr(host.shutil, "which", lambda name: name)
    found = host._nvidia_smi_devices()
    assert [(gpu.arch, gpu.memory_bytes) for gpu in found] == [("sm_121", 0), ("sm_90", 143771 * 1024**2)]


HIP_10 = """
class _P:
    gcnArchName, name, totalGlobalMem = b"gfx942:sramecc+:xnack-", b"AMD Instinct MI300X", 1 << 37
    multiProcessorCount, sharedMemPerBlock, warpSize = 304, 65536, 64
def hipGetDeviceCount(): return (0, 2)
def hipGetDeviceProperties(index): return (0, _P())
"""
HIP_7 = """
class hipDeviceProp_t: pass
def hipGetDeviceCount(): return (0, 1)
def hipGetDeviceProperties(prop, index):
    prop.gcnArchName, prop.name, prop.totalGlobalMem = b"gfx950", b"AMD Instinct MI355X", 1 << 38
    prop.multiProcessorCount, prop.sharedMemPerBlock, prop.warpSize = 256, 163840, 64
    return (0,)
"""
HIP_NOISY = "print('warning: no NUMA')\n" + HIP_10 + "import atexit; atexit.register(print, 'bye')\n"
HIP_NAMELESS = HIP_10.replace('b"gfx942:sramecc+:xnack-"', 'b""')
HIP_NO_DRIVER = "def hipGetDeviceCount(): raise RuntimeError('failed to dlopen libamdhip64.so')\n"
HIP_NO_DEVICE = """
import enum
class hipError_t(enum.IntEnum):
    hipErrorNoDevice = 100
def hipGetDeviceCount(): return (hipError_t.hipErrorNoDevice, 0)
"""
HIP_TOO_OLD = "raise SystemExit('not for this Python')\n"


@pytest.mark.parametrize(
    ("code", "archs", "problem"),
    [
        (HIP_10, ["gfx942", "gfx942"], ""),
        (HIP_7, ["gfx950"], ""),
        (HIP_NOISY, ["gfx942", "gfx942"], ""),
        (HIP_NAMELESS, [], ""),
        (HIP_NO_DRIVER, [], "RuntimeError: failed to dlopen libamdhip64.so"),
        (HIP_NO_DEVICE, [], "RuntimeError: 100"),
        (HIP_TOO_OLD, [], "its process ended with status 1"),
        ("import os; os._exit(3)", [], "its process ended with status 3"),
        (None, [], ""),
    ],
)
def test_hip_python_is_read_whatever_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str | None, archs: list[str], problem: str
) -> None:
    if code is not None:
        write(tmp_path, "site/hip/__init__.py")
        write(tmp_path, "site/hip/hip.py", code)
    write(tmp_path, "root/sys/module/amdgpu/version", "6.16.6\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    found = read_host(tmp_path / "root")
    assert [gpu.arch for gpu in found.gpus] == archs
    assert (found.hip_gpus, found.hip_problem) == (len(archs), problem)


def test_hip_python_and_torch_describe_a_device_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "site/hip/__init__.py")
    write(tmp_path, "site/hip/hip.py", HIP_10)
    write(tmp_path, "root/sys/module/amdgpu/version", "6.16.6\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    (first, _) = read_host(tmp_path / "root").gpus
    props = SimpleNamespace(
        name="AMD Instinct MI300X",
        gcnArchName="gfx942:sramecc+:xnack-",
        total_memory=1 << 37,
        multi_processor_count=304,
        shared_memory_per_block=65536,
        warp_size=64,
    )
    assert first == _torch_device(0, props)


def test_the_kernels_topology_goes_before_hip_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It numbers devices as they are whatever is hidden from HIP, whose view is kept beside it."""
    write(tmp_path, "site/hip/__init__.py")
    write(tmp_path, "site/hip/hip.py", HIP_NO_DRIVER)
    kfd_node(tmp_path / "root", 1, 90500)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    found = read_host(tmp_path / "root")
    assert [gpu.arch for gpu in found.gpus] == ["gfx950"]
    assert (found.hip_gpus, found.hip_problem) == (0, "RuntimeError: failed to dlopen libamdhip64.so")


def test_a_tool_that_hangs_or_fails_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_TIMEOUT", 0.2)
    for command, failure in (
        ("sleep 5", "did not answer"),
        ("false", "status 1"),
        ("no-such-tool-of-dsv41", "cannot be"),
    ):
        printed, why = host._output(command.split())
        assert printed == ""
        assert failure in why
