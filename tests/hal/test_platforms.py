"""Every machine in ci/platforms: what each of its devices gets, typed by hand, and reasons a person can act on."""

import json
import warnings
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from dsv41.ci_matrix import MATRIX, load_jobs
from dsv41.hal.arch import ARCHS
from dsv41.hal.builtin import BUILTIN
from dsv41.hal.device import Library, Platform, platform_names
from dsv41.hal.select import SlowBackendWarning, explain_backends, select_backend
from dsv41.probe_cli import probe_report

# platform: what its GPUs are meant to get, in order; None where no GPU is there. The CPU gets the reference.
INTENDED = {
    "a100": ["portable"],
    "b200": ["flashmla-mega"],
    "b200-flashinfer": ["flashinfer-sm100"],
    "b200-old-flashmla": ["flashmla"],
    "cpu": [],
    "gb10": ["flashinfer-sm120"],
    "gb300": ["flashmla-mega"],
    "h100": ["flashmla"],
    "h100-cpu-torch": ["flashmla"],
    "h100-cuda12": ["portable"],
    "h100-old-driver": ["flashmla"],
    "h200": ["flashmla"],
    "h200-broken-flashmla": ["portable"],
    "h200-no-flashmla": ["portable"],
    "h200-torch-mismatch": ["portable"],
    "mi210": ["portable"],
    "mi300x": ["portable"],
    "mi300x-cuda-torch": ["portable"],
    "mi300x-foreign-aiter": ["portable"],
    "mi300x-no-kfd": ["portable"],
    "mi355x": ["aiter"],
    "mi355x-old-aiter": ["portable"],
    "mixed-h100-rtx5090": ["flashmla", "flashinfer-sm120"],
    "mixed-mi300x-mi355x": ["portable", "aiter"],
    "mixed-mi355x-mi300x": ["aiter", "portable"],
    "mixed-rtx5090-h100": ["flashinfer-sm120", "flashmla"],
    "mixed-v100-a100": ["reference", "portable"],
    "rocm-torch-no-gpu": [],
    "rtx5090": ["flashinfer-sm120"],
    "rtx5090-flashinfer-mismatch": ["portable"],
    "rtx5090-old-flashinfer": ["flashinfer-sm120"],
    "rx9070": ["portable"],
    "unlisted-gfx": ["portable"],
}
CONTAINED = {"aiter", "flashinfer-sm100", "flashinfer-sm120", "flashmla", "flashmla-mega", "portable", "reference"}
"""What is part of this version."""
UNREACHABLE = {"h100-cpu-torch", "h100-old-driver", "mi300x-cuda-torch", "mi300x-no-kfd"}
# platform: (backend, class, words): what the broken part says, and to whom.
SAYS = {
    "b200-old-flashmla": ("flashmla-mega", "library", "mega (in builds from 20260910)"),
    "h100-cpu-torch": ("flashmla", "platform", "torch 2.14.0+cpu is a CPU build and cannot use this CUDA device"),
    "h100-cuda12": ("flashmla", "library", "need a torch built for CUDA 13; torch 2.14.0+cu126 is built for CUDA 12.6"),
    "h100-old-driver": ("portable", "platform", "NVIDIA driver 535.183.01 is too old for torch 2.14.0+cu130"),
    "h200-broken-flashmla": ("flashmla", "library", "it was built for another torch than this one. Mend it with `pip"),
    "h200-no-flashmla": ("flashmla", "library", "flash_mla is not installed: `pip install -U tokenspeed-flashmla`"),
    "h200-torch-mismatch": ("flashmla", "library", "it was built for torch 2.14.0, this is 2.13.0+cu130"),
    "mi210": ("aiter", "arch", "built for gfx942, gfx950; cuda:0 is gfx90a"),
    "mi300x": ("aiter", "dtype", "does not read 'auto' on gfx942"),
    "mi300x-cuda-torch": ("portable", "platform", "is a CUDA build and cannot use this ROCm device"),
    "mi300x-foreign-aiter": ("aiter", "library", "is another package of that name"),
    "mi300x-no-kfd": ("portable", "platform", "`--device=/dev/kfd --device=/dev/dri`"),
    "mi355x-old-aiter": ("aiter", "library", "aiter 0.1.7.post2.dev18 does not have what is needed: sparse_mla"),
    "mixed-v100-a100": ("portable", "platform", "torch 2.14.0+cu130 has no kernels for sm_70"),
    "rtx5090-flashinfer-mismatch": ("flashinfer-sm120", "library", "flashinfer-cubin 0.6.13"),
    "rx9070": ("aiter", "arch", "built for gfx942, gfx950; cuda:0 is gfx1201"),
    "unlisted-gfx": ("aiter", "arch", "which is in no table of this package"),
}

