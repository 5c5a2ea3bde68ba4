"""Decode layers timed whole, and index choices: everything that a step launches for them, in one graph.

`bench_layers` times a layer that owns compressed rows and selection, one that reads both, and the two in a row;
`bench_choices` what an indexer does over long contexts. Requests have random pages of caches that hold noise, and
weights are synthetic, with the statistics of real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dsv41.attention import DeepseekV41Attention
from dsv41.bench import Progress, Timer, device_rates, fill_with_noise, require_gpu
from dsv41.cache import WINDOW, allocate_caches, cache_specs
from dsv41.checkpoint import load_checkpoint
from dsv41.config import DeepseekV41Config
from dsv41.errors import InputError
from dsv41.hal.layout import CacheLayouts
from dsv41.hal.select import select_backend
from dsv41.hal.types import ForwardBatch, LayerSpec, LayerWeights, StepPlan
from dsv41.hal.weights import tensors
from dsv41.roofline import DeviceRates, Work, attention_work, floor
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.timing import Call, graph_launches, graph_seconds

_RING = 4
"""Raw rows that a compressor keeps of a request; one of a group of two is needed here."""


@dataclass(frozen=True)
class StepOptions:
    """What to time; the names are those of the command line. Each request takes one token and then holds `context`."""

    backend: str | None = None
    device: str | None = None
    kv_cache_dtype: str = "auto"
    index_cache_dtype: str = "auto"
    tokens: tuple[int, ...] = (1, 16, 64, 256)
    context: tuple[int, ...] = (8192,)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values in (("tokens", self.tokens), ("context", self.context)):
            if not values:
                raise InputError(f"{name} is empty: expected at least one size, or there is nothing to time; name some")
            for value in values:
                if value < 1:
                    raise InputError(f"{name} has {value}: expected at least 1; leave it out")


@dataclass(frozen=True)
class Launches:
    """All launches of one kernel in a step."""

    kernel: str
    count: int
    seconds: float


@dataclass
class Timed:
    """One size of one thing. `launches` are those of a single run, the longest first, where a profiler saw them."""

    what: str
    tokens: int
    context: int
    seconds: float
    bytes: float
    flops: float
    floor_seconds: float
    bound: str
    launches: list[Launches] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "microseconds": self.seconds * 1e6,
            "over_floor": self.seconds / self.floor_seconds,
            "num_launches": sum(each.count for each in self.launches),
        }


@dataclass
class StepReport:
    """`workspace_bytes` is what the backend holds for the largest of these steps."""

    backend: str
    device: str
    kv_cache_dtype: str
    index_cache_dtype: str
    rates: DeviceRates
    workspace_bytes: int = 0
    rows: list[Timed] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"rows": [row.to_dict() for row in self.rows]}


class _Layers:
    """Two layers of synthetic weights over caches of noise, for steps of up to the largest size of `options`."""

    def __init__(self, options: StepOptions, config: DeepseekV41Config, layers: tuple[int, int]) -> None:
        backend = select_backend(
            options.backend,
            device=options.device,
            kv_cache_dtype=options.kv_cache_dtype,
            index_cache_dtype=options.index_cache_dtype,
        )
        self.backend = backend
        self._random = torch.Generator(backend.device).manual_seed(options.seed)
        with TemporaryDirectory() as folder:
            make_checkpoint(folder, layers=layers, seed=options.seed, config=config)
            checkpoint = load_checkpoint(folder, layers=layers, device=backend.device)
        requests, held = max(options.tokens), max(options.context)
        self.stack = AttentionStack(checkpoint, backend, max_len=held)
        specs = cache_specs(config, backend, layers)
        self._sizes = {spec.pool: spec.layout.page_size for spec in specs}
        pages = {pool: requests * self._columns(pool, held) for pool in self._sizes}
        order = torch.Generator().manual_seed(options.seed)
        self._pages = {pool: torch.randperm(count, generator=order).int() for pool, count in pages.items()}
        caches = allocate_caches(specs, pages, state_slots=requests, ring=_RING, device=backend.device)
        for owned in caches.values():
            for cache in (owned.window, owned.compressed, owned.index):
                if cache is not None:
                    fill_with_noise(cache, self._random)
        self.stack.bind(caches)
        self.workspace_bytes = backend.reserve(requests, requests, held)

    def __getitem__(self, layer_id: int) -> DeepseekV41Attention:
        return next(layer for layer in self.stack.layers if layer.spec.layer_id == layer_id)

    def step(self, tokens: int, held: int) -> tuple[Tensor, StepPlan]:
        """Hidden states and plan of `tokens` requests with a new token each, after which they hold `held`."""
        tables = {}
        for pool in self._sizes:
            columns = self._columns(pool, held)
            table = self._pages[pool][: tokens * columns].view(tokens, columns)
            if pool == WINDOW:  # of the pages before the window there are none any more
                full = -(-held // self._sizes[pool])
                table = torch.cat((torch.full((tokens, full - columns), -1, dtype=torch.int32), table), dim=1)
            tables[pool] = table
        batch = ForwardBatch.from_host(
            query_lens=[1] * tokens,
            seq_lens=[held] * tokens,
            window_pages=tables.pop(WINDOW),
            window_page_size=self._sizes[WINDOW],
            compressed_pages=tables,
            compressed_page_size=self._sizes,
            device=self.backend.device,
        )
        hidden = self.noise(tokens, self.stack.config.hidden_size)
        self.stack.check(hidden, batch)
        return hidden, self.backend.plan(batch, self.stack.specs)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random, device=self.backend.device).to(self.stack.dtype)

    def _columns(self, pool: int, held: int) -> int:
        """Pages of a pool that a request has."""
        rows = held // max(pool, 1)
        pages = -(-rows // self._sizes[pool])
        return pages if pool else min(pages, (self.stack.config.sliding_window - 2) // self._sizes[pool] + 2)


@torch.no_grad()
def bench_layers(
    options: StepOptions,
    progress: Progress = lambda *_: None,
    *,
    config: DeepseekV41Config | None = None,
    timer: Timer | None = None,
) -> StepReport:
    """Time the first layer that owns compressed rows, the next that reads them, and both. `config` (None = the
    release's) and `timer` are for tests.

    Raises BackendError without a GPU, or for a backend that cannot run here.
    """
    require_gpu("bench layer", timer)
    config = config or DeepseekV41Config()
    first = config.kv_source_layer_ids[0]
    second = next(layer for layer in range(first, len(config.compress_ratios)) if _only_reads(config, layer))
    layers = _Layers(options, config, (first, second))
    source, consumer = layers[first], layers[second]

    def runs(hidden: Tensor, plan: StepPlan) -> Iterator[tuple[str, Call, Work]]:
        _, published = source.run(hidden, plan)
        works = [
            layer_work(layer.spec, layer.state.weights, layers.backend.layouts, hidden.shape[0], plan)
            for layer in (source, consumer)
        ]

        def both() -> None:
            _, chosen = source.run(hidden, plan)
            consumer.run(hidden, plan, chosen)

        yield "source", partial(source.run, hidden, plan), works[0]
        yield "consumer", partial(consumer.run, hidden, plan, published), works[1]
        yield "both", both, works[0] + works[1]

    return _timed(options, layers, runs, progress, timer)


@torch.no_grad()
def bench_choices(
    options: StepOptions,
    progress: Progress = lambda *_: None,
    *,
    config: DeepseekV41Config | None = None,
    timer: Timer | None = None,
) -> StepReport:
    """Time the choice of the candidate source, among all visible rows, and of the next indexer, among the candidates:
    index keys written, queries projected, scores, top-k. Arguments and errors are those of `bench_layers`."""
    require_gpu("bench index", timer)
    config = config or DeepseekV41Config()
    first = config.candidate_source_layer_id
    second = next(layer for layer in config.index_source_layer_ids if layer > first)
    layers = _Layers(options, config, (first, second))
    backend, source, later = layers.backend, layers[first].state, layers[second].state

    def runs(hidden: Tensor, plan: StepPlan) -> Iterator[tuple[str, Call, Work]]:
        inputs = backend.prepare_inputs(hidden, source, plan)
        published = backend.select(inputs, source, plan, None)
        for what, layer, before in (("all rows", source, None), ("candidates", later, published)):
            work = choice_work(layer.spec, layer.weights, backend.layouts, hidden.shape[0], plan)
            yield what, partial(backend.select, inputs, layer, plan, before), work

    return _timed(options, layers, runs, progress, timer)


def _timed(
    options: StepOptions,
    layers: _Layers,
    runs: Callable[[Tensor, StepPlan], Iterator[tuple[str, Call, Work]]],
    progress: Progress,
    timer: Timer | None,
) -> StepReport:
    backend = layers.backend
    device, rates = device_rates(backend)
    report = StepReport(
        backend.name, device, backend.kv_cache_dtype, backend.index_cache_dtype, rates, layers.workspace_bytes
    )
    sizes = [(context, tokens) for context in options.context for tokens in options.tokens]
    for number, (context, tokens) in enumerate(sizes):
        progress("timing", number, len(sizes))
        for what, run, work in runs(*layers.step(tokens, context)):
            least = floor(work, rates)
            seconds = (timer or graph_seconds)([run])
            launches = [] if timer else [Launches(*launch) for launch in graph_launches(run)]
            report.rows.append(
                Timed(what, tokens, context, seconds, work.bytes, work.flops, least.seconds, least.bound, launches)
            )
    progress("timing", len(sizes), len(sizes))
    return report


def layer_work(spec: LayerSpec, weights: LayerWeights, layouts: CacheLayouts, tokens: int, plan: StepPlan) -> Work:
    """A decode step of a layer, of one token a request. Weights are read once; of the caches, once a token, the rows of
    the window and of the selection and, where the layer chooses, all visible index keys; hidden states are read and
    written."""
    rows = [(min(_longest(plan), spec.window), layouts.window.row_bytes)]
    if spec.ratio:
        rows.append((min(plan.max_visible[spec.ratio], spec.topk), layouts.compressed.row_bytes))
    attention = attention_work(tokens, spec.num_heads, tuple(rows), head_dim=spec.head_dim, activation_bytes=0)
    work = _products(weights, tokens) + attention
    work += Work(bytes=float(tokens * 2 * spec.hidden_size * torch.bfloat16.itemsize), flops=0.0)
    return work + _scoring(spec, layouts, tokens, plan) if spec.owns_selection else work


def choice_work(spec: LayerSpec, weights: LayerWeights, layouts: CacheLayouts, tokens: int, plan: StepPlan) -> Work:
    """What an indexer reads and computes: its weights once, and every visible or candidate key once a token."""
    return _products(weights.indexer, tokens) + _scoring(spec, layouts, tokens, plan)


def _scoring(spec: LayerSpec, layouts: CacheLayouts, tokens: int, plan: StepPlan) -> Work:
    keys = plan.max_visible[spec.ratio]
    if spec.reads_candidates and not spec.publishes_candidates:
        keys = min(keys, spec.candidate_blocks * spec.candidate_block_size)
    return Work(
        bytes=float(tokens * keys * layouts.index.row_bytes),
        flops=float(tokens * keys * 2 * spec.index_heads * spec.index_dim),
    )


def _products(weights: Any, tokens: int) -> Work:
    """Every weight read once, every matrix multiplied by each token. Scales are bytes, and no matrices."""
    found = [tensor for _, tensor in tensors(weights)]
    matrices = sum(tensor.numel() for tensor in found if tensor.ndim == 2 and tensor.dtype != torch.uint8)
    return Work(float(sum(tensor.numel() * tensor.itemsize for tensor in found)), 2.0 * tokens * matrices)


def _longest(plan: StepPlan) -> int:
    return int(plan.batch.seq_lens_cpu.max())


def _only_reads(config: DeepseekV41Config, layer: int) -> bool:
    """Whether a layer attends to compressed rows and selects none."""
    return config.compress_ratios[layer] > 0 and layer not in config.index_source_layer_ids
