"""The jobs of the matrix that need no GPU, run here; and whether a GPU machine is the one that a job is for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dsv41.ci_matrix import Job, platform_of, require_known
from dsv41.errors import BackendError, Dsv41Error
from dsv41.hal.device import Platform
from dsv41.hal.select import explain_backends
from dsv41.hal.versions import release

LOGS = Path("build/ci")
"""What the jobs printed, and the Tritons that were installed for them."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended: "passed", "failed", or "skipped" where it did not run; `why` is for the last two."""

    job: str
    state: str
    why: str = ""
    seconds: float = 0.0


def run_jobs(jobs: Sequence[Job]) -> Iterator[Outcome]:
    """Run one job after the other, in this Python and with this torch; those that need others are skipped."""
    for job in jobs:
        if why := why_not_here(job):
            yield Outcome(job.name, "skipped", why)
            continue
        start = time.monotonic()
        failure = _RUN[job.mode](job)
        yield Outcome(job.name, "failed" if failure else "passed", failure or "", time.monotonic() - start)


def why_not_here(job: Job) -> str | None:
    """Why a job cannot run in this process's environment; None where it can."""
    if job.needs_gpu:
        return f"needs a machine with {job.arch}"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if job.python != python:
        return f"needs Python {job.python}, this is {python}"
    if job.mode == "run" and not _is(job.torch, metadata.version("torch")):
        return f"needs torch {job.torch}, {metadata.version('torch')} is installed"
    return None


def expect_machine(platform: Platform, arch: str, backend: str | None = None) -> None:
    """Raise BackendError unless every GPU of this machine is of `arch`, and the first gets `backend` (None = any), or
    InputError where it is of another arch and that one is in no table, and for a backend that is not installed."""
    found = [f"{gpu.key} is {gpu.arch} ({gpu.name})" for gpu in platform.gpus if gpu.arch != arch]
    if not platform.gpus:
        found = ["it has no GPU"]
    if found:
        require_known(arch)
        raise BackendError(
            f"this job is for {arch} and this machine is another: {', '.join(found)}; give the runner its own label, "
            "or hide its other GPUs"
        )
    if backend is None:
        return
    require_known(backend=backend)
    report = explain_backends("auto", device=platform.gpus[0], platform=platform)
    if report.chosen != backend:
        known = [candidate for candidate in report.candidates if candidate.name == backend]
        reasons = " ".join(str(reason) for candidate in known for reason in candidate.reasons)
        raise BackendError(
            f"this job tests {backend}, and this machine gets {report.chosen}: {reasons or 'it is ranked higher'}; "
            "mend the runner"
        )


def _play_back(job: Job) -> str | None:
    assert job.platform is not None
    try:
        platform = platform_of(job.platform)
        got = {
            device.key: explain_backends("auto", device=device, platform=platform).chosen
            for device in platform.devices
            if device.arch == job.arch
        }
    except Dsv41Error as error:
        return str(error)
    wrong = [f"{key} gets {chosen}" for key, chosen in got.items() if chosen != job.backend]
    return (
        f"{', '.join(wrong)} where {job.backend} is expected: see `dsv41 probe --as {job.platform}`" if wrong else None
    )


def _compile(job: Job) -> str | None:
    assert job.triton is not None
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if not _is(job.triton, _installed("triton")):
        folder = LOGS.resolve() / f"triton-{job.triton}"
        wanted = f"triton=={job.triton}.*"
        if not (folder / "triton").is_dir() and (failure := _command(job, _pip(folder, wanted), environment)):
            return failure
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), environment.get("PYTHONPATH")]))
    return _command(job, [sys.executable, "-P", "-m", "dsv41", "compile", "--target", job.arch], environment)


def _test(job: Job) -> str | None:
    return _command(job, [sys.executable, "-m", "pytest", "-q", "-n", "auto"], {**os.environ, "OMP_NUM_THREADS": "1"})


_RUN: dict[str, Callable[[Job], str | None]] = {"run": _test, "compile": _compile, "play-back": _play_back}


def _command(job: Job, command: list[str], environment: dict[str, str]) -> str | None:
    """Run it with its output in a file. None, or what failed with the last lines of that."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{job.name}.txt"
    with log.open("w") as stream:
        status = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, env=environment).returncode
    if status == 0:
        return None
    last = log.read_text(errors="replace").splitlines()[-3:]
    return f"`{' '.join(command[1:])}` exits with {status}: {' / '.join(last)} (all of it in {log})"


def _pip(folder: Path, wanted: str) -> list[str]:
    return [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), wanted]


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _is(series: str, version: str) -> bool:
    """Whether a version is of a series such as "2.13"."""
    return release(version)[:2] == release(series)
