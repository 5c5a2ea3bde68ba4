"""Rows of slots as aiter's index streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from dsv41.backends.rocm.ragged import Ragged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (5, 128), (7, 133), (3, 300)])
def test_rows_stand_one_behind_the_other(tokens: int, width: int) -> None:
    """Holes anywhere, a row of none, a row that is full, slots at the end of what int32 holds."""
    generator = torch.Generator().manual_seed(width)
    slots = torch.randint(2**31, (tokens, width + 3), generator=generator)[:, :width].to(DEVICE)
    full = slots[0].clone()
    slots[torch.rand(slots.shape, generator=generator).to(DEVICE) < 0.4] = -1
    slots[0] = full
    slots[tokens // 2, 0] = 2**31 - 1
    if tokens > 2:
        slots[2] = -1
    rows = Ragged.of(slots)
    assert (rows.indptr.dtype, rows.indices.dtype, rows.indices.shape) == (torch.int32, torch.int32, (tokens * width,))
    expected = [[slot for slot in row if slot >= 0] for row in slots.tolist()]
    assert rows.indptr.tolist() == [sum(map(len, expected[:token])) for token in range(tokens + 1)]
    assert rows.indices[: rows.indptr[-1]].tolist() == [slot for row in expected for slot in row]


def test_a_part_of_the_tokens_keeps_its_rows() -> None:
    slots = torch.tensor([[4, -1, 5], [-1, -1, -1], [6, 7, 8], [9, -1, -1]], device=DEVICE)
    part = Ragged.of(slots).of_tokens(1, 3)
    assert part.indptr.tolist() == [2, 2, 5]
    assert part.indices[2:5].tolist() == [6, 7, 8]


@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (2, 0)])
def test_no_tokens_and_no_columns_are_streams_too(tokens: int, width: int) -> None:
    rows = Ragged.of(torch.zeros(tokens, width, dtype=torch.int64, device=DEVICE))
    assert rows.indptr.tolist() == [0] * (tokens + 1)
    assert rows.indices.numel() == 1


def test_the_kernels_compile_once_for_each_architecture_and_keep_nothing_in_memory() -> None:
    """By the compiler and not the interpreter. One build serves every number of tokens and columns."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(Path(__file__).parent / "compile_facts.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kernels = ("_pack_rows", "_quantize_groups")
    assert found["spills"] == {f"{arch} {name}": 0 for arch in ("gfx942", "gfx950") for name in kernels}
    assert set(found["builds"].values()) == {1}, found["builds"]
