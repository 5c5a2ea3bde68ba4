"""Attention alone, timed: a backend and, where asked for, a library called directly, on the same bytes.

Every token reads a window and a selection of rows at random places of caches that no cache level holds. Rows are taken
from one random permutation, so that no row repeats until all have been read, and one graph holds several calls that
read different rows. Prefill is timed a second time over what the chunk of one request reads, whose tokens share their
rows. Queries are random, and so is what the caches hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dsv41.bench_rows import Rows, chunk_rows, random_rows
from dsv41.config import DeepseekV41Config
from dsv41.errors import BackendError, InputError
from dsv41.hal import registry
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.layout import PagedCache
from dsv41.hal.select import select_backend
from dsv41.hal.types import (
    AttnInputs,
    AttnOutput,
    ForwardBatch,
    LayerCaches,
    LayerSpec,
    LayerState,
    LayerWeights,
    Selection,
    StepPlan,
)
from dsv41.hal.weights import prepare
from dsv41.roofline import DeviceRates, attention_work, floor, rates_of
from dsv41.timing import Call, graph_seconds, peak_bytes
from dsv41.topology import layer_specs

TOLERANCE = 2e-2
"""The largest relative error between two sides that are both called right."""
WINDOW_PAGES, COMPRESSED_PAGES = 7168, 28672
"""Of 64 rows: about 0.25 and 1 GB of the 584-byte record."""
_CALLS = 24
_CHECKED = 4
"""Tokens of a case that are compared with the reference."""
_LAYER = 20
DECODE, PREFILL, CHUNK = "decode", "prefill", "chunk"
"""Phases: over random rows the first two, over those of one request's chunk the third."""

Progress = Callable[[str, int, int], None]
Timer = Callable[[Sequence[Call]], float]


@dataclass(frozen=True)
class BenchOptions:
    """What to time; the names are those of the command line."""

    backend: str | None = None
    vs: str | None = None
    device: str | None = None
    record: str = "fp8_ds_mla_v4"
    heads: tuple[int, ...] = (8, 16, 64)
    tokens: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256, 512)
    prefill: tuple[int, ...] = (512, 4096)
    fused: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values in (("heads", self.heads), ("tokens", self.tokens), ("prefill", self.prefill)):
            for value in values:
                if value < 1:
                    raise InputError(f"{name} has {value}: expected at least 1; leave it out")
        if not self.heads or not (self.tokens or self.prefill):
            raise InputError(
                f"heads are {self.heads}, tokens {self.tokens}, prefill {self.prefill}: expected at least one head "
                "count and one size, or there is nothing to time; name some"
            )


@dataclass
class Case:
    """One size, timed. Seconds are of one call; `peer` is None where no library was called.

    `error` is against the reference, `peer_error` between the two sides, both relative to the norm. The peer's
    `seconds` do not hold what it plans once a step and every layer uses; `planned` is with that. In prefill and over a
    chunk, `peer_gathered` is the peer's path over rows that it gathers first, all of it in `seconds`, and the attention
    alone in `kernel_seconds`. `extra_bytes` are those that one call holds at most beyond its inputs and its output, the
    scratch that a backend keeps for it included; None on a device that is no GPU.
    """

    phase: str
    tokens: int
    heads: int
    seconds: float
    bytes: float
    flops: float
    floor_seconds: float
    bound: str
    error: float
    peer: str | None = None
    peer_seconds: float | None = None
    peer_planned_seconds: float | None = None
    peer_error: float | None = None
    peer_gathered_seconds: float | None = None
    peer_gathered_kernel_seconds: float | None = None
    peer_gathered_error: float | None = None
    extra_bytes: int | None = None
    peer_gathered_extra_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """All fields, and what follows from them; an error that is not finite is None, as JSON has no such number."""
        errors = {name: getattr(self, name) for name in ("error", "peer_error", "peer_gathered_error")}
        return asdict(self) | {
            **{name: error if error is not None and math.isfinite(error) else None for name, error in errors.items()},
            "microseconds": self.seconds * 1e6,
            "tflops_per_second": self.flops / self.seconds / 1e12,
            "gigabytes_per_second": self.bytes / self.seconds / 1e9,
            "over_floor": self.seconds / self.floor_seconds,
            "over_peer": None if self.peer_seconds is None else self.seconds / self.peer_seconds,
            "over_gathered": None if self.peer_gathered_seconds is None else self.seconds / self.peer_gathered_seconds,
        }


@dataclass
class BenchReport:
    """`failures` names the cases in which the two sides, or a side and the reference, disagree."""

    backend: str
    device: str
    record: str
    rates: DeviceRates
    fused: bool
    peer: str | None
    cases: list[Case] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"cases": [case.to_dict() for case in self.cases]}


