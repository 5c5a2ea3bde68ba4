"""Probing: fake torches on fake machines, each with its devices or the sentence that says why it has none."""

import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dsv41.hal import probe as probe_module
from dsv41.hal.device import Device, Library, Platform
from dsv41.hal.host import Host
from dsv41.hal.probe import deepen, probe
from dsv41.hal.select import explain_backends

H200 = SimpleNamespace(
    name="NVIDIA H200",
    gcnArchName="NVIDIA H200",  # as a CUDA build of torch fills it
    major=9,
    minor=0,
    total_memory=150109880320,
    multi_processor_count=132,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    warp_size=32,
)
RTX5090 = SimpleNamespace(name="RTX 5090", major=12, minor=0, total_memory=1 << 35, multi_processor_count=170)


def amd(gfx: str) -> SimpleNamespace:
    """As ROCm's torch describes a device: a gfx name with suffixes beside numbers that mean nothing."""
    return SimpleNamespace(
        name="AMD Instinct",
        gcnArchName=f"{gfx}:sramecc+:xnack-",
        major=9,
        minor=4,
        total_memory=1 << 37,
        multi_processor_count=304,
        shared_memory_per_block=65536,
        warp_size=64,
    )


def torch_double(
    version: str,
    *props: Any,
    cuda: str | None = None,
    hip: str | None = None,
    error: Exception | None = None,
    targets: tuple[str, ...] = (),
    warning: str = "",
) -> SimpleNamespace:
    def device_count() -> int:
        if warning:
            warnings.warn(warning, stacklevel=1)
        if error:
            raise error
        return len(props)

    def get_device_properties(index: int) -> Any:
        if isinstance(props[index], Exception):
            raise props[index]
        return props[index]

    calls = {"device_count": device_count, "get_device_properties": get_device_properties}
    calls["get_arch_list"] = lambda: list(targets)  # type: ignore[assignment,return-value]
    return SimpleNamespace(
        __version__=version, version=SimpleNamespace(cuda=cuda, hip=hip), cuda=SimpleNamespace(**calls)
    )


def machine(**facts: Any) -> Host:
    bare: dict[str, Any] = {
        "nvidia_driver": None,
        "amd_driver": None,
        "pci": frozenset(),
        "kfd_node": False,
        "kfd_readable": False,
        "nvidia_node": False,
        "gpus": (),
    }
    return Host(**{**bare, **facts})


NVIDIA = machine(nvidia_driver="580.95.05", nvidia_node=True, gpus=(Device.gpu("sm_90", name="NVIDIA H200"),))
AMD = machine(amd_driver="6.16.6", kfd_node=True, kfd_readable=True, gpus=(Device.gpu("gfx942", name="MI300X"),))
CUDA = {"version": "2.14.0+cu130", "cuda": "13.0"}
ROCM = {"version": "2.14.0+rocm7.1", "hip": "7.1.5"}


def run(monkeypatch: pytest.MonkeyPatch, torch: Any, host: Host) -> Any:
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(probe_module, "read_host", lambda **_: host)
    for variable in probe_module.ENVIRONMENT:
        monkeypatch.delenv(variable, raising=False)
    return probe()


def test_this_machine_can_be_probed() -> None:
    found = probe()
    assert found.origin is None
    assert found.devices[-1].key == "cpu"
    assert found.torch.version is not None


def test_nvidia_devices_each_have_their_own_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, torch_double("2", H200, RTX5090, cuda="13"), NVIDIA)
    first, second = found.gpus
    assert (first.arch, first.shared_memory_bytes, first.multiprocessors) == ("sm_90", 232448, 132)
    assert (second.key, second.arch, second.shared_memory_bytes, second.warp_size) == ("cuda:1", "sm_120", 101376, 32)
    assert found.notes == ()
    assert found.torch.problem is None


def test_fr_14_amd_devices_each_have_their_own_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, torch_double("2", amd("gfx950"), amd("gfx942"), hip="7.1"), AMD)
    assert [(gpu.vendor, gpu.arch, gpu.fp8_dialect) for gpu in found.gpus] == [
        ("amd", "gfx950", "ocp"),
        ("amd", "gfx942", "fnuz"),
    ]


def test_fr_12_an_unlisted_arch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, torch_double("2", amd("gfx9999"), hip="7.1"), AMD)
    assert found.gpus[0].fp8_dialect is None
    assert "cuda:0 is gfx9999" in found.notes[0]
    assert "is in no table of this package" in found.notes[0]


