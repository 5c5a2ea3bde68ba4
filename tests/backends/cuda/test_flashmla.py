"""The FlashMLA backend over a double of its library, beside the reference in the same records."""

from __future__ import annotations

import inspect
import math
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dsv41 import graph
from dsv41.backends.cuda import hopper, prefill
from dsv41.backends.cuda.choice import Choice
from dsv41.backends.cuda.flashmla import FlashMLABackend, FlashMLAPlan, SelectedRows
from dsv41.backends.cuda.layouts import check_readable
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.bench import make_work, our_call, random_caches
from dsv41.checkpoint import load_checkpoint
from dsv41.errors import BackendError, LayoutError
from dsv41.hal.builtin import FLASHMLA
from dsv41.hal.device import Device
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import Dialect, v4_584, v41_528
from dsv41.hal.types import AttnOutput, ForwardBatch, LayerCaches, LayerState, Selection, StepPlan
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint

from ...model.portables import AttendsAlone
from ...model.test_graph import Rehearsal
from ...model.toys import MAX_LEN, TOY, dyadic_checkpoint, signs
from ...wording import refused
from ..portable.test_backend import on_meta
from .common import BF16, POISON, OnCpu, Twins, agree, backend, make_stack
from .flash_mla_double import FlashMLA, Schedule, WithOut

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the real library is tested here: test_flashmla_gpu.py"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

FULL = os.environ.get("DSV41_FULL") == "1"
DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"
BOTH_RATIOS = [1, 2, 4, 5]
"""Layers of TOY: of ratio 2, a source and one that takes its selection over; of ratio 1, two that choose."""


@pytest.fixture(autouse=True)
def _no_grad(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DSV41_FLASHMLA_KERNEL", raising=False)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def dyadic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flashmla") / "dyadic"
    dyadic_checkpoint(path, BF16)
    return path


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four tokens are worth gathering for."""
    monkeypatch.setattr(prefill, "FEWEST_TOKENS", 4)


class Quick(AttendsAlone, OnCpu):
    pass


# Steps beside the reference


@pytest.mark.parametrize(
    ("kind", "arch", "fewest"),
    [(FlashMLA, "sm_90", 512), (WithOut, "sm_100", 4)],
    ids=["records in place", "gathered, into what it is given"],
)
def test_every_kind_of_step_gives_what_the_reference_does(
    dyadic: Path, kind: type[FlashMLA], arch: str, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, decode, both at once, several tokens, padding, no tokens at all."""
    monkeypatch.setattr(prefill, "FEWEST_TOKENS", fewest)
    library = kind(arch)
    layers = [0, 1, 4] if not FULL else None if fewest == 512 else [0, *BOTH_RATIOS]
    # The kernels before attention are run in place; between both modes they differ in nothing.
    twins = Twins(dyadic, backend(library, arch, OnCpu if fewest == 512 else Quick), layers)
    one, two, three = twins.add(), twins.add(), twins.add()
    steps: list[tuple[dict[int, int], dict[str, Any]]] = [
        ({one: 13, two: 1}, {"pad_to": 15}),
        ({one: 1, two: 2}, {}),
        ({two: 1, one: 1}, {"pad_to": 4}),
        ({three: 4, one: 1, two: 5}, {"pad_to": 11}),
        ({one: 1, two: 0, three: 3}, {}),
    ]
    for counts, options in steps:
        twins.step(counts, **options)
    before = len(library.calls)
    twins.step({})
    twins.step({one: 0})
    assert len(library.calls) == before
    assert (PREFILL in library.names()) == (fewest == 4)
    assert DECODE in library.names()


class OnHopper(OnCpu):
    """As on a Hopper GPU."""

    def read_choice(self) -> Choice:
        return Choice.read("sm_90", None)


