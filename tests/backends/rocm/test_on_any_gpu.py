"""The backend whole, on any GPU: layouts, index streams, scheduling and every kernel, with emulated library calls.

What is above the library is the same for all vendors, so it is shown on the GPU that is there. Without one, a few
tokens run in Triton's interpreter, and products by torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dsv41.backends.rocm.aiter_backend import AiterBackend
from dsv41.checkpoint import load_checkpoint
from dsv41.golden import Golden
from dsv41.hal.device import Device
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.verify import Trace, compare_with_reference

from ...golden_cases import case_dirs, expand
from ...model.portables import DEVICE
from ...model.toys import TOY, noise
from .emulated_aiter import Aiter
from .emulated_logits import Logits
from .test_aiter import Hostile

GPU = DEVICE != "cpu"
FORMATS = [
    ("gfx950", "auto", "auto"),
    ("gfx950", "auto", "fp8"),
    ("gfx942", "fp8", "fp8"),
    ("gfx950", "bfloat16", "fp8"),
    ("gfx950", "fp8_e4m3", "auto"),
]
"""Arch, and the names of cache and index formats."""
EACH = pytest.mark.parametrize(("arch", "kv", "index"), FORMATS if GPU else FORMATS[1:3])
CASES = case_dirs("*-bfloat16") if GPU else case_dirs("tiny-bfloat16")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def make(arch: str, kv: str, index: str) -> Any:
    kind = AiterBackend if GPU else Hostile
    backend = kind(device=DEVICE, kv_cache_dtype=kv, index_cache_dtype=index, facts=Device.gpu(arch))
    backend.library = Aiter(arch)  # type: ignore[misc,assignment]
    backend.logits = Logits(arch)  # type: ignore[attr-defined]
    backend.paged_logits = backend.logits.deepgemm_fp8_paged_mqa_logits  # type: ignore[attr-defined,misc]
    return backend


def agrees(backend: Any, path: Path, hidden: list[Tensor], cuts: list[int], quantised: bool = False) -> None:
    """A request for each `[layers, T, hidden]` of `hidden`, in steps of so many tokens each, the first a prefill."""
    checkpoint = load_checkpoint(path, device=DEVICE, dtype=torch.bfloat16)
    stack = AttentionStack(checkpoint, backend, max_len=sum(cuts), quantize_activations=quantised)
    session, trace = (
        Session(stack, max_requests=len(hidden), max_step_tokens=len(hidden) * max(cuts), page_size=16),
        Trace(),
    )
    requests = [session.add_request() for _ in hidden]
    start = 0
    for count in cuts:
        session.step({r: rows[:, start : start + count] for r, rows in zip(requests, hidden, strict=True)}, tap=trace)
        start += count
    result = compare_with_reference(
        checkpoint, backend, trace, len(hidden), prompt=cuts[0], quantize_activations=quantised
    )
    where = f"{backend.arch}, {backend.kv_cache_dtype} and {backend.index_cache_dtype}, {path.name}, on {DEVICE}"
    errors = {layer: f"{error:.2e}" for layer, error in result.layers.items()}
    assert result.failures == [], (
        f"{where}: {'; '.join(result.failures)}. Relative errors by layer: {errors}; of {result.selections} choices "
        f"{result.selections_differing} differ, {result.selections_untied} by more than a tie"
    )
    assert sorted(result.layers) == [spec.layer_id for spec in stack.specs]
    assert len(backend.library.calls) == len(stack.specs) * len(cuts)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
@EACH
def test_golden_inputs_give_what_the_reference_gives_in_the_same_records(
    path: Path, arch: str, kv: str, index: str, tmp_path: Path
) -> None:
    """A prefill and decode steps."""
    folder = expand(path, tmp_path)
    golden = Golden(folder / "io.safetensors", load_checkpoint(folder).specs, DEVICE)
    tokens = golden.tokens if GPU else 12
    agrees(make(arch, kv, index), folder, [golden.inputs], [tokens - 4, 1, 1, 2])


@pytest.mark.skipif(not GPU, reason="test_index_scores.py does so in the interpreter")
@EACH
def test_decode_scores_of_the_library_choose_what_the_reference_chooses(
    arch: str, kv: str, index: str, tmp_path: Path
) -> None:
    """Two requests; as many index heads as the release has."""
    config = replace(TOY, index_n_heads=32)
    path, layers = make_checkpoint(tmp_path / "toy", config=config), config.num_hidden_layers
    hidden = [noise(layers, 60, config.hidden_size, seed=seed).to(DEVICE, torch.bfloat16) for seed in (1, 2)]
    backend = make(arch, kv, index)
    agrees(backend, path, hidden, [40, 1, 1, 17, 1])
    # Three decode steps; of four index sources, one reads candidates.
    assert len(backend.logits.calls) == (3 * 3 if index == "fp8" else 0)


@pytest.mark.skipif(not GPU, reason="needs a GPU: products of fp8 take the interpreter minutes")
@pytest.mark.parametrize(("arch", "kv", "index"), [FORMATS[1], FORMATS[2]])
def test_quantised_activations_go_through_the_librarys_output(arch: str, kv: str, index: str, tmp_path: Path) -> None:
    config = replace(TOY, num_attention_heads=16, o_groups=2)
    path = make_checkpoint(tmp_path / "toy", config=config)
    hidden = noise(config.num_hidden_layers, 40, config.hidden_size).to(DEVICE, torch.bfloat16)
    backend = make(arch, kv, index)
    agrees(backend, path, [hidden], [30, 1, 9], quantised=True)
    assert all(("out_mxfp8" in call) == (arch == "gfx950") for call in backend.library.calls)
