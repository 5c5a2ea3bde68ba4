"""The portable backend beside the reference: the same caches and outputs, whatever its parts are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.backends.portable import backend as backend_module
from dsv41.backends.portable import workspace as workspace_module
from dsv41.backends.portable.backend import PortableBackend
from dsv41.backends.portable.launch import watching
from dsv41.backends.portable.weights import Matrix, joined
from dsv41.backends.portable.workspace import Workspace
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.backends.reference.layouts import INDEX_RECORDS, KV_RECORDS
from dsv41.cache import allocate_caches, cache_specs
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.errors import BackendError, InputError, LayoutError
from dsv41.fp8 import quantize_blocks
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import RECORDS, Encoding, Field, Record
from dsv41.hal.types import AttnInputs, BlockScaledWeight, ForwardBatch, LayerCaches, LayerState, Selection, StepPlan
from dsv41.hal.weights import facts
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.verify import relative_error

from ...model.portables import Interpreted, portable
from ...model.toys import MAX_LEN, TOY, noise, quarter_turns, signs
from ...wording import refused
from .common import DEVICE


class Unfused(PortableBackend):
    """As a vendor's subclass whose attention kernel neither rotates nor quantises."""

    name = "unfused"
    fuses_rotation = False


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def realistic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("portable") / "toy", config=TOY)


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Checkpoint:
    return load_checkpoint(path, device=DEVICE, dtype=dtype, **options)


