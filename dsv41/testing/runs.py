"""Both sides of a scene run through one layer's segments, each result kept, so that many clauses look at one run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dsv41.hal.layout import PagedCache
from dsv41.hal.types import AttnInputs, AttnOutput, Selection
from dsv41.testing.caches import copy_bytes
from dsv41.testing.case import Case
from dsv41.testing.outputs import heads_of
from dsv41.testing.scene import Scene
from dsv41.testing.subject import Subject


@dataclass(frozen=True)
class Bytes:
    """What a cache held at a time: `values` and `scales` of every slot, and all its memory."""

    values: Tensor
    scales: Tensor
    memory: tuple[Tensor, ...]

    @staticmethod
    def of(cache: PagedCache) -> Bytes:
        slots = torch.arange(cache.num_slots, device=cache.data.device)
        parts = (cache.data, cache.scale_pool) if cache.scale_pool is not None else (cache.data,)
        return Bytes(*cache.read_bytes(slots), tuple(part.clone() for part in parts))


class Run(Scene):
    """The segments of one layer on one step, in the order in which a layer runs them, each on the reference's results
    of those before, so that what a segment gets wrong shows there and not behind it."""

    @staticmethod
    def of(subject: Subject, case: Case) -> Run:
        """The run of a case, made once."""
        key = ("run", case)
        if key not in subject.kept:
            subject.kept[key] = Run(subject, case)
        run: Run = subject.kept[key]
        return run

    def __init__(self, subject: Subject, case: Case) -> None:
        super().__init__(subject, case)
        self.my_caches, self.true_caches = self.mine.caches, self.truth.caches
        self.before = {
            kind: Bytes.of(cache)
            for kind in ("window", "compressed", "index")
            if (cache := getattr(self.my_caches, kind)) is not None
        }

    @cached_property
    def true_inputs(self) -> AttnInputs:
        return self.inputs(self.truth)

    @cached_property
    def my_prepared(self) -> tuple[AttnInputs, dict[str, Bytes], Tensor | None]:
        """What `prepare_inputs` returns; the window and compressed caches after it, and the compressor state."""
        inputs = self.inputs(self.mine)
        caches = {"window": Bytes.of(self.my_caches.window)}
        if self.my_caches.compressed is not None:
            caches["compressed"] = Bytes.of(self.my_caches.compressed)
        state = self.my_caches.compressor_state
        return inputs, caches, None if state is None else state.clone()

    @cached_property
    def shared_inputs(self) -> AttnInputs:
        """What the backend under check prepared, with the reference's numbers where the contract says what they are."""
        mine, true = self.my_prepared[0], self.true_inputs
        return replace(mine, hidden=true.hidden, qr=true.qr, kv=true.kv, latent=true.latent)

    @cached_property
    def true_selection(self) -> Selection:
        return self.truth.backend.select(self.true_inputs, self.truth.state, self.truth.plan, self.published)

    @cached_property
    def my_selection(self) -> tuple[Selection, Bytes]:
        """What `select` chooses, and the index keys after it."""
        assert self.my_caches.index is not None
        found = self.mine.backend.select(self.shared_inputs, self.mine.state, self.mine.plan, self.published)
        return found, Bytes.of(self.my_caches.index)

    def level_caches(self) -> None:
        """Give the side under check the reference's bytes of the step."""
        _ = self.true_inputs, self.my_prepared
        if self.truth.spec.owns_selection:
            _ = self.true_selection, self.my_selection
        copy_bytes(self.my_caches, self.true_caches)

    @cached_property
    def attended_selection(self) -> Selection | None:
        if not self.truth.spec.ratio:
            return None
        return self.true_selection if self.truth.spec.owns_selection else self.published

    @cached_property
    def my_output(self) -> AttnOutput:
        """Attention over the reference's bytes and selection."""
        self.level_caches()
        selection = self.selected(self.mine, self.attended_selection)
        return self.mine.backend.attend(self.my_prepared[0], self.mine.state, self.mine.plan, selection)

    @cached_property
    def true_output(self) -> AttnOutput:
        self.level_caches()
        selection = self.selected(self.truth, self.attended_selection)
        return self.truth.backend.attend(self.true_inputs, self.truth.state, self.truth.plan, selection)

    @cached_property
    def true_heads(self) -> Tensor:
        """The reference's attention output `[T, H, D]`, rotated back."""
        return heads_of(self.true_output, self.truth)

    @property
    def live(self) -> Tensor:
        """bool `[T]`: the tokens that are no padding."""
        return self.truth.plan.token_request >= 0