class Peer(Protocol):
    """A library called directly. `label` names it with its version."""

    label: str

    def call(self, work: Work, rows: Rows) -> Callable[[], Tensor]:
        """What computes the attention of `work` over `rows`, as `[T, heads, D]`. Plans in its first call."""

    def gathered(self, work: Work, rows: Rows, *, before: bool = False) -> Callable[[], Tensor] | None:
        """The same over rows that the call makes bf16 first, or that were made so `before`, outside of the call; None
        where it has no such path. The call allocates what it gathers into."""


@dataclass(frozen=True)
class Work:
    """One size: a layer bound to its caches, queries `[T, H, D]`, and the rows of each call.

    `distinct` is how many rows of the window and of the compressed cache all tokens of a call read together, where they
    share them; None where none do.
    """

    layer: LayerState
    q: Tensor
    rows: tuple[Rows, ...]
    distinct: tuple[int, int] | None = None

    @property
    def caches(self) -> LayerCaches:
        assert self.layer.caches is not None
        return self.layer.caches


@torch.no_grad()
def bench_attention(
    options: BenchOptions,
    progress: Progress = lambda *_: None,
    *,
    timer: Timer | None = None,
    peer: Peer | None = None,
    pages: tuple[int, int] = (WINDOW_PAGES, COMPRESSED_PAGES),
) -> BenchReport:
    """Time every case of `options`. `timer`, `peer` and `pages` are for tests.

    Raises BackendError without a GPU, for a backend or library that cannot run here, or one that cannot read `record`.
    """
    require_gpu("bench attention", timer)
    backend = _without_rotation(
        select_backend(options.backend, device=options.device, kv_cache_dtype=options.record), options
    )
    peer = peer or _peer(options, backend)
    device_name, rates = device_rates(backend)
    report = BenchReport(
        backend=backend.name,
        device=device_name,
        record=backend.layouts.compressed.record.name,
        rates=rates,
        fused=options.fused,
        peer=peer.label if peer else None,
    )
    for heads in options.heads:
        backend.get_padded_num_q_heads(heads)  # refuses what it cannot run before anything is timed
    caches = random_caches(backend, pages, options.seed)
    sizes = [(DECODE, tokens) for tokens in options.tokens]
    sizes += [(phase, tokens) for phase in (PREFILL, CHUNK) for tokens in options.prefill]
    cases = [(phase, tokens, heads) for heads in options.heads for phase, tokens in sizes]
    for number, (phase, tokens, heads) in enumerate(cases):
        progress("timing", number, len(cases))
        work = make_work(backend, caches, tokens, heads, options.seed, chunk=phase == CHUNK)
        case = _time(backend, peer, work, phase, report.rates, timer or graph_seconds)
        report.cases.append(case)
        report.failures += _disagreements(case)
    progress("timing", len(cases), len(cases))
    return report


def require_gpu(what: str, timer: Timer | None) -> None:
    """Raise BackendError where `what` would time a GPU and there is none. A test's `timer` needs none."""
    if timer is None and not torch.cuda.is_available():
        raise BackendError(f"{what} times GPUs, and torch sees none here: expected one; run it on such a machine")


def device_rates(backend: AttentionBackend) -> tuple[str, DeviceRates]:
    """The name of a backend's device and what it can do, measured where it is not listed."""
    name = backend.facts.name if backend.facts is not None else str(backend.device)
    return name, rates_of(name) or measured_rates(name, backend.device)


def measured_rates(name: str, device: torch.device) -> DeviceRates:
    """Of a GPU that is not listed: by a copy of 1 GiB, which moves it twice, and a product of 8192 x 8192 matrices."""
    source, size = torch.zeros(1 << 30, dtype=torch.uint8, device=device), 8192
    target, matrix = torch.empty_like(source), torch.zeros(size, size, dtype=torch.bfloat16, device=device)
    copy, product = (graph_seconds([call]) for call in (lambda: target.copy_(source), lambda: matrix @ matrix))
    return DeviceRates(name, 2 * len(source) / copy, 2 * size**3 / product, measured=True)


def random_caches(backend: AttentionBackend, pages: tuple[int, int], seed: int) -> LayerCaches:
    """Caches of the backend's layouts, full of normal noise."""
    generator = torch.Generator(backend.device).manual_seed(seed)
    filled = []
    for layout, count in zip((backend.layouts.window, backend.layouts.compressed), pages, strict=True):
        cache = PagedCache.allocate(layout, count, backend.device)
        fill_with_noise(cache, generator)
        filled.append(cache)
    window, compressed = filled
    return LayerCaches(window, compressed)


def fill_with_noise(cache: PagedCache, generator: torch.Generator) -> None:
    """Write normal noise into every row."""
    for slots in torch.arange(cache.num_slots, device=cache.data.device).split(1 << 16):
        cache.write(slots, torch.randn(len(slots), cache.layout.record.dim, generator=generator, device=slots.device))


