"""The FlashInfer backends over an emulated library, beside the reference run in the same records."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.backends.cuda import flashinfer_sm100
from dsv41.backends.cuda.flashinfer_backend import FlashInferBackend
from dsv41.backends.cuda.flashinfer_sm100 import FlashInferSM100
from dsv41.backends.cuda.flashinfer_sm120 import FlashInferSM120
from dsv41.backends.cuda.flashinfer_tables import clear_empty, pack_rows
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.bench import make_work, our_call, random_caches
from dsv41.bench_rows import random_rows
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.config import DeepseekV41Config
from dsv41.errors import BackendError, LayoutError
from dsv41.hal.device import Device
from dsv41.hal.layout import PagedCache
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
from ...model.toys import MAX_LEN, TOY, noise, quarter_turns, signs
from ...wording import refused
from ..portable.test_backend import on_meta
from . import emulated_flashinfer as emulated

DEVICE = "cpu"
"""Where the emulated library reads caches byte by byte."""
NAN = math.nan


class Hostile:
    """Products and rotations by torch, since Triton's interpreter takes minutes for them; NaN in what it allocates."""

    _product = Interpreted._product
    o_proj = Interpreted.o_proj

    def alloc_attn_out(self, inputs: AttnInputs, layer: LayerState) -> AttnOutput:
        return AttnOutput(torch.full_like(inputs.q, NAN))


class Quick(AttendsAlone, Hostile):
    pass


class Whole120(Hostile, FlashInferSM120):
    pass


class Whole100(Hostile, FlashInferSM100):
    pass


class SM120(Quick, FlashInferSM120):
    pass


class SM100(Quick, FlashInferSM100):
    pass


CASES = [
    (SM120, "fp8_ds_mla", "0.7.4"),
    (SM120, "nvfp4_ds_mla", "0.7.4"),
    (SM120, "fp8_ds_mla", "0.7.1"),
    (SM120, "nvfp4_ds_mla", "0.7.1"),
    (SM120, "fp8_ds_mla_v4", "0.7.4"),
    (SM120, "auto", "0.6.18"),
    (SM100, "bfloat16", "0.7.4"),
    (SM100, "fp8_e4m3", "0.7.4"),
    (SM100, "bfloat16", "0.6.18"),
]
EACH = pytest.mark.parametrize(("kind", "kv", "version"), CASES, ids=lambda value: getattr(value, "__name__", value))


def make(kind: type[FlashInferBackend], kv: str = "auto", device: str = DEVICE) -> Any:
    arch = "sm_120" if issubclass(kind, FlashInferSM120) else "sm_100"
    return kind(device=device, kv_cache_dtype=kv, facts=Device.gpu(arch, multiprocessors=148))


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _newest(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.install(monkeypatch)


@pytest.fixture(scope="module")
def realistic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("flashinfer") / "toy", config=TOY)


def load(path: Path, **options: Any) -> Checkpoint:
    return load_checkpoint(path, dtype=torch.bfloat16, device=DEVICE, **options)


def poison(session: Session) -> None:
    """NaN, as what nobody has written."""
    for caches in session.caches.values():
        for cache in (caches.window, caches.compressed, caches.index):
            if cache is not None:
                cache.data.fill_(0xFF)


# Whole steps


def compare_steps(backend: Any, path: Path, layers: list[int], script: Any) -> None:
    """Run `script(session, hidden)` by the backend and by the reference in the same records."""
    outputs = []
    for each in (ReferenceBackend(device=DEVICE, kv_cache_dtype=backend.kv_cache_dtype), backend):
        stack = AttentionStack(load(path, layers=layers), each, max_len=MAX_LEN)
        quarter_turns(stack)
        session = Session(stack, max_requests=3, max_step_tokens=32)
        poison(session)
        hidden = signs(len(layers), 60, TOY.hidden_size).to(DEVICE, torch.bfloat16)
        outputs.append([rows for step in script(session, hidden) for rows in step.values()])
    assert emulated.calls
    assert len(outputs[0]) == len(outputs[1]) > 3
    for mine, theirs in zip(*reversed(outputs), strict=True):
        assert relative_error(mine, theirs) < 4e-3


