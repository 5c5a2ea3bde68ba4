"""Which backend is picked, by whom, and what is said of the others."""

import itertools
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import dsv41
from dsv41.errors import BackendError, ConfigError, Dsv41Error, LayoutError
from dsv41.hal import select as select_module
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.builtin import BUILTIN, REFERENCE
from dsv41.hal.device import LIBRARIES, Device, Library, Platform, TorchBuild
from dsv41.hal.registry import BackendSpec, register, unregister
from dsv41.hal.report import SelectionReport
from dsv41.hal.request import INDEX_CACHE_DTYPES, KV_CACHE_DTYPES, Reason
from dsv41.hal.select import SlowBackendWarning, explain_backends, select_backend
from dsv41.hal.types import Geometry

# Everything installed, as new as it is known
FLASH_MLA = frozenset(
    {"record-v4", "record-v41", "record-nvfp4", "placement-page", "mega", "sm_90a", "sm_100a", "sm_103a"}
)
FLASHINFER = frozenset({"sparse-mla", "small-heads", "record-v4", "record-v41", "record-nvfp4", "placement-token"})
EVERYTHING = {
    "flash_mla": Library(True, "1.0.0.post20260924", FLASH_MLA),
    "flashinfer": Library(True, "0.7.4", FLASHINFER),
    "aiter": Library(True, "0.1.21", frozenset({"sparse_mla", "pa_decode_sparse", "shuffle_weight"})),
    "triton": Library(True, "3.9.0"),
}
CUDA = TorchBuild("2.14.0+cu130", cuda="13.0")
ROCM = TorchBuild("2.14.0+rocm7.1", hip="7.1.5")


def machine(*archs: str, environment: dict[str, str] | None = None, **libraries: Library) -> Platform:
    """A machine with these GPUs and, unless said otherwise, no library."""
    return Platform(
        devices=(*(Device.gpu(arch, index) for index, arch in enumerate(archs)), Device.cpu()),
        torch=ROCM if archs and archs[0].startswith("gfx") else CUDA,
        libraries={**{name: Library() for name in LIBRARIES}, **libraries},
        environment=environment or {},
    )


def full(*archs: str) -> Platform:
    return machine(*archs, **EVERYTHING)


class Model:
    """Anything with a geometry is a model."""

    def __init__(self, **shape: Any) -> None:
        self.geometry = Geometry(**shape)


MODELS = {
    8: (Model(), 8),
    64: (Model(), 1),
    128: (Model(num_heads=128, o_groups=16), 1),
    256: (Model(num_heads=256, o_groups=32), 1),
}


