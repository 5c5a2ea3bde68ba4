"""`dsv41 bench attention` without a GPU: its data, its checks, its tables. Times are made up here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console
from torch import Tensor

from dsv41 import bench, bench_cli
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.bench import BenchOptions, Rows, Work, bench_attention, make_work, random_caches, random_rows, relative_error
from dsv41.bench_flashmla import FlashMLA
from dsv41.cli import main
from dsv41.errors import BackendError, InputError
from dsv41.hal.select import select_backend
from dsv41.hal.types import AttnOutput
from dsv41.roofline import DeviceRates, attention_work

PAGES = (4, 16)
SMALL = BenchOptions(backend="reference", device="cpu", heads=(2, 3), tokens=(1, 3), prefill=(4,))


def timer(calls: Sequence[Callable[[], object]]) -> float:
    """Makes every call, as a timer does, and finds 2 ms."""
    for call in calls:
        call()
    return 2e-3


class TheReference:
    """A peer that computes the same another way, or something else if it `errs`."""

    label = "another 1.0"

    def __init__(self, errs: float = 0.0) -> None:
        self.errs, self.calls = errs, 0

    def call(self, work: Work, rows: Rows) -> Callable[[], Tensor]:
        def run() -> Tensor:
            self.calls += 1
            parts = [(work.caches.window, rows.window), (work.caches.compressed, rows.compressed)]
            keys = torch.cat([cache.read(slots.flatten()).view(*slots.shape, -1) for cache, slots in parts], dim=1)
            scores = torch.einsum("thd,tkd->thk", work.q.float(), keys) * work.layer.spec.scale
            sink = work.layer.weights.attn_sink[None, :, None].expand(len(scores), -1, 1)
            weights = torch.cat((scores, sink), dim=2).softmax(-1)[..., :-1]
            return torch.einsum("thk,tkd->thd", weights, keys) * (1 + self.errs)

        return run

    def gathered(self, work: Work, rows: Rows) -> Callable[[], Tensor] | None:
        return self.call(work, rows)


@pytest.fixture(autouse=True)
def _known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "rates_of", lambda name: DeviceRates("a CPU", 1e9, 1e9))


def report(options: BenchOptions = SMALL, peer: TheReference | None = None) -> dict[str, Any]:
    made = bench_attention(options, timer=timer, peer=peer, pages=PAGES)
    plain: dict[str, Any] = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    return plain


def test_every_size_is_timed_against_its_floor() -> None:
    found = report()
    assert [(case["phase"], case["tokens"], case["heads"]) for case in found["cases"]] == [
        (phase, tokens, heads) for heads in (2, 3) for phase, tokens in (("decode", 1), ("decode", 3), ("prefill", 4))
    ]
    for case in found["cases"]:
        work = attention_work(case["tokens"], case["heads"], ((128, 584), (512, 584)))
        assert case["microseconds"] == pytest.approx(2000)
        assert case["tflops_per_second"] == pytest.approx(work.flops / 2e-3 / 1e12)
        assert case["gigabytes_per_second"] == pytest.approx(work.bytes / 2e-3 / 1e9)
        assert case["floor_seconds"] == max(work.bytes, work.flops) / 1e9
        assert case["over_floor"] == pytest.approx(2e-3 / case["floor_seconds"])
        assert case["error"] < 1e-2
        assert case["peer"] is case["peer_seconds"] is case["over_peer"] is None
    assert (found["backend"], found["record"], found["peer"]) == ("reference", "fp8_ds_mla_v4", None)
    assert found["failures"] == []


def test_a_peer_is_compared_and_then_timed() -> None:
    found = report(peer=TheReference())
    for case in found["cases"]:
        assert case["peer"] == "another 1.0"
        assert 0 < case["peer_error"] < 1e-2  # it does not round to bf16
        assert case["over_peer"] == 1.0
        assert (case["peer_gathered_seconds"] is not None) == (case["phase"] == "prefill")
    assert found["failures"] == []


def test_sides_that_differ_are_a_failure() -> None:
    found = report(peer=TheReference(errs=0.03))
    assert len(found["failures"]) == len(found["cases"])
    assert "decode of 1 tokens with 2 heads: relative error 2.9" in found["failures"][0]
    assert "against another 1.0" in found["failures"][0]


def test_a_backend_that_leaves_its_output_unwritten_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is NaN before, so that nothing of another call can be taken for a result."""

    real = bench.our_call

    def ours(backend: Any, work: Work, rows: Rows, out: AttnOutput) -> Callable[[], object]:
        return real(backend, work, rows, out) if isinstance(backend, Oracle) else lambda: None

    class Oracle(ReferenceBackend):
        pass

    monkeypatch.setattr(bench, "our_call", ours)
    monkeypatch.setattr(bench.registry, "load", lambda spec: Oracle)
    backend = ReferenceBackend(kv_cache_dtype="fp8_ds_mla_v4")
    monkeypatch.setattr(bench, "select_backend", lambda *_, **__: backend)
    made = bench_attention(SMALL, timer=timer, pages=PAGES)
    assert [case.error for case in made.cases] == [math.inf] * len(made.cases)
    assert len(made.failures) == len(made.cases)
    assert made.to_dict()["cases"][0]["error"] is None


