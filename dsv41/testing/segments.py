"""Each segment at its borders: what it leaves in the caches and what it hands on, beside the reference's."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.choices import as_sets, block_scores, invalid_rows, untied_rows
from dsv41.hal.layout import PagedCache
from dsv41.hal.records import unpack
from dsv41.testing.case import Case
from dsv41.testing.clause import Inapplicable, Violation, expect
from dsv41.testing.geometry import DTYPES
from dsv41.testing.outputs import heads_of, is_documented, with_heads
from dsv41.testing.runs import Bytes, Run
from dsv41.testing.scene import Scene
from dsv41.testing.subject import Subject
from dsv41.testing.tolerances import (
    MXFP8_STEP,
    norm_error,
    quantised,
    record_step,
    row_bound,
    same_bytes,
    total_error,
)

_STATE_TOLERANCE = 2.0**-10
"""Of the compressor's raw rows, which are sums of products in float32; ten bits are what TF32 keeps."""


# prepare_inputs


def window_rows(subject: Subject, case: Case) -> None:
    run = Run.of(subject, case)
    _ = run.true_inputs
    after = run.my_prepared[1]["window"]
    _compare_rows(run, "window", after, run.true_caches.window, run.truth.plan.window_slots)


def compressed_rows(subject: Subject, case: Case) -> None:
    run = Run.of(subject, case)
    _ = run.true_inputs
    assert run.true_caches.compressed is not None
    slots = run.truth.plan.compressed_slots[run.truth.spec.ratio]
    _compare_rows(run, "compressed", run.my_prepared[1]["compressed"], run.true_caches.compressed, slots)


def compressor_state(subject: Subject, case: Case) -> None:
    run = Run.of(subject, case)
    _ = run.true_inputs
    found, expected = run.my_prepared[2], run.true_caches.compressor_state
    assert found is not None and expected is not None
    # A slot whose request ended a group may hold anything but NaN that a later group would read.
    needed = _open_rows(run, expected)
    error = norm_error(found[needed], expected[needed])
    expect(
        error <= _STATE_TOLERANCE,
        f"the raw rows that the compressor keeps for later steps differ by {error:.2e} of their norm: expected at most "
        f"{_STATE_TOLERANCE:.1e}",
    )


def _open_rows(run: Run, state: Tensor) -> Tensor:
    """bool `[slots, ring]`: the last rows of each request, as many as the ring has."""
    needed = torch.zeros(state.shape[:2], dtype=torch.bool)
    for request, total in enumerate(run.totals):
        for position in range(max(0, total - state.shape[1]), total):
            needed[request, position % state.shape[1]] = True
    return needed.to(state.device)


def insert_window(subject: Subject, case: Case) -> None:
    run = Run.of(subject, case)
    _ = run.true_inputs, run.my_prepared
    scene = Scene(subject, case)
    if not scene.batch.causal:
        raise Inapplicable("a draft block is written by prepare_inputs")
    mine = scene.mine
    mine.backend.insert_window(scene.step_hidden, mine.state, mine.plan)
    after = Bytes.of(mine.caches.window)
    _compare_rows(run, "window", after, run.true_caches.window, run.truth.plan.window_slots)


def _compare_rows(run: Run, kind: str, after: Bytes, truth: PagedCache, slots: Tensor) -> None:
    """The rows of the step are the reference's, and nothing else in the cache has changed."""
    before, record, dtype = run.before[kind], truth.layout.record, DTYPES[run.case.dtype]
    written = slots[slots >= 0]
    expected = truth.read(written)
    found = unpack(record, after.values[written], after.scales[written], truth.tensor_scale)
    _hold_rows(kind, found, expected, record_bound=row_bound(record, expected, dtype, truth.tensor_scale))
    limit = quantised(dtype, record_step(record))
    error = total_error(found, expected)
    expect(
        error <= limit, f"the {kind} rows of the step differ by {error:.2e} of their norm: expected at most {limit:.2e}"
    )
    _hold_others(kind, before, after, truth, written)


def _hold_rows(kind: str, found: Tensor, expected: Tensor, record_bound: Tensor) -> None:
    wrong = ~((found - expected).abs() <= record_bound)
    if bool(wrong.any()):
        row, dim = wrong.nonzero()[0].tolist()
        raise Violation(
            f"{int(wrong.sum())} numbers in {int(wrong.any(1).sum())} of {len(wrong)} {kind} rows are further off than "
            f"their record allows: row {row}, dim {dim} is {float(found[row, dim]):.4g}, expected "
            f"{float(expected[row, dim]):.4g}"
        )


