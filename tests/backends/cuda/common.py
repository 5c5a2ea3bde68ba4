"""What the tests of the FlashMLA backend share: the backend over a library, and the same steps on the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv41.backends.cuda.flashmla import FlashMLABackend
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.checkpoint import load_checkpoint
from dsv41.hal.device import Device
from dsv41.hal.types import AttnInputs, AttnOutput, LayerState
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.verify import relative_error

from ...model.portables import Interpreted
from ...model.toys import MAX_LEN, quarter_turns, signs

BF16 = torch.bfloat16
POISON = 0xFF
"""NaN in every field of the record."""
CLOSE = 1e-2


class OnCpu(FlashMLABackend):
    """On a CPU, with matrix products in torch, which Triton's interpreter takes minutes for; and with room for its
    output that holds NaN."""

    _product = Interpreted._product
    o_proj = Interpreted.o_proj

    def alloc_attn_out(self, inputs: AttnInputs, layer: LayerState) -> AttnOutput:
        out = super().alloc_attn_out(inputs, layer)
        out.data.fill_(math.nan)
        return out


def backend(library: Any, arch: str = "sm_90", kind: type[FlashMLABackend] = OnCpu) -> FlashMLABackend:
    made = kind(device="cpu", facts=Device.gpu(arch, 0))
    made.library = library
    return made


def make_stack(path: Path, on: ReferenceBackend, layers: list[int] | None = None) -> AttentionStack:
    stack = AttentionStack(load_checkpoint(path, dtype=BF16, layers=layers), on, max_len=MAX_LEN)
    quarter_turns(stack)
    return stack


class Twins:
    """The same requests on the backend and on the reference in the same records, in pages that hold NaN before."""

    def __init__(self, path: Path, tested: FlashMLABackend, layers: list[int] | None = None, **limits: Any) -> None:
        oracle = ReferenceBackend(kv_cache_dtype="fp8_ds_mla_v4")
        assert oracle.layouts == tested.layouts
        limits = {"max_requests": 3, "max_step_tokens": 32, "page_size": 4, **limits}
        self.sessions = [Session(make_stack(path, on, layers), **limits) for on in (tested, oracle)]
        self.layers = len(self.sessions[0].stack.layers)
        for session in self.sessions:
            for caches in session.caches.values():
                for cache in (caches.window, caches.compressed, caches.index):
                    if cache is not None:
                        cache.data.fill_(POISON)
        self._drawn = 0

    def add(self) -> int:
        one, two = (session.add_request() for session in self.sessions)
        assert one == two
        return one

    def draw(self, tokens: int) -> Tensor:
        self._drawn += 1
        hidden = self.sessions[0].stack.config.hidden_size
        return signs(self.layers, tokens, hidden, seed=self._drawn).to(BF16)

    def step(self, counts: Mapping[int, int], how: str = "step", **options: Any) -> dict[int, Tensor]:
        """Take it on both and compare; what the backend gave."""
        inputs = {request: self.draw(count) for request, count in counts.items()}
        found, expected = (getattr(session, how)(inputs, **options) for session in self.sessions)
        for request, count in counts.items():
            assert found[request].shape == expected[request].shape
            if count:
                agree(found[request], expected[request])
        return dict(found)


def agree(found: Tensor, expected: Tensor) -> None:
    assert found.isfinite().all()
    assert relative_error(found, expected) < CLOSE
