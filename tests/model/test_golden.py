"""What independent implementations computed: every case, in one prefill and in chunks with decode steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.borders import settle_window_rows
from dsv41.checkpoint import load_checkpoint
from dsv41.config import DeepseekV41Config
from dsv41.golden import MAX_QUANTISED, TOLERANCE, Golden, GoldenComparison, GoldenTap
from dsv41.hal.types import AttnInputs, LayerState, Selection, StepPlan
from dsv41.run import RunOptions, run
from dsv41.session import Session
from dsv41.stack import AttentionStack

from ..golden_cases import SMALL, case_dirs, expand


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@dataclass(frozen=True)
class Expanded:
    """A case as a checkpoint, and its window rows as they must have been stored."""

    path: Path
    stack: AttentionStack
    golden: Golden
    window_rows: dict[int, Tensor]


@pytest.fixture(scope="module", params=case_dirs(), ids=lambda path: path.name)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Expanded:
    path = expand(request.param, tmp_path_factory.mktemp("golden"))
    checkpoint = load_checkpoint(path)
    with torch.no_grad():
        golden = Golden(path / "io.safetensors", checkpoint.specs)
        stack = AttentionStack(checkpoint, ReferenceBackend(), max_len=golden.tokens)
        return Expanded(path, stack, golden, settle_window_rows(stack, golden))


def compare(case: Expanded, chunks: list[int]) -> GoldenComparison:
    """Run the case cut into these chunks, and one token a step from there on."""
    tokens = case.golden.tokens
    tap = GoldenTap(case.golden, case.stack, case.window_rows)
    session = Session(case.stack, max_requests=1, max_tokens=tokens, page_size=16)
    request = session.add_request()
    for size in (*chunks, *[1] * (tokens - sum(chunks))):
        start = session.length(request)
        session.step({request: case.golden.inputs[:, start : start + size]}, tap=tap)
    assert session.length(request) == tokens
    return tap.finish()


CUTS: dict[str, Callable[[int], list[int]]] = {
    "one prefill": lambda tokens: [tokens],
    "token by token": lambda tokens: [1] * min(tokens, 40) + ([tokens - 40] if tokens > 40 else []),
    "chunks, then decode": lambda tokens: [tokens // 3, tokens // 2 | 1],
}


@pytest.mark.parametrize("cut", CUTS)
def test_every_case_agrees_with_its_golden_vectors(case: Expanded, cut: str) -> None:
    result = compare(case, CUTS[cut](case.golden.tokens))
    assert result.failures == []
    layers, tokens = len(case.stack.layers), case.golden.tokens
    assert sorted(result.layers) == list(range(layers))
    # By numbers of our own too, so that a tolerance that someone loosens shows.
    limit = 1e-5 if case.stack.dtype == torch.float32 else 1e-2
    assert TOLERANCE[case.stack.dtype] == limit
    assert max(result.layers.values()) == result.max_relative_error <= limit
    assert result.topk_mismatches == 0
    assert result.tokens_skipped <= 0.02 * layers * tokens
    assert result.quantised_mismatches <= MAX_QUANTISED == 5
    # What was settled is a handful of numbers on a border and of ties, not an error in every row.
    assert result.border_elements <= 5 + 2e-5 * layers * tokens * 512
    assert result.topk_ties_skipped <= (0.01 if case.stack.dtype == torch.float32 else 0.1) * layers * tokens


class Scores:
    """A tap that scores every visible row, where a selection needs no scores too."""

    def __init__(self) -> None:
        self.scores: dict[int, Tensor] = {}

    def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None:
        self._inputs = inputs

    def output(self, layer: LayerState, plan: StepPlan, output: Tensor) -> None: ...

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        scores = ReferenceBackend().index_scores(self._inputs, layer, plan)
        assert plan.num_visible[layer.spec.ratio].max() == scores.shape[1]
        self.scores[layer.spec.layer_id] = scores
        return selection


def test_fr_58_index_scores_are_those_of_the_golden_run(case: Expanded) -> None:
    """Wherever the file has a score: not where a row is not visible, or no candidate."""
    if case.golden.get(1, "index_scores") is None:
        pytest.skip("the wide cases hold no scores")
    tap = Scores()
    session = Session(case.stack, max_requests=1, max_tokens=case.golden.tokens)
    session.step({session.add_request(): case.golden.inputs}, tap=tap)
    assert sorted(tap.scores) == [1, 3, 4, 6]
    for layer, found in tap.scores.items():
        expected = case.golden.get(layer, "index_scores")
        assert expected is not None
        ratio = case.stack.layers[layer].spec.ratio
        visible = torch.arange(expected.shape[1]) < (torch.arange(case.golden.tokens)[:, None] + 1) // ratio
        known = expected > -torch.inf
        assert known.any()
        assert not (known & ~visible).any()
        difference = (found.float() - expected).abs()[known]
        scale = expected[known].abs().max()
        # An element of a query or key that falls to the other side of a rounding border moves a row of scores.
        allowed = 1e-5 if case.stack.dtype == torch.float32 else 2e-2
        assert (difference > allowed * scale).float().mean() < 0.01


# The command, and that it can say no


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return expand(SMALL / "tiny-float32", tmp_path_factory.mktemp("tiny"))


def changed(path: Path, out: Path, file: str, change: Callable[[dict[str, Tensor]], object]) -> Path:
    out.mkdir()
    for name in ("config.json", "model.safetensors", "io.safetensors"):
        (out / name).write_bytes((path / name).read_bytes())
    tensors = load_file(out / file)
    change(tensors)
    save_file(tensors, out / file)
    return out


def run_command(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-c", "from dsv41.cli import main; main()", "run", str(path), "--verify", "--json"]
    chosen = ["--backend", "reference", "--device", "cpu"]
    done = subprocess.run([*command, *chosen, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_command_verifies_a_case(tiny: Path) -> None:
    status, report = run_command(tiny, "--chunk", "32", "--decode", "3")
    assert status == 0
    assert report["backend"] == "reference"
    assert report["device"] == "cpu"
    assert report["kv_cache_dtype"] == "nvfp4_ds_mla"
    assert report["index_cache_dtype"] == "mxfp4"
    assert report["prefill_tokens"] == 97
    for name in ("prefill_tokens_per_second", "decode_tokens_per_second", "peak_memory_bytes"):
        assert report[name] > 0
    # 8 windows of 528 bytes; compressed rows of 288 and keys of 68, of two tokens in one source, of one in the other.
    parts = {"window": 8 * 528, "compressed": 288 * 1.5, "index": 68 * 1.5}
    assert report["cache_bytes_per_token"] == parts | {"total": sum(parts.values())}
    assert report["verify"]["reference"]["max_relative_error"] < 1e-3
    golden = report["verify"]["golden"]
    assert 0 < golden["max_relative_error"] <= 1e-5
    assert golden["topk_mismatches"] == 0
    assert golden["tokens_skipped"] == 0
    assert golden["topk_ties_skipped"] >= 0
    assert report["failures"] == []


def test_the_command_fails_for_a_corrupted_output(tiny: Path, tmp_path: Path) -> None:
    def corrupt(tensors: dict[str, Tensor]) -> None:
        tensors["layers.5.output"][40] *= 1.01

    status, report = run_command(changed(tiny, tmp_path / "broken", "io.safetensors", corrupt), "--decode", "0")
    assert status == 1
    (failure,) = report["failures"]
    assert failure.startswith("golden max_relative_error is")
    errors = report["verify"]["golden"]["layers"]
    assert max(errors, key=errors.get) == "5"


def rolled(name: str) -> Callable[[dict[str, Tensor]], object]:
    """Exchange the rows of a tensor, so that its numbers stay what they were."""
    return lambda tensors: tensors.update({name: tensors[name].roll(1, 0).contiguous()})


BROKEN: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "an output that is NaN": ("io", lambda t: t["layers.2.output"].fill_(torch.nan), "max_relative_error"),
    "one weight": ("model", lambda t: t["layers.4.attn.wo_b.weight"].mul_(1.0001), "max_relative_error"),
    "a sink": ("model", lambda t: t["layers.0.attn.attn_sink"].add_(1e-3), "max_relative_error"),
    "a window projection": ("model", lambda t: t["layers.0.attn.wkv.weight"].mul_(-1), "max_relative_error"),
    "a compressor": ("model", rolled("layers.1.attn.compressor.wkv.weight"), "quantised_mismatches"),
    "a gate": ("model", lambda t: t["layers.1.attn.compressor.wgate.weight"].neg_(), "quantised_mismatches"),
    "an index key norm": ("model", rolled("layers.4.attn.indexer.k_norm.weight"), "quantised_mismatches"),
    "index queries": ("model", rolled("layers.3.attn.indexer.wq_b.weight"), "topk_mismatches"),
    "head weights": ("model", rolled("layers.6.attn.indexer.weights_proj.weight"), "topk_mismatches"),
    "a selection": ("io", lambda t: t["layers.4.topk_indices"][60:].clamp_(max=50), "topk_mismatches"),
    "candidates": ("io", lambda t: t["layers.4.candidates"].logical_not_(), "topk_mismatches"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_verification_finds_what_is_broken(what: str, tiny: Path, tmp_path: Path) -> None:
    """In each stage; by the same function that the command calls."""
    file, change, found = BROKEN[what]
    path = changed(tiny, tmp_path / "broken", f"{file}.safetensors", change)
    report = run(RunOptions(path, decode=0, verify=True, backend="reference", device="cpu"))
    assert any(failure.startswith(f"golden {found} is") for failure in report.failures), report.failures


@pytest.mark.parametrize(
    ("dtypes", "binds"),
    [(("auto", "auto"), True), (("nvfp4_ds_mla", "mxfp4"), True), (("bfloat16", "auto"), False)],
    ids=lambda value: str(value),
)
def test_the_golden_outputs_bind_in_the_release_records_alone(
    dtypes: tuple[str, str], binds: bool, tiny: Path, tmp_path: Path
) -> None:
    """In other records their distance is reported, and judged against the reference in the same records."""
    kv, index = dtypes
    path = changed(tiny, tmp_path / "b", "io.safetensors", lambda t: t["layers.5.output"].mul_(1.5))
    options = RunOptions(path, decode=0, verify=True, backend="reference", device="cpu")
    report = run(replace(options, kv_cache_dtype=kv, index_cache_dtype=index))
    assert report.verify is not None
    assert report.verify["golden"]["max_relative_error"] > 0.1
    assert bool(report.failures) == binds
    assert report.verify["reference"]["max_relative_error"] <= 1e-3


def test_the_cases_have_what_they_are_meant_to_test() -> None:
    config = DeepseekV41Config.from_json(SMALL / "tiny-float32" / "config.json")
    assert set(config.compress_ratios) == {0, 1, 2}
    assert config.index_topk < 97 // 2
    assert config.candidate_topk_blocks * config.candidate_block_size < 97