def test_a_torch_without_kernels_for_the_device_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = torch_double("2", RTX5090, cuda="12.6", targets=("sm_80", "sm_90"))
    assert "has no kernels for sm_120" in run(monkeypatch, torch, NVIDIA).notes[0]
    fine = torch_double("2", RTX5090, cuda="12.6", targets=("sm_80", "compute_90"))
    assert run(monkeypatch, fine, NVIDIA).notes == ()


CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
V100 = SimpleNamespace(name="Tesla V100", major=7, minor=0, total_memory=1 << 34, multi_processor_count=80)


def test_a_device_that_torch_has_no_kernels_for_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = torch_double("2.14.0+cu130", V100, H200, cuda="13.0", targets=CU130)
    found = run(monkeypatch, torch, NVIDIA)
    problem = str(found.reach_problem(found.gpus[0]))
    assert "has no kernels for sm_70" in problem
    assert "built for an older CUDA than 13.0" in problem
    assert "pip install" not in problem
    assert found.reach_problem(found.gpus[1]) is None
    assert found.default_device().key == "cuda:1"
    assert Platform.from_json(found.to_json()) == found
    report = explain_backends(platform=found, device="cuda:0")
    assert report.chosen is None
    assert all("platform" in [reason.cls for reason in candidate.reasons] for candidate in report.candidates)


@pytest.mark.parametrize(
    ("props", "build", "targets", "remedy"),
    [
        (RTX5090, {"cuda": "12.6"}, ("sm_80", "sm_90a"), "built for a newer CUDA than 12.6"),
        (amd("gfx90a"), {"hip": "7.1"}, ("gfx942", "gfx950"), "PYTORCH_ROCM_ARCH=gfx90a"),
        (amd("gfx942"), {"hip": "7.1"}, ("gfx942:xnack-", "gfx950"), None),
        (amd("gfx1103"), {"hip": "7.1"}, ("gfx942", "gfx11-generic"), None),  # we cannot tell
        (H200, {"cuda": "13.0"}, ("garbage",), None),
    ],
)
def test_the_remedy_is_a_torch_that_has_kernels(
    monkeypatch: pytest.MonkeyPatch, props: Any, build: dict[str, Any], targets: tuple[str, ...], remedy: str | None
) -> None:
    (gpu,) = run(monkeypatch, torch_double("2", props, targets=targets, **build), machine()).gpus
    assert gpu.problem is None if remedy is None else remedy in str(gpu.problem)


def test_a_torch_that_does_not_list_its_kernels_keeps_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = torch_double("2", H200, cuda="13")
    del torch.cuda.get_arch_list
    found = run(monkeypatch, torch, NVIDIA)
    assert [gpu.problem for gpu in found.gpus] == [None]


def test_what_cannot_be_read_is_a_note_and_not_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_host(**_: Any) -> Host:
        raise KeyError("node")

    run(monkeypatch, torch_double("2", H200, cuda="13"), NVIDIA)
    monkeypatch.setattr(probe_module, "read_host", read_host)
    found = probe()
    assert [gpu.arch for gpu in found.gpus] == ["sm_90"]
    assert "cannot be read (KeyError: 'node')" in found.notes[0]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # a stray folder of that name
    assert "torch cannot be imported (AttributeError" in str(probe().torch.problem)


def test_one_bad_device_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, torch_double("2", RuntimeError("ECC error"), H200, cuda="13"), NVIDIA)
    assert [gpu.key for gpu in found.gpus] == ["cuda:1"]
    assert "cuda:0" in found.notes[0]
    assert "ECC error" in found.notes[0]


KFD_MISSING = machine(amd_driver="6.16.6", gpus=(Device.gpu("gfx942"),))
KFD_FORBIDDEN = machine(amd_driver="6.16.6", kfd_node=True, gpus=(Device.gpu("gfx942"),))
BUS_ONLY = machine(pci=frozenset({"nvidia"}))
HIP_SEES = replace(AMD, hip_gpus=1)
HIP_FAILS = replace(AMD, hip_problem="RuntimeError: failed to dlopen libamdhip64.so")
NO_NODE = machine(nvidia_driver="580.95.05")


