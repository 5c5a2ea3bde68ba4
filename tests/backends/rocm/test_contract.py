"""What the backend calls, bound to aiter's real signature, and which builds of aiter have it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from dsv41.hal.device import Library, Platform
from dsv41.hal.libraries import KINDS
from dsv41.hal.select import explain_backends
from dsv41.hal.types import LayerCaches

from ...model.toys import noise
from ..cuda import wheels
from .emulated_aiter import Aiter
from .test_aiter import CASES, attend, filled, layer_of, make

SIGNATURES = Path(__file__).parent / "signatures" / "sparse_mla.pyi"
NEWEST_WHEEL = "0.1.7.post2.dev18"


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def real_signature() -> inspect.Signature:
    [definition] = [node for node in ast.parse(SIGNATURES.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert definition.name == "sparse_mla_fwd"
    return wheels.signature(definition)


def test_the_signature_says_where_it_is_from() -> None:
    text = ast.get_docstring(ast.parse(SIGNATURES.read_text())) or ""
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
    real_signature().bind(**arguments)


def test_the_emulated_function_has_the_parameters_of_the_real_one() -> None:
    mine, theirs = inspect.signature(Aiter("gfx950").sparse_mla_fwd), real_signature()
    assert list(mine.parameters) == list(theirs.parameters)
    for name, parameter in theirs.parameters.items():
        assert mine.parameters[name].kind == parameter.kind
        default = mine.parameters[name].default
        assert default is parameter.default or repr(default) == parameter.default.replace('"', "'")


def test_the_newest_wheel_is_too_old_and_refused_by_name() -> None:
    folder = wheels.sources_or_skip("amd-aiter", NEWEST_WHEEL)
    features = KINDS["aiter"].features(folder / "aiter", NEWEST_WHEEL)
    assert "sparse_mla" not in features
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
