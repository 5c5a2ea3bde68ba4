"""Comparison with an `io.safetensors`: what an independent implementation computed for the same weights and inputs.

A quantiser and a top-k turn a difference in the last bit into a whole code step or another row. Such choices between
equals are settled here as that implementation settled them, counted, and only then are outputs compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv41.errors import CheckpointError
from dsv41.hal.layout import PagedCache
from dsv41.hal.records import NVFP4_288, pack, unpack
from dsv41.hal.types import AttnInputs, LayerState, Selection, StepPlan
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.verify import Comparison, Trace, as_sets, relative_error

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest relative error of a layer, by activation dtype."""
TIE_MARGIN = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""A choice whose runner-up came closer than this is a tie: either may be right."""
MAX_SKIPPED = 0.02
"""Share of tokens that may be left out of the comparison."""
MAX_QUANTISED = 5
"""Elements of quantised compressed rows and index keys that may lie one code off."""
_LAST_BITS = 1e-6
"""By how much, relative to its row, a float32 number depends on the order of its summation."""
_SETTLED = 3e-6
"""Relative error of a token below which none of the rows that it sees is on the other side of a border."""


class Golden:
    """The tensors of an `io.safetensors`, by layer; `tokens` of one sequence from position 0."""

    def __init__(self, path: str | Path, layers: list[int], device: torch.device | str = "cpu") -> None:
        """Read the file. Raises CheckpointError where it cannot be read or lacks a layer's input or output."""
        try:
            with safe_open(str(path), framework="pt", device=str(device)) as file:
                self._tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): expected a safetensors file; make it again"
            ) from None
        for layer in layers:
            for what in ("input", "output"):
                if self.get(layer, what) is None:
                    raise CheckpointError(
                        f"{path} lacks layers.{layer}.{what}: expected one for each layer; make it again"
                    )
        self.inputs = torch.stack([self._tensors[f"layers.{layer}.input"] for layer in layers])
        self.tokens = self.inputs.shape[1]

    def get(self, layer: int, what: str) -> Tensor | None:
        return self._tensors.get(f"layers.{layer}.{what}")


@dataclass
class GoldenComparison(Comparison):
    """`topk_mismatches` are choices that were no tie; `topk_ties_skipped` choices taken over since they were one.
    `tokens_skipped` counts tokens left out, over all layers. `quantised_mismatches` counts elements of compressed rows
    and index keys that differ, `border_elements` those of window rows that were settled. `failures` says what is
    wrong, empty if nothing."""

    topk_mismatches: int = 0
    topk_ties_skipped: int = 0
    tokens_skipped: int = 0
    quantised_mismatches: int = 0
    border_elements: int = 0
    failures: list[str] = field(default_factory=list)


