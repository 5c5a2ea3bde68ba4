"""The aiter backend over an emulated library, beside the reference run in the same records."""

from __future__ import annotations

import math
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
from dsv41.backends.portable.caches import flat
from dsv41.backends.portable.insert import insert_rows
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.backends.reference.norm import rotate
from dsv41.backends.rocm import aiter_backend
from dsv41.backends.rocm.aiter_backend import AiterBackend
from dsv41.backends.rocm.ragged import Ragged
from dsv41.bench import _nothing_but
from dsv41.bench_rows import random_rows
from dsv41.checkpoint import load_checkpoint
from dsv41.config import DeepseekV41Config
from dsv41.errors import BackendError, LayoutError
from dsv41.hal.builtin import AITER
from dsv41.hal.codecs import decode_e4m3
from dsv41.hal.device import Device
from dsv41.hal.layout import CacheLayout, CacheLayouts, PagedCache, ScalePlacement
from dsv41.hal.records import PLAIN_BF16, Dialect, plain_fp8, v4_584, v41_528
from dsv41.hal.transcode import transcode
from dsv41.hal.types import AttnInputs, AttnOutput, ForwardBatch, LayerCaches, LayerState, Selection, StepPlan
from dsv41.hal.weights import prepare
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.topology import layer_specs
from dsv41.verify import relative_error

from ...model.portables import AttendsAlone, Interpreted
from ...model.test_drafts import CONFIG as DRAFTING
from ...model.test_drafts import DRAFTS
from ...model.test_graph import Rehearsal
from ...model.toys import MAX_LEN, TOY, dyadic_checkpoint, noise, quarter_turns, signs
from ...wording import refused
from ..portable.test_backend import on_meta
from .emulated_aiter import Aiter, WithoutEpilogue, e4m3

BF16, NAN = torch.bfloat16, math.nan
CASES = [("gfx950", "auto"), ("gfx950", "bfloat16"), ("gfx950", "fp8_e4m3"), ("gfx942", "fp8")]
EACH = pytest.mark.parametrize(("arch", "kv"), CASES)


class Hostile(AiterBackend):
    """Products by torch, since Triton's interpreter takes minutes for them; NaN in the room for the output."""

    _product = Interpreted._product

    def alloc_attn_out(self, inputs: AttnInputs, layer: LayerState) -> AttnOutput:
        out = super().alloc_attn_out(inputs, layer)
        out.data.fill_(0x7F if out.scale is not None else NAN)
        if out.scale is not None:
            out.scale.fill_(0xFF)
        return out

    o_proj = Interpreted.o_proj


class Quick(AttendsAlone, Hostile):
    pass


class Oracle(ReferenceBackend):
    """The reference in the records of another backend, whatever these are."""

    def __init__(self, like: AiterBackend) -> None:
        self.of = like
        super().__init__(device=like.device)

    def resolve_layouts(self, kv_cache_dtype: str, index_cache_dtype: str) -> tuple[str, str, CacheLayouts]:
        return self.of.kv_cache_dtype, self.of.index_cache_dtype, self.of.layouts


def make(
    arch: str, kv: str = "auto", kind: type[AiterBackend] = Quick, library: type[Aiter] = Aiter, device: str = "cpu"
) -> Any:
    backend = kind(device=device, kv_cache_dtype=kv, facts=Device.gpu(arch))
    backend.library = library(arch)
    return backend


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def dyadic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("aiter") / "dyadic"
    dyadic_checkpoint(path, BF16)
    return path


def poison(session: Session) -> None:
    """NaN in every record, as what nobody has written; in FNUZ that is another byte."""
    for caches in session.caches.values():
        for cache in (caches.window, caches.compressed, caches.index):
            if cache is not None:
                cache.data.fill_(0x80 if cache.layout.record.dialect is Dialect.FNUZ else 0xFF)


# Whole steps


