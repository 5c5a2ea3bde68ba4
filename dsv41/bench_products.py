"""Single products of a layer timed: activations of few tokens times each large matrix of the release, on two backends.

A layer's products alone are short, so those of several layers, whose weights are different memory, are one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dsv41.bench import Progress, Timer, device_rates, require_gpu
from dsv41.checkpoint import load_checkpoint
from dsv41.config import DeepseekV41Config
from dsv41.errors import BackendError, InputError
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.select import select_backend
from dsv41.hal.types import LayerSpec, LayerState
from dsv41.roofline import DeviceRates, Work, floor, matmul_work
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.timing import graph_seconds
from dsv41.verify import relative_error

_LAYERS = 4
"""Whose products are one graph: the first that own compressed rows."""
_WEIGHT_BYTES = 1 + 1 / 32**2
"""Of an fp8 weight with its share of a scale."""

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ProductOptions:
    """What to time; the names are those of the command line. `vs` is the backend that `backend` is compared with."""

    backend: str | None = None
    vs: str = "portable"
    device: str | None = None
    tokens: tuple[int, ...] = (1, 16, 64)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise InputError(f"tokens are {self.tokens}: expected at least one size, all at least 1; name some")


@dataclass
class TimedProduct:
    """One product: seconds on the backend and on its peer, and how far their results are apart, relatively."""

    what: str
    tokens: int
    seconds: float
    peer_seconds: float
    difference: float
    floor_seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "microseconds": self.seconds * 1e6,
            "over_floor": self.seconds / self.floor_seconds,
            "over_peer": self.seconds / self.peer_seconds,
        }


@dataclass
class ProductReport:
    backend: str
    peer: str
    device: str
    rates: DeviceRates
    rows: list[TimedProduct] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"rows": [row.to_dict() for row in self.rows]}


@torch.no_grad()
def bench_products(
    options: ProductOptions,
    progress: Progress = lambda *_: None,
    *,
    config: DeepseekV41Config | None = None,
    timer: Timer | None = None,
) -> ProductReport:
    """Time each product of a layer. `config` (None = the release's) and `timer` are for tests.

    Raises BackendError without a GPU, and for a backend that cannot run here or does not show its products.
    """
    require_gpu("bench products", timer)
    config = config or DeepseekV41Config()
    backend, peer = (select_backend(name, device=options.device) for name in (options.backend, options.vs))
    device, rates = device_rates(backend)
    report = ProductReport(backend.name, peer.name, device, rates)
    layers = config.kv_source_layer_ids[:_LAYERS]
    with TemporaryDirectory() as folder:
        make_checkpoint(folder, layers=layers, seed=options.seed, config=config)
        checkpoint = load_checkpoint(folder, layers=layers, device=backend.device)
    # Both prepare what they need of the same weights.
    stacks = [AttentionStack(checkpoint, each, max_len=1) for each in (backend, peer)]
    states = [[layer.state for layer in stack.layers] for stack in stacks]
    random = torch.Generator(backend.device).manual_seed(options.seed)
    shapes = product_shapes(states[0][0].spec)
    sizes = [(what, tokens) for what in shapes for tokens in options.tokens]
    for number, (what, tokens) in enumerate(sizes):
        progress("timing", number, len(sizes))
        groups, columns, rows = shapes[what]
        shape = (tokens, columns) if groups is None else (tokens, groups, columns)
        x = torch.randn(shape, generator=random, device=backend.device).to(checkpoint.dtype)
        calls, peer_calls = (
            [partial(_products(each, state)[what], x) for state in found]
            for each, found in zip((backend, peer), states, strict=True)
        )
        least = floor(product_work(tokens, groups or 1, columns, rows), rates)
        difference = max(relative_error(one(), other()) for one, other in zip(calls, peer_calls, strict=True))
        seconds, peer_seconds = ((timer or graph_seconds)(each) for each in (calls, peer_calls))
        report.rows.append(TimedProduct(what, tokens, seconds, peer_seconds, difference, least.seconds))
    progress("timing", len(sizes), len(sizes))
    return report


def product_shapes(spec: LayerSpec) -> dict[str, tuple[int | None, int, int]]:
    """Groups (None = the matrix is whole), columns and rows of a group, of each product."""
    heads = spec.num_heads * spec.head_dim
    return {
        "wq_a, wkv": (None, spec.hidden_size, spec.q_lora_rank + spec.head_dim),
        "wq_b": (None, spec.q_lora_rank, heads),
        "indexer's wq_b": (None, spec.q_lora_rank, spec.index_heads * spec.index_dim),
        "wo_a": (spec.o_groups, heads // spec.o_groups, spec.o_lora_rank),
        "wo_b": (None, spec.o_groups * spec.o_lora_rank, spec.hidden_size),
    }


def product_work(tokens: int, groups: int, columns: int, rows: int) -> Work:
    """Weights once, activations and results of `tokens` once."""
    one = matmul_work(tokens, rows, columns, _WEIGHT_BYTES)
    return Work(groups * one.bytes, groups * one.flops)


def _products(backend: AttentionBackend, layer: LayerState) -> dict[str, Product]:
    shown = getattr(backend, "single_products", None)
    if shown is None:
        raise BackendError(
            f"{backend.name} does not show its products one by one: expected one that does, such as portable; name it"
        )
    products: dict[str, Product] = shown(layer)
    return products
