"""One step of one layer, on the backend under check and on the reference, over caches that hold the same bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dsv41.attention import DeepseekV41Attention
from dsv41.errors import LayoutError
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.layout import CacheLayouts, PagedCache
from dsv41.hal.types import AttnInputs, ForwardBatch, LayerCaches, LayerSpec, LayerState, Selection, StepPlan
from dsv41.testing import presets
from dsv41.testing.caches import VARIANTS, copy_bytes, layer_caches
from dsv41.testing.case import Case, Requests
from dsv41.testing.clause import Inapplicable
from dsv41.testing.geometry import DTYPES, ROLES
from dsv41.testing.subject import Subject


@dataclass
class Side:
    """A backend, a layer on it, caches for the layer and the plan of the step. Scenes share layers, so a side binds its
    own caches whenever its layer is used."""

    backend: AttentionBackend
    shared_layer: DeepseekV41Attention
    caches: LayerCaches
    plan: StepPlan

    @property
    def layer(self) -> DeepseekV41Attention:
        """The layer, over the caches of this side."""
        self.shared_layer.bind(self.caches)
        return self.shared_layer

    @property
    def state(self) -> LayerState:
        return self.layer.state

    @property
    def spec(self) -> LayerSpec:
        return self.shared_layer.spec


class Scene:
    """A case made real. `mine` is the side under check, `truth` the reference's, in the same records.

    What requests hold before the step was written by the reference, or, with `drawn`, are rows of the preset in every
    slot that a token may see. Nothing of the step has run. `totals` is for steps of longer requests.
    """

    def __init__(self, subject: Subject, case: Case, *, drawn: bool = False, totals: list[int] | None = None) -> None:
        self.subject, self.case = subject, case
        self.device = subject.device
        backend = subject.backend(case.kv, case.index)
        layer = subject.layer(backend, case)
        self.layouts = _layouts(subject, backend, layer, case)
        reference = subject.reference(self.layouts)
        self.config = subject.config(case.heads)
        self.totals = totals or [held + new for held, new in case.requests]
        """Tokens that each request will hold at last, which its pages and hidden states go by."""
        self.batch = self.batch_of(case.requests, case.padding, causal=case.layer != "draft")
        truth = subject.layer(reference, case)
        slots = max(1, len(case.requests))
        caches = layer_caches(truth, self.layouts, self._pages, slots)
        self.truth = Side(reference, truth, caches, reference.plan(self.batch, [truth.spec]))
        caches = layer_caches(layer, self.layouts, self._pages, slots)
        self.mine = Side(backend, layer, caches, backend.plan(self.batch, [layer.spec]))
        self.published: Selection | None = None
        if drawn:
            self._draw_rows(self.truth.caches)
        else:
            self._run_history()
        copy_bytes(self.mine.caches, self.truth.caches)

    # The step

    def hidden(self, requests: Requests, *, first: bool = False) -> Tensor:
        """Hidden states of the tokens of a step, in which each request's tokens are the same however it is cut. With
        `first`, of those held before."""
        parts = []
        for number, (held, new) in enumerate(requests):
            rows = presets.rows(
                self.case.preset, max(self.totals[number], 1), self.config.hidden_size, self._seed(number)
            )
            parts.append(rows[:held] if first else rows[held : held + new])
        joined = torch.cat(parts) if parts else torch.zeros(0, self.config.hidden_size)
        return joined.to(self.device, DTYPES[self.case.dtype])

    @cached_property
    def step_hidden(self) -> Tensor:
        """`[T, hidden]`, padding zero."""
        hidden = self.hidden(self.case.requests)
        return torch.nn.functional.pad(hidden, (0, 0, 0, self.case.padding))

    def drawn_selection(self) -> Selection:
        """For each token up to `topk` of the compressed rows that it sees, at random, in random places."""
        spec, generator = self.truth.spec, torch.Generator().manual_seed(self._seed(77))
        chosen = torch.full((self.batch.num_tokens, spec.topk), -1, dtype=torch.int64)
        for token, visible in enumerate(self.truth.plan.num_visible[spec.ratio].tolist()):
            count = min(visible, max(1, spec.topk - token % 2))
            rows = torch.randperm(visible, generator=generator)[:count]
            chosen[token, torch.randperm(spec.topk, generator=generator)[:count]] = rows
        return Selection(chosen.to(self.device))

    def selected(self, side: Side, selection: Selection | None) -> Selection | None:
        """What a side's attention takes; None in layers that read no compressed rows."""
        if selection is None or not side.spec.ratio:
            return None
        return side.backend.prepare_selection(selection, side.state, side.plan)

    def inputs(self, side: Side) -> AttnInputs:
        """`prepare_inputs` of the step, which writes the side's caches."""
        return side.backend.prepare_inputs(self.step_hidden, side.state, side.plan)

    # How it is made

    def _seed(self, what: int) -> int:
        return self.subject.seed * 1000 + what

    @cached_property
    def _pages(self) -> dict[str, int]:
        return {
            "window": sum(-(-total // self.layouts.window.page_size) for total in self.totals) + 1,
            "compressed": sum(-(-total // self.layouts.compressed.page_size) for total in self.totals) + 1,
        }

    def batch_of(self, requests: Requests, padding: int = 0, *, causal: bool = True) -> ForwardBatch:
        """A step of other tokens of the same requests, over the same pages."""
        tables = {}
        for pool in (0, 1, 2):
            rows = [total // max(pool, 1) for total in self.totals]
            size = (self.layouts.compressed if pool else self.layouts.window).page_size
            tables[pool] = self._table(rows, size, pool)
        lens = [new for _, new in requests]
        return ForwardBatch.from_host(
            query_lens=lens,
            seq_lens=[held + new for held, new in requests],
            window_pages=tables[0],
            window_page_size=self.layouts.window.page_size,
            compressed_pages={ratio: tables[ratio] for ratio in (1, 2) if self._ratio in (0, ratio)},
            compressed_page_size=dict.fromkeys((1, 2), self.layouts.compressed.page_size),
            window_starts=[min(self.case.first_seen, held + new) for held, new in requests],
            num_tokens=sum(lens) + padding,
            device=self.device,
            causal=causal,
        )

    @property
    def _ratio(self) -> int:
        return self.config.compress_ratios[ROLES[self.case.layer]]

    def _table(self, rows: list[int], size: int, pool: int) -> Tensor:
        """Pages in no order, page 0 among them; one page of the cache is nobody's."""
        counts = [-(-count // size) for count in rows]
        order = torch.randperm(
            self._pages["compressed" if pool else "window"], generator=torch.Generator().manual_seed(self._seed(55))
        )
        order = torch.cat((order[order == 0], order[order != 0]))[: sum(counts)].int()
        table = torch.full((len(rows), max(counts, default=0)), -1, dtype=torch.int32)
        for request, part in enumerate(order.flip(0).split(counts)):
            table[request, : len(part)] = part
        return table

    def _draw_rows(self, caches: LayerCaches) -> None:
        everything = tuple((0, total) for total in self.totals)
        plan = self.truth.backend.plan(self.batch_of(everything), [self.truth.spec])
        # What no token of the step can see stays unwritten.
        first = torch.tensor([held - self.truth.spec.window for held, _ in self.case.requests], device=self.device)
        if self.batch.causal:
            first += 1
        seen = plan.batch.positions >= first[plan.token_request] if len(first) else plan.token_request >= 0
        _write(caches.window, torch.where(seen, plan.window_slots, -1), self.case.preset, self._seed(11))
        if self.truth.spec.ratio:
            assert caches.compressed is not None
            _write(caches.compressed, plan.compressed_slots[self.truth.spec.ratio], self.case.preset, self._seed(12))

    def _run_history(self) -> None:
        """By the reference: the tokens held before, and in the layers before this one the step's tokens too."""
        held = tuple((0, held) for held, _ in self.case.requests)
        batch, hidden = self.batch_of(held), self.hidden(self.case.requests, first=True)
        source = None
        if not self.truth.spec.owns_compressed and self.truth.spec.ratio:
            name = "source" if self.truth.spec.ratio == 1 else "source2"
            source = self.subject.layer(self.truth.backend, self.case, role=name)
            caches = layer_caches(source, self.layouts, self._pages, max(1, len(self.case.requests)))
            self.truth.caches = replace(self.truth.caches, compressed=caches.compressed, index=caches.index)
        for layer in filter(None, (source, self.truth.layer)):
            plan = self.truth.backend.plan(batch, [layer.spec])
            if not layer.spec.causal:
                self.truth.backend.insert_window(hidden, layer.state, plan)
                continue
            inputs = self.truth.backend.prepare_inputs(hidden, layer.state, plan)
            if layer.spec.owns_compressed:
                self.truth.backend.select(inputs, layer.state, plan, None)
        if source is not None:
            inputs = self.truth.backend.prepare_inputs(self.step_hidden, source.state, self.truth.plan)
            self.published = self.truth.backend.select(inputs, source.state, self.truth.plan, None)


def _write(cache: PagedCache, slots: Tensor, preset: str, seed: int) -> None:
    rows = presets.rows(preset, len(slots), cache.layout.record.dim, seed)
    cache.write(slots, rows.to(slots.device))


def _layouts(subject: Subject, backend: AttentionBackend, layer: DeepseekV41Attention, case: Case) -> CacheLayouts:
    """The case's layouts. Raises Inapplicable where the backend refuses them, as it may with all but its own."""
    names = (case.layout, "own-pages") if case.layout == "own" else (case.layout,)
    problem: LayoutError | None = None
    for name in names:
        try:
            layouts = VARIANTS[name](backend.layouts)
            layer_caches(layer, layouts, {"window": 1, "compressed": 1}, 1)
        except LayoutError as error:
            problem = error
            continue
        return layouts
    if case.layout in ("own", "own-pages"):
        assert problem is not None
        raise problem
    raise Inapplicable(f"it refuses layout {case.layout}: {problem}")
