"""`dsv41 bench attention` without a GPU: its data, its checks, its tables. Times are made up here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console
from torch import Tensor

from dsv41 import bench, bench_cli
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.bench import BenchOptions, Work, bench_attention, make_work, random_caches, relative_error
from dsv41.bench_flashmla import FlashMLA
from dsv41.bench_rows import Rows, chunk_rows, random_rows
from dsv41.cli import main
from dsv41.errors import BackendError, InputError
from dsv41.hal.select import select_backend
from dsv41.hal.types import AttnOutput, LayerSpec
from dsv41.roofline import DeviceRates, attention_work
from dsv41.timing import peak_bytes

from ..backends.cuda import flash_mla_double

PAGES = (4, 16)
SMALL = BenchOptions(backend="reference", device="cpu", heads=(2, 3), tokens=(1, 3), prefill=(4,))


def timer(calls: Sequence[Callable[[], object]]) -> float:
    """Makes every call, as a timer does, and finds 2 ms."""
    for call in calls:
        call()
    return 2e-3


class TheReference:
    """A peer that computes the same another way, or something else if it `errs`, or does where it gathers."""

    label = "another 1.0"

    def __init__(self, errs: float = 0.0, gathered_errs: float = 0.0) -> None:
        self.errs, self.gathered_errs, self.calls = errs, gathered_errs, 0
        self.gathered_calls: list[bool] = []

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

    def gathered(self, work: Work, rows: Rows, *, before: bool = False) -> Callable[[], Tensor] | None:
        attend = self.call(work, rows)

        def run() -> Tensor:
            self.gathered_calls.append(before)
            return attend() * (1 + self.gathered_errs)

        return run


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
        (phase, tokens, heads)
        for heads in (2, 3)
        for phase, tokens in (("decode", 1), ("decode", 3), ("prefill", 4), ("chunk", 4))
    ]
    for case in found["cases"]:
        distinct = (131, 512) if case["phase"] == "chunk" else None
        work = attention_work(case["tokens"], case["heads"], ((128, 584), (512, 584)), distinct=distinct)
        assert case["microseconds"] == pytest.approx(2000)
        assert case["tflops_per_second"] == pytest.approx(work.flops / 2e-3 / 1e12)
        assert case["gigabytes_per_second"] == pytest.approx(work.bytes / 2e-3 / 1e9)
        assert case["floor_seconds"] == max(work.bytes, work.flops) / 1e9
        assert case["over_floor"] == pytest.approx(2e-3 / case["floor_seconds"])
        assert case["error"] < 1e-2
        assert case["peer"] is case["peer_seconds"] is case["over_peer"] is case["over_gathered"] is None
        assert case["extra_bytes"] is None  # of a CPU nobody counts them
    assert (found["backend"], found["record"], found["peer"]) == ("reference", "fp8_ds_mla_v4", None)
    assert found["failures"] == []


def test_a_peer_is_compared_and_then_timed() -> None:
    peer = TheReference()
    found = report(peer=peer)
    for case in found["cases"]:
        assert case["peer"] == "another 1.0"
        assert 0 < case["peer_error"] < 1e-2  # it does not round to bf16
        assert case["over_peer"] == 1.0
        fields = ("peer_gathered_seconds", "peer_gathered_kernel_seconds", "peer_gathered_error", "over_gathered")
        assert {case[name] is not None for name in fields} == {case["phase"] != "decode"}
    # Of each of four cases of one call: compared, timed, and the kernel alone.
    assert peer.gathered_calls == [False, False, True] * 4
    assert found["failures"] == []


def test_a_peer_that_cannot_gather_is_timed_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TheReference, "gathered", lambda *_, **__: None)
    cases = report(peer=TheReference())["cases"]
    assert all(case["peer_seconds"] is not None and case["peer_gathered_seconds"] is None for case in cases)


def test_gathered_rows_that_are_wrong_are_a_failure() -> None:
    found = report(peer=TheReference(gathered_errs=0.03))
    assert len(found["failures"]) == 4
    assert "chunk of 4 tokens with 2 heads: relative error 2.9" in found["failures"][1]
    assert "against another 1.0, rows gathered" in found["failures"][1]


def test_what_a_call_takes_is_counted_without_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that the backend brings, as the peer does, is none; the scratch that it keeps for the call is some."""

    class Brings(ReferenceBackend):
        def attention_bytes(self, spec: LayerSpec, tokens: int) -> int:
            return 1000 * tokens

        def forward_mqa(self, *given: Any) -> None:
            super().forward_mqa(*given)
            out: AttnOutput = given[-1]
            if brings:
                out.data = out.data.clone()

    def peak(call: Callable[[], object], device: torch.device) -> int:
        call()
        return 1 << 20

    monkeypatch.setattr(bench, "peak_bytes", peak)
    monkeypatch.setattr(bench, "select_backend", lambda *_, **__: Brings(kv_cache_dtype="fp8_ds_mla_v4"))
    options = replace(SMALL, heads=(2,), tokens=())
    for brings in (False, True):
        for case in report(options, TheReference())["cases"]:
            output = 4 * 2 * 512 * 2
            assert case["extra_bytes"] == (1 << 20) + 4000 - brings * output
            assert case["peer_gathered_extra_bytes"] == (1 << 20) - output


