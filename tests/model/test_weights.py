"""Weights that change under a running stack: in place, all or none, asleep and awake."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.errors import BackendError, InputError
from dsv41.hal.types import AttnOutput, BlockScaledWeight, LayerState
from dsv41.hal.weights import prepare
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint

from ..wording import refused
from .toys import MAX_LEN, TOY, noise

HIDDEN = TOY.hidden_size


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same model with three sets of weights."""
    folder = tmp_path_factory.mktemp("weights")
    return [make_checkpoint(folder / str(seed), config=replace(TOY), seed=seed) for seed in range(3)]


@dataclass
class Turned:
    """What `Permuting` makes of a layer: views, copies, and plain values."""

    wo_b: BlockScaledWeight | Tensor
    extra: dict[str, Any]


class Permuting(ReferenceBackend):
    """Prepares a copy of `wo_b` with its rows reversed, as fused kernels do, and turns the result back."""

    name = "permuting"

    def prepare_weights(self, layer: LayerState) -> Any:
        super().prepare_weights(layer)
        wo_b = layer.weights.wo_b
        data, scale = (part.flip(0) for part in (wo_b.data.view(torch.uint8), wo_b.scale))
        return Turned(BlockScaledWeight(data.view(wo_b.data.dtype), scale, wo_b.block), {"order": "reversed"})

    def o_proj(self, out: AttnOutput, layer: LayerState, positions: Tensor) -> Tensor:
        turned = replace(layer, weights=replace(layer.weights, wo_b=layer.prepared.wo_b))
        return super().o_proj(out, turned, positions).flip(-1)


BACKENDS = [ReferenceBackend, Permuting]


def stack_of(path: Path, backend: type[ReferenceBackend] = ReferenceBackend) -> AttentionStack:
    return AttentionStack(load_checkpoint(path), backend(), max_len=MAX_LEN)


def outputs(stack: AttentionStack) -> Tensor:
    session = Session(stack, max_requests=1, max_tokens=MAX_LEN)
    return session.step({session.add_request(): noise(len(stack.layers), 20, HIDDEN).bfloat16()})[0]


