"""Weights: prepared by a pure function, once, and changed under kernels that go on using the same memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from dsv41.attention import DeepseekV41Attention
from dsv41.errors import BackendError
from dsv41.hal.types import LayerWeights
from dsv41.hal.weights import check, facts, leaves, prepare
from dsv41.testing.case import Case
from dsv41.testing.clause import Violation, expect
from dsv41.testing.geometry import ROLES
from dsv41.testing.layer import hold_layer
from dsv41.testing.scene import Scene
from dsv41.testing.subject import Subject


def pure(subject: Subject, case: Case) -> None:
    """`prepare_weights` leaves the weights as they are and makes the same of them each time."""
    layer = _fresh(subject, case)
    state = layer.state
    before = _copy(state.weights)
    first, second = (subject.fresh(case.kv, case.index).prepare_weights(state) for _ in range(2))
    _hold_equal(before, state.weights, "prepare_weights has changed the weights that it was given")
    _hold_equal(first, second, "prepare_weights makes something else of the same weights the second time")
    _hold_equal(state.prepared, first, "prepare_weights of another instance makes something else of the same weights")


def same_form(subject: Subject, case: Case) -> None:
    """Other weights of the same model become tensors of the same shapes, so that they can be copied into the first."""
    backend = subject.backend(case.kv, case.index)
    one, two = (subject.layer(backend, case, seed=seed).state.prepared for seed in (0, 1))
    check(facts(two, "prepared"), facts(one, "prepared"))


def prepared_once(subject: Subject, case: Case) -> None:
    """Weights that are prepared are not taken for weights to prepare."""
    layer = _fresh(subject, case)
    expect(
        layer.state.prepared_by == layer.backend.name,
        f"a prepared layer says that it was prepared by {layer.state.prepared_by!r}: expected {layer.backend.name!r}",
    )
    try:
        prepare(layer.backend, layer.state)
    except BackendError:
        return
    raise Violation("weights were prepared twice and nothing was raised: expected BackendError")


def update(subject: Subject, case: Case) -> None:
    """New weights, copied into the memory of the old: what a new layer gives, by tensors that stay where they are."""
    layer = _fresh(subject, case)
    where = _addresses(layer)
    new = subject.checkpoint(case.heads, case.dtype, seed=1).weights[ROLES[case.layer]]
    layer.take(new)()
    expect(_addresses(layer) == where, "an update moved weights to other memory: a captured graph would not see them")
    scene = Scene(subject, case)
    scene.mine.shared_layer = layer
    scene.truth.shared_layer = subject.layer(scene.truth.backend, case, seed=1)
    hold_layer(scene)


def _fresh(subject: Subject, case: Case, seed: int = 0) -> DeepseekV41Attention:
    """A layer of its own, whose weights no one else has."""
    shared = subject.layer(subject.backend(case.kv, case.index), case, seed=seed)
    spec = replace(shared.spec, padded_heads=shared.spec.num_heads)
    return DeepseekV41Attention(spec, _copy(shared.state.weights), shared.backend, shared.state.cos_sin)


def _copy(weights: LayerWeights) -> LayerWeights:
    """The same weights in memory of their own."""

    def fresh(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.clone()
        if hasattr(value, "__dataclass_fields__"):
            return replace(value, **{name: fresh(getattr(value, name)) for name in value.__dataclass_fields__})  # type: ignore[type-var]
        return value

    copied = fresh(weights)
    assert isinstance(copied, LayerWeights)
    return copied


def _addresses(layer: DeepseekV41Attention) -> list[int]:
    tree = [layer.state.weights, layer.state.prepared]
    return [leaf.data_ptr() for _, leaf in leaves(tree, "") if isinstance(leaf, torch.Tensor)]


def _hold_equal(one: object, two: object, message: str) -> None:
    pairs = zip(leaves(one, ""), leaves(two, ""), strict=True)
    for (path, left), (_, right) in pairs:
        same = torch.equal(_raw(left), _raw(right)) if isinstance(left, torch.Tensor) else left == right
        expect(same, f"{message}: {path.strip('.') or 'what it returns'} differs")


def _raw(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value.contiguous().view(torch.uint8)