def test_rows_do_not_repeat_before_all_have_been_read() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = random_rows(1000, calls=3, tokens=4, width=50, generator=generator)
    assert rows.shape == (3, 4, 50)
    assert rows.unique().numel() == rows.numel()
    again = random_rows(100, calls=3, tokens=4, width=50, generator=generator)
    assert again.min() == 0
    assert again.max() == 99
    assert all(row.unique().numel() == 50 for row in again.view(-1, 50))
    assert torch.equal(torch.bincount(again.flatten()), torch.full((100,), 6))
    with pytest.raises(InputError, match="a token reads 50 rows of a cache of 49"):
        random_rows(49, 1, 1, 50, generator)


def test_work_is_random_and_large_enough_for_several_calls() -> None:
    backend = select_backend("reference", device="cpu", kv_cache_dtype="fp8_ds_mla_v4")
    caches = random_caches(backend, PAGES, seed=1)
    assert caches.compressed is not None
    everything = caches.compressed.read(torch.arange(caches.compressed.num_slots))
    assert everything.std().item() == pytest.approx(1, abs=0.02)
    assert everything.unique(dim=0).shape[0] == 16 * 64
    work = make_work(backend, caches, tokens=1, heads=3, seed=1)
    assert len(work.rows) == 2  # 1024 rows of 512 each
    assert work.q.std().item() == pytest.approx(1, abs=0.1)
    seen = torch.cat([rows.compressed for rows in work.rows]).flatten()
    assert seen.unique().numel() == seen.numel()
    assert torch.equal(make_work(backend, caches, 1, 3, seed=1).q, work.q)
    assert not torch.equal(make_work(backend, caches, 1, 3, seed=2).q, work.q)


def test_errors_are_relative_to_the_norm() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(expected, expected) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, torch.nan]), expected) == math.inf


class FakeFlashMLA:
    """The library's two entry points, which note what they are given."""

    def __init__(self) -> None:
        self.decoded: list[dict[str, Any]] = []
        self.prefilled: list[tuple[Any, ...]] = []

    def get_mla_metadata(self) -> tuple[object, None]:
        return object(), None

    def flash_mla_with_kvcache(self, **arguments: Any) -> tuple[Tensor, None]:
        self.decoded.append(arguments)
        return arguments["q"] + 1, None

    def flash_mla_sparse_fwd(self, *arguments: Any, attn_sink: Tensor) -> tuple[Tensor, None, None]:
        self.prefilled.append(arguments)
        return arguments[0] + 2, None, None


@pytest.fixture
def flashmla(monkeypatch: pytest.MonkeyPatch) -> tuple[FlashMLA, FakeFlashMLA, Work]:
    library = FakeFlashMLA()
    monkeypatch.setattr("dsv41.bench_flashmla.import_module", lambda name: library)
    backend = select_backend("reference", device="cpu", kv_cache_dtype="fp8_ds_mla_v4")
    work = make_work(backend, random_caches(backend, PAGES, seed=0), tokens=3, heads=8, seed=0)
    return FlashMLA(backend), library, work


