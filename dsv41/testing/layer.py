"""A whole layer, as the model runs it, and what must hold of its steps whatever is in them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv41.errors import Dsv41Error
from dsv41.hal.types import AttnInputs, BlockTable, LayerState, Selection, StepPlan
from dsv41.testing import segments
from dsv41.testing.caches import everything
from dsv41.testing.case import Case
from dsv41.testing.clause import Violation, expect
from dsv41.testing.geometry import DTYPES
from dsv41.testing.scene import Scene, Side
from dsv41.testing.subject import Subject
from dsv41.testing.tolerances import MXFP8_STEP, norm_error, own_rows, quantised


@dataclass
class Chosen:
    """A tap that has a layer take over a selection, so that ties do not tell two runs apart."""

    selection_to_use: Selection | None = None

    def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None: ...

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        if self.selection_to_use is None:
            self.selection_to_use = selection
        return self.selection_to_use

    def output(self, layer: LayerState, plan: StepPlan, output: Tensor) -> None: ...


def run_layer(scene: Scene, side: Side, tap: Chosen | None = None) -> Tensor:
    """One step of a layer on a side: `[T, hidden]`."""
    published = scene.published
    if side.spec.ratio and not side.spec.owns_selection:
        published = scene.selected(side, published)
    output, _ = side.layer.run(scene.step_hidden, side.plan, published, tap=tap)
    return output


def whole_layer(subject: Subject, case: Case) -> None:
    hold_layer(Scene(subject, case))


def in_turns(subject: Subject, case: Case) -> None:
    """A layer without compressed rows, one with, and the first again, on one backend: what is rotated, and what is
    rotated back."""
    for role in ("window", case.layer, "window"):
        turn = replace(case, layer=role)
        subject.kept.pop(("run", turn), None)  # or what an earlier turn gave would be looked at again
        segments.window_rows(subject, turn)
        segments.project(subject, turn)


def hold_layer(scene: Scene) -> None:
    """The outputs of both sides' steps agree, on the selection that the reference makes."""
    tap, case = Chosen(), scene.case
    expected, found = (run_layer(scene, side, tap) for side in (scene.truth, scene.mine))
    live = scene.truth.plan.token_request >= 0
    limit = own_rows(DTYPES[case.dtype], scene.layouts)
    if case.quantize:
        limit += quantised(DTYPES[case.dtype], MXFP8_STEP, MXFP8_STEP)
    error = norm_error(found[live], expected[live])
    expect(
        error <= limit,
        f"the outputs of a {case.layer} layer differ by {error:.2e} of their norm: expected at most {limit:.2e}",
    )


def however_cut(subject: Subject, case: Case) -> None:
    """A step of several tokens gives what its tokens one by one give, over unquantised rows in float32."""
    whole, cut = Scene(subject, case), Scene(subject, case)
    expected = run_layer(whole, whole.mine)
    rows = []
    held, new = case.requests[0]
    for token in range(new):
        step = Scene(subject, replace(case, requests=((held + token, 1),)), totals=cut.totals)
        step.mine.caches = cut.mine.caches
        rows.append(run_layer(step, step.mine))
    error = norm_error(torch.cat(rows), expected)
    expect(
        error <= 1e-4, f"tokens one by one differ by {error:.2e} of the norm from the same in one step: expected 1e-4"
    )


def same_twice(subject: Subject, case: Case) -> None:
    outputs, memories = [], []
    for _ in range(2):
        scene = Scene(subject, case)
        outputs.append(run_layer(scene, scene.mine))
        memories.append(everything(scene.mine.caches))
    expect(torch.equal(*outputs), "the same step gave two outputs that differ in their bits")
    expect(torch.equal(*memories), "the same step wrote two sets of caches that differ in their bits")


def no_tokens(subject: Subject, case: Case) -> None:
    """A step of no token, of no request, and of padding alone."""
    for requests, padding in ((((3, 0),), 0), ((), 0), ((), 2), (((3, 0),), 2)):
        scene = Scene(subject, replace(case, requests=requests, padding=padding))
        before = everything(scene.mine.caches)
        output = run_layer(scene, scene.mine)
        expect(
            tuple(output.shape) == (padding, scene.config.hidden_size),
            f"a step of {padding} padding tokens and no other gives {list(output.shape)}",
        )
        after = everything(scene.mine.caches)
        expect(torch.equal(before, after), "a step without a live token writes into a cache")


def foreign_pages(subject: Subject, case: Case) -> None:
    """Pages that the cache has not are refused before anything is written."""
    for pool in (0, 1):
        for wrong in (10_000, -1):
            scene = Scene(subject, case)
            batch = scene.batch
            table = batch.window_table if pool == 0 else batch.compressed_tables[pool]
            pages = table.pages_cpu.clone()
            pages[-1, (pages[-1] >= 0).nonzero()[-1]] = wrong
            bad = BlockTable(pages.to(scene.device), pages, table.page_size)
            batch = (
                replace(batch, window_table=bad)
                if pool == 0
                else replace(batch, compressed_tables={**batch.compressed_tables, pool: bad})
            )
            before = everything(scene.mine.caches)
            try:
                scene.mine.layer.check(scene.step_hidden, batch)
            except Dsv41Error:
                after = everything(scene.mine.caches)
                expect(torch.equal(before, after), "a step that was refused has written into a cache")
                continue
            raise Violation(
                f"a {'window' if pool == 0 else 'compressed'} table that names page {wrong} is taken: expected "
                "InputError, with nothing written"
            )
