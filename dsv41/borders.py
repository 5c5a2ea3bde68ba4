"""Window rows of a golden run that its file does not have, where a number lay on a rounding border of the quantiser."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.golden import Golden, GoldenTap, border_sides
from dsv41.hal.types import AttnInputs, LayerState, Selection, StepPlan
from dsv41.session import Session
from dsv41.stack import AttentionStack

_SETTLED = 3e-6
"""Relative error of a token below which none of the rows that it sees is on the other side of a border."""


class _Keep:
    """A tap that keeps every layer's state at its borders, for a run of one step."""

    def __init__(self, inner: GoldenTap) -> None:
        self.inner = inner
        self.steps: dict[int, tuple[LayerState, StepPlan, AttnInputs]] = {}
        self.selections: dict[int, Selection] = {}

    def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None:
        self.inner.inputs(layer, plan, inputs)
        self.steps[layer.spec.layer_id] = (layer, plan, inputs)

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        self.selections[layer.spec.layer_id] = self.inner.selection(layer, plan, selection)
        return self.selections[layer.spec.layer_id]

    def output(self, layer: LayerState, plan: StepPlan, output: Tensor) -> None:
        self.inner.output(layer, plan, output)


def settle_window_rows(stack: AttentionStack, golden: Golden) -> dict[int, Tensor]:
    """The window rows `[T, D]` of each layer as the golden run must have stored them.

    Where the file has them, they are those. Otherwise rows come from one prefill, and each group of dims that holds a
    number within the last bits of a rounding border takes whichever side brings the outputs nearer. In bfloat16 the
    tolerance covers such steps and nothing is settled.
    """
    if stack.dtype != torch.float32:
        return {}
    stored = {spec.layer_id: golden.get(spec.layer_id, "window_kv") for spec in stack.specs}
    known = {layer: rows for layer, rows in stored.items() if rows is not None}
    if len(known) == len(stored):
        return known
    session = Session(stack, max_requests=1, max_tokens=golden.tokens, max_step_tokens=golden.tokens)
    keep = _Keep(GoldenTap(golden, stack, known))
    session.step({session.add_request(): golden.inputs}, tap=keep)
    for layer in stored:
        if layer not in known:
            state, plan, inputs = keep.steps[layer]
            source = state.spec.index_source
            selection = keep.selections[source] if source is not None else None
            if selection is not None:
                selection = stack.backend.prepare_selection(selection, state, plan)
            output = golden.get(layer, "output")
            assert output is not None
            known[layer] = _settle_layer(stack, state, plan, inputs, selection, output)
    return known


def _settle_layer(
    stack: AttentionStack,
    layer: LayerState,
    plan: StepPlan,
    inputs: AttnInputs,
    selection: Selection | None,
    expected: Tensor,
) -> Tensor:
    assert layer.caches is not None
    cache, kv = layer.caches.window, inputs.kv
    below, above = border_sides(cache, kv)
    rows = cache.read(plan.window_slots)
    gap = (below - above).abs() / kv.square().mean(-1, keepdim=True).sqrt()
    size = max(1, *(part.group for part in cache.layout.record.fields))

    def errors() -> Tensor:
        output = stack.backend.project(stack.backend.attend(inputs, layer, plan, selection), layer, plan)
        ratio: Tensor = (output - expected).norm(dim=-1) / expected.norm(dim=-1)
        return ratio

    best = errors()
    for row, dims in _border_units(gap, size):
        seen_by = slice(row, row + layer.spec.window)
        if best[seen_by].median() < _SETTLED:
            continue
        slot, other = plan.window_slots[row : row + 1], rows[row].clone()
        other[dims] = torch.where(other[dims] == below[row, dims], above[row, dims], below[row, dims])
        cache.write(slot, other[None])
        now = errors()
        if now[seen_by].norm() < best[seen_by].norm():
            best, rows[row] = now, other
        else:
            cache.write(slot, rows[row : row + 1])
    return rows


def _border_units(gap: Tensor, size: int) -> list[tuple[int, Tensor]]:
    """What can be on the other side of a border, widest gap first: (row, dims) with one dim, or with all dims of a
    group of `size` where its scale is what is unsure. `gap` `[T, D]` is the distance between the two sides."""
    units = []
    for row, group in (gap.unflatten(1, (-1, size)).amax(-1) > 1e-5).nonzero().tolist():
        dims = gap[row, group * size : (group + 1) * size].nonzero()[:, 0] + group * size
        parts = [dims] if len(dims) > size // 8 else list(dims.split(1))
        units += [(float(gap[row, part].max()), row, part) for part in parts]
    units.sort(key=lambda unit: -unit[0])
    return [(row, dims) for _, row, dims in units]
