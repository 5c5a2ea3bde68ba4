"""The commands: what they print, and that a mistake costs one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from dsv41.backends.reference.layouts import INDEX_RECORDS, KV_RECORDS
from dsv41.cli import main
from dsv41.hal.records import RECORDS
from dsv41.synthetic import make_checkpoint

from .toys import TOY


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cli") / "toy", config=TOY)


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSV41_BACKEND", raising=False)


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def strict(text: str) -> Any:
    """JSON that has no NaN and no infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def report(*arguments: object, status: int = 0) -> dict[str, Any]:
    result = command("run", *arguments, "--json", "--device", "cpu")
    assert result.exit_code == status, result.output
    found: dict[str, Any] = strict(result.stdout)
    return found


def test_the_report_has_every_field(checkpoint: Path) -> None:
    found = report(checkpoint, "--prompt", 20, "--decode", 3, "--chunk", 8)
    assert found["backend"] == "reference"
    assert found["device"] == "cpu"
    assert found["dtype"] == "bfloat16"
    assert (found["kv_cache_dtype"], found["index_cache_dtype"]) == ("nvfp4_ds_mla", "mxfp4")
    parts = {"window": 7 * 528, "compressed": 288 * 1.5, "index": 68 * 1.5}
    assert found["cache_bytes_per_token"] == parts | {"total": sum(parts.values())}
    assert (found["prefill_tokens"], found["decode_tokens"]) == (20, 3)
    for name in ("prefill_tokens_per_second", "decode_tokens_per_second"):
        assert 0 < found[name] < 1e6
    assert 2**20 < found["peak_memory_bytes"] < 2**36
    assert found["weight_bytes"] > 0
    assert list(found["layers"]) == [str(layer) for layer in range(7)]
    assert found["layers"]["0"] == "window only"
    assert found["layers"]["5"] == "kv of layer 4, ratio 1, index source, reads candidates"
    assert found["verify"] is None
    assert found["failures"] == []


def test_verify_compares_every_layer_with_the_reference(checkpoint: Path) -> None:
    found = report(checkpoint, "--prompt", 20, "--decode", 3, "--verify")
    reference = found["verify"]["reference"]
    assert 0 <= reference["max_relative_error"] <= 2e-2
    assert list(reference["layers"]) == [str(layer) for layer in range(7)]
    assert "golden" not in found["verify"]
    assert found["failures"] == []


@pytest.mark.parametrize(("requests", "chunk", "decode"), [(3, 7, 2), (1, 1, 0), (2, 1000, 1)])
def test_requests_and_chunks_go_through(checkpoint: Path, requests: int, chunk: int, decode: int) -> None:
    arguments = ("--prompt", 9, "--decode", decode, "--requests", requests, "--chunk", chunk, "--verify")
    found = report(checkpoint, *arguments)
    assert found["prefill_tokens"] == 9 * requests
    assert found["decode_tokens"] == decode * requests
    assert (found["decode_tokens_per_second"] is None) == (decode == 0)


# A row of the window of 7 layers, and what 1.5 rows cost in the caches of two sources.
COSTS = {
    "nvfp4_ds_mla": (528, 288),
    "fp8_ds_mla": (528, 528),
    "bfloat16": (1024, 1024),
    "fp8_e4m3": (512, 512),
    "float32": (2048, 2048),
}
ALIASES = {"auto": "nvfp4_ds_mla", "fp8": "fp8_ds_mla"}
INDEX_COSTS = {"mxfp4": 68, "fp8": 132, "float32": 512}


@pytest.mark.parametrize("kv", [*COSTS, *ALIASES])
def test_kv_cache_dtypes_are_resolved_and_cost_what_their_records_do(checkpoint: Path, kv: str) -> None:
    found = report(checkpoint, "--prompt", 9, "--decode", 1, "--kv-cache-dtype", kv, "--verify")
    name = ALIASES.get(kv, kv)
    assert found["kv_cache_dtype"] == name
    window, compressed = COSTS[name]
    assert found["cache_bytes_per_token"]["window"] == 7 * window
    assert found["cache_bytes_per_token"]["compressed"] == 1.5 * compressed


@pytest.mark.parametrize("index", [*INDEX_COSTS, "auto"])
def test_index_cache_dtypes_too(checkpoint: Path, index: str) -> None:
    found = report(checkpoint, "--prompt", 9, "--decode", 1, "--index-cache-dtype", index)
    name = "mxfp4" if index == "auto" else index
    assert found["index_cache_dtype"] == name
    assert found["cache_bytes_per_token"]["index"] == 1.5 * INDEX_COSTS[name]


