"""A step captured once as a CUDA or HIP graph, and replayed: no launch, no allocation and no decision is left to the
host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv41.cache import WINDOW
from dsv41.errors import BackendError, InputError
from dsv41.hal.types import BlockTable, ForwardBatch

if TYPE_CHECKING:
    from dsv41.stack import AttentionStack


class _Recording:
    """What `run` launches, recorded; `output` is what it returned, written anew by each replay."""

    def __init__(self, run: Callable[[], Tensor], device: torch.device) -> None:
        if device.type != "cuda":
            raise BackendError(
                f"a step cannot be captured on {device}: expected a CUDA or HIP device; run it with `forward`"
            )
        with torch.cuda.device(device):
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.output = run()

    def replay(self) -> None:
        self._graph.replay()


class CapturedStep:
    """`AttentionStack.forward` for causal steps, captured over tensors of its own.

    A step may have up to `num_tokens` tokens of up to `num_requests` requests, none longer than `max_seq_len` after it;
    with `layer_inputs`, each layer has an input of its own. Outputs of a replay are bit for bit those of `forward` over
    a batch that is padded to the same tokens and requests. Caches and weights are those at capture: binding others, or
    `sleep`, ends its use.

    Raises BackendError for a backend or a device on which no step can be captured, InputError for sizes that cannot be.
    """

    def __init__(
        self,
        stack: AttentionStack,
        *,
        num_tokens: int,
        num_requests: int,
        max_seq_len: int,
        layer_inputs: bool = False,
    ) -> None:
        sizes = {"num_tokens": num_tokens, "num_requests": num_requests, "max_seq_len": max_seq_len}
        for name, value in sizes.items():
            limit = stack.max_len if name == "max_seq_len" else None
            if type(value) is not int or value < 1 or (limit is not None and value > limit):
                most = "" if limit is None else f" and at most {limit}, the max_len of the stack"
                raise InputError(f"{name} is {value!r}: expected an integer of at least 1{most}; give one")
        backend = stack.backend
        if not backend.supports_graph_capture:
            raise BackendError(
                f"backend {backend.name!r} cannot be captured in a graph: expected one with `supports_graph_capture`; "
                "run steps with `forward`, or use another backend"
            )
        if stack.caches is None:
            raise BackendError("the stack has no caches to capture a step over: expected some; bind them first")
        self.stack = stack
        self.num_tokens, self.num_requests, self.max_seq_len = num_tokens, num_requests, max_seq_len
        self._caches, self._generation = stack.caches, stack.generation
        layers = (len(stack.layers),) if layer_inputs else ()
        shape = (*layers, num_tokens, stack.config.hidden_size)
        self._hidden = torch.zeros(shape, dtype=stack.dtype, device=backend.device)
        self._batch = _empty_batch(stack, num_tokens, num_requests, max_seq_len)
        backend.reserve(num_tokens, num_requests, max_seq_len)
        with torch.no_grad():
            self._run()  # what is captured must have run before: compiled, loaded, its workspaces allocated
            self._recording = _Recording(self._run, backend.device)

    def _run(self) -> Tensor:
        return self.stack.forward(self._hidden, self._batch)

    @property
    def is_valid(self) -> bool:
        """Whether the stack still has the caches, and its weights in the memory, that were captured."""
        return self.stack.caches is self._caches and self.stack.generation == self._generation

    def misfit(self, hidden: Tensor, batch: ForwardBatch) -> str | None:
        """Why a step that `forward` takes is none that was captured; None where `replay` takes it too."""
        longest = int(batch.seq_lens_cpu.max()) if batch.num_requests else 0
        for what, count, most in (
            ("tokens", batch.num_tokens, self.num_tokens),
            ("requests", batch.num_requests, self.num_requests),
            ("tokens in its longest request", longest, self.max_seq_len),
        ):
            if count > most:
                return f"it has {count} {what}, at most {most} were captured"
        if not batch.causal:
            return "it is a draft block, a causal step was captured"
        if hidden.ndim != self._hidden.ndim:
            return "one of the two has an input for each layer, the other has not"
        return None

    def replay(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """What `forward` returns for this step, in memory of its own. `batch` and `hidden` are copied, not kept.

        Raises as `forward` does, and InputError for a step that is none that was captured; nothing is run then.
        """
        stack = self.stack
        if not self.is_valid:
            raise BackendError(
                "the stack has other caches than this step was captured with, or its weights in other memory: expected "
                "the same; capture it again after `bind` or `wake`"
            )
        stack.check(hidden, batch)
        if reason := self.misfit(hidden, batch):
            raise InputError(
                f"the step cannot be replayed: {reason}; expected one that fits; capture a larger one, or use `forward`"
            )
        with torch.no_grad():
            self._fill(hidden, batch)
            self._recording.replay()
            return self._recording.output[..., : batch.num_tokens, :].clone()

    def _fill(self, hidden: Tensor, batch: ForwardBatch) -> None:
        mine = self._batch
        self._hidden[..., : batch.num_tokens, :].copy_(hidden)
        _put(mine.positions, batch.positions, -1)
        # Requests that are padding have no token: they begin where the last one ends.
        _put(mine.query_start_loc, batch.query_start_loc, int(batch.query_start_loc_cpu[-1]))
        _put(mine.seq_lens, batch.seq_lens, 0)
        _put(mine.state_slots, batch.state_slots, -1)
        _put(mine.window_starts, batch.window_starts, 0)
        _put(mine.shared_lens, batch.shared_lens, 0)
        _put_pages(mine.window_table, batch.window_table)
        for ratio, table in mine.compressed_tables.items():
            _put_pages(table, batch.compressed_tables[ratio])


def _empty_batch(stack: AttentionStack, num_tokens: int, num_requests: int, max_seq_len: int) -> ForwardBatch:
    """A batch in which no token is live, with tables as wide as `max_seq_len` needs."""
    sizes: dict[int, int] = {}
    for layer in stack.layers:
        caches = layer.state.caches
        assert caches is not None
        sizes[WINDOW] = caches.window.layout.page_size
        if caches.compressed is not None:
            sizes[layer.spec.ratio] = caches.compressed.layout.page_size

    def no_pages(pool: int) -> Tensor:
        width = -(-(max_seq_len // max(pool, 1)) // sizes[pool])
        return torch.full((num_requests, width), -1, dtype=torch.int32)

    return ForwardBatch.from_host(
        query_lens=[0] * num_requests,
        seq_lens=[0] * num_requests,
        window_pages=no_pages(WINDOW),
        window_page_size=sizes[WINDOW],
        compressed_pages={pool: no_pages(pool) for pool in sizes if pool != WINDOW},
        compressed_page_size=sizes,
        num_tokens=num_tokens,
        device=stack.backend.device,
        max_seq_len=max_seq_len,
    )


def _put(target: Tensor, source: Tensor, padding: int) -> None:
    target[: len(source)].copy_(source)
    target[len(source) :].fill_(padding)


def _put_pages(target: BlockTable, source: BlockTable) -> None:
    """Pages that no request of `max_seq_len` tokens can have are left out."""
    requests, width = source.pages.shape[0], min(source.pages.shape[1], target.pages.shape[1])
    target.pages[:requests, :width].copy_(source.pages[:, :width])
    target.pages[:requests, width:].fill_(-1)
    target.pages[requests:].fill_(-1)
