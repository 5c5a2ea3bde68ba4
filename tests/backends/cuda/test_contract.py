"""What backends call, bound to the signatures of the oldest and the newest release that they claim to run on.

The wheels are the real ones; the calls are those that emulated libraries noted. Without a network these tests are
skipped, unless DSV41_REQUIRE_WHEELS is 1.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from dsv41.backends.cuda import prefill
from dsv41.backends.cuda.flashinfer_gemm import product, tiled_scales
from dsv41.backends.portable.weights import Matrix
from dsv41.checkpoint import load_checkpoint
from dsv41.fp8 import quantize_blocks
from dsv41.hal.libraries import KINDS
from dsv41.hal.types import LayerCaches
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint

from ...model.toys import dyadic_checkpoint, noise
from . import emulated_flashinfer, emulated_mega, wheels
from .common import Twins, backend
from .flash_mla_double import FlashMLA
from .test_flashinfer import SM100, SM120, attend, filled, layer_of, make, spec_of
from .test_flashmla_mega import CONFIG as MEGA
from .test_flashmla_mega import Mega

Calls = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Contract:
    """`run` makes a backend call its library, emulated as the first version, and returns the calls that were noted,
    which are the same for all of `versions`."""

    distribution: str
    versions: tuple[str, ...]
    run: Callable[[pytest.MonkeyPatch, str], Calls]
    python: str | None = None

    def __str__(self) -> str:
        return f"{self.distribution}-{self.versions[0]}-{self.run.__name__}"


def sm120(monkeypatch: pytest.MonkeyPatch, version: str) -> Calls:
    v41 = ["fp8_ds_mla", "nvfp4_ds_mla"] if "record-v41" in emulated_flashinfer.FEATURES[version] else []
    return flashinfer_calls(monkeypatch, version, SM120, ["fp8_ds_mla_v4", *v41])


def sm100(monkeypatch: pytest.MonkeyPatch, version: str) -> Calls:
    return flashinfer_calls(monkeypatch, version, SM100, ["bfloat16", "fp8_e4m3"])


def flashinfer_calls(monkeypatch: pytest.MonkeyPatch, version: str, kind: Any, dtypes: list[str]) -> Calls:
    """Of a layer without and one with compressed rows for each format, and of the product."""
    emulated_flashinfer.install(monkeypatch, version)
    for kv in dtypes:
        backend = make(kind, kv)
        window, compressed = filled(backend.layouts.window, seed=1), filled(backend.layouts.compressed, seed=2)
        rows = torch.arange(64, 84)[None]
        for ratio in (0, 1):
            caches = LayerCaches(window, compressed if ratio else None)
            layer = layer_of(backend, spec_of(8, ratio=ratio), caches)
            attend(backend, layer, noise(1, 8, 512).bfloat16(), rows, rows if ratio else None)
    weight = quantize_blocks(noise(128, 128))
    scales = tiled_scales(weight)
    assert scales is not None
    product(backend.gemm, noise(1, 128).bfloat16(), Matrix.of(weight), scales)
    return list(emulated_flashinfer.calls)


def flashmla(monkeypatch: pytest.MonkeyPatch, version: str) -> Calls:
    """A step read in place and one that is gathered, of layers with and without compressed rows."""
    library = FlashMLA()
    with TemporaryDirectory() as folder:
        dyadic_checkpoint(Path(folder) / "dyadic", torch.bfloat16)
        for fewest in (512, 4):
            monkeypatch.setattr(prefill, "FEWEST_TOKENS", fewest)
            twins = Twins(Path(folder) / "dyadic", backend(library), [0, 1])
            twins.step({twins.add(): 5})
    assert set(library.names()) == {"flash_mla_with_kvcache", "flash_mla_sparse_fwd"}
    return [(f"flash_mla.{name}", arguments) for name, arguments in library.calls] + [
        ("flash_mla.get_mla_metadata", {})
    ]


def flashmla_mega(monkeypatch: pytest.MonkeyPatch, version: str) -> Calls:
    emulated_mega.install(monkeypatch)
    with TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder) / "toy", config=MEGA)
        stack = AttentionStack(load_checkpoint(path, layers=[0, 1]), Mega(), max_len=16)
        session = Session(stack, max_requests=1, max_tokens=16)
        session.step({session.add_request(): noise(5, MEGA.hidden_size).bfloat16()})
    return [(f"flash_mla.fused_norm_rope_attn_rope_cast.{name}", arguments) for name, arguments in emulated_mega.calls]


FULL = os.environ.get("DSV41_FULL") == "1"
BETWEEN = ["0.7.0", "0.7.1"] if FULL else []
FLASHINFER = ["0.6.18", *BETWEEN, "0.7.4"]
"""The oldest and the newest, and where there is time what lies between."""
FLASH_MLA = ("1.0.0.post20260429", *(["1.0.0.post20260615"] if FULL else []), "1.0.0.post20260924")
FLASH_MLA_MEGA = ("1.0.0.post20260910", "1.0.0.post20260924")
"""Those that have the fused kernel."""
# One line for each backend: a library, its versions, and what makes it call them.
CONTRACTS = [
    *(Contract("flashinfer-python", (version,), run) for version in FLASHINFER for run in (sm120, sm100)),
    Contract("tokenspeed-flashmla", FLASH_MLA, flashmla, "3.12"),
    Contract("tokenspeed-flashmla", FLASH_MLA_MEGA, flashmla_mega, "3.12"),
]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_every_call_is_one_that_the_release_takes(contract: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [wheels.sources_or_skip(contract.distribution, version, contract.python) for version in contract.versions]
    calls = contract.run(monkeypatch, contract.versions[0])
    assert calls, "nothing was called"
    for folder, (name, arguments) in itertools.product(folders, calls):
        definition = wheels.function(folder, name)
        wheels.signature(definition).bind(**arguments)
        for parameter, value in arguments.items():
            allowed = wheels.literals(definition, parameter)
            assert allowed is None or value in allowed, f"{parameter}={value!r}: {name} takes {allowed}"


@pytest.mark.parametrize("version", FLASHINFER)
def test_the_emulated_flashinfer_has_the_parameters_of_the_real_one(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = wheels.sources_or_skip("flashinfer-python", version)
    definition = wheels.function(folder, emulated_flashinfer.ENTRY)
    mine, theirs = emulated_flashinfer.entry_signature(version), wheels.signature(definition)
    assert list(mine.parameters) == list(theirs.parameters)
    for name, parameter in theirs.parameters.items():
        assert mine.parameters[name].kind == parameter.kind
        empty = inspect.Parameter.empty
        assert (mine.parameters[name].default is empty) == (parameter.default is empty)
    assert wheels.literals(definition, "kv_cache_format") == (set(emulated_flashinfer.FORMATS[version]) or None)
    product = wheels.signature(wheels.function(folder, "flashinfer.gemm.mm_mxfp8"))
    named = [p.name for p in product.parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert named == emulated_flashinfer.MM_MXFP8
    counters = wheels.function(folder, "flashinfer.utils.get_trtllm_gen_multi_ctas_kv_counter_bytes")
    assert list(wheels.signature(counters).parameters) == ["batch_size", "num_qo_heads", "sm_count"]


@pytest.mark.parametrize("version", FLASHINFER)
def test_the_features_of_the_real_release_are_those_of_the_emulated(version: str) -> None:
    folder = wheels.sources_or_skip("flashinfer-python", version)
    found = KINDS["flashinfer"].features(folder / "flashinfer", version)
    assert found == emulated_flashinfer.FEATURES[version]


@pytest.mark.parametrize("version", FLASH_MLA)
def test_the_entries_of_flash_mla_are_where_they_are_looked_for(version: str) -> None:
    folder = wheels.sources_or_skip("tokenspeed-flashmla", version, "3.12")
    decode = wheels.signature(wheels.function(folder, "flash_mla.flash_mla_with_kvcache"))
    assert {"q", "k_cache", "block_table", "head_dim_v", "indices", "attn_sink"} <= set(decode.parameters)
    wheels.function(folder, "flash_mla.get_mla_metadata")
    wheels.function(folder, "flash_mla.flash_mla_sparse_fwd")


# The reader of wheels itself


def definition_of(source: str) -> ast.FunctionDef:
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def test_signatures_are_read_as_python_reads_them() -> None:
    source = "def f(a, /, b, c=1, *args, d, e='x', **rest): ..."
    scope: dict[str, Any] = {}
    exec(source, scope)
    mine, theirs = (
        list(found.parameters.values())
        for found in (wheels.signature(definition_of(source)), inspect.signature(scope["f"]))
    )
    assert [(p.name, p.kind) for p in mine] == [(p.name, p.kind) for p in theirs]
    assert [p.name for p in mine if p.default is not inspect.Parameter.empty] == ["c", "e"]
    assert wheels.literals(definition_of("def f(*, x: Optional[Literal['a', 2]] = 2, y: int = 1): ..."), "x") == {
        "a",
        2,
    }
    assert wheels.literals(definition_of("def f(*, y: int = 1): ..."), "y") is None


def test_functions_are_found_where_they_are_defined(tmp_path: Path) -> None:
    (tmp_path / "lib" / "inner").mkdir(parents=True)
    (tmp_path / "lib/__init__.py").write_text("from .inner import *\nfrom .inner import g as h\n")
    (tmp_path / "lib/inner/__init__.py").write_text("from ..core import f\nfrom ._g import g\n")
    (tmp_path / "lib/core.py").write_text("if True:\n    from .inner._g import g\ndef f(x): ...\n")
    (tmp_path / "lib/inner/_g.py").write_text("def g(y): ...\n")
    assert [wheels.function(tmp_path, f"lib.{name}").args.args[0].arg for name in ("f", "g", "h", "core.g")] == [
        *"xyyy"
    ]
    for name in ("lib.absent", "lib.nowhere.f"):
        with pytest.raises(LookupError, match="is not defined in lib"):
            wheels.function(tmp_path, name)


def test_without_a_network_a_test_is_skipped_unless_wheels_are_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV41_WHEELS", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("DSV41_REQUIRE_WHEELS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs a wheel from PyPI"):
        wheels.sources_or_skip("flashinfer-python", "0.7.999")
    monkeypatch.setenv("DSV41_REQUIRE_WHEELS", "1")
    with pytest.raises(wheels.NoWheel, match=r"flashinfer-python 0\.7\.999"):
        wheels.sources_or_skip("flashinfer-python", "0.7.999")
    assert not any(tmp_path.iterdir())