@EACH
def test_steps_give_what_the_reference_gives(
    dyadic: Path, kind: Any, kv: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Window-only layers and both ratios; prefill, decode and both at once, several tokens, padding, no tokens, a fork
    that replays its window. On numbers that every record holds exactly."""
    emulated.install(monkeypatch, version)
    backend = make(kind, kv)
    if kv == "fp8_e4m3":
        backend.query_scale.fill_(2.0**18)

    def script(session: Session, hidden: Tensor) -> Iterator[dict[int, Tensor]]:
        one, two = session.add_request(), session.add_request()
        yield session.step({one: hidden[:, :13]})
        yield session.step({one: hidden[:, 13:14], two: hidden[:, 14:31]}, pad_to=20)
        yield session.step({one: hidden[:, 31:32], two: hidden[:, 32:33]})
        yield session.step({one: hidden[:, 33:36], two: hidden[:, 36:37]}, pad_to=6)
        yield session.step({})
        three = session.fork(one, 16, replay=hidden[:, 6:14])
        yield session.step({three: hidden[:, 40:43], two: hidden[:, 43:44]})

    compare_steps(backend, dyadic, list(range(7)), script)


@pytest.mark.parametrize(("kind", "kv"), [(Whole120, "nvfp4_ds_mla"), (Whole100, "bfloat16")])
def test_steps_through_the_kernels_of_every_segment(dyadic: Path, kind: Any, kv: str) -> None:
    def script(session: Session, hidden: Tensor) -> Iterator[dict[int, Tensor]]:
        one, two = session.add_request(), session.add_request()
        yield session.step({one: hidden[:, :8], two: hidden[:, 8:9]}, pad_to=10)
        yield session.step({one: hidden[:, 9:10], two: hidden[:, 10:12]})

    compare_steps(make(kind, kv), dyadic, [0, 1, 4], script)


@pytest.mark.parametrize("kind", [SM120, SM100])
def test_draft_blocks_give_what_the_reference_gives(kind: Any, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "drafts", config=DRAFTING, layers=[0, *DRAFTS])
    outputs = []
    backend = make(kind, "bfloat16" if kind is SM100 else "auto")
    for each in (ReferenceBackend(device=DEVICE, kv_cache_dtype=backend.kv_cache_dtype), backend):
        stack = AttentionStack(load(path, layers=list(DRAFTS)), each, max_len=MAX_LEN)
        session = Session(stack, max_requests=2)
        poison(session)
        one, two = session.add_request(), session.add_request()
        rows = noise(3, 40, TOY.hidden_size).to(DEVICE, torch.bfloat16)
        session.insert_window({one: rows[:, :11], two: rows[:, 11:14]})
        found = session.draft({one: rows[:, 20:25], two: rows[:, 25:28]}, pad_to=10)
        outputs.append(torch.cat([found[one], found[two]], dim=1))
    assert relative_error(outputs[1], outputs[0]) < 1e-2


@pytest.mark.parametrize(("kind", "kv"), [(SM120, "nvfp4_ds_mla"), (SM120, "fp8_ds_mla_v4"), (SM100, "fp8_e4m3")])
def test_a_step_asks_the_device_nothing(realistic: Path, kind: Any, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device have no numbers to ask for."""
    monkeypatch.setattr("dsv41.backends.reference.backend.count_nan", lambda weight: 0)
    monkeypatch.setattr(emulated, "_attention", lambda version, **_: None)
    emulated.install(monkeypatch)
    for whole in (FlashInferSM120 if kind is SM120 else FlashInferSM100, Whole120 if kind is SM120 else Whole100):
        backend = make(whole, kv, device="meta")
        checkpoint = load(realistic)
        weights = {layer: on_meta(w) for layer, w in checkpoint.weights.items()}
        stack = AttentionStack(replace(checkpoint, weights=weights), backend, max_len=MAX_LEN)
        session = Session(stack, max_requests=2, max_step_tokens=32)
        one, two = session.add_request(), session.add_request()
        for counts in ((20, 1), (1, 1), (0, 3)):
            shape = zip((one, two), counts, strict=True)
            inputs = {r: torch.empty(n, TOY.hidden_size, dtype=stack.dtype, device="meta") for r, n in shape}
            outputs = session.step(inputs, pad_to=24)
            assert all(outputs[r].shape == inputs[r].shape for r in inputs)


# Attention over rows known by slot


def spec_of(heads: int, *, ratio: int = 1, window: int = 20, topk: int = 40) -> Any:
    [released] = layer_specs(DeepseekV41Config(), layers=[20])
    return replace(released, num_heads=heads, ratio=ratio, window=window, topk=topk)


def layer_of(backend: Any, spec: Any, caches: LayerCaches) -> LayerState:
    from dsv41.bench import _nothing_but

    sink = noise(spec.num_heads, seed=3)
    padded = replace(spec, padded_heads=backend.get_padded_num_q_heads(spec.num_heads))
    layer = LayerState(padded, _nothing_but(sink), torch.zeros(4, 64), caches=caches)
    prepare(backend, layer)
    backend.check_caches(padded, caches)
    return layer


def filled(layout: Any, *, seed: int, pages: int = 5, page_size: int = 64, gap: int = 0) -> PagedCache:
    """Noise in pages 1, 2, ...; NaN in page 0, behind the rows and between pages `gap` rows apart."""
    layout = replace(layout, page_size=page_size, alignment=16, page_stride=None)
    stride = layout.page_bytes + gap * (layout.row_bytes if layout.row_bytes % 16 == 0 else 16)
    memory = torch.full((64 + pages * stride,), 0xFF, dtype=torch.uint8, device=DEVICE)
    data = torch.as_strided(memory, (pages, layout.page_bytes), (stride, 1), 16)
    scale = torch.full((1,), 0.5) if layout.record.tensor_scale else None
    cache = PagedCache(layout, data, tensor_scale=scale)
    slots = torch.arange(page_size, pages * page_size)
    cache.write(slots, noise(len(slots), 512, seed=seed))
    return cache


def holes(rows: Tensor, first: int, seed: int) -> Tensor:
    """int64 `[T, n]`: of the slots from `first` on, with -1 at random places, none at all, or nothing else."""
    rows = rows + first
    rows[torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed)) < 0.3] = -1
    if len(rows) > 3:
        rows[1] = -1
    return rows