def test_every_dtype_of_the_reference_is_priced_here() -> None:
    assert KV_RECORDS.keys() - {"fp8_ds_mla_v4"} == COSTS.keys()
    assert INDEX_RECORDS.keys() == INDEX_COSTS.keys()


def test_layers_can_be_chosen(checkpoint: Path) -> None:
    found = report(checkpoint, "--layers", "0,4,5", "--prompt", 9, "--decode", 0)
    assert list(found["layers"]) == ["0", "4", "5"]
    assert found["cache_bytes_per_token"]["compressed"] == 288
    assert found["weight_bytes"] < report(checkpoint, "--prompt", 9, "--decode", 0)["weight_bytes"]


def test_activations_are_quantised_on_request(checkpoint: Path) -> None:
    arguments = (checkpoint, "--prompt", 20, "--decode", 0, "--verify")
    assert report(*arguments, "--quantize-activations")["failures"] == []


def test_the_backend_can_be_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert report(checkpoint, "--prompt", 4, "--decode", 0, "--backend", "Reference")["backend"] == "reference"
    monkeypatch.setenv("DSV41_BACKEND", "reference")
    assert report(checkpoint, "--prompt", 4, "--decode", 0)["backend"] == "reference"


def test_a_person_sees_tables(checkpoint: Path) -> None:
    result = command("run", checkpoint, "--prompt", 20, "--decode", 2, "--verify", "--device", "cpu")
    assert result.exit_code == 0, result.output
    for words in ("reference on cpu", "window only", "publishes candidates", "nvfp4_ds_mla", "20 tokens", "verified"):
        assert words in result.stdout
    assert "largest relative error" in result.stdout
    assert "Traceback" not in result.output


# Mistakes


def copy(path: Path, out: Path) -> Path:
    shutil.copytree(path, out)
    return out


BAD: dict[str, tuple[list[object], list[str]]] = {
    "no tokens": (["--prompt", 0], ["prompt is 0", "at least 1"]),
    "negative decode": (["--decode", -1], ["decode is -1"]),
    "no requests": (["--requests", 0], ["requests is 0"]),
    "no chunk": (["--chunk", 0], ["chunk is 0"]),
    "an unknown backend": (["--backend", "flashmlaa"], ["flashmlaa", "flashmla"]),
    "a backend that cannot run here": (["--backend", "flashmla"], ["flashmla", "cannot run on cpu"]),
    "an unknown kv dtype": (["--kv-cache-dtype", "fp8_ds_mal"], ["fp8_ds_mal", "fp8_ds_mla"]),
    "an index dtype for the kv cache": (["--kv-cache-dtype", "mxfp4"], ["mxfp4", "nvfp4_ds_mla"]),
    "an unknown index dtype": (["--index-cache-dtype", "fp4"], ["fp4", "mxfp4"]),
    "an unknown device": (["--device", "tpu"], ["tpu"]),
    "a layer without its source": (["--layers", "0,5"], ["layer 4", "KV source"]),
    "an unknown layer": (["--layers", "99"], ["99"]),
    "more tokens than the model has positions": (["--prompt", 70000], ["70016", "65536"]),
}


def one_line(result: Result, *named: str) -> None:
    """The error is one line on stderr, without a traceback, and nothing was printed as a result."""
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    line, *more = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert not more or "cannot run on" in line  # then its reasons follow
    assert "Traceback" not in result.output
    for words in named:
        assert words in result.stderr, line


@pytest.mark.parametrize("what", BAD)
def test_a_mistake_costs_one_line(checkpoint: Path, what: str) -> None:
    arguments, named = BAD[what]
    if "--device" not in arguments:
        arguments = [*arguments, "--device", "cpu"]
    one_line(command("run", checkpoint, "--json", *arguments), *named)


