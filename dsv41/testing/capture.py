"""What a step must not do so that it can be captured, and that a captured one gives what an eager one gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dsv41.checkpoint import Checkpoint
from dsv41.hal.types import ForwardBatch
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.testing import presets
from dsv41.testing.case import Case
from dsv41.testing.clause import Violation, expect
from dsv41.testing.geometry import DTYPES
from dsv41.testing.scene import Scene
from dsv41.testing.subject import Subject

_WAITS = {
    *("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__", "is_nonzero"),
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "equal", "allclose", "bincount"),
}
"""What torch's functions are called whose result, or its shape, the host has to wait for."""


class Watch(TorchFunctionMode):
    """Notes what waits for the device. What is called on host copies alone, or inside a custom operator, does not.

    On a CPU both kinds of tensors lie in one memory, so a tensor counts as the host's where it is one of `host`, or was
    made from such tensors and numbers alone.
    """

    def __init__(self, host: list[Tensor]) -> None:
        super().__init__()
        self.found: list[str] = []
        self._host = {id(tensor): tensor for tensor in host}  # kept, so that no other takes an id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        on_host = all(id(tensor) in self._host for tensor in given)
        name = getattr(func, "__name__", "")
        checks = (_by_mask, _to_host, _of_unknown_length)
        if not on_host and (name in _WAITS or any(check(name, args, kwargs) for check in checks)):
            self.found.append(name)
        result = func(*args, **kwargs)
        if on_host:
            self._host |= {id(tensor): tensor for tensor in _tensors(result) if tensor.device.type == "cpu"}
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _tensors(part)


def _by_mask(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an index picks by a mask, so that the host must know how many it picks."""
    if name not in ("__getitem__", "__setitem__"):
        return False
    parts = args[1] if isinstance(args[1], tuple) else (args[1],)
    masked = any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)
    return masked and (name == "__getitem__" or (isinstance(args[2], Tensor) and args[2].numel() != 1))


def _to_host(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a tensor is moved to the host; a CPU's own tensors are moved nowhere."""
    where = [*args[1:], *kwargs.values()] if name == "to" else []
    return args[0].device.type != "cpu" and any(str(part) == "cpu" for part in where) if where else False


def _of_unknown_length(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a tensor's numbers say how long the result is."""
    if name == "where":
        return len(args) + len(kwargs) == 1
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
    return name == "repeat_interleave" and isinstance(repeats, Tensor) and kwargs.get("output_size") is None


def waits_for_nothing(subject: Subject, case: Case) -> None:
    found = _waits(subject, case)
    if found and (again := _waits(subject, case)):  # the first step may compile, load and allocate
        raise Violation(f"a step waits for the device, by {', '.join(dict.fromkeys(again))}: it cannot be captured")


def _waits(subject: Subject, case: Case) -> list[str]:
    scene = Scene(subject, case)
    batch, host = _apart(scene.batch)
    mine, published, hidden = scene.mine, scene.published, scene.step_hidden
    state = mine.state
    watch = Watch(host)
    with watch:
        plan = mine.backend.plan(batch, [mine.spec])
        inputs = mine.backend.prepare_inputs(hidden, state, plan)
        if mine.spec.owns_selection:
            published = mine.backend.select(inputs, state, plan, published)
        if published is not None:
            published = mine.backend.prepare_selection(published, state, plan)
        mine.backend.project(mine.backend.attend(inputs, state, plan, published), state, plan)
    return watch.found


def _apart(batch: ForwardBatch) -> tuple[ForwardBatch, list[Tensor]]:
    """The batch with device tensors of its own, since on a CPU they may be the host's; and those of the host."""
    names = ("query_start_loc", "seq_lens", "positions", "state_slots", "window_starts", "shared_lens")
    tables = {0: batch.window_table, **batch.compressed_tables}
    own = {pool: replace(table, pages=table.pages.clone()) for pool, table in tables.items()}
    apart = replace(
        batch,
        **{name: getattr(batch, name).clone() for name in names},
        window_table=own.pop(0),
        compressed_tables=own,
    )
    host = [getattr(batch, f"{name}_cpu") for name in names if name != "positions"]
    return apart, [*host, *(table.pages_cpu for table in tables.values())]


def replays(subject: Subject, case: Case) -> None:
    """Requests that grow, come and pause: each replay gives the bits of the eager step."""
    backend = subject.backend(case.kv, case.index)
    checkpoint = subject.checkpoint(case.heads, case.dtype)
    target = [spec.layer_id for spec in checkpoint.specs if spec.causal]
    stack = AttentionStack(_of_layers(checkpoint, target), backend, max_len=4096)
    longest = stack.specs[0].window + stack.specs[-1].topk * 2 + 16
    options = {"max_requests": 2, "max_tokens": 2 * longest, "max_step_tokens": longest}
    eager, captured = (Session(stack, **options) for _ in range(2))
    captured.capture(4)
    rows = presets.rows(case.preset, 2 * longest, stack.config.hidden_size, subject.seed)
    hidden = rows.to(subject.device, DTYPES[case.dtype]).view(2, longest, -1)
    for session in (eager, captured):
        assert [session.add_request() for _ in range(2)] == [0, 1]
    held = [0, 0]
    for counts in ([3, 0], [1, 1], [longest - 12, 0], [1, 1], [2, 2], [1, 0], [0, 1]):
        step = {r: hidden[r, held[r] : held[r] + n] for r, n in enumerate(counts) if n}
        padded = 4 if sum(counts) <= 4 else None
        expected, found = eager.step(step, pad_to=padded), captured.step(step)
        for request in step:
            same = torch.equal(expected[request], found[request])
            expect(
                same, f"request {request} after {held[request]} tokens: a replay gives other bits than the eager step"
            )
        held = [before + n for before, n in zip(held, counts, strict=True)]


def _of_layers(checkpoint: Checkpoint, layers: list[int]) -> Checkpoint:
    return replace(
        checkpoint,
        specs=[spec for spec in checkpoint.specs if spec.layer_id in layers],
        weights={layer: checkpoint.weights[layer] for layer in layers},
    )
