"""What the backend calls, bound to aiter's real signature, and which builds of aiter have it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from dsv41.backends.rocm.layouts import fp8_keys
from dsv41.hal.device import Library, Platform
from dsv41.hal.libraries import KINDS
from dsv41.hal.records import Dialect
from dsv41.hal.select import explain_backends
from dsv41.hal.types import LayerCaches

from ...model.toys import noise
from ..cuda import wheels
from . import test_index_scores
from .emulated_aiter import Aiter
from .emulated_logits import Logits
from .test_aiter import CASES, attend, filled, layer_of, make

SIGNATURES = Path(__file__).parent / "signatures"
NEWEST_WHEEL = "0.1.7.post2.dev18"


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def real_signature(function: str) -> inspect.Signature:
    [found] = [
        node
        for path in SIGNATURES.glob("*.pyi")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    return wheels.signature(found)


@pytest.mark.parametrize("path", sorted(SIGNATURES.glob("*.pyi")), ids=lambda path: path.stem)
def test_a_signature_says_where_it_is_from(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert "https://github.com/ROCm/aiter" in text
    assert re.search(r"^commit: [0-9a-f]{40}$", text, re.MULTILINE)
    assert re.search(r"^read: \d{4}-\d\d-\d\d$", text, re.MULTILINE)


@pytest.mark.parametrize("ratio", [0, 1])
@pytest.mark.parametrize(("arch", "kv"), CASES)
def test_every_call_is_one_that_the_function_takes(arch: str, kv: str, ratio: int) -> None:
    backend = make(arch, kv)
    window, compressed = (filled(backend.layouts.window, seed, 16, 0, 0.5) for seed in (1, 2))
    layer = layer_of(backend, 4, ratio, LayerCaches(window, compressed if ratio else None))
    rows = torch.arange(16, 32).view(2, 8)
    attend(backend, layer, noise(2, 4, 512).bfloat16(), rows, rows if ratio else None)
    [arguments] = backend.library.calls
    real_signature("sparse_mla_fwd").bind(**arguments)


def test_the_call_for_index_scores_is_one_that_the_function_takes() -> None:
    backend = test_index_scores.make("gfx950")
    step = test_index_scores.Scored(fp8_keys(Dialect.OCP), [1, 0, 1, 1])
    step.score(backend)
    [arguments] = backend.logits.calls
    real_signature("deepgemm_fp8_paged_mqa_logits").bind(**arguments)


@pytest.mark.parametrize(
    "function",
    [Aiter("gfx950").sparse_mla_fwd, Logits("gfx950").deepgemm_fp8_paged_mqa_logits],
    ids=lambda f: f.__name__,
)
def test_an_emulated_function_has_the_parameters_of_the_real_one(function: Any) -> None:
    mine, theirs = inspect.signature(function), real_signature(function.__name__)
    assert list(mine.parameters) == list(theirs.parameters)
    for name, parameter in theirs.parameters.items():
        assert mine.parameters[name].kind == parameter.kind
        default = mine.parameters[name].default
        assert default is parameter.default or repr(default) == parameter.default.replace('"', "'")


def test_the_newest_wheel_is_too_old_and_refused_by_name() -> None:
    folder = wheels.sources_or_skip("amd-aiter", NEWEST_WHEEL)
    features = KINDS["aiter"].features(folder / "aiter", NEWEST_WHEEL)
    assert not {"sparse_mla", "mla_epilogue", "paged_mqa_logits"} & features
    assert "shuffle_weight" in features
    with pytest.raises(LookupError):
        wheels.function(folder, "aiter.ops.triton.attention.sparse_mla.sparse_mla_fwd")
    base = Platform.load("mi355x")
    platform = Platform(
        devices=base.devices,
        torch=base.torch,
        libraries={**base.libraries, "aiter": Library(True, NEWEST_WHEEL, frozenset(features))},
        environment=base.environment,
    )
    report = explain_backends(platform=platform, device="cuda:0")
    assert report.chosen == "portable"
    [reason] = report.candidate("aiter").reasons
    assert f"aiter {NEWEST_WHEEL} does not have what is needed: sparse_mla" in reason.text
    assert "build from source" in reason.text
