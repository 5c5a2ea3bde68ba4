"""Weights that change under kernels and captured graphs: every tensor object stays, what it holds is replaced.

A tree is a tensor, a dataclass, dict, list or tuple of trees, or a plain value, as weights and what backends prepare
of them are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from dsv41.errors import BackendError, InputError
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.types import LayerState


def prepare(backend: AttentionBackend, layer: LayerState) -> None:
    """Have a layer's weights prepared by the backend that will run it.

    Raises BackendError where that was done already: what is prepared for one backend, or twice for the same, computes
    something else and raises nothing.
    """
    if layer.prepared_by is not None:
        raise BackendError(
            f"the weights of {layer.spec.name} were prepared by backend {layer.prepared_by!r}: expected weights in "
            f"checkpoint layout for {backend.name!r}; make a new layer from the checkpoint"
        )
    layer.prepared, layer.prepared_by = backend.prepare_weights(layer), backend.name


Facts = dict[str, tuple[Any, ...]]
"""Of each leaf of a tree, what new weights must agree with: dtype, shape and device of a tensor, or the value."""


def facts(tree: Any, name: str = "") -> Facts:
    return {
        path: (leaf.dtype, tuple(leaf.shape), leaf.device) if isinstance(leaf, Tensor) else (leaf,)
        for path, leaf in _leaves(tree, name)
    }


def tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tree with its path."""
    return ((path, leaf) for path, leaf in _leaves(tree, name) if isinstance(leaf, Tensor))


def check(new: Facts, old: Facts) -> None:
    """Raise InputError, naming the first difference, where `new` cannot take the place of `old`."""
    for path in {**old, **new}:
        if new.get(path) != old.get(path):
            raise InputError(
                f"{path} is {_shown(new.get(path))}: expected {_shown(old.get(path))} as before; load the checkpoint "
                "of the same model with the same tp_size, dtype and device, or build a new stack"
            )


def _shown(fact: tuple[Any, ...] | None) -> str:
    if fact is None:
        return "absent"
    return f"{fact[0]} {list(fact[1])} on {fact[2]}" if len(fact) == 3 else repr(fact[0])


@torch.no_grad()
def copy_into(old: Any, new: Any) -> None:
    """Copy the tensors of a tree into the memory of those of another with the same facts."""
    for target, source in _pairs(old, new):
        target.copy_(source)


@torch.no_grad()
def release(tree: Any) -> None:
    """Let go of the memory of a tree's tensors; the objects stay, empty."""
    for _, leaf in tensors(tree):
        leaf.data = leaf.data.new_empty(0)


@torch.no_grad()
def restore(old: Any, new: Any) -> None:
    """Give the tensors of a released tree the memory of those of another."""
    for target, source in _pairs(old, new):
        target.data = source.data


def _pairs(old: Any, new: Any) -> Iterator[tuple[Tensor, Tensor]]:
    sources = dict(tensors(new))
    for path, target in tensors(old):
        yield target, sources[path]


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, such as "layers.0.attn.wq_a.scale"; a None is no leaf."""
    parts: Mapping[Any, Any]
    if is_dataclass(tree):
        parts = {f.name: getattr(tree, f.name) for f in fields(tree)}
    elif isinstance(tree, Mapping):
        parts = tree
    elif isinstance(tree, list | tuple):
        parts = dict(enumerate(tree))
    else:
        if tree is not None:
            yield name, tree
        return
    for key, value in parts.items():
        yield from _leaves(value, f"{name}.{key}" if name else str(key))
