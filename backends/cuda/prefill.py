"""Which tokens of a step take FlashMLA's prefill kernel, and which rows are gathered in bf16 for them.

The decode kernel reads records in place. The prefill kernel is faster, and takes bf16 rows that lie side by side, so
every row that some token may select is gathered first, once for all tokens of its request. What is taken is decided
from numbers that the host knows, and changes no result but in its last bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv41.hal.types import ForwardBatch

SECONDS_SAVED_A_KEY = 0.12e-6 / 640
"""By the prefill kernel, for each row that a token attends to. From docs/performance.md, one H200, 64 heads, 640 rows a
token: 0.34 microseconds a token by the decode kernel, at 512 as at 4096 tokens, against 0.20 to 0.24; other numbers of
rows are taken to be in proportion."""
SECONDS_A_ROW = 0.65e-9
"""Of gathering. Measured on one H200: 0.56 and 0.62 nanoseconds of 131,072 and 32,768 rows (1.4 of 4,096)."""
FEWEST_TOKENS = 512
"""Of one call of the prefill kernel: it was measured with no fewer."""
MOST_BYTES = 256 << 20
"""Of gathered rows at a time."""
ROW_BYTES = 512 * 2


def pays(tokens: int, rows: int, keys: int) -> bool:
    """Whether gathering `rows` costs less than what it saves `tokens` that attend to `keys` rows each. A single token
    has no one to share the rows with."""
    return tokens > 1 and rows * SECONDS_A_ROW < tokens * keys * SECONDS_SAVED_A_KEY


def most_rows(tokens: int, requests: int, max_len: int, window: int, ratio: int, keys: int) -> int:
    """A bound on the rows that a step of at most that size gathers at a time."""
    if tokens < FEWEST_TOKENS:
        return 0
    held = tokens + requests * (window - 1 + (max_len // ratio if ratio else 0))
    paid = int(tokens * keys * SECONDS_SAVED_A_KEY / SECONDS_A_ROW)
    return min(held, paid, MOST_BYTES // ROW_BYTES)


@dataclass(frozen=True)
class Gathered:
    """The rows of consecutive `requests`: all their window rows, then all their compressed rows, `rows` in sum.

    `spans` int64 `[R, 2, 3]`, for the window and for the compressed rows: the first row in the request's own counting,
    how many follow from there, and where the first lies among the gathered. `longest` are the largest counts.
    """

    requests: slice
    rows: int
    spans: Tensor
    longest: tuple[int, int]


@dataclass(frozen=True)
class Run:
    """Consecutive tokens that one call takes: of the prefill kernel where their rows are `gathered`."""

    tokens: slice
    gathered: Gathered | None = None


@dataclass(frozen=True)
class _Part:
    """One request's share of a step: its tokens, and the rows that they may see."""

    request: int
    tokens: int
    first_window: int
    window: int
    compressed: int

    @property
    def rows(self) -> int:
        return self.window + self.compressed


def all_full(batch: ForwardBatch, window: int, ratio: int, topk: int) -> bool:
    """Whether the host knows of every token that it sees `window` rows and, of `ratio`, `topk` compressed ones."""
    queries = batch.query_start_loc_cpu.diff()
    here = queries > 0
    if not batch.causal or batch.max_seq_len is not None or batch.num_tokens != int(queries.sum()) or not here.any():
        return False
    first = int((batch.seq_lens_cpu - queries)[here].min()) + 1  # tokens that the one sees which sees fewest
    starts = int(batch.window_starts_cpu[here].max())
    return first - starts >= window and (ratio == 0 or first // ratio >= topk)


def cut(batch: ForwardBatch, window: int, ratio: int, keys: int) -> list[Run]:
    """The runs of a step, in order, over all its tokens, for layers of `ratio` whose tokens attend to `keys` rows.

    All in one run of the decode kernel where the batch is a draft block, whose rows come and go, or bounded for a graph
    (`max_seq_len`), whose lengths the host does not know.
    """
    whole = Run(slice(0, batch.num_tokens))
    queries = batch.query_start_loc_cpu.diff()
    if not batch.causal or batch.max_seq_len is not None or int(queries[queries > 1].sum()) < FEWEST_TOKENS:
        return [whole]
    groups: list[tuple[bool, list[_Part]]] = []
    for gathers, parts in _groups(list(_parts(batch, window, ratio)), keys):
        if groups and not gathers and not groups[-1][0]:
            groups[-1][1].extend(parts)
        else:
            groups.append((gathers, parts))
    runs, start = [], 0
    for gathers, parts in groups:
        # The tokens behind the last request are padding, which any call can take along.
        stop = start + sum(part.tokens for part in parts) if parts is not groups[-1][1] else batch.num_tokens
        runs.append(Run(slice(start, stop), _gathered(parts, batch.positions.device) if gathers else None))
        start = stop
    return runs


def _parts(batch: ForwardBatch, window: int, ratio: int) -> Iterator[_Part]:
    """The requests that have tokens in this step."""
    queries = batch.query_start_loc_cpu.diff().tolist()
    given = zip(queries, batch.seq_lens_cpu.tolist(), batch.window_starts_cpu.tolist(), strict=True)
    for request, (tokens, held, window_start) in enumerate(given):
        if tokens:
            first = min(held, max(0, held - tokens - window + 1, window_start))
            yield _Part(request, tokens, first, held - first, held // ratio if ratio else 0)


def _groups(parts: Sequence[_Part], keys: int) -> Iterator[tuple[bool, list[_Part]]]:
    """Consecutive requests that pay, as many as the workspace holds; and those in between."""
    most = MOST_BYTES // ROW_BYTES
    group: list[_Part] = []
    rows = 0
    for part in parts:
        fits = part.rows <= most and pays(part.tokens, part.rows, keys)
        if group and (not fits or rows + part.rows > most):
            yield _enough(group), group
            group, rows = [], 0
        if fits:
            group.append(part)
            rows += part.rows
        else:
            yield False, [part]
    if group:
        yield _enough(group), group


def _enough(group: Sequence[_Part]) -> bool:
    return sum(part.tokens for part in group) >= FEWEST_TOKENS


def _gathered(parts: Sequence[_Part], device: torch.device) -> Gathered:
    first, stop = parts[0].request, parts[-1].request + 1
    spans = torch.zeros(stop - first, 2, 3, dtype=torch.int64)
    window_rows, compressed_rows = 0, sum(part.window for part in parts)
    for part in parts:
        spans[part.request - first] = torch.tensor(
            [[part.first_window, part.window, window_rows], [0, part.compressed, compressed_rows]]
        )
        window_rows += part.window
        compressed_rows += part.compressed
    return Gathered(
        requests=slice(first, stop),
        rows=compressed_rows,
        spans=spans.to(device, non_blocking=True),
        longest=(max(part.window for part in parts), max(part.compressed for part in parts)),
    )