def make_stack(path: Path, backend: ReferenceBackend, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return AttentionStack(load(path, dtype, layers=options.pop("layers", None)), backend, max_len=MAX_LEN, **options)


# One step of every layer


@pytest.mark.parametrize(("kv", "dtype"), [("auto", torch.bfloat16), ("fp8_ds_mla_v4", torch.float32)], ids=str)
def test_a_step_leaves_the_bytes_and_selections_of_the_reference(dyadic: Path, kv: str, dtype: torch.dtype) -> None:
    """On numbers of which no sum depends on its order. Two requests, padding, groups closed in another step."""
    sessions, chosen = [], []
    for backend in (ReferenceBackend(device=DEVICE, kv_cache_dtype=kv), portable(kv_cache_dtype=kv)):
        stack = make_stack(dyadic, backend, dtype)
        quarter_turns(stack)
        keep = Keep()
        session = Session(stack, max_requests=2, max_step_tokens=32, page_size=4)
        one, two = session.add_request(), session.add_request()
        hidden = signs(7, 40, TOY.hidden_size).to(DEVICE, dtype)
        session.step({one: hidden[:, :13], two: hidden[:, 13:14]}, pad_to=15, tap=keep)
        session.step({one: hidden[:, 14:15], two: hidden[:, 15:17]}, tap=keep)
        sessions.append(session)
        chosen.append(keep.kept)
    for layer, expected in sessions[0].caches.items():
        found = sessions[1].caches[layer]
        for kind in ("window", "compressed", "index"):
            if (cache := getattr(expected, kind)) is not None:
                assert torch.equal(getattr(found, kind).data, cache.data), (layer, kind)
        if expected.compressor_state is not None:
            assert torch.equal(found.compressor_state, expected.compressor_state), layer
    for mine, theirs in zip(*reversed(chosen), strict=True):
        assert_same_choice(mine.topk_indices, theirs.topk_indices)
        if theirs.candidates is not None:
            assert_same_choice(mine.candidates, theirs.candidates)


class Keep:
    """A tap that keeps what was selected."""

    def __init__(self) -> None:
        self.kept: list[Selection] = []

    def inputs(self, *_: Any) -> None: ...

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        live = plan.token_request >= 0
        blocks = None if selection.candidates is None else selection.candidates[live]
        self.kept.append(Selection(selection.topk_indices[live], blocks))
        return selection

    def output(self, *_: Any) -> None: ...


def assert_same_choice(found: Tensor | None, expected: Tensor) -> None:
    """The same, but for empty columns behind."""
    assert found is not None
    width = min(found.shape[1], expected.shape[1])
    assert torch.equal(found[:, :width], expected[:, :width])
    assert (found[:, width:] == -1).all()
    assert (expected[:, width:] == -1).all()


@pytest.mark.parametrize(("layer", "quantize"), [(0, False), (4, True)], ids=["window layer", "source, MXFP8"])
def test_all_kernels_together_give_what_the_reference_does(realistic: Path, layer: int, quantize: bool) -> None:
    """Attention with its rotations and its cast fused, and the same in parts: equal to the last bit."""
    hidden = noise(1, 3, TOY.hidden_size).to(DEVICE)
    outputs = []
    for kind in (ReferenceBackend, PortableBackend, Unfused):
        stack = make_stack(realistic, kind(device=DEVICE), layers=[layer], quantize_activations=quantize)
        session = Session(stack, max_requests=1, max_tokens=8)
        outputs.append(session.step({session.add_request(): hidden})[0])
    assert relative_error(outputs[1], outputs[0]) < 1e-5
    if DEVICE == "cpu":
        assert torch.equal(outputs[1], outputs[2])
    else:  # where attention is compiled with contraction, and rotates in one rounding less
        assert relative_error(outputs[1], outputs[2]) < 1e-6


def test_the_output_is_handed_on_as_the_flags_say(realistic: Path) -> None:
    for kind, quantize, form in (
        (PortableBackend, True, ("mxfp8_row", True, torch.uint8)),
        (PortableBackend, False, (None, True, torch.float32)),
        (Unfused, True, (None, False, torch.float32)),
    ):
        backend = kind(device=DEVICE)
        stack = make_stack(realistic, backend, layers=[0], quantize_activations=quantize)
        Session(stack, max_requests=1, max_tokens=8)
        state, plan = stack.layers[0].state, backend.plan(batch(stack), stack.specs)
        with watching(lambda launch: False):
            inputs = backend.prepare_inputs(noise(1, TOY.hidden_size).to(DEVICE), state, plan)
            out = backend.attend(inputs, state, plan, None)
        assert (out.scale_layout, out.rotated_back, out.data.dtype) == form
        assert (out.scale is None) == (form[0] is None)
        assert kind.accepts_unnormed_unroped_query == kind.fuses_rotation


def batch(stack: AttentionStack, tokens: int = 1, held: int | None = None, **options: Any) -> ForwardBatch:
    """One request on pages 0, 1, ... of every pool."""
    layouts, held = stack.backend.layouts, held or tokens
    sizes = {0: layouts.window.page_size, **{spec.ratio: layouts.compressed.page_size for spec in stack.specs}}
    pages = {r: torch.arange(max(1, -(-held // max(r, 1) // sizes[r])), dtype=torch.int32)[None] for r in sizes}
    given: dict[str, Any] = {
        "query_lens": [tokens],
        "seq_lens": [held],
        "window_pages": pages.pop(0),
        "window_page_size": layouts.window.page_size,
        "compressed_pages": pages,
        "compressed_page_size": sizes,
        "device": stack.backend.device,
    }
    return ForwardBatch.from_host(**given | options)


def test_window_rows_alone_are_those_of_the_reference(dyadic: Path) -> None:
    hidden = signs(3, TOY.hidden_size).to(DEVICE)
    written = []
    for backend in (ReferenceBackend(device=DEVICE), portable()):
        stack = make_stack(dyadic, backend, layers=[0])
        quarter_turns(stack)
        session = Session(stack, max_requests=1, max_tokens=8)
        session.insert_window({session.add_request(): hidden})
        written.append(session.caches[0].window.data)
    assert written[0].any()
    assert torch.equal(*written)


def test_a_step_of_no_tokens_and_one_of_padding_alone_work(realistic: Path) -> None:
    for kind in (PortableBackend, Unfused):
        stack = make_stack(realistic, kind(device=DEVICE), quantize_activations=True)
        session = Session(stack, max_requests=2, max_tokens=8)
        request = session.add_request()
        assert session.step({}) == {}
        assert session.step({request: noise(0, TOY.hidden_size).to(DEVICE)})[request].shape == (0, TOY.hidden_size)


# Selections


def selecting(
    path: Path, layer: int, tokens: int, backend: PortableBackend
) -> tuple[AttnInputs, LayerState, StepPlan, Selection | None]:
    """An index source's inputs in a step of two requests, the second of which held tokens before, and the selection of
    the KV source before it."""
    stack = make_stack(path, backend, layers=sorted({layer, 4} if layer == 5 else {layer}))
    Session(stack, max_requests=2, max_tokens=64)
    pages = torch.tensor([[0], [1]], dtype=torch.int32)
    lens = {"query_lens": [tokens - 3, 3], "seq_lens": [tokens - 3, tokens]}
    tables = {"window_pages": pages, "compressed_pages": {spec.ratio: pages for spec in stack.specs}}
    plan, published = backend.plan(batch(stack, **lens, **tables), stack.specs), None
    for i, attention in enumerate(stack.layers):
        inputs = backend.prepare_inputs(noise(tokens, TOY.hidden_size, seed=i).to(DEVICE), attention.state, plan)
        if attention.spec.layer_id == layer:
            return inputs, attention.state, plan, published
        published = backend.select(inputs, attention.state, plan, published)
    raise AssertionError(layer)


@pytest.mark.parametrize("layer", [1, 4, 5], ids=["ratio 2", "publishes candidates", "reads candidates"])
def test_a_selection_is_the_same_in_parts(realistic: Path, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = portable()
    given = selecting(realistic, layer, 14, backend)
    whole = backend.select(*given)
    parts: list[int] = []
    score = backend._score
    monkeypatch.setattr(backend_module, "SCORE_BYTES", 5 * backend_module._ROW * 4)
    monkeypatch.setattr(backend, "_score", lambda *a: (parts.append(a[-1].shape[0]), score(*a)))
    assert_equal(backend.select(*given), whole)
    assert parts == [5, 5, 4]


def test_parts_fit_the_bound_and_are_of_a_token_at_least() -> None:
    def parts(tokens: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> list[int]:
        return [part.stop - part.start for part in backend_module._parts(tokens, columns, dtype)]

    assert parts(2048, 2**20) == [128] * 16
    assert parts(2048, 2**20, torch.float32) == [64] * 32
    assert parts(3, 2**28) == [1, 1, 1]
    assert parts(100, 1) == [100]
    assert parts(0, 50) == parts(0, 0) == [0]


def assert_equal(found: Selection, expected: Selection) -> None:
    assert torch.equal(found.topk_indices, expected.topk_indices)
    assert (found.candidates is None) == (expected.candidates is None)
    if found.candidates is not None and expected.candidates is not None:
        assert torch.equal(found.candidates, expected.candidates)


@pytest.mark.parametrize("layer", [1, 4, 5])
def test_what_needs_no_scores_is_what_scores_would_choose(
    realistic: Path, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last column, so that a captured graph, which may see longer requests, goes on with the same numbers."""
    backend = portable()
    given = selecting(realistic, layer, 6, backend)
    short = backend.select(*given)
    assert short.topk_indices.shape == (6, TOY.index_topk)
    monkeypatch.setattr(backend_module, "_chooses_all", lambda spec, visible: False)
    assert_equal(backend.select(*given), short)


def test_queries_that_were_replaced_are_scored_as_they_are(realistic: Path) -> None:
    """Not by the MXFP8 form of those before."""
    backend = portable()
    stack = make_stack(realistic, backend, layers=[4], quantize_activations=True)
    Session(stack, max_requests=1, max_tokens=64)
    state, plan = stack.layers[0].state, backend.plan(batch(stack, 12), stack.specs)
    inputs = backend.prepare_inputs(noise(12, TOY.hidden_size).to(DEVICE), state, plan)
    assert inputs.extra is not None
    backend.select(inputs, state, plan, None)
    before = backend.index_scores(inputs, state, plan)
    flipped = backend.index_scores(replace(inputs, qr=-inputs.qr), state, plan)
    fresh = backend.index_scores(replace(inputs, qr=-inputs.qr, extra=None), state, plan)
    seen = torch.arange(12, device=DEVICE) < plan.num_visible[1][:, None]
    assert not torch.equal(before[seen], flipped[seen])
    assert torch.equal(flipped[seen], fresh[seen])


# What a step may do


def test_a_step_asks_the_device_nothing(realistic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device have no numbers to ask for."""
    monkeypatch.setattr("dsv41.backends.reference.backend.count_nan", lambda weight: 0)
    for kind, quantize in ((PortableBackend, True), (Unfused, False)):
        backend = kind(device="meta")
        checkpoint = load_checkpoint(realistic)
        weights = {layer: on_meta(w) for layer, w in checkpoint.weights.items()}
        stack = AttentionStack(
            replace(checkpoint, weights=weights), backend, max_len=MAX_LEN, quantize_activations=quantize
        )
        session = Session(stack, max_requests=2, max_step_tokens=32)
        one, two = session.add_request(), session.add_request()
        for counts in ((20, 1), (1, 1), (0, 3)):
            shape = zip((one, two), counts, strict=True)
            inputs = {r: torch.empty(n, TOY.hidden_size, dtype=stack.dtype, device="meta") for r, n in shape}
            outputs = session.step(inputs, pad_to=24)
            assert all(outputs[r].shape == inputs[r].shape for r in inputs)


def on_meta(tree: Any) -> Any:
    if isinstance(tree, BlockScaledWeight):
        return tree.to("meta")
    if isinstance(tree, Tensor):
        return tree.to("meta")
    if tree is None:
        return None
    return replace(tree, **{name: on_meta(getattr(tree, name)) for name in vars(tree)})


def test_a_step_can_be_watched_without_running_a_kernel(realistic: Path) -> None:
    stack = make_stack(realistic, PortableBackend(device=DEVICE), quantize_activations=True)
    session = Session(stack, max_requests=1, max_tokens=64)
    launched: list[str] = []

    def note(launch: Any) -> bool:
        launched.append(launch.kernel.__name__)
        return False

    with watching(note):
        session.step({session.add_request(): noise(20, TOY.hidden_size).to(DEVICE)})
    wanted = ("_score", "_mix", "_norm_inputs", "_insert_rows", "_pool", "_index_queries")
    assert set(wanted) <= set(launched)
    assert {"_index_scores", "_block_maxima", "_top_k", "_selection_slots"} <= set(launched)


@pytest.mark.parametrize("quantize", [False, True])
def test_warmup_launches_what_steps_launch(realistic: Path, quantize: bool) -> None:
    """With the same constants: on the page sizes of the backend, for the layers and types that were prepared."""
    backend = PortableBackend(device=DEVICE)
    stack = make_stack(realistic, backend, torch.bfloat16, quantize_activations=quantize)
    session = Session(stack, max_requests=1, max_step_tokens=32)
    seen: list[set[tuple[Any, ...]]] = [set(), set()]

    def note_in(kept: set[tuple[Any, ...]]) -> Any:
        def note(launch: Any) -> bool:
            constants = {k: v for k, v in launch.arguments.items() if k.isupper()}
            dtypes = {k: v.dtype for k, v in launch.arguments.items() if isinstance(v, Tensor)}
            kept.add((launch.kernel.__name__, *sorted(map(str, (*constants.items(), *dtypes.items())))))
            return False

        return note

    with watching(note_in(seen[0])):
        request = session.add_request()
        for count in (3, 30, 1, 8):
            session.step({request: noise(count, TOY.hidden_size).to(DEVICE, torch.bfloat16)})
    with watching(note_in(seen[1])):
        backend.warmup()
    assert len(seen[0]) > 20
    assert seen[0] <= seen[1]
    with watching(note_in(fewer := set())):
        backend.warmup([spec for spec in stack.specs if spec.ratio == 0])
    assert len(fewer) < len(seen[1])


# Workspaces


def test_reserve_is_enough_for_every_step_within_it(realistic: Path) -> None:
    backend = portable()
    stack = make_stack(realistic, backend, layers=[4, 5])
    assert backend.workspace.bytes == 0
    reserved = backend.reserve(7, 2, 40)
    assert reserved == backend.workspace.bytes > 0
    session = Session(stack, max_requests=2, max_tokens=40, max_step_tokens=7)
    addresses = {name: buffer.data_ptr() for name, buffer in backend.workspace._buffers.items()}
    request = session.add_request()
    for count in (7, 1, 7):
        session.step({request: noise(count, TOY.hidden_size).to(DEVICE)})
    assert addresses == {name: buffer.data_ptr() for name, buffer in backend.workspace._buffers.items()}


def test_the_workspace_of_a_long_context_is_bounded(realistic: Path) -> None:
    backend = PortableBackend(device="meta")
    stack = make_stack(realistic, portable())
    for spec in stack.specs:
        backend.specs[spec] = {}
    bound = 2 * backend_module.SCORE_BYTES + backend_module.ATTENTION_BYTES
    assert 2 * 2**28 < backend.reserve(2048, 64, 2**20) <= bound


def test_a_workspace_grows_outside_a_capture_only(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(torch.device(DEVICE))
    small = workspace.take("scores", 3, 5, dtype=torch.float32)
    assert (small.shape, small.dtype, workspace.bytes) == ((3, 5), torch.float32, 60)
    assert workspace.take("scores", 2, dtype=torch.bfloat16).data_ptr() == small.data_ptr()
    monkeypatch.setattr(workspace_module, "capturing", lambda device: True)
    assert workspace.take("scores", 15, dtype=torch.float32).data_ptr() == small.data_ptr()
    assert workspace.take("empty", 0, dtype=torch.float32).shape == (0,)
    with refused(BackendError, "scores has 60 bytes", "needs 64", "call reserve first"):
        workspace.take("scores", 16, dtype=torch.float32)
    monkeypatch.setattr(workspace_module, "capturing", lambda device: False)
    kept = workspace._captured[0]
    assert workspace.take("scores", 16, dtype=torch.float32).data_ptr() != small.data_ptr()
    assert kept.data_ptr() == small.data_ptr()  # which a graph goes on using
    assert workspace.bytes == 64


# Weights


def test_matrices_of_one_input_become_one_where_their_forms_agree() -> None:
    def coded(rows: int, block: tuple[int, int] = (32, 32)) -> BlockScaledWeight:
        return quantize_blocks(noise(rows, 64, seed=rows), block)

    (one,) = joined([coded(64), coded(40)])
    assert one.data.shape == (104, 64)
    assert one.scale is not None
    assert one.scale.shape == (4, 2)
    assert torch.equal(one.data[64:], coded(40).data.view(torch.uint8))
    assert torch.equal(one.scale[2:], coded(40).scale)
    (plain,) = joined([noise(8, 64), noise(4, 64)])
    assert (plain.data.shape, plain.scale) == ((12, 64), None)
    for pair in (
        [coded(48), coded(32)],  # not whole blocks: a scale would belong to both
        [coded(32), coded(32, (16, 32))],
        [coded(32), noise(32, 64)],
        [noise(32, 64), noise(32, 64).bfloat16()],
    ):
        assert [matrix.rows for matrix in joined(pair)] == [matrix.shape[0] for matrix in pair]
    assert joined([]) == ()
    assert len(joined([coded(32)])) == 1


def test_two_matrices_do_what_one_does(realistic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, outputs = noise(2, TOY.hidden_size).to(DEVICE), []
    for apart in (False, True):
        if apart:
            monkeypatch.setattr("dsv41.backends.portable.weights.joined", lambda parts: tuple(map(Matrix.of, parts)))
        stack = make_stack(realistic, portable(), layers=[1], quantize_activations=True)
        assert len(stack.layers[0].state.prepared.down) == len(stack.layers[0].state.prepared.compress) == 1 + apart
        session = Session(stack, max_requests=1, max_tokens=8)
        outputs.append(session.step({session.add_request(): hidden[None]})[0])
    assert torch.equal(*outputs)


def test_prepared_weights_follow_an_update_and_sleep(realistic: Path, tmp_path: Path) -> None:
    """The same tensor objects, in the same memory until they sleep; none is kept while they do."""
    other = make_checkpoint(tmp_path / "other", config=TOY, seed=1)
    stack, fresh = (make_stack(path, portable(), layers=[1]) for path in (realistic, other))
    prepared, expected = stack.layers[0].state.prepared, fresh.layers[0].state.prepared
    before = facts(prepared)
    pointer = prepared.down[0].data.data_ptr()
    assert not torch.equal(prepared.down[0].data, expected.down[0].data)
    stack.update_weights(load(other, layers=[1]))
    assert stack.layers[0].state.prepared is prepared
    assert prepared.down[0].data.data_ptr() == pointer
    for mine, theirs in ((prepared.down[0], expected.down[0]), (prepared.wo_a, expected.wo_a)):
        assert torch.equal(mine.data, theirs.data)
        assert torch.equal(mine.scale, theirs.scale)
    assert torch.equal(prepared.compress[0].data, expected.compress[0].data)
    stack.sleep()
    assert prepared.down[0].data.numel() == prepared.wq_b.data.numel() == 0
    stack.wake(load(realistic, layers=[1]))
    assert facts(prepared) == before
    assert torch.equal(prepared.wq_b.data, stack.layers[0].state.weights.wq_b.data.view(torch.uint8))


def test_weights_that_are_not_finite_are_refused(realistic: Path) -> None:
    checkpoint = load(realistic, layers=[0])
    checkpoint.weights[0].wo_b.data.view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(InputError, match=r"layers\.0\.attn\.wo_b\.weight holds 1 NaN"):
        AttentionStack(checkpoint, portable(), max_len=MAX_LEN)


# What is taken and what is refused


def test_heads_are_not_padded() -> None:
    backend = PortableBackend()
    assert [backend.get_padded_num_q_heads(heads) for heads in (1, 8, 16, 100, 128)] == [1, 8, 16, 100, 128]
    for heads in (0, 129):
        with refused(BackendError, f"{heads} query heads", "1 to 128", "tp_size"):
            backend.get_padded_num_q_heads(heads)


@pytest.mark.parametrize("kv", [*KV_RECORDS, "auto", "fp8"])
@pytest.mark.parametrize("index", [*INDEX_RECORDS, "auto"])
def test_the_names_mean_what_they_do_to_the_reference(kv: str, index: str) -> None:
    mine, theirs = (kind(kv_cache_dtype=kv, index_cache_dtype=index) for kind in (PortableBackend, ReferenceBackend))
    assert mine.layouts == theirs.layouts
    assert (mine.kv_cache_dtype, mine.index_cache_dtype) == (theirs.kv_cache_dtype, theirs.index_cache_dtype)


def test_an_unknown_name_is_refused_in_its_own_name() -> None:
    with pytest.raises(LayoutError, match="'fp9' is unknown: portable reads auto"):
        PortableBackend(kv_cache_dtype="fp9")


def bound(stack: AttentionStack) -> dict[int, LayerCaches]:
    specs = cache_specs(stack.config, stack.backend, [spec.layer_id for spec in stack.specs])
    return allocate_caches(specs, dict.fromkeys((0, 1, 2), 2), state_slots=1, ring=2, device=DEVICE)


@pytest.mark.parametrize("name", [name for name, record in RECORDS.items() if record.dim == 512])
@pytest.mark.parametrize("placement", list(ScalePlacement))
def test_every_layout_of_a_record_can_be_bound(realistic: Path, name: str, placement: ScalePlacement) -> None:
    record = RECORDS[name]
    if (placement is ScalePlacement.NONE) != (record.scale_bytes == 0):
        pytest.skip("the record has no such layout")
    stack = make_stack(realistic, portable(), layers=[0])
    stack.bind({0: LayerCaches(PagedCache.allocate(CacheLayout(record, 8, placement), 2, DEVICE))})


def spread(cache: PagedCache, stride: int, offset: int = 0) -> PagedCache:
    """The same layout, aligned to nothing, in pages `stride` bytes apart from byte `offset` on."""
    layout = replace(cache.layout, alignment=1)
    memory = torch.zeros(offset + 3 * stride, dtype=torch.uint8, device=DEVICE)
    return PagedCache(layout, torch.as_strided(memory, (2, layout.page_bytes), (stride, 1), offset))


def test_caches_that_kernels_cannot_address_are_refused(realistic: Path) -> None:
    stack = make_stack(realistic, portable(kv_cache_dtype="fp8_ds_mla_v4", index_cache_dtype="fp8"), layers=[4])
    caches = bound(stack)[4]
    stack.bind({4: caches})
    size, keys = caches.window.layout.page_bytes, caches.index
    assert keys is not None
    assert caches.compressed is not None
    odd = spread(caches.window, size + 1)
    wrong = {
        "page stride": replace(caches, window=odd),
        "first byte": replace(caches, compressed=spread(caches.compressed, size + 8, offset=4)),
        "multiple of 4 bytes, as its scales": replace(caches, index=spread(keys, keys.layout.page_bytes + 2)),
        "expected 512": replace(caches, window=keys),
        "on meta": replace(caches, window=PagedCache.allocate(caches.window.layout, 2, "meta")),
        "compressor state": replace(caches, compressor_state=torch.zeros(1, 2, 2, 512, dtype=torch.bfloat16)),
    }
    for words, given in wrong.items():
        with refused(LayoutError, words, "layers.4.attn"):
            stack.bind({4: given})
    stack.bind({4: replace(caches, window=spread(caches.window, size + 8, offset=8))})


def test_a_record_that_the_kernels_have_no_code_for_is_refused(realistic: Path) -> None:
    fields = (Field(0, 256, Encoding.BF16, 0), Field(256, 512, Encoding.FP32, 0))
    record = Record("two-halves", 512, fields, None, None, 16)
    stack = make_stack(realistic, portable(), layers=[0])
    with refused(LayoutError, "portable cannot read two-halves"):
        stack.bind({0: LayerCaches(PagedCache.allocate(CacheLayout(record, 8, ScalePlacement.NONE), 2, DEVICE))})


def test_the_double_of_the_model_tests_is_a_portable_backend() -> None:
    assert Interpreted.accepts_unnormed_unroped_query is False
    assert PortableBackend.supports_graph_capture
    assert PortableBackend.replays_window