def test_a_misspelt_environment_is_a_mistake(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_BACKEND", "referense")
    one_line(command("run", checkpoint, "--device", "cpu"), "referense", "DSV41_BACKEND", "reference")


def test_layers_that_are_no_numbers_are_a_usage_error(checkpoint: Path) -> None:
    result = command("run", checkpoint, "--layers", "0,x")
    assert result.exit_code == 2
    assert "expected layer ids such as" in result.output


def test_what_is_no_checkpoint_is_said(checkpoint: Path, tmp_path: Path) -> None:
    one_line(command("run", tmp_path / "missing", "--device", "cpu"), "missing", "config.json")
    one_line(command("run", tmp_path, "--device", "cpu"), "config.json")
    broken = copy(checkpoint, tmp_path / "broken")
    (broken / "config.json").write_text("{")
    one_line(command("run", broken, "--device", "cpu"), "not JSON")
    cut = copy(checkpoint, tmp_path / "cut")
    shard = sorted(cut.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    one_line(command("run", cut, "--device", "cpu"), shard.name)
    bad_io = copy(checkpoint, tmp_path / "bad-io")
    (bad_io / "io.safetensors").write_bytes(b"no safetensors")
    one_line(command("run", bad_io, "--verify", "--device", "cpu"), "io.safetensors", "cannot be read")


def with_nan(checkpoint: Path, out: Path, name: str) -> Path:
    copy(checkpoint, out)
    (shard,) = [path for path in sorted(out.glob("model-*.safetensors")) if name in load_file(path)]
    tensors = load_file(shard)
    if tensors[name].dtype == torch.float8_e4m3fn:
        tensors[name].view(torch.uint8)[0, 0] = 0x7F
    else:
        tensors[name].flatten()[0] = torch.nan
    save_file(tensors, shard)
    return out


@pytest.mark.parametrize(
    "name",
    ["layers.0.attn.wq_a.weight", "layers.1.attn.indexer.wq_b.weight", "layers.4.attn.compressor.norm.weight"],
)
def test_nan_in_the_weights_is_reported_with_verify(checkpoint: Path, tmp_path: Path, name: str) -> None:
    broken = with_nan(checkpoint, tmp_path / "nan", name)
    one_line(command("run", broken, "--verify", "--device", "cpu"), "NaN", name)


# The other commands


def test_layouts_draws_every_record() -> None:
    result = command("layouts")
    assert result.exit_code == 0
    for record in RECORDS.values():
        assert record.name in result.stdout


@pytest.mark.parametrize("machine", [None, "h200", "mi300x"])
def test_probe_prints_json(machine: str | None) -> None:
    result = command("probe", "--json", *(["--as", machine] if machine else []))
    assert result.exit_code == 0, result.output
    found = strict(result.stdout)
    keys = [device["key"] for device in found["devices"]]
    assert list(found["chosen"]) == keys
    assert "cpu" in keys
    assert found["chosen"]["cpu"] == "reference"
    for backend in found["backends"].values():
        for answer in backend.values():
            assert isinstance(answer["usable"], bool)
            assert all({"class", "text"} <= reason.keys() for reason in answer["reasons"])
            assert answer["usable"] or answer["reasons"]


def test_an_unknown_machine_costs_one_line() -> None:
    one_line(command("probe", "--as", "h2000"), "h2000", "h200")


def test_a_small_checkpoint_is_made_and_runs(tmp_path: Path) -> None:
    out = tmp_path / "small"
    made = command("make-checkpoint", out, "--small", "--layers", "0,4,6")
    assert made.exit_code == 0, made.output
    assert f"wrote {out}" in made.stdout
    found = report(out, "--prompt", 40, "--decode", 2, "--verify")
    assert list(found["layers"]) == ["0", "4", "6"]
    one_line(command("make-checkpoint", out, "--small"), "already holds")


HEAVY = ("torch", "numpy", "safetensors", "rich", "triton", "dsv41.hal", "dsv41.session")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"], ["run", "--help"], ["probe", "--help"]])
def test_help_answers_without_importing_anything_heavy(arguments: list[str]) -> None:
    """Which is what it takes to answer in well under a second."""
    code = f"""
import sys
from dsv41.cli import main
try:
    main({arguments!r})
except SystemExit as end:
    assert end.code == 0
print(sorted(name for name in sys.modules if name in {HEAVY!r}), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
    assert done.stdout


def test_help_names_every_command_and_option() -> None:
    text = command("--help").stdout
    assert all(name in text for name in ("probe", "run", "layouts", "make-checkpoint"))
    text = command("run", "--help").stdout
    options = (
        "--prompt --decode --requests --chunk --backend --kv-cache-dtype --index-cache-dtype --verify --seed --json"
    )
    assert all(option in text for option in options.split())
