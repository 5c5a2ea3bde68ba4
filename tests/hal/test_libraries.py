"""Libraries recognised by metadata, files and text: fake ones of every kind, none of which may be imported."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsv41.hal.libraries import inspect
from dsv41.hal.probe import deep_check

EXPLODES = "raise AssertionError('a probe must not import this')\n"
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Write a package of these files, and a distribution that owns it, where Python finds them first."""
    monkeypatch.syspath_prepend(str(tmp_path))
    deep_check.cache_clear()

    def write(module: str | None, dist: str | None, version: str = "1", requires: str = "", **files: str) -> None:
        if module:
            for name, text in {"__init__": EXPLODES, **files}.items():
                path = tmp_path / module / f"{name.replace('__in__', '/')}.py"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        if dist:
            folder = tmp_path / f"{dist.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            needs = f"Requires-Dist: {requires}\n" if requires else ""
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n{needs}")

    yield write
    deep_check.cache_clear()


AITER = {"ops__in__shuffle": ""}
FLASHINFER_074 = """
def trtllm_batch_decode_sparse_mla_dsv4(query, *, kv_cache_format: Literal[
    "fp8", "nvfp4", "fp8_dsv41", "fp8_dsv41_fp4_ca", "fp8_dsv41_inline", "fp8_dsv41_inline_fp4_ca"] = "fp8"): ...
"""
FLASHINFER_072 = """
def trtllm_batch_decode_sparse_mla_dsv4(query, *, kv_cache_format: Literal[
    "fp8", "nvfp4", "fp8_dsv41", "fp8_dsv41_fp4_ca"] = "fp8"): ...
"""
FLASHINFER_0618 = "def trtllm_batch_decode_sparse_mla_dsv4(query): ...\n"


@pytest.mark.parametrize(
    ("build", "mega_file", "features"),
    [
        ("20251110", False, set()),
        ("20260429", False, {"record-v4", "sm_90a", "sm_100f"}),
        ("20260810", False, {"record-v4", "sm_90a", "sm_100f"}),
        (
            "20260910",
            True,
            {"record-v4", "record-v41", "record-nvfp4", "placement-page", "mega", "sm_90a", "sm_100a", "sm_103a"},
        ),
        (
            "20260930",
            True,
            {
                "record-v4",
                "record-v41",
                "record-nvfp4",
                "placement-token",
                "mega",
                "sm_90a",
                "sm_100a",
                "sm_103a",
                "sm_107a",
            },
        ),
    ],
)
def test_flash_mla_is_told_by_its_build_date(install: Install, build: str, mega_file: bool, features: set[str]) -> None:
    files = {"fused_norm_rope_attn_rope_cast": EXPLODES} if mega_file else {}
    install("flash_mla", "tokenspeed-flashmla", f"1.0.0.post{build}", **files)
    found = inspect("flash_mla", "2.14.0")
    assert found.version == f"1.0.0.post{build}"
    assert found.features == features
    assert found.problem is None


def test_flash_mla_belongs_to_one_torch(install: Install) -> None:
    install("flash_mla", "tokenspeed-flashmla", "1.0.0.post20260924", "torch==2.14.0")
    assert inspect("flash_mla", "2.14.0+cu130").problem is None
    problem = inspect("flash_mla", "2.13.0+cu130").problem
    assert problem == "it was built for torch 2.14.0, this is 2.13.0+cu130: `pip install 'torch==2.14.0'`"


@pytest.mark.parametrize("requires", ["torch>=2.15", "torch (>=2.15)", "torch >= 2.15 ; python_version > '3'"])
def test_a_torch_that_a_library_does_not_accept_is_said(install: Install, requires: str) -> None:
    install("flashinfer", "flashinfer-python", "0.7.4", requires, mla=FLASHINFER_074)
    assert inspect("flashinfer", "2.15.1").problem is None
    problem = inspect("flashinfer", "2.14.0+cu130").problem
    assert problem == "it needs torch >=2.15, this is 2.14.0+cu130: `pip install 'torch>=2.15'`"


