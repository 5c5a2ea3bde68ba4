"""A vendor that this package has never heard of: its devices, arch names and libraries come with its backend."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from dsv41.errors import BackendError, Dsv41Error
from dsv41.hal.arch import runs_on, vendor_of
from dsv41.hal.builtin import REFERENCE
from dsv41.hal.device import Device, Platform
from dsv41.hal.probe import probe
from dsv41.hal.registry import BackendSpec, register, unregister
from dsv41.hal.requirements import arch, vendor
from dsv41.hal.select import explain_backends, select_backend

NPU = Device("xpu", 0, "xpu-9", "An XPU", 2**34, 64, 0, 16, None, host_memory=True)
Registrar = Callable[..., BackendSpec]


@pytest.fixture
def known() -> Iterator[Registrar]:
    """Make a backend known that finds `devices`, until the test is over."""
    names = []

    def make(devices: Callable[[], Sequence[Device]], **changes: object) -> BackendSpec:
        spec = replace(REFERENCE, name="elsewhere", priority=50, devices=devices, slow_on_gpu=False, **changes)  # type: ignore[arg-type]
        register(spec)
        names.append(spec.name)
        return spec

    yield make
    for name in names:
        unregister(name)


def test_an_arch_of_another_vendor_names_it() -> None:
    assert vendor_of("xpu-9") == "xpu"
    assert runs_on("xpu-9", "xpu-9")
    assert not runs_on("xpu-9", "xpu-10")
    assert not runs_on("sm_90a", "xpu-9")


@pytest.mark.parametrize("name", ["nvidia-h100", "amd-mi300", "cpu-zen", "cuda-9", "XPU-9", "xpu"])
def test_nobody_takes_a_vendor_that_there_is(name: str) -> None:
    with pytest.raises(ValueError, match="'<vendor>-<model>'"):
        vendor_of(name)


def test_a_device_is_called_as_torch_calls_it_unless_torch_does_not() -> None:
    assert (NPU.key, NPU.torch_device, NPU.is_gpu) == ("xpu:0", "cpu", True)
    assert replace(NPU, host_memory=False).torch_device == "xpu:0"
    assert Device.gpu("gfx942", 1).torch_device == "cuda:1"


def test_a_backend_brings_its_devices_and_its_libraries(known: Registrar) -> None:
    known(lambda: [NPU, replace(NPU, index=1)], requirements=(arch("xpu-9"),), libraries=("colorsys",))
    platform = probe()
    assert [device.key for device in platform.devices][-3:] == ["xpu:0", "xpu:1", "cpu"]
    assert platform.library("colorsys").installed
    report = explain_backends(device="xpu:1")
    assert report.chosen == report.intended == "elsewhere"
    assert [c.name for c in report.candidates if c.usable] == ["elsewhere", "reference"]
    assert "xpu:1 is xpu-9 (An XPU): " in report.candidate("flashmla").reasons[0].text
    (reason,) = explain_backends("elsewhere", device="cpu").candidate("elsewhere").reasons
    assert "built for xpu-9; this device is the CPU" in reason.text


def test_a_backend_over_host_memory_gets_torchs_name_of_it(known: Registrar) -> None:
    known(lambda: [NPU], requirements=(vendor("xpu"),))
    backend = select_backend(device="xpu:0")
    assert backend.device.type == "cpu"
    assert backend.facts == NPU
    assert backend.selection is not None
    assert backend.selection.device == NPU


def test_a_backend_on_a_device_of_torchs_gets_its_name(known: Registrar) -> None:
    known(lambda: [replace(NPU, host_memory=False)], requirements=(vendor("xpu"),))
    assert str(select_backend(device="xpu:0").device) == "xpu:0"


@pytest.mark.parametrize("problem", [None, "the XPU's firmware is too old: update it"])
def test_a_devices_problem_keeps_it_from_being_the_default(known: Registrar, problem: str | None) -> None:
    known(lambda: [replace(NPU, problem=problem)])
    platform = Platform.load("cpu")
    platform = replace(platform, devices=(replace(NPU, problem=problem), *platform.devices))
    assert platform.default_device().key == ("cpu" if problem else "xpu:0")
    said = explain_backends(device="xpu:0", platform=platform).candidate("elsewhere").reasons
    assert [reason.text for reason in said] == ([problem] if problem else [])


def test_two_backends_of_a_vendor_find_each_device_once(known: Registrar) -> None:
    known(lambda: [NPU])
    register(replace(REFERENCE, name="elsewhere-too", devices=lambda: [NPU]))
    try:
        assert [device.key for device in probe().devices].count("xpu:0") == 1
    finally:
        unregister("elsewhere-too")


def _fails() -> Sequence[Device]:
    raise OSError("/dev/xpu0 cannot be opened")


@pytest.mark.parametrize(
    ("devices", "words"),
    [(_fails, "OSError: /dev/xpu0"), (lambda: [Device.gpu("sm_90")], "it found cuda:0"), (lambda: 3, "TypeError")],
)
def test_a_search_for_devices_that_fails_is_a_note(known: Registrar, devices: object, words: str) -> None:
    known(devices)  # type: ignore[arg-type]
    (note,) = [note for note in probe().notes if "elsewhere" in note]
    assert words in note
    assert "report it to its author" in note
    with pytest.raises(BackendError, match="report it to its author"):
        select_backend("elsewhere", device="xpu:0")


def test_such_a_machine_can_be_played_back_where_its_backend_is_not() -> None:
    platform = replace(Platform.load("cpu"), devices=(NPU, *Platform.load("cpu").devices))
    data = json.loads(json.dumps(platform.to_json()))
    assert Platform.from_json(data) == platform
    assert "host_memory" not in data["devices"][1]
    assert explain_backends(platform=Platform.from_json(data), device="xpu:0").chosen == "reference"


def test_a_device_and_its_arch_are_of_one_vendor() -> None:
    with pytest.raises(Dsv41Error, match="arch 'xpu-9' is not of vendor 'npu': use 'xpu'"):
        replace(NPU, vendor="npu")
