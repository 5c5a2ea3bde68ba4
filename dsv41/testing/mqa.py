"""`forward_mqa` over cache rows, selections and sinks that are drawn, so that nothing but attention is compared.

The query is the backend's own, since it may keep one in an order of its own; everything else is given to both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv41.hal.types import AttnInputs, AttnOutput, Selection
from dsv41.testing.caches import copy_bytes, everything
from dsv41.testing.case import Case
from dsv41.testing.clause import Violation, expect
from dsv41.testing.geometry import DTYPES
from dsv41.testing.outputs import heads_of, is_documented, poison
from dsv41.testing.scene import Scene, Side
from dsv41.testing.subject import Subject
from dsv41.testing.tolerances import MXFP8_STEP, same_bytes


@dataclass
class Attention:
    """A scene whose step is ready to attend: inputs of both sides and caches of the same bytes."""

    scene: Scene
    my_inputs: AttnInputs
    true_inputs: AttnInputs
    selection: Selection | None

    @staticmethod
    def of(subject: Subject, case: Case) -> Attention:
        scene = Scene(subject, case, drawn=True)
        selection = scene.drawn_selection() if scene.truth.spec.ratio else None
        # Each time the drawn rows go back over the step's own, which `prepare_inputs` writes.
        true = scene.inputs(scene.truth)
        copy_bytes(scene.truth.caches, scene.mine.caches)
        mine = _my_inputs(scene)
        copy_bytes(scene.mine.caches, scene.truth.caches)
        return Attention(scene, mine, true, selection)

    def output(self, side: Side, selection: Selection | None = None, *, stale: bool = False) -> AttnOutput:
        """`forward_mqa` of a side; with `stale`, into room that holds NaN."""
        inputs = self.my_inputs if side is self.scene.mine else self.true_inputs
        out = side.backend.alloc_attn_out(inputs, side.state)
        if stale:
            poison(out)
        chosen = self.scene.selected(side, self.selection if selection is None else selection)
        side.backend.forward_mqa(inputs, side.state, chosen, side.plan, out)
        return out

    def numbers(self, side: Side, out: AttnOutput) -> Tensor:
        """float32 `[T, ...]`: the live heads where the form of the output is known, otherwise what `o_proj` makes of
        them."""
        if is_documented(out):
            return heads_of(out, side)
        return side.backend.project(out, side.state, side.plan).float()

    @property
    def live(self) -> Tensor:
        return self.scene.truth.plan.token_request >= 0

    def tolerance(self, out: AttnOutput) -> float:
        limit = same_bytes(DTYPES[self.scene.case.dtype])
        return limit + MXFP8_STEP if out.scale is not None else limit

    def compare(self, selection: Selection | None = None) -> Tensor:
        """The numbers of the side under check, which are the reference's. Raises Violation."""
        out = self.output(self.scene.mine, selection)
        found = self.numbers(self.scene.mine, out)
        true = self.output(self.scene.truth, selection)
        if is_documented(out):
            expected = heads_of(true, self.scene.truth)
        else:
            expected = self.scene.truth.backend.project(true, self.scene.truth.state, self.scene.truth.plan).float()
        for token in self.live.nonzero().flatten().tolist():
            self._hold(token, found[token], expected[token], self.tolerance(out))
        padding = found[~self.live]
        expect(
            not bool((padding != 0).any()),
            f"padding tokens come out as {float(padding.abs().amax()) if padding.numel() else 0:.3g}: expected zeros",
        )
        return found

    def _hold(self, token: int, found: Tensor, expected: Tensor, limit: float) -> None:
        """Head by head, where an output has heads, since one head of many may be wrong."""
        scale = expected.norm() / max(1, len(expected)) ** 0.5 if expected.ndim > 1 else expected.norm()
        if expected.ndim == 1:
            found, expected = found[None], expected[None]
        for head in range(len(expected)):
            norm = expected[head].norm().clamp_min(1e-3 * scale).clamp_min(torch.finfo(torch.float32).tiny)
            error = float(((found[head] - expected[head]).norm() / norm).nan_to_num(nan=float("inf")))
            if error > limit:
                held, new = self._request(token)
                raise Violation(
                    f"token {token} (of a request that held {held} and got {new} tokens), head {head}: its output "
                    f"differs by {error:.2e} of its norm, expected at most {limit:.2e}"
                )

    def _request(self, token: int) -> tuple[int, int]:
        return self.scene.case.requests[int(self.scene.truth.plan.token_request[token])]


def _my_inputs(scene: Scene) -> AttnInputs:
    """The inputs of a step, made once: they do not depend on what the caches hold, or on how it lies there."""
    case, kept = scene.case, scene.subject.kept
    key = ("inputs", id(scene.mine.shared_layer), case.requests, case.padding, case.preset)
    if key not in kept:
        kept[key] = scene.inputs(scene.mine)
    found: AttnInputs = kept[key]
    return found


def attention(subject: Subject, case: Case) -> None:
    """As the reference, whatever the case."""
    Attention.of(subject, case).compare()


