"""The fused backend over the emulated library, beside the reference in the same records."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.backends.cuda import flashmla_mega
from dsv41.backends.cuda.flashmla_mega import FlashMLAMegaBackend, IndexRows, MegaPlan
from dsv41.backends.cuda.mega_weights import FusedMatrix, MegaWeights
from dsv41.backends.portable.backend import PortableBackend
from dsv41.backends.reference.attention import gather, sparse_mqa
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.backends.reference.norm import rotate
from dsv41.backends.reference.quantize import mxfp8_round
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.errors import BackendError, InputError, LayoutError
from dsv41.hal.builtin import FLASHMLA_MEGA
from dsv41.hal.device import Library
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import Dialect, v4_584, v41_528
from dsv41.hal.types import AttnOutput, ForwardBatch, LayerCaches, LayerState, Selection, StepPlan
from dsv41.hal.weights import facts, prepare
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.verify import relative_error

from ...model.portables import DEVICE, ChoosesByTorch, Interpreted
from ...model.toys import MAX_LEN, TOY, noise
from ...wording import refused
from . import emulated_mega

CONFIG = replace(TOY, num_attention_heads=8, o_groups=1, num_nextn_predict_layers=3)
"""The toy's roles with one group of 8 heads, which are padded to 64."""
LAYERS = range(CONFIG.num_hidden_layers)
FULL = os.environ.get("DSV41_FULL") == "1"
DRAFTS = range(CONFIG.num_hidden_layers, CONFIG.num_hidden_layers + 3)
TOLERANCE = 5e-3
"""Of bf16 activations: sums in another order move a few numbers over a border of MXFP8, a step of up to 1/8."""
NAN_BYTE = 0xFF
PAGE = 64


class Mega(FlashMLAMegaBackend):
    """With matrix products in torch, which cost Triton's interpreter minutes."""

    _product = Interpreted._product


class Choosing(ChoosesByTorch, Mega):
    """For steps of many layers: the kernels that choose rows are those of the portable backend, and tested there."""


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=["page", "token"])
def placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    emulated_mega.install(monkeypatch, request.param)
    return str(request.param)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    emulated_mega.install(monkeypatch)
    return emulated_mega


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("mega") / "toy", config=CONFIG)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("mega") / "plain", config=CONFIG, quantized=False)


def load(path: Path, layers: Sequence[int] | None = None, dtype: torch.dtype = torch.bfloat16) -> Checkpoint:
    return load_checkpoint(path, device=DEVICE, dtype=dtype, layers=None if layers is None else list(layers))


def make_stack(path: Path, backend: Any, layers: Sequence[int], quantize: bool = True) -> AttentionStack:
    return AttentionStack(load(path, layers), backend, max_len=MAX_LEN, quantize_activations=quantize)


def hidden(*shape: int, seed: int = 0) -> Tensor:
    return noise(*shape, CONFIG.hidden_size, seed=seed).to(DEVICE, torch.bfloat16)


# Whole layers


class Keep:
    """A tap that keeps what was selected, and where `given` is, publishes that instead."""

    def __init__(self, given: list[Tensor] | None = None) -> None:
        self.kept: list[Tensor] = []
        self.given = given

    def inputs(self, *_: Any) -> None: ...

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        if self.given is not None:
            selection = replace(selection, topk_indices=self.given[len(self.kept)])
        self.kept.append(selection.topk_indices)
        return selection

    def output(self, *_: Any) -> None: ...


def sessions(
    path: Path, layers: Sequence[int], *, kv: str = "auto", quantize: bool = True, **options: Any
) -> list[Session]:
    """Of the fused backend and of the reference, over caches that are NaN where nobody wrote."""
    made = []
    for kind in (Choosing, ReferenceBackend):
        stack = make_stack(path, kind(device=DEVICE, kv_cache_dtype=kv), layers, quantize)
        made.append(Session(stack, max_requests=4, max_tokens=128, max_step_tokens=32, **options))
        for caches in made[-1].caches.values():
            for cache in (caches.window, caches.compressed):
                if cache is not None:
                    cache.data.fill_(NAN_BYTE)
    return made


