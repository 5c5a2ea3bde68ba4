"""`dsv41 bench layer` and `dsv41 bench index` without a GPU: what they run, and the least that it takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from dsv41 import bench, bench_cli, bench_steps
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.bench_steps import Launches, StepOptions, bench_choices, bench_layers
from dsv41.cli import main
from dsv41.errors import BackendError, InputError
from dsv41.hal.types import AttnInputs, LayerState, Selection, StepPlan
from dsv41.hal.weights import tensors
from dsv41.roofline import DeviceRates
from dsv41.synthetic import small_config

OPTIONS = StepOptions(backend="reference", device="cpu", tokens=(1, 3), context=(100, 160), steps=1)
CONFIG = small_config()


def timer(calls: Sequence[Callable[[], object]]) -> float:
    for call in calls:
        call()
    return 2e-3


@pytest.fixture(autouse=True)
def _known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "rates_of", lambda name: DeviceRates("a CPU", 1e9, 1e30))


def test_a_source_and_a_consumer_are_timed_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, int, int]] = []
    attend = ReferenceBackend.forward_mqa

    def watched(
        self: ReferenceBackend,
        inputs: AttnInputs,
        layer: LayerState,
        selection: Selection | None,
        plan: StepPlan,
        out: object,
    ) -> None:
        assert selection is not None
        ran.append((layer.spec.layer_id, len(inputs.q), int((selection.topk_indices >= 0).sum(1).min())))
        attend(self, inputs, layer, selection, plan, out)  # type: ignore[arg-type]

    monkeypatch.setattr(ReferenceBackend, "forward_mqa", watched)
    report = bench_layers(OPTIONS, config=CONFIG, timer=timer)
    assert [(row.what, row.tokens, row.context) for row in report.rows] == [
        (what, tokens, context)
        for context in (100, 160)
        for tokens in (1, 3)
        for what in ("source", "consumer", "both")
    ]
    # To have something published, the source runs once more; every token sees a whole selection.
    assert ran == [
        (layer, tokens, CONFIG.index_topk) for _ in range(2) for tokens in (1, 3) for layer in (1, 1, 2, 1, 2)
    ]


def test_steps_of_a_graph_have_weights_and_caches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is timed once, over the same numbers in other memory; the time is that of one."""
    layers = bench_steps._Layers(replace(OPTIONS, steps=3), CONFIG, (1, 2))
    assert len(layers.copies) == len(layers[1]) == len(layers[2]) == 3
    weights = [list(tensors(stack.layers[0].state.weights)) for stack in layers.copies]
    caches = [list(tensors(stack.caches)) for stack in layers.copies]
    for first, other in (weights[:2], weights[1:], caches[:2], caches[1:]):
        for (name, one), (_, same) in zip(first, other, strict=True):
            assert one.shape == same.shape
            assert one.data_ptr() != same.data_ptr(), name
    assert all(torch.equal(one[1], same[1]) for one, same in zip(*weights[1:], strict=True))

    ran: list[str] = []
    step_of = {id(layer.state): f"{what}{number}" for what in (1, 2) for number, layer in enumerate(layers[what])}
    monkeypatch.setattr(bench_steps, "_Layers", lambda *_: layers)
    attend = ReferenceBackend.attend

    def watched(self: ReferenceBackend, inputs: AttnInputs, layer: LayerState, *rest: Any) -> Any:
        ran.append(step_of[id(layer)])
        return attend(self, inputs, layer, *rest)

    monkeypatch.setattr(ReferenceBackend, "attend", watched)
    options = replace(OPTIONS, tokens=(1,), context=(100,), steps=3)
    report = bench_layers(options, config=CONFIG, timer=timer)
    sources, consumers = ["10", "11", "12"], ["20", "21", "22"]
    both = [each for pair in zip(sources, consumers, strict=True) for each in pair]
    assert ran == [*sources, *sources, *consumers, *both]
    assert report.steps == 3
    assert report.step_bytes == sum(tensor.nbytes for _, tensor in tensors([layers.copies[0].caches])) + sum(
        tensor.nbytes for layer in layers.copies[0].layers for _, tensor in tensors(layer.state.weights)
    )