def classes(report: SelectionReport, name: str) -> set[str]:
    return {reason.cls for reason in report.candidate(name).reasons}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend in the environment, nothing warned of yet."""
    monkeypatch.delenv("DSV41_BACKEND", raising=False)
    monkeypatch.setattr(select_module, "_warned", set())


def _no_layouts(self: Any, kv: str, index: str) -> tuple[str, str, None]:
    if kv == "bfloat16":
        raise LayoutError("the double reads no bfloat16")
    return kv, index, None


Double = type(
    "Double",
    (AttentionBackend,),
    {
        **{name: lambda self, *args: None for name in AttentionBackend.__abstractmethods__},
        "resolve_layouts": _no_layouts,
        "name": "double",
    },
)


@pytest.fixture
def double() -> Iterator[Any]:
    """Register backends made of the double class, with whatever spec a test wants."""
    module = types.ModuleType("dsv41_test_double")
    module.Double = Double  # type: ignore[attr-defined]
    sys.modules["dsv41_test_double"] = module
    names: list[str] = []

    def make(name: str = "double", **fields: Any) -> BackendSpec:
        given = {"target": "dsv41_test_double:Double", "priority": 99, "slow_on_gpu": False, **fields}
        spec = replace(REFERENCE, name=name, **given)
        register(spec)
        names.append(name)
        return spec

    yield make
    for name in names:
        unregister(name)
    del sys.modules["dsv41_test_double"]


# What each device gets, typed from the vendors' documents. Columns are kv_cache_dtype; 64 heads, decode and prefill.
# FlashMLA: sm_90a and sm_100 family, packed. Mega: sm_100 and sm_103. FlashInfer: SM100 plain rows, SM120 packed.
# aiter: gfx950 packed in place and plain, gfx942 plain fnuz rows where asked for fp8. Portable: the rest.
TABLE = """
arch      auto              fp8               fp8_ds_mla        nvfp4_ds_mla      bfloat16          fp8_e4m3
sm_80     portable          portable          portable          portable          portable          portable
sm_89     portable          portable          portable          portable          portable          portable
sm_90     flashmla          flashmla          flashmla          portable          portable          portable
sm_100    flashmla-mega     flashmla-mega     flashmla-mega     flashmla-mega     flashinfer-sm100  flashinfer-sm100
sm_103    flashmla-mega     flashmla-mega     flashmla-mega     flashmla-mega     flashinfer-sm100  flashinfer-sm100
sm_110    portable          portable          portable          portable          portable          portable
sm_120    flashinfer-sm120  flashinfer-sm120  flashinfer-sm120  flashinfer-sm120  portable          portable
sm_121    flashinfer-sm120  flashinfer-sm120  flashinfer-sm120  flashinfer-sm120  portable          portable
gfx90a    portable          portable          portable          portable          portable          portable
gfx942    portable          aiter             portable          portable          portable          aiter
gfx950    aiter             aiter             aiter             portable          aiter             aiter
gfx1100   portable          portable          portable          portable          portable          portable
gfx1151   portable          portable          portable          portable          portable          portable
gfx1201   portable          portable          portable          portable          portable          portable
gfx1250   portable          portable          portable          portable          portable          portable
cpu       reference         reference         reference         reference         reference         reference
"""
CONTAINED = {"aiter", "flashinfer-sm100", "flashinfer-sm120", "flashmla", "flashmla-mega", "portable", "reference"}
"""What is part of this version; the others are planned."""


def _expected(dtype: str, heads: int, base: str) -> str:
    if dtype == "float32":
        base = "portable"
    return base if heads <= 128 else "reference"  # where all kernels end


def _rows() -> list[tuple[str, str, str]]:
    header, *lines = TABLE.split("\n")[1:-1]
    dtypes = header.split()[1:]
    return [
        (arch, dtype, want)
        for arch, *wanted in map(str.split, lines)
        for dtype, want in zip(dtypes, wanted, strict=True)
    ]


@pytest.mark.parametrize(
    ("arch", "dtype", "base"), [*_rows(), *((arch, "float32", "") for arch in ("sm_90", "gfx950"))]
)
def test_fr_01_what_each_device_gets(arch: str, dtype: str, base: str) -> None:
    platform = full() if arch == "cpu" else full(arch)
    for phase, heads in itertools.product(("decode", "prefill", "verify", "draft"), MODELS):
        model, tp_size = MODELS[heads]
        report = explain_backends(
            platform=platform, config=model, tp_size=tp_size, kv_cache_dtype=dtype, phases=(phase,)
        )
        intended = _expected(dtype, heads, base)
        assert report.intended == intended, (phase, heads)
        usable = [candidate.name for candidate in report.candidates if candidate.usable]
        assert report.chosen == (intended if intended in CONTAINED else usable[0]), (phase, heads)
        assert set(usable) <= CONTAINED


def test_what_is_contained_is_what_has_a_class() -> None:
    assert {spec.name for spec in BUILTIN if spec.target} == CONTAINED


def test_fr_01_the_table_covers_every_format_and_the_reports_archs() -> None:
    header, *lines = TABLE.split("\n")[1:-1]
    assert {*header.split()[1:], "fp8_ds_mla_v4", "float32"} == set(KV_CACHE_DTYPES)
    wanted = (
        "sm_80 sm_89 sm_90 sm_100 sm_103 sm_110 sm_120 sm_121 gfx90a gfx942 gfx950 gfx1100 gfx1151 gfx1201 gfx1250 cpu"
    )
    assert [line.split()[0] for line in lines] == wanted.split()


def test_fr_02_every_unmet_requirement_is_listed_at_once() -> None:
    report = explain_backends(platform=machine("sm_121"), config=MODELS[256][0], kv_cache_dtype="bfloat16")
    assert classes(report, "flashmla") == {"arch", "dtype", "shape", "library"}
    assert classes(report, "flashmla-mega") == {"arch", "dtype", "shape", "library"}
    assert classes(report, "flashinfer-sm120") == {"dtype", "shape", "library"}
    assert classes(report, "aiter") == {"arch", "shape", "library"}


def test_fr_03_a_forced_backend_is_refused_with_reasons_and_an_alternative() -> None:
    with pytest.raises(BackendError) as caught:
        select_backend("flashmla", platform=full("sm_121"))
    text = str(caught.value)
    assert "backend 'flashmla' cannot run on cuda:0 (GB10, sm_121) with 64 heads a rank" in text
    assert "built for sm_90a, sm_100f" in text
    assert "What can run this here: flashinfer-sm120, portable, reference." in text


def test_fr_03_the_nearest_thing_may_be_a_format_or_a_device(double: Any) -> None:
    double(requirements=(), kv_cache_dtypes=("fp8_ds_mla",), packed_kv_cache_dtype="fp8_ds_mla")
    with pytest.raises(BackendError, match="It would run here with kv_cache_dtype='fp8_ds_mla'"):
        select_backend("double", device="cpu", kv_cache_dtype="nvfp4_ds_mla", platform=machine())
    double("gpu-only", requirements=(lambda d, p, r: None if d.arch == "sm_120" else Reason("arch", "no"),))
    with pytest.raises(BackendError, match=r"It would run on device 'cuda:1' \(RTX 50, RTX PRO\)"):
        select_backend("gpu-only", platform=machine("sm_90", "sm_120"))


def test_fr_04_a_report_starts_with_the_inputs_and_says_nothing_twice() -> None:
    report = explain_backends(platform=machine("sm_90"))
    lines = str(report).splitlines()
    assert lines[0] == "device    cuda:0: H100, H200, sm_90"
    assert lines[1].startswith("request   64 heads a rank (tp_size 1), head_dim 512, window 128, top-k 512")
    for candidate in report.candidates:
        texts = [reason.text for reason in candidate.reasons]
        assert len(set(texts)) == len(texts)
        for text in texts:
            assert text in str(report)


def test_fr_05_an_older_build_is_judged_by_its_own_targets() -> None:
    old = {**EVERYTHING, "flash_mla": Library(True, "1.0.0.post20260910", FLASH_MLA - {"sm_103a"})}
    report = explain_backends(platform=machine("sm_103", **old))
    assert "was built for sm_100a, sm_90a, which does not run on sm_103" in str(
        report.candidate("flashmla-mega").reasons[0]
    )
    assert report.intended == "flashinfer-sm100"


def test_fr_07_the_real_shape_is_judged_before_anything_is_loaded() -> None:
    wide = explain_backends(platform=full("sm_120"), config=Model(topk=1152))
    (reason, *_) = wide.candidate("flashinfer-sm120").reasons
    assert reason.cls == "shape"
    assert "no kernel for top-k 1152, only for index widths 128, 192, 256, 512, 1024" in reason.text
    assert wide.intended == "portable"
    assert explain_backends(platform=full("sm_120"), config=Model(topk=1024)).intended == "flashinfer-sm120"


def test_fr_09_every_phase_is_judged_or_nothing_is(double: Any) -> None:
    from dsv41.hal.requirements import phase

    double(requirements=(phase("prefill"),))
    with pytest.raises(BackendError, match="has no kernel for decode"):
        select_backend("double", device="cpu", platform=machine())
    assert select_backend("double", device="cpu", phases=("prefill",), platform=machine()).name == "double"
    assert select_backend(device="cpu", platform=machine()).selection.chosen == "reference"  # type: ignore[union-attr]


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A played-back device is taken for one of this machine, and what would run there for an object."""
    monkeypatch.setattr(select_module, "_require_present", lambda *_: None)
    monkeypatch.setattr(select_module.registry, "load", lambda spec: lambda **_: types.SimpleNamespace())