def empty_rows(subject: Subject, case: Case) -> None:
    """No window row, no selected row, and output room that holds NaN."""
    attention = Attention.of(subject, case)
    nothing = None
    if attention.selection is not None:
        nothing = Selection(torch.full_like(attention.selection.topk_indices, -1))
    out = attention.output(attention.scene.mine, nothing, stale=True)
    found = attention.numbers(attention.scene.mine, out)
    expect(
        not bool((found != 0).any()),
        f"tokens that attend to nothing come out as {float(found.abs().amax()):.3g}: expected zeros",
    )


def twice_in_reach(subject: Subject, case: Case) -> None:
    """Rows that the window shows are selected too: they count twice, as two vectors."""
    attention = Attention.of(subject, case)
    scene = attention.scene
    visible = scene.truth.plan.num_visible[scene.truth.spec.ratio]
    newest = visible[:, None] - 1 - torch.arange(scene.truth.spec.topk, device=scene.device)
    attention.compare(Selection(torch.where(newest >= 0, newest, -1)))


def minus_one_anywhere(subject: Subject, case: Case) -> None:
    """-1 first, last and between: the same rows give the same output as without it."""
    attention = Attention.of(subject, case)
    selection = attention.selection
    assert selection is not None
    rows = selection.topk_indices
    leading = rows.sort(dim=1).values
    trailing = leading.flip(1)
    for indices in (leading, trailing):
        attention.compare(replace(selection, topk_indices=indices))


def same_twice(subject: Subject, case: Case) -> None:
    attention = Attention.of(subject, case)
    mine = attention.scene.mine
    first, second = (attention.output(mine) for _ in range(2))
    for one, other in ((first.data, second.data), (first.scale, second.scale)):
        if one is not None and other is not None:
            same = torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            expect(same, "the same call gave two outputs that differ in their bits")


def stale_room(subject: Subject, case: Case) -> None:
    """Into room that holds NaN: the same bits, and zeros for padding."""
    attention = Attention.of(subject, case)
    mine = attention.scene.mine
    out = attention.output(mine, stale=True)
    found, clean = (attention.numbers(mine, part) for part in (out, attention.output(mine)))
    expect(
        not bool((found[~attention.live] != 0).any()),
        "padding tokens keep what the room for the output held: expected zeros",
    )
    expect(
        torch.equal(found[attention.live], clean[attention.live]),
        "the output depends on what the room for it held before the call",
    )
    projected = mine.backend.project(out, mine.state, mine.plan)
    expect(
        bool(projected[attention.live].isfinite().all()),
        "what o_proj makes of it is not finite where the room for it held NaN: padded heads or rows are read",
    )


def unwritten_bytes(subject: Subject, case: Case) -> None:
    """Over zeros where nobody wrote: the same bits as over NaN."""
    attention = Attention.of(subject, case)
    scene = attention.scene
    mine = scene.mine
    found = attention.numbers(mine, attention.output(mine))[attention.live]
    bad = ~found.isfinite()
    expect(not bool(bad.any()), f"{int(bad.sum())} numbers of the output are not finite: NaN of rows that nobody wrote")
    _zero_unwritten(scene)
    clean = attention.numbers(mine, attention.output(mine))[attention.live]
    expect(torch.equal(found, clean), "the output depends on bytes that nobody wrote")


def _zero_unwritten(scene: Scene) -> None:
    everything = tuple((0, total) for total in scene.totals)
    for kind in ("window", "compressed"):
        cache = getattr(scene.mine.caches, kind)
        if cache is None:
            continue
        plan = scene.truth.backend.plan(scene.batch_of(everything), [scene.truth.spec])
        slots = plan.window_slots if kind == "window" else plan.compressed_slots[scene.truth.spec.ratio]
        written = slots[slots >= 0]
        values, scales = cache.read_bytes(written)
        cache.data.zero_()
        if cache.scale_pool is not None:
            cache.scale_pool.zero_()
        cache.write_bytes(written, values, scales)


def padding_rows(subject: Subject, case: Case) -> None:
    """NaN in the hidden states of padding: the same bits for everyone else, in outputs and caches."""
    outputs, memories = [], []
    for value in (0.0, torch.nan):
        scene = Scene(subject, case, drawn=True)
        mine = scene.mine
        hidden = scene.step_hidden.clone()
        hidden[hidden.shape[0] - case.padding :] = value
        inputs = mine.backend.prepare_inputs(hidden, mine.state, mine.plan)
        selection = scene.selected(mine, scene.drawn_selection() if mine.spec.ratio else None)
        out = mine.backend.attend(inputs, mine.state, mine.plan, selection)
        result = mine.backend.project(out, mine.state, mine.plan)
        outputs.append(result[scene.truth.plan.token_request >= 0])
        memories.append(everything(mine.caches))
    expect(bool(outputs[1].isfinite().all()), "NaN in padding rows reaches the outputs of other tokens")
    expect(torch.equal(*outputs), "outputs depend on what padding rows hold")
    expect(torch.equal(*memories), "padding rows are written into a cache")