def compare_steps(backend: Any, path: Path, layers: list[int], script: Any, close: float = 4e-3, **stack: Any) -> None:
    """Run `script(session, hidden)` by the reference in the same records and by the backend."""
    outputs = []
    for each in (Oracle(backend), backend):
        made = AttentionStack(load_checkpoint(path, dtype=BF16, layers=layers), each, max_len=MAX_LEN, **stack)
        quarter_turns(made)
        session = Session(made, max_requests=3, max_step_tokens=32, page_size=16)
        poison(session)
        hidden = signs(len(layers), 60, TOY.hidden_size).to(BF16)
        outputs.append([rows for step in script(session, hidden) for rows in step.values()])
    assert backend.library.calls
    assert len(outputs[0]) == len(outputs[1]) > 3
    for mine, theirs in zip(*reversed(outputs), strict=True):
        assert mine.isfinite().all()
        assert relative_error(mine, theirs) < close


@pytest.mark.parametrize("library", [Aiter, WithoutEpilogue])
@EACH
def test_steps_give_what_the_reference_gives(dyadic: Path, arch: str, kv: str, library: type[Aiter]) -> None:
    """Window-only layers and both ratios; prefill, decode and both at once, several tokens, padding, no tokens, a fork
    that replays its window. On numbers that every record holds exactly."""

    def script(session: Session, hidden: Tensor) -> Iterator[dict[int, Tensor]]:
        one, two = session.add_request(), session.add_request()
        yield session.step({one: hidden[:, :13]})
        yield session.step({one: hidden[:, 13:14], two: hidden[:, 14:31]}, pad_to=20)
        yield session.step({one: hidden[:, 31:32], two: hidden[:, 32:33]})
        yield session.step({one: hidden[:, 33:36], two: hidden[:, 36:37]}, pad_to=6)
        yield session.step({})
        three = session.fork(one, 16, replay=hidden[:, 6:14])
        yield session.step({three: hidden[:, 40:43], two: hidden[:, 43:44]})

    backend = make(arch, kv, library=library)
    compare_steps(backend, dyadic, list(range(7)), script)
    fused = kv == "auto" and library is Aiter
    assert {("inv_rope_positions" in call, "out" in call) for call in backend.library.calls} == {(fused, True)}


def two_steps(session: Session, hidden: Tensor) -> Iterator[dict[int, Tensor]]:
    one, two = session.add_request(), session.add_request()
    yield session.step({one: hidden[:, :8], two: hidden[:, 8:9]}, pad_to=10)
    yield session.step({one: hidden[:, 9:10], two: hidden[:, 10:12]})


@EACH
def test_steps_through_the_kernels_of_every_segment(dyadic: Path, arch: str, kv: str) -> None:
    compare_steps(make(arch, kv, Hostile), dyadic, [0, 1, 4], two_steps)


@pytest.mark.parametrize("library", [Aiter, WithoutEpilogue])
def test_the_library_quantises_the_output_where_the_projection_wants_it(dyadic: Path, library: type[Aiter]) -> None:
    """And otherwise the portable pass does; the projections are the kernels that run on a GPU."""

    class Whole(Hostile):
        o_proj = AiterBackend.o_proj

    backend = make("gfx950", "auto", Whole, library)
    compare_steps(backend, dyadic, [0, 4], two_steps, close=2e-2, quantize_activations=True)
    assert all(("out_mxfp8" in call) == (library is Aiter) for call in backend.library.calls)


@EACH
def test_draft_blocks_give_what_the_reference_gives(arch: str, kv: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "drafts", config=DRAFTING, layers=[0, *DRAFTS])
    outputs, backend = [], make(arch, kv)
    for each in (Oracle(backend), backend):
        stack = AttentionStack(load_checkpoint(path, dtype=BF16, layers=list(DRAFTS)), each, max_len=MAX_LEN)
        session = Session(stack, max_requests=2)
        poison(session)
        one, two = session.add_request(), session.add_request()
        rows = noise(3, 40, TOY.hidden_size).to(BF16)
        session.insert_window({one: rows[:, :11], two: rows[:, 11:14]})
        found = session.draft({one: rows[:, 20:25], two: rows[:, 25:28]}, pad_to=10)
        outputs.append(torch.cat([found[one], found[two]], dim=1))
    assert relative_error(outputs[1], outputs[0]) < 1e-2


