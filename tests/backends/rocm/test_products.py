"""aiter's preshuffled products over an emulated library, and what their weights are made of."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dsv41 import graph
from dsv41.backends.portable import backend as portable
from dsv41.backends.portable.quantize import quantize_mxfp8
from dsv41.backends.portable.weights import Matrix
from dsv41.backends.reference.linear import grouped_linear, linear
from dsv41.backends.rocm.aiter_backend import AiterBackend
from dsv41.backends.rocm.matrices import CoarseMatrix, TiledMatrix, coarse, fine, tiled
from dsv41.checkpoint import load_checkpoint
from dsv41.errors import BackendError, InputError
from dsv41.fp8 import dequantize_blocks, quantize_blocks
from dsv41.hal.codecs import decode_ue8m0, double_ue8m0, e4m3_ocp_to_fnuz
from dsv41.hal.device import Device
from dsv41.hal.records import Dialect
from dsv41.hal.types import BlockScaledWeight
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.verify import relative_error

from ...model.test_graph import Rehearsal
from ...model.toys import MAX_LEN, TOY, dyadic_checkpoint, noise, quarter_turns, signs
from ...wording import refused
from ..cuda import wheels
from .emulated_aiter import Aiter, e4m3
from .emulated_products import Products
from .test_aiter import Hostile, Oracle, poison, two_steps
from .test_contract import NEWEST_WHEEL

BF16 = torch.bfloat16
WIDE = replace(TOY, hidden_size=128, o_lora_rank=64)
"""With 128 columns in every weight that the library multiplies by."""
EVERYTHING = frozenset({"sparse_mla", "gemm_blockscale", "gemm_mxfp8", "bmm_mxfp8"})
GEMM, BMM = "gemm_a8w8_blockscale_bpreshuffle", "batched_gemm_a8w8_mxscale_bpreshuffle"


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DSV41_AITER_PRODUCTS", raising=False)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def dyadic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("products") / "dyadic"
    dyadic_checkpoint(path, BF16, WIDE)
    return path


@pytest.fixture(scope="module")
def realistic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("products") / "realistic", config=WIDE)


class Whole(Hostile):
    """What the library does not multiply by is torch's, and so is the grouped product where it is not the library's."""

    o_proj = AiterBackend.o_proj


def make(arch: str = "gfx950", features: frozenset[str] = EVERYTHING, kind: Any = Whole, kv: str = "fp8") -> Any:
    backend = kind(device="cpu", kv_cache_dtype=kv, facts=Device.gpu(arch))
    backend.library = Aiter(arch)
    backend.features = features
    backend.gemm = backend.bmm = Products(arch)
    return backend


def stack_of(path: Path, backend: Any, layers: list[int] | None = None, **options: Any) -> AttentionStack:
    options = {"quantize_activations": True, **options}
    checkpoint = load_checkpoint(path, dtype=options.pop("dtype", BF16), layers=layers or [0])
    return AttentionStack(checkpoint, backend, max_len=MAX_LEN, **options)


def names(backend: Any) -> list[str]:
    return [name for name, _ in backend.gemm.calls]


def release_like(rows: int, columns: int, seed: int = 0) -> BlockScaledWeight:
    """Blocks whose scales are many powers of two apart."""
    wide = noise(rows, columns, seed=seed)
    apart = noise(rows // 32, columns // 32, seed=seed + 1).square().mul(2).int().float()
    return quantize_blocks(wide * torch.exp2(-apart).repeat_interleave(32, 0).repeat_interleave(32, 1))


# Tiles


def gathered(codes: Tensor) -> Tensor:
    """The rows of a matrix in tiles, number by number."""
    rows, columns = codes.shape
    flat = codes.flatten()
    return torch.stack(
        [
            torch.stack(
                [flat[(n // 16 * (columns // 16) + k // 16) * 256 + n % 16 * 16 + k % 16] for k in range(columns)]
            )
            for n in range(rows)
        ]
    )


def test_tiles_are_where_the_formula_says_and_come_back() -> None:
    codes = torch.randint(256, (48, 64), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    found = tiled(codes)
    assert not torch.equal(found, codes)
    assert torch.equal(gathered(found), codes)
    back = found.view(3, 4, 16, 16).transpose(1, 2).reshape(48, 64)
    assert torch.equal(back, codes)
    apart = torch.cat([tiled(codes[:16]), tiled(codes[16:])])
    assert torch.equal(apart, found), "the groups of wo_a may be put in tiles as one matrix"


def test_tiles_are_those_of_the_library() -> None:
    """Its own function, from its newest wheel; the file needs nothing but torch."""
    folder = wheels.sources_or_skip("amd-aiter", NEWEST_WHEEL)
    spec = importlib.util.spec_from_file_location("aiter_shuffle", folder / "aiter" / "ops" / "shuffle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    codes = torch.randint(256, (80, 256), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    assert torch.equal(tiled(codes), module.shuffle_weight(codes, layout=(16, 16)))


def test_a_matrix_is_put_in_tiles_once() -> None:
    weight = quantize_blocks(noise(32, 128))
    prepared = fine([weight])
    assert isinstance(prepared, TiledMatrix)
    for again in (fine, lambda weights: coarse(weights, Dialect.OCP)):
        with refused(BackendError, "a TiledMatrix [32, 128]", "checkpoint layout", "take the layer's own"):
            again([prepared])


def test_only_weights_that_the_products_take_are_put_in_tiles() -> None:
    def coded(rows: int, columns: int, block: tuple[int, int] = (32, 32)) -> BlockScaledWeight:
        return quantize_blocks(noise(rows, columns), block)

    takes = [([coded(64, 128)], 2), ([coded(32, 128), coded(64, 128)], 1)]
    for weights, groups in takes:
        found = fine(weights, groups)
        assert found is not None
        assert found.rows == sum(len(weight.data) for weight in weights)
    for weights, groups in (
        ([noise(32, 128)], 1),
        ([coded(40, 128)], 1),
        ([coded(32, 96)], 1),
        ([coded(32, 128)], 2),
        ([coded(32, 128, (1, 32))], 1),
        ([coded(32, 128, (128, 128))], 1),
        ([coded(32, 128), noise(32, 128)], 1),
        ([coded(40, 128), coded(32, 128)], 1),
    ):
        assert fine(weights, groups) is None
    for weight in (coded(48, 128), coded(32, 128, (1, 32)), coded(160, 256, (128, 128)), coded(144, 128, (64, 16))):
        assert coarse([weight], Dialect.OCP) is not None
    for weight in (noise(32, 128), coded(40, 128), coded(32, 96), coded(32, 384, (32, 96))):
        assert coarse([weight], Dialect.OCP) is None


# Scales for 128 x 128


def numbers(matrix: CoarseMatrix, columns: int) -> Tensor:
    assert matrix.scale is not None
    scale = matrix.scale.repeat_interleave(128, 0)[: matrix.rows].repeat_interleave(128, 1)[:, :columns]
    return e4m3(gathered(matrix.data), 8 if matrix.dialect is Dialect.FNUZ else 7) * scale


@pytest.mark.parametrize("dialect", list(Dialect))
def test_coarse_scales_are_the_largest_and_codes_round_once(dialect: Dialect) -> None:
    """Beside an independent computation: each number over the scale of its 128 x 128, to the nearest of e4m3."""
    weight = release_like(160, 256)
    exact = dequantize_blocks(weight)
    matrix = coarse([weight], dialect)
    assert matrix is not None
    assert matrix.scale is not None
    grid = decode_ue8m0(weight.scale)
    largest = torch.stack([torch.stack([grid[r : r + 4, c : c + 4].max() for c in (0, 4)]) for r in (0, 4)])
    assert torch.equal(matrix.scale, largest * (2 if dialect is Dialect.FNUZ else 1))
    scale = largest.repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)
    due = (exact / scale).to(torch.float8_e4m3fn).float() * scale
    found = numbers(matrix, 256)
    assert torch.equal(found, due)
    assert not torch.equal(found, exact), "some codes lose bits"


@pytest.mark.parametrize("dialect", list(Dialect))
def test_coarse_scales_are_exact_where_no_code_loses_bits(dialect: Dialect) -> None:
    """Codes of a scale lower by s powers of two move down by s; those that stay normal are as they were, and zeros
    under whatever scale do not count."""
    codes = torch.arange(256).to(torch.uint8).repeat(128, 1)
    codes[(codes & 0x7F) == 0x7F] = 0
    for steps, kept in ((0, 0.0), (1, 2.0**-5), (7, 2.0)):
        values = e4m3(codes, 7)
        small = torch.where(values.abs() >= kept, codes, 0)
        scale = torch.full((4, 8), 127 - steps, dtype=torch.uint8)
        scale[0, 0] = scale[0, 4] = 127
        small[:, [0, 128]] = 0x38
        scale[3, 3], small[96:, 96:128] = 200, 0x80
        weight = BlockScaledWeight(small.view(torch.float8_e4m3fn), scale)
        matrix = coarse([weight], dialect)
        assert matrix is not None
        assert torch.equal(numbers(matrix, 256), dequantize_blocks(weight))
        assert matrix.scale is not None
        assert matrix.scale.tolist() == [[2.0 if dialect is Dialect.FNUZ else 1.0] * 2]


def test_every_code_crosses_to_fnuz_exactly() -> None:
    """All 256, under the doubled scale; -0 becomes 0 and NaN stays NaN. As read the other way, all is half as large."""
    codes = torch.arange(256).to(torch.uint8)
    crossed = e4m3_ocp_to_fnuz(codes)
    ocp, fnuz = e4m3(codes, 7), e4m3(crossed, 8) * 2
    assert torch.equal(ocp.isnan(), fnuz.isnan())
    assert torch.equal(ocp.nan_to_num(), fnuz.nan_to_num())
    assert crossed[0x80] == 0
    assert fnuz[~fnuz.isnan()].abs().max() == 448
    reread = e4m3(codes, 8)
    live = ~ocp.isnan() & ~reread.isnan() & (ocp != 0)
    assert torch.equal(reread[live] * 2, ocp[live])
    exponents = torch.arange(254).to(torch.uint8)
    assert torch.equal(decode_ue8m0(double_ue8m0(exponents)), decode_ue8m0(exponents) * 2)


def test_scales_that_cannot_double_are_refused() -> None:
    weight = quantize_blocks(noise(32, 128))
    weight.scale[0, 1] = 254
    assert coarse([weight], Dialect.OCP) is not None
    with refused(InputError, "scales of 2**127", "portable backend"):
        coarse([weight], Dialect.FNUZ)


# Products


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_each_product_is_that_of_the_reference(realistic: Path, rows: int) -> None:
    backend = make()
    layer = stack_of(realistic, backend).layers[0].state
    weights, groups = layer.weights, layer.spec.o_groups
    hidden, latent = noise(rows, 128).to(BF16), noise(rows, 128, seed=1).to(BF16)
    down = backend.project_down(hidden, layer)
    expected = torch.cat([linear(hidden, weights.wq_a, quantize=True), linear(hidden, weights.wkv, quantize=True)], 1)
    torch.testing.assert_close(down, expected, rtol=2**-7, atol=1e-3)
    found = backend.project_latent(latent, layer)
    torch.testing.assert_close(found, linear(latent, weights.wo_b, quantize=True), rtol=2**-7, atol=1e-3)
    heads = noise(rows, groups, 1024, seed=2).to(BF16)
    codes, scale = quantize_mxfp8(heads.flatten(1))
    made = backend.project_groups(codes.view(heads.shape), scale.view(rows, groups, 32), layer, BF16)
    torch.testing.assert_close(made, grouped_linear(heads, weights.wo_a, quantize=True), rtol=2**-7, atol=1e-3)
    assert names(backend) == ([GEMM, GEMM, BMM] if rows else [])


def test_each_op_is_the_librarys_where_it_is_exact_and_portable_elsewhere(realistic: Path) -> None:
    """By op: an arch without MXFP8, a version without one of the products, activations that are not rounded."""
    for arch, features, rounds, due in (
        ("gfx950", EVERYTHING, True, (True, True)),
        ("gfx950", EVERYTHING - {"gemm_mxfp8"}, True, (False, True)),
        ("gfx950", EVERYTHING - {"bmm_mxfp8"}, True, (True, False)),
        ("gfx950", EVERYTHING, False, (False, False)),
        ("gfx942", EVERYTHING, True, (False, False)),
    ):
        prepared: Any = stack_of(realistic, make(arch, features), quantize_activations=rounds).layers[0].state.prepared
        assert (type(prepared.down[0]) is TiledMatrix, type(prepared.wo_a) is TiledMatrix) == due
        assert type(prepared.wo_b) is type(prepared.down[0])
        assert type(prepared.wq_b) is type(prepared.wkv) is Matrix


def test_what_is_asked_for_is_read_once_and_checked(realistic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_AITER_PRODUCTS", " Portable")
    backend = make()
    assert backend.products == "portable"
    assert type(stack_of(realistic, backend).layers[0].state.prepared.wo_b) is Matrix  # type: ignore[union-attr]
    monkeypatch.setenv("DSV41_AITER_PRODUCTS", "block64")
    with refused(BackendError, "DSV41_AITER_PRODUCTS is 'block64'", "auto, portable, block128"):
        make()


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_steps_with_the_librarys_products_give_what_the_reference_gives(dyadic: Path, arch: str) -> None:
    """Whole layers, the kernels of every segment around them; on gfx942 its output projection is ours, in bf16."""
    outputs, backend = [], make(arch)
    for each in (Oracle(backend), backend):
        made = stack_of(dyadic, each, [0, 1, 4], quantize_activations=arch == "gfx950")
        quarter_turns(made)
        session = Session(made, max_requests=2, max_step_tokens=32, page_size=16)
        poison(session)
        hidden = signs(3, 20, WIDE.hidden_size).to(BF16)
        outputs.append([rows for step in two_steps(session, hidden) for rows in step.values()])
    for mine, theirs in zip(*reversed(outputs), strict=True):
        assert relative_error(mine, theirs) < 2e-2
    assert set(names(backend)) == ({GEMM, BMM} if arch == "gfx950" else set())
    quantised = {"out_mxfp8" in call for call in backend.library.calls}
    assert quantised == {arch == "gfx950"}


def test_both_projections_of_queries_take_the_codes_of_one_norm(
    realistic: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main one and the indexer's: one launch norms both parts and rounds the queries' to MXFP8."""
    normed: list[tuple[Tensor, ...]] = []
    norm = portable.norm_inputs
    monkeypatch.setattr(portable, "norm_inputs", lambda *given: normed.append(norm(*given)) or normed[-1])
    given: list[tuple[int, Any]] = []

    class Noting(Whole):
        def _product(self, x: Tensor, matrix: Matrix, codes: Any = None, out: Tensor | None = None) -> Tensor:
            given.append((matrix.data.data_ptr(), codes))
            return super()._product(x, matrix, codes, out)

    stack = stack_of(realistic, make(kind=Noting), [1])
    session = Session(stack, max_requests=1)
    session.step({session.add_request(): noise(1, 40, 128).to(BF16)})
    prepared: Any = stack.layers[0].state.prepared
    codes = {
        name: next(codes for pointer, codes in given if pointer == getattr(prepared, name).data.data_ptr())
        for name in ("wq_b", "index_wq_b")
    }
    assert len(normed) == 1
    assert codes["wq_b"][0] is codes["index_wq_b"][0] is normed[0][1]


