"""Comparison with an `io.safetensors`: what an independent implementation computed for the same weights and inputs.

A quantiser and a top-k turn a difference in the last bit into a whole code step or another row. Such choices between
equals are settled here as that implementation settled them, counted, and only then are outputs compared. Nothing else
is settled: what differs by more is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv41.choices import TIE, as_sets, invalid_rows
from dsv41.errors import CheckpointError
from dsv41.hal.layout import PagedCache
from dsv41.hal.records import code_distance, pack, unpack
from dsv41.hal.types import AttnInputs, LayerSpec, LayerState, Selection, StepPlan
from dsv41.stack import AttentionStack
from dsv41.verify import Comparison, Trace, relative_error

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest relative error of a layer, by activation dtype."""
MAX_SKIPPED = 0.02
"""Share of tokens that may be left out of the comparison."""
MAX_QUANTISED = 5
"""Elements of quantised compressed rows and index keys that may lie one code off."""
LAST_BITS = 1e-6
"""By how much, relative to its row, a float32 number depends on the order of its summation."""
_TRIALS = 16
"""Other last bits that a choice is tried with before it counts as a mismatch."""


class Golden:
    """The tensors of an `io.safetensors`, by layer; `tokens` of one sequence from position 0.

    Raises CheckpointError for a file that cannot be read, and for a tensor that a layer's role asks for and that is
    missing or of another shape or type.
    """

    def __init__(self, path: str | Path, specs: Sequence[LayerSpec], device: torch.device | str = "cpu") -> None:
        try:
            with safe_open(str(path), framework="pt", device=str(device)) as file:
                self._tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): expected a safetensors file; make it again"
            ) from None
        self._path = path
        first = self._tensors.get(f"{_name(specs[0])}.input")
        self.tokens = first.shape[0] if first is not None and first.ndim else 0
        for spec in specs:
            self._check(spec)
        self.inputs = torch.stack([self._tensors[f"{_name(spec)}.input"] for spec in specs])

    def get(self, layer: int, what: str) -> Tensor | None:
        return self._tensors.get(f"layers.{layer}.{what}")

    def _check(self, spec: LayerSpec) -> None:
        tokens, rows = self.tokens, self.tokens // max(spec.ratio, 1)
        numbers = (torch.float32, torch.bfloat16)
        wanted: dict[str, tuple[list[int], tuple[torch.dtype, ...]]] = {
            name: ([tokens, spec.hidden_size], numbers) for name in ("input", "output")
        }
        if spec.owns_compressed:
            wanted["compressed_kv"] = [rows, spec.head_dim], numbers
            wanted["index_keys"] = [rows, spec.index_dim], numbers
        if spec.owns_selection:
            wanted["topk_indices"] = [tokens, min(spec.topk, rows)], (torch.int32, torch.int64)
            wanted["topk_margin"] = [tokens], numbers
        if spec.publishes_candidates:
            wanted["candidates"] = [tokens, rows], (torch.bool,)
            wanted["candidate_margin"] = [tokens], numbers
        if self.get(spec.layer_id, "window_kv") is not None:
            wanted["window_kv"] = [tokens, spec.head_dim], numbers
        for what, (shape, dtypes) in wanted.items():
            found, name = self.get(spec.layer_id, what), f"{_name(spec)}.{what}"
            if found is None:
                raise CheckpointError(f"{self._path} lacks {name}: expected it for a layer of this role; make it again")
            if list(found.shape) != shape or found.dtype not in dtypes or not tokens:
                types = " or ".join(map(str, dtypes))
                raise CheckpointError(
                    f"{name} is {found.dtype} {list(found.shape)}: expected {shape} of {types} for one token or more; "
                    "make the file again"
                )


def _name(spec: LayerSpec) -> str:
    return f"layers.{spec.layer_id}"


@dataclass
class GoldenComparison(Comparison):
    """`topk_mismatches` are choices that were no tie or none at all, `topk_ties_skipped` choices taken over since they
    were one; `tokens_skipped` counts tokens left out, over all layers.

    Of stored rows, `quantised_mismatches` counts elements of compressed rows and index keys that are one code off,
    `border_elements` those of window rows that lay on a rounding border, and `wrong_elements` all that differ by more.
    """

    topk_mismatches: int = 0
    topk_ties_skipped: int = 0
    tokens_skipped: int = 0
    quantised_mismatches: int = 0
    border_elements: int = 0
    wrong_elements: int = 0


