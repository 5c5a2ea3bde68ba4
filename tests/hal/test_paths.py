"""What each op of the chosen backend uses, and what it would take to have better."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from dsv41.hal.builtin import BUILTIN
from dsv41.hal.device import Platform
from dsv41.hal.report import Candidate
from dsv41.hal.select import explain_backends
from dsv41.probe_cli import probe_report, render

MXFP8 = "aiter where activations are rounded to MXFP8 (quantize_activations), portable kernels elsewhere"


def aiter_on(name: str, without: str = "", **request: Any) -> Candidate:
    """aiter on a played-back machine, whose build of the library lacks one feature."""
    platform = Platform.load(name)
    library = platform.library("aiter")
    platform = platform.with_library("aiter", replace(library, features=library.features - {without}))
    candidate = explain_backends(platform=platform, device="cuda:0", **request).candidate("aiter")
    assert candidate.usable
    return candidate


def test_on_an_mi355x_every_op_has_its_path() -> None:
    assert aiter_on("mi355x", index_cache_dtype="fp8").paths == {
        "attention": "aiter sparse_mla_fwd",
        "rotation of the output": "that call",
        "norms and their MXFP8, cache writes": "portable kernels",
        "wq_a with wkv, wo_b": MXFP8,
        "wo_a": MXFP8,
        "index scores": "aiter deepgemm_fp8_paged_mqa_logits in decode steps, portable kernels in others",
    }


@pytest.mark.parametrize(
    ("op", "feature"), [("rotation of the output", "mla_epilogue"), ("index scores", "paged_mqa_logits")]
)
def test_a_build_too_old_for_one_op_is_refused_by_name_for_that_op(op: str, feature: str) -> None:
    good, old = aiter_on("mi355x", index_cache_dtype="fp8"), aiter_on("mi355x", feature, index_cache_dtype="fp8")
    assert {other for other in good.paths if good.paths[other] != old.paths[other]} == {op}
    assert old.paths[op].startswith("portable kernels; for ")
    assert f"aiter 0.1.21 does not have what is needed: {feature} (in the sources of " in old.paths[op]
    assert "build from source" in old.paths[op]


def test_another_format_that_would_do_more_is_named() -> None:
    assert "ask for index_cache_dtype='fp8'" in aiter_on("mi355x").paths["index scores"]
    assert (
        "ask for kv_cache_dtype='fp8_ds_mla'"
        in (aiter_on("mi355x", kv_cache_dtype="bfloat16").paths["rotation of the output"])
    )


def test_what_the_device_cannot_have_is_not_wished_for() -> None:
    paths = aiter_on("mi300x", kv_cache_dtype="fp8", index_cache_dtype="fp8").paths
    assert paths["rotation of the output"] == "portable kernels"
    assert paths["index scores"].startswith("aiter")


def test_the_report_shows_them_in_every_form() -> None:
    platform = Platform.load("mi355x")
    report = explain_backends(platform=platform, device="cuda:0")
    stream = io.StringIO()
    render(Console(file=stream, width=300), platform)
    for text in (str(report), stream.getvalue()):
        assert "attention: aiter sparse_mla_fwd" in text
        assert "index scores: portable kernels; for aiter deepgemm_fp8_paged_mqa_logits" in text
    backends = probe_report(platform)["backends"]
    assert backends["aiter"]["cuda:0"]["paths"] == report.candidate("aiter").paths
    assert backends["aiter"]["cpu"]["paths"] == {}


@pytest.mark.parametrize("spec", BUILTIN, ids=lambda spec: spec.name)
def test_every_op_has_a_path_that_needs_nothing_more(spec: Any) -> None:
    last = {path.op: path for path in spec.paths}
    assert all(path.requirements == () for path in last.values())
