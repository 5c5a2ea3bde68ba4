"""Index scores by aiter's paged logits, over an emulated library."""

from __future__ import annotations

import math
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
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.backends.reference.planning import make_plan
from dsv41.backends.reference.quantize import round_trip
from dsv41.backends.rocm.aiter_backend import AiterBackend
from dsv41.backends.rocm.index_scores import query_codes
from dsv41.backends.rocm.layouts import fp8_keys, mxfp4_keys
from dsv41.bench import _nothing_but
from dsv41.checkpoint import load_checkpoint
from dsv41.config import DeepseekV41Config
from dsv41.errors import LayoutError
from dsv41.hal.device import Device
from dsv41.hal.layout import CacheLayout, PagedCache
from dsv41.hal.records import INDEX_MXFP4_68, Dialect
from dsv41.hal.types import AttnInputs, ForwardBatch, LayerCaches, LayerState, StepPlan
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.topology import layer_specs

from ...model.portables import DEVICE
from ...model.test_graph import Rehearsal
from ...model.toys import MAX_LEN, TOY, dyadic_checkpoint, quarter_turns, signs
from ..portable.test_backend import on_meta
from .emulated_aiter import Aiter, e4m3
from .emulated_logits import Logits
from .test_aiter import Hostile, compare_steps

BF16 = torch.bfloat16
DIALECTS = {"gfx942": Dialect.FNUZ, "gfx950": Dialect.OCP}
BIAS = {"gfx942": 8, "gfx950": 7}
EACH = pytest.mark.parametrize("arch", DIALECTS)
THIRTY_TWO_HEADS = replace(TOY, index_n_heads=32)


class Chooses(Hostile):
    """What comes before the indexer, and attention, by torch."""

    prepare_inputs = ReferenceBackend.prepare_inputs
    insert_window = ReferenceBackend.insert_window


def make(arch: str, index: str = "fp8", kind: type[AiterBackend] = Chooses, device: str = DEVICE) -> Any:
    backend = kind(device=device, kv_cache_dtype="fp8", index_cache_dtype=index, facts=Device.gpu(arch))
    backend.library = Aiter(arch)  # type: ignore[misc,assignment]
    backend.logits = Logits(arch)  # type: ignore[attr-defined]
    backend.paged_logits = backend.logits.deepgemm_fp8_paged_mqa_logits  # type: ignore[attr-defined,misc]
    return backend


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# The layouts


@EACH
def test_what_each_name_means(arch: str) -> None:
    for page_size in (16, 64, 128):
        keys = make(arch).layouts.with_page_size(compressed=page_size).index
        assert keys == fp8_keys(DIALECTS[arch]).with_page_size(page_size)
        assert keys.page_bytes == page_size * 132
    auto, named = (make(arch, name).layouts.index for name in ("auto", "mxfp4"))
    assert auto == named
    assert auto.record == INDEX_MXFP4_68
    assert (auto == mxfp4_keys()) == (arch == "gfx950")
    with pytest.raises(LayoutError, match=r"\(16, 16\) of index_fp8.* does not divide a page of 24 rows"):
        make(arch).layouts.with_page_size(compressed=24)


# The queries


@EACH
def test_queries_that_were_rounded_like_keys_come_back_exactly(arch: str) -> None:
    layout = fp8_keys(DIALECTS[arch])
    queries = torch.randn(5, 32, 128, generator=torch.Generator().manual_seed(1))
    queries *= torch.logspace(-6, 6, 32)[:, None]
    queries[0, 0] = 0
    queries[1] = queries[1].sign() * 448
    queries = round_trip(layout.record, queries.to(DEVICE, BF16))
    weights = torch.randn(5, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE, BF16)
    codes, factors = query_codes(queries, weights, flat(PagedCache.allocate(layout, 1))[3])
    scales = query_codes(queries, torch.ones_like(weights), flat(PagedCache.allocate(layout, 1))[3])[1]
    assert torch.equal(e4m3(codes, BIAS[arch]) * scales[..., None], queries.float())
    assert torch.equal(factors, weights.float() * scales)


# The scores


