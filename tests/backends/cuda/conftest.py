"""Triton decides when a kernel is defined whether it is interpreted, so these are defined here, before any test."""

import os
from importlib.util import find_spec
from unittest import mock

import torch

if find_spec("triton") and not torch.cuda.is_available():
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        import dsv41.backends.cuda.flashinfer_sm100
        import dsv41.backends.cuda.flashinfer_sm120  # noqa: F401