# Blocks of 128


@pytest.mark.parametrize(("arch", "features"), [("gfx942", EVERYTHING), ("gfx950", frozenset({"gemm_blockscale"}))])
def test_blocks_of_128_are_taken_by_request_alone(
    realistic: Path, arch: str, features: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the product is close to the reference's, not equal to it."""
    hidden = noise(5, 128).to(BF16)
    monkeypatch.setenv("DSV41_AITER_PRODUCTS", "block128")
    backend = make(arch, features)
    layer = stack_of(realistic, backend, quantize_activations=False).layers[0].state
    assert isinstance(layer.prepared.down[0], CoarseMatrix)
    assert type(layer.prepared.wo_a) is Matrix
    found = backend.project_down(hidden, layer)
    assert names(backend) == [GEMM]
    exact = torch.cat([linear(hidden, layer.weights.wq_a), linear(hidden, layer.weights.wkv)], 1)
    assert 1e-3 < relative_error(found, exact) < 6e-2
    monkeypatch.delenv("DSV41_AITER_PRODUCTS")
    prepared: Any = stack_of(realistic, make(arch, features)).layers[0].state.prepared
    assert type(prepared.down[0]) is Matrix


def test_what_reads_ocp_weights_as_fnuz_is_caught(realistic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_AITER_PRODUCTS", "block128")
    backend = make("gfx942")
    layer = stack_of(realistic, backend).layers[0].state
    wo_b: Any = coarse([layer.weights.wo_b], Dialect.OCP)
    layer.prepared = replace(layer.prepared, wo_b=wo_b)
    with pytest.warns(RuntimeWarning, match="fp8 of gfx942"):
        backend.project_latent(noise(2, 128).to(BF16), layer)


# Failures, new weights, graphs


def test_a_product_that_fails_is_the_portable_kernels_from_then_on(
    realistic: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Products):
        def gemm_a8w8_blockscale_bpreshuffle(self, *_: Any, **__: Any) -> Tensor:
            raise ModuleNotFoundError("No module named 'flydsl'")

    backend = make()
    backend.gemm = Broken("gfx950")
    layer = stack_of(realistic, backend).layers[0].state
    latent = noise(2, 128).to(BF16)
    with pytest.warns(RuntimeWarning, match=r"No module named 'flydsl'.*From now on the portable kernels"):
        found = backend.project_latent(latent, layer)
    torch.testing.assert_close(found, linear(latent, layer.weights.wo_b, quantize=True), rtol=2**-7, atol=1e-3)
    down = backend.project_down(latent, layer)  # not asked again
    expected = torch.cat([linear(latent, w, quantize=True) for w in (layer.weights.wq_a, layer.weights.wkv)], 1)
    torch.testing.assert_close(down, expected, rtol=2**-7, atol=1e-3)
    assert "flydsl" in backend.failed["gemm"]
    assert "bmm" not in backend.failed
    monkeypatch.setattr("dsv41.backends.rocm.base.capturing", lambda device: True)
    backend.failed.clear()
    with pytest.raises(BackendError, match="flydsl"):
        backend.project_latent(latent, layer)


def test_activations_in_float32_are_the_portable_kernels(realistic: Path) -> None:
    backend = make()
    layer = stack_of(realistic, backend, dtype=torch.float32).layers[0].state
    latent = noise(2, 128)
    found = backend.project_latent(latent, layer)
    torch.testing.assert_close(found, linear(latent, layer.weights.wo_b, quantize=True), rtol=1e-5, atol=1e-5)
    assert names(backend) == []


@pytest.mark.parametrize("asked", ["auto", "block128"])
def test_new_weights_go_into_the_memory_of_the_old(
    realistic: Path, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preparing leaves the layer's own as they are; after an update, and after sleep, a step is that of a new stack."""
    monkeypatch.setenv("DSV41_AITER_PRODUCTS", asked)
    arch = "gfx950" if asked == "auto" else "gfx942"
    other = make_checkpoint(tmp_path / "other", config=WIDE, seed=1)
    stack, fresh = (stack_of(path, make(arch)) for path in (realistic, other))
    own = load_checkpoint(realistic, dtype=BF16, layers=[0]).weights[0].wo_b
    assert torch.equal(stack.layers[0].state.weights.wo_b.data.view(torch.uint8), own.data.view(torch.uint8))  # type: ignore[union-attr]
    prepared: Any = stack.layers[0].state.prepared
    matrices = [prepared.down[0], prepared.wo_a, prepared.wo_b]
    pointers = [matrix.data.data_ptr() for matrix in matrices]

    def output(made: AttentionStack) -> Tensor:
        session = Session(made, max_requests=1)
        return session.step({session.add_request(): noise(1, 3, 128).to(BF16)})[0]

    old = output(stack)
    stack.update_weights(load_checkpoint(other, dtype=BF16, layers=[0]))
    assert stack.layers[0].state.prepared is prepared
    assert [matrix.data.data_ptr() for matrix in matrices] == pointers
    assert torch.equal(output(stack), output(fresh))
    assert not torch.equal(output(stack), old)
    stack.sleep()
    assert all(matrix.data.numel() == 0 for matrix in matrices)
    stack.wake(load_checkpoint(realistic, dtype=BF16, layers=[0]))
    assert torch.equal(output(stack), old)


def test_a_captured_step_follows_new_weights(realistic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_Recording", Rehearsal)
    other = make_checkpoint(tmp_path / "other", config=WIDE, seed=1)
    stack = stack_of(realistic, make())
    hidden, outputs = {0: noise(1, 2, 128).to(BF16)}, []
    for path in (realistic, other):
        stack.update_weights(load_checkpoint(path, dtype=BF16, layers=[0]))
        eager, captured = (Session(stack, max_requests=1, max_step_tokens=4, page_size=16) for _ in range(2))
        captured.capture(2, num_requests=1)
        stack.backend.gemm.calls.clear()  # type: ignore[attr-defined]
        for session in (eager, captured):
            assert session.add_request() == 0
        expected = eager.step(hidden, pad_to=2)[0]
        outputs.append(captured.step(hidden)[0])
        assert torch.equal(outputs[-1], expected)
        assert BMM in names(stack.backend)
    assert not torch.equal(*outputs)


def test_padding_that_is_not_finite_stays_in_its_rows(realistic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arch, asked in (("gfx950", "auto"), ("gfx942", "block128")):
        monkeypatch.setenv("DSV41_AITER_PRODUCTS", asked)
        backend = make(arch)
        layer = stack_of(realistic, backend).layers[0].state
        latent = noise(3, 128).to(BF16)
        clean = backend.project_latent(latent, layer)
        latent[1, 7] = math.nan
        found = backend.project_latent(latent, layer)
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], clean[[0, 2]])
