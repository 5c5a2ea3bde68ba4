"""The script for someone with the hardware, over stand-ins for what it runs: its steps, its options and its report."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import click
import pytest

from dsv41.cli import main
from dsv41.hal.builtin import AITER

SCRIPT = Path(__file__).parents[3] / "ci" / "run-rocm.sh"


def run_script(folder: Path, arch: str, failing: str = "nothing") -> subprocess.CompletedProcess[str]:
    """With a `dsv41` that only notes its arguments and a `python3` that does nothing."""
    tools = folder / "bin"
    tools.mkdir()
    for name, says in (
        ("dsv41", f'echo "$*" >> {folder}/calls; case "$*" in *{failing}*) exit 1;; esac'),
        ("python3", "exit 0"),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{says}\n")
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    command = [str(SCRIPT), arch, "aiter", str(folder / "report")]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_it_runs_every_step_and_packs_a_report(arch: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, arch)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("ok")]
    assert steps[-5:] == ["quantized", "bench-layer", "bench-index", "bench-aiter", "bench-portable"]
    with tarfile.open(tmp_path / "report.tar.gz") as archive:
        assert {f"report/{step}.txt" for step in steps} <= set(archive.getnames())
    asked = set()
    for line in (tmp_path / "calls").read_text().splitlines():
        command: click.Command = main
        words = line.split()
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        # A checkpoint is made by a step before, here by nobody.
        words = [str(tmp_path) if word.endswith("report/checkpoint") else word for word in words]
        given = command.make_context(line, words).params
        if given.get("backend") == "aiter" and "kv_cache_dtype" in given:
            asked.add((given["kv_cache_dtype"], given["index_cache_dtype"]))
    formats = {kv for kv, _ in asked}
    assert formats <= set(AITER.kv_cache_dtypes)
    assert ("fp8_ds_mla" in formats) == (arch == "gfx950")
    assert {index for _, index in asked} >= set(AITER.index_cache_dtypes)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_what_fails_is_named_and_the_rest_runs(tmp_path: Path) -> None:
    done = run_script(tmp_path, "gfx950", failing="bfloat16")
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 1
    assert " bfloat16-fp8 (see " in failed[0]
    assert (tmp_path / "report.tar.gz").is_file()
