"""Kernel libraries, looked at without importing them: is it there, which version, what can it do.

Importing is what breaks (a missing driver, another torch, a foreign package of the same name), so features are read
from versions, files and source text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from dsv41.hal.device import Library
from dsv41.hal.versions import at_least, build_date, meets, public


@dataclass(frozen=True)
class LibraryKind:
    """How one library is recognised. `features` maps its folder and version to what it can do.

    `distributions` are the names that its wheels have had. `marker` is a file that tells it from foreign packages of
    the same import name. `companions` are wheels that must have its version. A copy that no distribution vouches for
    is refused unless `any_build` will do.
    """

    module: str
    distributions: tuple[str, ...]
    features: Callable[[Path, str | None], set[str]]
    marker: str = ""
    companions: tuple[str, ...] = ()
    any_build: bool = False


def _flash_mla(folder: Path, version: str | None) -> set[str]:
    """By build date; `flash_mla.__version__` never changes. 20260930 and later: from their interface only."""
    date = build_date(version)
    if date is None or date < 20260429:
        return set()
    features = {"record-v4", "sm_90a"} | ({"sm_100f"} if date < 20260910 else {"sm_100a", "sm_103a"})
    if date >= 20260924:
        features.add("sm_107a")
    if (folder / "fused_norm_rope_attn_rope_cast.py").is_file():
        features |= {"mega", "record-v41", "record-nvfp4"}
        features.add("placement-page" if date < 20260930 else "placement-token")
    return features


def _flashinfer(folder: Path, version: str | None) -> set[str]:
    """By the text of the entry point and of its `kv_cache_format`; the head counts by version."""
    source = "".join(_text(path) for path in (folder / "mla.py", folder / "mla" / "_core.py"))
    formats = set(re.findall(r"[\"'](fp8_dsv41\w*|nvfp4)[\"']", source))
    features = {"small-heads"} if at_least(version, "0.6.14") else set()
    if "def trtllm_batch_decode_sparse_mla_dsv4" in source:
        features |= {"sparse-mla", "record-v4"}
    if "fp8_dsv41" in formats:
        features |= {"record-v41", "placement-page"}
    if "fp8_dsv41_fp4_ca" in formats:
        features.add("record-nvfp4")
    if "fp8_dsv41_inline" in formats:
        features.add("placement-token")
    return features


# Kernels of aiter that this package may call, by the file that holds each; the paths of 0.1.7 and of later sources.
_AITER_FILES = {
    "sparse_mla": ("ops/triton/attention/sparse_mla.py",),
    "pa_decode_sparse": ("ops/triton/attention/pa_decode_sparse.py",),
    "pa_sparse_prefill_opus": ("ops/pa_sparse_prefill_opus.py",),
    "inverse_rope_group_quant": ("ops/inverse_rope_group_quant.py",),
    "shuffle_weight": ("ops/shuffle.py",),
    "gemm_a8w8_bpreshuffle": ("ops/gemm_op_a8w8.py",),
}


# Those whose file is older than what is wanted of it, by a line of its text.
_AITER_TEXTS = {
    "mla_epilogue": ("ops/triton/attention/sparse_mla.py", "out_mxfp8"),
    "gemm_blockscale": ("ops/gemm_op_a8w8.py", "def gemm_a8w8_blockscale_bpreshuffle("),
    "gemm_mxfp8": ("ops/gemm_op_a8w8.py", "def _gemm_mxscale_bpreshuffle("),
    "bmm_mxfp8": ("ops/flydsl/batched_gemm_a8w8.py", '("gfx950", "32x32"'),
}


def _aiter(folder: Path, version: str | None) -> set[str]:
    """By its files; what came to a function later, by the text of its file."""
    features = {name for name, paths in _AITER_FILES.items() if any((folder / path).is_file() for path in paths)}
    features |= {name for name, (path, line) in _AITER_TEXTS.items() if line in _text(folder / path)}
    logits = _text(folder / "ops/triton/attention/pa_mqa_logits.py")
    # Some builds between have the parameters, and take the rows of the scores for columns.
    if "Preshuffle" in logits and re.search(r"TotalCuCount: [^=]*= None", logits) and "logits.stride(1)" not in logits:
        features.add("paged_mqa_logits")
    return features


def _nothing(folder: Path, version: str | None) -> set[str]:
    return set()


# A port may add the kind of its own library, beside its BackendSpec.
KINDS: dict[str, LibraryKind] = {
    "flash_mla": LibraryKind("flash_mla", ("tokenspeed-flashmla",), _flash_mla),
    "flashinfer": LibraryKind(
        "flashinfer", ("flashinfer-python",), _flashinfer, companions=("flashinfer-cubin", "flashinfer-jit-cache")
    ),
    "aiter": LibraryKind("aiter", ("amd-aiter", "aiter"), _aiter, marker="ops/shuffle.py"),
    "triton": LibraryKind(
        "triton", ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton", "triton-windows"), _nothing
    ),
    "hip": LibraryKind("hip", ("hip-python",), _nothing),
}


def inspect(name: str, torch_version: str | None) -> Library:
    """What can be said of a library without importing it. Never raises: whatever goes wrong becomes its problem.

    A library that is not in `KINDS` has no features; its distribution is looked up by the module's name.
    """
    try:
        return _inspect(KINDS.get(name) or _any_kind(name), torch_version)
    except Exception as error:
        return Library(True, None, problem=f"looking at it fails with {type(error).__name__}: {error}: reinstall it")


def _any_kind(name: str) -> LibraryKind:
    owners = metadata.packages_distributions().get(name, [name.replace("_", "-")])
    return LibraryKind(name, tuple(owners), _nothing, any_build=True)


def _inspect(kind: LibraryKind, torch_version: str | None) -> Library:
    spec = find_spec(kind.module)
    version, distribution = _version(kind.distributions)
    if spec is None:
        missing = f"{distribution} {version} is installed without its module {kind.module!r}: reinstall it"
        return Library(True, version, problem=missing) if version else Library()
    if spec.origin is None and spec.submodule_search_locations:
        where = next(iter(spec.submodule_search_locations))
        return Library(problem=f"only a folder of that name is on the path, {where}: run from another directory")
    folder = Path(spec.origin or "").parent
    if not (folder / kind.marker).exists():
        foreign = f"{spec.origin} is another package of that name, as it has no {kind.marker}"
        return Library(problem=f"{foreign}: `pip uninstall {kind.module}` first")
    version = version or _written_version(folder)
    features = frozenset(kind.features(folder, version))
    if version is None and not kind.any_build:
        owners = " or ".join(kind.distributions)
        return Library(True, None, features, f"{folder} belongs to no installed {owners}, so its build is unknown")
    problem = _companion_problem(kind, version) or _torch_problem(distribution, torch_version)
    return Library(True, version, features, problem)


def _version(distributions: tuple[str, ...]) -> tuple[str | None, str | None]:
    for name in distributions:
        try:
            return metadata.version(name), name
        except metadata.PackageNotFoundError:
            continue
    return None, None


def _written_version(folder: Path) -> str | None:
    """What the package writes as its version, where that tells builds apart; FlashMLA's does not."""
    if folder.name == "flash_mla":
        return None
    match = re.search(r"^__version__ = [\"']([^\"']+)", _text(folder / "__init__.py"), re.MULTILINE)
    return match[1] if match else None