class Scored:
    """A step over index keys of whole numbers, whose scores are exact in float32 in any order."""

    def __init__(self, layout: CacheLayout, query_lens: list[int], heads: int = 32, gap: int = 0) -> None:
        held = [70, 0, 5, 133][: len(query_lens)]
        size, generator = layout.page_size, torch.Generator().manual_seed(len(query_lens))
        counts = [-(-n // size) for n in held]
        order = torch.randperm(sum(counts) + 2, generator=generator).to(torch.int32)
        self.pages = torch.full((len(held), max(counts) + 1), -1, dtype=torch.int32)
        nan = 0x80 if layout.record.dialect is Dialect.FNUZ else 0xFF
        data = torch.full((len(order), layout.stride + gap), nan, dtype=torch.uint8, device=DEVICE)
        pool = data.new_full((len(order), layout.pool_page_bytes), nan) if layout.pool_page_bytes else None
        self.cache = PagedCache(layout, data, pool)
        self.keys = []
        for r, (length, count) in enumerate(zip(held, counts, strict=True)):
            self.pages[r, :count] = order[sum(counts[:r]) : sum(counts[: r + 1])]
            row = torch.arange(length)
            self.keys.append(torch.randint(-3, 4, (length, 128), generator=generator).float() * 2.0 ** (r % 3))
            slots = self.pages[r].long()[row // size] * size + row % size
            self.cache.write(slots.to(DEVICE), self.keys[-1].to(DEVICE))
        batch = ForwardBatch.from_host(
            query_lens=query_lens,
            seq_lens=held,
            window_pages=torch.zeros(len(held), 1, dtype=torch.int32),
            window_page_size=1 << 20,
            compressed_pages={1: self.pages},
            compressed_page_size={1: size},
            num_tokens=len(held) if sum(query_lens) < len(held) else sum(query_lens),
            device=DEVICE,
        )
        self.plan: StepPlan = make_plan(batch, 4)
        self.plan.num_visible[1][self.plan.token_request < 0] = 7  # of padding, which nothing is to read
        self.queries = torch.randint(-3, 4, (batch.num_tokens, heads, 128), generator=generator).to(DEVICE, BF16)
        self.weights = (torch.randint(-3, 4, (batch.num_tokens, heads), generator=generator) / 4).to(DEVICE, BF16)
        [released] = layer_specs(DeepseekV41Config(), layers=[20])
        spec = replace(released, index_heads=heads)
        caches = LayerCaches(self.cache, self.cache, index=self.cache)
        self.layer = LayerState(spec, _nothing_but(torch.zeros(64)), torch.zeros(1, 64), caches=caches)

    @property
    def inputs(self) -> AttnInputs:
        tokens = self.queries.flatten(1)
        return AttnInputs(tokens, tokens, tokens, tokens, self.plan.batch.positions)

    def score(self, backend: AiterBackend, part: slice = slice(None)) -> Tensor:
        """What is written over NaN for the tokens `part`."""
        tokens, width = len(self.queries[part]), self.plan.max_visible[1]
        out = torch.full((tokens, 256), math.nan, device=DEVICE)[:, :width]
        backend._score((self.queries, self.weights), self.layer, self.plan, part, None, out)
        return out

    def type_of(self, backend: AiterBackend, restriction: Tensor | None = None) -> torch.dtype:
        return backend.score_dtype(self.inputs, self.layer, self.plan, restriction)


@pytest.mark.parametrize(("page_size", "gap"), [(16, 0), (64, 192), (128, 0)])
@EACH
def test_the_scores_of_a_decode_step(arch: str, page_size: int, gap: int) -> None:
    """Beside a formula in float64: a request without keys, padding, pages out of order and further apart than they
    need, NaN wherever nobody wrote."""
    backend = make(arch)
    step = Scored(fp8_keys(DIALECTS[arch]).with_page_size(page_size), [1, 0, 1, 1], gap=gap)
    assert step.type_of(backend) == torch.float32
    out = step.score(backend)
    [arguments] = backend.logits.calls
    assert arguments["context_lens"].tolist() == [70, 5, 133, 0]
    assert backend._scratch("scores", 2, page_size + 1, torch.float32).stride(0) % page_size == 0
    for token, request in enumerate((0, 2, 3)):
        keys = step.keys[request].double()
        dots = (step.queries[token].double().cpu() @ keys.T).relu()
        expected = (dots * step.weights[token].double().cpu()[:, None]).sum(0)
        assert torch.equal(out[token, : len(keys)].double().cpu(), expected)


def test_a_page_that_is_missing_is_no_address() -> None:
    backend = make("gfx950")
    step = Scored(fp8_keys(Dialect.OCP).with_page_size(16), [1, 0, 1, 1])
    whole = step.score(backend)
    step.plan.batch.compressed_tables[1].pages[3, 2] = -1
    found = step.score(backend)
    others = [column for column in range(133) if column // 16 != 2]
    assert torch.equal(found[2, others], whole[2, others])


@EACH
def test_a_part_of_a_step_is_scored_in_its_rows(arch: str) -> None:
    backend = make(arch)
    step = Scored(fp8_keys(DIALECTS[arch]), [1, 0, 1, 1])
    whole, two, none = (step.score(backend, part) for part in (slice(None), slice(1, 3), slice(2, 2)))
    assert torch.equal(two[0, :5], whole[1, :5])
    assert torch.equal(two[1, :133], whole[2, :133])
    assert none.numel() == 0
    assert len(backend.logits.calls) == 2


@EACH
def test_what_the_library_does_not_take_is_portable(arch: str) -> None:
    backend, dialect = make(arch), DIALECTS[arch]
    keys = fp8_keys(dialect)
    other = fp8_keys(Dialect.OCP if dialect is Dialect.FNUZ else Dialect.FNUZ)
    decode = [1, 0, 1, 1]
    assert Scored(keys, decode).type_of(backend) == torch.float32
    for what, step in {
        "prefill": Scored(keys, [40, 0, 3, 1]),
        "few heads": Scored(keys, decode, heads=4),
        "long pages": Scored(keys.with_page_size(256), decode),
        "the other dialect": Scored(other, decode),
        "no tiles": Scored(replace(keys, value_tile=None), decode),
        "MXFP4": Scored(mxfp4_keys(), decode),
        "page strides": Scored(keys, decode, gap=16),
    }.items():
        assert step.type_of(backend) == BF16, what
    step = Scored(keys, decode)
    assert step.type_of(backend, torch.zeros(4, 1)) == BF16
    backend.paged_logits = None
    assert step.type_of(backend) == BF16


def test_without_the_library_or_with_an_old_one_there_is_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Chooses(device="cpu", kv_cache_dtype="fp8", facts=Device.gpu("gfx950"))
    assert backend.paged_logits is None

    def untiled(q_fp8: Any, kv_cache_fp8: Any, weights: Any, *more: Any, ChunkK: int = 64) -> None: ...

    def of_other_rows(
        q_fp8: Any, Preshuffle: bool = False, TotalCuCount: int = 80, VarCtxSchedule: Any = None
    ) -> None: ...

    for function in (untiled, of_other_rows):
        old = type("Module", (), {"deepgemm_fp8_paged_mqa_logits": staticmethod(function)})
        monkeypatch.setattr("dsv41.backends.rocm.index_scores.load", lambda *_, module=old: module)
        del backend.paged_logits
        assert backend.paged_logits is None
    monkeypatch.setattr("dsv41.backends.rocm.index_scores.load", lambda *_: Logits("gfx950"))
    del backend.paged_logits
    assert backend.paged_logits is not None


# Whole steps; on a GPU, test_on_any_gpu.py has them

ON_A_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="for machines without a GPU")


@pytest.fixture(scope="module")
def dyadic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("index") / "dyadic"
    dyadic_checkpoint(path, BF16, THIRTY_TWO_HEADS)
    return path


@ON_A_CPU
@EACH
def test_decode_steps_choose_what_the_reference_chooses(dyadic: Path, arch: str) -> None:
    """Over lengths that leave rows out; a source of each ratio, one of them publishing candidates to the next layer."""

    def script(session: Session, hidden: Tensor) -> Iterator[dict[int, Tensor]]:
        one, two = session.add_request(), session.add_request()
        yield session.step({one: hidden[:, :17], two: hidden[:, 17:32]})
        for row in (32, 34):
            yield session.step({one: hidden[:, row : row + 1], two: hidden[:, row + 1 : row + 2]}, pad_to=2)

    backend = make(arch)
    compare_steps(backend, dyadic, [1, 4, 5], script)
    assert len(backend.logits.calls) == 2 * 2  # the third layer reads candidates
    assert {call["KVBlockSize"] for call in backend.logits.calls} == {16}


@ON_A_CPU
@EACH
def test_a_step_asks_the_device_nothing(dyadic: Path, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device have no numbers to ask for."""
    monkeypatch.setattr("dsv41.backends.reference.backend.count_nan", lambda weight: 0)
    backend = make(arch, kind=AiterBackend, device="meta")
    checkpoint = load_checkpoint(dyadic, dtype=BF16, layers=[1, 4, 5])
    checkpoint = replace(checkpoint, weights={layer: on_meta(own) for layer, own in checkpoint.weights.items()})
    session = Session(AttentionStack(checkpoint, backend, max_len=MAX_LEN), max_requests=2, max_step_tokens=32)
    one, two = session.add_request(), session.add_request()
    for count in (16, 1, 1):
        hidden = torch.empty(count, TOY.hidden_size, dtype=BF16, device="meta")
        session.step({one: hidden, two: hidden})
    assert len(backend.logits.calls) == 2 * 2


@ON_A_CPU
def test_a_captured_step_is_the_eager_one_bit_for_bit(dyadic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_Recording", Rehearsal)
    stack = AttentionStack(load_checkpoint(dyadic, dtype=BF16, layers=[4]), make("gfx950"), max_len=MAX_LEN)
    quarter_turns(stack)
    eager, captured = (Session(stack, max_requests=2, max_step_tokens=24, page_size=16) for _ in range(2))
    captured.capture(2, num_requests=2, layer_inputs=True)
    before = signs(1, 20, TOY.hidden_size).to(BF16)
    for session in (eager, captured):
        assert [session.add_request() for _ in range(2)] == [0, 1]
        session.step({0: before, 1: before[:, :3]})
    calls = stack.backend.logits.calls  # type: ignore[attr-defined]
    for number in range(3):
        count = len(calls)
        inputs = {r: signs(1, 1, TOY.hidden_size, seed=10 * number + r).to(BF16) for r in (0, 1)}
        expected, found = eager.step(inputs, pad_to=2), captured.step(inputs)
        assert all(torch.equal(found[r], expected[r]) for r in inputs)
        assert len(calls) == count + 2