class GoldenTap(Trace):
    """Records a run of the golden inputs and settles its choices between equals."""

    def __init__(self, golden: Golden, dtype: torch.dtype, window_rows: dict[int, Tensor]) -> None:
        super().__init__()
        self.golden, self.window_rows, self.margin = golden, window_rows, TIE_MARGIN[dtype]
        self.result = GoldenComparison()
        self._skipped: dict[int, set[tuple[int, int]]] = {}

    def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None:
        super().inputs(layer, plan, inputs)
        spec, caches, dtype = layer.spec, layer.caches, inputs.kv.dtype
        assert caches is not None
        window = self.window_rows.get(spec.layer_id)
        if window is not None:
            self.result.border_elements += self._settle(caches.window, plan.window_slots, plan, 1, window, dtype)
        rows = self.golden.get(spec.layer_id, "compressed_kv")
        cache = caches.compressed
        if spec.owns_compressed and rows is not None and cache is not None and cache.layout.record == NVFP4_288:
            slots = plan.compressed_slots[spec.ratio]
            self.result.quantised_mismatches += self._settle(cache, slots, plan, spec.ratio, rows, dtype)

    def _settle(
        self, cache: PagedCache, slots: Tensor, plan: StepPlan, ratio: int, golden: Tensor, dtype: torch.dtype
    ) -> int:
        """Take over golden rows that differ in a few elements; returns how many elements that were."""
        row = plan.batch.positions // ratio
        known = ((slots >= 0) & (row < golden.shape[0])).nonzero()[:, 0]
        found, expected = cache.read(slots[known]).to(dtype), golden[row[known]]
        wrong = (found != expected).sum(-1)
        few = (wrong > 0) & (wrong <= MAX_QUANTISED)
        cache.write(slots[known[few]], expected[few])
        return int(wrong.sum())

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        spec, width = layer.spec, plan.max_visible[layer.spec.ratio]
        self._count_index_keys(layer, plan)
        skipped = set() if spec.owns_compressed else set(self._skipped.get(self._source_before(layer), set()))
        topk, margin = (self.golden.get(spec.layer_id, name) for name in ("topk_indices", "topk_margin"))
        if topk is not None and margin is not None:
            chosen = self._settle_choice(selection.topk_indices, topk.long(), margin, width, plan, skipped)
            selection = replace(selection, topk_indices=chosen)
        candidates, margin = (self.golden.get(spec.layer_id, name) for name in ("candidates", "candidate_margin"))
        if candidates is not None and margin is not None and selection.candidates is not None:
            blocks = _as_blocks(candidates, spec.candidate_block_size)
            count = -(-width // spec.candidate_block_size)
            chosen = self._settle_choice(selection.candidates, blocks, margin, count, plan, skipped)
            selection = replace(selection, candidates=chosen)
        self._skipped[spec.layer_id] = skipped
        self._last_source = spec.layer_id
        return super().selection(layer, plan, selection)

    _last_source = -1

    def _source_before(self, layer: LayerState) -> int:
        return self._last_source if self._last_source < layer.spec.layer_id else -1

    def _settle_choice(
        self,
        found: Tensor,
        golden: Tensor,
        margin: Tensor,
        width: int,
        plan: StepPlan,
        skipped: set[tuple[int, int]],
    ) -> Tensor:
        """`found` `[T, K]` with golden rows where the choice was a tie; others that differ join `skipped`."""
        position, request = plan.batch.positions, plan.token_request
        known = ((position >= 0) & (position < golden.shape[0])).nonzero()[:, 0]
        expected = golden[position[known]]
        # Rows that this step cannot see yet are no part of its width; golden rows name none of them.
        differs = (as_sets(found[known], width) != as_sets(expected, width)).any(-1)
        tie = margin[position[known]] <= self.margin
        out = torch.nn.functional.pad(found, (0, max(0, expected.shape[1] - found.shape[1])), value=-1)
        expected = torch.nn.functional.pad(expected, (0, out.shape[1] - expected.shape[1]), value=-1)
        for row in differs.nonzero()[:, 0].tolist():
            token = int(known[row])
            name = (int(request[token]), int(position[token]))
            if bool(tie[row]):
                out[token] = expected[row]
                self.result.topk_ties_skipped += 1
            elif name not in skipped:
                self.result.topk_mismatches += 1
                skipped.add(name)
        return out

    def _count_index_keys(self, layer: LayerState, plan: StepPlan) -> None:
        keys, caches = self.golden.get(layer.spec.layer_id, "index_keys"), layer.caches
        if keys is None or caches is None or caches.index is None or not layer.spec.owns_compressed:
            return
        slots, row = plan.compressed_slots[layer.spec.ratio], plan.batch.positions // layer.spec.ratio
        known = (slots >= 0) & (row < keys.shape[0])
        found = caches.index.read(slots[known]).to(keys.dtype)
        self.result.quantised_mismatches += int((found != keys[row[known]]).sum())

    def finish(self, stack: AttentionStack, requests: int, *, judge: bool) -> GoldenComparison:
        """Compare the outputs; with `judge`, also hold them against the tolerances."""
        result, golden = self.result, self.golden
        for spec in stack.specs:
            skipped = self._skipped.get(spec.index_source, set()) if spec.index_source is not None else set()
            expected = golden.get(spec.layer_id, "output")
            assert expected is not None
            for request in range(requests):
                found = self.output_of(spec.layer_id, request)[: golden.tokens]
                kept = torch.ones(found.shape[0], dtype=torch.bool, device=found.device)
                kept[[position for r, position in skipped if r == request]] = False
                result.note(spec.layer_id, relative_error(found[kept], expected[: found.shape[0]][kept]))
                result.tokens_skipped += int((~kept).sum())
        if judge:
            self._judge(stack, requests)
        return result

    def _judge(self, stack: AttentionStack, requests: int) -> None:
        result, tokens = self.result, self.golden.tokens * len(stack.specs) * requests
        limits = (
            ("max_relative_error", result.max_relative_error, TOLERANCE[stack.dtype]),
            ("topk_mismatches", result.topk_mismatches, 0),
            ("tokens_skipped", result.tokens_skipped, MAX_SKIPPED * tokens),
            ("quantised_mismatches", result.quantised_mismatches, MAX_QUANTISED * requests),
        )
        result.failures += [
            f"golden {name} is {value:.3g}, above {limit:.3g}" for name, value, limit in limits if not value <= limit
        ]


def _as_blocks(candidates: Tensor, block_size: int) -> Tensor:
    """Candidate blocks int64 `[T, B]`, -1 = none, of bool `[T, W]`."""
    tokens, width = candidates.shape
    count = -(-width // block_size)
    member = (
        torch.nn.functional.pad(candidates, (0, count * block_size - width)).view(tokens, count, block_size).any(-1)
    )
    number = torch.where(member, torch.arange(count, device=candidates.device), count).sort(dim=-1).values
    return torch.where(number < count, number, -1)


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
    session = Session(stack, max_requests=1, max_tokens=golden.tokens)
    keep = _Keep(GoldenTap(golden, stack.dtype, known))
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
    record = cache.layout.record
    rms = kv.square().mean(-1, keepdim=True).sqrt()
    unsure = _LAST_BITS * (kv.abs() + rms)
    below, above = (unpack(record, *pack(record, kv + shift)) for shift in (-unsure, unsure))
    rows = cache.read(plan.window_slots)

    def errors() -> Tensor:
        output = stack.backend.project(stack.backend.attend(inputs, layer, plan, selection), layer, plan)
        ratio: Tensor = (output - expected).norm(dim=-1) / expected.norm(dim=-1)
        return ratio

    best = errors()
    for row, dims in _border_units((below - above).abs() / rms, max(1, *(part.group for part in record.fields))):
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