def tensors(stack: AttentionStack) -> list[Tensor]:
    """Every tensor object of weights and what was made of them."""

    def walk(part: Any) -> Iterator[Tensor]:
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, dict):
            for value in part.values():
                yield from walk(value)
        elif hasattr(part, "__dataclass_fields__"):
            for name in part.__dataclass_fields__:
                yield from walk(getattr(part, name))

    return [tensor for layer in stack.layers for tensor in walk(layer.state.weights)] + [
        tensor for layer in stack.layers for tensor in walk(layer.state.prepared)
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_fr_113_weights_can_be_loaded_any_number_of_times(paths: list[Path], backend: type[ReferenceBackend]) -> None:
    """Every tensor object, its attributes and its address survive; outputs are those of a stack built anew."""
    due = [outputs(stack_of(path)) for path in paths]
    stack = stack_of(paths[0], backend)
    held, addresses = tensors(stack), [tensor.data_ptr() for tensor in tensors(stack)]
    for tensor in held:
        tensor.weight_loader = "mine"  # type: ignore[attr-defined]
    assert torch.equal(outputs(stack), due[0])
    for i in (1, 2, 2, 0, 1, 0):
        stack.update_weights(load_checkpoint(paths[i]))
        assert torch.equal(outputs(stack), due[i])
    now = tensors(stack)
    assert all(a is b for a, b in zip(held, now, strict=True))
    assert [tensor.data_ptr() for tensor in now] == addresses
    assert all(tensor.weight_loader == "mine" for tensor in now)  # type: ignore[attr-defined]


def test_fr_113_an_engines_parameters_stay_its_own(paths: list[Path]) -> None:
    """Weights may be Parameters that something else has registered, part of a larger one."""
    checkpoint = load_checkpoint(paths[0])
    weights = checkpoint.weights[0]
    norms = nn.Parameter(torch.cat((weights.q_norm, weights.kv_norm)), requires_grad=False)
    sink = nn.Parameter(weights.attn_sink)
    own = replace(weights, q_norm=norms[:32], kv_norm=norms[32:], attn_sink=sink)
    stack = AttentionStack(replace(checkpoint, weights=checkpoint.weights | {0: own}), ReferenceBackend(), max_len=64)
    with torch.enable_grad():
        stack.update_weights(new := load_checkpoint(paths[1]))
    assert stack.layers[0].state.weights.attn_sink is sink
    assert torch.equal(sink, new.weights[0].attn_sink)
    assert torch.equal(norms, torch.cat((new.weights[0].q_norm, new.weights[0].kv_norm)))
    stack.sleep()
    assert stack.layers[0].state.weights.attn_sink is sink
    assert torch.equal(norms, torch.cat((new.weights[0].q_norm, new.weights[0].kv_norm)))  # it was not ours to free
    stack.wake(load_checkpoint(paths[2]))
    assert torch.equal(outputs(stack), outputs(stack_of(paths[2])))


def test_fr_114_an_update_writes_through_the_memory_that_a_graph_knows(paths: list[Path]) -> None:
    """Views taken before see the new values."""
    stack, new = stack_of(paths[0], Permuting), load_checkpoint(paths[1])
    views = [tensor.view(torch.uint8) for tensor in tensors(stack)]
    stack.update_weights(new)
    for view, tensor in zip(views, tensors(stack), strict=True):
        assert torch.equal(view, tensor.view(torch.uint8))
    assert torch.equal(views[0], new.weights[0].wq_a.data.view(torch.uint8))


def damaged(checkpoint: Checkpoint, layer: int, **changes: Any) -> Checkpoint:
    weights = replace(checkpoint.weights[layer], **changes)
    return replace(checkpoint, weights=checkpoint.weights | {layer: weights})


def _scale(old: BlockScaledWeight, scale: Tensor) -> BlockScaledWeight:
    return BlockScaledWeight(old.data, scale, old.block)


BAD: dict[str, tuple[Any, list[str]]] = {
    "a shape": (lambda w: {"kv_norm": w.kv_norm[:-1]}, ["layers.6.attn.kv_norm", "[511]", "[512]"]),
    "a dtype": (lambda w: {"attn_sink": w.attn_sink.double()}, ["layers.6.attn.attn_sink", "float64", "float32"]),
    "a matrix": (
        lambda w: {"wq_a": BlockScaledWeight(w.wq_a.data[:-1], w.wq_a.scale)},
        ["layers.6.attn.wq_a.data", "[31, 64]", "[32, 64]"],
    ),
    "a scale grid": (
        lambda w: {"wo_b": _scale(w.wo_b, w.wo_b.scale.repeat_interleave(2, 0))},
        ["layers.6.attn.wo_b.scale", "[4, 2]", "[2, 2]"],
    ),
    "a scale type": (lambda w: {"wo_b": _scale(w.wo_b, w.wo_b.scale.float())}, ["layers.6.attn.wo_b.scale", "float32"]),
    "a block": (
        lambda w: {"wo_b": BlockScaledWeight(w.wo_b.data, w.wo_b.scale, (64, 32))},
        ["layers.6.attn.wo_b.block.0", "64", "32"],
    ),
    "a plain matrix": (lambda w: {"wkv": w.wkv.data.float()}, ["layers.6.attn.wkv", "absent"]),
    "a device": (lambda w: {"q_norm": w.q_norm.to("meta")}, ["layers.6.attn.q_norm", "on meta", "on cpu"]),
    "a part too many": (lambda w: {"indexer": w.wkv}, ["layers.6.attn.indexer", "absent"]),
    "NaN codes": (
        lambda w: {"wkv": _scale(w.wkv, torch.full_like(w.wkv.scale, 255))},
        ["layers.6.attn.wkv", "NaN"],
    ),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("asleep", [False, True])
def test_a_bad_layer_changes_none(paths: list[Path], what: str, asleep: bool) -> None:
    """The last layer is wrong, and the first stays as it was."""
    change, named = BAD[what]
    new = load_checkpoint(paths[1])
    bad = damaged(new, 6, **change(new.weights[6]))
    stack = stack_of(paths[0])
    before = [tensor.clone() for tensor in tensors(stack)]
    if asleep:
        stack.sleep()
        with refused(InputError, *named):
            stack.wake(bad)
        assert stack.asleep
        stack.wake(load_checkpoint(paths[0]))
    else:
        with refused(InputError, *named):
            stack.update_weights(bad)
    for old, tensor in zip(before, tensors(stack), strict=True):
        assert torch.equal(old.view(torch.uint8), tensor.view(torch.uint8))
    stack.update_weights(new)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"config": replace(TOY, rope_theta=5000.0)}, ["rope_theta 5000.0", "rope_theta 10000.0"]),
        ({"dtype": torch.float32}, ["float32", "bfloat16"]),
    ],
)
def test_weights_of_another_model_are_refused(paths: list[Path], changes: dict[str, Any], named: list[str]) -> None:
    stack, new = stack_of(paths[0]), load_checkpoint(paths[1])
    if "config" in changes:
        changes = {"config": replace(new.config, rope_theta=5000.0)}
    with refused(InputError, *named):
        stack.update_weights(replace(new, **changes))
    few = load_checkpoint(paths[1], layers=[0, 1])
    with refused(InputError, "lacks the layers [2, 3, 4, 5, 6]"):
        stack.update_weights(few)
    half = load_checkpoint(paths[1], tp_size=2)
    with refused(InputError, "layers.0.attn.wq_b", "tp_size"):
        stack.update_weights(half)
    assert torch.equal(outputs(stack), outputs(stack_of(paths[0])))


def test_layers_that_a_stack_lacks_are_left_out(paths: list[Path]) -> None:
    stack = AttentionStack(load_checkpoint(paths[0], layers=[0, 1]), ReferenceBackend(), max_len=MAX_LEN)
    stack.update_weights(load_checkpoint(paths[1]))
    again = AttentionStack(load_checkpoint(paths[1], layers=[0, 1]), ReferenceBackend(), max_len=MAX_LEN)
    assert torch.equal(outputs(stack), outputs(again))


