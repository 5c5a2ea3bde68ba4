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
from dsv41.hal.records import INDEX_MXFP4_68, NVFP4_288, Record
from dsv41.hal.types import AttnInputs, LayerState, Selection, StepPlan
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
LAST_BITS = 1e-6
"""By how much, relative to its row, a float32 number depends on the order of its summation."""
_TRIALS = 16
"""Other last bits that a choice is tried with before it counts as a mismatch."""


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

    def __init__(self, golden: Golden, stack: AttentionStack, window_rows: dict[int, Tensor]) -> None:
        super().__init__()
        self.golden, self.stack, self.window_rows = golden, stack, window_rows
        self.result = GoldenComparison()
        self._inputs: AttnInputs | None = None
        self._published: Selection | None = None
        # By index source: the (request, position) whose choice differs and was no tie.
        self._skipped: dict[int, set[tuple[int, int]]] = {spec.layer_id: set() for spec in stack.specs}
        self._source_before = -1

    def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None:
        super().inputs(layer, plan, inputs)
        spec, caches = layer.spec, layer.caches
        assert caches is not None
        self._inputs = inputs
        window = self.window_rows.get(spec.layer_id)
        if window is not None:
            self.result.border_elements += self._settle_rows(caches.window, plan.window_slots, plan, 1, window)
        rows = self.golden.get(spec.layer_id, "compressed_kv")
        if spec.owns_compressed:
            self._source_before, self._published = -1, None
            self.result.quantised_mismatches += self._settle_source_rows(
                caches.compressed, NVFP4_288, layer, plan, rows
            )

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        spec, caches = layer.spec, layer.caches
        assert caches is not None
        keys = self.golden.get(spec.layer_id, "index_keys")
        if spec.owns_compressed:
            wrong = self._settle_source_rows(caches.index, INDEX_MXFP4_68, layer, plan, keys)
            self.result.quantised_mismatches += wrong
            if wrong:
                selection = self._score_again(layer, plan)
        skipped = self._skipped[spec.layer_id]
        skipped |= self._skipped.get(self._source_before, set())
        topk, margin = self.golden.get(spec.layer_id, "topk_indices"), self.golden.get(spec.layer_id, "topk_margin")
        if topk is not None and margin is not None:
            chosen = self._settle_choice("topk_indices", selection, topk.long(), margin, layer, plan)
            selection = replace(selection, topk_indices=chosen)
        kept, margin = self.golden.get(spec.layer_id, "candidates"), self.golden.get(spec.layer_id, "candidate_margin")
        if kept is not None and margin is not None and selection.candidates is not None:
            blocks = _as_blocks(kept, spec.candidate_block_size)
            chosen = self._settle_choice("candidates", selection, blocks, margin, layer, plan)
            selection = replace(selection, candidates=chosen)
        self._source_before, self._published = spec.layer_id, selection
        return super().selection(layer, plan, selection)

    def _settle_source_rows(
        self, cache: PagedCache | None, record: Record, layer: LayerState, plan: StepPlan, golden: Tensor | None
    ) -> int:
        if cache is None or golden is None or cache.layout.record != record:
            return 0
        ratio = layer.spec.ratio
        return self._settle_rows(cache, plan.compressed_slots[ratio], plan, ratio, golden)

    def _settle_rows(self, cache: PagedCache, slots: Tensor, plan: StepPlan, ratio: int, golden: Tensor) -> int:
        """Take over golden rows that differ in a few elements; returns how many elements that were."""
        row = plan.batch.positions // ratio
        known = ((slots >= 0) & (row < golden.shape[0])).nonzero()[:, 0]
        found, expected = cache.read(slots[known]).to(golden.dtype), golden[row[known]]
        wrong = (found != expected).sum(-1)
        few = (wrong > 0) & (wrong <= MAX_QUANTISED)
        cache.write(slots[known[few]], expected[few])
        return int(wrong.sum())

    def _settle_choice(
        self,
        what: str,
        selection: Selection,
        golden: Tensor,
        margin: Tensor,
        layer: LayerState,
        plan: StepPlan,
    ) -> Tensor:
        """The choice `what` of a selection, `[T, K]`, with golden rows where it was between equals.

        Equal are scores within the margin, and in float32 choices that another order of summation could turn over,
        since a query element on a rounding border moves the score by far more than the margin.
        """
        found: Tensor = getattr(selection, what)
        skipped = self._skipped[layer.spec.layer_id]
        position, request = plan.batch.positions, plan.token_request
        known = ((position >= 0) & (position < golden.shape[0])).nonzero()[:, 0]
        expected = golden[position[known]]
        width = max((int(part.max()) for part in (expected, found) if part.numel()), default=-1) + 1
        as_expected = as_sets(expected, width)

        def differing(choice: Tensor) -> set[int]:
            return set((as_sets(choice[known], width) != as_expected).any(-1).nonzero()[:, 0].tolist())

        equal = set((margin[position[known]] <= TIE_MARGIN[self.stack.dtype]).nonzero()[:, 0].tolist())
        wrong = differing(found)
        unsettled = wrong - equal
        if unsettled and self.stack.dtype == torch.float32:
            for seed in range(_TRIALS):
                other: Tensor | None = getattr(self._score_again(layer, plan, seed), what)
                assert other is not None
                unsettled &= differing(other)
                if not unsettled:
                    break
        out = torch.nn.functional.pad(found, (0, max(0, expected.shape[1] - found.shape[1])), value=-1)
        expected = torch.nn.functional.pad(expected, (0, out.shape[1] - expected.shape[1]), value=-1)
        for row in sorted(wrong):
            token = int(known[row])
            name = (int(request[token]), int(position[token]))
            if row not in unsettled:
                out[token] = expected[row]
                self.result.topk_ties_skipped += 1
            elif name not in skipped:
                self.result.topk_mismatches += 1
                skipped.add(name)
        return out

    def _score_again(self, layer: LayerState, plan: StepPlan, seed: int | None = None) -> Selection:
        """Select over the index keys as they now are; with a seed, for queries that differ in their last bits."""
        assert self._inputs is not None
        qr = self._inputs.qr
        if seed is not None:
            noise = torch.randn(qr.shape, generator=torch.Generator().manual_seed(seed)).to(qr.device)
            qr = qr * (1 + LAST_BITS * noise)
        # A layer that is no KV source writes no keys.
        reader = replace(layer, spec=replace(layer.spec, kv_source=None))
        return self.stack.backend.select(replace(self._inputs, qr=qr), reader, plan, self._published)

    def finish(self, requests: int, *, judge: bool) -> GoldenComparison:
        """Compare the outputs; with `judge`, also hold them against the tolerances."""
        result, golden = self.result, self.golden
        for spec in self.stack.specs:
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
            self._judge(requests)
        return result

    def _judge(self, requests: int) -> None:
        result, tokens = self.result, self.golden.tokens * len(self.stack.specs) * requests
        limits = (
            ("max_relative_error", result.max_relative_error, TOLERANCE[self.stack.dtype]),
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