@pytest.mark.parametrize(
    ("torch", "host", "words"),
    [
        (
            torch_double("2.14.0+cpu"),
            NVIDIA,
            "an NVIDIA GPU is here (driver 580.95.05), but torch 2.14.0+cpu is a CPU build",
        ),
        (torch_double("2.14.0+cpu"), NVIDIA, "pip install torch --index-url https://download.pytorch.org/whl/cu"),
        (torch_double("2.14.0+cpu"), AMD, "pip install torch --index-url https://download.pytorch.org/whl/rocm"),
        (torch_double(**CUDA), AMD, "an AMD GPU is here (driver 6.16.6), but torch 2.14.0+cu130 is a CUDA build"),
        (torch_double(**ROCM), NVIDIA, "torch 2.14.0+rocm7.1 is a ROCm build and cannot use it"),
        (torch_double(**ROCM), machine(), "is a ROCm build, but no GPU of its vendor is on this machine"),
        (torch_double(**CUDA), machine(), "is a CUDA build, but no GPU of its vendor is on this machine"),
        (torch_double(**ROCM), KFD_MISSING, "`--device=/dev/kfd --device=/dev/dri`"),
        (torch_double(**ROCM), KFD_FORBIDDEN, "add the user to the groups render and video"),
        (torch_double(**ROCM), AMD, "an AMD GPU is here, but torch 2.14.0+rocm7.1 sees none"),
        (torch_double(**ROCM), HIP_SEES, "built for ROCm 7.1.5, sees none: install a torch built for the ROCm of this"),
        (torch_double(**ROCM), HIP_FAILS, "sees none; hip-python says RuntimeError: failed to dlopen libamdhip64.so: "),
        (torch_double(**CUDA), BUS_ONLY, "no NVIDIA driver is loaded"),
        (torch_double("2.14.0+cpu"), BUS_ONLY, "no driver loaded, so install NVIDIA's first"),
        (torch_double(**CUDA), NO_NODE, "`--gpus all`"),
        (
            torch_double(**CUDA, warning="CUDA initialization: The NVIDIA driver on your system is too old"),
            NVIDIA,
            "NVIDIA driver 580.95.05 is too old for torch 2.14.0+cu130, built for CUDA 13.0: update the driver",
        ),
        (torch_double(**CUDA, error=RuntimeError("CUDA unknown error")), NVIDIA, "(RuntimeError: CUDA unknown error)"),
    ],
)
def test_a_gpu_that_torch_cannot_use_gets_its_sentence(
    monkeypatch: pytest.MonkeyPatch, torch: Any, host: Host, words: str
) -> None:
    found = run(monkeypatch, torch, host)
    assert words in str(found.torch.problem)
    assert found.torch.problem in found.notes
    assert found.default_device().key == "cpu"
    assert [gpu.arch for gpu in found.gpus] == [gpu.arch for gpu in host.gpus]


@pytest.mark.parametrize(
    ("torch", "host", "variable"),
    [
        (torch_double(**CUDA), NVIDIA, "CUDA_VISIBLE_DEVICES"),
        (torch_double(**ROCM), AMD, "HIP_VISIBLE_DEVICES"),
        (torch_double(**ROCM), AMD, "ROCR_VISIBLE_DEVICES"),
    ],
)
def test_a_variable_that_hides_devices_is_named(
    monkeypatch: pytest.MonkeyPatch, torch: Any, host: Host, variable: str
) -> None:
    run(monkeypatch, torch, host)
    monkeypatch.setenv(variable, "")
    found = probe()
    assert f"{variable}='' may hide it" in str(found.torch.problem)
    assert found.environment == {variable: ""}


def test_a_cpu_torch_on_a_cpu_machine_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, torch_double("2.14.0+cpu"), machine())
    assert found.torch.problem is None
    assert found.notes == ()


def test_a_torch_that_cannot_be_imported_is_a_problem_and_not_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, None, NVIDIA)
    assert found.torch.version is None
    assert "torch cannot be imported" in str(found.torch.problem)
    assert all("torch cannot be imported" in str(found.reach_problem(device)) for device in found.devices)


def test_a_deep_probe_imports_what_looks_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def check(module: str) -> str | None:
        asked.append(module)
        return "importing it crashes the process with signal 11" if module == "flash_mla" else None

    monkeypatch.setattr(probe_module, "deep_check", check)
    platform = run(monkeypatch, torch_double("2.14.0+cpu"), machine())
    for name, library in {
        "flash_mla": Library(True, "1"),
        "triton": Library(True, "3.9.0"),
        "flashinfer": Library(True, "0.7.4", problem="mismatch"),
        "aiter": Library(),
    }.items():
        platform = platform.with_library(name, library)
    found = deepen(platform)
    assert sorted(asked) == ["flash_mla", "triton"]
    assert found.library("flash_mla").problem == "importing it crashes the process with signal 11"
    assert found.library("flashinfer").problem == "mismatch"
    assert found.library("triton").problem is None
