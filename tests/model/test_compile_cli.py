"""`dsv41 compile` and `dsv41 warmup`: limits, targets and reports. A double stands for the compiler; real builds are
made by `make compile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dsv41 import compile as ahead
from dsv41.cli import main
from dsv41.compile import BUDGET, OTHER_TARGETS, TARGETS, Budget, Limit, Row, compile_targets
from dsv41.config import DeepseekV41Config
from dsv41.errors import BackendError, InputError
from dsv41.hal.device import Platform
from dsv41.hal.types import LayerSpec
from dsv41.warmup_cli import WarmupOptions, what_it_meets

from .toys import TOY

REPOSITORY = Path(__file__).parents[2]

AOT = """
import json, os, sys

def variant(target, name, kind, **figures):
    return {"name": name, "target": target, "kind": kind, "payload": json.dumps(figures)}

for line in sys.stdin:
    request = json.loads(line)
    if "list" in request:
        [target] = request["list"]
        if target == "gfx1250":
            answer = {"variants": [], "skipped": {target: "this Triton is too old for it"}}
        else:
            answer = {"skipped": {}, "variants": [
                variant(target, "attend heads=16", "attention", matrix=64),
                variant(target, "combine", "other", spill_bytes=8),
            ]}
            if target == "gfx950":
                answer["variants"] += [
                    variant(target, "gemm rows=128", "gemm", spill_bytes=264, shared_bytes=200000),
                    variant(target, "crashes", "other", crash=True),
                    variant(target, "is refused", "other", refuse=True),
                ]
        print(json.dumps(answer | {"triton": "3.9.0", "cache": "/somewhere"}), flush=True)
    elif "meet" in request:
        found = [variant(request["meet"]["target"], "attend", "attention", cached=done) for done in (True, False)]
        print(json.dumps({"variants": found, "skipped": {}, "triton": "3.9.0", "cache": "/here"}), flush=True)
    else:
        figures = json.loads(request["compile"])
        if figures.get("crash"):
            print("LLVM ERROR: out of registers", file=sys.stderr, flush=True)
            os.abort()
        if figures.get("refuse"):
            print(json.dumps({"error": "CompilationError: no such thing"}), flush=True)
            continue
        cached = figures.pop("cached", False)
        zero = dict(registers=40, spill_bytes=0, shared_bytes=1024, matrix=0, code_bytes=5000)
        print(json.dumps({"figures": zero | figures, "cached": cached}), flush=True)
"""


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture
def _double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for the compiler."""
    (tmp_path / "a_compiler_of_this_test.py").write_text(AOT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(ahead, "COMPILING", ("portable",))
    monkeypatch.setattr(ahead, "_aot_module", lambda backend: "a_compiler_of_this_test")


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


# Limits


def row(name: str = "attend", target: str = "sm_90", kind: str = "attention", **figures: int) -> Row:
    fine = {"registers": 100, "spill_bytes": 0, "shared_bytes": 0, "matrix": 8, "code_bytes": 1000}
    return Row(name, target, kind, fine | figures)


KIB = 1024
LIMITS = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64, "gfx950": 160}


@pytest.mark.parametrize("target", TARGETS)
def test_the_budget_holds_each_target_to_its_shared_memory(target: str) -> None:
    budget, limit = Budget.load(REPOSITORY / BUDGET), LIMITS[target] * KIB
    assert budget.excesses(row(target=target, shared_bytes=limit), "3.9.0") == []
    [excess] = budget.excesses(row(target=target, kind="other", shared_bytes=limit + 1), "3.6.0")
    assert excess == f"attend on {target}: shared_bytes is {limit + 1}, the limit is {limit}"


@pytest.mark.parametrize("target", TARGETS)
def test_the_budget_allows_no_spill_where_it_costs(target: str) -> None:
    budget = Budget.load(REPOSITORY / BUDGET)
    for kind in ("attention", "gemm"):
        [excess] = budget.excesses(row("any", target, kind, spill_bytes=4), "3.9.0")
        assert excess == f"any on {target}: spill_bytes is 4, the limit is 0"
    assert budget.excesses(row("any", target, "other", spill_bytes=4), "3.9.0") == []


@pytest.mark.parametrize("kind", ["attention", "gemm", "scores"])
def test_the_budget_wants_matrix_instructions(kind: str) -> None:
    budget = Budget.load(REPOSITORY / BUDGET)
    assert budget.excesses(row(kind=kind, matrix=0), "3.9.0") == ["attend on sm_90: matrix is 0, the least is 1"]
    assert budget.excesses(row(kind="other", matrix=0), "3.9.0") == []


