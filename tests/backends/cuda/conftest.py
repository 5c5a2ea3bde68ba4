"""Triton decides when a kernel is defined whether it is interpreted, so these are defined here, before any test."""

import os
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

if find_spec("triton") and not torch.cuda.is_available():
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        import dsv41.backends.cuda.flashinfer_sm100
        import dsv41.backends.cuda.flashinfer_sm120  # noqa: F401

from .emulator.gpu import emulated_gpu  # noqa: F401  a fixture

EMULATED = ("test_contract.py", "test_flashinfer.py", "test_flashinfer_gemm.py", "test_flashmla_mega.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What emulates a library does so on the CPU, where kernels run in Triton's interpreter."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.parent.name == "cuda" and item.path.name in EMULATED:
                item.add_marker(pytest.mark.skip(reason="emulates a library on machines without a GPU"))
