"""The portable backend: the steps of the reference by Triton kernels, on any GPU of either vendor.

Every segment is written out here, one call a kernel, so that it can be read beside the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from dsv41.backends.portable.attention import attend, workspace_bytes
from dsv41.backends.portable.caches import flat
from dsv41.backends.portable.compress import compress_rows
from dsv41.backends.portable.dry_steps import DryLayers, Step
from dsv41.backends.portable.gemm import grouped_linear, linear
from dsv41.backends.portable.index_inputs import index_queries
from dsv41.backends.portable.inputs import norm_inputs, rotate_heads
from dsv41.backends.portable.insert import insert_rows
from dsv41.backends.portable.layouts import check_addressable
from dsv41.backends.portable.norm import rms_norm
from dsv41.backends.portable.output import empty_codes, finish_output
from dsv41.backends.portable.quantize import GROUP, quantize_mxfp8
from dsv41.backends.portable.scores import block_maxima, index_scores
from dsv41.backends.portable.selection import selection_slots
from dsv41.backends.portable.target import arch_of
from dsv41.backends.portable.topk import top_k
from dsv41.backends.portable.weights import Matrix, PortableWeights, types_of
from dsv41.backends.portable.workspace import Workspace
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.backends.reference.layouts import resolve_layouts
from dsv41.errors import BackendError, LayoutError
from dsv41.hal.device import Device
from dsv41.hal.layout import CacheLayouts
from dsv41.hal.types import (
    AttnInputs,
    AttnOutput,
    LayerCaches,
    LayerSpec,
    LayerState,
    Selection,
    StepPlan,
)

SCORE_BYTES = 256 << 20
"""Index scores that a step holds at a time; where one token's are more, that one token's."""
ATTENTION_BYTES = 256 << 20
"""The same of attention's weights."""
_MAX_HEADS = 128
_ROW = 128
"""Columns of a row of scores, or a multiple: rows begin at whole cache lines, and a kernel may write past the columns
that were asked for to the end of a page of as many keys."""
_ALIGNED = 16

Codes = tuple[Tensor, Tensor]
"""Rows as MXFP8: uint8 e4m3 codes `[N, K]` and scale bytes `[N, ceil(K / 32)]`."""


@dataclass(frozen=True)
class _Quantised:
    """`AttnInputs.extra`: the MXFP8 form of `of`, which `qr` was."""

    of: Tensor
    codes: Codes