NEW_FLASHMLA = Library(True, "1.0.0.post20260924", frozenset({"record-v4", "mega", "sm_90a", "sm_100a"}))
OLD_FLASHMLA = Library(True, "1.0.0.post20260810", frozenset({"record-v4", "sm_90a", "sm_100f"}))
FLASHINFER_074 = Platform.load("b200-flashinfer").library("flashinfer")
INSTALL_FLASHMLA, INSTALL_FLASHINFER = "`pip install -U tokenspeed-flashmla`", "`pip install -U flashinfer-python`"


class Changed(NamedTuple):
    """A platform with other libraries: what is meant for it then, why not `better`, and the command that mends it."""

    platform: str
    libraries: dict[str, Library]
    intended: str
    better: str
    words: str
    command: str = INSTALL_FLASHMLA


NOTHING = {"flash_mla": Library(), "flashinfer": Library()}
CHANGED = {
    "A100 with FlashMLA": Changed("a100", {"flash_mla": NEW_FLASHMLA}, "portable", "flashmla", "sm_90a", "use another"),
    "H200, the first FlashMLA": Changed(
        "h200",
        {"flash_mla": Library(True, "1.0.0.post20251110")},
        "portable",
        "flashmla",
        "post20251110 does not have what is needed: record-v4 (in builds from 20260429)",
    ),
    "B200 with nothing": Changed("b200", NOTHING, "portable", "flashmla-mega", "flash_mla is not installed"),
    "B200, FlashMLA for SM90": Changed(
        "b200",
        {**NOTHING, "flash_mla": replace(NEW_FLASHMLA, features=NEW_FLASHMLA.features - {"sm_100a"})},
        "portable",
        "flashmla-mega",
        "was built for sm_90a, which does not run on sm_100",
    ),
    "B200, old FlashMLA and FlashInfer": Changed(
        "b200", {"flash_mla": OLD_FLASHMLA}, "flashmla", "flashmla-mega", "mega (in builds from 20260910)"
    ),
    "GB300 with FlashInfer": Changed(
        "gb300", {"flash_mla": Library()}, "flashinfer-sm100", "flashmla-mega", "flash_mla is not installed"
    ),
    "GB300 with nothing": Changed(
        "gb300", NOTHING, "portable", "flashinfer-sm100", "flashinfer is not installed", INSTALL_FLASHINFER
    ),
    "RTX 5090 with nothing": Changed(
        "rtx5090", NOTHING, "portable", "flashinfer-sm120", "flashinfer is not installed", INSTALL_FLASHINFER
    ),
    "GB10, older FlashInfer": Changed(
        "gb10",
        {"flashinfer": Library(True, "0.6.13")},
        "portable",
        "flashinfer-sm120",
        "flashinfer 0.6.13 does not have what is needed: sparse-mla (in 0.6.18)",
        INSTALL_FLASHINFER,
    ),
    "GB10, broken FlashInfer": Changed(
        "gb10",
        {"flashinfer": replace(FLASHINFER_074, problem="importing it fails with ModuleNotFoundError: tvm_ffi")},
        "portable",
        "flashinfer-sm120",
        "flashinfer cannot be used: importing it fails with ModuleNotFoundError: tvm_ffi",
        INSTALL_FLASHINFER,
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_another_library_changes_what_is_meant_and_says_how_to_change_it_back(case: str) -> None:
    changed = CHANGED[case]
    platform = Platform.load(changed.platform)
    for library, facts in changed.libraries.items():
        platform = platform.with_library(library, facts)
    report = explain_backends(platform=platform, device="cuda:0")
    assert report.intended == report.chosen == changed.intended
    reasons = report.candidate(changed.better).reasons
    assert any(changed.words in reason.text and changed.command in reason.text for reason in reasons), reasons


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("b200", "nvfp4_ds_mla"),
        ("gb300", "nvfp4_ds_mla"),
        ("b200-old-flashmla", "fp8_ds_mla"),
        ("b200-flashinfer", "fp8_e4m3"),
        ("h200", "fp8_ds_mla"),
        ("rtx5090", "fp8_ds_mla"),
        ("h200-no-flashmla", "nvfp4_ds_mla"),
    ],
)
def test_what_auto_becomes(name: str, record: str) -> None:
    (spec,) = (spec for spec in BUILTIN if spec.name == INTENDED[name][0])
    assert spec.packed_kv_cache_dtype == record


def test_an_h200_without_flashmla_says_once_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv41.hal.select._require_present", lambda *_: None)
    monkeypatch.setattr("dsv41.hal.select._warned", set())
    monkeypatch.setattr("dsv41.hal.registry.load", lambda spec: lambda **_: SimpleNamespace())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            report = select_backend(platform=Platform.load("h200-no-flashmla")).selection
    assert report is not None
    assert report.chosen == "portable"
    (warning,) = caught
    assert issubclass(warning.category, SlowBackendWarning)
    assert "flashmla: flash_mla is not installed: `pip install -U tokenspeed-flashmla`" in str(warning.message)