def attend(backend: Any, layer: LayerState, q: Tensor, window: Tensor, compressed: Tensor | None) -> Tensor:
    tokens = len(q)
    batch = ForwardBatch.from_host(
        query_lens=[1] * tokens,
        seq_lens=[1] * tokens,
        window_pages=torch.zeros(tokens, 1, dtype=torch.int32),
        window_page_size=64,
    )
    request = torch.where((window >= 0).any(1), torch.arange(tokens), -1)
    plan = backend.complete_plan(StepPlan(batch, request, window[:, 0], window, {}, {}, {}), [layer.spec])
    selection = None
    if compressed is not None:
        selection = Selection(compressed, derived=backend.complete_selection(compressed))
    empty = q.new_empty(tokens, 0)
    inputs = AttnInputs(hidden=empty, qr=empty, q=q, kv=empty, positions=batch.positions)
    out = AttnOutput(torch.full_like(q, NAN))
    backend.forward_mqa(inputs, layer, selection, plan, out)
    assert not out.rotated_back
    return out.data[:, : layer.spec.num_heads]


@pytest.mark.parametrize(
    ("kind", "kv", "version", "tokens", "heads"),
    [
        *((*case, 6, 8) for case in CASES),
        (SM120, "nvfp4_ds_mla", "0.7.4", 1, 4),
        (SM120, "nvfp4_ds_mla", "0.7.4", 65, 5),
        (SM120, "fp8_ds_mla", "0.7.1", 66, 100),
        (SM120, "fp8_ds_mla_v4", "0.7.4", 66, 100),
        (SM120, "auto", "0.6.18", 65, 5),
        (SM100, "fp8_e4m3", "0.7.4", 1, 4),
        (SM100, "fp8_e4m3", "0.7.4", 5, 100),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_attention_over_any_rows(
    kind: Any, kv: str, version: str, tokens: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages further apart than they need and of other sizes where the library takes them, holes in every row, tokens
    without rows, NaN in unwritten bytes, padding heads and the output."""
    emulated.install(monkeypatch, version)
    backend = make(kind, kv)
    free = version == "0.7.4" and kv != "fp8_ds_mla_v4"
    size, gap = ((16, 3) if free else (64, 0)) if kind is SM120 else (16, 3 if version == "0.7.4" else 0)
    layouts = backend.layouts
    window = filled(layouts.window, seed=1, page_size=size, gap=gap)
    compressed = filled(layouts.compressed, seed=2, page_size=size, gap=gap and gap + 2)
    reference = ReferenceBackend(device=DEVICE, kv_cache_dtype=backend.kv_cache_dtype)
    generator = torch.Generator().manual_seed(tokens)
    for ratio in (0, 1):
        spec = spec_of(heads, ratio=ratio)
        caches = LayerCaches(window, compressed if ratio else None)
        mine = layer_of(backend, spec, caches)
        theirs = LayerState(spec, mine.weights, mine.cos_sin, caches=caches)
        q = noise(tokens, mine.spec.padded_heads, 512, seed=4).bfloat16()
        rows = [holes(random_rows(4 * size, 1, tokens, n, generator)[0], size, n) for n in (spec.window, spec.topk)]
        if tokens > 3:
            q[1] = NAN  # a token of padding
        exact = q
        if kv == "fp8_e4m3":
            backend.query_scale.fill_(0.25)
            exact = (q.float() / 0.25).clamp(-448, 448).to(torch.float8_e4m3fn).float().mul(0.25).bfloat16()
        expected = attend(reference, theirs, exact[:, :heads], rows[0], rows[1] if ratio else None)
        q[:, heads:] = NAN
        found = attend(backend, mine, q, rows[0], rows[1] if ratio else None)
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2e-3)
        assert relative_error(found, expected) < 4e-3
        if tokens > 3:
            assert not found[1].any()


def test_a_token_without_window_rows_still_sees_the_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (SM120, SM100):
        backend = make(kind, "bfloat16" if kind is SM100 else "auto")
        caches = LayerCaches(filled(backend.layouts.window, seed=1), filled(backend.layouts.compressed, seed=2))
        layer = layer_of(backend, spec_of(8), caches)
        q = noise(2, 8, 512).bfloat16()
        window, chosen = torch.full((2, 20), -1), torch.arange(64, 144).view(2, 40)
        reference = ReferenceBackend(device=DEVICE, kv_cache_dtype=backend.kv_cache_dtype)
        theirs = LayerState(layer.spec, layer.weights, layer.cos_sin, caches=caches)
        plan_request = attend(backend, layer, q, window, chosen)
        rows = [attend(reference, theirs, q, torch.arange(64, 66)[:, None], chosen), plan_request]
        assert rows[1].isfinite().all()
        assert relative_error(rows[1], rows[0]) < 0.5, "of 41 rows, 40 are the same"


@pytest.mark.parametrize("keys", [128, 129, 133, 190])
def test_more_window_rows_than_the_window_has_columns(keys: int) -> None:
    """As a draft block sees them: the rows that do not fit stand where the compressed ones would."""
    for kind in (SM120, SM100):
        backend = make(kind, "bfloat16" if kind is SM100 else "fp8_ds_mla")
        caches = LayerCaches(filled(backend.layouts.window, seed=1))
        layer = layer_of(backend, spec_of(8, ratio=0, window=128), caches)
        theirs = LayerState(layer.spec, layer.weights, layer.cos_sin, caches=caches)
        q = noise(5, 8, 512).bfloat16()
        rows = holes(random_rows(256, 1, 5, keys, torch.Generator().manual_seed(0))[0], 64, 0)
        rows[2] = torch.arange(64, 64 + keys)
        reference = ReferenceBackend(device=DEVICE, kv_cache_dtype=backend.kv_cache_dtype)
        found, expected = attend(backend, layer, q, rows, None), attend(reference, theirs, q, rows, None)
        assert relative_error(found, expected) < 4e-3


@pytest.mark.parametrize(("kind", "kv"), [(SM120, "nvfp4_ds_mla"), (SM120, "fp8_ds_mla_v4"), (SM100, "bfloat16")])
def test_the_bench_runs_them(kind: Any, kv: str) -> None:
    """In the shapes of the release, over rows that no plan chose."""
    backend = make(kind, kv)
    work = make_work(backend, random_caches(backend, (3, 9), 0), tokens=2, heads=8, seed=0)
    reference = ReferenceBackend(device=DEVICE, kv_cache_dtype=backend.kv_cache_dtype)
    outputs = []
    for each in (backend, reference):
        out = AttnOutput(torch.full_like(work.q, NAN))
        our_call(each, work, work.rows[0], out)()
        outputs.append(out.data)
    assert relative_error(*outputs) < 4e-3


def test_what_the_library_is_told() -> None:
    """The format by name, tables once for all layers that read alike, one call a layer or several of 64 tokens."""
    for kv, names in (
        ("fp8_ds_mla", ("fp8_dsv41_inline", "fp8_dsv41_inline")),
        ("nvfp4_ds_mla", ("fp8_dsv41_inline", "fp8_dsv41_inline_fp4_ca")),
        ("fp8_ds_mla_v4", ("fp8", "fp8")),
    ):
        backend = make(SM120, kv)
        caches = LayerCaches(filled(backend.layouts.window, seed=1), filled(backend.layouts.compressed, seed=2))
        for ratio, name in zip((0, 1), names, strict=True):
            emulated.calls.clear()
            layer = layer_of(backend, spec_of(100, ratio=ratio), caches)
            rows = torch.arange(64, 84).expand(70, -1)
            attend(backend, layer, noise(70, 128, 512).bfloat16(), rows, rows if ratio else None)
            assert {call["kv_cache_format"] for _, call in emulated.calls} == {name}
            assert [len(call["query"]) for _, call in emulated.calls] == ([70] if kv == "fp8_ds_mla_v4" else [64, 6])


def test_the_oldest_version_is_told_no_format(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.install(monkeypatch, "0.6.18")
    backend = make(SM120)
    assert backend.kv_cache_dtype == "fp8_ds_mla_v4"
    layer = layer_of(backend, spec_of(8, ratio=0), LayerCaches(filled(backend.layouts.window, seed=1)))
    attend(backend, layer, noise(1, 8, 512).bfloat16(), torch.arange(64, 84)[None], None)
    [(_, call)] = emulated.calls
    assert "kv_cache_format" not in call


def test_tables_are_made_once_for_layers_that_read_alike(dyadic: Path) -> None:
    for kind, kv in ((SM120, "auto"), (SM100, "bfloat16")):
        emulated.calls.clear()
        stack = AttentionStack(load(dyadic), make(kind, kv), max_len=MAX_LEN)
        session = Session(stack, max_requests=1)
        session.step({session.add_request(): signs(7, 9, TOY.hidden_size).bfloat16()})
        tables = [call["sparse_indices"].data_ptr() for _, call in emulated.calls]
        layers = {layer: pointer for layer, pointer in enumerate(tables)}
        if kind is SM120:
            assert len(set(tables)) == 1
            tables = [call["extra_sparse_indices"].data_ptr() for _, call in emulated.calls[1:]]
            layers = {layer + 1: pointer for layer, pointer in enumerate(tables)}
        assert layers[1] == layers[2] != layers[3], "layer 2 takes over the selection of 1, layer 3 has its own"
        assert layers[5] == layers[6] != layers[4]


# fp8 queries


def test_clamped_query_numbers_are_counted_on_the_device() -> None:
    backend = make(SM100, "fp8_e4m3")
    caches = LayerCaches(filled(backend.layouts.window, seed=1))
    layer = layer_of(backend, spec_of(3, ratio=0), caches)
    q = noise(4, 8, 512).bfloat16()
    q[0, 0, :5], q[2, 1, 7], q[1], q[:, 3:] = 500.0, -1e6, 1e9, 1e9
    rows = torch.arange(64, 84).repeat(4, 1)
    rows[1] = -1
    backend.query_scale.fill_(1.0)
    assert attend(backend, layer, q, rows, None).isfinite().all()
    assert backend.clamped_queries.tolist() == [6], "not those of padding"
    backend.query_scale.fill_(2.0)
    attend(backend, layer, q, rows, None)
    assert backend.clamped_queries.tolist() == [7]


def test_the_scales_of_both_caches_must_agree() -> None:
    backend = make(SM100, "fp8_e4m3")
    caches = LayerCaches(filled(backend.layouts.window, seed=1), filled(backend.layouts.compressed, seed=2))
    layer_of(backend, spec_of(8), caches)
    assert caches.compressed is not None
    assert caches.compressed.tensor_scale is not None
    caches.compressed.tensor_scale.fill_(1.0)
    with refused(LayoutError, "0.5 and 1.0", "layers.20.attn"):
        layer_of(backend, spec_of(8), caches)
    layer_of(backend, spec_of(8, ratio=0), caches)


# Parts


def test_slots_are_packed_to_the_left() -> None:
    generator = torch.Generator().manual_seed(0)
    slots = torch.randint(-60, 100, (9, 37), generator=generator).clamp(min=-1)
    slots[2], slots[3] = -1, torch.arange(37)
    for width, page_rows in ((37, 16), (40, 16), (128, 21)):
        wide = torch.full((9, 4 + width), 77, dtype=torch.int32)
        counts = torch.full((9,), 77, dtype=torch.int32)
        pack_rows(slots, 16, page_rows, wide[:, 4:], counts)
        assert (wide[:, :4] == 77).all()
        for row, table, count in zip(slots.tolist(), wide[:, 4:].tolist(), counts.tolist(), strict=True):
            live = [slot // 16 * page_rows + slot % 16 for slot in row if slot >= 0]
            assert (count, table) == (len(live), live + [-1] * (width - len(live)))


def test_tokens_that_see_nothing_are_cleared() -> None:
    out = torch.full((4, 2, 512), NAN, dtype=torch.bfloat16)
    counts, lengths = (torch.tensor(values, dtype=torch.int32) for values in ([0, 0, 1, 0], [128, 129, 128, 128]))
    clear_empty(out, counts, lengths, 128)
    assert [bool(row.isnan().all()) for row in out] == [False, True, True, False]
    assert not out[[0, 3]].any()


@pytest.mark.parametrize(("kind", "kv"), [(SM120, "nvfp4_ds_mla"), (SM100, "fp8_e4m3")])
def test_reserve_is_enough_for_every_step_within_it(realistic: Path, kind: Any, kv: str) -> None:
    backend = make(kind, kv)
    stack = AttentionStack(load(realistic, layers=[0, 4, 5]), backend, max_len=MAX_LEN)
    assert backend.reserve(9, 2, 64) == backend.workspace.bytes > 0
    backend.warmup()
    addresses = {name: buffer.data_ptr() for name, buffer in backend.workspace._buffers.items()}
    session = Session(stack, max_requests=2, max_step_tokens=9)
    one, two = session.add_request(), session.add_request()
    for counts in ((5, 4), (1, 1)):
        session.step({r: noise(n, TOY.hidden_size).bfloat16() for r, n in zip((one, two), counts, strict=True)})
    assert addresses == {name: buffer.data_ptr() for name, buffer in backend.workspace._buffers.items()}


# What is refused


@pytest.mark.parametrize("kind", [SM120, SM100])
def test_heads_are_padded_to_what_the_library_takes(kind: Any) -> None:
    backend = make(kind)
    padded = [backend.get_padded_num_q_heads(heads) for heads in (1, 8, 9, 16, 17, 33, 64, 65, 128)]
    assert padded == [8, 8, 16, 16, 32, 64, 64, 128, 128]
    for heads in (0, 129):
        with refused(BackendError, f"{heads} query heads", "1 to 128", "tp_size"):
            backend.get_padded_num_q_heads(heads)


def test_names_mean_what_the_version_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {
        "0.6.18": {"auto": "584 page", "fp8_ds_mla_v4": "584 page"},
        "0.7.0": {"fp8": "584 page", "fp8_ds_mla": "584 page"},
        "0.7.1": {"fp8_ds_mla": "528 page", "nvfp4_ds_mla": "288 page", "fp8_ds_mla_v4": "584 page"},
        "0.7.4": {"auto": "528 token", "nvfp4_ds_mla": "288 token", "fp8_ds_mla_v4": "584 page"},
    }
    for version, names in wanted.items():
        emulated.install(monkeypatch, version)
        for name, layout in names.items():
            found = make(SM120, name).layouts.compressed
            assert f"{found.record.bytes} {found.scale_placement}" == layout
        if version in ("0.6.18", "0.7.0"):
            with refused(LayoutError, "'nvfp4_ds_mla' is not read", f"flashinfer {version}", "fp8_ds_mla_v4"):
                make(SM120, "nvfp4_ds_mla")
    for kind, name in ((SM120, "bfloat16"), (SM100, "fp8_ds_mla"), (SM100, "fp9")):
        with refused(LayoutError, repr(name)):
            make(kind, name)


def test_shapes_that_no_step_could_run_are_refused_before_the_first() -> None:
    backend = make(SM120)
    caches = LayerCaches(filled(backend.layouts.window, seed=1), filled(backend.layouts.compressed, seed=2))
    with refused(BackendError, "1025 keys", "1024"):
        layer_of(backend, spec_of(8, topk=1025), caches)
    backend = make(SM100, "bfloat16")
    with refused(BackendError, "window of 129", "128"):
        layer_of(backend, spec_of(8, window=129), LayerCaches(filled(backend.layouts.window, seed=1)))


@pytest.mark.parametrize("kind", [SM120, SM100])
def test_activations_in_float32_are_refused(kind: Any) -> None:
    backend = make(kind)
    layer = layer_of(backend, spec_of(8, ratio=0), LayerCaches(filled(backend.layouts.window, seed=1)))
    with refused(BackendError, "torch.float32", "bfloat16"):
        attend(backend, layer, noise(1, 8, 512), torch.arange(64, 84)[None], None)


def shifted(cache: PagedCache, *, stride: int, offset: int = 0) -> PagedCache:
    layout = replace(cache.layout, alignment=1)
    memory = torch.zeros(offset + 3 * stride, dtype=torch.uint8)
    return PagedCache(
        layout, torch.as_strided(memory, (2, layout.page_bytes), (stride, 1), offset), tensor_scale=cache.tensor_scale
    )


def test_caches_that_the_library_cannot_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(backend: Any, cache: PagedCache, *words: str) -> None:
        with refused(LayoutError, "the window cache of layers.20.attn", *words):
            layer_of(backend, spec_of(8, ratio=0), LayerCaches(cache))

    inline = make(SM120, "fp8_ds_mla")
    window = filled(inline.layouts.window, seed=1)
    size = window.layout.page_bytes
    refuse(inline, shifted(window, stride=size + 16), f"{size + 16} bytes apart", "528")
    refuse(inline, shifted(window, stride=size + 528, offset=8), "first byte")
    refuse(inline, shifted(window, stride=size + 8), "page stride")
    far = torch.empty(2**27, size, dtype=torch.uint8, device="meta")
    with pytest.raises(LayoutError, match="on meta"):
        layer_of(inline, spec_of(8, ratio=0), LayerCaches(PagedCache(window.layout, far)))
    v4 = make(SM120, "fp8_ds_mla_v4")
    refuse(v4, filled(v4.layouts.window, seed=1, page_size=16), "pages of 16 rows", "64")
    with pytest.raises(LayoutError, match=r"the window cache of layers\.20\.attn: .*record fp8_ds_mla_v41 where"):
        layer_of(v4, spec_of(8, ratio=0), LayerCaches(window))
    emulated.install(monkeypatch, "0.7.1")
    with pytest.raises(LayoutError, match="scale_placement token where page is expected"):
        layer_of(make(SM120, "fp8_ds_mla"), spec_of(8, ratio=0), LayerCaches(window))

    plain = make(SM100, "bfloat16")
    window = filled(plain.layouts.window, seed=1)
    size = window.layout.page_bytes
    refuse(plain, shifted(window, stride=size + 16), f"{size + 16} bytes apart", "1024")
    layer_of(plain, spec_of(8, ratio=0), LayerCaches(shifted(window, stride=size + 1024)))
    emulated.install(monkeypatch, "0.6.18")
    old = make(SM100, "bfloat16")
    refuse(old, shifted(window, stride=size + 1024), f"{size + 1024} bytes apart", str(size), "upgrade")


def test_a_cache_beyond_int32_is_refused() -> None:
    for kind in (SM120, SM100):
        backend = make(kind, device="meta")
        layout = backend.layouts.window
        data = torch.empty(1, layout.stride, dtype=torch.uint8, device="meta").expand(2**26, -1)
        data = torch.as_strided(data, (2**26, layout.page_bytes), (layout.stride, 1))
        scale = torch.ones(1, device="meta") if layout.record.tensor_scale else None
        with refused(LayoutError, f"{2**26} pages of 64 rows", "int32"):
            backend.check_pool("the window cache", PagedCache(layout, data, tensor_scale=scale), layout)


def test_a_library_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flashinfer.mla", None)
    with refused(BackendError, "flashinfer.mla cannot be imported", "pip install -U flashinfer-python"):
        make(SM100)


def test_what_the_library_says_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(version: str, **_: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(emulated, "_attention", broken)
    emulated.install(monkeypatch)
    backend = make(SM100, "bfloat16")
    layer = layer_of(backend, spec_of(8, ratio=0), LayerCaches(filled(backend.layouts.window, seed=1)))
    with pytest.raises(BackendError, match=r"dsv4 failed with RuntimeError: no kernel image.*query = bfloat16 \[1, 1,"):
        attend(backend, layer, noise(1, 8, 512).bfloat16(), torch.arange(64, 84)[None], None)


def test_flags() -> None:
    for kind in (FlashInferSM120, FlashInferSM100):
        assert not kind.accepts_unnormed_unroped_query
        assert kind.supports_graph_capture
        assert kind.replays_window
    assert flashinfer_sm100.WINDOW_COLUMNS == 128