def _companion_problem(kind: LibraryKind, version: str | None) -> str | None:
    """FlashInfer comes in up to three wheels of one version; only local parts such as +cu130 may differ."""
    found = {name: other for name in kind.companions if (other := _version((name,))[0])}
    wrong = {name: other for name, other in found.items() if public(other) != public(version or "")}
    if not wrong:
        return None
    listed = ", ".join(f"{name} {other}" for name, other in {kind.distributions[0]: version, **found}.items())
    remove = " ".join(wrong)
    return f"its wheels must have one version, found {listed}: install matching ones or `pip uninstall {remove}`"


def _torch_problem(distribution: str | None, torch_version: str | None) -> str | None:
    """A wheel that says which torch it belongs to is bound to its ABI."""
    if distribution is None or torch_version is None:
        return None
    for line in metadata.requires(distribution) or []:
        match = re.match(r"torch\s*\(?([=<>!~][^;)]*)", line)
        wanted = re.sub(r"\s", "", match[1]) if match and "extra" not in line else ""
        if wanted and not meets(torch_version, wanted):
            built = f"was built for torch {wanted[2:]}" if wanted.startswith("==") else f"needs torch {wanted}"
            return f"it {built}, this is {torch_version}: `pip install 'torch{wanted}'`"
    return None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