def test_the_budget_bounds_how_many_there_are() -> None:
    assert Budget.load(REPOSITORY / BUDGET).max_variants == 140


def test_the_last_limit_that_speaks_of_a_build_holds() -> None:
    budget = Budget(
        (
            Limit("spill_bytes", most=0),
            Limit("spill_bytes", most=64, triton="3.6", targets=("gfx950",), kernels=("attend *",)),
        )
    )
    spilling = row("attend heads=8", "gfx950", spill_bytes=32)
    assert budget.excesses(spilling, "3.6.0") == []
    for other, triton in (
        (spilling, "3.9.0"),
        (spilling, "3.60.0"),
        (row("attend heads=8", "gfx942", spill_bytes=32), "3.6.0"),
        (row("gemm", "gfx950", spill_bytes=32), "3.6.0"),
        (row("attend heads=8", "gfx950", spill_bytes=65), "3.6.0"),
    ):
        assert len(budget.excesses(other, triton)) == 1


def test_a_build_that_failed_breaks_no_limit() -> None:
    failed = Row("attend", "sm_90", "attention", error="crashed")
    assert Budget.load(REPOSITORY / BUDGET).excesses(failed, "3.9.0") == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "cannot be read"),
        ("[]", "of another form"),
        ('{"limits": [{"figure": "spills", "most": 0}]}', "unknown figure 'spills'"),
        ('{"limits": [{"figure": "matrix", "at_most": 0}]}', "at_most"),
    ],
)
def test_a_budget_of_another_form_is_a_mistake(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "budget.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"budget\.json") as caught:
        Budget.load(path)
    assert named in str(caught.value)
    result = command("compile", "--target", "sm_90", "--budget", tmp_path / "missing.json")
    assert result.exit_code == 2
    assert "missing.json cannot be read" in result.stderr


# The command


@pytest.mark.usefixtures("_double")
def test_what_keeps_to_the_budget_passes() -> None:
    result = command("compile", "--target", "sm_90, gfx942", "--jobs", 2, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [(build["name"], build["target"]) for build in report["rows"]] == [
        ("attend heads=16", "sm_90"),
        ("combine", "sm_90"),
        ("attend heads=16", "gfx942"),
        ("combine", "gfx942"),
    ]
    figures = {"registers": 40, "spill_bytes": 0, "shared_bytes": 1024, "matrix": 64, "code_bytes": 5000}
    assert report["rows"][0]["figures"] == figures
    assert (report["triton"], report["cache"], report["failures"]) == ("3.9.0", "/somewhere", [])


@pytest.mark.usefixtures("_double")
def test_failures_and_excesses_are_named_and_fail_the_command() -> None:
    result = command("compile", "--target", "gfx950")
    assert result.exit_code == 1
    text = result.stdout
    assert "failed: gemm rows=128 on gfx950: spill_bytes is 264, the limit is 0" in text
    assert "failed: gemm rows=128 on gfx950: shared_bytes is 200000, the limit is 163840" in text
    assert "failed: gemm rows=128 on gfx950: matrix is 0, the least is 1" in text
    assert "failed: crashes on gfx950 does not compile: the compiling process was killed by signal 6" in text
    assert "LLVM ERROR: out of registers" in text
    assert "failed: is refused on gfx950 does not compile: CompilationError: no such thing" in text
    assert "3 of 5 kernels with Triton 3.9.0" in text
    assert "Traceback" not in result.output


@pytest.mark.usefixtures("_double")
def test_without_a_budget_only_what_does_not_compile_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("compile", "--target", "gfx950", "--json")
    assert result.exit_code == 1
    assert [failure.split(" on ")[0] for failure in json.loads(result.stdout)["failures"]] == ["crashes", "is refused"]


@pytest.mark.usefixtures("_double")
def test_a_target_that_triton_does_not_know_is_skipped_with_the_reason() -> None:
    result = command("compile", "--target", "sm_90,gfx1250")
    assert result.exit_code == 0
    assert "skipped gfx1250: this Triton is too old for it" in result.stdout


@pytest.mark.usefixtures("_double")
def test_all_blocking_targets_are_compiled_if_none_is_named() -> None:
    report = compile_targets(jobs=2)
    assert list(dict.fromkeys(build.target for build in report.rows)) == list(TARGETS)
    assert set(TARGETS) == LIMITS.keys()


@pytest.mark.usefixtures("_double")
def test_too_many_builds_are_a_failure() -> None:
    report = compile_targets(["sm_90"], budget=Budget(max_variants=1))
    assert report.failures == ["portable has 2 builds, the limit is 1"]


@pytest.mark.usefixtures("_double")
def test_each_backend_that_compiles_has_its_rows_and_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "COMPILING", ("portable", "flashmla"))
    report = compile_targets(["sm_90", "gfx1250"], budget=Budget(max_variants=2))
    assert [build.name for build in report.rows] == ["attend heads=16", "combine"] * 2
    assert (report.failures, list(report.skipped)) == ([], ["gfx1250"])
    report = compile_targets(["sm_90"], budget=Budget(max_variants=1))
    assert report.failures == [f"{name} has 2 builds, the limit is 1" for name in ("portable", "flashmla")]


@pytest.mark.parametrize("given", ["sm_91", "sm_90,h200", "gfx90a"])
def test_an_unknown_target_names_the_valid_ones(given: str) -> None:
    result = command("compile", "--target", given)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert repr(given.split(",")[-1]) in result.stderr
    assert all(target in result.stderr for target in (*TARGETS, *OTHER_TARGETS))


@pytest.mark.usefixtures("_double")
def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    compile_targets(["sm_90"], progress=lambda *what: told.append(what))
    assert told == [("compiling", 0, 2), ("compiling", 1, 2), ("compiling", 2, 2)]


def test_the_help_says_how_to_use_another_triton() -> None:
    text = " ".join(command("compile", "--help").stdout.split())
    assert "pip install --target DIR triton==3.6.0" in text
    assert "PYTHONPATH=DIR dsv41 compile" in text


# Warm-up


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TOY.to_dict()))
    return path