def _hold_others(kind: str, before: Bytes, after: Bytes, cache: PagedCache, written: Tensor) -> None:
    untouched = torch.ones(cache.num_slots, dtype=torch.bool, device=written.device)
    untouched[written] = False
    changed = ((before.values != after.values).any(1) | (before.scales != after.scales).any(1)) & untouched
    expect(
        not bool(changed.any()),
        f"{int(changed.sum())} {kind} rows that are not of this step were written, such as slot "
        f"{int(changed.nonzero()[0]) if bool(changed.any()) else -1}",
    )
    width = cache.layout.page_bytes
    tails = (before.memory[0][:, width:] != after.memory[0][:, width:]).any()
    expect(not bool(tails), f"bytes between pages of the {kind} cache were written: they may belong to another cache")


# select


def index_keys(subject: Subject, case: Case) -> None:
    run = Run.of(subject, case)
    _ = run.true_selection
    assert run.true_caches.index is not None
    slots = run.truth.plan.compressed_slots[run.truth.spec.ratio]
    _compare_rows(run, "index", run.my_selection[1], run.true_caches.index, slots)


def index_scores(subject: Subject, case: Case) -> None:
    run = Run.of(subject, case)
    run.level_caches()
    assert run.true_caches.index is not None
    mine, truth = run.mine, run.truth
    expected = truth.backend.index_scores(run.true_inputs, truth.state, truth.plan).float()
    found = mine.backend.index_scores(run.shared_inputs, mine.state, mine.plan).float()
    expect(
        found.shape == expected.shape, f"index_scores has shape {list(found.shape)}: expected {list(expected.shape)}"
    )
    seen = _visible(run, expected.shape[1]) & run.live[:, None]
    found, expected = (scores.masked_fill(~seen, 0.0) for scores in (found, expected))
    limit = quantised(DTYPES[case.dtype], record_step(run.true_caches.index.layout.record))
    error = total_error(found, expected)
    expect(error <= limit, f"index scores differ by {error:.2e} of their norm: expected at most {limit:.2e}")


def topk(subject: Subject, case: Case) -> None:
    run = Run.of(subject, case)
    own = run.true_selection
    found = run.my_selection[0]
    scores, allowed = _judged(run)
    visible = run.truth.plan.num_visible[run.truth.spec.ratio]
    _hold_choice("top-k", found.topk_indices, own.topk_indices, scores, allowed, visible, _margin(run), run.live)