class GoldenTap(Trace):
    """Records a run whose first request is the golden one, and settles that one's choices between equals.

    For caches in the release's records; others hold other numbers, which `compare_outputs` can but measure.
    """

    def __init__(self, golden: Golden, stack: AttentionStack, window_rows: dict[int, Tensor]) -> None:
        super().__init__()
        self.golden, self.stack, self.window_rows = golden, stack, window_rows
        self.result = GoldenComparison()
        self._inputs: AttnInputs | None = None
        self._published: Selection | None = None
        # By index source: the positions whose choice differs and was no tie.
        self._skipped: dict[int, set[int]] = {spec.layer_id: set() for spec in stack.specs}
        self._source_before = -1

    def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None:
        super().inputs(layer, plan, inputs)
        spec, caches = layer.spec, layer.caches
        assert caches is not None
        self._inputs = inputs
        window = self.window_rows.get(spec.layer_id)
        if window is None:
            window = self.golden.get(spec.layer_id, "window_kv")
        if window is not None:
            self._settle_window(caches.window, plan, inputs.kv, window)
        if spec.owns_compressed:
            self._source_before, self._published = -1, None
            self._settle_rows(caches.compressed, layer, plan, "compressed_kv")

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        spec, caches = layer.spec, layer.caches
        assert caches is not None
        self.keep_selection("chosen", layer, plan, selection)
        if spec.owns_compressed and self._settle_rows(caches.index, layer, plan, "index_keys"):
            selection = self._score_again(layer, plan)
        self._skipped[spec.layer_id] |= self._skipped.get(self._source_before, set())
        visible = plan.num_visible[spec.ratio]
        topk, margin = (self.golden.get(spec.layer_id, name) for name in ("topk_indices", "topk_margin"))
        assert topk is not None
        assert margin is not None
        chosen = self._settle_choice("topk_indices", selection, topk.long(), margin, visible, layer, plan)
        selection = replace(selection, topk_indices=chosen)
        if spec.publishes_candidates:
            kept, margin = (self.golden.get(spec.layer_id, name) for name in ("candidates", "candidate_margin"))
            assert kept is not None
            assert margin is not None
            blocks, size = _as_blocks(kept, spec.candidate_block_size), spec.candidate_block_size
            chosen = self._settle_choice("candidates", selection, blocks, margin, -(-visible // size), layer, plan)
            selection = replace(selection, candidates=chosen)
        self._source_before, self._published = spec.layer_id, selection
        self.keep_selection("used", layer, plan, selection)
        return selection

    def _known(self, plan: StepPlan) -> Tensor:
        """The tokens of this step, int64 `[n]`, that the golden run has too."""
        position = plan.batch.positions
        return ((plan.token_request == 0) & (position < self.golden.tokens)).nonzero()[:, 0]

    def _settle_window(self, cache: PagedCache, plan: StepPlan, kv: Tensor, golden: Tensor) -> None:
        """Take over window elements that lay on a rounding border; in bfloat16 only look for wrong ones."""
        known = self._known(plan)
        slots, record = plan.window_slots[known], cache.layout.record
        found, expected = cache.read(slots), golden[plan.batch.positions[known]].float()
        if kv.dtype != torch.float32:
            distance = code_distance(record, *cache.read_bytes(slots), expected)
            self.result.wrong_elements += int((distance > 1).sum())
            return
        below, above = border_sides(cache, kv[known])
        differs = found != expected
        between = ((found == below) & (expected == above)) | ((found == above) & (expected == below))
        settled = differs & between
        self.result.wrong_elements += int((differs & ~settled).sum())
        self.result.border_elements += int(settled.sum())
        rows = settled.any(-1)
        cache.write(slots[rows], torch.where(settled, expected, found)[rows])

    def _settle_rows(self, cache: PagedCache | None, layer: LayerState, plan: StepPlan, what: str) -> int:
        """Take over rows of a KV source's cache that differ by one code in a few elements; returns how many did."""
        golden, ratio = self.golden.get(layer.spec.layer_id, what), layer.spec.ratio
        assert cache is not None
        assert golden is not None
        known = self._known(plan)
        known = known[plan.compressed_slots[ratio][known] >= 0]
        slots, expected = plan.compressed_slots[ratio][known], golden[plan.batch.positions[known] // ratio]
        differs = cache.read(slots).to(golden.dtype) != expected
        distance = code_distance(cache.layout.record, *cache.read_bytes(slots), expected)
        one_off = differs & (distance == 1)
        self.result.wrong_elements += int((differs & ~one_off).sum())
        self.result.quantised_mismatches += int(one_off.sum())
        rows = one_off.any(-1) & (differs == one_off).all(-1)
        cache.write(slots[rows], expected[rows])
        return int(rows.sum())

    def _settle_choice(
        self,
        what: str,
        selection: Selection,
        golden: Tensor,
        margin: Tensor,
        visible: Tensor,
        layer: LayerState,
        plan: StepPlan,
    ) -> Tensor:
        """The choice `what` of a selection, `[T, K]`, with golden rows where it was between equals.

        Equal are scores within the margin, and in float32 choices that another order of summation could turn over,
        since a query element on a rounding border moves the score by far more than the margin. A choice that no one
        could make (a repeated or invisible row, too few) is never settled.
        """
        found: Tensor = getattr(selection, what)
        skipped, position = self._skipped[layer.spec.layer_id], plan.batch.positions
        known = self._known(plan)
        expected = golden[position[known]]
        width = max((int(part.max()) for part in (expected, found) if part.numel()), default=-1) + 1
        as_expected = as_sets(expected, width)

        def differing(choice: Tensor) -> set[int]:
            return set((as_sets(choice[known], width) != as_expected).any(-1).nonzero()[:, 0].tolist())

        count = (expected >= 0).sum(-1)
        invalid = set(invalid_rows(found[known], visible[known], count).nonzero()[:, 0].tolist())
        equal = set((margin[position[known]] <= TIE[self.stack.dtype]).nonzero()[:, 0].tolist())
        differs = differing(found)
        unsettled = differs - equal - invalid
        if unsettled and self.stack.dtype == torch.float32:
            for seed in range(_TRIALS):
                other: Tensor | None = getattr(self._score_again(layer, plan, seed), what)
                assert other is not None
                unsettled &= differing(other)
                if not unsettled:
                    break
        wrong = unsettled | invalid
        out = torch.nn.functional.pad(found, (0, max(0, expected.shape[1] - found.shape[1])), value=-1)
        expected = torch.nn.functional.pad(expected, (0, out.shape[1] - expected.shape[1]), value=-1)
        for row in sorted(differs | invalid):
            token = int(known[row])
            if row not in wrong:
                out[token] = expected[row]
                self.result.topk_ties_skipped += 1
            elif int(position[token]) not in skipped:
                self.result.topk_mismatches += 1
                skipped.add(int(position[token]))
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

    def finish(self) -> GoldenComparison:
        """Compare the outputs and hold everything against its tolerance."""
        result, specs = self.result, self.stack.specs
        skipped = {spec.layer_id: self._skipped[spec.index_source] for spec in specs if spec.index_source is not None}
        result.tokens_skipped += sum(map(len, skipped.values()))
        compare_outputs(self, self.golden, specs, result, skipped)
        result.hold("golden max_relative_error", result.max_relative_error, TOLERANCE[self.stack.dtype])
        result.hold("golden topk_mismatches", result.topk_mismatches, 0)
        result.hold("golden tokens_skipped", result.tokens_skipped, MAX_SKIPPED * self.golden.tokens * len(specs))
        result.hold("golden quantised_mismatches", result.quantised_mismatches, MAX_QUANTISED)
        result.hold("golden wrong_elements", result.wrong_elements, 0)
        return result


def compare_outputs(
    trace: Trace,
    golden: Golden,
    specs: Sequence[LayerSpec],
    result: Comparison,
    skipped: dict[int, set[int]] | None = None,
) -> None:
    """Note the error of each layer of the first request; `skipped` names positions to leave out, by layer."""
    for spec in specs:
        expected = golden.get(spec.layer_id, "output")
        assert expected is not None
        found = trace.output_of(spec.layer_id, 0)[: golden.tokens]
        kept = torch.ones(found.shape[0], dtype=torch.bool, device=found.device)
        kept[list((skipped or {}).get(spec.layer_id, ()))] = False
        result.note(spec.layer_id, relative_error(found[kept], expected[: found.shape[0]][kept]))


def border_sides(cache: PagedCache, kv: Tensor) -> tuple[Tensor, Tensor]:
    """What a cache would hold of `kv` `[n, D]` float32, were its last bits a little less or a little more."""
    record, unsure = cache.layout.record, LAST_BITS * (kv.abs() + kv.square().mean(-1, keepdim=True).sqrt())
    below, above = (unpack(record, *pack(record, kv + shift)) for shift in (-unsure, unsure))
    return below, above


def _as_blocks(candidates: Tensor, block_size: int) -> Tensor:
    """Candidate blocks int64 `[T, B]`, -1 = none, of bool `[T, W]`."""
    tokens, width = candidates.shape
    count = -(-width // block_size)
    padded = torch.nn.functional.pad(candidates, (0, count * block_size - width))
    member = padded.view(tokens, count, block_size).any(-1)
    number = torch.where(member, torch.arange(count, device=candidates.device), count).sort(dim=-1).values
    return torch.where(number < count, number, -1)
