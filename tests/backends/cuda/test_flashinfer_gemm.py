"""Scales in tiles, and the product with `wo_b` by an emulated `mm_mxfp8`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.backends.cuda.flashinfer_gemm import product, quantize_tiled, tiled, tiled_scales
from dsv41.backends.cuda.flashinfer_sm100 import FlashInferSM100
from dsv41.backends.cuda.flashinfer_sm120 import FlashInferSM120
from dsv41.backends.portable.quantize import quantize_mxfp8
from dsv41.backends.portable.weights import Matrix
from dsv41.backends.reference.linear import linear
from dsv41.checkpoint import load_checkpoint
from dsv41.errors import BackendError
from dsv41.fp8 import quantize_blocks
from dsv41.hal.device import Device
from dsv41.hal.types import BlockScaledWeight
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint

from ...model.toys import MAX_LEN, TOY, noise
from . import emulated_flashinfer as emulated

WIDE = replace(TOY, hidden_size=160, o_groups=2, o_lora_rank=64)
"""`wo_b` of it is `[160, 128]`."""


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _newest(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.install(monkeypatch)


def place(row: int, column: int, columns: int) -> int:
    """The byte of a scale: 512 a tile of 128 rows and 4 columns, the tiles of 128 rows one after the other."""
    tile = row // 128 * -(-columns // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (31, 4), (128, 8), (129, 7), (300, 12)])
def test_every_scale_lies_where_the_formula_says(rows: int, columns: int) -> None:
    scales = torch.randint(1, 255, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = tiled(scales)
    assert found.shape == (-(-rows // 128) * 128 * -(-columns // 4) * 4,)
    expected = torch.zeros_like(found)
    for row in range(rows):
        for column in range(columns):
            expected[place(row, column, columns)] = scales[row, column]
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (3, 160), (2, 2080), (130, 128)])
def test_activations_are_the_portable_kernels_with_scales_in_tiles(rows: int, width: int) -> None:
    wide = noise(rows, width + 8).bfloat16()
    wide[-1, 40] = math.nan
    codes, scales = quantize_tiled(wide[:, :width])
    expected = quantize_mxfp8(wide[:, :width])
    assert torch.equal(codes, expected[0])
    assert torch.equal(scales, tiled(expected[1]))


def test_only_weights_that_the_library_takes_get_tiles() -> None:
    def coded(rows: int, width: int, block: tuple[int, int] = (32, 32)) -> BlockScaledWeight:
        return quantize_blocks(noise(rows, width), block)

    found = tiled_scales(coded(160, 256))
    assert found is not None
    full = coded(160, 256).scale.repeat_interleave(32, dim=0)
    assert all(found[place(r, c, 8)] == full[r, c] for r in range(160) for c in range(8))
    assert tiled_scales(coded(160, 256, (1, 32))) is not None
    for weight in (noise(160, 256), coded(96, 256), coded(160, 96), coded(160, 256, (128, 128)), coded(150, 256)):
        assert tiled_scales(weight) is None


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_product_is_that_of_the_reference(rows: int) -> None:
    weight = quantize_blocks(noise(160, 256, seed=1))
    scales = tiled_scales(weight)
    assert scales is not None
    x = noise(rows, 256).bfloat16()
    import flashinfer.gemm as library  # type: ignore[import-not-found]

    found = product(library, x, Matrix.of(weight), scales)
    torch.testing.assert_close(found, linear(x, weight, quantize=True), rtol=2**-7, atol=1e-3)
    assert len(emulated.calls) == (rows > 0)


def stack_of(kind: Any, path: Path, **options: Any) -> Any:
    arch = "sm_120" if kind is FlashInferSM120 else "sm_100"
    backend = kind(facts=Device.gpu(arch, multiprocessors=148))
    checkpoint = load_checkpoint(path, dtype=options.pop("dtype", torch.bfloat16), layers=[0])
    return AttentionStack(checkpoint, backend, max_len=MAX_LEN, **options)


@pytest.mark.parametrize("kind", [FlashInferSM120, FlashInferSM100])
def test_the_last_projection_is_the_librarys_where_it_can_be(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path / "toy", config=WIDE)

    def projected(stack: Any) -> Tensor:
        emulated.calls.clear()
        latent: Tensor = stack.backend.project_latent(x.to(stack.dtype), stack.layers[0].state)
        return latent

    x = noise(2, 128)
    stack = stack_of(kind, path, quantize_activations=True)
    found = projected(stack)
    assert [name for name, _ in emulated.calls] == ["flashinfer.gemm.mm_mxfp8"]
    assert stack.backend._multiplies, "the library refused nothing"
    weight = stack.layers[0].state.weights.wo_b
    torch.testing.assert_close(found, linear(x.bfloat16(), weight, quantize=True), rtol=2**-7, atol=1e-3)
    for others in ({"quantize_activations": False}, {"quantize_activations": True, "dtype": torch.float32}):
        projected(stack_of(kind, path, **others))
        assert emulated.calls == []

    def broken(version: str, **_: Any) -> None:
        raise RuntimeError("cublasLt.h: No such file or directory")

    monkeypatch.setattr(emulated, "_mm_mxfp8", broken)
    emulated.install(monkeypatch)
    stack = stack_of(kind, path, quantize_activations=True)
    with pytest.warns(RuntimeWarning, match=r"mm_mxfp8 failed .*cublasLt\.h.* portable kernels do this product"):
        again = projected(stack)
    assert torch.equal(projected(stack), again)
    assert emulated.calls == [], "it is asked once"
    torch.testing.assert_close(again, found, rtol=2**-7, atol=1e-3)
    monkeypatch.setattr("dsv41.backends.cuda.flashinfer_backend.capturing", lambda device: True)
    stack = stack_of(kind, path, quantize_activations=True)
    with pytest.raises(BackendError, match="mm_mxfp8 failed"):
        projected(stack)


def test_new_weights_reach_the_library(tmp_path: Path) -> None:
    one, two = (make_checkpoint(tmp_path / str(seed), config=WIDE, seed=seed) for seed in (0, 1))
    stack, fresh = (stack_of(FlashInferSM100, path, quantize_activations=True) for path in (one, two))
    prepared = stack.layers[0].state.prepared
    pointer, before = prepared.wo_b_scales.data_ptr(), prepared.sink.clone()
    stack.update_weights(load_checkpoint(two, dtype=torch.bfloat16, layers=[0]))
    assert stack.layers[0].state.prepared is prepared
    assert prepared.wo_b_scales.data_ptr() == pointer
    assert torch.equal(prepared.wo_b_scales, fresh.layers[0].state.prepared.wo_b_scales)
    assert torch.equal(prepared.sink, fresh.layers[0].state.prepared.sink)
    assert not torch.equal(prepared.sink, before)
    assert prepared.sink.tolist()[4:] == [-math.inf] * 4
