"""Attention layers that share compressed rows, selection and candidates."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv41.attention import DeepseekV41Attention, Tap
from dsv41.errors import BackendError, InputError, LayoutError
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.types import BlockScaledWeight, ForwardBatch, LayerCaches, LayerSpec, Selection
from dsv41.rope import cos_sin_table

if TYPE_CHECKING:
    from dsv41.checkpoint import Checkpoint


class AttentionStack:
    """The attention layers of a checkpoint, in order, on one backend.

    What lies between attention layers (norms, experts, residual streams) is the engine's: give each layer its own
    input, or one tensor that a plain residual `x + attention(x)` carries from layer to layer. `max_len` bounds
    positions (default: the config's); `quantize_activations` rounds the inputs of fp8 projections to MXFP8.

    `caches` are those bound last; `generation` counts how often the weights' memory was replaced.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: AttentionBackend,
        *,
        max_len: int | None = None,
        quantize_activations: bool = False,
    ) -> None:
        self.config, self.backend = checkpoint.config, backend
        self.dtype = checkpoint.dtype
        self.caches: dict[int, LayerCaches] | None = None
        self.generation = 0
        limit = self.config.max_position_embeddings
        if max_len is not None and (type(max_len) is not int or not 1 <= max_len <= limit):
            raise InputError(
                f"max_len is {max_len!r}: expected 1 to {limit}, the config's max_position_embeddings; give one of "
                "these, or None for the largest"
            )
        self.max_len = limit if max_len is None else max_len
        for name, weight in checkpoint.tensors():
            where = weight.data.device if isinstance(weight, BlockScaledWeight) else weight.device
            if where != backend.device:
                raise InputError(
                    f"{name} is on {where}: expected {backend.device}, the backend's device; load the checkpoint with "
                    f"device={str(backend.device)!r}"
                )
        tables = {
            ratio > 0: cos_sin_table(self.config, ratio, self.max_len, backend.device)
            for ratio in {spec.ratio for spec in checkpoint.specs}
        }
        self.layers = [
            DeepseekV41Attention(
                replace(spec, quantize_activations=quantize_activations),
                checkpoint.weights[spec.layer_id],
                backend,
                tables[spec.ratio > 0],
            )
            for spec in checkpoint.specs
        ]

    @property
    def specs(self) -> list[LayerSpec]:
        return [layer.spec for layer in self.layers]

    def bind(self, caches: dict[int, LayerCaches]) -> None:
        """Bind each layer's caches, keyed by layer id; a layer that owns no compressed rows takes its source's.

        Raises LayoutError for a layer that gets none or cannot read them, and then nothing is bound.
        """
        found: list[LayerCaches] = []
        for layer in self.layers:
            spec = layer.spec
            if missing := {spec.layer_id, spec.kv_source if spec.ratio else spec.layer_id} - set(caches):
                raise LayoutError(
                    f"{spec.name} needs the caches of layers {sorted(missing, key=str)}: expected an entry for each of "
                    f"{[spec.layer_id for spec in self.specs]}, found {sorted(caches)}; `cache_specs` lists them"
                )
            own = caches[spec.layer_id]
            if spec.kv_source is not None and not spec.owns_compressed:
                source = caches[spec.kv_source]
                own = replace(own, compressed=source.compressed, index=source.index)
            layer.check_caches(own)
            found.append(own)
        for layer, own in zip(self.layers, found, strict=True):
            layer.bind(own)
        self.caches = caches

    # Weights

    def update_weights(self, checkpoint: Checkpoint) -> None:
        """Copy other weights of the same model into the memory of these, any number of times, for all layers or none.

        Every tensor object and address stays. What requests hold was computed with the weights before, and stays too:
        free them where that matters. For the time of the copy, both are in memory. Raises InputError for a checkpoint
        of another form, BackendError while asleep.
        """
        if self.asleep:
            raise BackendError("this stack is asleep: expected its weights in memory; call `wake` with the checkpoint")
        self._take(checkpoint)

    @property
    def asleep(self) -> bool:
        return any(layer.asleep for layer in self.layers)

    def sleep(self) -> None:
        """Give back the memory of the weights and keep everything else: caches, requests, tensor objects. The memory
        is free once no one else holds it, as a `Checkpoint` would whose tensors are not these. Nothing runs until
        `wake`."""
        for layer in self.layers:
            layer.sleep()

    def wake(self, checkpoint: Checkpoint) -> None:
        """Take over the weights of a checkpoint loaded anew, in the tensor objects of before.

        Their addresses are others, so what was captured before `sleep` must be captured again. Raises InputError for a
        checkpoint of another form, and then sleeps on; BackendError unless asleep.
        """
        if not self.asleep:
            raise BackendError("this stack is awake: expected it asleep; call `update_weights` to change its weights")
        self._take(checkpoint)
        self.generation += 1

    def _take(self, checkpoint: Checkpoint) -> None:
        wrong = [f.name for f in fields(self.config) if f.compare and self._differs(checkpoint, f.name)]
        if wrong or checkpoint.dtype != self.dtype:
            mine, theirs = (
                ", ".join([*(f"{name} {getattr(config, name)!r}" for name in wrong), f"activations in {dtype}"])
                for config, dtype in ((self.config, self.dtype), (checkpoint.config, checkpoint.dtype))
            )
            raise InputError(
                f"the checkpoint has {theirs}: expected {mine}, as this stack was built; load one of the same model, "
                "or build a new stack"
            )
        layers = [layer.spec.layer_id for layer in self.layers]
        if missing := sorted(set(layers) - set(checkpoint.weights)):
            raise InputError(
                f"the checkpoint lacks the layers {missing}: expected {layers}; load it with layers={layers}"
            )
        for put in [layer.take(checkpoint.weights[layer.spec.layer_id]) for layer in self.layers]:
            put()

    def _differs(self, checkpoint: Checkpoint, name: str) -> bool:
        return bool(getattr(self.config, name) != getattr(checkpoint.config, name))

    def forward(self, hidden: Tensor, batch: ForwardBatch, *, tap: Tap | None = None) -> Tensor:
        """Run one step. `hidden` `[T, hidden_size]` gives the residual stream after the last layer; `[L, T,
        hidden_size]`, an input for each layer, gives each layer's output.

        Everything that can be wrong with the inputs is refused before any cache is written. Raises InputError.
        """
        self.check(hidden, batch)
        plan = self.backend.plan(batch, self.specs)
        outputs: list[Tensor] = []
        published: Selection | None = None
        stream = hidden
        for i, layer in enumerate(self.layers):
            out, published = layer.run(hidden[i] if hidden.ndim == 3 else stream, plan, published, tap=tap)
            if hidden.ndim == 3:
                outputs.append(out)
            else:
                stream = stream + out
        return torch.stack(outputs) if hidden.ndim == 3 else stream

    def insert_window(self, hidden: Tensor, batch: ForwardBatch) -> None:
        """Write every layer's window rows without queries. `hidden` as for `forward`; one tensor serves all layers."""
        self.check(hidden, batch, causal=True)
        plan = self.backend.plan(batch, self.specs)
        for i, layer in enumerate(self.layers):
            self.backend.insert_window(hidden[i] if hidden.ndim == 3 else hidden, layer.state, plan)

    def check(self, hidden: Tensor, batch: ForwardBatch, *, causal: bool | None = None) -> None:
        """Raise InputError or LayoutError for a step that `forward` would refuse, on the host alone; nothing is run.
        `causal` is what the batch must be (None = what each layer is)."""
        self._check_form(hidden, batch)
        passed: set[tuple[Any, ...]] = set()
        for i, layer in enumerate(self.layers):
            layer.check(hidden[i] if hidden.ndim == 3 else hidden, batch, causal=causal, passed=passed)

    def _check_form(self, hidden: Tensor, batch: ForwardBatch) -> None:
        shape = [batch.num_tokens, self.config.hidden_size]
        if list(hidden.shape) not in (shape, [len(self.layers), *shape]):
            raise InputError(
                f"hidden states have shape {list(hidden.shape)}: expected [tokens, hidden_size] = {shape}, or one such "
                f"for each of the {len(self.layers)} layers; give one row for each token of the batch, padding included"
            )
        if hidden.dtype != self.dtype:
            raise InputError(
                f"hidden states are {hidden.dtype}: expected {self.dtype}, in which this checkpoint computes; convert "
                "them, or load it with another dtype"
            )
        heads = self.specs[0].num_heads
        if hidden.ndim == 2 and heads != self.config.num_attention_heads:
            raise InputError(
                f"hidden states have shape {list(hidden.shape)}, but this rank has {heads} of the model's "
                f"{self.config.num_attention_heads} heads, so a layer's output is a partial sum: expected an input for "
                "each layer; or run the layers one by one and all-reduce what each gives"
            )