@pytest.mark.parametrize("requires", ["torch", "torchvision==0.1", "torch==1.0; extra == 'test'"])
def test_what_is_asked_of_another_package_or_extra_is_not_asked_of_torch(install: Install, requires: str) -> None:
    install("flash_mla", "tokenspeed-flashmla", "1.0.0.post20260924", requires)
    assert inspect("flash_mla", "2.14.0").problem is None


@pytest.mark.parametrize(
    ("symbol", "of_torch"),
    [
        ("_ZN3c104cuda9SetDeviceEab", True),
        ("_ZNK2at10TensorBase8data_ptrEv", True),
        ("aoti_torch_delete_tensor_object", True),
        ("cudaGetDriverEntryPoint", False),
    ],
)
def test_a_symbol_that_torch_lacks_is_said_to_be_of_another_torch(
    install: Install, symbol: str, of_torch: bool
) -> None:
    install("flash_mla", None, __init__=f"raise ImportError('flash_mla/cuda.so: undefined symbol: {symbol}')")
    problem = str(deep_check("flash_mla"))
    assert f"undefined symbol: {symbol}" in problem
    assert ("it was built for another torch than this one" in problem) == of_torch


def test_a_copy_that_no_distribution_vouches_for_is_refused(install: Install) -> None:
    install("flash_mla", None, __init__="__version__ = '1.0.0'\n")
    found = inspect("flash_mla", "2.14.0")
    assert (found.installed, found.version) == (True, None)
    assert "belongs to no installed tokenspeed-flashmla" in str(found.problem)


@pytest.mark.parametrize(
    ("version", "text", "features"),
    [
        ("0.6.13", "def another(): ...", set()),
        ("0.6.18", FLASHINFER_0618, {"sparse-mla", "record-v4", "small-heads"}),
        (
            "0.7.2.post1",
            FLASHINFER_072,
            {"sparse-mla", "record-v4", "record-v41", "record-nvfp4", "placement-page", "small-heads"},
        ),
        (
            "0.7.4",
            FLASHINFER_074,
            {
                "sparse-mla",
                "record-v4",
                "record-v41",
                "record-nvfp4",
                "placement-page",
                "placement-token",
                "small-heads",
            },
        ),
    ],
)
def test_flashinfer_is_told_by_its_signature(install: Install, version: str, text: str, features: set[str]) -> None:
    install("flashinfer", "flashinfer-python", version, mla__in___core=text, mla__in____init__="")
    assert inspect("flashinfer", None).features == features


@pytest.mark.parametrize(
    ("cubin", "jit", "wrong"),
    [
        (None, None, None),
        ("0.7.4", None, None),
        ("0.7.4", "0.7.4+cu130", None),
        ("0.6.13", None, "flashinfer-cubin"),
        ("0.7.4", "0.7.2.post1+cu130", "flashinfer-jit-cache"),
    ],
)
def test_fr_105_flashinfers_wheels_must_have_one_version(
    install: Install, cubin: str | None, jit: str | None, wrong: str | None
) -> None:
    install("flashinfer", "flashinfer-python", "0.7.4+cu130", mla=FLASHINFER_074)
    for dist, version in {"flashinfer-cubin": cubin, "flashinfer-jit-cache": jit}.items():
        if version:
            install(None, dist, version)
    problem = inspect("flashinfer", None).problem
    if wrong is None:
        assert problem is None
    else:
        assert problem is not None
        assert "flashinfer-python 0.7.4+cu130" in problem
        assert f"`pip uninstall {wrong}`" in problem


def test_fr_100_aiter_is_told_by_its_files(install: Install) -> None:
    install("aiter", "amd-aiter", "0.1.7.post2.dev18", **AITER)
    assert inspect("aiter", None).features == {"shuffle_weight"}
    install("aiter", None, ops__in__triton__in__attention__in__sparse_mla=EXPLODES)
    assert inspect("aiter", None).features == {"shuffle_weight", "sparse_mla"}


