"""Decode layers timed whole, and index choices: everything that steps launch for them, several steps in one graph.

A graph costs some microseconds whatever is in it, which its steps share. Each of them has weights and caches of its
own, so that none finds in a cache of the GPU what another read.

`bench_layers` times a layer that owns compressed rows and selection, one that reads both, and the two in a row;
`bench_choices` what an indexer does over long contexts. Requests have random pages of caches that hold noise, and
weights are synthetic, with the statistics of real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dsv41.attention import DeepseekV41Attention
from dsv41.bench import Progress, Timer, device_rates, fill_with_noise, require_gpu
from dsv41.cache import WINDOW, allocate_caches, cache_specs
from dsv41.checkpoint import Checkpoint, load_checkpoint
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
_COPIES_BYTES = 8 << 30
"""Of weights and caches of all steps of a graph, unless those of one are more."""


@dataclass(frozen=True)
class StepOptions:
    """What to time; the names are those of the command line. Each request takes one token and then holds `context`.

    `steps` are in one graph, or fewer where their weights and caches would take more than 8 GiB.
    """

    backend: str | None = None
    device: str | None = None
    kv_cache_dtype: str = "auto"
    index_cache_dtype: str = "auto"
    tokens: tuple[int, ...] = (1, 16, 64, 256)
    context: tuple[int, ...] = (8192,)
    steps: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"steps is {self.steps}: expected at least 1, in one graph; leave it out")
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
    """One size of one thing, each figure of one step. `launches` are the longest first, where a profiler saw them."""

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
    """`workspace_bytes` is what the backend holds for the largest of these steps. `steps` are in each graph, with
    `step_bytes` of weights and caches each."""

    backend: str
    device: str
    kv_cache_dtype: str
    index_cache_dtype: str
    rates: DeviceRates
    workspace_bytes: int = 0
    steps: int = 1
    step_bytes: int = 0
    rows: list[Timed] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"rows": [row.to_dict() for row in self.rows]}


class _Layers:
    """Two layers of synthetic weights over caches of noise, for steps of up to the largest size of `options`; `copies`
    of them, alike but in memory of their own, `copy_bytes` each."""

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
        self._requests, self._held, self._window = max(options.tokens), max(options.context), config.sliding_window
        self._caches = cache_specs(config, backend, layers)
        self._sizes = {spec.pool: spec.layout.page_size for spec in self._caches}
        counts = {pool: self._requests * self._columns(pool, self._held) for pool in self._sizes}
        order = torch.Generator().manual_seed(options.seed)
        self._pages = {pool: torch.randperm(count, generator=order).int() for pool, count in counts.items()}
        self.copies = [self._stack(checkpoint)]
        self.copy_bytes = _bytes([checkpoint.weights, self.copies[0].caches])
        while len(self.copies) < min(options.steps, _COPIES_BYTES // self.copy_bytes):
            self.copies.append(self._stack(replace(checkpoint, weights=deepcopy(checkpoint.weights))))
        self.workspace_bytes = backend.reserve(self._requests, self._requests, self._held)

    def _stack(self, checkpoint: Checkpoint) -> AttentionStack:
        """The layers of these weights, over new caches."""
        stack = AttentionStack(checkpoint, self.backend, max_len=self._held)
        pages = {pool: len(order) for pool, order in self._pages.items()}
        caches = allocate_caches(
            self._caches, pages, state_slots=self._requests, ring=_RING, device=self.backend.device
        )
        for owned in caches.values():
            for cache in (owned.window, owned.compressed, owned.index):
                if cache is not None:
                    fill_with_noise(cache, self._random)
        stack.bind(caches)
        return stack

    def __getitem__(self, layer_id: int) -> list[DeepseekV41Attention]:
        """A layer of each copy."""
        return [layer for stack in self.copies for layer in stack.layers if layer.spec.layer_id == layer_id]

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
        stack = self.copies[0]
        noise = torch.randn(tokens, stack.config.hidden_size, generator=self._random, device=self.backend.device)
        hidden = noise.to(stack.dtype)
        stack.check(hidden, batch)
        return hidden, self.backend.plan(batch, stack.specs)

    def _columns(self, pool: int, held: int) -> int:
        """Pages of a pool that a request has."""
        rows = held // max(pool, 1)
        pages = -(-rows // self._sizes[pool])
        return pages if pool else min(pages, (self._window - 2) // self._sizes[pool] + 2)


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
    pairs = list(zip(layers[first], layers[second], strict=True))

    def runs(hidden: Tensor, plan: StepPlan) -> Iterator[tuple[str, list[Call], Work]]:
        published = [source.run(hidden, plan)[1] for source, _ in pairs]
        works = [
            layer_work(layer.spec, layer.state.weights, layers.backend.layouts, hidden.shape[0], plan)
            for layer in pairs[0]
        ]

        def both(source: DeepseekV41Attention, consumer: DeepseekV41Attention) -> None:
            _, chosen = source.run(hidden, plan)
            consumer.run(hidden, plan, chosen)

        yield "source", [partial(source.run, hidden, plan) for source, _ in pairs], works[0]
        consumers = zip(layers[second], published, strict=True)
        yield "consumer", [partial(consumer.run, hidden, plan, chosen) for consumer, chosen in consumers], works[1]
        yield "both", [partial(both, *pair) for pair in pairs], works[0] + works[1]

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
    backend = layers.backend
    sources, later = ([layer.state for layer in layers[number]] for number in (first, second))

    def runs(hidden: Tensor, plan: StepPlan) -> Iterator[tuple[str, list[Call], Work]]:
        inputs = [backend.prepare_inputs(hidden, source, plan) for source in sources]
        published = [backend.select(*step, plan, None) for step in zip(inputs, sources, strict=True)]
        for what, states, before in (("all rows", sources, [None] * len(sources)), ("candidates", later, published)):
            work = choice_work(states[0].spec, states[0].weights, backend.layouts, hidden.shape[0], plan)
            steps = zip(inputs, states, before, strict=True)
            yield what, [partial(backend.select, given, state, plan, chosen) for given, state, chosen in steps], work

    return _timed(options, layers, runs, progress, timer)


def _timed(
    options: StepOptions,
    layers: _Layers,
    runs: Callable[[Tensor, StepPlan], Iterator[tuple[str, list[Call], Work]]],
    progress: Progress,
    timer: Timer | None,
) -> StepReport:
    backend = layers.backend
    device, rates = device_rates(backend)
    report = StepReport(
        backend.name,
        device,
        backend.kv_cache_dtype,
        backend.index_cache_dtype,
        rates,
        layers.workspace_bytes,
        len(layers.copies),
        layers.copy_bytes,
    )
    sizes = [(context, tokens) for context in options.context for tokens in options.tokens]
    for number, (context, tokens) in enumerate(sizes):
        progress("timing", number, len(sizes))
        for what, steps, work in runs(*layers.step(tokens, context)):
            least = floor(work, rates)
            seconds = (timer or graph_seconds)(steps)
            launches = [] if timer else [Launches(*launch) for launch in graph_launches(steps[0])]
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
    found = (tensor for _, tensor in tensors(weights))
    matrices = sum(tensor.numel() for tensor in found if tensor.ndim == 2 and tensor.dtype != torch.uint8)
    return Work(float(_bytes(weights)), 2.0 * tokens * matrices)


def _bytes(tree: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for _, tensor in tensors(tree))


def _longest(plan: StepPlan) -> int:
    return int(plan.batch.seq_lens_cpu.max())


def _only_reads(config: DeepseekV41Config, layer: int) -> bool:
    """Whether a layer attends to compressed rows and selects none."""
    return config.compress_ratios[layer] > 0 and layer not in config.index_source_layer_ids
