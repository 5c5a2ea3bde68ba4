"""The worker that compiles for the FlashMLA backend, in a process of its own, in which nothing is interpreted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from dsv41.backends.cuda import index, nvrtc, products, products_wide
from dsv41.backends.cuda.aot import BUILDS
from dsv41.compile import BUDGET, Budget, Row
from dsv41.config import DeepseekV41Config
from dsv41.warmup_cli import WarmupOptions, what_it_meets
from dsv41.workers import Worker

MISSING = nvrtc.missing()
compiles = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    for name in ("TRITON_INTERPRET", "DSV41_FLASHMLA_KERNEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DSV41_CACHE_DIR", str(tmp_path / "kept"))
    worker = Worker("dsv41.backends.cuda.aot")
    yield worker
    worker.close()


def met(worker: Worker, target: str, tp_size: int, max_len: int = 512) -> list[str]:
    """Names of what the release can meet with its heads on `tp_size` ranks."""
    options = WarmupOptions(
        Path(), tp_size=tp_size, layers=(0, 2, 20, 24), max_tokens=512, max_requests=2, max_len=max_len
    )
    request: dict[str, Any] = {"meet": what_it_meets(DeepseekV41Config(), options, target), "backend": "flashmla"}
    answer = worker.ask(request)
    assert "error" not in answer, answer
    return [variant["name"] for variant in answer["variants"]]


@compiles
def test_our_kernels_keep_to_the_budget_and_are_kept(worker: Worker) -> None:
    listed = worker.ask({"list": ["sm_90"]})
    assert listed["skipped"] == {}
    assert [variant["kind"] for variant in listed["variants"]] == [build.kind for build in BUILDS]
    budget = Budget.load(Path(__file__).parents[3] / BUDGET)
    for build, variant in zip(BUILDS, listed["variants"], strict=True):
        first, second = (worker.ask({"compile": variant["payload"]}) for _ in range(2))
        assert (first["cached"], second["cached"]) == (False, True)
        figures = first["figures"]
        assert figures == second["figures"]
        assert figures["shared_bytes"] == build.shared_bytes
        assert 16 < figures["registers"] <= 65536 // (build.threads * build.ctas_per_sm)
        assert figures["spill_bytes"] == 0
        assert (build.kind != "other") <= figures["matrix"] < figures["code_bytes"] // 16  # an instruction is 16 bytes
        row = Row(variant["name"], variant["target"], variant["kind"], figures)
        assert budget.excesses(row, listed["triton"]) == []


@compiles
def test_products_and_index_choices_are_met_unless_another_kernel_is_named(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [build.name for build in (*index.BUILDS, *products.BUILDS, *products_wide.ALL_BUILDS)]
    names = met(worker, "sm_90", 8, max_len=8192)
    assert [name for name in names if name in ours] == ours
    assert not any(name.startswith("block_maxima") for name in names)
    monkeypatch.setenv("DSV41_FLASHMLA_KERNEL", "portable")
    other = Worker("dsv41.backends.cuda.aot")
    names = met(other, "sm_90", 8, max_len=8192)
    other.close()
    assert not set(names) & set(ours)
    assert any(name.startswith("block_maxima") for name in names)


def test_other_targets_have_none_of_ours(worker: Worker) -> None:
    listed = worker.ask({"list": ["sm_100", "gfx942"]})
    assert (listed["variants"], listed["skipped"]) == ([], {})


def test_where_nothing_compiles_cuda_it_is_skipped_with_the_reason(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").write_text("raise ImportError('not in this test')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    listed = worker.ask({"list": ["sm_90"]})
    assert listed["variants"] == []
    why = listed["skipped"]["our kernels on sm_90"]
    assert "not in this test" in why
    assert "pip install" in why


def test_what_a_configuration_meets(worker: Worker) -> None:
    """No attention of the portable backend; FlashMLA's tables, gathering where chunks are long, or our kernel."""
    padded = met(worker, "sm_100", 8)
    kernels = {name.split()[0] for name in padded}
    assert {
        "pack_slots",
        "pack_selection",
        "pack_gathered",
        "gather_rows",
        "rotate_heads",
        "finish_output",
        "gemm",
    } <= kernels
    assert not kernels & {"attend", "combine", "few_heads", "many_heads", "selection_slots"}
    if MISSING is None:
        for tp_size, kernels in ((8, ["few_heads"]), (1, ["few_heads", "many_heads", "many_heads"])):
            ours = [name.split()[0] for name in met(worker, "sm_90", tp_size)]
            assert [name for name in ours if name in ("few_heads", "many_heads")] == kernels
            assert "gather_rows" not in ours


def test_backends_beside_it_are_refused(worker: Worker) -> None:
    options = WarmupOptions(Path(), layers=(0,))
    request = {"meet": what_it_meets(DeepseekV41Config(), options, "sm_100"), "backend": "flashmla-mega"}
    assert "flashmla-mega" in worker.ask(json.loads(json.dumps(request)))["error"]
