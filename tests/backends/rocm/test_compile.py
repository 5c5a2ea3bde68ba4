"""Every kernel of this path that the portable budget does not see, by the compiler and not the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_the_kernels_compile_once_for_each_architecture_and_keep_nothing_in_memory() -> None:
    """One build serves every number of tokens and columns; that of queries another a dialect of their keys."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(Path(__file__).parent / "compile_facts.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kernels = ["_pack_rows", "_quantize_groups", "_query_codes", "_query_codes"]
    names = [f"{target} {kernel}" for target in ("gfx942", "gfx950") for kernel in kernels]
    assert found["spills"] == {f"{name} {number}": 0 for number, name in enumerate(names)}
    assert set(found["builds"].values()) == {1}, found["builds"]
    assert len(found["keys"]) == 3 * 4
    for name, (spilled, shared, matrix) in found["keys"].items():
        assert (spilled, shared <= (64 if name.startswith("gfx942") else 160) << 10) == (0, True), name
        assert (matrix > 0) == name.endswith("_index_scores"), name
