"""What is compiled ahead of time: listed, bounded, and what the JIT would compile. No kernel is compiled here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv41.compile import TARGETS
from dsv41.hal.arch import ARCHS

HERE = Path(__file__).parent


def facts(what: str, **variables: str) -> Any:
    """What `compile_facts.py` prints, from a process in which nothing is interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = [sys.executable, "-P", str(HERE / "compile_facts.py"), what]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_builds_are_those_of_the_list() -> None:
    """After a change of kernels or tiles that is meant, write the list anew: `python -m
    dsv41.backends.portable.variants > tests/backends/portable/variants.txt`."""
    found = facts("names")
    assert found == (HERE / "variants.txt").read_text().splitlines()
    assert len(set(found)) == len(found) <= 140
    assert {name.partition(":")[0] for name in found} == set(TARGETS)


def test_no_growing_size_is_a_compile_key() -> None:
    for what, (few, many) in facts("sweep").items():
        assert few == many, what


def test_after_warmup_a_step_compiles_nothing() -> None:
    found = facts("warmed")
    assert found["warm"] == []
    assert len(set(found["cold"])) > 10  # the double does count


def test_a_kernel_has_the_same_key_whatever_was_compiled_before() -> None:
    """Triton 3.6 leaves out what called functions use, unless these have been hashed: see `launch.settle_key`."""
    found = facts("keys")
    assert found["called"]
    assert set(found["called"]) <= set(found["kernel"])


def test_rows_are_loaded_no_wider_than_they_are_aligned() -> None:
    """Rows of 68 bytes lie at multiples of 4. The compiler once took them for multiples of 8: see `rows.row_of`."""
    sizes = facts("copies")
    assert sizes
    assert set(sizes) == {4}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_after_warmup_a_run_on_the_device_compiles_nothing(tmp_path: Path) -> None:
    found = facts("device", TRITON_CACHE_DIR=str(tmp_path))
    assert found["failures"] == []
    assert found["warmup"]
    assert found["after"] == []


def test_fr_16_fr_19_fr_23_each_target_converts_in_its_own_dialect() -> None:
    """By instructions where the bytes are in the dialect of its matrix units; elsewhere in integers. One process lists
    them all."""
    listed = (HERE / "variants.txt").read_text().splitlines()
    targets = {line.partition(":")[0] for line in listed if " native" in line}
    assert targets == {target for target in TARGETS if ARCHS[target].fp8_dialect == "ocp"}