def candidates(subject: Subject, case: Case) -> None:
    run = Run.of(subject, case)
    own, found = run.true_selection, run.my_selection[0]
    spec = run.truth.spec
    if not spec.publishes_candidates:
        raise Inapplicable("the layer publishes no candidates")
    assert own.candidates is not None
    expect(found.candidates is not None, "a layer that publishes candidates published none")
    assert found.candidates is not None
    scores, _ = _judged(run)
    visible = run.truth.plan.num_visible[spec.ratio]
    best, seen = block_scores(scores, visible, spec.candidate_block_size)
    newest = ((visible - 1) // spec.candidate_block_size)[:, None]
    pinned = (found.candidates == newest).any(1) | (visible == 0) | ~run.live
    expect(
        bool(pinned.all()),
        f"the newest visible block is not among the candidates of token {_first(~pinned)}: expected it always",
    )
    _hold_choice("candidate blocks", found.candidates, own.candidates, best, seen, seen.sum(-1), _margin(run), run.live)


def restricted_topk(subject: Subject, case: Case) -> None:
    run = Run.of(subject, case)
    if not run.truth.spec.reads_candidates:
        raise Inapplicable("the layer reads no candidates")
    assert run.published is not None and run.published.candidates is not None
    found = run.my_selection[0].topk_indices
    block = torch.where(found >= 0, found // run.truth.spec.candidate_block_size, -1)
    inside = (block[:, :, None] == run.published.candidates[:, None, :]).any(-1) | (found < 0) | ~run.live[:, None]
    expect(
        bool(inside.all()),
        f"token {_first(~inside.all(1))} selects positions outside the candidate blocks that were published",
    )
    topk(subject, case)


def _judged(run: Run) -> tuple[Tensor, Tensor]:
    """The reference's scores of the reference's queries over the keys that the side under check wrote, and which
    positions may be chosen."""
    truth, spec = run.truth, run.truth.spec
    _ = run.my_selection
    assert run.true_caches.index is not None
    kept = Bytes.of(run.true_caches.index)
    mine = run.my_selection[1]
    slots = torch.arange(run.true_caches.index.num_slots, device=run.device)
    run.true_caches.index.write_bytes(slots, mine.values, mine.scales)
    scores = truth.backend.index_scores(run.true_inputs, truth.state, truth.plan).float()
    run.true_caches.index.write_bytes(slots, kept.values, kept.scales)
    allowed = _visible(run, scores.shape[1])
    if spec.reads_candidates and run.published is not None and run.published.candidates is not None:
        blocks = as_sets(run.published.candidates, -(-scores.shape[1] // spec.candidate_block_size))
        allowed &= blocks.repeat_interleave(spec.candidate_block_size, dim=1)[:, : scores.shape[1]]
    return scores, allowed


def _visible(run: Run, width: int) -> Tensor:
    visible = run.truth.plan.num_visible[run.truth.spec.ratio]
    return torch.arange(width, device=run.device) < visible[:, None]


def _margin(run: Run) -> float:
    """Scores nearer than this, in units of a row's largest, may change places."""
    assert run.true_caches.index is not None
    return quantised(DTYPES[run.case.dtype], record_step(run.true_caches.index.layout.record))


def _hold_choice(
    what: str, found: Tensor, own: Tensor, scores: Tensor, allowed: Tensor, visible: Tensor, margin: float, live: Tensor
) -> None:
    invalid = invalid_rows(found, visible, (own >= 0).sum(-1)) & live
    expect(
        not bool(invalid.any()),
        f"the {what} of token {_first(invalid)} are {_row(found, invalid)}: expected {_count(own, invalid)} different "
        f"ones below {_count_below(visible, invalid)}",
    )
    untied = untied_rows(found, own, scores, allowed, margin) & live
    expect(
        not bool(untied.any()),
        f"the {what} of token {_first(untied)} are {_row(found, untied)}, and {_row(own, untied)} score higher by more "
        f"than {margin:.2g} of the largest score",
    )


def _first(rows: Tensor) -> int:
    return int(rows.nonzero()[0]) if bool(rows.any()) else -1


def _row(indices: Tensor, rows: Tensor) -> list[int]:
    return sorted(indices[_first(rows)].tolist())


def _count(own: Tensor, rows: Tensor) -> int:
    return int((own[_first(rows)] >= 0).sum())


def _count_below(visible: Tensor, rows: Tensor) -> int:
    return int(visible[_first(rows)])


# attend and project


def attend(subject: Subject, case: Case) -> None:
    run = Run.of(subject, case)
    expected = run.true_heads
    out = run.my_output
    limit = same_bytes(DTYPES[case.dtype])
    if is_documented(out):
        found = heads_of(out, run.mine)
        if out.scale is not None:
            limit += MXFP8_STEP
    else:
        found = run.mine.backend.project(out, run.mine.state, run.mine.plan)
        expected = run.truth.backend.project(run.true_output, run.truth.state, run.truth.plan)
        limit += MXFP8_STEP
    error = norm_error(found[run.live], expected[run.live])
    expect(error <= limit, f"attention outputs differ by {error:.2e} of their norm: expected at most {limit:.2e}")


def project(subject: Subject, case: Case) -> None:
    run = Run.of(subject, case)
    out = run.my_output
    truth, mine = run.truth, run.mine
    limit = same_bytes(DTYPES[case.dtype])
    if is_documented(out):
        heads = run.true_heads.to(DTYPES[case.dtype])
        out = with_heads(out, heads, mine)
    else:
        limit += MXFP8_STEP
    if case.quantize or out.scale is not None:
        limit = quantised(DTYPES[case.dtype], MXFP8_STEP, MXFP8_STEP)
    expected = truth.backend.project(run.true_output, truth.state, truth.plan)
    found = mine.backend.project(out, mine.state, mine.plan)
    shape = (run.batch.num_tokens, truth.spec.hidden_size)
    expect(tuple(found.shape) == shape, f"o_proj returns {list(found.shape)}: expected {list(shape)}")
    error = norm_error(found[run.live], expected[run.live])
    expect(error <= limit, f"projected outputs differ by {error:.2e} of their norm: expected at most {limit:.2e}")