class PortableBackend(ReferenceBackend):
    """Every op by Triton kernels, for whatever layouts are bound; on a CPU they run in Triton's interpreter.

    `fuses_rotation`: attention rotates the query, rotates its output back and, where the output projection wants MXFP8,
    quantises it, all in one launch. A subclass whose attention kernel does none of that sets it to False: then queries
    come rotated, and `o_proj` does the rest.
    """

    name = "portable"
    packed_kv_cache_dtype = "nvfp4_ds_mla"
    accepts_unnormed_unroped_query = True
    supports_graph_capture = True
    replays_window = True
    fuses_rotation: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.accepts_unnormed_unroped_query = cls.fuses_rotation

    def __init__(
        self,
        *,
        device: torch.device | str = "cpu",
        kv_cache_dtype: str = "auto",
        index_cache_dtype: str = "auto",
        facts: Device | None = None,
    ) -> None:
        super().__init__(device=device, kv_cache_dtype=kv_cache_dtype, index_cache_dtype=index_cache_dtype, facts=facts)
        self.workspace = Workspace(self.device)
        self.specs: dict[LayerSpec, dict[str, Any]] = {}
        """Of the layers whose weights were prepared here, and the types of these, as `DryLayers` takes them."""
        self._max_tokens, self._max_len = 1, 1

    @property
    def arch(self) -> str:
        """Such as "sm_90", "gfx942" or "cpu"."""
        return self.facts.arch if self.facts is not None else arch_of(self.device)

    # The contracts

    def get_padded_num_q_heads(self, num_heads: int) -> int:
        if not 1 <= num_heads <= _MAX_HEADS:
            raise BackendError(
                f"{self.name} was given {num_heads} query heads on a rank: expected 1 to {_MAX_HEADS}; use a larger "
                "tp_size, or the reference"
            )
        return num_heads

    def resolve_layouts(self, kv_cache_dtype: str, index_cache_dtype: str) -> tuple[str, str, CacheLayouts]:
        return resolve_layouts(kv_cache_dtype, index_cache_dtype, reader=self.name)

    def check_caches(self, spec: LayerSpec, caches: LayerCaches) -> None:
        for kind, dim in (("window", spec.head_dim), ("compressed", spec.head_dim), ("index", spec.index_dim)):
            if (cache := getattr(caches, kind)) is not None:
                check_addressable(f"the {kind} cache of {spec.name}", cache, dim, self.device)
        state = caches.compressor_state
        if state is not None and (state.device != self.device or state.dtype != torch.float32 or state.stride(-1) != 1):
            raise LayoutError(
                f"the compressor state of {spec.name} is {state.dtype} on {state.device} with strides "
                f"{list(state.stride())}: expected float32 on {self.device}, dense in its last dim; allocate it so"
            )

    def alloc_attn_out(self, inputs: AttnInputs, layer: LayerState) -> AttnOutput:
        spec, prepared = layer.spec, _prepared(layer)
        if self.fuses_rotation and spec.quantize_activations and prepared.wo_a.scale is not None:
            return empty_codes(inputs.q, spec.num_heads)
        return AttnOutput(torch.empty_like(inputs.q))

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        spec, caches = layer.spec, layer.caches
        assert caches is not None
        compressed: tuple[Any, ...] = (None, None, None, [])
        slots = None
        if selection is not None:
            assert caches.compressed is not None
            compressed, slots = flat(caches.compressed), selection.derived
        keys = (plan.window_indices.shape[1], slots.shape[1] if slots is not None else 0)
        need = _bounded(ATTENTION_BYTES, inputs.q.shape[0], workspace_bytes(1, spec.num_heads, *keys, inputs.q.dtype))
        attend(
            inputs.q,
            spec.num_heads,
            layer.weights.attn_sink,
            spec.scale,
            *flat(caches.window),
            plan.window_indices,
            *compressed,
            slots,
            inputs.positions,
            layer.cos_sin,
            self.fuses_rotation,
            self.fuses_rotation,
            self.workspace.take("attention", need, dtype=torch.uint8),
            out.data,
            out.scale,
        )
        out.rotated_back = self.fuses_rotation

    def o_proj(self, out: AttnOutput, layer: LayerState, positions: Tensor) -> Tensor:
        spec, prepared = layer.spec, _prepared(layer)
        tokens, groups, width = out.data.shape[0], spec.o_groups, spec.num_heads * spec.head_dim
        quantize = spec.quantize_activations and prepared.wo_a.scale is not None
        codes: Codes | None = (out.data, out.scale) if out.scale is not None else None
        if not out.rotated_back:
            finished = finish_output(out.data, spec.num_heads, positions, layer.cos_sin, quantize)
            out.rotated_back, codes = True, finished if quantize else None
        heads = out.data.flatten(1)[:, :width]
        if quantize and codes is None:
            codes = quantize_mxfp8(heads)
        data, scale = codes if codes is not None else (heads, None)
        grouped = data.view(tokens, groups, width // groups)
        scales = None if scale is None else scale.view(tokens, groups, width // groups // GROUP)
        return self.project_latent(self.project_groups(grouped, scales, layer, out.dtype or out.data.dtype), layer)

    # Hooks

    def prepare_weights(self, layer: LayerState) -> PortableWeights:
        super().prepare_weights(layer)
        self.specs[layer.spec] = types_of(layer.weights)
        return PortableWeights.of(layer.weights)

    def prepare_selection(self, selection: Selection, layer: LayerState, plan: StepPlan) -> Selection:
        rows, ratio = selection.topk_indices, layer.spec.ratio
        table = plan.batch.compressed_tables[ratio]
        slots = selection_slots(rows, plan.num_visible[ratio], plan.token_request, table.pages, table.page_size)
        return Selection(rows, selection.candidates, self.complete_selection(slots))

    def warmup(self, specs: Sequence[LayerSpec] | None = None) -> None:
        """Steps of one request of 1, 2, 4, ... tokens, up to those that were reserved, over zeros.

        In the layouts of this backend: caches of another page size need other builds.
        """
        sizes = sorted({min(1 << power, self._max_tokens) for power in range(self._max_tokens.bit_length() + 1)})
        known = self.specs if specs is None else {spec: self.specs.get(spec, {}) for spec in specs}
        for causal in (True, False):
            if chosen := {spec: types for spec, types in known.items() if spec.causal is causal}:
                scored = max((spec.topk + 1) * spec.ratio for spec in chosen)  # so long that something is left out
                longest = max(scored, sizes[-1], self._max_len)
                lengths = {size: {size, max(size, scored), longest} for size in sizes}
                with torch.device(self.device):
                    types = next(iter(chosen.values()))
                    layers = DryLayers(self, list(chosen), **types, max_len=longest, max_requests=1)
                layers.run([Step(1, size, held) for size in sizes for held in sorted(lengths[size])])

    def reserve(self, max_tokens: int, max_requests: int, max_len: int) -> int:
        self._max_tokens, self._max_len = max(self._max_tokens, max_tokens), max(self._max_len, max_len)
        for spec in self.specs:
            self.workspace.reserve("attention", self.attention_bytes(spec, max_tokens))
            if spec.owns_selection and not _chooses_all(spec, max_len // spec.ratio):
                columns = max_len // spec.ratio
                if spec.reads_candidates:
                    columns = max(columns, spec.candidate_blocks * spec.candidate_block_size)
                for name, width in (("scores", columns), ("blocks", _blocks(spec, columns))):
                    row = _padded(width) * torch.float32.itemsize
                    self.workspace.reserve(name, _bounded(SCORE_BYTES, max_tokens, row))
        return self.workspace.bytes

    def single_products(self, layer: LayerState) -> dict[str, Callable[[Tensor], Tensor]]:
        spec, prepared = layer.spec, _prepared(layer)

        def product(matrix: Matrix) -> Callable[[Tensor], Tensor]:
            return lambda x: self._product(x, matrix, _codes(x, spec, matrix))

        found: dict[str, Callable[[Tensor], Tensor]] = {
            "wq_a, wkv": partial(self.project_down, layer=layer),
            "wq_b": product(prepared.wq_b),
            "wo_a": lambda heads: self.project_groups(heads, None, layer, heads.dtype),
            "wo_b": partial(self.project_latent, layer=layer),
        }
        if prepared.index_wq_b is not None:
            found["indexer's wq_b"] = product(prepared.index_wq_b)
        return found

    # The segments

    def prepare_inputs(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> AttnInputs:
        hidden = hidden.contiguous()
        latent = self.insert_compressed(hidden, layer, plan) if layer.spec.owns_compressed else None
        return replace(self.project_inputs(hidden, layer, plan), latent=latent)

    def insert_window(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> None:
        spec, prepared, caches = layer.spec, _prepared(layer), layer.caches
        assert caches is not None
        hidden = hidden.contiguous()
        kv = self._product(hidden, prepared.wkv, _codes(hidden, spec, prepared.wkv))
        insert_rows(
            kv,
            layer.weights.kv_norm,
            spec.eps,
            plan.batch.positions,
            1,
            layer.cos_sin,
            plan.window_slots,
            *flat(caches.window),
        )

    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        spec = layer.spec
        if spec.owns_compressed:
            self._insert_index_keys(inputs, layer, plan)
        candidates = published.candidates if published is not None else None
        visible = plan.max_visible[spec.ratio]
        if _chooses_all(spec, visible):
            return _all_visible(spec, plan.num_visible[spec.ratio], candidates)

        queries = self._index_queries(inputs, layer)
        restriction = candidates if spec.reads_candidates and not spec.publishes_candidates else None
        columns = visible if restriction is None else restriction.shape[1] * spec.candidate_block_size
        dtype = self.score_dtype(inputs, layer, plan, restriction)
        found = [
            self._choose(queries, layer, plan, part, columns, restriction, dtype)
            for part in _parts(inputs.qr.shape[0], columns, dtype)
        ]
        topk, blocks = (None if part[0] is None else _joined(part) for part in zip(*found, strict=True))
        assert topk is not None
        return Selection(topk, blocks if spec.publishes_candidates else candidates)

    def index_scores(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan) -> Tensor:
        visible = plan.max_visible[layer.spec.ratio]
        scores = inputs.qr.new_zeros(inputs.qr.shape[0], visible)
        self._score(self._index_queries(inputs, layer), layer, plan, slice(None), None, scores)
        return scores

    # Parts of the segments that a vendor's library may take over

    def score_dtype(
        self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, restriction: Tensor | None
    ) -> torch.dtype:
        """The type that `_score` gives a step's scores in. `restriction`: the candidate blocks that are scored."""
        return inputs.qr.dtype

    def attention_bytes(self, spec: LayerSpec, tokens: int) -> int:
        """Bytes of workspace that attention asks for in steps of so many tokens of a layer."""
        # Activations in bf16 take half of what is reserved for float32.
        keys = (spec.window, spec.topk if spec.ratio else 0)
        return _bounded(ATTENTION_BYTES, tokens, workspace_bytes(1, spec.num_heads, *keys, torch.float32))

    def project_inputs(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> AttnInputs:
        """`prepare_inputs` but for the compressed cache: queries, and the latents that go into the window cache."""
        spec, weights, caches, positions = layer.spec, layer.weights, layer.caches, plan.batch.positions
        assert caches is not None
        quantize = spec.quantize_activations and _prepared(layer).wq_b.scale is not None
        qr, codes, scales, kv = norm_inputs(
            self.project_down(hidden, layer),
            weights.q_norm,
            weights.kv_norm,
            spec.eps,
            quantize,
            positions,
            layer.cos_sin,
            plan.window_slots,
            *flat(caches.window),
        )
        quantised = _Quantised(qr, (codes, scales)) if quantize else None
        q = self.project_queries(qr, quantised.codes if quantised is not None else None, layer, positions)
        return AttnInputs(hidden, qr, q, kv, positions, extra=quantised)

    def insert_compressed(self, hidden: Tensor, layer: LayerState, plan: StepPlan) -> Tensor:
        """The latent `[T, D]` of the group that each token closes, rotated into the compressed cache. It and
        `project_inputs` touch nothing of one another's."""
        spec, caches, batch, prepared = layer.spec, layer.caches, plan.batch, _prepared(layer)
        weights = layer.weights.compressor
        assert weights is not None and caches is not None and caches.compressed is not None
        into = (layer.cos_sin, plan.compressed_slots[spec.ratio], *flat(caches.compressed))
        latent: Tensor
        if weights.wgate is None:
            latent = rms_norm(self._product(hidden, prepared.compress[0]), weights.norm, spec.eps)
            insert_rows(latent, None, spec.eps, batch.positions, spec.ratio, *into)
            return latent
        assert caches.compressor_state is not None
        raw = torch.empty(hidden.shape[0], 2, spec.head_dim, dtype=torch.float32, device=hidden.device)
        self._products(hidden, prepared.compress, None, raw.flatten(1))
        latent = compress_rows(
            raw,
            caches.compressor_state,
            plan.token_request,
            batch.positions,
            batch.state_slots,
            batch.query_start_loc,
            batch.seq_lens,
            weights.norm,
            spec.eps,
            spec.ratio,
            hidden.dtype,
            *into,
        )
        return latent

    def project_down(self, hidden: Tensor, layer: LayerState) -> Tensor:
        """The products of `hidden` `[T, hidden]` with `wq_a` and `wkv`, side by side: `[T, q_rank + D]`."""
        spec, prepared = layer.spec, _prepared(layer)
        fused = hidden.new_empty(hidden.shape[0], spec.q_lora_rank + spec.head_dim)
        self._products(hidden, prepared.down, _codes(hidden, spec, *prepared.down), fused)
        return fused

    def project_queries(self, qr: Tensor, codes: Codes | None, layer: LayerState, positions: Tensor) -> Tensor:
        """The queries `[T, Hp, D]` of `qr` `[T, q_rank]` or its `codes`, rotated unless attention does that."""
        q = self._queries(qr, codes, layer)
        if not self.fuses_rotation:
            rotate_heads(q, layer.spec.num_heads, positions, layer.cos_sin)
        return q

    def project_groups(self, heads: Tensor, scale: Tensor | None, layer: LayerState, dtype: torch.dtype) -> Tensor:
        """The first product of the output projection: `heads` `[T, groups, in]`, or their MXFP8 codes with `scale`
        `[T, groups, in / 32]`, each group by its rows of `wo_a`: `[T, out]` in `dtype`."""
        wo_a = _prepared(layer).wo_a
        assert type(wo_a) is Matrix  # and not in an order that another backend's product wants
        latent = torch.empty(len(heads), wo_a.rows, dtype=dtype, device=heads.device)
        grouped_linear(heads, scale, wo_a.data, wo_a.scale, *wo_a.block, latent)
        return latent

    def project_latent(self, latent: Tensor, layer: LayerState) -> Tensor:
        """The last product of the output projection: `latent` `[T, in]` by `wo_b`, `[T, hidden]`."""
        prepared = _prepared(layer)
        return self._product(latent, prepared.wo_b, _codes(latent, layer.spec, prepared.wo_b))

    # Parts of the segments

    def _queries(self, qr: Tensor, codes: Codes | None, layer: LayerState) -> Tensor:
        """The queries `[T, Hp, D]`, not rotated, of `qr` `[T, q_rank]` or its `codes`."""
        spec, wq_b = layer.spec, _prepared(layer).wq_b
        assert type(wq_b) is Matrix  # and not in an order that another backend's attention wants
        q = qr.new_empty(qr.shape[0], spec.padded_heads, spec.head_dim)
        self._product(qr, wq_b, codes, q.flatten(1)[:, : spec.num_heads * spec.head_dim])
        return q

    def _insert_index_keys(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan) -> None:
        spec, weights, prepared, caches = layer.spec, layer.weights.indexer, _prepared(layer), layer.caches
        assert weights is not None and prepared.index_wk is not None and inputs.latent is not None
        assert caches is not None and caches.index is not None
        insert_rows(
            self._product(inputs.latent, prepared.index_wk),
            weights.k_norm,
            spec.eps,
            inputs.positions,
            spec.ratio,
            layer.cos_sin,
            plan.compressed_slots[spec.ratio],
            *flat(caches.index),
        )

    def _index_queries(self, inputs: AttnInputs, layer: LayerState) -> tuple[Tensor, Tensor]:
        """Queries `[T, Hi, Di]`, rounded like the keys, and head weights `[T, Hi]`."""
        spec, prepared, caches = layer.spec, _prepared(layer), layer.caches
        assert prepared.index_wq_b is not None and prepared.index_weights_proj is not None
        assert caches is not None and caches.index is not None
        # Whoever replaced qr has left its quantised form behind.
        known = isinstance(inputs.extra, _Quantised) and inputs.extra.of is inputs.qr
        codes = inputs.extra.codes if known else _codes(inputs.qr, spec, prepared.index_wq_b)
        query = self._product(inputs.qr, prepared.index_wq_b, codes)
        queries: tuple[Tensor, Tensor] = index_queries(
            query.view(-1, spec.index_heads, spec.index_dim),
            self._product(inputs.hidden, prepared.index_weights_proj),
            inputs.positions,
            layer.cos_sin,
            spec.index_dim**-0.5 * spec.index_heads**-0.5,
            flat(caches.index)[3],
        )
        return queries

    def _choose(
        self,
        queries: tuple[Tensor, Tensor],
        layer: LayerState,
        plan: StepPlan,
        part: slice,
        columns: int,
        candidates: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        """Top-k, and candidate blocks where the layer publishes some, of the tokens `part`. `columns` are the visible
        positions, or those of the `candidates` where these restrict the choice; scores are in `dtype`."""
        spec, visible = layer.spec, plan.num_visible[layer.spec.ratio][part]
        scores = self._scratch("scores", len(visible), columns, dtype)
        self._score(queries, layer, plan, part, candidates, scores)
        if candidates is not None:
            return top_k(scores, None, spec.topk, candidates[part], spec.candidate_block_size, visible), None
        topk = top_k(scores, visible, spec.topk, None, 1, None)
        if not spec.publishes_candidates:
            return topk, None
        best = self._scratch("blocks", len(visible), _blocks(spec, columns), dtype)
        block_maxima(scores, visible, spec.candidate_block_size, best)
        seen = (visible + spec.candidate_block_size - 1) // spec.candidate_block_size
        return topk, top_k(best, seen, spec.candidate_blocks, None, 1, None)

    def _score(
        self,
        queries: tuple[Tensor, Tensor],
        layer: LayerState,
        plan: StepPlan,
        part: slice,
        candidates: Tensor | None,
        out: Tensor,
    ) -> None:
        spec, caches = layer.spec, layer.caches
        assert caches is not None and caches.index is not None
        index_scores(
            queries[0][part],
            queries[1][part],
            plan.batch.compressed_tables[spec.ratio].pages,
            plan.token_request[part],
            plan.num_visible[spec.ratio][part],
            candidates[part] if candidates is not None else None,
            spec.candidate_block_size if candidates is not None else 0,
            *flat(caches.index),
            out,
            len(queries[0]),
        )

    def _product(self, x: Tensor, matrix: Matrix, codes: Codes | None = None, out: Tensor | None = None) -> Tensor:
        """`x` `[N, in]`, or its `codes` where the matrix is fp8, by a matrix: `[N, out]` in `x`'s dtype, or in that of
        `out`, which it is written to."""
        data, scale = codes if codes is not None and matrix.scale is not None else (x, None)
        out = x.new_empty(x.shape[0], matrix.rows) if out is None else out
        linear(data, scale, matrix.data, matrix.scale, *matrix.block, out)
        return out

    def _products(self, x: Tensor, matrices: Sequence[Matrix], codes: Codes | None, out: Tensor) -> None:
        """The products of `x` with several matrices, side by side in `out`."""
        column = 0
        for matrix in matrices:
            self._product(x, matrix, codes, out[:, column : column + matrix.rows])
            column += matrix.rows

    def _scratch(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """`[rows, columns]` of the workspace. A row has room for a multiple of 128 columns."""
        return self.workspace.take(name, rows, _padded(columns), dtype=dtype)[:, :columns]


def _prepared(layer: LayerState) -> PortableWeights:
    assert isinstance(layer.prepared, PortableWeights)
    return layer.prepared


def _codes(x: Tensor, spec: LayerSpec, *matrices: Matrix) -> Codes | None:
    """`x` as MXFP8 where the layer quantises activations and one of the matrices is fp8."""
    if spec.quantize_activations and any(matrix.scale is not None for matrix in matrices):
        codes: Codes = quantize_mxfp8(x)
        return codes
    return None


def _blocks(spec: LayerSpec, columns: int) -> int:
    return -(-columns // spec.candidate_block_size) if spec.publishes_candidates else 0


def _chooses_all(spec: LayerSpec, visible: int) -> bool:
    """Whether no token can see more rows, or blocks where these are chosen too, than are selected."""
    restricts = spec.publishes_candidates or spec.reads_candidates
    return visible <= spec.topk and (not restricts or -(-visible // spec.candidate_block_size) <= spec.candidate_blocks)


def _all_visible(spec: LayerSpec, num_visible: Tensor, candidates: Tensor | None) -> Selection:
    """Everything that each token sees, in as many columns as a choice has, so that what follows does the same for it,
    to the last bit."""
    row = torch.arange(spec.topk, device=num_visible.device)
    if spec.publishes_candidates:
        block = torch.arange(spec.candidate_blocks, device=num_visible.device)
        candidates = torch.where(block * spec.candidate_block_size < num_visible[:, None], block, -1)
    return Selection(torch.where(row < num_visible[:, None], row, -1), candidates)


def _parts(tokens: int, columns: int, dtype: torch.dtype) -> Iterator[slice]:
    """The tokens whose scores fit the workspace at a time; one part of no tokens where there are none."""
    step = max(1, SCORE_BYTES // (_padded(columns) * dtype.itemsize or 1))
    if step > _ALIGNED:  # or tensors of a part begin where the compiler builds another kernel for them
        step -= step % _ALIGNED
    for start in range(0, max(tokens, 1), step):
        yield slice(start, min(start + step, tokens))


def _bounded(limit: int, tokens: int, row: int) -> int:
    """Bytes for `tokens` rows of `row` bytes, or for as many as `limit` holds, but for one at least."""
    return min(max(tokens, 1) * row, max(row, limit))


def _padded(columns: int) -> int:
    return -(-columns // _ROW) * _ROW


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