def hopper_double(
    q: Any, num_heads: int, sink: Any, scale: float, window: Any, page_size: int, indices: Any, lengths: Any,
    compressed: Any, compressed_page_size: int, compressed_indices: Any, compressed_lengths: Any, out: Any,
) -> None:  # fmt: skip
    """What the kernel computes, by the double of FlashMLA, which takes 64 heads."""
    library, caches = FlashMLA(), []
    for data, size in ((window, page_size), (compressed, compressed_page_size)):
        shape, strides = (0 if data is None else len(data), size, 1, 584), (0 if data is None else data.stride(0), 584)
        caches.append(None if data is None else data.as_strided(shape, (*strides, 584, 1)))
    extra = None if compressed is None else compressed_indices[:, None]
    found = library.flash_mla_with_kvcache(
        q=torch.nn.functional.pad(q[:, :num_heads], (0, 0, 0, 64 - num_heads))[:, None], k_cache=caches[0],
        block_table=None, cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=library.get_mla_metadata()[0],
        softmax_scale=scale, is_fp8_kvcache=True, indices=indices[:, None],
        attn_sink=torch.nn.functional.pad(sink, (0, 64 - num_heads)), topk_length=lengths, extra_k_cache=caches[1],
        extra_indices_in_kvcache=extra, extra_topk_length=compressed_lengths,
    )[0]  # fmt: skip
    out[:, :num_heads] = found[:, 0, :num_heads]