@EACH
def test_a_captured_step_is_the_eager_one_bit_for_bit(
    dyadic: Path, arch: str, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over lengths that grow across the window and the top-k; the streams are packed anew in every replay."""
    monkeypatch.setattr(graph, "_Recording", Rehearsal)
    checkpoint = load_checkpoint(dyadic, dtype=BF16, layers=[4, 5])
    stack = AttentionStack(checkpoint, make(arch, kv), max_len=MAX_LEN)
    eager, captured = (Session(stack, max_requests=2, max_step_tokens=8, page_size=16) for _ in range(2))
    captured.capture(4, num_requests=2, layer_inputs=True)
    for session in (eager, captured):
        assert [session.add_request() for _ in range(2)] == [0, 1]
    for number, counts in enumerate(({0: 4}, {0: 3, 1: 1}, {0: 1}, {1: 2, 0: 2})):
        inputs = {r: signs(2, n, TOY.hidden_size, seed=10 * number + r).to(BF16) for r, n in counts.items()}
        expected, found = eager.step(inputs, pad_to=4), captured.step(inputs)
        assert all(torch.equal(found[r], expected[r]) for r in inputs)


@pytest.mark.parametrize("quantised", [False, True])
@EACH
def test_a_step_asks_the_device_nothing(
    dyadic: Path, arch: str, kv: str, quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the meta device have no numbers to ask for."""
    monkeypatch.setattr("dsv41.backends.reference.backend.count_nan", lambda weight: 0)
    backend = make(arch, kv, AiterBackend, device="meta")
    checkpoint = load_checkpoint(dyadic, dtype=BF16)
    weights = {layer: on_meta(w) for layer, w in checkpoint.weights.items()}
    checkpoint = replace(checkpoint, weights=weights)
    stack = AttentionStack(checkpoint, backend, max_len=MAX_LEN, quantize_activations=quantised)
    session = Session(stack, max_requests=2, max_step_tokens=32)
    one, two = session.add_request(), session.add_request()
    for counts in ((20, 1), (1, 1), (0, 3)):
        shape = dict(zip((one, two), counts, strict=True))
        inputs = {r: torch.empty(n, TOY.hidden_size, dtype=BF16, device="meta") for r, n in shape.items()}
        outputs = session.step(inputs, pad_to=24)
        assert all(outputs[r].shape == inputs[r].shape for r in inputs)
    assert len(backend.library.calls) == 3 * 7


def test_streams_are_packed_once_a_step_and_once_a_selection(dyadic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Ragged] = []
    of = Ragged.of
    monkeypatch.setattr(Ragged, "of", staticmethod(lambda slots: made.append(of(slots)) or made[-1]))
    backend = make("gfx950")
    stack = AttentionStack(load_checkpoint(dyadic, dtype=BF16), backend, max_len=MAX_LEN)
    session = Session(stack, max_requests=1)
    session.step({session.add_request(): signs(7, 3, TOY.hidden_size).to(BF16)})
    assert len(made) == 1 + 4  # of TOY's seven layers, four choose
    calls = backend.library.calls
    assert {call["kv_indices"].data_ptr() for call in calls} == {made[0].indices.data_ptr()}
    assert [call["extra_indices"].data_ptr() for call in calls[1:]] == [
        made[source].indices.data_ptr() for source in (1, 1, 2, 3, 4, 4)
    ]


# Attention over rows known by slot


def filled(layout: CacheLayout, seed: int, page_size: int, gap: int, scale: float) -> PagedCache:
    """Noise in pages 1 to 4; NaN in page 0, behind the rows and between pages, which lie `gap` bytes further apart."""
    layout = replace(layout, page_size=page_size, alignment=16, page_stride=None)
    stride = -(-layout.page_bytes // 16) * 16 + gap
    nan = 0x80 if layout.record.dialect is Dialect.FNUZ else 0xFF
    memory = torch.full((64 + 5 * stride,), nan, dtype=torch.uint8)
    start = 16 + -memory.data_ptr() % 16
    data = torch.as_strided(memory, (5, layout.page_bytes), (stride, 1), start)
    cache = PagedCache(layout, data, tensor_scale=torch.tensor([scale]) if layout.record.tensor_scale else None)
    slots = torch.arange(page_size, 5 * page_size)
    cache.write(slots, noise(len(slots), 512, seed=seed))
    return cache


def layer_of(backend: AiterBackend, heads: int, ratio: int, caches: LayerCaches) -> LayerState:
    [released] = layer_specs(DeepseekV41Config(), layers=[20])
    padded = backend.get_padded_num_q_heads(heads)
    spec = replace(released, num_heads=heads, padded_heads=padded, ratio=ratio, window=20, topk=40)
    sink = noise(heads, seed=3)
    sink[: 2 if heads > 2 else 1] = torch.tensor([-math.inf, math.inf])[: 2 if heads > 2 else 1]
    angles = noise(16, 32, seed=9)
    layer = LayerState(spec, _nothing_but(sink), torch.cat((angles.cos(), angles.sin()), 1), caches=caches)
    prepare(backend, layer)
    backend.check_caches(spec, caches)
    return layer


def planned(backend: AiterBackend, layer: LayerState, window: Tensor, chosen: Tensor | None) -> StepPlan:
    tokens, rows = len(window), window if chosen is None else torch.cat((window, chosen), 1)
    batch = ForwardBatch.from_host(
        query_lens=[1] * tokens,
        seq_lens=[1 + token % 16 for token in range(tokens)],
        window_pages=torch.zeros(tokens, 1, dtype=torch.int32),
        window_page_size=64,
    )
    request = torch.where((rows >= 0).any(1), torch.arange(tokens), -1)
    return backend.complete_plan(StepPlan(batch, request, window[:, 0], window, {}, {}, {}), [layer.spec])


def attend(
    backend: AiterBackend, layer: LayerState, q: Tensor, window: Tensor, chosen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What the backend gives, rotated back or not, and what the reference gives in the same form."""
    plan = planned(backend, layer, window, chosen)
    empty = q.new_empty(len(q), 0)
    inputs = AttnInputs(hidden=empty, qr=empty, q=q, kv=empty, positions=plan.batch.positions)
    outs = [AttnOutput(torch.full_like(q, NAN)) for _ in range(2)]
    oracle = Oracle(backend)
    for on, out in zip((backend, oracle), outs, strict=True):
        derived = on.complete_selection(chosen) if chosen is not None else None
        on.forward_mqa(inputs, layer, None if chosen is None else Selection(chosen, derived=derived), plan, out)
    found, expected = outs
    if found.rotated_back:
        expected.data = rotate(expected.data, plan.batch.positions, layer.cos_sin, inverse=True)
    return found.data, expected.data


def holes(rows: Tensor, first: int, seed: int) -> Tensor:
    """The slots from `first` on, with -1 at random places, and none at all in row 1."""
    rows = rows + first
    rows[torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed)) < 0.3] = -1
    if len(rows) > 3:
        rows[1] = -1
    return rows


@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (6, 8), (5, 17), (4, 128)])
@pytest.mark.parametrize("bytes_at_once", [None, 3])
@EACH
def test_attention_over_any_rows(
    arch: str, kv: str, tokens: int, heads: int, bytes_at_once: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages further apart than they need and of other sizes, other scales for each cache, holes in every row, a token
    without rows, sinks of -inf and inf, NaN in unwritten bytes, padding and the output; in parts, as of many tokens."""
    if bytes_at_once is not None:
        monkeypatch.setattr(aiter_backend, "_CALL_BYTES", bytes_at_once * heads * 1024)
    backend = make(arch, kv)
    window = filled(backend.layouts.window, 1, 16, 48, 0.5)
    compressed = filled(backend.layouts.compressed, 2, 12, 80, 0.25)
    for ratio in (0, 1):
        layer = layer_of(backend, heads, ratio, LayerCaches(window, compressed if ratio else None))
        generator = torch.Generator().manual_seed(tokens)
        seen, chosen = (
            holes(random_rows(4 * size, 1, tokens, width, generator)[0], size, width)
            for size, width in ((16, 20), (12, 40))
        )
        q = noise(tokens, heads, 512, seed=4).to(BF16)
        if tokens > 3:
            q[1] = NAN  # a token of padding
        backend.library.calls.clear()
        found, expected = attend(backend, layer, q, seen, chosen if ratio else None)
        assert found.isfinite().all()
        assert (found[1:2] == 0).all() or tokens <= 3
        assert relative_error(found, expected) < 4e-3
        assert len(backend.library.calls) == (1 if bytes_at_once is None else -(-tokens // 3))


@EACH
def test_a_token_may_see_rows_of_one_cache_alone(arch: str, kv: str) -> None:
    backend = make(arch, kv)
    window, compressed = (
        filled(backend.layouts.window, 1, 16, 0, 1.0),
        filled(backend.layouts.compressed, 2, 16, 0, 2.0),
    )
    caches = LayerCaches(window, compressed)
    layer = layer_of(backend, 4, 1, caches)
    none, some = torch.full((2, 8), -1), torch.arange(16, 32).view(2, 8)
    q = noise(2, 4, 512, seed=4).to(BF16)
    for seen, chosen in ((none, some), (some, none)):
        found, expected = attend(backend, layer, q, seen, chosen)
        assert relative_error(found, expected) < 4e-3


# FNUZ


def test_the_emulation_and_the_codecs_agree_on_every_code() -> None:
    """They were written apart: one takes bytes apart, the other asks torch."""
    codes = torch.arange(256).to(torch.uint8)
    for dialect, bias in ((Dialect.OCP, 7), (Dialect.FNUZ, 8)):
        assert torch.equal(e4m3(codes, bias).nan_to_num(nan=-1e9), decode_e4m3(codes, dialect).nan_to_num(nan=-1e9))


def inserted(rows: Tensor, scale: float) -> PagedCache:
    """Rows as the kernel that writes caches leaves them on gfx942; it rotates by nothing."""
    cache = PagedCache.allocate(make("gfx942", "fp8").layouts.window.with_page_size(len(rows)), 1)
    assert cache.tensor_scale is not None
    cache.tensor_scale.fill_(scale)
    still = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1)
    nowhere = torch.zeros(len(rows)).long()
    insert_rows(rows, None, 1e-20, nowhere, 1, still, torch.arange(len(rows)), *flat(cache))
    return cache


def test_rows_are_written_in_the_dialect_of_the_arch_and_clamped_not_wrapped() -> None:
    """Every number that OCP has, at its place; FNUZ ends at 240 and has no -0."""
    codes = torch.arange(256).to(torch.uint8)
    numbers = decode_e4m3(codes, Dialect.OCP)
    numbers[[0x7F, 0xFF]] = 0
    rows = torch.cat((numbers, numbers * 2)).to(BF16)[None]
    for scale in (1.0, 2.0):
        cache = inserted(rows, scale)
        stored = e4m3(cache.data[:, :512], 8) * scale
        assert torch.equal(stored, (rows.float() / scale).clamp(-240, 240) * scale)
        assert not (cache.data == 0x80).any()  # NaN


def test_what_reads_one_dialect_as_the_other_is_caught() -> None:
    """Half of every number, by the bytes; the typed view that the library is given it refuses."""
    backend = make("gfx942", "fp8")
    window = filled(backend.layouts.window, 1, 16, 0, 0.5)
    layer = layer_of(backend, 4, 0, LayerCaches(window))
    q, rows = noise(2, 4, 512, seed=4).to(BF16), torch.arange(16, 32).view(2, 8)
    found, expected = attend(backend, layer, q, rows, None)
    assert relative_error(found, expected) < 4e-3
    with refused(LayoutError, "the window cache of layers.20.attn", "fp8_e4m3 where fp8_e4m3_fnuz is expected"):
        ocp = replace(window.layout, record=plain_fp8(Dialect.OCP))
        wrong = PagedCache(ocp, window.data, tensor_scale=window.tensor_scale)
        backend.check_caches(layer.spec, LayerCaches(wrong))
    layer.caches = LayerCaches(wrong)
    with pytest.raises(BackendError, match="float8_e4m3fn is not the fp8 of gfx942"):
        attend(backend, layer, q, rows, None)
    on950 = make("gfx950", "fp8_e4m3")
    other = layer_of(on950, 4, 0, LayerCaches(wrong))
    assert relative_error(attend(on950, other, q, rows, None)[0], expected) > 0.1


@pytest.mark.parametrize("scale", [2.0, 1.0])
def test_rows_cross_from_ocp_to_fnuz_by_value(scale: float) -> None:
    """As a request does that comes from another machine: exactly at twice the scale, and clamped at the same."""
    ocp, fnuz = (
        PagedCache.allocate(make(arch, "fp8_e4m3").layouts.window.with_page_size(1), 1) for arch in ("gfx950", "gfx942")
    )
    codes = torch.arange(256).to(torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    ocp.data[:, :512] = torch.cat((codes, codes))
    assert fnuz.tensor_scale is not None
    fnuz.tensor_scale.fill_(scale)
    report = transcode(ocp, fnuz, torch.zeros(1).long(), torch.zeros(1).long())
    assert report.exact == (scale == 2)
    due = e4m3(ocp.data[:, :512], 7).clamp(-240 * scale, 240 * scale)
    assert torch.equal(e4m3(fnuz.data[:, :512], 8) * scale, due)


# What is taken and what is refused


def test_heads_are_not_padded() -> None:
    backend = make("gfx950")
    assert [backend.get_padded_num_q_heads(heads) for heads in (1, 5, 64, 128)] == [1, 5, 64, 128]
    with refused(BackendError, "129 query heads", "1 to 128"):
        backend.get_padded_num_q_heads(129)


@pytest.mark.parametrize(
    ("arch", "asked", "name", "record"),
    [
        *(("gfx950", name, "fp8_ds_mla", v4_584(Dialect.OCP)) for name in ("auto", "fp8", "fp8_ds_mla")),
        ("gfx950", "fp8_ds_mla_v4", "fp8_ds_mla", v4_584(Dialect.OCP)),
        ("gfx950", "bfloat16", "bfloat16", PLAIN_BF16),
        ("gfx950", "fp8_e4m3", "fp8_e4m3", plain_fp8(Dialect.OCP)),
        *(("gfx942", name, "fp8_e4m3", plain_fp8(Dialect.FNUZ)) for name in ("fp8", "fp8_e4m3")),
    ],
)
def test_what_each_name_means(arch: str, asked: str, name: str, record: Any) -> None:
    backend = make(arch, asked)
    assert backend.kv_cache_dtype == name
    assert backend.trusts_cache_bytes
    for layout in (backend.layouts.window, backend.layouts.compressed):
        placement = ScalePlacement.PAGE if name == "fp8_ds_mla" else ScalePlacement.NONE
        assert (layout.record, layout.scale_placement, layout.page_size) == (record, placement, 64)
    assert AITER.packed_kv_cache_dtype == make("gfx950").kv_cache_dtype


@pytest.mark.parametrize(
    ("arch", "names"),
    [
        ("gfx950", ["nvfp4_ds_mla", "float32", "fp9"]),
        ("gfx942", ["auto", "fp8_ds_mla", "fp8_ds_mla_v4", "bfloat16", "nvfp4_ds_mla"]),
    ],
)
def test_other_formats_are_refused(arch: str, names: list[str]) -> None:
    for name in names:
        with refused(LayoutError, f"'{name}'", f"aiter reads on {arch}", "fp8_e4m3"):
            make(arch, name)


def test_other_archs_and_activations_are_refused(dyadic: Path) -> None:
    with refused(BackendError, "made for gfx90a", "gfx942 or gfx950"):
        make("gfx90a")
    stack = AttentionStack(load_checkpoint(dyadic, layers=[0], dtype=torch.float32), make("gfx950"), max_len=MAX_LEN)
    session = Session(stack, max_requests=1)
    with refused(BackendError, "torch.float32", "bfloat16", "portable"):
        session.step({session.add_request(): signs(1, TOY.hidden_size)})


def test_caches_that_the_library_would_misread_are_refused() -> None:
    backend = make("gfx950")
    layout = backend.layouts.window
    good = filled(layout, 1, 16, 0, 1.0)
    layer = layer_of(backend, 4, 1, LayerCaches(good, good))
    wrong = [
        (CacheLayout(v41_528(Dialect.OCP), 64, ScalePlacement.TOKEN), "fp8_ds_mla_v41"),
        (CacheLayout(v4_584(Dialect.OCP), 64, ScalePlacement.TOKEN), "scale_placement token"),
        (CacheLayout(v4_584(Dialect.FNUZ), 64, ScalePlacement.PAGE), "fnuz"),
    ]
    for other, words in wrong:
        bad = PagedCache.allocate(other, 2)
        with refused(LayoutError, "the window cache of layers.20.attn", words):
            backend.check_caches(layer.spec, LayerCaches(bad, good))
        with refused(LayoutError, "the compressed cache of layers.20.attn", words):
            backend.check_caches(layer.spec, LayerCaches(good, bad))
    near = replace(layout, alignment=8)
    apart = torch.as_strided(torch.zeros(3 * 37384, dtype=torch.uint8), (2, near.page_bytes), (37384, 1))
    with refused(LayoutError, "page stride of 37384", "a multiple of 16"):
        backend.check_caches(layer.spec, LayerCaches(PagedCache(near, apart), good))
    memory = torch.zeros(3 * 37440, dtype=torch.uint8)
    shifted = torch.as_strided(memory, (2, near.page_bytes), (37440, 1), 8 + -memory.data_ptr() % 16)
    with refused(LayoutError, "begins at address", "a multiple of 16"):
        backend.check_caches(layer.spec, LayerCaches(PagedCache(near, shifted), good))


def test_a_cache_of_more_rows_than_an_index_reaches_is_refused() -> None:
    backend = make("gfx950", device="meta")
    layout = backend.layouts.window
    data = torch.empty(2**25, layout.stride, dtype=torch.uint8, device="meta")
    aiter_backend.check_readable("it", PagedCache(layout, data[:-1]), layout)
    with refused(LayoutError, "at most 2147483647", "fewer pages"):
        aiter_backend.check_readable("it", PagedCache(layout, data), layout)


# The library


def test_the_library_is_imported_with_the_first_step(monkeypatch: pytest.MonkeyPatch, dyadic: Path) -> None:
    backend = Quick(device="cpu", facts=Device.gpu("gfx950"))
    stack = AttentionStack(load_checkpoint(dyadic, layers=[0], dtype=BF16), backend, max_len=MAX_LEN)
    session = Session(stack, max_requests=1)
    request, row = session.add_request(), signs(1, TOY.hidden_size).to(BF16)
    with refused(BackendError, "aiter.ops.triton.attention.sparse_mla cannot be imported", "ROCm/aiter"):
        session.step({request: row})
    name, library = "aiter", Aiter("gfx950")
    for part in ("", ".ops", ".triton", ".attention", ".sparse_mla"):
        name += part
        module = types.ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    module.sparse_mla_fwd = library.sparse_mla_fwd  # type: ignore[attr-defined]
    session.step({request: row})
    assert len(library.calls) == 1


def test_what_the_library_says_is_passed_on_with_what_it_was_given(dyadic: Path) -> None:
    class Broken(Aiter):
        def sparse_mla_fwd(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no kernel image is available")

    backend = make("gfx950", library=Broken)
    stack = AttentionStack(load_checkpoint(dyadic, layers=[0], dtype=BF16), backend, max_len=MAX_LEN)
    session = Session(stack, max_requests=1)
    words = r"sparse_mla_fwd failed with RuntimeError: no kernel image.*q = bfloat16 \[2, 4, 512\]"
    with pytest.raises(BackendError, match=words):
        session.step({session.add_request(): signs(2, TOY.hidden_size).to(BF16)})


def test_padding_rotates_at_a_position_that_there_is(dyadic: Path) -> None:
    stack = AttentionStack(load_checkpoint(dyadic, layers=[0], dtype=BF16), make("gfx950"), max_len=MAX_LEN)
    session = Session(stack, max_requests=1)
    session.step({session.add_request(): signs(2, TOY.hidden_size).to(BF16)}, pad_to=4)
    [arguments] = stack.backend.library.calls  # type: ignore[attr-defined]
    assert arguments["inv_rope_positions"].tolist() == [0, 1, 0, 0]
