"""What crosses the border between the model, the contract and a backend.

Sizes in the shapes below: `T` tokens of a step (padding included), `R` requests, `H` local query heads, `Hp` those
after padding, `D` = head_dim (512). One convention holds everywhere: -1 marks an empty slot, page, index or
position; lengths are >= 0; page 0 is an ordinary page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv41.errors import InputError
from dsv41.hal.layout import PagedCache


@dataclass(frozen=True)
class Geometry:
    """Shapes of the whole model that a backend is judged by. The defaults are the release's."""

    num_heads: int = 64
    head_dim: int = 512
    rope_head_dim: int = 64
    window: int = 128
    topk: int = 512
    o_groups: int = 8
    index_heads: int = 32
    index_head_dim: int = 128
    ratios: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True)
class LayerSpec:
    """The static facts of one layer on one tensor-parallel rank.

    `ratio` names the compressed cache that the layer reads (0 = none). `kv_source` and `index_source` name the layers
    whose compressed rows and whose selection it uses; where they name the layer itself, it owns and publishes them.
    """

    layer_id: int
    name: str
    hidden_size: int
    q_lora_rank: int
    num_heads: int
    padded_heads: int
    head_dim: int
    rope_dim: int
    window: int
    ratio: int
    topk: int
    scale: float
    eps: float
    o_groups: int
    o_lora_rank: int
    index_heads: int
    index_dim: int
    kv_source: int | None = None
    index_source: int | None = None
    publishes_candidates: bool = False
    reads_candidates: bool = False
    candidate_blocks: int = 0
    candidate_block_size: int = 0
    causal: bool = True
    quantize_activations: bool = False
    """Round the inputs of fp8 projections to MXFP8 (groups of 32) first, as the release does."""

    @property
    def owns_compressed(self) -> bool:
        """Whether this layer has a compressor, a compressed cache and an index-key cache of its own."""
        return self.kv_source == self.layer_id

    @property
    def owns_selection(self) -> bool:
        """Whether this layer runs an indexer and publishes its top-k."""
        return self.index_source == self.layer_id


@dataclass(frozen=True)
class BlockScaledWeight:
    """An fp8 matrix with one power-of-two scale a block, as the checkpoint stores it.

    `data` `[out, in]` float8_e4m3fn; `scale` uint8 `[ceil(out / block[0]), ceil(in / block[1])]`, UE8M0 exponent
    bytes (value 2**(byte - 127), 255 is NaN). Bytes, never floats.
    """

    data: Tensor
    scale: Tensor
    block: tuple[int, int] = (32, 32)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def to(self, device: torch.device | str) -> BlockScaledWeight:
        return BlockScaledWeight(self.data.to(device), self.scale.to(device), self.block)


Weight = BlockScaledWeight | Tensor
"""A projection's matrix `[out, in]`: block-scaled fp8, or plain bf16 / fp32."""


@dataclass(frozen=True)
class CompressorWeights:
    """`wkv`, `wgate` `[D, hidden]` (no gate at ratio 1), `norm` `[D]`."""

    wkv: Tensor
    norm: Tensor
    wgate: Tensor | None = None