def selected(platform: Platform, **arguments: Any) -> SelectionReport:
    backend: Any = select_backend(platform=platform, **arguments)
    report: SelectionReport = backend.selection
    return report


@pytest.mark.usefixtures("anywhere")
def test_fr_10_the_reference_is_always_a_candidate_and_announced_once() -> None:
    platform, wide = machine("gfx1151", triton=Library(True, "3.9.0")), {"config": MODELS[256][0]}
    with pytest.warns(SlowBackendWarning, match="reference runs on Ryzen AI Max, slowly: .* nothing faster for it"):
        report = selected(platform, **wide)
    assert report.chosen == "reference"
    assert all(not candidate.usable for candidate in report.candidates[:-1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selected(platform, **wide)


@pytest.mark.usefixtures("anywhere")
def test_fr_10_the_reference_on_a_gpu_names_what_brings_the_portable_kernels() -> None:
    with pytest.warns(SlowBackendWarning, match=r"reference is not the fastest .* portable: triton is not installed"):
        assert selected(machine("gfx1151")).chosen == "reference"


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("libraries", [EVERYTHING, {"triton": EVERYTHING["triton"]}], ids=["all there", "Triton alone"])
@pytest.mark.parametrize(("arch", "best"), [("sm_80", "portable"), ("gfx942", "double")])
def test_portable_warns_of_nothing_that_this_version_does_not_contain(
    arch: str, best: str, libraries: dict[str, Library], caplog: pytest.LogCaptureFixture, double: Any
) -> None:
    """The log line and the report name what the device is meant to get; installing it would change nothing yet."""
    from dsv41.hal.requirements import vendor

    double(target=None, requirements=(vendor("amd"),))
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, logger="dsv41"):
        warnings.simplefilter("error")
        report = selected(machine(arch, **libraries))
    assert (report.chosen, report.intended) == ("portable", best)
    assert report.is_stopgap == (best != "portable") == ("once dsv41 contains it" in caplog.text)
    [planned] = [reason for reason in report.candidate("double").reasons if reason.cls == "planned"]
    assert any(word in planned.text for word in ADVICE["planned"])


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    ("arch", "best"),
    [
        ("sm_90", "flashmla"),
        ("sm_100", "flashmla-mega"),
        ("sm_120", "flashinfer-sm120"),
        ("gfx950", "aiter"),
    ],
)
def test_a_vendors_backend_runs_where_its_library_is_and_is_asked_for_where_it_is_not(arch: str, best: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = selected(full(arch))
    assert report.chosen == best
    assert not report.is_stopgap
    with pytest.warns(
        SlowBackendWarning,
        match=rf"portable is not the fastest .* {best}: (flash_mla|flashinfer|aiter) is not installed",
    ):
        assert selected(machine(arch, triton=EVERYTHING["triton"])).chosen == "portable"


@pytest.mark.usefixtures("anywhere")
def test_portable_says_so_where_something_better_could_be_installed(double: Any) -> None:
    from dsv41.hal.requirements import library, vendor

    needs = (vendor("nvidia"), library("flash_mla", install="`pip install -U tokenspeed-flashmla`"))
    double(requirements=needs)
    platform = machine("sm_90", triton=EVERYTHING["triton"])
    with pytest.warns(SlowBackendWarning, match=r"portable is not the fastest backend for H100, H200. double: flash_"):
        selected(platform)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selected(platform)
        selected(machine("gfx942", triton=EVERYTHING["triton"]))


def test_fr_11_each_op_of_a_library_is_judged_by_itself() -> None:
    one_op = Library(True, "0.1.21", frozenset({"pa_decode_sparse"}))
    report = explain_backends(platform=machine("gfx950", aiter=one_op))
    (reason, *_) = report.candidate("aiter").reasons
    assert "does not have what is needed: sparse_mla" in reason.text
    assert "pa_decode_sparse" not in reason.text
    report = explain_backends(platform=machine("gfx1201", aiter=one_op))
    assert [r.cls for r in report.candidate("aiter").reasons] == ["arch", "library"]


@pytest.mark.parametrize("arch", ["gfx90a", "gfx9999", "gfx1310", "sm_70", "sm_75", "sm_130"])
def test_fr_12_an_old_or_unlisted_arch_is_explained(arch: str) -> None:
    report = explain_backends(platform=full(arch))
    wanted = "reference" if arch in ("sm_70", "sm_75") else "portable"
    assert (report.chosen, report.intended) == (wanted, wanted)
    if wanted == "reference":
        assert "needs sm_80 or newer" in report.candidate("portable").reasons[0].text
    (reason, *_) = report.candidate("aiter").reasons
    assert reason.cls == "arch"
    assert ("which is in no table of this package" in reason.text) == (arch != "gfx90a")


def test_fr_14_capability_is_that_of_the_device_asked_for() -> None:
    for archs in (("sm_90", "sm_120"), ("sm_120", "sm_90")):
        platform = full(*archs)
        wanted = {"sm_90": "flashmla", "sm_120": "flashinfer-sm120"}
        for index, arch in enumerate(archs):
            assert explain_backends(platform=platform, device=f"cuda:{index}").intended == wanted[arch]


def test_fr_69_what_padding_costs_is_said() -> None:
    report = explain_backends(platform=full("sm_100"), tp_size=8)
    assert report.candidate("flashmla").remarks == ("pads 8 heads to 64: attention costs as much as for 64",)
    assert "pads 8 heads to 64" in str(report)
    [few] = explain_backends(platform=full("sm_90"), tp_size=4).candidate("flashmla").remarks
    assert few.startswith("has a kernel for 16 heads with cuda-core and NVRTC installed; without them, pads 16 heads")
    [more] = explain_backends(platform=full("sm_90"), tp_size=2).candidate("flashmla").remarks
    assert more.startswith("has a kernel for 32 heads")
    assert "pads 32 heads to 64" in more
    assert explain_backends(platform=full("sm_120"), tp_size=8).candidate("flashinfer-sm120").remarks == ()


@pytest.mark.parametrize(("version", "small", "padded"), [("0.6.13", False, "64"), ("0.6.14", True, "")])
def test_fr_70_flashinfer_takes_few_heads_since_0_6_14(version: str, small: bool, padded: str) -> None:
    features = frozenset({"sparse-mla", "small-heads"} if small else {"sparse-mla"})
    platform = machine("sm_100", flashinfer=Library(True, version, features))
    candidate = explain_backends(platform=platform, tp_size=8, kv_cache_dtype="bfloat16").candidate("flashinfer-sm100")
    assert candidate.only("planned")
    assert [remark for remark in candidate.remarks if f"to {padded}" in remark] == list(candidate.remarks)
    assert bool(candidate.remarks) == bool(padded)


def test_fr_77_a_topology_that_the_fused_kernel_cannot_serve_falls_through_with_a_reason() -> None:
    with pytest.raises(ConfigError, match="tp_size 16 must divide"):
        explain_backends(platform=full("sm_100"), tp_size=16)
    report = explain_backends(platform=full("sm_100"), config=Model(num_heads=64, o_groups=4))
    (reason, *_) = report.candidate("flashmla-mega").reasons
    assert "64 heads in 4 groups make 16" in reason.text
    assert report.intended == "flashmla"


ARCHS = [row.split()[0] for row in TABLE.split("\n")[2:-1]]


@pytest.mark.parametrize("name", [spec.name for spec in BUILTIN])
@pytest.mark.parametrize("arch", ARCHS)
def test_fr_89_an_override_is_that_backend_or_an_explained_error(name: str, arch: str) -> None:
    platform = full() if arch == "cpu" else full(arch)
    report = explain_backends(name, platform=platform)
    assert report.chosen in (name, None)
    if report.chosen is None:
        assert report.candidate(name).reasons
        with pytest.raises(BackendError, match=f"backend '{name}' cannot run"):
            select_backend(name, platform=platform)


class TestWhoIsAsked:
    """Argument, then environment, then automatic; unknown names are errors."""

    platform = machine()

    def test_fr_108_nothing_asked(self) -> None:
        report = explain_backends(platform=self.platform)
        assert (report.chosen, report.source, report.asked) == ("reference", "automatic", None)

    def test_fr_108_the_environment_is_asked(self, monkeypatch: pytest.MonkeyPatch, double: Any) -> None:
        double()
        monkeypatch.setenv("DSV41_BACKEND", " Reference\n")
        report = explain_backends(platform=self.platform)
        assert (report.chosen, report.source, report.asked) == ("reference", "DSV41_BACKEND", "reference")

    def test_fr_108_the_argument_wins_over_the_environment(self, monkeypatch: pytest.MonkeyPatch, double: Any) -> None:
        double()
        monkeypatch.setenv("DSV41_BACKEND", "flashmla")
        report = explain_backends(" DOUBLE ", platform=self.platform)
        assert (report.chosen, report.source) == ("double", "argument")

    def test_fr_108_auto_as_argument_wins_as_well(self, monkeypatch: pytest.MonkeyPatch, double: Any) -> None:
        double()
        monkeypatch.setenv("DSV41_BACKEND", "reference")
        report = explain_backends("auto", platform=self.platform)
        assert (report.chosen, report.source) == ("double", "automatic")

    @pytest.mark.parametrize("value", ["", " ", "\t\n", "auto", "AUTO"])
    def test_fr_108_an_empty_variable_is_an_unset_one(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("DSV41_BACKEND", value)
        assert explain_backends(platform=self.platform).source == "automatic"

    @pytest.mark.parametrize("name", ["", " ", "flashmlaa", "flash_mla", "cuda", "none"])
    def test_fr_108_an_unknown_argument_is_an_error_that_lists_the_valid_names(self, name: str) -> None:
        with pytest.raises(BackendError, match=r"is unknown: .*use auto, flashmla-mega, .*portable, reference"):
            select_backend(name, platform=self.platform)

    def test_fr_108_a_near_miss_is_corrected(self) -> None:
        with pytest.raises(BackendError, match="'refrence' is unknown: did you mean 'reference'"):
            explain_backends("refrence", platform=self.platform)

    def test_fr_108_an_unknown_variable_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DSV41_BACKEND", "flashmal")
        with pytest.raises(BackendError, match="'flashmal' in DSV41_BACKEND is unknown: did you mean 'flashmla'"):
            explain_backends(platform=self.platform)

    def test_fr_108_an_unusable_variable_is_refused_and_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DSV41_BACKEND", "flashmla")
        with pytest.raises(BackendError, match="backend 'flashmla', which DSV41_BACKEND names, cannot run on cpu"):
            select_backend(platform=self.platform)


def test_fr_107_a_draft_obeys_the_same_override(monkeypatch: pytest.MonkeyPatch, double: Any) -> None:
    double()
    monkeypatch.setenv("DSV41_BACKEND", "reference")
    for phases in (("decode", "prefill"), ("draft",)):
        assert explain_backends(platform=machine(), phases=phases).chosen == "reference"


ADVICE = {
    "arch": ("another backend",),
    "platform": ("pip install", "update the driver", "start the container"),
    "library": ("pip install", "build from source", "reinstall", "upgrade"),
    "shape": ("tp_size", "another backend", "top-k"),
    "dtype": ("cache_dtype=",),
    "phase": ("phases=",),
    "switch": ("unset",),
    "planned": ("upgrade dsv41",),
    "bug": ("Report it", "report it"),
}


def test_fr_109_each_class_of_reason_has_its_advice() -> None:
    seen = set()
    machines = [full(), machine("sm_80", environment={"TRITON_INTERPRET": "1"}), machine("gfx90a"), full("sm_121")]
    machines += [full("gfx942"), replace(full("sm_90"), torch=TorchBuild("2.14.0+cpu")), full("sm_100")]
    for platform, dtype, (model, tp) in itertools.product(machines, KV_CACHE_DTYPES, MODELS.values()):
        asked = {"config": model, "tp_size": tp, "kv_cache_dtype": dtype, "phases": ("draft",)}
        report = explain_backends(platform=platform, device=platform.devices[0], **asked)
        for reason in (reason for candidate in report.candidates for reason in candidate.reasons):
            seen.add(reason.cls)
            assert any(word in reason.text for word in ADVICE[reason.cls]), reason
    assert seen == set(ADVICE) - {"bug", "phase", "planned"}, "every built-in backend is here and serves every phase"


def test_fr_109_no_advice_to_install_sounds_like_help_on_the_wrong_device() -> None:
    for reason in explain_backends(platform=machine("gfx90a")).candidate("aiter").reasons:
        if reason.cls == "library":
            assert reason.text.endswith("This alone does not help here")


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120", "gfx942", "gfx950"])
def test_fr_110_every_combination_is_accepted_or_refused(arch: str) -> None:
    for kv, index, spec in itertools.product(KV_CACHE_DTYPES, INDEX_CACHE_DTYPES, BUILTIN):
        report = explain_backends(spec.name, platform=full(arch), kv_cache_dtype=kv, index_cache_dtype=index)
        candidate = report.candidate(spec.name)
        assert candidate.usable == (report.chosen == spec.name)
        assert candidate.usable or candidate.reasons


def test_fr_111_a_check_that_raises_is_a_bug_of_that_backend(double: Any) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("gfx1310")

    double(requirements=(broken,))
    report = explain_backends(platform=machine())
    (reason,) = report.candidate("double").reasons
    assert reason.cls == "bug"
    assert "one of its checks fails with KeyError: 'gfx1310'. Report it to the author of double" in reason.text
    assert report.chosen == "reference"


def test_fr_111_a_check_that_answers_nonsense_is_a_bug_too(double: Any) -> None:
    double(requirements=(lambda *_: "no",))
    (reason,) = explain_backends(platform=machine()).candidate("double").reasons
    assert reason.cls == "bug"
    assert "it answers 'no' where a Reason or None is due" in reason.text


# Formats


@pytest.mark.parametrize(
    ("name", "arch", "dtype", "reads", "readers"),
    [
        ("flashmla", "sm_90", "bfloat16", "fp8_ds_mla", "aiter, flashinfer-sm100, portable, reference"),
        ("flashmla", "sm_90", "nvfp4_ds_mla", "fp8_ds_mla", "flashmla-mega, flashinfer-sm120, portable, reference"),
        ("flashinfer-sm100", "sm_100", "fp8_ds_mla", "bfloat16, fp8_e4m3", "flashmla-mega, aiter, flashinfer-sm120"),
        ("flashinfer-sm120", "sm_120", "fp8_e4m3", "fp8_ds_mla, nvfp4_ds_mla", "aiter, flashinfer-sm100, portable"),
        ("flashmla", "sm_90", "float32", "fp8_ds_mla", "portable, reference"),
    ],
)
def test_a_format_that_a_backend_cannot_read_is_refused_with_those_that_can(
    name: str, arch: str, dtype: str, reads: str, readers: str
) -> None:
    reasons = explain_backends(platform=full(arch), kv_cache_dtype=dtype).candidate(name).reasons
    (text,) = [reason.text for reason in reasons if reason.cls == "dtype"]
    assert f"does not read {dtype!r} on {arch}, only {reads}" in text
    assert f"or use a backend that reads it: {readers}" in text


def test_on_gfx942_auto_is_portable_and_the_reason_says_how_to_get_aiter() -> None:
    (reason, *_) = explain_backends(platform=full("gfx942")).candidate("aiter").reasons
    assert "does not read 'auto' on gfx942, only fp8_e4m3, fp8: ask for kv_cache_dtype='fp8_e4m3'" in reason.text


def test_unquantised_caches_are_no_vendors() -> None:
    report = explain_backends(platform=full("sm_90"), index_cache_dtype="float32")
    assert (report.chosen, report.intended) == ("portable", "portable")
    assert "dtype" in classes(report, "flashmla")


# Arguments of the wrong type


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"name": 3}, BackendError, "backend 3 is unknown.*use auto"),
        ({"config": "release"}, ConfigError, "config is 'release': expected .*geometry"),
        ({"platform": "h200"}, BackendError, r"platform is 'h200': expected a Platform; pass Platform.load\('h200'\)"),
        ({"phases": 3}, BackendError, "phases is 3: expected a list.*decode"),
        ({"phases": [3]}, BackendError, "phase 3 is unknown"),
        ({"tp_size": 2.0}, ConfigError, "tp_size 2.0 must divide .* use one of 1, 2, 4, 8"),
        ({"tp_size": True}, ConfigError, "tp_size True must divide"),
        ({"tp_size": 0}, ConfigError, "tp_size 0 must divide"),
        ({"tp_size": -1}, ConfigError, "tp_size -1 must divide"),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments: dict[str, Any], error: type[Dsv41Error], words: str) -> None:
    with pytest.raises(error, match=words):
        select_backend(**{"device": "cpu", "platform": machine(), **arguments})


