"""Weights: prepared by a pure function, once, and changed under kernels that go on using the same memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from dsv41.attention import DeepseekV41Attention
from dsv41.errors import BackendError
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.weights import check, facts, leaves, prepare, tensors
from dsv41.testing.case import Case
from dsv41.testing.clause import Violation, expect
from dsv41.testing.layer import run_layer
from dsv41.testing.scene import Scene, Side
from dsv41.testing.subject import Subject, copied


def pure(subject: Subject, case: Case) -> None:
    """`prepare_weights` leaves the weights as they are and makes the same of them each time."""
    shared = subject.layer(subject.backend(case.kv, case.index), case)
    state = replace(shared.state, weights=copied(subject.weights(case)), prepared=None, prepared_by=None)
    made = []
    for _ in range(2):
        made.append(subject.fresh(case.kv, case.index).prepare_weights(state))
        _hold_equal(subject.weights(case), state.weights, "prepare_weights has changed the weights that it was given")
    first, second = made
    _hold_equal(first, second, "prepare_weights makes something else of the same weights the second time")


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
    _output(subject, case, layer)  # what a backend keeps of a layer's first step must not outlive its weights
    layer.take(copied(subject.weights(case, seed=1)))()
    expect(_addresses(layer) == where, "an update moved weights to other memory: a captured graph would not see them")
    anew = _fresh(subject, case, seed=1, backend=subject.fresh(case.kv, case.index))
    found, expected = (_output(subject, case, one) for one in (layer, anew))
    expect(torch.equal(found, expected), "a layer with updated weights gives other bits than a new layer with them")


def _output(subject: Subject, case: Case, layer: DeepseekV41Attention) -> torch.Tensor:
    scene = Scene(subject, case)
    plan = layer.backend.plan(scene.batch, [layer.spec])
    return run_layer(scene, Side(layer.backend, layer, scene.mine.caches, plan))


def _fresh(
    subject: Subject, case: Case, seed: int = 0, backend: AttentionBackend | None = None
) -> DeepseekV41Attention:
    """A layer that no one else has, on a backend that no one else has where one is given."""
    shared = subject.layer(subject.backend(case.kv, case.index), case)
    weights = copied(subject.weights(case, seed))
    return DeepseekV41Attention(shared.spec, weights, backend or shared.backend, shared.state.cos_sin)


def _addresses(layer: DeepseekV41Attention) -> list[int]:
    tree = [layer.state.weights, layer.state.prepared]
    return [tensor.data_ptr() for _, tensor in tensors(tree)]


def _hold_equal(one: object, two: object, message: str) -> None:
    pairs = zip(leaves(one, ""), leaves(two, ""), strict=True)
    for (path, left), (_, right) in pairs:
        same = torch.equal(_raw(left), _raw(right)) if isinstance(left, torch.Tensor) else left == right
        expect(same, f"{message}: {path.strip('.') or 'what it returns'} differs")


def _raw(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value.contiguous().view(torch.uint8)