def test_without_a_gpu_warmup_points_to_compile(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSV41_BACKEND", raising=False)
    result = command("warmup", config, "--device", "cpu")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: there is nothing to compile for cpu")
    assert "dsv41 compile" in result.stderr
    assert command("warmup", config.parent, "--device", "cpu").stderr == result.stderr


@pytest.mark.usefixtures("_double")
def test_warmup_says_what_was_compiled_and_where(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Platform.load("h200").devices[0]

    class Chosen:
        name, facts = "portable", device

    monkeypatch.setattr("dsv41.warmup_cli.select_backend", lambda *_, **__: Chosen())
    result = command("warmup", config, "--jobs", 1)
    assert result.exit_code == 0, result.output
    assert "2 of 2 kernels with Triton 3.9.0: 1 compiled, 1 in the cache already (/here)" in result.stdout
    report = json.loads(command("warmup", config, "--json").stdout)
    assert [(build["target"], build["cached"]) for build in report["rows"]] == [("sm_90", True), ("sm_90", False)]


def test_what_a_configuration_meets_is_asked_as_json(config: Path) -> None:
    options = WarmupOptions(config, tp_size=2, quantize_activations=True, max_len=100)
    asked: dict[str, Any] = json.loads(json.dumps(what_it_meets(TOY, options, "gfx942")))
    specs = [LayerSpec(**spec) for spec in asked["specs"]]
    assert [spec.layer_id for spec in specs] == list(range(7))
    assert all(spec.num_heads == 2 and spec.quantize_activations for spec in specs)
    assert (asked["target"], asked["block"], asked["max_len"]) == ("gfx942", None, 100)
    assert what_it_meets(DeepseekV41Config(), options, "sm_90")["block"] == [32, 32]


@pytest.mark.parametrize("name", ["max-tokens", "max-requests", "max-len"])
def test_sizes_of_nothing_are_mistakes(config: Path, name: str) -> None:
    result = command("warmup", config, f"--{name}", 0)
    assert result.exit_code == 2
    assert "expected at least 1" in result.stderr


# The real one, as far as nothing is compiled


def test_it_refuses_to_interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = command("compile", "--target", "sm_90")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: TRITON_INTERPRET is set")


def test_it_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ahead.find_spec
    monkeypatch.setattr(ahead, "find_spec", lambda name: None if name == "triton" else real(name))
    assert "triton is not installed" in command("compile", "--target", "sm_90").stderr


def test_a_backend_without_kernels_compiles_nothing() -> None:
    with pytest.raises(BackendError, match="'reference' compiles no kernels"):
        ahead._aot_module("reference")


def test_the_backends_whose_kernels_are_compiled_have_workers() -> None:
    modules = [ahead._aot_module(backend) for backend in ahead.COMPILING]
    assert modules == ["dsv41.backends.portable.aot", "dsv41.backends.cuda.aot"]
