"""Every machine in ci/platforms: what each of its devices gets, typed by hand, and reasons a person can act on."""

import json

import pytest

from dsv41.hal.arch import ARCHS
from dsv41.hal.device import Platform, platform_names
from dsv41.hal.select import explain_backends
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
    "h200-broken-flashmla": ("flashmla", "library", "importing it fails with ImportError"),
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


def test_every_platform_has_its_expectation() -> None:
    assert platform_names() == sorted(INTENDED)


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
