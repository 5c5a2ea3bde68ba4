"""The portable backend as the tests of the model run it: whole on a GPU, and on a CPU as fast as its interpreter lets.

Importing this skips the test module where there is no Triton.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.backends.reference.linear import linear
from dsv41.backends.reference.quantize import mxfp8_round
from dsv41.hal.types import AttnInputs, AttnOutput, BlockScaledWeight, LayerState, Selection, StepPlan, Weight

pytest.importorskip("triton")

from dsv41.backends.portable.backend import PortableBackend
from dsv41.backends.portable.weights import Matrix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Interpreted(PortableBackend):
    """Without the two kernels that cost Triton's interpreter minutes, attention and matrix products: those are torch
    here. Everything between them is the portable backend's."""

    fuses_rotation = False

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        ReferenceBackend.forward_mqa(self, inputs, layer, selection, plan, out)

    def o_proj(self, out: AttnOutput, layer: LayerState, positions: Tensor) -> Tensor:
        return ReferenceBackend.o_proj(self, out, layer, positions)

    def _product(self, x: Tensor, matrix: Matrix, codes: Any = None, out: Tensor | None = None) -> Tensor:
        weight: Weight = matrix.data
        if matrix.scale is not None:
            weight = BlockScaledWeight(matrix.data.view(torch.float8_e4m3fn), matrix.scale, matrix.block)
        x = x if codes is None or matrix.scale is None else mxfp8_round(x)
        made = linear(x if out is None else x.to(out.dtype), weight)
        return made if out is None else out.copy_(made)


class ChoosesByTorch:
    """Index keys, scores and the choice by torch, of a backend that is tested for what comes after them."""

    select = ReferenceBackend.select
    index_scores = ReferenceBackend.index_scores
    _insert_index_keys = ReferenceBackend._insert_index_keys


class AttendsAlone(ChoosesByTorch):
    """All but attention by torch, for tests of many tokens."""

    prepare_inputs = ReferenceBackend.prepare_inputs
    insert_window = ReferenceBackend.insert_window


def portable(**dtypes: str) -> PortableBackend:
    """On DEVICE, for tests of more than a few tokens."""
    return (Interpreted if DEVICE == "cpu" else PortableBackend)(device=DEVICE, **dtypes)