@pytest.mark.timeout(20)
def test_a_huge_model_is_judged_at_once() -> None:
    report = explain_backends(platform=machine(), config=Model(num_heads=2**40, o_groups=8), tp_size=8)
    assert report.chosen == "reference"


# Devices


@pytest.mark.parametrize("device", ["cuda:1", "cuda:7", "mps", "xpu:0", "gpu"])
def test_an_unknown_device_is_refused_with_those_there_are(device: str) -> None:
    with pytest.raises(Dsv41Error, match=r"is not on this platform: use one of cuda:0 \(H100, H200\), cpu"):
        select_backend(device=device, platform=machine("sm_90"))


def test_devices_may_be_named_in_any_way() -> None:
    import torch

    platform = machine("sm_90", "sm_120")
    for device in ("cuda:1", torch.device("cuda:1"), platform.devices[1]):
        assert explain_backends(device=device, platform=platform).device.arch == "sm_120"
    assert explain_backends(device="cuda", platform=platform).device.key == "cuda:0"
    assert explain_backends(platform=platform).device.key == "cuda:0"


def test_a_device_that_torch_cannot_use_gets_nothing_and_says_what_it_would_get() -> None:
    platform = replace(full("sm_90"), torch=TorchBuild("2.14.0+cpu"))
    report = explain_backends(platform=platform, device="cuda:0")
    assert (report.chosen, report.intended) == (None, "flashmla")
    with pytest.raises(BackendError, match="no backend can run on cuda:0"):
        select_backend(platform=platform, device="cuda:0")
    assert explain_backends(platform=platform).device.key == "cpu"


