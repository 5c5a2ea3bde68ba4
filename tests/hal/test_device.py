"""Devices and platforms: facts in, facts out, and strict reading of what others wrote."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv41.errors import Dsv41Error
from dsv41.hal.device import LIBRARIES, Device, Library, Platform, TorchBuild, platform_names

from ..wording import refused

CUDA = TorchBuild("2.14.0+cu130", cuda="13.0")
ROCM = TorchBuild("2.14.0+rocm7.1", hip="7.1.0")


def platform(*devices: Device, torch: TorchBuild = CUDA) -> Platform:
    return Platform((*devices, Device.cpu()), torch, libraries={name: Library() for name in LIBRARIES})


def test_a_device_drops_the_suffixes_of_its_gfx_name() -> None:
    assert Device("amd", 0, "gfx942:sramecc+:xnack-", "MI300X", 1, 1, 1, 64, "fnuz").arch == "gfx942"
    assert Device.gpu("gfx90a:sramecc+:xnack-").fp8_dialect is None


def test_keys_are_torchs() -> None:
    assert [device.key for device in platform(Device.gpu("sm_90"), Device.gpu("sm_120", 1)).devices] == [
        "cuda:0",
        "cuda:1",
        "cpu",
    ]
    assert Device.gpu("gfx950", 2).key == "cuda:2"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"arch": "gfx942"}, "not of vendor 'nvidia'"),
        ({"arch": "hopper"}, "arch 'hopper' is none of"),
        ({"fp8_dialect": "e4m3"}, "fp8_dialect 'e4m3' is none of"),
        ({"index": -1}, "index is -1: expected 0 to"),
        ({"memory_bytes": -5}, "memory_bytes is -5: expected 0 to"),
        ({"memory_bytes": 10**400}, "memory_bytes is huge: expected 0 to"),
        ({"multiprocessors": -1}, "multiprocessors is -1: expected 0 to"),
    ],
)
def test_a_device_that_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    good = {"vendor": "nvidia", "index": 0, "arch": "sm_90", "name": "H100", "fp8_dialect": "ocp"}
    numbers = dict.fromkeys(("memory_bytes", "multiprocessors", "shared_memory_bytes", "warp_size"), 1)
    with pytest.raises(Dsv41Error, match=words):
        Device(**{**good, **numbers, **fields})


def test_fr_14_dialect_and_arch_are_facts_of_each_device() -> None:
    for order in (("gfx942", "gfx950"), ("gfx950", "gfx942")):
        node = platform(*(Device.gpu(arch, i) for i, arch in enumerate(order)), torch=ROCM)
        assert [gpu.fp8_dialect for gpu in node.gpus] == [{"gfx942": "fnuz", "gfx950": "ocp"}[arch] for arch in order]


def test_a_device_is_found_by_its_name() -> None:
    node = platform(Device.gpu("sm_90"), Device.gpu("sm_120", 1))
    assert node.device(None).key == "cuda:0"
    assert node.device("cuda").key == "cuda:0"
    assert node.device("cuda:1").arch == "sm_120"
    assert node.device("cpu").key == "cpu"
    with pytest.raises(Dsv41Error, match=r"'cuda:2' is not on this platform: use one of cuda:0 \(H100, H200\), cuda:1"):
        node.device("cuda:2")


def test_the_default_device_is_one_that_torch_can_use() -> None:
    assert platform(Device.gpu("sm_90"), torch=TorchBuild("2.14.0+cpu")).default_device().key == "cpu"
    assert platform(Device.gpu("gfx942"), torch=CUDA).default_device().key == "cpu"
    assert platform(Device.gpu("gfx942"), torch=ROCM).default_device().key == "cuda:0"
    assert platform(Device.gpu("sm_90"), torch=TorchBuild("2", "13", None, "too old")).default_device().key == "cpu"
    bad = replace(Device.gpu("sm_90"), problem="no kernels")
    assert platform(bad, Device.gpu("sm_90", 1)).default_device().key == "cuda:1"
    assert platform(bad).reach_problem(bad) == "no kernels"


def test_a_platform_lists_the_cpu_last_and_nothing_twice() -> None:
    with pytest.raises(Dsv41Error, match="the CPU last"):
        Platform((Device.cpu(), Device.gpu("sm_90")), CUDA)
    with pytest.raises(Dsv41Error, match="each device once"):
        Platform((Device.gpu("sm_90"), Device.gpu("sm_120"), Device.cpu()), CUDA)


@pytest.mark.parametrize("name", platform_names())
def test_json_round_trip(name: str) -> None:
    loaded = Platform.load(name)
    assert loaded.origin == name
    assert Platform.from_json(json.loads(json.dumps(loaded.to_json()))) == loaded


def test_a_platform_loads_from_a_path_and_a_name_in_any_case(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(Platform.load("h200").to_json()))
    assert Platform.load(file) == Platform.load(" H200 ") == Platform.load("h200")


def test_an_unknown_name_lists_the_valid_ones(tmp_path: Path) -> None:
    with pytest.raises(Dsv41Error, match=r"'h20' is neither .*did you mean 'h200'\? use one of a100, .*mi300x"):
        Platform.load("h20")
    with pytest.raises(Dsv41Error, match="neither a platform nor a file"):
        Platform.load(tmp_path / "absent.json")


def test_a_file_that_is_not_json_says_so(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(Dsv41Error, match="is not JSON"):
        Platform.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe\x00", "cannot be read .*utf-8"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"index": ' + b"9" * 5000 + b"}", "is not JSON"),
    ],
    ids=["binary", "deep", "long number"],
)
def test_a_file_that_cannot_be_read_says_so(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(Dsv41Error, match=words):
        Platform.load(tmp_path / "bad")


def test_a_name_too_long_for_a_file_says_so() -> None:
    with refused(Dsv41Error, "xxx", "too long"):
        Platform.load("x" * 5000)


def _without(data: dict[str, Any], *path: str | int) -> None:
    for step in path[:-1]:
        data = data[step]  # type: ignore[index]
    del data[path[-1]]  # type: ignore[arg-type]


def _set(data: dict[str, Any], value: Any, *path: str | int) -> None:
    for step in path[:-1]:
        data = data[step]  # type: ignore[index]
    data[path[-1]] = value  # type: ignore[index]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (("torch",), "field 'torch' is missing"),
        (("devices", 0, "warp_size"), r"devices\[0\]: field 'warp_size' is missing"),
        (("libraries", "flash_mla", "problem"), r"libraries.flash_mla: field 'problem' is missing"),
        (("libraries", "triton"), r"libraries: 'triton' is missing"),
    ],
)
def test_a_missing_field_is_named(path: tuple[str | int, ...], words: str) -> None:
    data = Platform.load("h200").to_json()
    _without(data, *path)
    with pytest.raises(Dsv41Error, match=words):
        Platform.from_json(data)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("gpus",), [], "unknown field 'gpus'"),
        (("devices", 0, "cores"), 1, r"devices\[0\]: unknown field 'cores'"),
        (("devices", 0, "memory_bytes"), "80 GB", r"devices\[0\].memory_bytes: expected int, found str '80 GB'"),
        (("devices", 0, "index"), True, "expected int, found bool"),
        (("devices",), {}, "devices: expected list, found dict"),
        (("torch", "cuda"), 13, "torch.cuda: expected str, found int"),
        (("libraries", "triton", "features"), [1], r"features\[0\]: expected str"),
        (("environment", "TRITON_INTERPRET"), 1, "environment.TRITON_INTERPRET: expected str"),
        (("notes",), None, "notes: expected list, found NoneType"),
    ],
)
def test_a_wrong_field_is_named(path: tuple[str | int, ...], value: Any, words: str) -> None:
    data = Platform.load("h200").to_json()
    _set(data, value, *path)
    with pytest.raises(Dsv41Error, match=words):
        Platform.from_json(data)


@pytest.mark.parametrize("data", [None, [], "h200", 3])
def test_json_of_another_shape_is_refused(data: Any) -> None:
    with pytest.raises(Dsv41Error, match="expected dict"):
        Platform.from_json(data)
