"""`dsv41 bench products` without a GPU: what it multiplies, and the least that it takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from dsv41 import bench, bench_cli, bench_products
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.bench_products import ProductOptions
from dsv41.cli import main
from dsv41.errors import BackendError, InputError
from dsv41.roofline import DeviceRates
from dsv41.synthetic import small_config

OPTIONS = ProductOptions(backend="reference", vs="reference", device="cpu", tokens=(1, 3))
CONFIG = small_config()
PRODUCTS = ["wq_a, wkv", "wq_b", "indexer's wq_b", "wo_a", "wo_b"]


@pytest.fixture(autouse=True)
def _known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "rates_of", lambda name: DeviceRates("a CPU", 1e9, 1e30))


def run(options: ProductOptions = OPTIONS) -> tuple[bench_products.ProductReport, list[list[torch.Tensor]]]:
    """The report, and the results of all calls of each graph."""
    results: list[list[torch.Tensor]] = []

    def timer(calls: Sequence[Callable[[], object]]) -> float:
        made = [call() for call in calls]
        assert all(isinstance(each, torch.Tensor) for each in made)
        results.append([each for each in made if isinstance(each, torch.Tensor)])
        return 1e-3 * len(results)

    return bench_products.bench_products(options, config=CONFIG, timer=timer), results


def test_every_product_is_timed_at_every_size_on_both() -> None:
    report, results = run()
    assert [(row.what, row.tokens) for row in report.rows] == [(what, n) for what in PRODUCTS for n in (1, 3)]
    assert len(results) == 2 * len(report.rows)
    assert [row.peer_seconds / row.seconds for row in report.rows][:2] == pytest.approx([2, 4 / 3])
    assert all(row.difference == 0 for row in report.rows)
    widths = {"wq_a, wkv": 128 + 512, "wq_b": 4096, "wo_a": 256, "wo_b": 256}
    for row, made in zip(report.rows, results[::2], strict=True):
        assert {len(each) for each in made} == {row.tokens}
        assert {each.shape[1] for each in made} == {widths.get(row.what, made[0].shape[1])}
        assert len({each.sum().item() for each in made}) == len(made)  # of other weights


def test_the_floor_counts_weights_with_their_scales_once() -> None:
    report, _ = run()
    rows = {(row.what, row.tokens): row for row in report.rows}
    assert rows["wq_b", 1].floor_seconds == pytest.approx((4096 * 128 * (1 + 1 / 1024) + 2 * (4096 + 128)) / 1e9)
    grouped = rows["wo_a", 3].floor_seconds - rows["wo_a", 1].floor_seconds
    assert grouped == pytest.approx(2 * 2 * (4096 + 256) / 1e9)


def test_results_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ReferenceBackend.single_products
    made: list[ReferenceBackend] = []

    def other(self: ReferenceBackend, layer: object) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        made.append(self)
        found = original(self, layer)  # type: ignore[arg-type]
        return {name: lambda x, of=of: of(x) * (2 if self is made[0] else 1) for name, of in found.items()}

    monkeypatch.setattr(ReferenceBackend, "single_products", other)
    report, _ = run()
    assert all(row.difference == pytest.approx(1) for row in report.rows)


def test_what_was_timed_is_shown() -> None:
    console = Console(width=120, record=True, quiet=False)
    bench_cli.render_products(console, json.loads(json.dumps(run()[0].to_dict())))
    text = console.export_text()
    assert all(what in text for what in PRODUCTS)
    assert "reference us" in text
    assert "1000.0" in text


def test_a_backend_that_shows_no_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ReferenceBackend, "single_products")
    with pytest.raises(BackendError, match="reference does not show its products"):
        run()


def test_without_a_gpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["bench", "products"])
    assert result.exit_code == 2
    assert "torch sees none here" in result.output


@pytest.mark.parametrize("tokens", [(), (4, 0)])
def test_sizes_that_cannot_be_timed_are_refused(tokens: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="expected at least one size"):
        replace(OPTIONS, tokens=tokens)