# Asleep


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stack_sleeps_without_weights_and_wakes_with_its_requests(
    paths: list[Path], backend: type[ReferenceBackend]
) -> None:
    inputs = noise(TOY.num_hidden_layers, 30, HIDDEN).bfloat16()
    sessions = [Session(stack_of(paths[0], backend)) for _ in range(2)]
    for session in sessions:
        session.step({session.add_request(): inputs[:, :19]})
    session = sessions[0]
    stack, held = session.stack, tensors(session.stack)
    for _ in range(2):
        stack.sleep()
        stack.sleep()
        assert stack.asleep
        assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
        with refused(BackendError, "layers.0.attn is asleep", "wake"):
            session.step({0: inputs[:, 19:20]})
        with refused(BackendError, "asleep", "wake"):
            stack.update_weights(load_checkpoint(paths[0]))
        assert session.length(0) == 19
        stack.wake(load_checkpoint(paths[0]))
        assert not stack.asleep
    assert all(a is b for a, b in zip(held, tensors(stack), strict=True))
    due = sessions[1].step({0: inputs[:, 19:]})[0]
    assert torch.equal(session.step({0: inputs[:, 19:]})[0], due)
    with refused(BackendError, "awake", "update_weights"):
        stack.wake(load_checkpoint(paths[0]))


def test_weights_that_slept_are_none_to_wake_with(paths: list[Path]) -> None:
    """The stack's tensors are those of the checkpoint that it was built of."""
    checkpoint = load_checkpoint(paths[0])
    stack = AttentionStack(checkpoint, ReferenceBackend(), max_len=MAX_LEN)
    stack.sleep()
    with refused(InputError, "layers.0.attn.wq_a.data", "[0]", "[32, 64]", "load the checkpoint"):
        stack.wake(checkpoint)
    stack.wake(load_checkpoint(paths[0]))


def test_a_single_layer_says_that_it_sleeps(paths: list[Path]) -> None:
    stack = stack_of(paths[0])
    session = Session(stack)
    session.step({session.add_request(): noise(7, 3, HIDDEN).bfloat16()})
    stack.layers[3].sleep()
    with refused(BackendError, "layers.3.attn is asleep"):
        session.step({0: noise(7, 1, HIDDEN).bfloat16()})
    stack.wake(load_checkpoint(paths[0]))


# Prepared once


def test_weights_are_prepared_once(paths: list[Path]) -> None:
    state = stack_of(paths[0]).layers[0].state
    assert state.prepared_by == "reference"
    for backend in (ReferenceBackend(), Permuting()):
        with refused(BackendError, "layers.0.attn", "prepared by backend 'reference'", repr(backend.name)):
            prepare(backend, state)


@pytest.mark.parametrize(("first", "second"), [(ReferenceBackend, Permuting), (Permuting, ReferenceBackend)])
def test_fr_115_another_backend_prepares_again_or_is_refused(
    paths: list[Path], first: type[ReferenceBackend], second: type[ReferenceBackend]
) -> None:
    """What one made is not what the other reads; from the checkpoint's layout, which stays, each makes its own."""
    stack = stack_of(paths[0], first)
    due = outputs(stack)
    session = Session(stack)
    for layer in stack.layers:
        layer.backend = second()
    with refused(BackendError, f"prepared by {first.name!r}", f"{second.name!r}"):
        session.step({session.add_request(): noise(7, 3, HIDDEN).bfloat16()})
    checkpoint = load_checkpoint(paths[0])
    weights = {layer.spec.layer_id: layer.state.weights for layer in stack.layers}
    again = AttentionStack(replace(checkpoint, weights=weights), second(), max_len=MAX_LEN)
    assert torch.equal(outputs(again), due)


def test_preparing_leaves_the_checkpoint_as_it_is(paths: list[Path]) -> None:
    stack, checkpoint = stack_of(paths[0], Permuting), load_checkpoint(paths[0])
    for layer in stack.layers:
        mine, theirs = layer.state.weights.wo_b, checkpoint.weights[layer.spec.layer_id].wo_b
        assert torch.equal(mine.data.view(torch.uint8), theirs.data.view(torch.uint8))


class Moody(ReferenceBackend):
    """What it prepares has another form each time."""

    name = "moody"
    calls = 0

    def prepare_weights(self, layer: LayerState) -> Any:
        Moody.calls += 1
        return [torch.zeros(Moody.calls)]


def test_what_is_prepared_keeps_its_form(paths: list[Path]) -> None:
    """Else a graph would read what is no longer there."""
    state = load_checkpoint(paths[0], layers=[0])
    stack = AttentionStack(state, Moody(), max_len=MAX_LEN)
    with refused(InputError, "layers.0.attn.prepared.0", "[2]", "[1]"):
        stack.update_weights(load_checkpoint(paths[1], layers=[0]))