def test_flashmla_is_given_the_same_bytes_and_padded_heads(flashmla: tuple[FlashMLA, FakeFlashMLA, Work]) -> None:
    peer, library, work = flashmla
    out = peer.call(work, work.rows[0])()
    assert torch.equal(out, work.q + 1)
    [given] = library.decoded
    assert given["q"].shape == (3, 1, 64, 512)
    assert not given["q"][:, :, 8:].any()
    for name, cache, pages in (("k_cache", work.caches.window, 4), ("extra_k_cache", work.caches.compressed, 16)):
        assert cache is not None
        assert given[name].shape == (pages, 64, 1, 584)
        assert given[name].data_ptr() == cache.data.data_ptr()
        assert given[name].stride() == (37440, 584, 584, 1)
    assert torch.equal(given["indices"][:, 0].long(), work.rows[0].window)
    assert torch.equal(given["extra_indices_in_kvcache"][:, 0].long(), work.rows[0].compressed)
    assert given["indices"].dtype == given["extra_indices_in_kvcache"].dtype == torch.int32
    assert torch.equal(given["attn_sink"][:8], work.layer.weights.attn_sink)
    assert (given["attn_sink"][8:] == -torch.inf).all()
    assert given["softmax_scale"] == 512**-0.5
    assert given["is_fp8_kvcache"] is True
    peer.call(work, work.rows[0])()
    assert library.decoded[1]["tile_scheduler_metadata"] is not given["tile_scheduler_metadata"]


def test_its_prefill_kernel_gets_gathered_rows(flashmla: tuple[FlashMLA, FakeFlashMLA, Work]) -> None:
    peer, library, work = flashmla
    run = peer.gathered(work, work.rows[0])
    assert run is not None
    assert torch.equal(run(), work.q + 2)
    [(_, kv, indices, scale)] = library.prefilled
    assert kv.shape[1:] == (1, 512)
    assert indices.shape == (3, 1, 640)
    assert scale == 512**-0.5
    assert work.caches.compressed is not None
    expected = work.caches.compressed.read(work.rows[0].compressed[2]).bfloat16()
    assert torch.equal(kv[indices[2, 0, 128:].long(), 0], expected)


def test_flashmla_refuses_records_that_it_cannot_read() -> None:
    backend = select_backend("reference", device="cpu", kv_cache_dtype="bfloat16")
    with pytest.raises(BackendError, match=r"cannot read bfloat16: .*--record fp8_ds_mla_v4"):
        FlashMLA(backend)


def test_flashmla_that_does_not_import_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr("dsv41.bench_flashmla.import_module", broken)
    backend = select_backend("reference", device="cpu", kv_cache_dtype="fp8_ds_mla_v4")
    with pytest.raises(BackendError, match=r"flash_mla does not import \(libcudart.*pip install"):
        FlashMLA(backend)


# What is printed


def test_the_table_has_a_row_for_each_case() -> None:
    found = report(peer=TheReference())
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    bench_cli.render(console, found)
    text = console.export_text()
    assert text.count("│ decode ") == 4
    assert text.count("│ prefill ") == 2
    assert "2000.0" in text
    assert "another 1.0" in text
    assert "wrong" not in text
    found["failures"] = ["something is off"]
    bench_cli.render(console, found)
    assert "wrong: something is off" in console.export_text()


@pytest.mark.parametrize("peer", [None, TheReference()])
def test_a_report_is_drawn(tmp_path: Path, peer: TheReference | None) -> None:
    pytest.importorskip("matplotlib")
    for name in ("picture.png", "picture.svg"):
        bench_cli.plot(report(peer=peer), tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "attention", *arguments])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = command("--backend", "reference")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: bench attention times GPUs")


def test_without_matplotlib_a_plot_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cli, "find_spec", lambda name: None)
    result = command("--plot", "picture.png")
    assert result.exit_code == 2
    assert "dsv41[plot]" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--heads", "8,x"], ["--tokens", "1;2"], ["--prefill", "many"], ["--vs", "flashinfer"]]
)
def test_arguments_that_are_none_are_usage_errors(arguments: list[str]) -> None:
    result = command(*arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.stderr


def test_sizes_below_one_are_mistakes() -> None:
    result = command("--tokens", "0")
    assert result.exit_code == 2
    assert result.stderr == "error: tokens has 0: expected at least 1; leave it out\n"


def test_the_command_prints_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[BenchOptions] = []

    def fake(options: BenchOptions, progress: object) -> bench.BenchReport:
        given.append(options)
        return bench_attention(SMALL, timer=timer, pages=PAGES)

    monkeypatch.setattr(bench, "bench_attention", fake)
    result = command("--heads", "8,16", "--tokens", "1", "--prefill", "", "--json", "--fused")
    assert result.exit_code == 0, result.output
    assert (given[0].heads, given[0].tokens, given[0].prefill, given[0].fused) == ((8, 16), (1,), (), True)
    assert given[0].record == "fp8_ds_mla_v4"
    assert len(json.loads(result.stdout)["cases"]) == 6
    assert "reference on" in command().stdout
