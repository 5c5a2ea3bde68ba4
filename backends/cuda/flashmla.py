"""FlashMLA's sparse attention over 584-byte records (SM90, SM100); everything around it is the portable backend's.

Two of its kernels: one that reads records in place, for decode and for whatever is not worth more, and one for prefill
over rows gathered in bf16 (`prefill.py` decides). On Hopper kernels of our own are faster (`choice.py` decides).
Queries come rotated, and `o_proj` rotates the output back.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from dsv41.backends.cuda import hopper, index, products, products_wide
from dsv41.backends.cuda.build import TARGET, why_not
from dsv41.backends.cuda.choice import FLASHMLA, HOPPER, PORTABLE, Choice
from dsv41.backends.cuda.index_choices import ChoicesOnHopper
from dsv41.backends.cuda.layouts import check_readable, record_view
from dsv41.backends.cuda.overlap import Overlapping
from dsv41.backends.cuda.prefill import ROW_BYTES, Gathered, Run, all_full, cut, most_rows
from dsv41.backends.cuda.projections import ProjectsOnHopper
from dsv41.backends.cuda.rows import gather_rows
from dsv41.backends.cuda.tables import pack_gathered, pack_selection, pack_slots
from dsv41.backends.portable.caches import flat
from dsv41.backends.portable.weights import PortableWeights, padded_sink
from dsv41.backends.vendor import call, expect_bfloat16, load
from dsv41.errors import BackendError, LayoutError
from dsv41.hal.builtin import INSTALL_FLASHMLA
from dsv41.hal.layout import CacheLayouts, PagedCache
from dsv41.hal.request import UNSPECIFIC_KV_CACHE_DTYPES, V4_RECORD
from dsv41.hal.types import AttnInputs, AttnOutput, LayerCaches, LayerSpec, LayerState, Selection, StepPlan

_HEADS = (64, 128)
"""The head counts that its kernels are built for."""
_DECODE_COLUMNS, _PREFILL_COLUMNS = 64, 128
"""Of which index tables must have a multiple; the prefill kernel on SM90 asks for more than on SM100."""


@dataclass(frozen=True, kw_only=True)
class FlashMLAWeights(PortableWeights):
    """With the `sink` float32 `[Hp]`, that of padded heads -inf."""

    sink: Tensor


@dataclass(frozen=True)
class FlashMLAPlan:
    """`StepPlan.extra`: what the library's kernels need, once a step.

    `window` int32 `[T, W]` are the slots of the window rows, packed to the left, and `window_lengths` int32 `[T]` how
    many there are. By ratio: `visible` int32 `[T]`, how many compressed rows a token of a whole selection has; `runs`,
    the calls that the step is cut into; and `schedules`, one of the library's scheduler metadata for each of them (None
    for the prefill kernel, which has none), new in every step and shared by all layers of that ratio. `full` are the
    ratios in whose layers every token sees a whole window and a whole selection, as far as the host knows: lengths
    save work where there is less, and only cost some there.

    The library plans inside the first call that a schedule is given to. In a step being captured that call, and so the
    planning, is in the graph, and each replay plans for its own lengths; that is why a schedule is never kept for
    another step. It holds for as long as the lengths are the same, so all layers of a ratio go by `visible`.
    """

    window: Tensor
    window_lengths: Tensor
    visible: Mapping[int, Tensor]
    runs: Mapping[int, list[Run]]
    schedules: Mapping[int, list[Any]]
    full: frozenset[int]


@dataclass(frozen=True)
class SelectedRows:
    """`Selection.derived`: `slots` int64 `[T, K]` as the portable kernels read them; `indices` int32 `[T, W]`, the same
    packed to the left; `lengths` int32 `[T]`, how many there are."""

    slots: Tensor
    indices: Tensor
    lengths: Tensor


class FlashMLABackend(ChoicesOnHopper, ProjectsOnHopper, Overlapping):
    """Attention by FlashMLA, in bfloat16, with heads padded to 64 or 128, and on Hopper by kernels of ours.

    The library is imported when the first step is planned, or before by `library`.
    """

    name = "flashmla"
    packed_kv_cache_dtype = "fp8_ds_mla"
    fuses_rotation = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.choice = self.read_choice()
        self.max_tokens_for_overlap = self.choice.max_tokens_for_overlap

    def read_choice(self) -> Choice:
        """Which kernels are there, of which ours are compiled here, so that no step finds out that they cannot be."""
        if self.device.type != "cuda" or self.arch != TARGET:
            return Choice.read(self.arch, f"it is built for {TARGET} GPUs, this is {self.arch} on {self.device.type}")
        choice = Choice.read(self.arch, why_not(hopper.BUILDS))
        others = (*index.BUILDS, *products.BUILDS, *products_wide.ALL_BUILDS)
        return Choice.read(self.arch, why_not(others)) if choice.ours else choice

    @cached_property
    def library(self) -> Any:
        """The module `flash_mla`. Raises BackendError where it cannot be imported."""
        return load("flash_mla", INSTALL_FLASHMLA)

    @property
    def chooses_on_hopper(self) -> bool:
        return self.choice.ours

    @property
    def multiplies_on_hopper(self) -> bool:
        return self.choice.ours

    # The contracts

    def get_padded_num_q_heads(self, num_heads: int) -> int:
        if not 1 <= num_heads <= _HEADS[-1]:
            raise BackendError(
                f"{self.name} was given {num_heads} query heads on a rank: expected 1 to {_HEADS[-1]}, which are "
                f"padded to {' or '.join(map(str, _HEADS))}; use a larger tp_size, or the reference"
            )
        if not self.choice.pads(num_heads):
            return num_heads
        if num_heads < _HEADS[0] and self.choice.missing is not None and self.arch == TARGET:
            warnings.warn(
                f"{num_heads} heads a rank are padded to {_HEADS[0]}, at up to twice the time: {self.choice.missing}",
                stacklevel=2,
            )
        return next(heads for heads in _HEADS if heads >= num_heads)

    def resolve_layouts(self, kv_cache_dtype: str, index_cache_dtype: str) -> tuple[str, str, CacheLayouts]:
        """Every name that is taken means the 584-byte record, scales behind a page's rows. Its pages are padded to a
        multiple of 576 bytes, which the kernels of SM100 ask for, so that both architectures have one layout."""
        known = (*UNSPECIFIC_KV_CACHE_DTYPES, self.packed_kv_cache_dtype, V4_RECORD)
        if kv_cache_dtype not in known:
            raise LayoutError(
                f"kv_cache_dtype {kv_cache_dtype!r} is none that {self.name} reads: expected {', '.join(known)}, all "
                "of which are the 584-byte record here; ask for one of these, or use another backend"
            )
        _, index, layouts = super().resolve_layouts(V4_RECORD, index_cache_dtype)
        return self.packed_kv_cache_dtype, index, layouts

    def check_caches(self, spec: LayerSpec, caches: LayerCaches) -> None:
        super().check_caches(spec, caches)
        check_readable(f"the window cache of {spec.name}", caches.window, self.layouts.window, self.arch)
        if caches.compressed is not None:
            what = f"the compressed cache of {spec.name}"
            check_readable(what, caches.compressed, self.layouts.compressed, self.arch)

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        """By the kernel that `choose` names. Where the library brings a new tensor, `out.data` becomes that one."""
        # What is planned and selected holds slots in both forms, so that any kernel can take any call.
        kernels = {FLASHMLA: self._attend, HOPPER: self.attend_on_hopper, PORTABLE: self._attend_portably}
        kernels[self.choice.kernel(layer.spec.num_heads, len(inputs.q))](inputs, layer, selection, plan, out)

    # Hooks

    def prepare_weights(self, layer: LayerState) -> FlashMLAWeights:
        return FlashMLAWeights(**vars(super().prepare_weights(layer)), sink=padded_sink(layer))

    def attention_bytes(self, spec: LayerSpec, tokens: int) -> int:
        """Those of the portable kernels where these are used; FlashMLA takes what it needs from torch's allocator."""
        portable = self.choice.kernel(spec.num_heads, tokens) == PORTABLE
        return super().attention_bytes(spec, tokens) if portable else 0

    def complete_plan(self, plan: StepPlan, specs: Sequence[LayerSpec]) -> StepPlan:
        window, lengths = pack_slots(plan.window_indices, _DECODE_COLUMNS)
        # Only layers whose calls may be the library's need its tables and schedules.
        kinds = {spec.ratio: spec for spec in specs if self.choice.pads(spec.num_heads)}
        runs = {ratio: cut(plan.batch, spec.window, ratio, _keys(spec)) for ratio, spec in kinds.items()}
        visible = {
            ratio: plan.num_visible[ratio].clamp(max=spec.topk).int()
            for ratio, spec in kinds.items()
            if ratio in plan.num_visible
        }
        schedules = {
            ratio: [None if run.gathered else call(self.library.get_mla_metadata)[0] for run in parts]
            for ratio, parts in runs.items()
        }
        full = frozenset(ratio for ratio, spec in kinds.items() if all_full(plan.batch, spec.window, ratio, spec.topk))
        return replace(plan, extra=FlashMLAPlan(window, lengths, visible, runs, schedules, full))

    def prepare_selection(self, selection: Selection, layer: LayerState, plan: StepPlan) -> Selection:
        rows, ratio = selection.topk_indices, layer.spec.ratio
        table, visible = plan.batch.compressed_tables[ratio], plan.num_visible[ratio]
        found = pack_selection(rows, visible, plan.token_request, table.pages, table.page_size, _DECODE_COLUMNS)
        return Selection(rows, selection.candidates, SelectedRows(*found))

    def complete_selection(self, slots: Tensor) -> SelectedRows:
        return SelectedRows(slots, *pack_slots(slots, _DECODE_COLUMNS))

    def reserve(self, max_tokens: int, max_requests: int, max_len: int) -> int:
        super().reserve(max_tokens, max_requests, max_len)
        for spec in self.specs:
            if spec.causal and self.choice.pads(spec.num_heads):
                rows = most_rows(max_tokens, max_requests, max_len, spec.window, spec.ratio, _keys(spec))
                self.workspace.reserve("gathered", rows * ROW_BYTES)
        return self.workspace.bytes

    # The kernels

    def _attend_portably(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        if selection is not None:
            selection = replace(selection, derived=selection.derived.slots)
        super().forward_mqa(inputs, layer, selection, plan, out)

    def attend_on_hopper(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        step, spec, caches = plan.extra, layer.spec, layer.caches
        assert isinstance(step, FlashMLAPlan) and caches is not None
        expect_bfloat16(self.name, inputs.q)
        compressed: tuple[Any, ...] = (None, 1, None, None)
        if selection is not None:
            assert caches.compressed is not None
            chosen: SelectedRows = selection.derived
            cache = caches.compressed
            compressed = (cache.data, cache.layout.page_size, chosen.indices, chosen.lengths)
        hopper.attend(
            inputs.q,
            spec.num_heads,
            layer.prepared.sink,
            spec.scale,
            caches.window.data,
            caches.window.layout.page_size,
            step.window,
            step.window_lengths,
            *compressed,
            out.data,
        )
        out.rotated_back = False

    def _attend(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        step, q = plan.extra, inputs.q
        expect_bfloat16(self.name, q)
        assert isinstance(step, FlashMLAPlan)
        out.rotated_back = False
        if len(q) == 0:
            return
        ratio = layer.spec.ratio
        for run, schedule in zip(step.runs[ratio], step.schedules[ratio], strict=True):
            if run.gathered is None:
                self._decode(q, layer, selection, step, run, schedule, out)
            else:
                self._prefill(q, layer, selection, plan, run, run.gathered, out)

    def _decode(
        self,
        q: Tensor,
        layer: LayerState,
        selection: Selection | None,
        step: FlashMLAPlan,
        run: Run,
        schedule: Any,
        out: AttnOutput,
    ) -> None:
        spec, caches, tokens = layer.spec, layer.caches, run.tokens
        assert caches is not None
        arguments = {
            "q": q[tokens, None],
            "k_cache": record_view(caches.window),
            "block_table": None,
            "cache_seqlens": None,
            "head_dim_v": spec.head_dim,
            "tile_scheduler_metadata": schedule,
            "softmax_scale": spec.scale,
            "is_fp8_kvcache": True,
            "indices": step.window[tokens, None],
            "attn_sink": layer.prepared.sink,
        }
        if spec.ratio not in step.full:
            arguments["topk_length"] = step.window_lengths[tokens]
        if selection is not None:
            assert caches.compressed is not None
            chosen: SelectedRows = selection.derived
            arguments |= {
                "extra_k_cache": record_view(caches.compressed),
                "extra_indices_in_kvcache": chosen.indices[tokens, None],
            }
            if spec.ratio not in step.full:
                arguments["extra_topk_length"] = self._lengths(step, spec, chosen)[tokens]
        function = self.library.flash_mla_with_kvcache
        if self._takes_out["flash_mla_with_kvcache"]:
            call(function, **arguments, out=out.data[tokens, None])
        else:
            _put(out, tokens, call(function, **arguments)[0][:, 0])

    @staticmethod
    def _lengths(step: FlashMLAPlan, spec: LayerSpec, chosen: SelectedRows) -> Tensor:
        """Those that any layer of this ratio would have the schedule planned for. A selection that someone put in place
        of ours may be too narrow for them, and rows known only by slot have none: then its own."""
        visible = step.visible.get(spec.ratio)
        return chosen.lengths if visible is None or chosen.indices.shape[1] < spec.topk else visible

    def _prefill(
        self,
        q: Tensor,
        layer: LayerState,
        selection: Selection | None,
        plan: StepPlan,
        run: Run,
        gathered: Gathered,
        out: AttnOutput,
    ) -> None:
        spec, caches, batch, tokens = layer.spec, layer.caches, plan.batch, run.tokens
        assert caches is not None
        rows = self.workspace.take("gathered", gathered.rows, spec.head_dim, dtype=q.dtype)
        sources = [(caches.window, batch.window_table.pages[gathered.requests])]
        if selection is not None:
            assert caches.compressed is not None
            sources.append((caches.compressed, batch.compressed_tables[spec.ratio].pages[gathered.requests]))
        self.gather(sources, gathered.spans, gathered.longest, rows)
        indices, lengths = pack_gathered(
            batch.positions[tokens],
            plan.token_request[tokens],
            gathered.spans,
            gathered.requests.start,
            plan.window_indices[tokens],
            selection.topk_indices[tokens] if selection is not None else None,
            selection.derived.slots[tokens] if selection is not None else None,
            _PREFILL_COLUMNS,
        )
        arguments = {
            "q": q[tokens],
            "kv": rows[:, None],
            "indices": indices[:, None],
            "sm_scale": spec.scale,
            "d_v": spec.head_dim,
            "attn_sink": layer.prepared.sink,
            "topk_length": lengths,
        }
        function = self.library.flash_mla_sparse_fwd
        if self._takes_out["flash_mla_sparse_fwd"]:
            call(function, **arguments, out=out.data[tokens])
        else:
            _put(out, tokens, call(function, **arguments)[0])

    @staticmethod
    def gather(
        sources: Sequence[tuple[PagedCache, Tensor]], spans: Tensor, longest: tuple[int, int], out: Tensor
    ) -> None:
        """Copy rows into `out` bf16 `[N, D]`, as the prefill kernel takes them: of the window cache and, where there is
        a second of the `sources`, of the compressed cache, each with the block table int32 `[R, n]` of the requests of
        `spans`. `spans` and `longest` are those of `Gathered`. `dsv41 bench attention` times it too."""
        for kind, (cache, pages) in enumerate(sources):
            gather_rows(*flat(cache), pages, spans, bool(kind), longest[kind], out)

    @cached_property
    def _takes_out(self) -> dict[str, bool]:
        """Which functions write into a tensor that they are given; the builds on PyPI all bring a new one."""
        functions = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
        return {name: "out" in inspect.signature(getattr(self.library, name)).parameters for name in functions}


def _keys(spec: LayerSpec) -> int:
    """Rows that a token of a long request attends to."""
    return spec.window + (spec.topk if spec.ratio else 0)


def _put(out: AttnOutput, tokens: slice, result: Tensor) -> None:
    """`result` as the rows `tokens` of `out`; without a copy where these are all."""
    if len(result) == len(out.data):
        out.data = result
    else:
        out.data[tokens] = result
