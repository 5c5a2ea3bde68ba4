"""The calls of aiter's products, bound to its real signatures, and which builds have which of them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from dsv41.hal.device import Library, Platform
from dsv41.hal.libraries import KINDS
from dsv41.hal.select import explain_backends

from ..cuda import wheels
from .emulated_products import Products
from .test_contract import NEWEST_WHEEL
from .test_products import BMM, GEMM, WIDE, make, make_checkpoint, noise, stack_of

SIGNATURES = Path(__file__).parent / "signatures" / "batched_gemm_op_a8w8.pyi"


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def real(name: str) -> inspect.Signature:
    """Of the newest wheel, and where the function is newer than that, of the file beside these tests."""
    if name == GEMM:
        folder = wheels.sources_or_skip("amd-aiter", NEWEST_WHEEL)
        return wheels.signature(wheels.function(folder, f"aiter.ops.gemm_op_a8w8.{name}"))
    [definition] = [node for node in ast.parse(SIGNATURES.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert definition.name == name
    return wheels.signature(definition)


def test_the_signature_says_where_it_is_from() -> None:
    text = ast.get_docstring(ast.parse(SIGNATURES.read_text())) or ""
    assert "https://github.com/ROCm/aiter" in text
    assert re.search(r"^commit: [0-9a-f]{40}$", text, re.MULTILINE)
    assert re.search(r"^read: \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    folder = wheels.sources_or_skip("amd-aiter", NEWEST_WHEEL)
    with pytest.raises(LookupError):  # or it would be bound to that
        wheels.function(folder, f"aiter.ops.batched_gemm_op_a8w8.{BMM}")


@pytest.mark.parametrize(("arch", "asked"), [("gfx950", "auto"), ("gfx950", "block128"), ("gfx942", "block128")])
def test_every_call_is_one_that_the_functions_take(
    arch: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV41_AITER_PRODUCTS", asked)
    backend = make(arch)
    layer = stack_of(make_checkpoint(tmp_path / "wide", config=WIDE), backend).layers[0].state
    backend.project_down(noise(2, 128).bfloat16(), layer)
    backend.project_latent(noise(2, 128).bfloat16(), layer)
    if arch == "gfx950":
        codes, scale = torch.zeros(2, 2, 1024, dtype=torch.uint8), torch.zeros(2, 2, 32, dtype=torch.uint8)
        backend.project_groups(codes, scale, layer, torch.bfloat16)
    assert len(backend.gemm.calls) == (3 if arch == "gfx950" else 2)
    for name, arguments in backend.gemm.calls:
        real(name).bind(**arguments)


@pytest.mark.parametrize("name", [GEMM, BMM])
def test_the_emulated_functions_have_the_parameters_of_the_real_ones(name: str) -> None:
    mine, theirs = inspect.signature(getattr(Products("gfx950"), name)), real(name)
    assert list(mine.parameters) == list(theirs.parameters)
    assert all(mine.parameters[p].kind == theirs.parameters[p].kind for p in theirs.parameters)
    assert theirs.parameters["dtype"].default == "dtypes.bf16"
    assert mine.parameters["dtype"].default is torch.bfloat16


# Which build has what


def paths(found: frozenset[str], version: str, machine: str = "mi355x", **environment: str) -> dict[str, str]:
    """Of a build with these features that can do attention too."""
    base = Platform.load(machine)
    libraries = {**base.libraries, "aiter": Library(True, version, found | {"sparse_mla"})}
    platform = replace(base, libraries=libraries, environment={**base.environment, **environment})
    return explain_backends(platform=platform, device="cuda:0", kv_cache_dtype="fp8").candidate("aiter").paths


def test_the_newest_wheel_has_the_product_by_blocks_of_128_alone_and_each_op_says_what_it_lacks() -> None:
    folder = wheels.sources_or_skip("amd-aiter", NEWEST_WHEEL)
    features = frozenset(KINDS["aiter"].features(folder / "aiter", NEWEST_WHEEL))
    assert features & {"gemm_blockscale", "gemm_mxfp8", "bmm_mxfp8"} == {"gemm_blockscale"}
    said = paths(features, NEWEST_WHEEL)
    for op, feature in (("wq_a with wkv, wo_b", "gemm_mxfp8"), ("wo_a", "bmm_mxfp8")):
        assert said[op].startswith("portable kernels; for aiter")
        assert f"aiter {NEWEST_WHEEL} does not have what is needed: {feature}" in said[op]
    asked = paths(features, NEWEST_WHEEL, DSV41_AITER_PRODUCTS="block128")
    assert asked["wq_a with wkv, wo_b"].startswith("aiter by blocks of 128, which rounds")
    assert asked["wo_a"] == said["wo_a"]


def test_the_report_says_of_each_op_which_way_it_goes() -> None:
    new = frozenset({"gemm_blockscale", "gemm_mxfp8", "bmm_mxfp8"})
    said = paths(new, "0.1.21")
    assert said["wq_a with wkv, wo_b"] == said["wo_a"]
    assert said["wo_a"].startswith("aiter where activations are rounded to MXFP8")
    said = paths(new, "0.1.21", "mi300x")
    assert said["wo_a"] == "portable kernels"
    assert "DSV41_AITER_PRODUCTS is auto: set it to block128" in said["wq_a with wkv, wo_b"]
    said = paths(new, "0.1.21", DSV41_AITER_PRODUCTS="portable")
    assert "DSV41_AITER_PRODUCTS is portable: set it to auto" in said["wo_a"]


def test_features_are_told_by_the_text_of_the_sources(tmp_path: Path) -> None:
    """The function of MXFP8 has the name that it had before it knew MXFP8."""

    def features(**texts: str) -> set[str]:
        for name, text in texts.items():
            path = tmp_path / "ops" / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return KINDS["aiter"].features(tmp_path, None) & {"gemm_blockscale", "gemm_mxfp8", "bmm_mxfp8"}

    dense = "def gemm_a8w8_blockscale_bpreshuffle(\n    XQ,\n): ...\n"
    assert features() == set()
    assert features(gemm_op_a8w8=dense) == {"gemm_blockscale"}
    newer = f"def _gemm_mxscale_bpreshuffle(XQ): ...\n{dense}"
    assert features(gemm_op_a8w8=newer) == {"gemm_blockscale", "gemm_mxfp8"}
    table = '_RUNNERS = {\n    ("gfx950", "128x128", True): 1,\n'
    assert "bmm_mxfp8" not in features(flydsl__batched_gemm_a8w8=table)
    assert "bmm_mxfp8" in features(flydsl__batched_gemm_a8w8=f'{table}    ("gfx950", "32x32", False): 2,\n}}\n')
