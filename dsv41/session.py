"""Requests in, hidden states out: page pools, block tables and steps over an `AttentionStack`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dsv41.attention import Tap
from dsv41.cache import WINDOW, PagePool, allocate_caches, cache_specs
from dsv41.errors import InputError, RequestError
from dsv41.hal.types import ForwardBatch
from dsv41.stack import AttentionStack

COMPRESSOR_RING = 2
"""Raw rows that a request's compressor keeps: as many as the largest group."""


@dataclass
class _Request:
    state_slot: int
    length: int = 0
    pages: dict[int, list[int]] = field(default_factory=dict)


class Session:
    """Serves several requests at once on one stack.

    `max_requests` and `max_tokens` bound what can be held at a time; `page_size` (rows) replaces that of the backend's
    layouts. Prefill chunks, decode tokens and several tokens a decode step may be mixed in one `step`.
    """

    def __init__(
        self, stack: AttentionStack, *, max_requests: int = 8, max_tokens: int = 8192, page_size: int | None = None
    ) -> None:
        for name, value in (("max_requests", max_requests), ("max_tokens", max_tokens), ("page_size", page_size)):
            if value is not None and (type(value) is not int or value < 1):
                raise InputError(f"{name} is {value!r}: expected an integer of at least 1; give one")
        self.stack = stack
        layouts = stack.backend.layouts
        if page_size is not None:
            layouts = layouts.with_page_size(window=page_size, compressed=page_size)
        self.cache_specs = cache_specs(stack.specs, layouts)
        self._page_size = {cache.pool: cache.layout.page_size for cache in self.cache_specs}
        # One page more a request than its tokens fill, so that max_tokens fit however they are spread.
        num_pages = {
            pool: -(-max_tokens // (size * max(pool, 1))) + max_requests for pool, size in self._page_size.items()
        }
        self.pools = {
            pool: PagePool("window" if pool == WINDOW else f"compressed (ratio {pool})", count)
            for pool, count in num_pages.items()
        }
        self.caches = allocate_caches(
            stack.specs,
            layouts,
            num_pages,
            state_slots=max_requests,
            ring=COMPRESSOR_RING,
            device=stack.backend.device,
        )
        stack.bind(self.caches)
        self._requests: dict[int, _Request] = {}
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._next_id = 0

    def add_request(self) -> int:
        """A new, empty request; returns its id, which is never used again. Raises RequestError when all are taken."""
        if not self._free_slots:
            raise RequestError(
                f"this session holds {len(self._requests)} requests: expected fewer than its max_requests for another; "
                "free one, or make the session with more max_requests"
            )
        request, self._next_id = self._next_id, self._next_id + 1
        self._requests[request] = _Request(self._free_slots.pop(), pages={pool: [] for pool in self.pools})
        return request

    def length(self, request: int) -> int:
        """Tokens that the request holds."""
        return self._find(request).length

    def free(self, request: int) -> None:
        """Give back the request's pages. Raises RequestError for a request that is unknown or freed."""
        known = self._find(request)
        for pool, pages in known.pages.items():
            self.pools[pool].give_back(pages)
        self._free_slots.append(known.state_slot)
        del self._requests[request]

    def prefill(self, request: int, hidden: Tensor, *, chunk: int = 512) -> Tensor:
        """`step` over one request in chunks of at most `chunk` tokens; the outputs in one tensor."""
        if chunk < 1:
            raise InputError(f"chunk is {chunk}: expected at least 1; give the tokens of a step")
        parts = [self.step({request: part})[request] for part in hidden.split(chunk, dim=-2)]
        return torch.cat(parts, dim=-2)

    def step(
        self,
        inputs: Mapping[int, Tensor],
        *,
        positions: Mapping[int, Sequence[int] | Tensor] | None = None,
        tap: Tap | None = None,
    ) -> dict[int, Tensor]:
        """Append tokens to requests and return what the stack makes of them, by request.

        Each input is `[n, hidden_size]`, n >= 0, or `[layers, n, hidden_size]` for an input for each layer (the same
        form for all); the result has the same shape. `positions`, where given, must continue the request. `tap` looks
        at the segment borders of every layer.

        Raises InputError, RequestError or PoolExhausted, and then nothing has changed.
        """
        requests = [self._find(request) for request in inputs]
        self._check_inputs(inputs)
        counts = [hidden.shape[-2] for hidden in inputs.values()]
        for request, given in (positions or {}).items():
            self._check_positions(request, given, inputs)
        self._check_lengths(inputs)

        lengths = [r.length + n for r, n in zip(requests, counts, strict=True)]
        # A step that dies half-way has written rows that no one reads, but has also turned the compressors' rings.
        states = [c.compressor_state for c in self.caches.values() if c.compressor_state is not None]
        slots = torch.tensor([r.state_slot for r in requests], dtype=torch.int64, device=self.stack.backend.device)
        before = [state[slots] for state in states]
        taken = self._take_pages(requests, lengths)
        try:
            batch = self._batch(requests, counts, lengths)
            if self.stack.caches is not self.caches:
                self.stack.bind(self.caches)  # another session has used this stack since
            hidden = torch.cat(list(inputs.values()), dim=-2) if inputs else self._no_tokens()
            output = self.stack.forward(hidden, batch, tap=tap)
        except BaseException:
            for state, rows in zip(states, before, strict=True):
                state[slots] = rows
            self._untake(requests, taken)
            raise
        for known, length in zip(requests, lengths, strict=True):
            known.length = length
        starts = accumulate(counts, initial=0)
        return {
            request: output[..., start:stop, :] for request, (start, stop) in zip(inputs, pairwise(starts), strict=True)
        }

    def _find(self, request: int) -> _Request:
        if request not in self._requests:
            was = "was freed" if isinstance(request, int) and 0 <= request < self._next_id else "is unknown"
            raise RequestError(
                f"request {request!r} {was}: expected one of this session, {sorted(self._requests)}; `add_request` "
                "makes a new one"
            )
        return self._requests[request]

    def _no_tokens(self) -> Tensor:
        return torch.zeros(0, self.stack.config.hidden_size, dtype=self.stack.dtype, device=self.stack.backend.device)

    def _check_inputs(self, inputs: Mapping[int, Tensor]) -> None:
        width, layers, device = self.stack.config.hidden_size, len(self.stack.layers), self.stack.backend.device
        for request, hidden in inputs.items():
            if hidden.ndim not in (2, 3) or hidden.shape[-1] != width or hidden.shape[:-2] not in ((), (layers,)):
                raise InputError(
                    f"hidden states of request {request} have shape {list(hidden.shape)}: expected [tokens, {width}] "
                    f"or [{layers}, tokens, {width}], an input for each layer; give one of these"
                )
            if hidden.dtype != self.stack.dtype or hidden.device != device:
                raise InputError(
                    f"hidden states of request {request} are {hidden.dtype} on {hidden.device}: expected "
                    f"{self.stack.dtype} on {device}; convert them with .to({device.type!r}, {self.stack.dtype})"
                )
        if len({hidden.ndim for hidden in inputs.values()}) > 1:
            raise InputError(
                "some hidden states are [tokens, hidden], some [layers, tokens, hidden]: expected one form in a step; "
                "use the same for all requests"
            )

    def _check_positions(self, request: int, given: Sequence[int] | Tensor, inputs: Mapping[int, Tensor]) -> None:
        if request not in inputs:
            raise InputError(
                f"positions are given for request {request}: expected those of {list(inputs)}, which this step has "
                "hidden states for; leave the others out"
            )
        start, count = self._find(request).length, inputs[request].shape[-2]
        found = given.tolist() if isinstance(given, Tensor) else list(given)
        if found != list(range(start, start + count)):
            shown = f"{found[:4]}...{found[-1]}" if len(found) > 5 else f"{found}"
            raise InputError(
                f"positions of request {request} are {shown}: expected {count} from {start} on, since it holds {start} "
                "tokens; a gap or an overlap would leave rows unwritten, give the positions that follow, or none"
            )

    def _check_lengths(self, inputs: Mapping[int, Tensor]) -> None:
        limit = self.stack.max_len
        for request, hidden in inputs.items():
            length = self._find(request).length
            if length + hidden.shape[-2] > limit:
                raise InputError(
                    f"request {request} holds {length} tokens and is given {hidden.shape[-2]} more: expected at most "
                    f"{limit} in all, the max_len of the stack; give fewer, or build it with a larger max_len"
                )

    def _take_pages(self, requests: Sequence[_Request], lengths: Sequence[int]) -> list[dict[int, int]]:
        """Extend every request's pages to its new length, or none; returns how many each took from each pool."""
        wanted = [
            {
                pool: -(-(length // max(pool, 1)) // self._page_size[pool]) - len(request.pages[pool])
                for pool in self.pools
            }
            for request, length in zip(requests, lengths, strict=True)
        ]
        for pool in self.pools:
            self.pools[pool].check(sum(counts[pool] for counts in wanted))
        for request, counts in zip(requests, wanted, strict=True):
            for pool, count in counts.items():
                request.pages[pool] += self.pools[pool].take(count)
        return wanted

    def _untake(self, requests: Sequence[_Request], taken: Sequence[dict[int, int]]) -> None:
        for request, counts in zip(requests, taken, strict=True):
            for pool, count in counts.items():
                keep = len(request.pages[pool]) - count
                self.pools[pool].give_back(request.pages[pool][keep:])
                del request.pages[pool][keep:]

    def _batch(self, requests: Sequence[_Request], counts: Sequence[int], lengths: Sequence[int]) -> ForwardBatch:
        tables = {pool: self._table([request.pages[pool] for request in requests]) for pool in self.pools}
        return ForwardBatch.from_host(
            query_lens=counts,
            seq_lens=lengths,
            window_pages=tables[WINDOW],
            window_page_size=self._page_size[WINDOW],
            compressed_pages={pool: table for pool, table in tables.items() if pool != WINDOW},
            compressed_page_size={pool: size for pool, size in self._page_size.items() if pool != WINDOW},
            state_slots=[request.state_slot for request in requests],
            device=self.stack.backend.device,
        )

    @staticmethod
    def _table(pages: Sequence[Sequence[int]]) -> Tensor:
        width = max((len(row) for row in pages), default=0)
        table = torch.full((len(pages), width), -1, dtype=torch.int32)
        for row, held in zip(table, pages, strict=True):
            row[: len(held)] = torch.tensor(held, dtype=torch.int32)
        return table
