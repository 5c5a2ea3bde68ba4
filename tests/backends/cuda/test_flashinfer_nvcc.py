"""A few of FlashInfer's sources for SM120, compiled by nvcc on a machine without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from . import wheels

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
SOURCES = ("dsv41_fp4_cache_ops", "cake_dsv41_fp8_cache_ops", "decode_dispatch")


@pytest.mark.skipif(os.environ.get("DSV41_FULL") != "1", reason="takes a minute: set DSV41_FULL=1")
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("source", SOURCES)
def test_a_source_compiles_for_sm_120(source: str, tmp_path: Path) -> None:
    kept = {"endings": wheels.EVERYTHING, "inside": "flashinfer/data/"}
    data = wheels.sources_or_skip("flashinfer-python", "0.7.4", **kept) / "flashinfer/data"
    kept = {"endings": wheels.EVERYTHING, "inside": "tvm_ffi/include/"}
    ffi = wheels.sources_or_skip("apache-tvm-ffi", "0.1.15.post2", **kept) / "tvm_ffi/include"
    folders = ("cccl/libcudacxx/include", "cccl/cub", "cccl/thrust", "include", "csrc")
    includes = [f"-I{data / folder}" for folder in folders]
    made = tmp_path / "made.o"
    assert NVCC is not None
    done = subprocess.run(
        [
            NVCC,
            "-std=c++17",
            "--expt-relaxed-constexpr",
            "-gencode=arch=compute_120a,code=sm_120a",
            *includes,
            f"-I{ffi}",
            "-c",
            str(data / "csrc/sparse_mla_sm120" / f"{source}.cu"),
            "-o",
            str(made),
        ],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert made.stat().st_size > 10_000