def test_sides_that_differ_are_a_failure() -> None:
    found = report(peer=TheReference(errs=0.03))
    assert len(found["failures"]) == len(found["cases"]) + 4  # which are wrong over gathered rows too
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


def test_a_chunk_reads_what_the_tokens_of_one_request_do() -> None:
    """Windows that move on by a row a token, choices among as many rows as there are tokens, pages of its own."""
    backend = select_backend("reference", device="cpu", kv_cache_dtype="fp8_ds_mla_v4")
    caches = random_caches(backend, (12, 8), seed=0)
    assert caches.compressed is not None
    for tokens, topk, held in ((100, 40, 100), (30, 90, 90)):
        generator = torch.Generator().manual_seed(0)
        chunks = chunk_rows(caches.window, caches.compressed, 24, tokens, 128, topk, generator)
        # Of 4 or 3 window pages each of 12, and of 2 compressed ones of 8.
        assert len(chunks) == (3 if tokens == 100 else 4)
        pages: list[Tensor] = []
        for rows in chunks:
            assert rows.window.shape == (tokens, 128)
            assert rows.compressed.shape == (tokens, topk)
            assert torch.equal(rows.window[1:, :-1], rows.window[:-1, 1:])
            own = torch.cat((rows.window[0], rows.window[1:, -1]))
            assert own.unique().numel() == tokens + 127
            assert torch.equal(own % 64, torch.arange(len(own)) % 64)
            assert all(row.unique().numel() == topk for row in rows.compressed)
            counts = torch.bincount(rows.compressed.unique() // 64)
            assert sorted(counts[counts > 0].tolist()) == [held - 64, 64]
            pages += [(own // 64).unique(), 100 + (rows.compressed // 64).unique()]
        assert torch.cat(pages).unique().numel() == sum(map(len, pages))
    one = chunk_rows(caches.window, caches.compressed, 1, 30, 128, 90, torch.Generator().manual_seed(0))
    assert len(one) == 1
    with pytest.raises(InputError, match="a chunk reads 13 pages of a cache of 12"):
        chunk_rows(caches.window, caches.compressed, 24, 700, 128, 40, torch.Generator())


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
        self.prefilled: list[dict[str, Any]] = []

    def get_mla_metadata(self) -> tuple[object, None]:
        return object(), None

    def flash_mla_with_kvcache(self, **arguments: Any) -> tuple[Tensor, None]:
        self.decoded.append(arguments)
        return arguments["q"] + 1, None

    def flash_mla_sparse_fwd(self, **arguments: Any) -> tuple[Tensor, None, None]:
        self.prefilled.append(arguments)
        return arguments["q"] + 2, None, None


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


@pytest.mark.parametrize("before", [False, True])
def test_its_prefill_kernel_gets_gathered_rows(flashmla: tuple[FlashMLA, FakeFlashMLA, Work], before: bool) -> None:
    """All rows of the pages that are read, and no others, in a tensor that each call makes, unless made before."""
    pytest.importorskip("triton")
    peer, library, work = flashmla
    size = 64
    rows = Rows(work.rows[0].window % (2 * size) + size, work.rows[0].compressed[:, :70] % (5 * size))
    run = peer.gathered(work, rows, before=before)
    assert run is not None
    changed = work.caches.window
    changed.write(rows.window[0, :1], torch.full((1, 512), 3.0))
    assert torch.equal(run(), work.q + 2)
    run()
    given, again = library.prefilled
    kv, indices = given["kv"], given["indices"]
    assert (kv is again["kv"]) == before
    assert kv.shape == ((2 + 5) * size, 1, 512)
    assert kv.dtype == torch.bfloat16
    assert (indices.shape, indices.dtype) == ((3, 1, 128 + 70), torch.int32)
    assert given["sm_scale"] == 512**-0.5
    assert work.caches.compressed is not None
    parts = ((changed, rows.window), (work.caches.compressed, rows.compressed))
    read = torch.cat([cache.read(slots.flatten()).view(3, -1, 512) for cache, slots in parts], dim=1)
    differ = (kv[indices[:, 0].long(), 0] != read.bfloat16()).any(-1)
    # What was written after the call was made shows only where the call gathers.
    assert differ.any() == before
    assert not differ[(read != 3).any(-1)].any()


def test_both_of_its_paths_give_what_the_reference_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    library = flash_mla_double.FlashMLA()
    monkeypatch.setattr("dsv41.bench_flashmla.import_module", lambda name: library)
    peer = FlashMLA(select_backend("reference", device="cpu", kv_cache_dtype="fp8_ds_mla_v4"))
    options = replace(SMALL, heads=(8,), tokens=(), prefill=(2,))
    # Gathering takes long without a GPU, so what is timed is not called again.
    found = bench_attention(options, timer=lambda calls: 1.0, peer=peer, pages=(3, 8))
    assert found.failures == []
    assert [case.phase for case in found.cases] == ["prefill", "chunk"]
    assert all(case.peer_gathered_error is not None and case.peer_gathered_error < 1e-2 for case in found.cases)


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
    assert text.count("│ prefill ") == text.count("│ chunk ") == 4  # beside both paths of the peer
    assert text.count("x gathered") == 2
    assert "2000.0" in text
    assert "another 1.0" in text
    assert "wrong" not in text
    found["failures"] = ["something is off"]
    bench_cli.render(console, found)
    assert "wrong: something is off" in console.export_text()
    found["cases"][2] |= {"extra_bytes": 12_340_000, "peer_gathered_extra_bytes": 2_348_810_240}
    bench_cli.render(console, found)
    text = console.export_text()
    assert text.count(" 12.3 ") == 2
    assert " 2348.8 " in text


def test_without_a_peer_there_is_one_table_a_head_count() -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    bench_cli.render(console, report())
    text = console.export_text()
    assert text.count("extra MB") == 2
    assert "gathered" not in text


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
    assert len(json.loads(result.stdout)["cases"]) == 8
    assert "reference on" in command().stdout


def test_memory_of_a_cpu_is_not_counted() -> None:
    assert peak_bytes(lambda: pytest.fail("called"), torch.device("cpu")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts a GPU's memory")
def test_memory_that_a_call_holds_is_counted_at_its_peak() -> None:
    """Its scratch and its result, but nothing that its first call keeps."""
    device, size = torch.device("cuda"), 64 << 20
    kept: list[Tensor] = []

    def call() -> Tensor:
        if not kept:
            kept.append(torch.empty(3 * size, dtype=torch.uint8, device=device))
        scratch = torch.empty(2 * size, dtype=torch.uint8, device=device)
        return scratch[:size].clone()

    assert peak_bytes(call, device) == pytest.approx(3 * size, abs=2 << 20)
