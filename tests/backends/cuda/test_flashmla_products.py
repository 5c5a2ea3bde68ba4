"""Which products of the FlashMLA backend are ours: with torch in the place of both kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dsv41.backends.cuda import products, products_wide
from dsv41.backends.cuda.build import Build
from dsv41.backends.cuda.choice import Choice
from dsv41.backends.cuda.flashmla import FlashMLABackend
from dsv41.backends.portable.backend import PortableBackend
from dsv41.backends.portable.weights import Matrix
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.backends.reference.linear import grouped_linear
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.hal.device import Device
from dsv41.hal.types import BlockScaledWeight, LayerState
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint, small_config
from dsv41.verify import relative_error

from ...model.portables import Interpreted

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are torch here: test_products.py runs ours"),
    pytest.mark.filterwarnings("ignore:8 heads a rank are padded:UserWarning"),
]

LAYER = 1  # which owns all that a layer can


class Multiplies(FlashMLABackend):
    """With `choice` as it is told, and torch for our kernel; `rows` are those of the matrices that it took."""

    told = Choice("sm_90", None)

    def __init__(self) -> None:
        super().__init__(device="cpu", facts=Device.gpu("sm_90", 0))
        self.rows: list[int] = []

    def read_choice(self) -> Choice:
        return self.told

    def multiply_on_hopper(self, x: Tensor, matrix: Matrix, out: Tensor) -> None:
        assert matrix.scale is not None
        kernel = products if len(x) < 33 else products_wide
        assert not kernel.misread(x, matrix.data, matrix.scale, out)
        self.rows.append(matrix.rows)
        out.copy_(grouped_linear(x, weight_of(matrix)))


def weight_of(matrix: Matrix) -> BlockScaledWeight:
    assert matrix.scale is not None
    return BlockScaledWeight(matrix.data.view(torch.float8_e4m3fn), matrix.scale, matrix.block)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = Path(tmp_path_factory.mktemp("products"))
    make_checkpoint(path, layers=(LAYER,), seed=0, config=small_config())
    return load_checkpoint(path, layers=(LAYER,))


@pytest.fixture(autouse=True)
def _torch_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in Triton's interpreter would take minutes."""

    def groups(self: Any, heads: Tensor, scale: Tensor | None, layer: LayerState, dtype: torch.dtype) -> Tensor:
        assert scale is None
        return grouped_linear(heads, weight_of(layer.prepared.wo_a))

    monkeypatch.setattr(PortableBackend, "_product", Interpreted._product)
    monkeypatch.setattr(PortableBackend, "project_groups", groups)


def state_on(backend: ReferenceBackend, checkpoint: Checkpoint, **options: Any) -> LayerState:
    [layer] = AttentionStack(checkpoint, backend, max_len=16, **options).layers
    return layer.state


def inputs_of(layer: LayerState, tokens: int) -> dict[str, Tensor]:
    spec, random = layer.spec, torch.Generator().manual_seed(tokens)
    shapes = {
        "wq_a, wkv": (tokens, spec.hidden_size),
        "wq_b": (tokens, spec.q_lora_rank),
        "wo_a": (tokens, spec.o_groups, spec.num_heads // spec.o_groups * spec.head_dim),
        "wo_b": (tokens, spec.o_groups * spec.o_lora_rank),
        "indexer's wq_b": (tokens, spec.q_lora_rank),
    }
    return {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}


def multiply(backend: Multiplies, checkpoint: Checkpoint, tokens: int, **options: Any) -> None:
    """All products, beside the reference."""
    reference = ReferenceBackend()
    layer, oracle = state_on(backend, checkpoint, **options), state_on(reference, checkpoint, **options)
    found, expected = backend.single_products(layer), reference.single_products(oracle)
    for name, x in inputs_of(layer, tokens).items():
        assert relative_error(found[name](x), expected[name](x)) < 1e-2, name


@pytest.mark.parametrize("tokens", [1, 32, 33, 256])
def test_all_products_of_few_tokens_are_ours(checkpoint: Checkpoint, tokens: int) -> None:
    backend = Multiplies()
    multiply(backend, checkpoint, tokens)
    weights = checkpoint.weights[LAYER]
    assert weights.indexer is not None
    sizes = [weights.wq_a.shape[0] + weights.wkv.shape[0]]
    sizes += [weight.shape[0] for weight in (weights.wq_b, weights.wo_a, weights.wo_b, weights.indexer.wq_b)]
    assert backend.rows == sizes


def test_more_tokens_are_the_portable_kernels(checkpoint: Checkpoint) -> None:
    backend = Multiplies()
    multiply(backend, checkpoint, 257)
    assert backend.rows == []


@pytest.mark.parametrize("told", [Choice("sm_90", None, "flashmla"), Choice("sm_90", "no compiler")], ids=str)
def test_where_another_is_named_or_nothing_compiles_they_are_too(
    checkpoint: Checkpoint, told: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Multiplies, "told", told)
    backend = Multiplies()
    multiply(backend, checkpoint, 1)
    assert backend.rows == []


def test_quantised_activations_and_plain_matrices_are_the_portable_kernels(checkpoint: Checkpoint) -> None:
    backend = Multiplies()
    layer = state_on(backend, checkpoint, quantize_activations=True)
    x = inputs_of(layer, 2)["wq_b"]
    found = backend.single_products(layer)["wq_b"](x)
    reference = ReferenceBackend()
    oracle = state_on(reference, checkpoint, quantize_activations=True)
    assert relative_error(found, reference.single_products(oracle)["wq_b"](x)) < 1e-2
    plain = torch.randn(32, x.shape[1]).bfloat16()
    assert relative_error(backend._product(x, Matrix(plain)), x @ plain.T) < 1e-2
    assert backend.rows == []


def test_tensors_that_ours_would_misread_are_the_portable_kernels(checkpoint: Checkpoint) -> None:
    backend = Multiplies()
    layer = state_on(backend, checkpoint)
    x = torch.randn(3, 2 * layer.spec.q_lora_rank).bfloat16()[:, 1 : 1 + layer.spec.q_lora_rank]
    expected = grouped_linear(x[:, None], weight_of(layer.prepared.wq_b))
    assert relative_error(backend._product(x, layer.prepared.wq_b), expected) < 1e-2
    assert backend.rows == []


def test_what_cannot_be_compiled_is_said_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels that may be used are compiled when the backend is made, so that no step finds out."""
    asked: list[str] = []

    def why_not(builds: tuple[Build, ...]) -> str | None:
        asked.extend(dict.fromkeys(build.kernel for build in builds))
        return "a reason" if products.BUILDS[0] in builds else None

    monkeypatch.setenv("DSV41_FLASHMLA_KERNEL", "hopper")
    monkeypatch.setattr("dsv41.backends.cuda.flashmla.why_not", why_not)
    backend = Multiplies()
    backend.device = torch.device("cuda")
    with pytest.raises(ValueError, match="does not run here \\(a reason\\)"):
        FlashMLABackend.read_choice(backend)
    assert asked == [
        "few_heads",
        "many_heads",
        "index_scores",
        "index_choice",
        "products",
        "products_pack",
        "products_wide",
    ]
