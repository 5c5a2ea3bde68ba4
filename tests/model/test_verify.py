"""How far apart two runs may be that are both right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.checkpoint import load_checkpoint
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.verify import QUANTISED_TOLERANCE, TOLERANCE, Trace, compare_with_reference

from .toys import TOY, noise


class Perturbed(ReferenceBackend):
    """Attention as far off as that of kernels which sum bf16 products in another order."""

    def forward_mqa(self, inputs: Any, layer: Any, selection: Any, plan: Any, out: Any) -> None:
        super().forward_mqa(inputs, layer, selection, plan, out)
        generator = torch.Generator().manual_seed(layer.spec.layer_id)
        out.data *= 1 + 2e-3 * torch.randn(out.data.shape, generator=generator)


@pytest.mark.parametrize("quantize", [False, True])
def test_rounded_activations_make_more_of_a_small_difference(tmp_path: Path, quantize: bool) -> None:
    checkpoint = load_checkpoint(make_checkpoint(tmp_path / "toy", config=TOY))
    backend, trace = Perturbed(), Trace()
    with torch.no_grad():
        stack = AttentionStack(checkpoint, backend, max_len=64, quantize_activations=quantize)
        session = Session(stack, max_requests=1, max_tokens=64)
        session.step({session.add_request(): noise(7, 40, TOY.hidden_size).to(stack.dtype)}, tap=trace)
        found = compare_with_reference(checkpoint, backend, trace, 1, quantize_activations=quantize)
    assert found.failures == []
    if quantize:
        assert TOLERANCE[torch.bfloat16] / 2 < found.max_relative_error < QUANTISED_TOLERANCE
    else:
        assert found.max_relative_error < TOLERANCE[torch.bfloat16] / 2
