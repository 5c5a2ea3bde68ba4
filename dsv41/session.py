"""Requests in, hidden states out: page pools, block tables and steps over an `AttentionStack`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from dsv41.attention import Tap
from dsv41.cache import WINDOW, allocate_caches, cache_specs
from dsv41.errors import BackendError, InputError, RequestError
from dsv41.graph import CapturedStep
from dsv41.hal.types import ForwardBatch
from dsv41.pages import PagePool, Pages, PageTables
from dsv41.stack import AttentionStack
from dsv41.transfer import ExportReport, ImportReport, export_request, import_request


@dataclass
class Request:
    """What a session keeps of one request.

    `length` tokens are held; of the window, the rows from `window_start` on; in the compressors' rings, the raw rows of
    the tokens from `raw_start` on.
    """

    state_slot: int
    pages: PageTables
    length: int = 0
    window_start: int = 0
    raw_start: int = 0


class Session:
    """Serves several requests at once on one stack.

    `max_requests` and `max_tokens` bound what can be held at a time, and `max_step_tokens` (default 2048, at most
    `max_tokens`) what one step may add, since window memory is sized by it and not by `max_tokens`. `max_draft` is how
    far a request can be cut back from the longest that it was. `page_size` (rows) replaces that of the backend's
    layouts. Prefill chunks, decode tokens and several tokens a decode step may be mixed in one `step`.
    """

    def __init__(
        self,
        stack: AttentionStack,
        *,
        max_requests: int = 8,
        max_tokens: int = 8192,
        max_step_tokens: int | None = None,
        max_draft: int = 8,
        page_size: int | None = None,
    ) -> None:
        for name, value, least in (
            ("max_requests", max_requests, 1),
            ("max_tokens", max_tokens, 1),
            ("max_step_tokens", max_step_tokens, 1),
            ("max_draft", max_draft, 0),
            ("page_size", page_size, 1),
        ):
            if value is not None and (type(value) is not int or value < least):
                raise InputError(f"{name} is {value!r}: expected an integer of at least {least}; give one")
        self.stack, self.max_draft = stack, max_draft
        self.max_step_tokens = min(max_step_tokens or 2048, max_tokens)
        self.ring = max_draft + 2
        """Raw rows that a compressor keeps of each request: those a cut may reopen a group with."""
        layers = [spec.layer_id for spec in stack.specs]
        self.cache_specs = cache_specs(stack.config, stack.backend, layers, page_size=page_size)
        page_sizes = {cache.pool: cache.layout.page_size for cache in self.cache_specs}
        num_pages = {pool: self._num_pages(pool, page_sizes[pool], max_requests, max_tokens) for pool in page_sizes}
        self.caches = allocate_caches(
            self.cache_specs, num_pages, state_slots=max_requests, ring=self.ring, device=stack.backend.device
        )
        self.pages = Pages(
            pools={
                pool: PagePool("window" if pool == WINDOW else f"compressed (ratio {pool})", count)
                for pool, count in num_pages.items()
            },
            page_size=page_sizes,
            caches={
                pool: [getattr(self.caches[c.layer_id], c.kind) for c in self.cache_specs if c.pool == pool]
                for pool in page_sizes
            },
        )
        stack.bind(self.caches)
        rows = {pool: count * page_sizes[pool] for pool, count in num_pages.items() if pool != WINDOW}
        self.max_seq_len = min([stack.max_len, *(count * pool for pool, count in rows.items())])
        """Tokens of a request past which there is no page for it, or no position."""
        stack.backend.reserve(self.max_step_tokens, max_requests, self.max_seq_len)
        self.max_requests = max_requests
        self._captured: list[CapturedStep] = []
        self._states = [c.compressor_state for c in self.caches.values() if c.compressor_state is not None]
        self._requests: dict[int, Request] = {}
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._next_id = 0

    def _num_pages(self, pool: int, size: int, max_requests: int, max_tokens: int) -> int:
        """Pages that hold `max_tokens` however they are spread. Each request may leave one page partly filled, and in a
        step every two may copy one page that they share, which is free only after it."""
        spare = max_requests + max_requests // 2
        if pool != WINDOW:
            return -(-max_tokens // (size * pool)) + spare
        rows = self.stack.config.sliding_window + self.max_draft
        kept = min(-(-rows // size) + 1, -(-max_tokens // size))
        return max_requests * kept + -(-self.max_step_tokens // size) + spare

    def add_request(self) -> int:
        """A new, empty request; returns its id, which is never used again. Raises RequestError when all are taken."""
        if not self._free_slots:
            raise RequestError(
                f"this session holds {len(self._requests)} requests: expected fewer than its max_requests for another; "
                "free one, or make the session with more max_requests"
            )
        request, self._next_id = self._next_id, self._next_id + 1
        self._requests[request] = Request(self._free_slots.pop(), self.pages.new_tables())
        return request

    def length(self, request: int) -> int:
        """Tokens that the request holds."""
        return self.find(request).length

    def free(self, request: int) -> None:
        """Give back the request's pages. Raises RequestError for a request that is unknown or freed."""
        known = self.find(request)
        self.pages.free(known.pages)
        self._free_slots.append(known.state_slot)
        del self._requests[request]

    def find(self, request: int) -> Request:
        """What is kept of a request. Raises RequestError for one that is unknown or freed."""
        if request not in self._requests:
            was = "was freed" if isinstance(request, int) and 0 <= request < self._next_id else "is unknown"
            raise RequestError(
                f"request {request!r} {was}: expected one of this session, {sorted(self._requests)}; `add_request` "
                "makes a new one"
            )
        return self._requests[request]

    # Steps

    def prefill(self, request: int, hidden: Tensor, *, chunk: int = 512) -> Tensor:
        """`step` over one request in chunks of at most `chunk` tokens; the outputs in one tensor.

        Raises as `step` does; a prompt too long for the stack or the pools is refused before its first chunk.
        """
        if type(chunk) is not int or chunk < 1:
            raise InputError(f"chunk is {chunk!r}: expected an integer of at least 1; give the tokens of a step")
        known = self.find(request)
        self._check_inputs({request: hidden}, in_one_step=False)
        for pool, size in self.pages.page_size.items():
            if pool != WINDOW:
                pages = -(-((known.length + hidden.shape[-2]) // pool) // size)
                self.pages.pools[pool].check(pages - self.pages.held(known.pages, pool))
        parts = [self.step({request: part})[request] for part in hidden.split(chunk, dim=-2)]
        return torch.cat(parts, dim=-2)

    def step(
        self,
        inputs: Mapping[int, Tensor],
        *,
        positions: Mapping[int, Sequence[int] | Tensor] | None = None,
        pad_to: int | None = None,
        tap: Tap | None = None,
    ) -> dict[int, Tensor]:
        """Append tokens to requests and return what the stack makes of them, by request.

        Each input is `[n, hidden_size]`, n >= 0, or `[layers, n, hidden_size]` for an input for each layer (the same
        form for all); the result has the same shape. `positions`, where given, must continue the request. `pad_to`
        pads the step to that many tokens, as a captured graph needs. `tap` looks at the segment borders of every layer.

        Raises InputError, RequestError or PoolExhausted, and then nothing has changed.
        """
        for request, given in (positions or {}).items():
            self._check_positions(request, given, inputs)

        def run(hidden: Tensor, batch: ForwardBatch) -> Tensor:
            for captured in self._captured if tap is None else ():
                if captured.is_valid and captured.misfit(hidden, batch) is None:
                    return captured.replay(hidden, batch)
            return self.stack.forward(hidden, batch, tap=tap)

        return self._advance(inputs, run, pad_to=pad_to)

    def capture(self, num_tokens: int, *, num_requests: int | None = None, layer_inputs: bool = False) -> CapturedStep:
        """Capture a step of up to `num_tokens` tokens as a graph. From now on every `step` that fits into one, and has
        no tap, is a replay of the smallest that it fits into: of at most `num_requests` requests (None = as many as
        tokens, or as this session takes), with inputs in the form that `layer_inputs` says.

        Raises as `CapturedStep` does. What was captured is out of use once the stack has woken up; capture it anew.
        """
        requests = min(num_tokens, self.max_requests) if num_requests is None else num_requests
        if self.stack.caches is not self.caches:
            self.stack.bind(self.caches)
        step = CapturedStep(
            self.stack,
            num_tokens=num_tokens,
            num_requests=requests,
            max_seq_len=self.max_seq_len,
            layer_inputs=layer_inputs,
        )
        kept = [known for known in self._captured if known.is_valid]
        self._captured = sorted([*kept, step], key=lambda known: known.num_tokens)
        return step

    def insert_window(self, inputs: Mapping[int, Tensor]) -> None:
        """Append tokens to requests of draft layers, writing their window rows and asking nothing.

        `inputs` are projected from the target's hidden states, as for `step`. Raises as `step` does.
        """

        self._advance(inputs, self._insert)

    def _insert(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        self.stack.insert_window(hidden, batch)
        return hidden

    def draft(self, inputs: Mapping[int, Tensor], *, pad_to: int | None = None) -> dict[int, Tensor]:
        """Run one block of each request through draft layers: every query sees the window before the block and all of
        the block. The requests stay as they are: the block's rows and the pages for them are for this call only.

        Raises as `step` does.
        """
        return self._advance(inputs, self.stack.forward, pad_to=pad_to, causal=False)

    def _advance(
        self,
        inputs: Mapping[int, Tensor],
        run: Callable[[Tensor, ForwardBatch], Tensor],
        *,
        pad_to: int | None = None,
        causal: bool = True,
    ) -> dict[int, Tensor]:
        requests = [self.find(request) for request in inputs]
        self._check_inputs(inputs)
        counts = [hidden.shape[-2] for hidden in inputs.values()]
        if pad_to is not None and (type(pad_to) is not int or not sum(counts) <= pad_to <= self.max_step_tokens):
            raise InputError(
                f"pad_to is {pad_to!r}: expected {sum(counts)}, the tokens of the step, to {self.max_step_tokens}, "
                "this session's max_step_tokens; give one of these, or None"
            )
        lengths = [known.length + count for known, count in zip(requests, counts, strict=True)]
        output = self._run(requests, counts, lengths, inputs, run, pad_to=pad_to, causal=causal)
        if causal:
            for known, length in zip(requests, lengths, strict=True):
                known.length, known.raw_start = length, max(known.raw_start, length - self.ring)
                self._forget_rows(known)
        starts = accumulate(counts, initial=0)
        return {
            request: output[..., start:stop, :] for request, (start, stop) in zip(inputs, pairwise(starts), strict=True)
        }

    def _run(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        lengths: Sequence[int],
        inputs: Mapping[int, Tensor],
        run: Callable[[Tensor, ForwardBatch], Tensor],
        *,
        pad_to: int | None = None,
        causal: bool = True,
        shared: int = 0,
    ) -> Tensor:
        """One step with pages of their own for all rows that it writes; a step that dies changes nothing."""
        first = [length - count for length, count in zip(lengths, counts, strict=True)]
        # A step that dies half-way has written rows that no one reads, but has also turned the compressors' rings.
        slots = [known.state_slot for known in requests]
        before = [state[slots] for state in self._states]
        writing = self.pages.make_writable(
            (known.pages, pool, start // max(pool, 1), length // max(pool, 1))
            for known, start, length in zip(requests, first, lengths, strict=True)
            for pool in self.pages.pools
            if pool == WINDOW or start >= shared
        )
        try:
            batch = self._batch(requests, counts, lengths, pad_to, causal, shared)
            if self.stack.caches is not self.caches:
                self.stack.bind(self.caches)  # another session has used this stack since
            output = run(self._join(inputs, batch.num_tokens), batch)
        except BaseException:
            for state, rows in zip(self._states, before, strict=True):
                state[slots] = rows
            writing.undo()
            raise
        if causal:
            writing.commit()
        else:
            writing.undo()  # no one reads the rows of a draft block after it
        return output

    def _join(self, inputs: Mapping[int, Tensor], tokens: int) -> Tensor:
        config, device = self.stack.config, self.stack.backend.device
        hidden = torch.cat(list(inputs.values()), dim=-2) if inputs else None
        if hidden is None:
            hidden = torch.zeros(0, config.hidden_size, dtype=self.stack.dtype, device=device)
        return torch.nn.functional.pad(hidden, (0, 0, 0, tokens - hidden.shape[-2]))

    def _forget_rows(self, known: Request) -> None:
        """Give back window pages that neither the next token nor one after a cut can see."""
        first = known.length - self.stack.config.sliding_window - self.max_draft
        if first > known.window_start:
            self.pages.keep_rows(known.pages, WINDOW, first, known.length)
            known.window_start = first

    # Cutting back and sharing

    def truncate(self, request: int, length: int) -> None:
        """Cut a request back to its first `length` tokens; the rows behind become unwritten.

        Always possible down to `max_draft` tokens fewer than the request ever had. Raises RequestError where the window
        rows or the open group of a compressor are no longer held.
        """
        known = self.find(request)
        if type(length) is not int or not 0 <= length <= known.length:
            raise RequestError(
                f"request {request} cannot be cut to {length!r} tokens: expected 0 to {known.length}, what it holds; "
                "give a length to keep"
            )
        self._check_cut(request, known, length)
        for pool in self.pages.pools:
            first = known.window_start if pool == WINDOW else 0
            self.pages.keep_rows(known.pages, pool, first, length // max(pool, 1))
        known.length = length
        known.window_start, known.raw_start = min(known.window_start, length), min(known.raw_start, length)

    def fork(self, request: int, length: int | None = None, *, replay: Tensor | None = None) -> int:
        """A new request that begins with the first `length` tokens of another (None = all of them).

        Pages are shared, and copied where one of the two writes into them. Where the window rows before `length` are
        no longer held, give in `replay` the hidden states of the last tokens before it, as for `step`: at least the
        window's. They are replayed through the window caches, and no compressed row is rewritten. With an input for
        each layer, the result is exact. In one residual stream the first replayed tokens see less than they did, so it
        is near, the nearer the more is replayed, and exact from as many windows as there are layers.

        Raises RequestError where the state is not held, BackendError where the backend cannot replay, PoolExhausted or
        InputError; then nothing has changed.
        """
        source = self.find(request)
        length = source.length if length is None else length
        if type(length) is not int or not 0 <= length <= source.length:
            raise RequestError(
                f"request {request} cannot be shared up to {length!r} tokens: expected 0 to {source.length}, what it "
                "holds; give a shorter prefix"
            )
        if replay is not None:
            self._check_replay(request, source, length, replay)
        self._check_cut(request, source, length, window=replay is None)
        child = self.add_request()
        known = self._requests[child]
        for pool in self.pages.pools:
            if pool != WINDOW or replay is None:
                first = source.window_start if pool == WINDOW else 0
                known.pages.tables[pool] = self.pages.share(source.pages, pool, length // max(pool, 1), first)
        for state in self._states:
            state[known.state_slot] = state[source.state_slot]
        known.window_start, known.raw_start = min(source.window_start, length), min(source.raw_start, length)
        if replay is not None:
            try:
                self._replay(known, length, replay)
            except BaseException:
                self.free(child)
                raise
        known.length = length
        return child

    def _replay(self, known: Request, length: int, hidden: Tensor) -> None:
        run = self.stack.forward if self.stack.specs[0].causal else self._insert
        known.length = known.window_start = length - hidden.shape[-2]
        known.raw_start = max(known.length, length - self.ring)
        for part in hidden.split(self.max_step_tokens, dim=-2):
            last = known.length + part.shape[-2]
            self._run([known], [part.shape[-2]], [last], {0: part}, run, shared=length)
            known.length = last
            self._forget_rows(known)

    def _check_replay(self, request: int, source: Request, length: int, replay: Tensor) -> None:
        backend, window = self.stack.backend, self.stack.config.sliding_window
        if not backend.replays_window:
            raise BackendError(
                f"backend {backend.name!r} cannot replay a prefix: expected one that clamps its window "
                "(`replays_window`); keep the window rows of prefixes, or use another backend"
            )
        self._check_hidden(request, replay)
        if not min(length, window) <= replay.shape[-2] <= length:
            raise InputError(
                f"replay has {replay.shape[-2]} tokens: expected {min(length, window)}, the window before token "
                f"{length}, to {length}; give the hidden states of the last tokens of the prefix"
            )
        if length % 2 and any(pool > 1 for pool in self.pages.pools):
            raise RequestError(
                f"a prefix of {length} tokens of request {request} leaves a compressor's group open: expected an even "
                "length; `prefix_hit` gives those that can be shared"
            )

    def _check_cut(self, request: int, known: Request, length: int, *, window: bool = True) -> None:
        """Whether a request of `length` tokens could go on from what is held of this one."""
        if window and length and max(0, length - self.stack.config.sliding_window) < known.window_start:
            raise RequestError(
                f"request {request} has no window rows before {known.window_start}: expected them from "
                f"{max(0, length - self.stack.config.sliding_window)} on for {length} tokens; cut back less (max_draft "
                f"is {self.max_draft}), or fork with replay"
            )
        opens_group = any(length % pool for pool in self.pages.pools if pool > 1)
        if opens_group and length - 1 < known.raw_start:
            raise RequestError(
                f"request {request} no longer has the raw row of token {length - 1}, which opens a group: expected "
                f"{known.raw_start} or later; cut to a multiple of the ratio, or make the session with a "
                "larger max_draft"
            )

    # Moving

    def export_request(self, request: int, path: str | Path) -> ExportReport:
        """Write everything that is held of a request to a safetensors file; the request stays.

        The bytes depend on what the request holds and on nothing else. Raises RequestError for a request that is
        unknown or freed, TransferError where the file cannot be written.
        """
        return export_request(self, request, path)

    def import_request(self, *paths: str | Path, nan: str = "refuse") -> ImportReport:
        """A new request out of a file of `export_request`, in the layouts of this session, ready for its next token.

        Several files, written by stages that had some of the layers each, make one request; layers that this session
        lacks are left out. Files are not trusted: everything is checked, and NaN or infinite numbers are refused, or
        with `nan="scrub"` their groups zeroed and counted. That the two models have the same weights cannot be seen.

        Raises TransferError for a file that is broken, or of another format or model, RequestError where all requests
        are taken and PoolExhausted where pages are short; nothing has been imported then.
        """
        return import_request(self, paths, nan=nan)

    # What a step is given

    def _check_hidden(self, request: int, hidden: Tensor) -> None:
        width, layers, device = self.stack.config.hidden_size, len(self.stack.layers), self.stack.backend.device
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

    def _check_inputs(self, inputs: Mapping[int, Tensor], *, in_one_step: bool = True) -> None:
        for request, hidden in inputs.items():
            self._check_hidden(request, hidden)
            length, limit = self.find(request).length, self.stack.max_len
            if length + hidden.shape[-2] > limit:
                raise InputError(
                    f"request {request} holds {length} tokens and is given {hidden.shape[-2]} more: expected at most "
                    f"{limit} in all, the max_len of the stack; give fewer, or build it with a larger max_len"
                )
        if len({hidden.ndim for hidden in inputs.values()}) > 1:
            raise InputError(
                "some hidden states are [tokens, hidden], some [layers, tokens, hidden]: expected one form in a step; "
                "use the same for all requests"
            )
        tokens = sum(hidden.shape[-2] for hidden in inputs.values())
        if in_one_step and tokens > self.max_step_tokens:
            raise InputError(
                f"the step has {tokens} tokens: expected at most {self.max_step_tokens}, this session's "
                "max_step_tokens; give them in chunks, or make the session with more"
            )

    def _check_positions(self, request: int, given: Sequence[int] | Tensor, inputs: Mapping[int, Tensor]) -> None:
        if request not in inputs:
            raise InputError(
                f"positions are given for request {request}: expected those of {list(inputs)}, which this step has "
                "hidden states for; leave the others out"
            )
        start, count = self.find(request).length, inputs[request].shape[-2]
        found = given.tolist() if isinstance(given, Tensor) else list(given)
        if found != list(range(start, start + count)):
            shown = f"{found[:4]}...{found[-1]}" if len(found) > 5 else f"{found}"
            raise InputError(
                f"positions of request {request} are {shown}: expected {count} from {start} on, since it holds {start} "
                "tokens; a gap or an overlap would leave rows unwritten, give the positions that follow, or none"
            )

    def _batch(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        lengths: Sequence[int],
        pad_to: int | None,
        causal: bool,
        shared: int,
    ) -> ForwardBatch:
        tables = {
            pool: self.pages.as_tensor([known.pages.tables[pool] for known in requests]) for pool in self.pages.pools
        }
        sizes = self.pages.page_size
        return ForwardBatch.from_host(
            query_lens=counts,
            seq_lens=lengths,
            window_pages=tables[WINDOW],
            window_page_size=sizes[WINDOW],
            compressed_pages={pool: table for pool, table in tables.items() if pool != WINDOW},
            compressed_page_size={pool: size for pool, size in sizes.items() if pool != WINDOW},
            state_slots=[known.state_slot for known in requests],
            window_starts=[known.window_start for known in requests],
            shared_lens=[shared] * len(requests),
            num_tokens=pad_to,
            device=self.stack.backend.device,
            causal=causal,
        )