def make_work(
    backend: AttentionBackend, caches: LayerCaches, tokens: int, heads: int, seed: int, *, chunk: bool = False
) -> Work:
    """One size with as many calls as the larger cache has rows for, at most 24, without reading one twice; or, of a
    `chunk`, with as many requests as the caches have pages for."""
    [released] = layer_specs(DeepseekV41Config(), layers=[_LAYER])
    spec = replace(released, num_heads=heads, padded_heads=backend.get_padded_num_q_heads(heads))
    generator = torch.Generator(backend.device).manual_seed(seed)
    assert caches.compressed is not None
    distinct = None
    if chunk:
        rows = chunk_rows(caches.window, caches.compressed, _CALLS, tokens, spec.window, spec.topk, generator)
        distinct = tokens + spec.window - 1, max(tokens, spec.topk)
    else:
        calls = min(_CALLS, max(1, caches.compressed.num_slots // (tokens * spec.topk)))
        window, compressed = (
            random_rows(cache.num_slots, calls, tokens, width, generator)
            for cache, width in ((caches.window, spec.window), (caches.compressed, spec.topk))
        )
        rows = tuple(Rows(*pair) for pair in zip(window, compressed, strict=True))
    q = torch.randn(tokens, spec.padded_heads, spec.head_dim, generator=generator, device=backend.device)
    sink = torch.randn(heads, generator=generator, device=backend.device)
    layer = LayerState(spec, _nothing_but(sink), _no_rotation(spec, tokens, backend.device), caches=caches)
    prepare(backend, layer)
    return Work(layer, q.to(torch.bfloat16), rows, distinct)


def our_call(backend: AttentionBackend, work: Work, rows: Rows, out: AttnOutput) -> Call:
    """What computes the attention of `work` over `rows` into `out` by the backend's own entry point."""
    tokens, device, spec = work.q.shape[0], work.q.device, work.layer.spec
    # Positions only turn the query, and here by nothing; which rows are read was chosen already: as many as there are.
    batch = ForwardBatch.from_host(
        query_lens=[1] * tokens,
        seq_lens=[_held(spec)] * tokens,
        window_pages=torch.zeros(tokens, 1, dtype=torch.int32),
        window_page_size=work.caches.window.layout.page_size,
        device=device,
    )
    request = torch.arange(tokens, device=device)
    slots = StepPlan(batch, request, rows.window[:, 0].contiguous(), rows.window, {}, {}, {})
    plan = backend.complete_plan(slots, [spec])
    empty = work.q.new_empty(tokens, 0)
    inputs = AttnInputs(hidden=empty, qr=empty, q=work.q, kv=empty, positions=batch.positions)
    selection = Selection(rows.compressed, derived=backend.complete_selection(rows.compressed))
    return lambda: backend.forward_mqa(inputs, work.layer, selection, plan, out)


def _time(
    backend: AttentionBackend, peer: Peer | None, work: Work, phase: str, rates: DeviceRates, timer: Timer
) -> Case:
    spec, (tokens, *_) = work.layer.spec, work.q.shape
    out = _room(backend, work)
    calls = [our_call(backend, work, rows, out) for rows in work.rows]
    out.data.fill_(math.nan)
    calls[-1]()
    ours = out.data[:, : spec.num_heads].clone()
    error, theirs, peer_error = relative_error(ours[-_CHECKED:], _by_the_reference(backend, work)), [], None
    if peer is not None:
        theirs = [peer.call(work, rows) for rows in work.rows]
        peer_error = relative_error(ours, theirs[-1]())

    records = [(spec.window, work.caches.window), (spec.topk, work.caches.compressed)]
    needed = attention_work(
        tokens,
        spec.num_heads,
        tuple((count, cache.layout.record.bytes) for count, cache in records if cache is not None),
        head_dim=spec.head_dim,
        distinct=work.distinct,
    )
    least = floor(needed, rates)
    case = Case(
        phase=phase,
        tokens=tokens,
        heads=spec.num_heads,
        seconds=timer(calls),
        bytes=needed.bytes,
        flops=needed.flops,
        floor_seconds=least.seconds,
        bound=least.bound,
        error=error,
        extra_bytes=_extra_bytes(backend, work, calls[-1], out),
    )
    if peer is not None:
        case.peer, case.peer_error = peer.label, peer_error
        case.peer_seconds = timer(theirs)
        case.peer_planned_seconds = _planned(peer, work, timer)
        if phase != DECODE:
            _time_gathered(case, peer, work, ours, timer)
    return case


def _time_gathered(case: Case, peer: Peer, work: Work, ours: Tensor, timer: Timer) -> None:
    """What the peer's gathered path adds to a case, where it has one."""
    whole = [call for rows in work.rows if (call := peer.gathered(work, rows)) is not None]
    if not whole:
        return
    case.peer_gathered_error = relative_error(ours, whole[-1]())
    held = peak_bytes(whole[-1], work.q.device)
    case.peer_gathered_extra_bytes = None if held is None else held - ours.nbytes  # without its result
    case.peer_gathered_seconds = timer(whole)
    # One call, since the rows of each fill memory.
    if (kernel := peer.gathered(work, work.rows[-1], before=True)) is not None:
        case.peer_gathered_kernel_seconds = timer([kernel])


def _extra_bytes(backend: AttentionBackend, work: Work, call: Call, out: AttnOutput) -> int | None:
    """What one call allocates, beyond an output that it brings, and the scratch that its backend keeps for it."""
    given = out.data
    held = peak_bytes(call, work.q.device)
    if held is None:
        return None
    scratch = backend.attention_bytes(work.layer.spec, len(work.q)) if hasattr(backend, "attention_bytes") else 0
    return held + scratch - (0 if out.data is given else out.data.nbytes)


def _planned(peer: Peer, work: Work, timer: Timer) -> float:
    """The peer with its planning in the graph, as in the first layer of a step."""
    fresh = [peer.call(work, rows) for rows in work.rows]
    return graph_seconds(fresh, warm=False) if timer is graph_seconds else timer(fresh)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Of the difference's norm to that of what is expected; NaN counts as infinitely wrong."""
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    return error if math.isfinite(error) else math.inf


def _disagreements(case: Case) -> list[str]:
    where = f"{case.phase} of {case.tokens} tokens with {case.heads} heads"
    pairs = (
        (case.error, "the reference"),
        (case.peer_error, case.peer),
        (case.peer_gathered_error, f"{case.peer}, rows gathered"),
    )
    return [
        f"{where}: relative error {error:.2e} against {other}, expected at most {TOLERANCE:g}"
        for error, other in pairs
        if error is not None and error > TOLERANCE
    ]


def _by_the_reference(backend: AttentionBackend, work: Work) -> Tensor:
    """The attention of the last tokens over the last call's rows: `[_CHECKED, heads, D]`."""
    oracle = registry.load(next(spec for spec in registry.all_specs() if spec.name == registry.FALLBACK))(
        device=backend.device, kv_cache_dtype=backend.kv_cache_dtype
    )
    rows = Rows(*(slots[-_CHECKED:] for slots in (work.rows[-1].window, work.rows[-1].compressed)))
    part = replace(work, q=work.q[-_CHECKED:], rows=(rows,))
    out = AttnOutput(torch.empty_like(part.q))
    our_call(oracle, part, rows, out)()
    return out.data[:, : work.layer.spec.num_heads]


def _room(backend: AttentionBackend, work: Work) -> AttnOutput:
    empty = work.q.new_empty(work.q.shape[0], 0)
    return backend.alloc_attn_out(AttnInputs(empty, empty, work.q, empty, empty), work.layer)


def _without_rotation(backend: AttentionBackend, options: BenchOptions) -> AttentionBackend:
    """The same backend, doing in its attention what the peer does and no more, unless all of it is asked for."""
    if options.fused or not getattr(backend, "fuses_rotation", False):
        return backend
    plain = type(type(backend).__name__, (type(backend),), {"fuses_rotation": False})
    made: AttentionBackend = plain(
        device=backend.device,
        kv_cache_dtype=backend.kv_cache_dtype,
        index_cache_dtype=backend.index_cache_dtype,
        facts=backend.facts,
    )
    return made


def _no_rotation(spec: LayerSpec, tokens: int, device: torch.device) -> Tensor:
    """Cosines of 1 and sines of 0, so that a backend that rotates gives what one gives that does not."""
    positions, half = max(tokens, _held(spec)), spec.rope_dim // 2
    return torch.cat((torch.ones(positions, half), torch.zeros(positions, half)), dim=1).to(device)


def _held(spec: LayerSpec) -> int:
    """Tokens of a request whose last one sees a whole window and a whole selection."""
    return max(spec.window, spec.topk * spec.ratio)


def _nothing_but(sink: Tensor) -> LayerWeights:
    """Weights of a layer of which only the attention runs."""
    none = torch.zeros(1, 1, dtype=torch.bfloat16, device=sink.device)
    return LayerWeights(none, none, none, none, none, none[0], none[0], attn_sink=sink)


def _peer(options: BenchOptions, backend: AttentionBackend) -> Peer | None:
    if options.vs is None:
        return None
    from dsv41.bench_flashmla import FlashMLA

    if options.vs != "flashmla":
        raise InputError(f"vs is {options.vs!r}: expected 'flashmla'; name it or leave it out")
    return FlashMLA(backend)