@pytest.mark.parametrize(
    ("mla", "logits", "features"),
    [
        ("out_mxfp8=None", "Preshuffle: bool, TotalCuCount: int | None = None", {"mla_epilogue", "paged_mqa_logits"}),
        ("out=None", "Preshuffle: bool, TotalCuCount: Optional[int] = None", {"paged_mqa_logits"}),
        ("out=None", "Preshuffle: bool, TotalCuCount: int = 80", set()),
        ("out=None", "Preshuffle: bool, TotalCuCount: int | None = None): out_logits.stride(1)", set()),
        ("out=None", "TotalCuCount: int | None = None", set()),
    ],
)
def test_what_came_to_aiters_functions_later_is_told_by_their_text(
    install: Install, mla: str, logits: str, features: set[str]
) -> None:
    attention = {"sparse_mla": f"def sparse_mla_fwd({mla}): ...", "pa_mqa_logits": f"def deepgemm({logits}): ..."}
    install(
        "aiter", "amd-aiter", **AITER, **{f"ops__in__triton__in__attention__in__{k}": v for k, v in attention.items()}
    )
    assert inspect("aiter", None).features == {"shuffle_weight", "sparse_mla", *features}


def test_a_foreign_aiter_is_recognised(install: Install) -> None:
    install("aiter", "aiter", "0.13.20220108")
    found = inspect("aiter", None)
    assert not found.installed
    assert "is another package of that name" in str(found.problem)
    assert "`pip uninstall aiter`" in str(found.problem)


def test_triton_without_metadata_says_its_version_itself(install: Install) -> None:
    install("triton", None, __init__="__version__ = '3.6.0'\n" + EXPLODES)
    found = inspect("triton", None)
    # A distribution of the real one may be installed beside the fake; its version then comes first.
    assert found.installed
    assert found.version is not None
    assert found.problem is None


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_mla").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = inspect("flash_mla", None)
    assert not found.installed
    assert "run from another directory" in str(found.problem)


def test_an_absent_library_is_simply_not_installed() -> None:
    found = inspect("no_such_kernel_library", None)
    assert (found.installed, found.version, found.problem) == (False, None, None)


def test_a_library_of_a_port_needs_no_known_build(install: Install) -> None:
    install("toy_kernels", None)
    assert inspect("toy_kernels", None).problem is None


def test_looking_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ValueError("flash_mla.__spec__ is None")

    monkeypatch.setattr("dsv41.hal.libraries.find_spec", broken)
    found = inspect("flash_mla", None)
    assert "looking at it fails with ValueError: flash_mla.__spec__ is None" in str(found.problem)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import dsv41_no_such_module", "fails with ModuleNotFoundError: No module named 'dsv41_no_such_module'"),
        ("raise ImportError('libc10_cuda.so: cannot open')", "fails with ImportError: libc10_cuda.so: cannot open"),
        ("raise OSError('libcudart.so.13')", "fails with OSError: libcudart.so.13"),
        ("assert False, 'no GPU'", "fails with AssertionError: no GPU"),
        ("{}['libamd_smi.so']", "fails with KeyError: 'libamd_smi.so'"),
        ("raise RuntimeError('ROCm version file not found')", "fails with RuntimeError: ROCm version file not found"),
        ("import sys; sys.exit(3)", "exits the process with status 3"),
        ("import sys; sys.exit('no driver')", "exits the process with status 1 (no driver)"),
        ("import sys; sys.exit(0)", "exits the process with status 0"),
        ("import os; os._exit(0)", "exits the process with status 0"),
        ("import os; os.abort()", "crashes the process with signal 6"),
        ("from flash_mla.cuda import MlaVersion", "fails with ModuleNotFoundError"),
    ],
)
def test_fr_99_a_deep_check_turns_any_end_of_an_import_into_a_sentence(install: Install, code: str, words: str) -> None:
    install("flash_mla", None, __init__=code)
    assert words in str(deep_check("flash_mla"))


def test_a_deep_check_ends_a_hang(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("flash_mla", None, __init__="import time; time.sleep(60)")
    monkeypatch.setattr("dsv41.hal.probe.IMPORT_TIMEOUT", 0.5)
    assert deep_check("flash_mla") == "importing it did not finish in 0.5 seconds"


def test_a_deep_check_passes_what_imports(install: Install) -> None:
    install("flash_mla", None, __init__="print('hello from a chatty library')")
    assert deep_check("flash_mla") is None
