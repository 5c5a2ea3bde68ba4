"""CI's matrix, the workflow that is made from it, its jobs that need no GPU, and runners that are not what they say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from ruamel.yaml import YAML

from dsv41 import ci_run
from dsv41.ci_matrix import MATRIX, Job, load_jobs
from dsv41.ci_run import Outcome, expect_machine, run_jobs, why_not_here
from dsv41.ci_workflow import WORKFLOW
from dsv41.cli import main
from dsv41.compile import TARGETS
from dsv41.errors import Dsv41Error, InputError
from dsv41.hal.builtin import BUILTIN
from dsv41.hal.device import Platform

ROOT = Path(__file__).parents[1]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
HEAD = 'defaults: {python: "3.11", torch: "2.13", triton: ["3.6", "3.9"]}\nrows:\n'
MADE_UP = "  - {vendor: amd, arch: gfx1310, mode: [play-back, run], platform: gfx1310, backend: portable}\n"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what `dsv41 ci` reads, which it is run in."""
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    shutil.copytree(ROOT / ".github", tmp_path / ".github")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["ci", *arguments])


def valid(workflow: Path) -> subprocess.CompletedProcess[str]:
    """Judged by the schema of GitHub's workflows, which the validator brings along."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(workflow)]
    return subprocess.run(command, capture_output=True, text=True)


# The matrix


def test_every_vendor_and_mode_has_jobs() -> None:
    jobs = load_jobs(ROOT / MATRIX)
    assert {(job.vendor, job.mode) for job in jobs} == {
        ("cpu", "run"),
        *((vendor, mode) for vendor in ("nvidia", "amd") for mode in ("run", "compile", "play-back")),
    }
    assert {job.arch for job in jobs if job.mode == "compile"} >= set(TARGETS)
    assert {job.backend for job in jobs} >= {"flashmla", "flashmla-mega", "flashinfer-sm120", "aiter", "portable"}
    assert {job.backend for job in jobs} <= {None, *(spec.name for spec in BUILTIN)}


def test_both_ends_of_triton_compile_and_what_runs_uses_torchs() -> None:
    jobs = load_jobs(ROOT / MATRIX)
    for target in TARGETS:
        assert {job.triton for job in jobs if (job.arch, job.mode) == (target, "compile")} == {"3.6", "3.9"}
    assert {job.triton for job in jobs if job.mode != "compile"} == {None}
    assert not any("triton" in wanted for job in jobs for wanted in job.install)


def test_a_line_is_every_combination_of_what_its_modes_read(tmp_path: Path) -> None:
    line = (
        "  - {vendor: nvidia, arch: sm_90, mode: [run, compile, play-back], platform: h200, backend: flashmla, "
        "python: ['3.11', '3.12'], torch: ['2.14', '2.15']}\n"
    )
    shutil.copytree(ROOT / "ci/platforms", tmp_path / "platforms")
    (tmp_path / "matrix.yaml").write_text(HEAD + line)
    jobs = load_jobs(tmp_path / "matrix.yaml")
    assert Counter(job.mode for job in jobs) == {"run": 4, "compile": 4, "play-back": 2}
    assert {job.torch for job in jobs if job.mode == "run"} == {"2.14", "2.15"}
    assert {job.torch for job in jobs if job.mode != "run"} == {"2.13"}
    assert jobs[0].name == "run-sm_90-py3.11-torch2.14"
    assert {job.needs_gpu for job in jobs} == {True, False}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            "  - {vendor: intel, arch: sm_90, mode: run}",
            "line 3: vendor: Input should be 'cpu', 'nvidia' or 'amd', found",
        ),
        ("  - {vendor: amd, arch: sm_90, mode: run}", "line 3: arch 'sm_90' is of vendor 'nvidia'"),
        ("  - {vendor: amd, arch: h200, mode: run}", "line 3: arch 'h200' is none of"),
        (
            "\n  - {vendor: amd, arch: gfx942, mode: test}",
            "line 4: mode.0: Input should be 'run', 'compile' or 'play-back'",
        ),
        ("  - {vendor: amd, arch: gfx942, mode: []}", "mode is empty"),
        ("  - {vendor: amd, arch: gfx942}", "mode: Field required"),
        (
            "  - {vendor: cpu, arch: cpu, mode: run, python: 3.10}",
            "python: 3.1 is a number to YAML: write it in",
        ),
        ("  - {vendor: cpu, arch: cpu, mode: run, torch: 2.13.0}", "torch.0: String should match pattern"),
        ("  - {vendor: cpu, arch: cpu, mode: run, pyhton: '3.12'}", "pyhton: Extra inputs are not permitted"),
        ("  - {vendor: amd, arch: gfx942, mode: run}", "backend is missing"),
        ("  - {vendor: amd, arch: gfx942, mode: play-back, backend: portable}", "play-back needs a platform"),
        (
            "  - {vendor: amd, arch: gfx942, mode: play-back, backend: aiter, platform: mi300}",
            "'mi300' is neither|mi300.json",
        ),
        (
            "  - {vendor: amd, arch: gfx942, mode: play-back, backend: aiter, platform: h200}",
            "has sm_90, cpu: expected gfx942",
        ),
        ("  - {vendor: nvidia, arch: sm_91, mode: run, backend: portable}", "arch 'sm_91' is unknown: did you mean"),
        (
            "  - {vendor: amd, arch: gfx942, mode: run, backend: aitre}",
            "backend 'aitre' is unknown: did you mean 'aiter'",
        ),
        ("  - {vendor: cpu, arch: cpu, mode: run, python: '3.9'}", "python 3.9 is not >=3.11, as dsv41 asks"),
        ("  - {vendor: cpu, arch: cpu, mode: run, install: 'x; rm -rf ~'}", "install.0: String should match pattern"),
        ("  - {vendor: cpu, arch: cpu, mode: run, install: --pre}", "install.0: String should match pattern"),
        ("  - {vendor: amd, arch: gfx1310, mode: compile}", "`dsv41 compile` knows no gfx1310"),
        ("  - {vendor: amd, arch: gfx942, mode: run, backend: x, triton: '3.9'}", "triton '3.9' without compile"),
        (
            "  - {vendor: cpu, arch: cpu, mode: run}\n  - {vendor: cpu, arch: cpu, mode: run}",
            "line 4: run-cpu-.* made by",
        ),
        ("  - run", "line 3: 'run' is no row"),
        ("  - {vendor: cpu", "is no YAML"),
    ],
)
def test_a_row_that_cannot_be_says_where_and_why(tmp_path: Path, lines: str, words: str) -> None:
    shutil.copytree(ROOT / "ci/platforms", tmp_path / "platforms")
    (tmp_path / "matrix.yaml").write_text(HEAD + lines + "\n")
    with pytest.raises(InputError, match=words):
        load_jobs(tmp_path / "matrix.yaml")


@pytest.mark.parametrize("text", ["", "rows: []", "defaults: {}\nrows: {}", "defaults: {}\nrows: []"])
def test_what_is_no_matrix_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "matrix.yaml").write_text(text)
    with pytest.raises(InputError, match=r"is no matrix|defaults: python: Field required"):
        load_jobs(tmp_path / "matrix.yaml")


def test_elsewhere_than_in_a_checkout_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["emit"], ["run"]):
        result = command(*arguments)
        assert (result.exit_code, "at the root of a checkout" in result.stderr) == (2, True)


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv41.ci_cli.find_spec", lambda module: None if module == "ruamel" else module)
    result = command("run")
    assert result.exit_code == 2
    assert result.stderr == "error: ruamel not installed: `dsv41 ci` needs `pip install -e '.[test]'`\n"


# The workflow


def test_the_workflow_is_current(checkout: Path) -> None:
    result = command("emit", "--check")
    assert result.exit_code == 0, result.output
    with (checkout / MATRIX).open("a") as matrix:
        matrix.write("  - {vendor: cpu, arch: cpu, mode: run, python: '3.14'}\n")
    result = command("emit", "--check")
    assert (result.exit_code, "run `dsv41 ci emit`" in result.stdout) == (1, True)
    assert "3.14" not in (checkout / WORKFLOW).read_text()


def test_the_workflow_is_githubs(tmp_path: Path) -> None:
    done = valid(ROOT / WORKFLOW)
    assert done.returncode == 0, done.stdout + done.stderr
    broken = tmp_path / "ci.yml"
    broken.write_text((ROOT / WORKFLOW).read_text().replace("runs-on:", "run-on:", 1))
    assert valid(broken).returncode == 1


def test_every_job_is_in_the_workflow_on_the_machine_that_it_needs() -> None:
    jobs = load_jobs(ROOT / MATRIX)
    workflow = YAML(typ="safe").load(ROOT / WORKFLOW)["jobs"]
    included = workflow["no-gpu"]["strategy"]["matrix"]["include"]
    assert included == [
        {"job": job.name, "python": job.python, "torch": job.torch} for job in jobs if not job.needs_gpu
    ]
    for job in (job for job in jobs if job.needs_gpu):
        written = workflow[job.name.replace(".", "-")]
        assert written["runs-on"] == ["self-hosted", "linux", job.vendor, job.arch]
        assert f"'{job.arch}'" in written["if"]
        commands = "\n".join(step["run"] for step in written["steps"] if "run" in step)
        script = {"nvidia": "ci/run-cuda.sh", "amd": "ci/run-rocm.sh"}[job.vendor]
        assert f"{script} {job.arch} {job.backend} gpu-logs" in commands
        assert f"'torch=={job.torch}.*' --index-url" in commands
        assert all(f"'{wanted}'" in commands for wanted in job.install)


def test_a_new_arch_is_one_line_and_one_platform_file(checkout: Path) -> None:
    platform = Platform.load("unlisted-gfx").to_json()
    (checkout / "ci/platforms/gfx1310.json").write_text(json.dumps(platform))
    with (checkout / MATRIX).open("a") as matrix:
        matrix.write(MADE_UP)
    assert command("emit").exit_code == 0
    assert valid(checkout / WORKFLOW).returncode == 0
    jobs = YAML(typ="safe").load(checkout / WORKFLOW)["jobs"]
    assert "play-back-gfx1310-py3.11" in [entry["job"] for entry in jobs["no-gpu"]["strategy"]["matrix"]["include"]]
    assert jobs["run-gfx1310-py3-11-torch2-13"]["runs-on"] == ["self-hosted", "linux", "amd", "gfx1310"]
    (job,) = [job for job in load_jobs() if (job.arch, job.mode) == ("gfx1310", "play-back")]
    assert [outcome.state for outcome in run_jobs([replace(job, python=PYTHON)])] == ["passed"]


# Jobs that run here


def test_every_play_back_passes_and_leaves_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(ci_run, "why_not_here", lambda job: None)
    monkeypatch.setenv("DSV41_BACKEND", "reference")  # somebody's wish, which is not what the matrix is about
    result = command("run", "--mode", "play-back", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    played = [job.name for job in load_jobs(ROOT / MATRIX) if job.mode == "play-back"]
    assert [outcome["job"] for outcome in report["jobs"]] == played
    assert {outcome["state"] for outcome in report["jobs"]} == {"passed"}
    assert Platform.from_json(report["platform"]).torch.version


def test_a_play_back_that_gets_another_backend_fails_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = Job("play-back", "nvidia", "sm_90", PYTHON, "2.13", platform="h200", backend="portable")
    (outcome,) = run_jobs([job])
    assert outcome.state == "failed"
    assert outcome.why == "cuda:0 gets flashmla where portable is expected: see `dsv41 probe --as h200`"


def test_what_cannot_run_here_is_skipped_with_the_reason_and_never_passed() -> None:
    assert (
        why_not_here(Job("run", "amd", "gfx942", PYTHON, "2.13", backend="portable")) == "needs a machine with gfx942"
    )
    assert why_not_here(Job("run", "cpu", "cpu", "3.99", "2.13")) == f"needs Python 3.99, this is {PYTHON}"
    assert "needs torch 1.0, " in str(why_not_here(Job("run", "cpu", "cpu", PYTHON, "1.0")))
    assert why_not_here(Job("compile", "amd", "gfx942", PYTHON, "1.0", triton="3.6")) is None


def test_a_job_asked_for_by_name_must_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (name,) = [job.name for job in load_jobs() if job.arch == "gfx942" and job.mode == "run"]
    one = command("run", "--job", name)
    assert (one.exit_code, "0 passed, 0 failed, 1 skipped" in one.stdout) == (1, True)
    assert command("run", "--arch", "gfx942", "--mode", "run").exit_code == 0
    none = command("run", "--arch", "gfx943")
    assert (none.exit_code, "no such job: expected one of run-cpu-py3.11" in none.stderr) == (2, True)


def test_another_triton_is_installed_beside_and_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A double stands for every process, so nothing is installed nor compiled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ci_run, "_installed", lambda distribution: "3.9.0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    called: list[tuple[list[str], dict[str, str]]] = []

    def double(job: Job, arguments: list[str], environment: dict[str, str]) -> None:
        called.append((arguments[1:], environment))

    monkeypatch.setattr(ci_run, "_command", double)
    for triton in ("3.9", "3.6"):
        assert ci_run._compile(Job("compile", "amd", "gfx942", PYTHON, "2.13", triton=triton)) is None
    compiled = ["-P", "-m", "dsv41", "compile", "--target", "gfx942"]
    (own, plain), (pip, _), (other, beside) = called
    assert own == other == compiled
    assert pip[:3] == ["-m", "pip", "install"]
    assert pip[-3:] == ["--target", str(tmp_path / "build/ci/triton-3.6"), "triton==3.6.*"]
    assert "TRITON_INTERPRET" not in plain
    assert beside["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "build/ci/triton-3.6")
    assert plain.get("PYTHONPATH") == os.environ.get("PYTHONPATH")


def test_a_command_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job("run", "cpu", "cpu", PYTHON, "2.13")
    said = ci_run._command(job, [sys.executable, "-c", "print('one'); raise SystemExit('two')"], dict(os.environ))
    assert "exits with 1: one / two (all of it in build/ci/run-cpu" in str(said)
    assert ci_run._command(job, [sys.executable, "-c", ""], dict(os.environ)) is None


def test_outcomes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    ends = [Outcome("a", "passed", seconds=1.0), Outcome("b", "failed", "it [broke]"), Outcome("c", "skipped", "no")]
    monkeypatch.setattr(ci_run, "run_jobs", lambda jobs: iter(ends))
    result = command("run")
    assert result.exit_code == 1
    assert "1 passed, 1 failed, 1 skipped" in result.stdout
    assert "it [broke]" in result.stdout


# Runners


@pytest.mark.parametrize(
    ("platform", "arch", "backend", "words"),
    [
        ("mi300x", "gfx950", None, "this job is for gfx950 and this machine is another: cuda:0 is gfx942 (AMD"),
        ("mixed-mi355x-mi300x", "gfx950", None, "cuda:1 is gfx942"),
        ("cpu", "sm_90", None, "it has no GPU"),
        ("h200-no-flashmla", "sm_90", "flashmla", "this job tests flashmla, and this machine gets portable: [library]"),
        ("h200", "sm_90", "portable", "gets flashmla: it is ranked higher"),
        ("h200", "sm_90", "portabel", "backend 'portabel' is unknown: did you mean 'portable'? use one of"),
        ("h200", "sm_91", None, "arch 'sm_91' is unknown: did you mean"),
    ],
)
def test_fr_15_a_machine_that_is_not_the_jobs_is_refused(
    platform: str, arch: str, backend: str | None, words: str
) -> None:
    with pytest.raises(Dsv41Error) as caught:
        expect_machine(Platform.load(platform), arch, backend)
    assert words in str(caught.value)


@pytest.mark.parametrize(("platform", "arch", "backend"), [("h200", "sm_90", "flashmla"), ("mi300x", "gfx942", None)])
def test_fr_15_the_right_machine_is_taken(platform: str, arch: str, backend: str | None) -> None:
    expect_machine(Platform.load(platform), arch, backend)


@pytest.mark.parametrize("script", ["run-cuda.sh", "run-rocm.sh"])
def test_fr_15_a_runner_of_another_arch_stops_before_anything_runs(script: str, tmp_path: Path) -> None:
    """A `dsv41` that says what an MI300X would say stands before the real one; a `python3` that tells of being run."""
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    (tmp_path / "bin").mkdir()
    double = (
        f'#!/bin/sh\n[ "$1 $2" = "ci expect" ] && exec {sys.executable} -P -m dsv41 "$@" --as mi300x\necho "{{}}"\n'
    )
    for name, text in (("dsv41", double), ("python3", "#!/bin/sh\nexit 1\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(tmp_path / "ci" / script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)

    wrong = run("gfx950", "aiter")
    assert wrong.returncode == 2
    assert "error: this job is for gfx950 and this machine is another: cuda:0 is gfx942" in wrong.stderr
    assert not (tmp_path / "gpu-logs").exists()
    right = run("gfx942", "portable", "logs")
    assert right.returncode == 1
    assert "FAILED  suite" in right.stdout
    assert (tmp_path / "logs/probe.json").read_text() == "{}\n"
    assert run("gfx942").returncode == 2