@dataclass(frozen=True)
class IndexerWeights:
    """`wq_b` `[index_heads * index_dim, q_rank]`, `weights_proj` `[index_heads, hidden]`; the key side, `wk`
    `[index_dim, D]` and `k_norm` `[index_dim]`, only on KV sources."""

    wq_b: Weight
    weights_proj: Tensor
    wk: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights on one rank, in checkpoint layout and under checkpoint names."""

    wq_a: Weight
    wq_b: Weight
    wkv: Weight
    wo_a: Weight
    wo_b: Weight
    q_norm: Tensor
    kv_norm: Tensor
    attn_sink: Tensor
    compressor: CompressorWeights | None = None
    indexer: IndexerWeights | None = None


@dataclass(frozen=True)
class LayerCaches:
    """The caches that a layer reads and writes.

    `compressed` and `index` of a layer that owns none are those of its KV source. `compressor_state` is float32
    `[slots, ring, 2, D]`: the raw value and gate rows of the last `ring` tokens of each request, at `position % ring`.
    """

    window: PagedCache
    compressed: PagedCache | None = None
    index: PagedCache | None = None
    compressor_state: Tensor | None = None


@dataclass
class LayerState:
    """One layer as a backend sees it. `cos_sin` float32 `[max_len, rope_dim]`: all cosines, then all sines.

    `weights` are in checkpoint layout, `prepared` is what the backend's `prepare_weights` made of them, and
    `prepared_by` the name of that backend (`dsv41.hal.weights.prepare` sets both).
    """

    spec: LayerSpec
    weights: LayerWeights
    cos_sin: Tensor
    prepared: Any = None
    prepared_by: str | None = None
    caches: LayerCaches | None = None


@dataclass(frozen=True)
class BlockTable:
    """Which physical page holds a request's logical page: int32 `[R, n]` on the device and on the host, -1 = none.

    `page_size` is in rows: a page of a window cache covers that many tokens, one of a compressed cache that many
    groups. The index keys of a layer use the table of its compressed rows.
    """

    pages: Tensor
    pages_cpu: Tensor
    page_size: int


@dataclass(frozen=True)
class ForwardBatch:
    """The requests of one step, built once a step and shared by all layers.

    Request r owns the tokens `query_start_loc[r] : query_start_loc[r + 1]` and holds `seq_lens[r]` tokens after the
    step. Tokens past `query_start_loc[R]`, and tokens at position -1, are padding. `state_slots` int64 `[R]` is each
    request's row in the compressor states. Every `*_cpu` tensor is the caller's host copy, so that nothing waits for
    the device.

    `window_starts` int64 `[R]`: queries see no window row before it, as where a prefix hit replays the last window.
    `shared_lens` int64 `[R]`: the compressed rows of tokens before it are there already and are not written. A batch
    that is not `causal` holds one draft block a request: its queries see the window before the block and all of it.
    `max_seq_len` bounds the length of every request for as long as what is captured with this batch will be replayed
    (None = the lengths of `seq_lens_cpu`), so that nothing is decided by the lengths of one step.
    """

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    positions: Tensor
    window_table: BlockTable
    compressed_tables: Mapping[int, BlockTable]
    state_slots: Tensor
    state_slots_cpu: Tensor
    window_starts: Tensor
    window_starts_cpu: Tensor
    shared_lens: Tensor
    shared_lens_cpu: Tensor
    causal: bool = True
    max_seq_len: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return self.positions.shape[0]

    @property
    def num_requests(self) -> int:
        return self.seq_lens_cpu.shape[0]

    @staticmethod
    def from_host(
        *,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        window_pages: Tensor,
        window_page_size: int,
        compressed_pages: Mapping[int, Tensor] | None = None,
        compressed_page_size: Mapping[int, int] | None = None,
        state_slots: Sequence[int] | None = None,
        window_starts: Sequence[int] | None = None,
        shared_lens: Sequence[int] | None = None,
        num_tokens: int | None = None,
        device: torch.device | str = "cpu",
        causal: bool = True,
        max_seq_len: int | None = None,
    ) -> ForwardBatch:
        """Build a batch from host lists and int32 host page tables, keyed by ratio for the compressed caches.

        `seq_lens` counts a request's tokens after the step. `num_tokens` pads the step to that many tokens.

        Raises InputError for lengths that disagree or tables of another shape or type; `AttentionStack.forward` checks
        the pages that they name.
        """
        lens = torch.tensor(list(query_lens), dtype=torch.int32)
        totals = torch.tensor(list(seq_lens), dtype=torch.int32)
        if lens.shape != totals.shape:
            raise InputError(
                f"seq_lens has {totals.numel()} entries for {lens.numel()} requests: expected as many as query_lens; "
                "give one each"
            )
        if bool((lens < 0).any()) or bool((totals < lens).any()):
            raise InputError(
                f"query_lens {lens.tolist()} with seq_lens {totals.tolist()}: expected 0 <= query_len <= seq_len; in "
                "seq_lens, count the tokens held after this step"
            )
        live = int(lens.sum())
        padded = live if num_tokens is None else num_tokens
        if padded < live:
            raise InputError(
                f"num_tokens is {num_tokens}: expected at least {live}, the sum of query_lens; give more, or None"
            )
        start = torch.zeros(len(lens) + 1, dtype=torch.int32)
        start[1:] = lens.cumsum(0)
        positions = torch.full((padded,), -1, dtype=torch.int64)
        request = torch.repeat_interleave(torch.arange(len(lens)), lens.long())
        positions[:live] = torch.arange(live) - start[:-1].long()[request] + (totals - lens).long()[request]

        def each(given: Sequence[int] | None, default: Tensor, what: str) -> Tensor:
            found = default if given is None else torch.tensor(list(given), dtype=torch.int64)
            if found.shape != lens.shape:
                raise InputError(
                    f"{what} has {found.numel()} entries for {lens.numel()} requests: expected as many as query_lens; "
                    "give one each"
                )
            return found

        none = torch.zeros(len(lens), dtype=torch.int64)
        slots = each(state_slots, torch.arange(len(lens)), "state_slots")
        first_rows = each(window_starts, none, "window_starts")
        shared = each(shared_lens, none, "shared_lens")
        compressed_pages = compressed_pages or {}
        sizes = compressed_page_size or {}
        if missing := sorted(set(compressed_pages) - set(sizes)):
            raise InputError(
                f"compressed_page_size lacks the ratios {missing}: expected all that compressed_pages has; add them"
            )

        def table(pages: Tensor, page_size: int, what: str) -> BlockTable:
            if pages.ndim != 2 or pages.shape[0] != len(lens) or pages.dtype != torch.int32:
                raise InputError(
                    f"{what} is {pages.dtype} {list(pages.shape)}: expected int32 [{len(lens)}, pages]; give a row for "
                    "each request, -1 where it has no page"
                )
            if page_size < 1:
                raise InputError(f"the page size of {what} is {page_size}: expected at least 1; give rows a page")
            return BlockTable(pages.to(device, non_blocking=True), pages, page_size)

        return ForwardBatch(
            query_start_loc=start.to(device, non_blocking=True),
            query_start_loc_cpu=start,
            seq_lens=totals.to(device, non_blocking=True),
            seq_lens_cpu=totals,
            positions=positions.to(device, non_blocking=True),
            window_table=table(window_pages, window_page_size, "window_pages"),
            compressed_tables={
                ratio: table(pages, sizes[ratio], f"compressed_pages[{ratio}]")
                for ratio, pages in compressed_pages.items()
            },
            state_slots=slots.to(device, non_blocking=True),
            state_slots_cpu=slots,
            window_starts=first_rows.to(device, non_blocking=True),
            window_starts_cpu=first_rows,
            shared_lens=shared.to(device, non_blocking=True),
            shared_lens_cpu=shared,
            causal=causal,
            max_seq_len=max_seq_len,
        )


@dataclass(frozen=True)
class StepPlan:
    """What a backend derives from a batch once a step. Slots are physical rows: page * page_size + offset.

    `token_request` int64 `[T]` (-1 = padding). `window_slots` int64 `[T]`: where each token's own latent goes.
    `window_indices` int64 `[T, n]`: slots of the rows that each query sees, -1 = none; n is the
    window, and the longest block more where the batch is not causal. Per ratio:
    `compressed_slots` int64 `[T]`, the row that a token's group closes (-1 where it closes none); `num_visible` int64
    `[T]`, how many compressed rows the query sees; `max_visible`, a bound on them that is known on the host: the
    largest, or what `batch.max_seq_len` allows.
    `extra` is the backend's own.
    """

    batch: ForwardBatch
    token_request: Tensor
    window_slots: Tensor
    window_indices: Tensor
    compressed_slots: Mapping[int, Tensor]
    num_visible: Mapping[int, Tensor]
    max_visible: Mapping[int, int]
    extra: Any = None


@dataclass(frozen=True)
class Selection:
    """What an indexer publishes for the layers that consume it.

    `topk_indices` int64 `[T, K]`: compressed positions within the token's own request (never slots), -1 = none, in any
    order, unique in a row. `candidates` int64 `[T, B]`: candidate blocks of `candidate_block_size` positions, -1 =
    none, or None where later indexers are not restricted. `derived` is what the backend's `prepare_selection` made.
    """

    topk_indices: Tensor
    candidates: Tensor | None = None
    derived: Any = None


@dataclass(frozen=True)
class AttnInputs:
    """What `prepare_inputs` hands on. All in the activation dtype unless said otherwise.

    `hidden` `[T, hidden]`; `qr` `[T, q_rank]` after its norm; `q` `[T, Hp, D]`, rotated unless the backend declares
    `accepts_unnormed_unroped_query`; `kv` `[T, D]` rotated, already in the window cache; `latent` `[T, D]` before any
    rotation, meaningful where `plan.compressed_slots` is not -1 (None on layers that own no compressor). `extra` is the
    backend's own.
    """

    hidden: Tensor
    qr: Tensor
    q: Tensor
    kv: Tensor
    positions: Tensor
    latent: Tensor | None = None
    extra: Any = None


@dataclass
class AttnOutput:
    """The attention output `[T, Hp, D]`, as the backend's `alloc_attn_out` made room for it.

    `rotated_back` says whether the inverse rotation is already in it, so that no one rotates twice. A quantised
    output carries its scales and the name of their layout: "mxfp8_row" is uint8 e4m3 codes (OCP) `[T, H * D]` of the
    live heads, with one UE8M0 byte for 32 of them, `[T, H * D / 32]`. `dtype` is the activation dtype where `data` does
    not say it.
    """

    data: Tensor
    rotated_back: bool = False
    scale: Tensor | None = None
    scale_layout: str | None = None
    dtype: torch.dtype | None = None