def test_steps_that_would_take_too_much_memory_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench_steps._Layers(OPTIONS, CONFIG, (1, 2))
    for limit, count in ((0, 1), (one.copy_bytes * 2 + 1, 2)):
        monkeypatch.setattr(bench_steps, "_COPIES_BYTES", limit)
        assert len(bench_steps._Layers(replace(OPTIONS, steps=4), CONFIG, (1, 2)).copies) == count


def test_the_floor_counts_weights_once_and_rows_once_a_token() -> None:
    report = bench_layers(OPTIONS, config=CONFIG, timer=timer)
    rows = {(row.what, row.tokens, row.context): row for row in report.rows}
    first, more = rows["consumer", 1, 160], rows["consumer", 3, 160]
    weights = (
        sum(
            count + blocks
            for count, blocks in (
                (128 * 256, 4 * 8),  # wq_a
                (4096 * 128, 128 * 4),  # wq_b
                (512 * 256, 16 * 8),  # wkv
                (256 * 1024, 8 * 32),  # wo_a
                (256 * 256, 8 * 8),  # wo_b
            )
        )
        + 2 * (128 + 512)
        + 4 * 8
    )
    records = 32 * (528 + 4) + 16 * (288 + 4)
    assert first.bytes == weights + records + 2 * 2 * 256
    assert more.bytes - first.bytes == 2 * (records + 2 * 2 * 256)
    assert first.floor_seconds == pytest.approx(first.bytes / 1e9)
    # The source has a compressor and an indexer more, and reads every visible key.
    source = rows["source", 1, 160]
    assert rows["source", 3, 160].bytes - source.bytes == 2 * (records + 2 * 2 * 256 + 80 * 68)
    assert rows["both", 3, 160].bytes == more.bytes + rows["source", 3, 160].bytes


def test_choices_read_all_keys_or_those_of_candidates() -> None:
    report = bench_choices(replace(OPTIONS, context=(160,)), config=CONFIG, timer=timer)
    rows = {(row.what, row.tokens): row for row in report.rows}
    assert rows["all rows", 3].bytes - rows["all rows", 1].bytes == 2 * 160 * 68
    assert rows["candidates", 3].bytes - rows["candidates", 1].bytes == 2 * 8 * 4 * 68


def test_requests_have_pages_of_their_own() -> None:
    layers = bench_steps._Layers(OPTIONS, CONFIG, (1, 2))
    hidden, plan = layers.step(3, 160)
    seen = plan.window_indices[plan.window_indices >= 0]
    assert len(seen) == 3 * CONFIG.sliding_window
    assert len(seen.unique()) == len(seen)
    pages = plan.batch.compressed_tables[2].pages
    assert len(pages.unique()) == pages.numel()
    assert hidden.shape == (3, 256)


def test_what_is_launched_is_shown_with_its_share() -> None:
    report = bench_layers(replace(OPTIONS, tokens=(1,), context=(100,)), config=CONFIG, timer=timer)
    report.rows[0].launches = [Launches("gemm", 3, 3e-6), Launches("attend", 1, 1e-6)]
    console = Console(width=120, record=True, quiet=False)
    bench_cli.render_steps(console, json.loads(json.dumps(report.to_dict())))
    text = console.export_text()
    assert "75 %" in text
    assert "25 %" in text
    assert "2000.0" in text
    assert "one step of 1 in a CUDA graph" in text
    assert "4 TB/s" not in text


def test_without_a_gpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="torch sees none here"):
        bench_layers(OPTIONS, config=CONFIG)
    for command in ("layer", "index"):
        result = CliRunner().invoke(main, ["bench", command])
        assert result.exit_code == 2
        assert "torch sees none here" in result.output


@pytest.mark.parametrize(
    ("given", "named"),
    [({"tokens": ()}, "tokens is empty"), ({"context": (4, 0)}, "context has 0"), ({"steps": 0}, "steps is 0")],
)
def test_sizes_that_cannot_be_timed_are_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        replace(OPTIONS, **given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="profiles a GPU")
def test_launches_are_counted_on_a_gpu() -> None:
    from dsv41.timing import graph_launches

    x = torch.randn(1 << 20, device="cuda")
    found = graph_launches(lambda: (x.add_(1), x.add_(1), x.sum()))
    assert sum(count for _, count, _ in found) >= 3
    assert all(seconds > 0 for _, _, seconds in found)