def test_our_kernels_are_given_what_the_library_would_be(dyadic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are not padded, nothing is planned for the library or reserved for it, and it is not called."""
    monkeypatch.setattr(hopper, "attend", hopper_double)
    library = FlashMLA()
    tested = backend(library, kind=OnHopper)
    twins = Twins(dyadic, tested, [0, 1])
    one, two = twins.add(), twins.add()
    for counts, options in (({one: 5, two: 1}, {"pad_to": 8}), ({one: 1, two: 2}, {})):
        twins.step(counts, **options)
    assert library.calls == []
    assert library.schedules == []
    assert {spec.padded_heads for spec in twins.sessions[0].stack.specs} == {4}
    tested.reserve(4096, 8, 65536)
    assert "gathered" not in tested.workspace._buffers


@pytest.mark.usefixtures("gathers")
def test_a_long_chunk_amid_others_is_gathered_and_they_are_not(dyadic: Path) -> None:
    """Requests that hold much or little, one that has no token, and padding, which the last call takes along."""
    library = FlashMLA()
    twins = Twins(dyadic, backend(library), [1], max_requests=5)
    requests = [twins.add() for _ in range(5)]
    twins.step(dict(zip(requests, (1, 9, 2, 3, 1), strict=True)))
    del library.calls[:]
    twins.step(dict(zip(requests, (1, 6, 0, 4, 1), strict=True)), pad_to=14)
    layer = library.calls[:3]
    assert [name for name, _ in layer] == [DECODE, PREFILL, DECODE]
    assert [len(arguments["q"]) for _, arguments in layer] == [1, 10, 3]
    # 13 window rows of the one, since it sees 7 before its 6 tokens, and 7 of the other; then compressed rows.
    assert len(layer[1][1]["kv"]) == 13 + 7 + 15 // 2 + 7 // 2


def test_a_draft_block_is_that_of_the_reference(tmp_path: Path) -> None:
    """Its queries see rows behind their own, and the blocks have different lengths, so no flip would pack them."""
    config = replace(TOY, num_nextn_predict_layers=1)
    path = make_checkpoint(tmp_path / "toy", config=config, layers=[7])
    library = FlashMLA()
    twins = Twins(path, backend(library), [7], max_requests=2, max_tokens=32)
    one, two = twins.add(), twins.add()
    hidden = {one: twins.draw(11), two: twins.draw(2)}
    for session in twins.sessions:
        session.insert_window(hidden)
    twins.step({one: 5, two: 3}, "draft", pad_to=9)
    [(name, arguments)] = library.calls
    assert name == DECODE
    assert arguments["indices"].shape == (9, 1, 64)
    assert arguments["topk_length"].tolist() == [8 + 5] * 5 + [2 + 3] * 3 + [0]


class Holes:
    """A tap that puts -1 before and between the rows of every choice, and leaves one out of that of layer 3."""

    def inputs(self, *_: Any) -> None: ...
    def output(self, *_: Any) -> None: ...

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        rows = selection.topk_indices
        wide = torch.full((len(rows), 2 * TOY.index_topk + 2), -1, device=rows.device)
        wide[:, 2 : 2 + 2 * rows.shape[1] : 2] = rows
        wide[1, 4] = -1 if layer.spec.layer_id == 3 else wide[1, 4]
        return replace(selection, topk_indices=wide)


@pytest.mark.parametrize("fewest", [512, 4], ids=["records in place", "gathered"])
def test_minus_one_may_stand_anywhere_in_a_choice(dyadic: Path, fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "FEWEST_TOKENS", fewest)
    library = FlashMLA()
    twins = Twins(dyadic, backend(library), [1, 3])
    request = twins.add()
    twins.step({request: 9}, tap=Holes())
    twins.step({request: 2}, tap=Holes())
    assert (PREFILL in library.names()) == (fewest == 4)


def batch_of(stack: AttentionStack, counts: list[int], held: list[int], **options: Any) -> ForwardBatch:
    """Requests on pages of their own, 0, 1, ... of every pool; a page has four rows."""
    ratios = sorted({spec.ratio for spec in stack.specs} - {0})

    def pages(rows: list[int]) -> Tensor:
        width = max(-(-count // 4) for count in rows)
        return torch.arange(len(rows) * width, dtype=torch.int32).view(len(rows), width)

    return ForwardBatch.from_host(
        query_lens=counts,
        seq_lens=held,
        window_pages=pages(held),
        window_page_size=4,
        compressed_pages={ratio: pages([max(1, count // ratio) for count in held]) for ratio in ratios},
        compressed_page_size=dict.fromkeys(ratios, 4),
        **options,
    )


@pytest.mark.parametrize("fewest", [512, 4], ids=["records in place", "gathered"])
@pytest.mark.parametrize("library", [FlashMLA, WithOut])
def test_padding_gives_zeros_whatever_it_holds_and_spoils_nothing(
    dyadic: Path, library: type[FlashMLA], fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded tokens of NaN, also inside a request; padded heads of NaN."""
    monkeypatch.setattr(prefill, "FEWEST_TOKENS", fewest)
    tested = backend(library())
    stack = make_stack(dyadic, tested, [4])
    Session(stack, max_requests=2, page_size=4)
    state, batch = stack.layers[0].state, batch_of(stack, [6, 1], [6, 1], num_tokens=9)
    batch.positions[5] = -1
    assert state.caches is not None
    for cache in (state.caches.window, state.caches.compressed, state.caches.index):
        assert cache is not None
        cache.data.fill_(POISON)
    plan = tested.plan(batch, stack.specs)
    hidden = signs(9, TOY.hidden_size).to(BF16)
    hidden[plan.token_request < 0] = math.nan
    inputs = tested.prepare_inputs(hidden, state, plan)
    chosen = tested.prepare_selection(tested.select(inputs, state, plan, None), state, plan)
    oracle = ReferenceBackend(kv_cache_dtype="fp8_ds_mla_v4")
    expected = oracle.attend(inputs, state, plan, replace(chosen, derived=chosen.derived.slots))
    inputs.q[:, TOY.num_attention_heads :] = math.nan
    found = tested.attend(inputs, state, plan, chosen)
    assert not found.rotated_back
    live = TOY.num_attention_heads
    assert (found.data[plan.token_request < 0] == 0).all()
    agree(found.data[:, :live], expected.data[:, :live])


def test_captured_steps_overlap_as_the_choice_of_kernels_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend(FlashMLA()).max_tokens_for_overlap == 0
    monkeypatch.setattr(OnCpu, "read_choice", lambda self: Choice("sm_90", None, "hopper"))
    assert backend(FlashMLA()).max_tokens_for_overlap == 256


def test_its_own_projection_rotates_the_output_back(dyadic: Path) -> None:
    class Whole(FlashMLABackend):
        """With the products that it has on a GPU."""

    twins = Twins(dyadic, backend(FlashMLA(), kind=Whole), [0])
    twins.step({twins.add(): 3})


@pytest.mark.usefixtures("gathers")
def test_rows_before_the_start_of_a_window_are_not_seen(dyadic: Path) -> None:
    """As where a prefix is shared and its window replayed."""
    library = FlashMLA()
    twins = Twins(dyadic, backend(library), [1, 2], max_draft=2)
    request = twins.add()
    twins.step({request: 10})
    replay = twins.draw(8)
    children = {session.fork(request, 10, replay=replay) for session in twins.sessions}
    twins.step(dict.fromkeys(children, 5))
    assert library.names().count(PREFILL) == 6


# Sizes and kernels, on rows known by slot


@pytest.mark.parametrize(("heads", "padded"), [(8, 64), (65, 128)])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_rows_known_only_by_slot_are_attended_to(
    heads: int, padded: int, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a bench has them: there is a batch, but it says nothing of these rows, so nothing may be gathered by it."""
    monkeypatch.setattr(prefill, "FEWEST_TOKENS", 2)
    library = FlashMLA(arch)
    tested = backend(library, arch)
    work = make_work(tested, random_caches(tested, (4, 12), seed=1), 3, heads, seed=2)
    for sink in (work.layer.weights.attn_sink, work.layer.prepared.sink):
        sink[:2] = torch.tensor([math.inf, -math.inf])
    work.rows[0].window[1, 5:] = -1
    work.rows[0].compressed[2, ::3] = -1
    outs = []
    for on in (tested, ReferenceBackend(kv_cache_dtype="fp8_ds_mla_v4")):
        outs.append(AttnOutput(torch.full_like(work.q, math.nan)))
        our_call(on, work, work.rows[0], outs[-1])()
    agree(*(out.data[:, :heads] for out in outs))
    [(name, arguments)] = library.calls
    assert name == DECODE
    assert arguments["q"].shape == (3, 1, padded, 512)
    assert {"topk_length", "extra_topk_length"}.isdisjoint(arguments)  # the bench's requests are long
    assert (arguments["attn_sink"][heads:] == -math.inf).all()
    assert torch.equal(arguments["attn_sink"][:heads], work.layer.weights.attn_sink)


def test_the_portable_kernel_takes_over_where_it_is_named(dyadic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_FLASHMLA_KERNEL", "Portable ")
    library = FlashMLA()
    twins = Twins(dyadic, backend(library), [4])
    twins.step({twins.add(): 3}, pad_to=4)
    assert library.calls == []


def test_a_kernel_that_does_not_exist_is_refused_when_the_backend_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_FLASHMLA_KERNEL", "fastest")
    with refused(BackendError, "DSV41_FLASHMLA_KERNEL is 'fastest'", "flashmla, hopper, portable"):
        FlashMLABackend()


# Plans


def planned(stack: AttentionStack, *counts: int, **options: Any) -> FlashMLAPlan:
    extra = stack.backend.plan(batch_of(stack, list(counts), list(counts), **options), stack.specs).extra
    assert isinstance(extra, FlashMLAPlan)
    return extra


def test_a_schedule_belongs_to_a_step_and_to_all_layers_of_a_ratio(dyadic: Path) -> None:
    library = FlashMLA()
    twins = Twins(dyadic, backend(library))
    request = twins.add()
    for step in range(2):
        twins.step({request: 2})
        assert len(library.schedules) == 3 * (step + 1)
    assert sorted(schedule.calls for schedule in library.schedules) == [1, 1, 3, 3, 3, 3]
    used = {id(arguments["tile_scheduler_metadata"]) for _, arguments in library.calls}
    assert len(used) == 6


def test_only_schedules_of_the_ratios_at_hand_are_made(dyadic: Path) -> None:
    stack = make_stack(dyadic, backend(FlashMLA()), [0])
    assert set(planned(stack, 3).schedules) == {0}
    mixed = make_stack(dyadic, backend(FlashMLA()), [0, 1])
    assert all(isinstance(made[0], Schedule) for made in planned(mixed, 3).schedules.values())


def test_window_tables_are_packed_padded_and_counted(dyadic: Path) -> None:
    plan = planned(make_stack(dyadic, backend(FlashMLA()), [0]), 10, 2, num_tokens=13)
    assert (plan.window.dtype, plan.window.shape) == (torch.int32, (13, 64))
    assert plan.window_lengths.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 1, 2, 0]
    assert plan.window[9].tolist() == [*range(2, 10), *[-1] * 56]
    assert plan.window[11].tolist() == [12, 13, *[-1] * 62]
    assert (plan.window[12] == -1).all()


def test_a_selection_is_packed_padded_and_counted_and_keeps_its_slots() -> None:
    slots = torch.tensor([[-1, 7, -1, 3], [-1, -1, -1, -1], [5, 6, 7, 2**31 - 1]])
    made = backend(FlashMLA()).complete_selection(slots)
    assert isinstance(made, SelectedRows)
    assert made.slots is slots
    assert (made.indices.dtype, made.indices.shape) == (torch.int32, (3, 64))
    assert made.lengths.tolist() == [2, 0, 4]
    assert made.indices[:, :4].tolist() == [[7, 3, -1, -1], [-1] * 4, [5, 6, 7, 2**31 - 1]]
    assert (made.indices[:, 4:] == -1).all()
    assert backend(FlashMLA()).complete_selection(slots[:, :0]).indices.shape == (3, 64)
    assert backend(FlashMLA()).complete_selection(torch.zeros(2, 65).long()).indices.shape == (2, 128)


@pytest.mark.usefixtures("gathers")
def test_nothing_is_gathered_in_a_graph_or_for_a_draft(dyadic: Path) -> None:
    stack = make_stack(dyadic, backend(FlashMLA()), BOTH_RATIOS)
    assert [run.gathered is not None for run in planned(stack, 9).runs[1]] == [True]
    for options in ({"max_seq_len": 64}, {"causal": False}):
        plan = planned(stack, 9, **options)
        assert [run.gathered for run in plan.runs[1]] == [None]


def test_a_captured_step_is_the_eager_one_bit_for_bit(dyadic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over lengths that grow across the window and the top-k; the schedules are planned anew in every replay."""
    monkeypatch.setattr(graph, "_Recording", Rehearsal)
    stack = make_stack(dyadic, backend(FlashMLA(), kind=Quick), [4, 5])
    eager, captured = (Session(stack, max_requests=2, max_step_tokens=8, page_size=4) for _ in range(2))
    captured.capture(4, num_requests=2, layer_inputs=True)
    for session in (eager, captured):
        assert [session.add_request() for _ in range(2)] == [0, 1]
    for number, counts in enumerate(({0: 4}, {0: 3, 1: 1}, {0: 1}, {1: 2, 0: 2})):
        inputs = {r: signs(2, n, TOY.hidden_size, seed=10 * number + r).to(BF16) for r, n in counts.items()}
        expected, found = eager.step(inputs, pad_to=4), captured.step(inputs)
        assert all(torch.equal(found[r], expected[r]) for r in inputs)


@pytest.mark.parametrize("fewest", [512, 4], ids=["records in place", "gathered"])
def test_a_step_asks_the_device_nothing(dyadic: Path, fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device have no numbers to ask for."""
    monkeypatch.setattr("dsv41.backends.reference.backend.count_nan", lambda weight: 0)
    monkeypatch.setattr(prefill, "FEWEST_TOKENS", fewest)
    tested = FlashMLABackend(device="meta", facts=Device.gpu("sm_90", 0))
    tested.library = library = FlashMLA()
    checkpoint = load_checkpoint(dyadic, dtype=BF16)
    weights = {layer: on_meta(w) for layer, w in checkpoint.weights.items()}
    stack = AttentionStack(replace(checkpoint, weights=weights), tested, max_len=MAX_LEN)
    session = Session(stack, max_requests=2, max_step_tokens=32)
    one, two = session.add_request(), session.add_request()
    for counts in ((20, 1), (1, 1), (0, 3)):
        shape = dict(zip((one, two), counts, strict=True))
        inputs = {r: torch.empty(n, TOY.hidden_size, dtype=BF16, device="meta") for r, n in shape.items()}
        outputs = session.step(inputs, pad_to=24)
        assert all(outputs[r].shape == inputs[r].shape for r in inputs)
    assert (PREFILL in library.names()) == (fewest == 4)


@pytest.mark.usefixtures("gathers")
def test_reserve_is_enough_for_every_step_within_it(dyadic: Path) -> None:
    tested = backend(FlashMLA())
    stack = make_stack(dyadic, tested, [4])
    session = Session(stack, max_requests=2, max_tokens=16, max_step_tokens=9, page_size=4)
    reserved = tested.reserve(9, 2, 16)
    assert tested.workspace._held("gathered") == 9 * 4 * 1024  # which is what pays at 14 keys a token
    requests = [session.add_request() for _ in range(2)]
    for count in (4, 4):
        session.step({r: signs(count, TOY.hidden_size).to(BF16) for r in requests})
    assert tested.workspace.bytes == reserved


def test_warmup_calls_the_library_for_every_kind_of_layer(dyadic: Path) -> None:
    library = FlashMLA()
    tested = backend(library)
    stack = make_stack(dyadic, tested, [0, 1, 4])
    tested.reserve(2, 1, 16)
    tested.warmup()
    met = {(len(a["q"]), "extra_k_cache" in a) for name, a in library.calls if name == DECODE}
    assert met == {(tokens, extra) for tokens in (1, 2) for extra in (False, True)}
    assert len(stack.layers) == 3


# What is taken and what is refused


def test_heads_are_padded_to_64_or_128() -> None:
    tested = FlashMLABackend()
    assert [tested.get_padded_num_q_heads(heads) for heads in (1, 8, 64, 65, 128)] == [64, 64, 64, 128, 128]
    for heads in (0, 129):
        with refused(BackendError, f"{heads} query heads", "1 to 128", "tp_size"):
            tested.get_padded_num_q_heads(heads)


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_ds_mla", "fp8_ds_mla_v4"])
@pytest.mark.parametrize("index", ["auto", "mxfp4", "fp8", "float32"])
def test_every_name_is_the_584_byte_record(name: str, index: str) -> None:
    tested = FlashMLABackend(kv_cache_dtype=name, index_cache_dtype=index)
    assert tested.kv_cache_dtype == "fp8_ds_mla" == FLASHMLA.packed_kv_cache_dtype
    for layout in (tested.layouts.window, tested.layouts.compressed):
        assert (layout.record, layout.scale_placement) == (v4_584(Dialect.OCP), ScalePlacement.PAGE)
        assert (layout.page_size, layout.stride, layout.stride % 576) == (64, 37440, 0)
    same = ReferenceBackend(index_cache_dtype=index)
    assert (tested.index_cache_dtype, tested.layouts.index) == (same.index_cache_dtype, same.layouts.index)


@pytest.mark.parametrize("name", ["nvfp4_ds_mla", "bfloat16", "fp8_e4m3", "float32", "fp9"])
def test_other_formats_are_refused(name: str) -> None:
    with refused(LayoutError, f"'{name}'", "flashmla", "auto, fp8, fp8_ds_mla, fp8_ds_mla_v4"):
        FlashMLABackend(kv_cache_dtype=name)
    with pytest.raises(LayoutError, match="index_cache_dtype 'fp9' is unknown: flashmla reads auto"):
        FlashMLABackend(index_cache_dtype="fp9")


def spread(layout: CacheLayout, stride: int, offset: int = 0) -> PagedCache:
    """Two pages of it, aligned to nothing, `stride` bytes apart from byte `offset` on."""
    memory = torch.zeros(offset + 3 * stride + 16, dtype=torch.uint8)
    start = offset - memory.data_ptr() % 16 + (16 if memory.data_ptr() % 16 else 0)
    pages = torch.as_strided(memory, (2, layout.page_bytes), (stride, 1), start)
    return PagedCache(replace(layout, alignment=1), pages)


def test_caches_that_the_library_would_misread_are_refused(dyadic: Path) -> None:
    for arch in ("sm_90", "sm_100", "sm_103"):
        tested = backend(FlashMLA(arch), arch)
        stack = make_stack(dyadic, tested, [4])
        Session(stack, max_requests=1)
        caches, layout = stack.layers[0].state.caches, tested.layouts.window
        assert caches is not None

        def bind(window: PagedCache, caches: LayerCaches = caches, stack: AttentionStack = stack) -> None:
            stack.bind({4: replace(caches, window=window)})

        mxfp8 = CacheLayout(v41_528(Dialect.OCP), 64, ScalePlacement.TOKEN)
        inline = CacheLayout(v4_584(Dialect.OCP), 64, ScalePlacement.TOKEN)
        other = CacheLayout(v4_584(Dialect.FNUZ), 64, ScalePlacement.PAGE)
        for wrong, words in ((mxfp8, "fp8_ds_mla_v41"), (inline, "scale_placement token"), (other, "fnuz")):
            with refused(LayoutError, "the window cache of layers.4.attn", words):
                bind(PagedCache.allocate(wrong, 2))
            with refused(LayoutError, "the compressed cache of layers.4.attn", words):
                stack.bind({4: replace(caches, compressed=PagedCache.allocate(wrong, 2))})
        with refused(LayoutError, "begins at address", "a multiple of 16"):
            bind(spread(layout, 37440, offset=8))
        if arch == "sm_90":
            bind(spread(layout, 37376))
            with refused(LayoutError, "37384 bytes apart", "a multiple of 16", "use 37392"):
                bind(spread(layout, 37384))
        else:
            with refused(LayoutError, "37376 bytes apart", arch, "a multiple of 576", "use 37440"):
                bind(spread(layout, 37376))
        bind(spread(layout, 37440))
        bind(PagedCache.allocate(layout.with_page_size(4), 3))


def test_a_cache_of_more_rows_than_32_bits_count_is_refused(dyadic: Path) -> None:
    layout = FlashMLABackend().layouts.window
    data = torch.empty((1 << 31) // 65, layout.stride, dtype=torch.uint8, device="meta")
    check_readable("it", PagedCache(layout, data[:-1]), layout, "sm_90")
    more = torch.empty((1 << 31) // 65 + 1, layout.stride, dtype=torch.uint8, device="meta")
    with refused(LayoutError, "less than 2147483648 rows", "fewer pages"):
        check_readable("it", PagedCache(layout, more), layout, "sm_90")


def test_activations_in_float32_are_refused_in_words(dyadic: Path) -> None:
    stack = AttentionStack(
        load_checkpoint(dyadic, layers=[0], dtype=torch.float32), backend(FlashMLA()), max_len=MAX_LEN
    )
    session = Session(stack, max_requests=1)
    with refused(BackendError, "torch.float32", "bfloat16", "portable"):
        session.step({session.add_request(): signs(1, TOY.hidden_size)})


# The library


def test_the_library_is_imported_with_the_first_plan(monkeypatch: pytest.MonkeyPatch, dyadic: Path) -> None:
    stack = make_stack(dyadic, OnCpu(device="cpu"), [0])
    with pytest.raises(BackendError, match=r"flash_mla cannot be imported .*pip install -U tokenspeed-flashmla"):
        planned(stack, 1)
    library, module = FlashMLA(), types.ModuleType("flash_mla")
    for name in ("get_mla_metadata", DECODE, PREFILL):
        setattr(module, name, getattr(library, name))
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    session = Session(stack, max_requests=1)
    session.step({session.add_request(): signs(1, TOY.hidden_size).to(BF16)})
    assert library.names() == [DECODE]


def test_what_the_library_says_is_passed_on_with_what_it_was_given(dyadic: Path) -> None:
    class Broken(FlashMLA):
        def flash_mla_with_kvcache(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no kernel image is available")

    stack = make_stack(dyadic, backend(Broken()), [0])
    session = Session(stack, max_requests=1)
    words = r"flash_mla_with_kvcache failed with RuntimeError: no kernel image.*q = bfloat16 \[2, 1, 64, 512\]"
    with pytest.raises(BackendError, match=words):
        session.step({session.add_request(): signs(2, TOY.hidden_size).to(BF16)})


def test_every_call_binds_to_the_signatures_of_the_library(dyadic: Path) -> None:
    """All arguments by keyword, none that the published builds lack."""
    library = FlashMLA()
    twins = Twins(dyadic, backend(library), [0, 1])
    twins.step({twins.add(): 2})
    for name, arguments in library.calls:
        inspect.signature(getattr(library, name)).bind(**arguments)