def compare(found: dict[int, Tensor], expected: dict[int, Tensor]) -> None:
    """Layer by layer, since each had an input of its own."""
    assert found.keys() == expected.keys()
    for request, outputs in found.items():
        assert outputs.isfinite().all()
        for mine, theirs in zip(outputs, expected[request], strict=True):
            if theirs.numel():
                assert relative_error(mine, theirs) < TOLERANCE


@pytest.mark.parametrize(
    ("placement", "kv", "layers"),
    [
        ("page", "nvfp4_ds_mla", LAYERS if FULL else (0, 1, 2, 4, 5)),
        ("token", "nvfp4_ds_mla", (0, 1, 4) if FULL else (0, 1)),
        ("page", "fp8_ds_mla", (1,)),
        ("token", "fp8_ds_mla", (0, 4)),
        ("page", "fp8_ds_mla_v4", (0, 1)),
    ],
    indirect=["placement"],
)
def test_steps_give_what_the_reference_does(folder: Path, placement: str, kv: str, layers: Sequence[int]) -> None:
    """Prefill, decode, both mixed, several tokens a decode step, padding, a request of no tokens and a step of none;
    in layers of every ratio and role."""
    mine, theirs = sessions(folder, layers, kv=kv)
    steps: list[tuple[dict[int, int], int | None]] = [
        ({0: 17 if FULL else 11}, None),
        ({0: 1, 1: 5}, 8),
        ({0: 1, 1: 1}, None),
        ({0: 3, 1: 0, 2: 2}, 8),
        ({}, None),
    ]
    for _ in range(3):
        assert mine.add_request() == theirs.add_request()
    for number, (counts, pad_to) in enumerate(steps):
        given = {r: hidden(len(layers), count, seed=10 * number + r) for r, count in counts.items()}
        kept = Keep()
        found = mine.step(given, pad_to=pad_to, tap=kept)
        compare(found, theirs.step(given, pad_to=pad_to, tap=Keep(kept.kept)))
    asked = [arguments["extra_k_cache"] for _, arguments in emulated_mega.calls]
    assert len(asked) == 4 * len(layers)
    records = {cache.shape[3] for cache in asked if cache is not None}
    assert records == {{"nvfp4_ds_mla": 288, "fp8_ds_mla": 528, "fp8_ds_mla_v4": 584}[kv]}
    assert any(cache is None for cache in asked) == (0 in layers)


def test_a_draft_block_sees_all_of_itself(folder: Path, placement: str) -> None:
    mine, theirs = sessions(folder, DRAFTS)
    for session in (mine, theirs):
        one, two = session.add_request(), session.add_request()
        session.insert_window({one: hidden(3, 11), two: hidden(3, 2, seed=1)})
    blocks = {one: hidden(3, 5, seed=2), two: hidden(3, 3, seed=3)}
    compare(mine.draft(blocks, pad_to=9), theirs.draft(blocks, pad_to=9))
    widths = {arguments["indices_in_kvcache"].shape[1] for _, arguments in emulated_mega.calls}
    assert widths == {16}  # 8 rows of the window and 5 of the longest block, in whole columns


