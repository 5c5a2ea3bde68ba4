"""`dsv41 convert`: what it prints, and that a mistake costs one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.checkpoint import load_checkpoint
from dsv41.cli import main
from dsv41.hal.layout import CacheLayout
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint

from .toys import MAX_LEN, TOY, noise


def session_of(path: Path, **dtypes: str) -> Session:
    return Session(AttentionStack(load_checkpoint(path), ReferenceBackend(**dtypes), max_len=MAX_LEN))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("convert") / "toy", config=TOY)


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("convert") / "request"
    with torch.no_grad():
        session = session_of(checkpoint, kv_cache_dtype="fp8_ds_mla_v4", index_cache_dtype="fp8")
        request = session.add_request()
        session.step({request: noise(7, 19, TOY.hidden_size).bfloat16()})
        session.export_request(request, file)
        cache = session.caches[0].window
        slots = torch.tensor([session.find(request).pages.tables[0][0] * 64 + 5])
        values, scales = cache.read_bytes(slots)
        scales[0, 2] = 255
        cache.write_bytes(slots, values, scales)
        session.export_request(request, file.with_name("nan"))
    return file


def convert(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["convert", *map(str, arguments)], env={"COLUMNS": "160"})


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_converted_file_is_imported_as_it_is(checkpoint: Path, exported: Path, tmp_path: Path) -> None:
    result = convert(exported, tmp_path / "out", "--to", "reference", "--json")
    assert result.exit_code == 0, result.output
    report = strict(result.stdout)
    assert set(report) == {"length", "bytes", "sha256", "caches", "scrubbed"}
    assert (report["length"], report["scrubbed"]) == (19, {})
    assert report["bytes"] == (tmp_path / "out").stat().st_size
    layouts = ReferenceBackend().layouts
    window = report["caches"]["layers.0.attn.window"]
    before, after = (CacheLayout.from_dict(window[end]) for end in ("from", "to"))
    assert (before.record.name, after.record, after.scale_placement) == (
        "fp8_ds_mla_v4", layouts.window.record, layouts.window.scale_placement,
    )  # fmt: skip
    assert (window["rows"], window["exact"]) == (16, False)  # the window and max_draft
    assert 0 < window["max_relative_error"] < 2**-3
    assert len(report["caches"]) == 7 + 2 * 2

    session = session_of(checkpoint)
    found = session.import_request(tmp_path / "out")
    assert all(part.exact for part in found.caches.values())
    straight = session.import_request(exported)
    assert {name: part.max_relative_error for name, part in straight.caches.items()} == {
        name: part["max_relative_error"] for name, part in report["caches"].items()
    }
    inputs = noise(7, 3, TOY.hidden_size, seed=1).bfloat16()
    with torch.no_grad():
        outputs = [session.step({request: inputs})[request] for request in (found.request, straight.request)]
    assert torch.equal(*outputs)


def test_the_table_has_a_line_for_each_cache(exported: Path, tmp_path: Path) -> None:
    arguments = ("--to", "reference", "--kv-cache-dtype", "fp8_ds_mla_v4", "--index-cache-dtype", "float32")
    result = convert(exported, tmp_path / "out", *arguments)
    assert result.exit_code == 0, result.output
    lines = {line.split()[1]: line for line in result.stdout.splitlines() if ".attn." in line}
    assert len(lines) == 11
    for name, parts in {
        "layers.0.attn.window": ("16", "fp8_ds_mla_v4, page, 64 a page", "yes", "0.00e+00"),
        "layers.1.attn.index": ("9", "index_fp8, page, 64 a page", "index_float32, none, 64 a page", "yes"),
        "layers.4.attn.compressed": ("19", "fp8_ds_mla_v4, page"),
    }.items():
        assert all(part in lines[name] for part in parts), lines[name]
    assert f"wrote {tmp_path / 'out'}, " in result.stdout


def test_nan_is_refused_or_scrubbed(exported: Path, tmp_path: Path) -> None:
    spoiled = exported.with_name("nan")
    result = convert(spoiled, tmp_path / "out", "--to", "reference")
    assert result.exit_code == 2
    assert "layers.0.attn.window (1 groups)" in result.stderr
    assert not list(tmp_path.iterdir())
    result = convert(spoiled, tmp_path / "out", "--to", "reference", "--nan", "scrub")
    assert result.exit_code == 0, result.output
    assert "layers.0.attn.window: 1 groups with NaN or infinite numbers are zero now" in result.stdout
    result = convert(spoiled, tmp_path / "out", "--to", "reference", "--nan", "scrub", "--json")
    assert strict(result.stdout)["scrubbed"] == {"layers.0.attn.window": 1}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--to", "flshmla"), "did you mean 'flashmla'? expected one of"),
        (("--to", "reference", "--kv-cache-dtype", "nvfp5"), "kv_cache_dtype 'nvfp5' is unknown: reference reads auto"),
        (("--to", "reference", "--index-cache-dtype", "fp16"), "index_cache_dtype 'fp16' is unknown"),
    ],
)
def test_a_mistake_costs_one_line(exported: Path, tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    result = convert(exported, tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_broken_file_costs_one_line(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(exported.read_bytes()[:-1])
    for source in (tmp_path / "in", tmp_path / "missing"):
        result = convert(source, tmp_path / "out", "--to", "reference")
        assert result.exit_code == 2
        assert str(source) in result.stderr
        assert len(result.stderr.splitlines()) == 1
    result = convert(exported, tmp_path / "out")
    assert result.exit_code == 2
    assert "--to" in result.stderr