def test_running_on_the_cpu_beside_an_unreachable_gpu_is_announced() -> None:
    platform = replace(full("sm_90"), torch=TorchBuild("2.14.0+cpu"))
    with pytest.warns(
        SlowBackendWarning, match="running on the CPU although H100, H200 is here: torch 2.14.0.cpu is a CPU"
    ):
        assert select_backend(platform=platform).selection.device.key == "cpu"  # type: ignore[union-attr]


@pytest.mark.parametrize("value", ["", "-1"])
def test_gpus_hidden_on_purpose_are_not_announced(value: str) -> None:
    hidden = replace(
        machine("sm_90", environment={"CUDA_VISIBLE_DEVICES": value}), torch=TorchBuild("2", None, None, "x")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select_backend(platform=hidden).selection.device.key == "cpu"  # type: ignore[union-attr]


def test_a_played_back_device_is_explained_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(
        BackendError, match=r"cuda:0 .* of platform 'h200' is not on this machine: use explain_backends"
    ):
        select_backend(platform=Platform.load("h200"))


# Choosing and loading


def test_a_ready_backend_carries_its_report(double: Any, caplog: pytest.LogCaptureFixture) -> None:
    double()
    with caplog.at_level(logging.INFO, logger="dsv41"):
        backend = select_backend(platform=machine(), kv_cache_dtype="fp8_ds_mla")
    assert isinstance(backend, Double)
    assert (str(backend.device), backend.kv_cache_dtype) == ("cpu", "fp8_ds_mla")
    assert backend.selection is not None
    assert backend.selection.chosen == "double"
    assert [record.getMessage() for record in caplog.records] == [
        "attention backend: double on cpu (CPU, cpu), automatic"
    ]


def test_priority_decides_among_the_usable(double: Any) -> None:
    double("second", priority=60)
    double("first", priority=70)
    assert explain_backends(platform=machine()).chosen == "first"


def test_a_better_backend_refused_for_what_can_be_mended_is_named_with_the_command(double: Any) -> None:
    from dsv41.hal.requirements import library

    double(requirements=(library("flash_mla", install="`pip install -U tokenspeed-flashmla`"),))
    with pytest.warns(
        SlowBackendWarning, match=r"double: flash_mla is not installed: `pip install -U tokenspeed-flashmla`"
    ):
        select_backend(platform=machine())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select_backend("reference", platform=machine())  # asked for by name: no advice


def test_the_libraries_of_the_choice_are_imported_elsewhere_first(double: Any, monkeypatch: Any) -> None:
    here = machine(flash_mla=Library(True, "1.0.0.post20260924", FLASH_MLA))
    checked = []

    def deep_check(module: str) -> str | None:
        checked.append(module)
        return "importing it crashes the process with signal 11"

    from dsv41.hal.requirements import library

    double(libraries=("flash_mla",), requirements=(library("flash_mla", install="`pip install it`"),))
    monkeypatch.setattr(select_module, "probe", lambda **_: here)
    monkeypatch.setattr(select_module, "deep_check", deep_check)
    report = explain_backends()
    assert checked == ["flash_mla"]
    assert report.chosen == "reference"
    (reason,) = report.candidate("double").reasons
    assert "flash_mla cannot be used: importing it crashes the process with signal 11" in reason.text
    with pytest.raises(BackendError, match="signal 11"):
        select_backend("double")
    explain_backends(platform=here)
    assert len(checked) == 2, "a played-back platform is taken at its word"


def test_a_library_that_is_only_declared_is_checked_as_well(double: Any, monkeypatch: Any) -> None:
    double(libraries=("toy_kernels",))
    monkeypatch.setattr(select_module, "probe", lambda **_: machine())
    monkeypatch.setattr(select_module, "deep_check", lambda module: "importing it fails with OSError: no driver")
    report = explain_backends()
    assert report.chosen == "reference"
    (reason,) = report.candidate("double").reasons
    assert reason.text == "toy_kernels cannot be used: importing it fails with OSError: no driver. Reinstall it"


def test_a_backend_that_cannot_be_loaded_is_a_reason_and_the_next_one_is_taken(double: Any) -> None:
    double("absent", target="dsv41_no_such_module:X")
    report = select_backend(platform=machine()).selection
    assert report is not None
    assert report.chosen == "reference"
    (reason,) = report.candidate("absent").reasons
    assert reason.cls == "bug"
    assert "cannot be loaded: ModuleNotFoundError" in reason.text
    with pytest.raises(BackendError, match="backend 'absent' cannot run on cpu"):
        select_backend("absent", platform=machine())


def test_a_format_that_only_the_class_refuses_is_a_reason_too(double: Any) -> None:
    double()
    with pytest.raises(BackendError, match="the double reads no bfloat16"):
        select_backend("double", kv_cache_dtype="bfloat16", platform=machine())
    assert select_backend(kv_cache_dtype="bfloat16", platform=machine()).selection.chosen == "reference"  # type: ignore[union-attr]


def test_a_library_that_no_distribution_vouches_for_is_looked_at_closely(monkeypatch: Any) -> None:
    stray = machine(flash_mla=Library(True, None, frozenset(), "it belongs to no installed tokenspeed-flashmla"))
    monkeypatch.setattr(select_module, "probe", lambda **_: stray)
    monkeypatch.setattr(select_module, "deep_check", lambda module: f"importing it fails with OSError: {module}")
    texts = " ".join(reason.text for reason in explain_backends().candidate("flashmla").reasons)
    assert "importing it fails with OSError: flash_mla" in texts


def test_fr_104_one_line_for_each_backend_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="dsv41"):
        select_backend(platform=machine())
    debug = [record for record in caplog.records if record.levelno == logging.DEBUG]
    assert [record.getMessage().split(":")[0] for record in debug] == [spec.name for spec in dsv41.hal.all_specs()]
    assert all(record.exc_info is None and "\n" not in record.getMessage() for record in caplog.records)


def test_a_report_is_plain_data_too() -> None:
    import json

    data = json.loads(json.dumps(explain_backends(platform=full("sm_90")).to_dict()))
    assert (data["chosen"], data["intended"], data["device"]["key"]) == ("flashmla", "flashmla", "cuda:0")
    assert data["backends"]["flashmla-mega"]["reasons"][0]["class"] == "arch"
    assert data["request"]["geometry"]["num_heads"] == 64


def test_this_machine_selects_something() -> None:
    backend = select_backend(device="cpu")
    assert backend.selection is not None
    assert backend.selection.chosen == "reference"
    assert str(explain_backends(device="cpu")) == str(backend.selection)