@pytest.mark.parametrize(("heads", "padded"), [(16, 64), (64, 64), (72, 128)])
def test_groups_of_live_heads_are_projected_and_no_others(
    tmp_path: Path, library: Any, heads: int, padded: int
) -> None:
    config = replace(CONFIG, num_attention_heads=heads, o_groups=heads // 8)
    mine, theirs = sessions(make_checkpoint(tmp_path / "toy", config=config, layers=[0]), [0])
    given = {mine.add_request(): hidden(1, 5)}
    theirs.add_request()
    compare(mine.step(given), theirs.step(given))
    [(_, arguments)] = library.calls
    q, sink = arguments["q"], arguments["attn_sink"]
    assert q.shape == (5, padded, 512)
    assert arguments["n_wv_group"] == padded // 8
    runs = q.view(5, 32, padded, 16)
    assert runs[:, :, :heads].any(dim=(0, 1, 3)).all()
    assert (runs[:, :, heads:] == 0).all()
    assert (sink[heads:] == -torch.inf).all()
    assert torch.equal(sink[:heads], mine.stack.layers[0].state.weights.attn_sink)


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("coded", [True, False])
def test_weights_of_either_form_take_the_quantised_output(
    folder: Path, plain: Path, library: Any, coded: bool, quantize: bool
) -> None:
    """As the reference does after the same rounding, where it would not quantise itself."""
    mine, theirs = sessions(folder if coded else plain, [1], quantize=quantize)
    if not (coded and quantize):
        theirs.stack.backend.__class__ = Rounded
    given = {mine.add_request(): hidden(1, 9)}
    theirs.add_request()
    kept = Keep()
    compare(mine.step(given, tap=kept), theirs.step(given, tap=Keep(kept.kept)))


class Rounded(ReferenceBackend):
    """The reference, with its rotated output rounded to MXFP8 on the way to `wo_a`."""

    def o_proj(self, out: AttnOutput, layer: LayerState, positions: Tensor) -> Tensor:
        turned = mxfp8_round(rotate(out.data, positions, layer.cos_sin, inverse=True))
        return super().o_proj(AttnOutput(turned, rotated_back=True), layer, positions)


def test_all_kernels_together_work(folder: Path, library: Any) -> None:
    """With the products in Triton, too, of which the query's and the output's are by permuted weights."""
    given, outputs = hidden(1, 2), []
    for kind in (FlashMLAMegaBackend, Mega):
        session = Session(make_stack(folder, kind(device=DEVICE), [0]), max_requests=1, max_tokens=8)
        outputs.append(session.step({session.add_request(): given})[0])
    assert relative_error(*outputs) < TOLERANCE / 2


# One step, in parts


def step_of(
    path: Path, layer: int, *, lens: Sequence[int] = (3, 2), held: Sequence[int] = (3, 9), tokens: int = 8
) -> tuple[Mega, LayerState, StepPlan]:
    """A layer bound to poisoned caches, and a padded step of two requests."""
    backend = Mega(device=DEVICE)
    stack = make_stack(path, backend, [layer])
    Session(stack, max_requests=2, max_tokens=64)
    state = stack.layers[0].state
    assert state.caches is not None
    state.caches.window.data.fill_(NAN_BYTE)
    pages = torch.tensor([[1], [0]], dtype=torch.int32)
    batch = ForwardBatch.from_host(
        query_lens=lens,
        seq_lens=held,
        window_pages=pages,
        window_page_size=PAGE,
        compressed_pages={spec.ratio: pages for spec in stack.specs if spec.ratio},
        compressed_page_size=dict.fromkeys((1, 2), PAGE),
        num_tokens=tokens,
        device=DEVICE,
    )
    return backend, state, backend.plan(batch, stack.specs)


def test_nan_in_padding_and_in_the_output_stays_there(folder: Path, library: Any) -> None:
    backend, state, plan = step_of(folder, 0)
    assert state.caches is not None
    state.caches.window.write(torch.arange(9, device=DEVICE), noise(9, 512).to(DEVICE))
    x = hidden(8)
    outputs = []
    for fill in (0.0, torch.nan):
        x[5:] = fill
        inputs = backend.prepare_inputs(x, state, plan)
        out = backend.alloc_attn_out(inputs, state)
        out.data.fill_(0x7F)
        assert out.scale is not None
        out.scale.fill_(-1)
        backend.forward_mqa(inputs, state, None, plan, out)
        assert (out.data[5:] == 0).all()
        outputs.append(backend.o_proj(out, state, plan.batch.positions))
    assert outputs[0].isfinite().all()
    assert torch.equal(*outputs)
    assert (outputs[1][5:] == 0).all()


def test_rows_known_by_slot_can_be_attended_to(folder: Path, placement: str) -> None:
    """As a bench does it: -1 anywhere, a token with no row, and no batch that would give such rows."""
    backend, state, plan = step_of(folder, 4)
    caches, spec = state.caches, state.spec
    assert caches is not None
    assert caches.compressed is not None
    for cache in (caches.window, caches.compressed):
        cache.data.fill_(NAN_BYTE)
        cache.write(torch.arange(20, 30, device=DEVICE), noise(10, 512, seed=cache.num_pages).to(DEVICE))
    window = torch.tensor([[-1, 20, 21, -1, 29], [22] * 5, [-1] * 5, [-1] * 5, [23, -1, -1, -1, 24]] + [[-1] * 5] * 3)
    compressed = torch.tensor([[-1] * 3, [20, -1, 21], [29, -1, -1], [-1] * 3, [-1, -1, 25]] + [[-1] * 3] * 3)
    window, compressed = window.to(DEVICE), compressed.to(DEVICE)
    plan = backend.complete_plan(replace(plan, window_indices=window), [spec])
    inputs = backend.prepare_inputs(hidden(8), replace(state, caches=throwaway(caches)), plan)
    selection = Selection(compressed, derived=backend.complete_selection(compressed))
    out = backend.alloc_attn_out(inputs, state)
    backend.forward_mqa(inputs, state, selection, plan, out)
    found = standard_heads(out, spec.num_heads)

    q = inputs.q.view(8, 32, 64, 16).transpose(1, 2).reshape(8, 64, 512)[:, : spec.num_heads]
    positions = plan.batch.positions
    rows = [
        gather(cache, slots, q.dtype) for cache, slots in ((caches.window, window), (caches.compressed, compressed))
    ]
    attended = sparse_mqa(rotate(q, positions, state.cos_sin), rows, state.weights.attn_sink, spec.scale)
    expected = mxfp8_round(rotate(attended, positions, state.cos_sin, inverse=True))
    assert relative_error(found, expected) < TOLERANCE
    assert (found[3] == 0).all()
    assert (found[5:] == 0).all()
    assert found[[0, 1, 2, 4]].any(dim=(1, 2)).all()


def throwaway(caches: LayerCaches) -> LayerCaches:
    """Caches to write to where what is written does not matter."""
    assert caches.compressed is not None
    copies = {k: replace(c, data=c.data.clone()) for k in ("window", "compressed") if (c := getattr(caches, k))}
    return replace(caches, **copies)


def standard_heads(out: AttnOutput, heads: int) -> Tensor:
    """float32 `[T, heads, 512]` of what the kernel wrote."""
    assert out.scale is not None
    tokens, groups = out.data.shape[:2]
    scale = torch.stack([(out.scale >> shift) & 255 for shift in (0, 8, 16, 24)], dim=-1).flatten(2)
    numbers = out.data.view(torch.float8_e4m3fn).float() * torch.exp2(scale.float() - 127).repeat_interleave(32, 2)
    return numbers.view(tokens, groups, 16, 8, 32).transpose(2, 3).reshape(tokens, groups * 8, 512)[:, :heads]


def test_index_rows_end_at_the_last_row_and_are_whole_columns() -> None:
    slots = torch.tensor([[-1, 5, -1, 7, -1], [0, 1, 2, 3, 4], [-1] * 5])
    rows = IndexRows.of(slots)
    assert (rows.indices.dtype, rows.lengths.dtype, rows.indices.shape) == (torch.int32, torch.int32, (3, 8))
    assert torch.equal(rows.indices[:, :5].long(), slots)
    assert (rows.indices[:, 5:] == -1).all()
    assert rows.lengths.tolist() == [4, 5, 0]
    for width, columns in ((0, 8), (8, 8), (9, 16), (128, 128), (133, 136)):
        assert IndexRows.of(torch.zeros(2, width, dtype=torch.int64)).indices.shape == (2, columns)
        assert IndexRows.of(torch.zeros(0, width, dtype=torch.int64)).lengths.shape == (0,)


def test_a_plan_knows_padding_by_its_request_and_not_by_its_position(folder: Path, library: Any) -> None:
    """An engine's positions behind its tokens may be anything."""
    backend, state, plan = step_of(folder, 0)
    stale = replace(plan.batch, positions=torch.where(plan.token_request >= 0, plan.batch.positions, 10**12))
    made = backend.complete_plan(replace(plan, batch=stale), [state.spec]).extra
    assert isinstance(made, MegaPlan)
    assert made.positions.tolist() == [0, 1, 2, 7, 8, 0, 0, 0]
    assert made.positions.dtype == torch.int32
    assert made.window.lengths.tolist() == [8] * 5 + [0] * 3  # each one's own row is the last


def test_a_step_asks_the_device_nothing(folder: Path, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device have no numbers to ask for."""
    from ..portable.test_backend import on_meta

    monkeypatch.setattr("dsv41.backends.reference.backend.count_nan", lambda weight: 0)
    checkpoint = load(folder, LAYERS)
    weights = {layer: on_meta(w) for layer, w in checkpoint.weights.items()}
    stack = AttentionStack(
        replace(checkpoint, weights=weights),
        FlashMLAMegaBackend(device="meta"),
        max_len=MAX_LEN,
        quantize_activations=True,
    )
    session = Session(stack, max_requests=2, max_step_tokens=32)
    one, two = session.add_request(), session.add_request()
    for counts in ((20, 1), (1, 1), (0, 3)):
        inputs = {r: hidden(n).to("meta") for r, n in zip((one, two), counts, strict=True)}
        outputs = session.step(inputs, pad_to=24)
        assert all(outputs[r].shape == inputs[r].shape for r in inputs)
    assert len(library.calls) == 3 * len(LAYERS)


def test_warmup_and_reserve_leave_attention_to_the_library(folder: Path, library: Any) -> None:
    backend = Mega(device=DEVICE)
    make_stack(folder, backend, [0])
    assert backend.reserve(2, 1, 16) == 0
    backend.warmup()
    assert {len(arguments["q"]) for _, arguments in library.calls} == {1, 2}


# Weights


def test_prepared_weights_are_of_a_type_that_the_plain_path_refuses(folder: Path, library: Any) -> None:
    mega = make_stack(folder, Mega(device=DEVICE), [0])
    state = mega.layers[0].state
    assert isinstance(state.prepared, MegaWeights)
    assert type(state.prepared.wq_b) is type(state.prepared.wo_a) is FusedMatrix
    portable = PortableBackend(device=DEVICE)
    Session(mega, max_requests=1, max_tokens=8)
    qr = torch.zeros(1, state.spec.q_lora_rank, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(AssertionError):
        portable._queries(qr, None, state)
    with pytest.raises(AssertionError):
        portable.o_proj(AttnOutput(torch.zeros(1, 64, 512)), state, torch.zeros(1, dtype=torch.int64))
    plain = make_stack(folder, portable, [0]).layers[0].state
    with pytest.raises(AssertionError):
        mega.backend._queries(qr, None, plain)  # type: ignore[attr-defined]


def test_weights_are_prepared_once(folder: Path, library: Any) -> None:
    stack = make_stack(folder, Mega(device=DEVICE), [0])
    with refused(BackendError, "layers.0.attn", "prepared by backend 'flashmla-mega'"):
        prepare(stack.backend, stack.layers[0].state)
    first, second = (stack.backend.prepare_weights(stack.layers[0].state) for _ in range(2))
    assert torch.equal(first.wq_b.data, second.wq_b.data)  # of the checkpoint, which stays as it is
    assert torch.equal(first.wo_a.data, second.wo_a.data)


def test_prepared_weights_follow_an_update(folder: Path, library: Any, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", config=CONFIG, seed=1, layers=[0])
    stack, fresh = (make_stack(path, Mega(device=DEVICE), [0]) for path in (folder, other))
    prepared, expected = stack.layers[0].state.prepared, fresh.layers[0].state.prepared
    pointers, before = [prepared.wq_b.data.data_ptr(), prepared.sink.data_ptr()], facts(prepared)
    stack.update_weights(load(other, [0]))
    assert [prepared.wq_b.data.data_ptr(), prepared.sink.data_ptr()] == pointers
    assert facts(prepared) == before
    for mine, theirs in ((prepared.wq_b, expected.wq_b), (prepared.wo_a, expected.wo_a)):
        assert torch.equal(mine.data, theirs.data)
        assert torch.equal(mine.scale, theirs.scale)
    assert torch.equal(prepared.sink, expected.sink)
    stack.sleep()
    assert prepared.wo_a.data.numel() == 0
    stack.wake(load(folder, [0]))
    assert facts(prepared) == before


def test_other_geometries_and_shapes_are_refused(folder: Path, library: Any) -> None:
    backend = Mega(device=DEVICE)
    state = make_stack(folder, backend, [0]).layers[0].state
    for change in ({"o_groups": 2}, {"head_dim": 256}, {"rope_dim": 32}):
        with refused(BackendError, "layers.0.attn", "8 heads of 512 with 64 rotated"):
            backend.prepare_weights(replace(state, spec=replace(state.spec, **change)))
    short = replace(state.weights, wq_b=torch.zeros(512, 32, dtype=torch.bfloat16))
    with refused(InputError, "layers.0.attn.wq_b.weight is [512, 32]", "4096 rows"):
        backend.prepare_weights(replace(state, weights=short))
    narrow = replace(state.weights, wo_a=torch.zeros(32, 512, dtype=torch.bfloat16))
    with refused(InputError, "layers.0.attn.wo_a.weight is [32, 512]", "4096 columns"):
        backend.prepare_weights(replace(state, weights=narrow))


def test_activations_that_the_kernel_does_not_compute_in_are_refused(folder: Path, library: Any) -> None:
    checkpoint = load(folder, [0], dtype=torch.float32)
    session = Session(AttentionStack(checkpoint, Mega(device=DEVICE), max_len=MAX_LEN), max_requests=1, max_tokens=8)
    with refused(InputError, "torch.float32", "torch.bfloat16"):
        session.step({session.add_request(): hidden(1).float()})


# What is taken and what is refused


def test_heads_are_padded_to_what_the_kernel_is_built_for(library: Any) -> None:
    backend = FlashMLAMegaBackend()
    assert [backend.get_padded_num_q_heads(n) for n in (8, 16, 64, 72, 128)] == [64, 64, 64, 128, 128]
    for heads in (0, 4, 12, 136):
        with refused(BackendError, f"{heads} query heads", "multiple of 8 up to 128"):
            backend.get_padded_num_q_heads(heads)


def test_records_lie_where_the_installed_build_reads_them(placement: str) -> None:
    where = ScalePlacement(placement)
    for name, kv, records in (
        ("auto", "nvfp4_ds_mla", (528, 288)),
        ("nvfp4_ds_mla", "nvfp4_ds_mla", (528, 288)),
        ("fp8", "fp8_ds_mla", (528, 528)),
        ("fp8_ds_mla", "fp8_ds_mla", (528, 528)),
    ):
        backend = FlashMLAMegaBackend(kv_cache_dtype=name)
        layouts = backend.layouts
        assert backend.kv_cache_dtype == kv
        assert (layouts.window.row_bytes, layouts.compressed.row_bytes) == records
        assert {layouts.window.scale_placement, layouts.compressed.scale_placement} == {where}
        assert layouts.window.page_size == layouts.compressed.page_size == PAGE
    old = FlashMLAMegaBackend(kv_cache_dtype="fp8_ds_mla_v4", index_cache_dtype="fp8").layouts
    assert (old.window.row_bytes, old.window.scale_placement) == (584, ScalePlacement.PAGE)
    assert old.index.row_bytes == 132
    assert set(FLASHMLA_MEGA.kv_cache_dtypes) == {"nvfp4_ds_mla", "fp8_ds_mla", "fp8_ds_mla_v4"}
    for name in ("bfloat16", "fp8_e4m3", "float32", "fp9"):
        with refused(LayoutError, repr(name), "flashmla-mega", "auto, fp8, nvfp4_ds_mla"):
            FlashMLAMegaBackend(kv_cache_dtype=name)


def cache_at(layout: CacheLayout, stride: int, offset: int = 0) -> PagedCache:
    """Of two pages, `stride` bytes apart, from byte `offset` of memory that is well aligned."""
    memory = torch.zeros(offset + 2 * stride, dtype=torch.uint8, device=DEVICE)
    data = memory.as_strided((2, layout.page_bytes), (stride, 1), offset)
    return PagedCache(replace(layout, alignment=1), data)


def test_caches_that_the_build_would_misread_are_refused(folder: Path, placement: str) -> None:
    backend = Mega(device=DEVICE)
    stack = make_stack(folder, backend, [4])
    Session(stack, max_requests=1, max_tokens=64)
    state = stack.layers[0].state
    caches, spec = state.caches, state.spec
    assert caches is not None
    assert caches.compressed is not None
    window, compressed = caches.window, caches.compressed
    other = ScalePlacement.TOKEN if placement == "page" else ScalePlacement.PAGE
    moved = replace(window.layout, scale_placement=other)
    sizes = {"page": (512, 256), "token": (16896, 4608)}[placement]
    wrong: dict[str, LayerCaches] = {
        f"scale_placement {other}": replace(caches, window=PagedCache.allocate(moved, 2, DEVICE)),
        "record fp8_ds_mla_v41 where nvfp4_ds_mla": replace(caches, compressed=window),
        f"multiple of {sizes[0]}": replace(caches, window=cache_at(window.layout, 33792 + 16)),
        f"multiple of {sizes[1]}": replace(caches, compressed=cache_at(compressed.layout, 18432 + 128)),
        "multiple of 16 bytes": replace(caches, window=cache_at(window.layout, 33792, offset=8)),
    }
    for words, given in wrong.items():
        with pytest.raises(LayoutError, match=words):
            backend.check_caches(spec, given)
    far = replace(caches, window=cache_at(window.layout, 33792 + sizes[0]))
    backend.check_caches(spec, replace(far, compressed=cache_at(compressed.layout, 18432 + sizes[1], offset=16)))


def test_pages_of_the_v4_record_are_walked_in_rows_of_576_bytes(library: Any) -> None:
    layout = CacheLayout(v4_584(Dialect.OCP), PAGE, ScalePlacement.PAGE)
    flashmla_mega._check_memory("the cache", cache_at(layout, 37440))
    with refused(LayoutError, "37376 bytes apart", "multiple of 576", "use 37440"):
        flashmla_mega._check_memory("the cache", cache_at(layout, 37376))


def test_more_rows_than_the_kernel_counts_are_refused(library: Any) -> None:
    layout = CacheLayout(v41_528(Dialect.OCP), PAGE, ScalePlacement.PAGE)
    many = PagedCache(layout, torch.empty(2**25, 33792, dtype=torch.uint8, device="meta"))
    with refused(LayoutError, "the cache", "2**31 rows"):
        flashmla_mega._check_memory("the cache", many)
    flashmla_mega._check_memory("the cache", replace(many, data=many.data[: 2**24]))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Library(), "is not installed"),
        (Library(True, "1.0.0.post20260810", frozenset({"record-v4"})), "1.0.0.post20260810 has no such kernel"),
        (Library(True, "1.0.0.post20260910", frozenset({"mega"})), "has no such kernel"),
        (Library(True, "1", frozenset({"mega", "placement-page"}), "it was built for torch 2.14.0"), "torch 2.14.0"),
    ],
)
def test_a_library_that_will_not_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, library: Any, found: Library, words: str
) -> None:
    monkeypatch.setattr(flashmla_mega, "inspect", lambda name, version: found)
    with refused(BackendError, words, "20260910", "tokenspeed-flashmla"):
        FlashMLAMegaBackend()


def test_a_library_that_does_not_import_is_refused(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, flashmla_mega.MODULE, None)
    with refused(BackendError, flashmla_mega.MODULE, "cannot be imported", "tokenspeed-flashmla"):
        FlashMLAMegaBackend()


def test_rotations_cannot_be_left_out(library: Any) -> None:
    plain = type("Plain", (FlashMLAMegaBackend,), {"fuses_rotation": False})
    with refused(BackendError, "flashmla-mega", "fuses_rotation"):
        plain()
    assert FlashMLAMegaBackend.accepts_unnormed_unroped_query
    assert FlashMLAMegaBackend.supports_graph_capture


def test_what_the_library_says_is_passed_on(folder: Path, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, state, plan = step_of(folder, 0)
    inputs = backend.prepare_inputs(hidden(8), state, plan)
    odd = replace(plan.extra, window=replace(plan.extra.window, indices=torch.zeros(8, 9, dtype=torch.int32)))
    with pytest.raises(BackendError, match=r"rows of indices .* indices_in_kvcache = int32 \[8, 9\]"):
        backend.attend(inputs, state, replace(plan, extra=odd), None)
    monkeypatch.setattr(backend, "library", type("Newer", (), {"decode": staticmethod(lambda **_: (inputs.q,) * 3)}))
    with refused(BackendError, "codes", "torch.bfloat16 [8, 64, 512]", "[8, 8, 4096]"):
        backend.attend(inputs, state, plan, None)


@pytest.fixture(scope="module")
def valid(folder: Path) -> Iterator[dict[str, Any]]:
    """The arguments of a call over both caches."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        emulated_mega.install(patch)
        backend, state, plan = step_of(folder, 4)
        inputs = backend.prepare_inputs(hidden(8), state, plan)
        selection = backend.prepare_selection(backend.select(inputs, state, plan, None), state, plan)
        assert state.caches is not None
        state.caches.window.data.zero_()
        backend.attend(inputs, state, plan, selection)
        yield emulated_mega.calls[-1][1]


@pytest.mark.parametrize(
    ("name", "change", "rule"),
    [
        ("q", lambda q: q.float(), "q is bf16"),
        ("q", lambda q: q[:, :32].contiguous(), "64 or 128"),
        ("n_wv_group", lambda n: n // 2, "8 heads"),
        ("token_positions", lambda p: p.long(), "int32"),
        ("token_positions", lambda p: p - 1, "positions are in the table"),
        ("cos_sin_cache", lambda c: c.double(), "fp32"),
        ("enable_q_norm", lambda _: True, "norm"),
        ("use_packed_ue8m0", lambda _: False, "booleans"),
        ("attn_sink", lambda s: s[:8], "attn_sink"),
        ("indices_in_kvcache", lambda i: i.long(), "int32"),
        ("indices_in_kvcache", lambda i: i.t().contiguous().t(), "rows of indices"),
        ("indices_in_kvcache", lambda i: torch.where(i < 0, -2, i), "exactly -1"),
        ("indices_in_kvcache", lambda i: torch.where(i >= 0, i + 10**6, i), "indices are slots"),
        ("topk_length", lambda n: n.clamp(max=0), "past a length"),
        ("topk_length", lambda n: n + 1000, "0 to topk"),
        ("extra_k_cache", lambda _: None, "comes with its indices"),
        ("k_cache", lambda c: c[..., :288], "record"),
        ("k_cache", lambda c: c.transpose(0, 1), "dense inside"),
    ],
)
def test_the_emulation_refuses_what_the_library_would_misread(
    library: Any, valid: dict[str, Any], name: str, change: Callable[[Any], Any], rule: str
) -> None:
    library.decode(**valid)
    with pytest.raises(AssertionError, match=rule):
        library.decode(**valid | {name: change(valid[name])})