def test_every_platform_has_its_expectation() -> None:
    """By hand above, or as the backend of a line in the matrix of CI, which is all that a new arch needs."""
    played = {job.platform for job in load_jobs(Path(__file__).parents[2] / MATRIX) if job.mode == "play-back"}
    assert INTENDED.keys() <= set(platform_names()) <= INTENDED.keys() | played


@pytest.mark.parametrize("name", INTENDED)
def test_each_device_gets_what_is_meant_for_it(name: str) -> None:
    report = probe_report(Platform.load(name))
    keys = [device["key"] for device in report["devices"]]
    assert keys[-1] == "cpu"
    assert [report["intended"][key] for key in keys] == [*INTENDED[name], "reference"]
    unreachable = len(INTENDED[name]) if name in UNREACHABLE else 1 if name == "mixed-v100-a100" else 0
    chosen = [report["chosen"][key] for key in keys]
    here = [wanted if wanted in CONTAINED else "portable" for wanted in INTENDED[name][unreachable:]]
    assert chosen == [None] * unreachable + here + ["reference"]


@pytest.mark.parametrize("name", INTENDED)
def test_every_reason_says_what_to_do(name: str) -> None:
    actions = (
        "install",
        "use ",
        "ask for",
        "update",
        "upgrade",
        "start ",
        "unset",
        "reinstall",
        "another",
        "build from",
    )
    report = probe_report(Platform.load(name))
    for backend, devices in report["backends"].items():
        assert list(devices) == [device["key"] for device in report["devices"]]
        for key, judgement in devices.items():
            assert judgement["usable"] == (judgement["reasons"] == [])
            assert judgement["usable"] or backend != report["chosen"][key]
            for reason in judgement["reasons"]:
                assert set(reason) == {"class", "text"}
                assert any(action in reason["text"] for action in actions), reason


@pytest.mark.parametrize("name", SAYS)
def test_what_is_broken_says_so(name: str) -> None:
    backend, cls, words = SAYS[name]
    reasons = explain_backends(platform=Platform.load(name), device="cuda:0").candidate(backend).reasons
    assert any(reason.cls == cls and words in reason.text for reason in reasons), reasons


@pytest.mark.parametrize("name", INTENDED)
def test_a_device_has_the_facts_of_its_arch(name: str) -> None:
    for gpu in Platform.load(name).gpus:
        assert gpu.memory_bytes > 8 * 1024**3
        if facts := ARCHS.get(gpu.arch):
            assert (gpu.warp_size, gpu.fp8_dialect) == (facts.warp_size, facts.fp8_dialect)
            assert gpu.shared_memory_bytes == facts.shared_memory_bytes


@pytest.mark.parametrize("name", sorted(UNREACHABLE | {"mixed-v100-a100", "rocm-torch-no-gpu", "unlisted-gfx"}))
def test_a_broken_machine_says_so_in_a_note(name: str) -> None:
    platform = Platform.load(name)
    assert platform.notes
    assert platform.torch.problem in (None, *platform.notes)


@pytest.mark.parametrize("name", [name for name in INTENDED if len(INTENDED[name]) > 1])
def test_the_order_of_devices_changes_nothing(name: str) -> None:
    platform = Platform.load(name)
    for order in permutations(platform.gpus):
        gpus = tuple(replace(gpu, index=index) for index, gpu in enumerate(order))
        shuffled = replace(platform, devices=(*gpus, platform.devices[-1]))
        for before, after in zip(order, gpus, strict=True):
            reports = [explain_backends(platform=platform, device=before)]
            reports.append(explain_backends(platform=shuffled, device=after))
            assert reports[0].chosen == reports[1].chosen
            assert reports[0].intended == reports[1].intended


def test_mixed_nodes_are_the_same_in_either_order() -> None:
    for one, other in (("mixed-h100-rtx5090", "mixed-rtx5090-h100"), ("mixed-mi300x-mi355x", "mixed-mi355x-mi300x")):
        reports = [
            {device.arch: explain_backends(platform=platform, device=device).intended for device in platform.devices}
            for platform in map(Platform.load, (one, other))
        ]
        assert reports[0] == reports[1]


def test_on_mi300x_fp8_asks_for_aiter() -> None:
    assert explain_backends(platform=Platform.load("mi300x"), kv_cache_dtype="fp8").intended == "aiter"


def test_v41_records_need_a_new_enough_flashinfer() -> None:
    report = explain_backends(platform=Platform.load("rtx5090-old-flashinfer"), kv_cache_dtype="nvfp4_ds_mla")
    assert report.intended == "portable"
    assert "record-nvfp4 (in 0.7.1)" in report.candidate("flashinfer-sm120").reasons[0].text
    assert (
        explain_backends(platform=Platform.load("gb10"), kv_cache_dtype="nvfp4_ds_mla").intended == "flashinfer-sm120"
    )


def test_the_output_of_a_probe_can_be_played_back() -> None:
    report = json.loads(json.dumps(probe_report(Platform.load("mixed-h100-rtx5090"))))
    assert probe_report(Platform.from_json(report)) == report
