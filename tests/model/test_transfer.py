"""Requests that move: between sessions, layouts, page sizes and machines, and files that lie."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.cache import WINDOW
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.errors import Dsv41Error, InputError, PoolExhausted, RequestError, TransferError
from dsv41.hal.layout import WHOLE_PAGE, CacheLayout, CacheLayouts, PagedCache, ScalePlacement
from dsv41.hal.records import (
    INDEX_FP32,
    INDEX_MXFP4_68,
    NVFP4_288,
    PLAIN_BF16,
    PLAIN_FP32,
    Dialect,
    Record,
    ScaleFormat,
    index_fp8_132,
    pack,
    plain_fp8,
    unpack,
    v4_584,
    v41_528,
)
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.transfer import convert_request

from ..wording import refused
from .toys import MAX_LEN, TOY, dyadic_checkpoint, plain_checkpoint, quarter_turns, signs

HIDDEN = TOY.hidden_size
OCP, FNUZ = Dialect.OCP, Dialect.FNUZ
TOKEN, PAGE, POOL, NONE = ScalePlacement.TOKEN, ScalePlacement.PAGE, ScalePlacement.POOL, ScalePlacement.NONE
TILE = {"value_tile": (WHOLE_PAGE, 16)}
LAYERS = [0, 1, 4]
"""One with a window only, and the sources of ratio 2 and 1."""


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("transfer") / "toy"
    dyadic_checkpoint(path, torch.float32)
    return path


@pytest.fixture(scope="module")
def checkpoint(path: Path) -> Checkpoint:
    return load_checkpoint(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def few(path: Path) -> Checkpoint:
    return load_checkpoint(path, layers=LAYERS, dtype=torch.float32)


def layouts(latent: CacheLayout, index: CacheLayout, compressed: CacheLayout | None = None) -> CacheLayouts:
    return CacheLayouts(latent, compressed or latent, index).with_page_size(window=4, compressed=4)


def layout(record: Record, placement: ScalePlacement, **more: Any) -> CacheLayout:
    return CacheLayout(record, 4, placement, **more)


INDEX = [
    layout(INDEX_MXFP4_68, PAGE),
    layout(INDEX_MXFP4_68, POOL, **TILE, scale_tile=(WHOLE_PAGE, 1), scale_lanes=2),
    layout(index_fp8_132(OCP, ScaleFormat.FP32), PAGE),
    layout(index_fp8_132(OCP, ScaleFormat.UE8M0), PAGE),
    layout(index_fp8_132(FNUZ, ScaleFormat.FP32), PAGE, **TILE),
    layout(index_fp8_132(FNUZ, ScaleFormat.UE8M0), PAGE, **TILE),
    layout(INDEX_FP32, NONE),
]
LATENT = [
    layout(v4_584(OCP), PAGE),
    layout(v4_584(FNUZ), PAGE),
    layout(v41_528(OCP), TOKEN),
    layout(v41_528(OCP), PAGE),
    layout(v41_528(FNUZ), TOKEN),
    layout(v41_528(FNUZ), PAGE, page_stride=512 * 7),
    layout(PLAIN_BF16, NONE, page_stride=1024 * 9),
    layout(plain_fp8(OCP), NONE),
    layout(plain_fp8(FNUZ), NONE),
    layout(PLAIN_FP32, NONE),
]
ALL = [layouts(latent, INDEX[i % len(INDEX)]) for i, latent in enumerate(LATENT)]
ALL += [
    layouts(layout(v41_528(OCP), TOKEN), INDEX[3], layout(NVFP4_288, TOKEN)),
    layouts(layout(v41_528(FNUZ), PAGE), INDEX[4], layout(NVFP4_288, PAGE)),
    layouts(layout(v41_528(OCP), PAGE), INDEX[5], layout(NVFP4_288, POOL)),
    layouts(LATENT[9], INDEX[6]),
]


def name_of(given: CacheLayouts) -> str:
    parts = (given.window, given.compressed, given.index)
    return " ".join(f"{part.record.name}-{part.scale_placement}" for part in parts)


class Fixed(ReferenceBackend):
    """The reference over layouts of our choice, as another vendor's would be."""

    def __init__(self, given: CacheLayouts) -> None:
        self.given = given
        super().__init__()

    def resolve_layouts(self, kv_cache_dtype: str, index_cache_dtype: str) -> tuple[str, str, CacheLayouts]:
        return kv_cache_dtype, index_cache_dtype, self.given


def stack_of(checkpoint: Checkpoint, given: CacheLayouts | None = None, max_len: int = MAX_LEN) -> AttentionStack:
    stack = AttentionStack(checkpoint, Fixed(given) if given else ReferenceBackend(), max_len=max_len)
    quarter_turns(stack)
    return stack


def session_of(checkpoint: Checkpoint, given: CacheLayouts | None = None, **more: Any) -> Session:
    page_size = more.pop("page_size", None if given else 4)
    max_len = more.pop("max_len", MAX_LEN)
    sizes = {"max_requests": 3, "max_tokens": 3 * MAX_LEN} | more
    return Session(stack_of(checkpoint, given, max_len), page_size=page_size, **sizes)


def hidden(seed: int, stack: AttentionStack, tokens: int = 40) -> Tensor:
    return signs(len(stack.layers), tokens, HIDDEN, seed=seed)


def step(session: Session, request: int, inputs: Tensor, count: int) -> Tensor:
    start = session.length(request)
    return session.step({request: inputs[:, start : start + count]})[request]


def start(session: Session, tokens: int, seed: int = 0) -> int:
    request = session.add_request()
    session.step({request: hidden(seed, session.stack)[:, :tokens]})
    return request


def slots_of(session: Session, request: int, pool: int, rows: range) -> Tensor:
    size, table = session.pages.page_size[pool], session.find(request).pages.tables[pool]
    return torch.tensor([table[row // size] * size + row % size for row in rows], dtype=torch.int64)


def cache_of(session: Session, name: str) -> PagedCache:
    spec = next(spec for spec in session.cache_specs if spec.name == name)
    cache: PagedCache = getattr(session.caches[spec.layer_id], spec.kind)
    return cache


def rows_of(session: Session, request: int) -> dict[str, range]:
    known = session.find(request)
    return {
        spec.name: range(known.window_start if spec.pool == WINDOW else 0, known.length // spec.ratio)
        for spec in session.cache_specs
    }


def content(session: Session, request: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The bytes of every held row, by cache."""
    rows = rows_of(session, request)
    return {
        spec.name: cache_of(session, spec.name).read_bytes(slots_of(session, request, spec.pool, rows[spec.name]))
        for spec in session.cache_specs
    }


def same_content(a: dict[str, tuple[Tensor, Tensor]], b: dict[str, tuple[Tensor, Tensor]]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, y) for name in a for x, y in zip(a[name], b[name], strict=True))


def accounts(session: Session) -> str:
    pools = {name: (pool.free_pages, pool.num_pages) for name, pool in session.pages.pools.items()}
    return f"{pools} {session._requests} {sorted(session._free_slots)}"


def memory(session: Session) -> list[Tensor]:
    parts: list[Tensor] = []
    for caches in session.caches.values():
        for cache in (caches.window, caches.compressed, caches.index):
            parts += (
                [] if cache is None else [cache.data] if cache.scale_pool is None else [cache.data, cache.scale_pool]
            )
        parts += [] if caches.compressor_state is None else [caches.compressor_state]
    return parts


@contextmanager
def unchanged(session: Session) -> Iterator[None]:
    before, bytes_before = accounts(session), [part.clone() for part in memory(session)]
    yield
    assert accounts(session) == before
    assert all(torch.equal(a, b) for a, b in zip(bytes_before, memory(session), strict=True))


# Going on after a move


def go_on_alike(
    a: Session, ra: int, b: Session, rb: int, inputs: Tensor, steps: tuple[int, ...] = (1, 3, 1, 8)
) -> None:
    for count in steps:
        assert torch.equal(step(a, ra, inputs, count), step(b, rb, inputs, count))


@pytest.mark.parametrize("given", ALL, ids=name_of)
def test_after_a_move_a_request_goes_on_as_if_it_had_not_moved(
    few: Checkpoint, tmp_path: Path, given: CacheLayouts
) -> None:
    """Bit for bit, in the same layouts, with an open group, into pages that lie elsewhere."""
    one, two = session_of(few, given), session_of(few, given)
    request = start(one, 17)
    start(two, 5, seed=1)
    report = one.export_request(request, tmp_path / "r")
    found = two.import_request(tmp_path / "r")
    assert (found.length, found.max_relative_error, found.scrubbed) == (17, 0.0, {})
    assert all(part.exact for part in found.caches.values())
    assert two.export_request(found.request, tmp_path / "again") == report
    assert same_content(content(one, request), content(two, found.request))
    go_on_alike(one, request, two, found.request, hidden(0, one.stack))


@pytest.mark.parametrize(
    ("window", "compressed", "max_draft"), [(1, 1, 8), (3, 8, 0), (64, 2, 20), (5, 7, 0), (5, 7, 20)]
)
def test_page_sizes_and_rings_of_the_two_sides_need_not_agree(
    few: Checkpoint, tmp_path: Path, window: int, compressed: int, max_draft: int
) -> None:
    given = ReferenceBackend().layouts
    one = session_of(few, given.with_page_size(window=5, compressed=7))
    two = session_of(
        few, given.with_page_size(window=window, compressed=compressed), max_draft=max_draft, max_step_tokens=20
    )
    for length in (1, 8, 23, 30):
        request = start(one, length)
        one.export_request(request, tmp_path / "r")
        found = two.import_request(tmp_path / "r")
        known = two.find(found.request)
        assert known.window_start == max(0, length - TOY.sliding_window - min(max_draft, 8))
        assert known.raw_start == max(0, length - min(max_draft + 2, 10))
        go_on_alike(one, request, two, found.request, hidden(0, one.stack), (1, 2, 5))
        one.free(request)
        two.free(found.request)
    assert all(pool.free_pages == pool.num_pages for pool in two.pages.pools.values())


def cut(session: Session) -> int:
    request = start(session, 30)
    session.truncate(request, 25)
    return request


def cut_and_grown(session: Session) -> int:
    request = cut(session)
    step(session, request, hidden(7, session.stack), 2)
    return request


def child(session: Session) -> int:
    request = start(session, 27)
    found = session.fork(request, 23)
    step(session, request, hidden(0, session.stack), 4)
    return found


def replayed(session: Session) -> int:
    request = start(session, 33)
    found = session.fork(request, 14, replay=hidden(0, session.stack)[:, :14])
    step(session, found, hidden(0, session.stack), 3)
    return found


def empty(session: Session) -> int:
    return session.add_request()


def early_child(session: Session) -> int:
    """Shorter than where the ring of its parent begins."""
    request = start(session, 16)
    found = session.fork(request, 4)
    step(session, found, hidden(0, session.stack), 1)
    return found


def cut_to_the_start(session: Session) -> int:
    request = start(session, 16)
    session.truncate(request, 4)
    return request


STORIES: list[Callable[[Session], int]] = [cut, cut_and_grown, cut_to_the_start, child, early_child, replayed, empty]


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("page_size", [4, 16])
def test_forked_cut_and_replayed_requests_move(
    checkpoint: Checkpoint, tmp_path: Path, story: Callable[[Session], int], page_size: int
) -> None:
    one, two = session_of(checkpoint, page_size=4), session_of(checkpoint, page_size=page_size)
    request = story(one)
    one.export_request(request, tmp_path / "r")
    moved = two.import_request(tmp_path / "r").request
    assert same_content(content(one, request), content(two, moved))
    length = one.length(request)
    for shorter in range(length, -1, -1):  # each can be cut as far as the other
        kept = [one.find(request), two.find(moved)]
        states = [(known.window_start, known.raw_start) for known in kept]
        assert states[0] == states[1]
        outcomes = []
        for session, name in ((one, request), (two, moved)):
            try:
                again = session.fork(name, shorter)
            except RequestError as error:
                outcomes.append(str(error).replace(f"request {name} ", ""))
            else:
                outcomes.append("held")
                session.free(again)
        assert outcomes[0] == outcomes[1]
    go_on_alike(one, request, two, moved, hidden(0, one.stack), (1, 6))


def test_a_window_far_behind_stays_behind(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What moves grows with the compressed rows alone."""
    session = session_of(checkpoint, max_tokens=200, max_len=200)
    request, pages = start(session, 30), []
    inputs = signs(len(session.stack.layers), 200, HIDDEN)
    for _ in range(4):
        session.export_request(request, tmp_path / "r")
        held = load_file(tmp_path / "r")
        pages.append([len(held[f"layers.{name}.pages"]) for name in ("0.attn.window", "1.attn.index", "4.attn.index")])
        step(session, request, inputs, 40)
    assert pages == [[5, 4, 8], [5, 9, 18], [5, 14, 28], [5, 19, 38]]


def test_fr_98_what_moves_does_not_depend_on_how_the_request_was_scheduled(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Nor on the pool: pages of others, stale bytes, and numbers of pages."""
    files = []
    for i, (chunk, sizes) in enumerate([(31, {}), (1, {"max_requests": 2}), (7, {"max_step_tokens": 7})]):
        session = session_of(checkpoint, **sizes)
        for part in memory(session):
            part.copy_(torch.full_like(part, 0xA5 + i))
        other = start(session, 3, seed=9)
        request = session.add_request()
        session.prefill(request, hidden(0, session.stack)[:, :31], chunk=chunk)
        session.free(other)
        session.export_request(request, tmp_path / "r")
        files.append((tmp_path / "r").read_bytes())
    assert files[0] == files[1] == files[2]


def test_nothing_of_another_request_is_in_a_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Rows past a fork's length are its parent's, and a fresh page holds what it held before."""
    session = session_of(checkpoint, page_size=16)
    for part in memory(session):
        part.fill_(0x7E)
    request = start(session, 30)
    fork = session.fork(request, 22)
    session.truncate(request, 26)
    for name, length in ((request, 26), (fork, 22)):
        session.export_request(name, tmp_path / "r")
        pages = load_file(tmp_path / "r")
        for spec in session.cache_specs:
            cache = PagedCache(
                replace(spec.layout, alignment=1),
                pages[f"{spec.name}.pages"],
                pages.get(f"{spec.name}.scale_pool"),
            )
            first, last = session.find(name).window_start if spec.pool == WINDOW else 0, length // spec.ratio
            slots = torch.arange(cache.num_slots)
            row = slots + first // 16 * 16
            outside = slots[(row < first) | (row >= last)]
            assert len(outside) > 0
            assert not any(bool(part.any()) for part in cache.read_bytes(outside))


def test_pad_bytes_are_neither_written_nor_believed(few: Checkpoint, tmp_path: Path) -> None:
    """A library that takes the eighth byte of the V4 record for a scale would read NaN."""
    one, two = session_of(few, ALL[0]), session_of(few, ALL[0])
    request = start(one, 19)
    one.export_request(request, tmp_path / "r")
    good = (tmp_path / "r").read_bytes()
    cache = cache_of(one, "layers.0.attn.window")
    cache.scale_view()[..., 7] = 0xFF
    one.export_request(request, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == good
    outer, inner, body = take_apart(good)
    start_of, stop = outer["layers.0.attn.window.pages"]["data_offsets"]
    spoiled = bytearray(body)
    spoiled[start_of + 584 * 4 - 1] = 0xFF
    (tmp_path / "r").write_bytes(put_together(outer, inner, bytes(spoiled), sign=True))
    assert stop - start_of == 584 * 4 * 5
    with unchanged(two), refused(TransferError, "layers.0.attn.window", "pad bytes"):
        two.import_request(tmp_path / "r")


# From layout to layout


def fill(session: Session, request: int) -> None:
    """Random rows whose groups differ in size, so that a misplaced scale shows."""
    for i, spec in enumerate(session.cache_specs):
        slots = slots_of(session, request, spec.pool, rows_of(session, request)[spec.name])
        generator = torch.Generator().manual_seed(i)
        dim = spec.layout.record.dim
        spread = torch.exp2(torch.randint(-6, 6, (len(slots), dim // 16), generator=generator).float())
        rows = torch.randn(len(slots), dim, generator=generator) * spread.repeat_interleave(16, 1)
        cache_of(session, spec.name).write(slots, rows)


def worst(record: Record, before: Tensor, after: Tensor) -> float:
    """Largest max|a - b| / max|a|, row by row and group by group."""
    found = 0.0
    for field in record.fields:
        width = field.group or field.dims
        for at in range(field.start, field.stop, width):
            a, b = before[:, at : at + width], after[:, at : at + width]
            size = a.abs().amax(1)
            found = max(found, float(((a - b).abs().amax(1) / size)[size > 0].max()))
    return found


@pytest.fixture(scope="module")
def targets(few: Checkpoint) -> list[Session]:
    """A session in each of the layouts, with pages of other sizes."""
    sizes = [(4, 8), (16, 4), (64, 32)]
    return [
        session_of(few, target.with_page_size(window=sizes[i % 3][0], compressed=sizes[i % 3][1]), max_requests=1)
        for i, target in enumerate(ALL)
    ]


@pytest.mark.parametrize("source", ALL, ids=name_of)
def test_every_layout_moves_into_every_other(
    few: Checkpoint, targets: list[Session], tmp_path: Path, source: CacheLayouts
) -> None:
    """As the reference decodes and encodes it; with the same bytes where the record stays."""
    one = session_of(few, source)
    request = start(one, 19)
    for spec in one.cache_specs:
        scale = cache_of(one, spec.name).tensor_scale
        if scale is not None:
            scale.fill_(0.375)
    fill(one, request)
    one.export_request(request, tmp_path / "r")
    for two in targets:
        found = two.import_request(tmp_path / "r")
        check_moved(one, request, two, found.request, found.caches)
        two.free(found.request)


def check_moved(one: Session, request: int, two: Session, moved: int, reports: Any) -> None:
    before, after = content(one, request), content(two, moved)
    rows = rows_of(one, request)
    assert rows == rows_of(two, moved)
    assert list(reports) == list(before)
    for name, report in reports.items():
        old, new = cache_of(one, name), cache_of(two, name)
        given, got = (
            unpack(cache.layout.record, *codes, cache.tensor_scale)
            for cache, codes in ((old, before[name]), (new, after[name]))
        )
        record = new.layout.record
        carried = old.layout.record == record and old.tensor_scale == new.tensor_scale
        # NVFP4 is not what it was after another round, so that bytes which need not change do not.
        due = before[name] if carried else pack(record, given, new.tensor_scale)
        assert torch.equal(got, unpack(record, *due, new.tensor_scale))
        doubled = old.layout.record.dialect is OCP and record.dialect is FNUZ
        assert doubled or all(torch.equal(a, b) for a, b in zip(after[name], due, strict=True))
        assert (report.rows, report.nan_rows) == (len(rows[name]), 0)
        assert report.exact == torch.equal(given, got)
        assert report.max_relative_error == pytest.approx(worst(record, given, got), rel=1e-6)


def test_fr_97_the_v4_record_of_one_vendor_becomes_the_v41_record_of_another(few: Checkpoint, tmp_path: Path) -> None:
    """FNUZ, 584 bytes, scales after the page -> OCP, 528 bytes, scales after the token, and index keys out of tiles;
    then one decode step reads what the reference reads."""
    rocm = layouts(layout(v4_584(FNUZ), PAGE), layout(index_fp8_132(FNUZ, ScaleFormat.FP32), PAGE, **TILE))
    cuda = layouts(layout(v41_528(OCP), TOKEN), layout(INDEX_MXFP4_68, PAGE))
    one, two, three = session_of(few, rocm), session_of(few, cuda), session_of(few, cuda)
    request = start(one, 19)
    fill(one, request)
    one.export_request(request, tmp_path / "r")
    found = two.import_request(tmp_path / "r")
    check_moved(one, request, two, found.request, found.caches)
    assert 0 < found.caches["layers.0.attn.window"].max_relative_error < 2**-3
    # The same bytes, put there by the reference's own writer.
    other = start(three, 19)
    for name, (values, scales) in content(one, request).items():
        cache = cache_of(three, name)
        spec = next(spec for spec in three.cache_specs if spec.name == name)
        slots = slots_of(three, other, spec.pool, rows_of(one, request)[name])
        cache.write(slots, unpack(cache_of(one, name).layout.record, values, scales))
    go_on_alike(two, found.request, three, other, hidden(0, one.stack), (1,))


@pytest.mark.parametrize("source", [ALL[0], ALL[8], ALL[12]], ids=name_of)
@pytest.mark.parametrize("target", [ALL[1], ALL[4], ALL[7], ALL[10], ALL[11]], ids=name_of)
def test_a_file_converted_on_disk_is_what_an_import_would_convert(
    few: Checkpoint, tmp_path: Path, source: CacheLayouts, target: CacheLayouts
) -> None:
    one, two, three = session_of(few, source), session_of(few, target), session_of(few, target)
    request = start(one, 19)
    fill(one, request)
    one.export_request(request, tmp_path / "r")
    report = convert_request(tmp_path / "r", tmp_path / "converted", target)
    straight, converted = two.import_request(tmp_path / "r"), three.import_request(tmp_path / "converted")
    assert report.caches == straight.caches
    assert all(part.exact for part in converted.caches.values())
    assert same_content(content(two, straight.request), content(three, converted.request))
    written = two.export_request(straight.request, tmp_path / "exported")
    assert (report.length, report.bytes, report.sha256) == (19, written.bytes, written.sha256)
    assert (tmp_path / "converted").read_bytes() == (tmp_path / "exported").read_bytes()


def test_a_file_may_be_converted_onto_itself(few: Checkpoint, tmp_path: Path) -> None:
    one, two = session_of(few, ALL[2]), session_of(few, ALL[2])
    request = start(one, 19)
    one.export_request(request, tmp_path / "r")
    before = (tmp_path / "r").read_bytes()
    for target in (ALL[3], ALL[2]):
        convert_request(tmp_path / "r", tmp_path / "r", target)
    assert (tmp_path / "r").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["r"]
    two.import_request(tmp_path / "r")


def test_fr_30_a_file_says_what_its_bytes_are(few: Checkpoint, tmp_path: Path) -> None:
    """Two placements of one record have pages of one size: the header tells them apart, and without one there is no
    import."""
    shapes, found = [], []
    for given in (ALL[2], ALL[3]):
        session = session_of(few, given)
        session.export_request(start(session, 19), tmp_path / "r")
        file = tmp_path / "r"
        shapes.append({name: tensor.shape for name, tensor in load_file(file).items() if "window" in name})
        found.append(header_of(file.read_bytes())["caches"]["layers.0.attn.window"]["layout"])
    assert shapes[0] == shapes[1]
    assert [entry["scale_placement"] for entry in found] == ["token", "page"]
    for entry in found:
        assert (entry["record"], entry["dialect"], entry["scale_format"]) == ("fp8_ds_mla_v41", "ocp", "ue8m0")
    save_file(load_file(tmp_path / "r"), tmp_path / "bare")
    with unchanged(session), refused(TransferError, "bare", "dsv41_request", "says what its bytes are"):
        session.import_request(tmp_path / "bare")


# Parts of a model


@pytest.mark.parametrize(
    "stages", [([0], [1, 2, 3], [4, 5, 6]), ([0, 1, 2, 3, 4, 5, 6],), ([4, 5, 6], [0, 1, 2, 3])], ids=str
)
def test_fr_95_stages_of_a_pipeline_move_into_one_and_back(
    path: Path, checkpoint: Checkpoint, tmp_path: Path, stages: tuple[list[int], ...]
) -> None:
    """Regions go by layer and kind of cache. Every region is covered once, whoever has it."""
    whole = session_of(checkpoint)
    inputs = hidden(0, whole.stack)
    request = start(whole, 19)
    parts = [session_of(load_checkpoint(path, layers=stage, dtype=torch.float32)) for stage in stages]
    files = []
    for stage, session in zip(stages, parts, strict=True):
        part = session.add_request()
        session.step({part: inputs[stage, :19]})
        files.append(tmp_path / f"{stage[0]}")
        session.export_request(part, files[-1])
    moved = whole.import_request(*files).request
    assert same_content(content(whole, request), content(whole, moved))
    whole.export_request(request, tmp_path / "twice")
    go_on_alike(whole, request, whole, moved, inputs)
    # And back: each stage takes its layers out of the file of all.
    whole.export_request(moved, tmp_path / "all")
    straight = whole.step({moved: inputs[:, 32:34]})[moved]
    for stage, session in zip(stages, parts, strict=True):
        back = session.import_request(tmp_path / "all").request
        assert torch.equal(session.step({back: inputs[stage, 32:34]})[back], straight[stage])
    if len(files) > 1:
        with unchanged(whole), refused(TransferError, "lack layers.", "expected every cache"):
            whole.import_request(*files[1:])
        with unchanged(whole), refused(TransferError, "layers.0.attn.window is in", "once"):
            whole.import_request(*sorted(files), tmp_path / "twice")
        session = parts[0]
        step(session, 0, inputs[stages[0]], 1)
        session.export_request(0, files[0])
        with unchanged(whole), refused(TransferError, "length=20", "length=19", "files of one request"):
            whole.import_request(*files)


def test_fr_95_ranks_of_any_number_have_the_same_file(tmp_path: Path) -> None:
    """Nothing that is cached is split by heads."""
    make_checkpoint(tmp_path / "toy", config=TOY, quantized=False, dtype=torch.float32)
    files = []
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        checkpoint = load_checkpoint(tmp_path / "toy", tp_rank=rank, tp_size=size)
        session = session_of(checkpoint)
        session.export_request(start(session, 19), tmp_path / "r")
        files.append((tmp_path / "r").read_bytes())
    assert files[0] == files[1] == files[2]


def test_draft_layers_move(tmp_path: Path) -> None:
    config = replace(TOY, num_nextn_predict_layers=1)
    plain_checkpoint(tmp_path / "toy", config)
    checkpoint = load_checkpoint(tmp_path / "toy", layers=[7])
    one, two = session_of(checkpoint), session_of(checkpoint)
    inputs = hidden(0, one.stack)
    request = one.add_request()
    one.insert_window({request: inputs[:, :21]})
    one.export_request(request, tmp_path / "r")
    moved = two.import_request(tmp_path / "r").request
    outputs = [s.draft({r: inputs[:, 21:26]})[r] for s, r in ((one, request), (two, moved))]
    assert torch.equal(*outputs)


# Numbers that would spread


NAN_BYTES = {"layers.0.attn.window": 0x7F, "layers.1.attn.compressed": 0xFF, "layers.4.attn.index": 0x7F}


def poison(session: Session, request: int, name: str, row: int, code: int, *, scales: bool = False) -> None:
    spec = next(spec for spec in session.cache_specs if spec.name == name)
    cache = cache_of(session, name)
    slots = slots_of(session, request, spec.pool, range(row, row + 1))
    values, scale_codes = cache.read_bytes(slots)
    (scale_codes if scales else values)[0, 1] = code
    cache.write_bytes(slots, values, scale_codes)


class Trusting(Fixed):
    trusts_cache_bytes = True


@pytest.mark.parametrize("backend", [Fixed, Trusting])
def test_fr_96_nan_bytes_are_refused_or_scrubbed(few: Checkpoint, tmp_path: Path, backend: type[Fixed]) -> None:
    """Whether or not the backend would mind them: what comes from elsewhere was not written by the canonical writer."""
    given = ALL[3]
    one = session_of(few, given)
    two = Session(AttentionStack(few, backend(given), max_len=MAX_LEN), max_requests=2, max_tokens=MAX_LEN)
    request = start(one, 19)
    fill(one, request)
    clean = content(one, request)
    poison(one, request, "layers.0.attn.window", 12, 0x7F)
    poison(one, request, "layers.0.attn.window", 12, 0xFF, scales=True)  # the next group
    poison(one, request, "layers.1.attn.compressed", 3, 0xFF)
    poison(one, request, "layers.4.attn.index", 0, 0x7F)
    one.export_request(request, tmp_path / "r")
    counts = {"layers.0.attn.window": 2, "layers.1.attn.compressed": 1, "layers.4.attn.index": 1}
    listed = ", ".join(f"{name} ({count} groups)" for name, count in counts.items())
    with unchanged(two), refused(TransferError, "NaN", listed, "nan='scrub'"):
        two.import_request(tmp_path / "r")
    with refused(TransferError, "NaN", listed):
        convert_request(tmp_path / "r", tmp_path / "out", given)
    assert not (tmp_path / "out").exists()

    found = two.import_request(tmp_path / "r", nan="scrub")
    assert found.scrubbed == counts
    assert convert_request(tmp_path / "r", tmp_path / "out", given, nan="scrub").scrubbed == counts
    assert all(report.nan_rows == 0 for report in found.caches.values())
    for name, (values, scales) in content(two, found.request).items():
        record = cache_of(two, name).layout.record
        got, due = unpack(record, values, scales), unpack(record, *clean[name])
        if name == "layers.0.attn.window":
            due[12 - rows_of(one, request)[name].start, :64] = 0
        elif name == "layers.1.attn.compressed":
            due[3, :32] = 0
        elif name == "layers.4.attn.index":
            due[0, :32] = 0
        assert torch.equal(got, due), name
    with refused(InputError, "nan is 'zero'", "refuse"):
        two.import_request(tmp_path / "r", nan="zero")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_fr_96_raw_rows_are_looked_at_too(few: Checkpoint, tmp_path: Path, value: float) -> None:
    one, two = session_of(few), session_of(few)
    request = start(one, 19)
    state = one.caches[1].compressor_state
    assert state is not None
    state[one.find(request).state_slot, 18 % one.ring, 1, 5] = value
    one.export_request(request, tmp_path / "r")
    with unchanged(two), refused(TransferError, "layers.1.attn.compressed.raw_rows (1 groups)"):
        two.import_request(tmp_path / "r")
    found = two.import_request(tmp_path / "r", nan="scrub")
    assert found.scrubbed == {"layers.1.attn.compressed.raw_rows": 1}
    moved = two.caches[1].compressor_state
    assert moved is not None
    row, due = moved[two.find(found.request).state_slot, 18 % two.ring], state[one.find(request).state_slot, 18 % 10]
    assert torch.equal(row[0], due[0])
    assert not row[1].any()
    assert bool(step(two, found.request, hidden(0, two.stack), 3).isfinite().all())


@pytest.mark.parametrize("given", [ALL[0], ALL[6], ALL[9], ALL[10]], ids=name_of)
def test_infinite_numbers_in_plain_dims_are_refused(few: Checkpoint, tmp_path: Path, given: CacheLayouts) -> None:
    """bf16 and fp32 dims hold them as they are; a field without groups is one group."""
    one, two = session_of(few, given), session_of(few, given)
    request = start(one, 19)
    cache = cache_of(one, "layers.0.attn.window")
    slots = slots_of(one, request, WINDOW, range(15, 16))
    row = cache.read(slots)
    row[0, -1] = torch.inf
    if given is ALL[10]:
        poison(one, request, "layers.0.attn.window", 15, 0xFE, scales=True)  # 2**127 times more than fp32 can hold
    else:
        cache.write(slots, row)
    one.export_request(request, tmp_path / "r")
    with unchanged(two), refused(TransferError, "layers.0.attn.window (1 groups)", "infinite"):
        two.import_request(tmp_path / "r")
    assert two.import_request(tmp_path / "r", nan="scrub").scrubbed == {"layers.0.attn.window": 1}


# Room


@pytest.mark.parametrize("pool", [WINDOW, 1, 2])
def test_without_pages_nothing_is_imported(checkpoint: Checkpoint, tmp_path: Path, pool: int) -> None:
    one, two = session_of(checkpoint), session_of(checkpoint)
    one.export_request(start(one, 30), tmp_path / "r")
    other = start(two, 9)
    pages = two.pages.pools[pool]
    held = [pages.take() for _ in range(pages.free_pages - 1)]
    with unchanged(two), refused(PoolExhausted, "the import needs", "at most 1"):
        two.import_request(tmp_path / "r")
    for page in held:
        pages.give_back(page)
    moved = two.import_request(tmp_path / "r").request
    assert (two.length(moved), two.length(other)) == (30, 9)


def test_a_full_session_imports_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    session = session_of(checkpoint, max_requests=2)
    first = start(session, 9)
    session.export_request(first, tmp_path / "r")
    session.add_request()
    with unchanged(session), refused(RequestError, "holds 2 requests", "max_requests"):
        session.import_request(tmp_path / "r")
    session.free(first)
    session.import_request(tmp_path / "r")


def test_an_import_that_dies_half_way_leaves_nothing(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsv41 import transfer

    session, calls, real = session_of(checkpoint), [0], transfer.transcode
    session.export_request(start(session, 19), tmp_path / "r")

    def dies(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise MemoryError
        return real(*arguments)

    monkeypatch.setattr(transfer, "transcode", dies)
    before = accounts(session)
    with pytest.raises(MemoryError):
        session.import_request(tmp_path / "r")
    assert accounts(session) == before
    session.import_request(tmp_path / "r")


def test_a_failed_export_leaves_no_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    session = session_of(checkpoint)
    request = start(session, 9)
    with refused(TransferError, "nowhere", "cannot be written"):
        session.export_request(request, tmp_path / "nowhere" / "r")
    with refused(RequestError, "request 7 is unknown"):
        session.export_request(7, tmp_path / "r")
    (tmp_path / "folder").mkdir()
    with refused(TransferError, "folder", "cannot be written"):
        session.export_request(request, tmp_path / "folder")
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_a_fork_far_behind_its_parent_knows_what_its_ring_holds(checkpoint: Checkpoint) -> None:
    """Rows that it appends itself open groups, however long the parent was."""
    session = session_of(checkpoint, max_draft=2)
    inputs = hidden(0, session.stack)
    request = start(session, 30)
    found = session.fork(request, 20, replay=inputs[:, :20])
    outputs = step(session, found, inputs, 3)
    session.truncate(found, 21)
    again = session.fork(found)
    assert torch.equal(step(session, found, inputs, 2), outputs[:, 1:])
    assert torch.equal(step(session, again, inputs, 2), outputs[:, 1:])


@pytest.mark.parametrize("more", [0, 1, 4])
def test_a_replayed_ring_holds_what_it_says(checkpoint: Checkpoint, more: int) -> None:
    """The ring is longer than the window here, so a replay does not fill it."""
    session, straight = session_of(checkpoint), session_of(checkpoint)
    inputs = hidden(0, session.stack)
    request = session.fork(start(session, 33), 14, replay=inputs[:, 14 - TOY.sliding_window : 14])
    step(session, request, inputs, more)
    due = start(straight, 14 + more)
    known = session.find(request)
    held = torch.arange(known.raw_start, known.length) % session.ring
    assert known.raw_start == max(14 - TOY.sliding_window, 14 + more - session.ring)
    rows, expected = (
        s.caches[1].compressor_state[s.find(r).state_slot, held]  # type: ignore[index]
        for s, r in ((session, request), (straight, due))
    )
    assert torch.equal(rows, expected)


# Files that are no such files


def header_of(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["dsv41_request"])
    return found


def take_apart(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The safetensors header, ours inside it, and the tensors' bytes."""
    length = int.from_bytes(data[:8], "little")
    outer = json.loads(data[8 : 8 + length])
    return outer, json.loads(outer["__metadata__"]["dsv41_request"]), data[8 + length :]


def put_together(outer: dict[str, Any], inner: Any, body: bytes, *, sign: bool) -> bytes:
    """A file of these; `sign` gives it the checksum that belongs to it, as a liar would."""
    metadata = outer["__metadata__"]
    if "dsv41_request" in metadata:
        metadata["dsv41_request"] = json.dumps(inner, separators=(",", ":"))
    old = metadata.get("sha256")
    if sign and old is not None:
        metadata["sha256"] = "0" * 64
    text = json.dumps(outer, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = struct.pack("<Q", len(text)) + text + body
    if sign and old is not None:
        data = data.replace(b'"sha256":"' + b"0" * 64, b'"sha256":"' + hashlib.sha256(data).hexdigest().encode())
    return data


@pytest.fixture(scope="module")
def good(few: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Rows in use on every page but the last, window pages given back, an open group, scales in a pool."""
    file = tmp_path_factory.mktemp("good") / "r"
    with torch.no_grad():
        session = session_of(few, ALL[12], max_draft=2)
        session.export_request(start(session, 19), file)
    return file.read_bytes()


@pytest.fixture
def target(few: Checkpoint) -> Session:
    session = session_of(few, ALL[12], max_draft=2)
    start(session, 5)
    return session


def test_the_file_that_these_spoil_is_good(target: Session, good: bytes, tmp_path: Path) -> None:
    file = tmp_path / "r"
    file.write_bytes(good)
    target.import_request(file)
    for sign in (False, True):
        outer, inner, body = take_apart(good)
        assert put_together(outer, inner, body, sign=sign) == good
    outer, inner, body = take_apart(good)
    assert set(inner) == {"format", "version", "config", "layers", "request", "caches"}
    assert inner["request"] == {"length": 19, "window_start": 9, "raw_start": 15, "ring": 4, "max_draft": 2}
    assert inner["caches"]["layers.1.attn.index"]["rows"] == [0, 9]


def lie(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(_: dict[str, Any], inner: dict[str, Any]) -> None:
        inner["request"] |= changes

    return change


def entry(name: str, key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(_: dict[str, Any], inner: dict[str, Any]) -> None:
        inner["caches"][name][key] = value

    return change


def within(where: str, key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(_: dict[str, Any], inner: dict[str, Any]) -> None:
        part = inner
        for name in where.split("/") if where else ():
            part = part[name]
        part[key] = value

    return change


def longer(_: dict[str, Any], inner: dict[str, Any]) -> None:
    """One row more everywhere, consistently, within the pages that there are."""
    inner["request"] |= {"length": 20, "window_start": 10, "raw_start": 16}
    for cache in inner["caches"].values():
        cache["rows"] = [cache["rows"][0] + (cache["rows"][0] > 0), 20 // cache["ratio"]]


def shorter(_: dict[str, Any], inner: dict[str, Any]) -> None:
    inner["request"] |= {"length": 18, "raw_start": 14}
    for cache in inner["caches"].values():
        cache["rows"][1] = 18 // cache["ratio"]


def other_placement(_: dict[str, Any], inner: dict[str, Any]) -> None:
    """Pages of the same size, with the scales elsewhere: the rows that are not held betray it."""
    inner["caches"]["layers.0.attn.window"]["layout"]["scale_placement"] = "token"


LAYOUT = "caches/layers.0.attn.window/layout"
LIES: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], None], list[str]]] = {
    "a longer request": (lie(length=20), ["rows"]),
    "a shorter request": (lie(length=18), ["rows"]),
    "a longer one, consistently": (longer, ["bytes outside the rows"]),
    "a shorter one, consistently": (shorter, ["bytes outside the rows 9 to 17"]),
    "a length beyond the model": (lie(length=2**40), ["1099511627776", "at most 65536"]),
    "a length beyond the stack": (lie(length=MAX_LEN + 1), []),
    "no whole length": (lie(length=19.0), ["19.0"]),
    "a negative length": (lie(length=-1), ["whole numbers from 0 up"]),
    "a truth value": (lie(length=True), ["True"]),
    "no length": (lambda _, inner: inner["request"].pop("length"), ["expected length"]),
    "one number more": (lie(more=1), ["more"]),
    "a window that begins too late": (lie(window_start=12), ["window rows from 12", "11 or less"]),
    "a window that begins elsewhere": (lie(window_start=8), ["rows [9, 19]", "[8, 19]"]),
    "another ring": (lie(ring=5), ["ring 5", "4"]),
    "a ring as large as its rows": (lie(ring=2, max_draft=0), ["raw rows from 15", "17 to 19"]),
    "raw rows of tokens to come": (lie(raw_start=20), ["raw rows from 20", "15 to 19"]),
    "an open group without its row": (lie(raw_start=19), ["18 or less", "layers.1.attn.compressed"]),
    "another version": (within("", "version", 2), ["version 2", "expected 1"]),
    "a version of another type": (within("", "version", "1"), ["'1'", "expected 1"]),
    "another format": (within("", "format", "pickle"), ["dsv41-request"]),
    "no config": (lambda _, inner: inner.pop("config"), ["config"]),
    "another window": (within("config", "sliding_window", 128), ["window rows from 9", "0 or less"]),
    "another theta": (within("config", "rope_theta", 20000.0), ["another model", "rope_theta 20000.0", "10000.0"]),
    "other ratios": (within("config", "compress_ratios", [0, 1, 1, 1, 1, 1, 1]), ["layers.1.attn.compressed"]),
    "a config that cannot be": (
        within("config", "compress_ratios", [0, 4, 4, 4, 1, 1, 1]),
        ["compress_ratios[1] is 4"],
    ),
    "an unknown layer": (within("", "layers", [0, 1, 4, 9]), ["9"]),
    "a layer twice": (within("", "layers", [0, 1, 1, 4]), ["none twice"]),
    "a layer too few": (within("", "layers", [0, 4]), ["1.attn.window"]),
    "layers in another order": (within("", "layers", [4, 0, 1]), ["as it is written"]),
    "layers of another type": (within("", "layers", {"0": 1}), ["layers"]),
    "an entry that no one reads": (within("", "comment", "hello"), ["comment"]),
    "a config entry that no one reads": (within("config", "vocab_size", 7), ["vocab_size"]),
    "a cache too many": (within("caches", "layers.2.attn.window", {}), ["layers.2.attn.window"]),
    "no caches": (within("", "caches", {}), ["no cache layers.0.attn.window"]),
    "another kind": (entry("layers.0.attn.window", "kind", "index"), ["kind 'index'", "'window'"]),
    "another layer": (entry("layers.0.attn.window", "layer", 1), ["layer 1", "0"]),
    "another ratio": (entry("layers.1.attn.compressed", "ratio", 1), ["ratio 1", "2"]),
    "a truth value for a ratio": (entry("layers.0.attn.window", "ratio", True), ["as it is written"]),
    "other rows": (entry("layers.4.attn.index", "rows", [0, 20]), ["rows [0, 20]", "[0, 19]"]),
    "no layout": (entry("layers.0.attn.window", "layout", None), ["header"]),
    "an unknown record": (within(LAYOUT, "record", "fp8_ds_mla_v5"), ["fp8_ds_mla_v5"]),
    "a record that is no name": (within(LAYOUT, "record", [1]), ["header"]),
    "another record": (within(LAYOUT, "record", "fp8_ds_mla_v41_fnuz"), ["dialect is 'ocp'", "'fnuz'"]),
    "another dialect": (within(LAYOUT, "dialect", "fnuz"), ["dialect is 'fnuz'", "'ocp'"]),
    "another scale format": (within(LAYOUT, "scale_format", "e4m3"), ["scale_format is 'e4m3'"]),
    "another placement": (other_placement, ["layers.0.attn.window", "bytes outside the rows"]),
    "scales in a pool": (within(LAYOUT, "scale_placement", "pool"), ["page_bytes"]),
    "another page size": (within(LAYOUT, "page_size", 8), ["page_bytes"]),
    "an endless page": (within(LAYOUT, "page_size", 10**400), ["page_bytes"]),
    "another stride": (within(LAYOUT, "page_stride", 2**62), ["bytes apart", "dense"]),
    "another alignment": (within(LAYOUT, "alignment", 2), ["header lies"]),
    "no page size": (within(LAYOUT, "page_size", 0), ["page_size 0"]),
    "a tile": (within(LAYOUT, "value_tile", [2, 16]), ["layers.0.attn.window"]),
    "a NaN": (within("config", "rope_theta", float("nan")), ["rope_theta"]),
    "deep nesting": (lambda outer, _: outer["__metadata__"].update(more="["), ["metadata"]),
    "another checksum": (lambda outer, _: outer["__metadata__"].update(sha256="A" * 64), ["sha256"]),
    "a short checksum": (lambda outer, _: outer["__metadata__"].update(sha256=""), ["sha256"]),
    "no checksum": (lambda outer, _: outer["__metadata__"].pop("sha256"), ["sha256"]),
    "a checksum that is no text": (lambda outer, _: outer["__metadata__"].update(sha256="\ud800" * 64), ["sha256"]),
    "a tensor of another shape": (
        lambda outer, _: outer["layers.1.attn.compressed.raw_rows"].update(shape=[2, 4, 512]),
        ["layers.1.attn.compressed.raw_rows", "F32 [2, 4, 512]", "F32 [4, 2, 512]"],
    ),
    "a tensor of another type": (
        lambda outer, _: outer["layers.0.attn.window.pages"].update(dtype="I8"),
        ["layers.0.attn.window.pages", "I8", "expected U8"],
    ),
    "an endless tensor": (
        lambda outer, _: outer["layers.0.attn.window.pages"].update(shape=[2**62, 2**62]),
        ["layers.0.attn.window.pages", "spans"],
    ),
    "a tensor under another name": (
        lambda outer, _: outer.update(more=outer.pop("layers.0.attn.window.pages")),
        ["layers.0.attn.window.pages", "absent"],
    ),
}


@pytest.mark.parametrize("what", LIES)
def test_a_liar_with_the_right_checksum_is_refused(target: Session, good: bytes, tmp_path: Path, what: str) -> None:
    change, named = LIES[what]
    outer, inner, body = take_apart(good)
    change(outer, inner)
    (tmp_path / "r").write_bytes(put_together(outer, inner, body, sign="checksum" not in what))
    with unchanged(target), refused(TransferError, *named):
        target.import_request(tmp_path / "r")


def test_an_empty_request_cannot_have_endless_pages(few: Checkpoint, target: Session, tmp_path: Path) -> None:
    """No tensor has such a shape, though this one has no bytes."""
    target.export_request(target.add_request(), tmp_path / "r")
    target.free(1)
    outer, inner, body = take_apart((tmp_path / "r").read_bytes())
    given = inner["caches"]["layers.0.attn.window"]["layout"]
    given["page_size"], given["page_bytes"] = 2**61, 2**61 * 528
    outer["layers.0.attn.window.pages"]["shape"] = [0, 2**61 * 528]
    (tmp_path / "r").write_bytes(put_together(outer, inner, body, sign=True))
    with unchanged(target), refused(TransferError, f"{2**61} rows", "at most 1048576"):
        target.import_request(tmp_path / "r")


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan, torch.inf])
def test_a_tensor_scale_is_a_number_that_can_scale(few: Checkpoint, tmp_path: Path, scale: float) -> None:
    session = session_of(few, ALL[7])
    request = start(session, 9)
    found = session.caches[4].window.tensor_scale
    assert found is not None
    found.fill_(scale)
    session.export_request(request, tmp_path / "r")
    with unchanged(session), refused(TransferError, "layers.4.attn.window", f"tensor_scale {scale}", "above 0"):
        session.import_request(tmp_path / "r", nan="scrub")


def test_a_request_longer_than_the_stack_is_refused(few: Checkpoint, tmp_path: Path) -> None:
    one, two = session_of(few), session_of(few, max_len=18)
    one.export_request(start(one, 19), tmp_path / "r")
    with unchanged(two), refused(TransferError, "holds 19 tokens", "at most 18", "max_len"):
        two.import_request(tmp_path / "r")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_theta": 5000.0}, "rope_theta 10000.0: expected rope_theta 5000.0;"),
        ({"sliding_window": 16}, "sliding_window 8: expected sliding_window 16;"),
        ({"hidden_size": 96}, "hidden_size 64: expected hidden_size 96;"),
        ({"rope_scaling": None}, "rope_scaling"),
        ({"compress_ratios": (0, 1, 1, 1, 1, 1, 1)}, "compress_ratios"),
    ],
)
def test_a_request_of_another_model_is_refused(
    few: Checkpoint, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    one = session_of(few)
    one.export_request(start(one, 19), tmp_path / "r")
    other = plain_checkpoint(tmp_path / "other", replace(TOY, **changes))
    two = Session(AttentionStack(other, ReferenceBackend(), max_len=MAX_LEN))
    with unchanged(two), refused(TransferError, "another model", told):
        two.import_request(tmp_path / "r")


def test_what_state_does_not_depend_on_may_differ(few: Checkpoint, tmp_path: Path) -> None:
    """More heads or a wider top-k read the same rows."""
    one = session_of(few)
    one.export_request(start(one, 19), tmp_path / "r")
    config = replace(TOY, index_topk=9, num_attention_heads=8, candidate_topk_blocks=2, num_nextn_predict_layers=2)
    make_checkpoint(tmp_path / "other", config=config, layers=LAYERS, quantized=False, dtype=torch.float32)
    two = Session(AttentionStack(load_checkpoint(tmp_path / "other"), ReferenceBackend(), max_len=MAX_LEN))
    assert two.length(two.import_request(tmp_path / "r").request) == 19


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 100, b"PK\x03\x04" * 20, b"{}" * 50])
def test_what_is_no_safetensors_file_is_refused(target: Session, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "r").write_bytes(data)
    with unchanged(target), refused(TransferError, "r"):
        target.import_request(tmp_path / "r")
    for missing in (tmp_path / "missing", tmp_path):
        with unchanged(target), refused(TransferError, missing, "cannot be read"):
            target.import_request(missing)
    with unchanged(target), refused(TransferError, "no file is given"):
        target.import_request()


# Ten thousand mutations

HOSTILE: list[Any] = [
    None,
    -1,
    0,
    1,
    3,
    2**31,
    2**63,
    10**30,
    1e300,
    0.5,
    "",
    "x",
    [],
    {},
    [7, 7],
    [[[]]],
    True,
    "\ud800",
]


def leaves(part: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Everything in our header that can be lied about and is a matter of this file: of the config, what state depends
    on."""
    yield path
    if isinstance(part, dict | list):
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            yield from leaves(value, (*path, key))


class Mutator:
    """Spoils a good file, another way each time."""

    def __init__(self, good: bytes, seed: int) -> None:
        self.good, self.random = good, random.Random(seed)
        self.front = 8 + int.from_bytes(good[:8], "little")
        outer, inner, _ = take_apart(good)
        self.names = [name for name in outer if name != "__metadata__"]
        # Of the config, other fields make other valid files, and so does the tile of a page whose rows are all held.
        free = {path for path in leaves(inner) if path[:1] == ("config",) and path[1:2] not in FIXED_FIELDS}
        self.paths = [path for path in leaves(inner) if path and path not in free]
        self.ways = [
            self.flip, self.flip_front, self.flip_header_length, self.cut, self.append, self.drop, self.insert,
            self.lie, self.lie, self.lie, self.remove, self.swap, self.swap_shapes, self.offsets, self.rename,
            self.nan, self.unheld,
        ]  # fmt: skip

    def make(self) -> tuple[str, bytes]:
        while True:
            way = self.random.choice(self.ways)
            data = way()
            if data is not None and data != self.good:
                return way.__name__, data

    def at(self, start: int = 0, stop: int | None = None) -> int:
        return self.random.randrange(start, len(self.good) if stop is None else stop)

    def flip(self, start: int = 0, stop: int | None = None) -> bytes:
        data = bytearray(self.good)
        for _ in range(self.random.choice((1, 1, 1, 2, 8))):
            data[self.at(start, stop)] ^= 1 << self.random.randrange(8)
        return bytes(data)

    def flip_front(self) -> bytes:
        return self.flip(8, self.front)

    def flip_header_length(self) -> bytes:
        return self.flip(0, 8)

    def cut(self) -> bytes:
        return self.good[: self.at()]

    def append(self) -> bytes:
        return self.good + self.random.randbytes(self.random.choice((1, 8, 4096)))

    def drop(self) -> bytes:
        at = self.at()
        return self.good[:at] + self.good[at + self.random.choice((1, 8, 64)) :]

    def insert(self) -> bytes:
        at = self.at()
        return self.good[:at] + self.random.randbytes(self.random.choice((1, 8, 64))) + self.good[at:]

    def lie(self) -> bytes | None:
        outer, inner, body = take_apart(self.good)
        for _ in range(self.random.choice((1, 1, 2))):
            *path, key = self.random.choice(self.paths)
            part = inner
            try:
                for step in path:
                    part = part[step]
                old = part[key]
            except (KeyError, IndexError, TypeError):
                continue  # a lie before this one took it away
            near = [old + 1, old - 1, old * 2] if type(old) is int else []
            part[key] = self.random.choice(HOSTILE + near + near + near)
        if json.dumps(inner) == json.dumps(take_apart(self.good)[1]):
            return None
        return put_together(outer, inner, body, sign=self.random.random() < 0.8)

    def remove(self) -> bytes:
        outer, inner, body = take_apart(self.good)
        *path, key = self.random.choice(self.paths)
        part = inner
        for step in path:
            part = part[step]
        del part[key]
        return put_together(outer, inner, body, sign=True)

    def swap(self) -> bytes | None:
        """Two tensors in each other's place; the checksum tells."""
        outer, inner, body = take_apart(self.good)
        a, b = self.random.sample(self.names, 2)
        outer[a], outer[b] = outer[b], outer[a]
        return put_together(outer, inner, body, sign=False)

    def swap_shapes(self) -> bytes | None:
        """With the right checksum, where the shapes tell."""
        outer, inner, body = take_apart(self.good)
        a, b = self.random.sample(self.names, 2)
        if (outer[a]["shape"], outer[a]["dtype"]) == (outer[b]["shape"], outer[b]["dtype"]):
            return None
        if self.random.random() < 0.5:
            outer[a], outer[b] = outer[b], outer[a]
        else:
            outer[a]["data_offsets"], outer[b]["data_offsets"] = outer[b]["data_offsets"], outer[a]["data_offsets"]
        return put_together(outer, inner, body, sign=True)

    def offsets(self) -> bytes:
        outer, inner, body = take_apart(self.good)
        name = self.random.choice(self.names)
        where = self.random.choice(("shape", "data_offsets"))
        numbers = outer[name][where]
        i = self.random.randrange(len(numbers))
        numbers[i] = self.random.choice([numbers[i] + 1, numbers[i] - 1, -1, 2**62, 10**30, None, "0", 0.5, [1]])
        return put_together(outer, inner, body, sign=True)

    def rename(self) -> bytes:
        outer, inner, body = take_apart(self.good)
        outer[self.random.choice(("x", "layers.0.attn.window.scale_pool", "__metadata__2"))] = outer.pop(
            self.random.choice([*self.names, "__metadata__"])
        )
        outer.setdefault("__metadata__", {})
        return put_together(outer, inner, body, sign=True)

    def nan(self) -> bytes:
        """NaN in a row that is held, with the right checksum."""
        outer, inner, body = take_apart(self.good)
        start, _ = outer["layers.0.attn.window.pages"]["data_offsets"]
        spoiled = bytearray(body)
        row = self.random.randrange(4)  # of the second page
        spoiled[start + 4 * 528 + row * 512 + self.random.randrange(512)] = self.random.choice((0x7F, 0xFF))
        return put_together(outer, inner, bytes(spoiled), sign=True)

    def unheld(self) -> bytes:
        """Something in a row that the request does not hold."""
        outer, inner, body = take_apart(self.good)
        start, _ = outer["layers.4.attn.window.pages"]["data_offsets"]
        spoiled = bytearray(body)
        spoiled[start + self.random.randrange(512)] = self.random.randrange(1, 256)  # row 8; they begin with 9
        return put_together(outer, inner, bytes(spoiled), sign=True)


FIXED_FIELDS = {
    (name,)
    for name in ("head_dim", "qk_rope_head_dim", "index_head_dim", "num_hidden_layers", "hidden_size", "rope_theta",
                 "compress_rope_theta", "rms_norm_eps", "sliding_window", "kv_source_layer_ids")
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_a_spoiled_file_is_refused_and_nothing_is_imported(
    target: Session, good: bytes, tmp_path: Path, seed: int
) -> None:
    """Ten thousand of them in all."""
    mutator, file, before = Mutator(good, seed), tmp_path / "r", accounts(target)
    seen: dict[str, int] = {}
    with unchanged(target), file.open("wb") as out:
        for _ in range(2500):
            way, data = mutator.make()
            out.seek(0)
            out.write(data)
            out.truncate()
            out.flush()
            try:
                target.import_request(file)
            except Dsv41Error:
                seen[way] = seen.get(way, 0) + 1
            else:
                pytest.fail(f"seed {seed}: a file spoiled by {way} was imported: {header_of(data)}")
            assert accounts(target) == before
    assert len(seen) == len(set(mutator.ways))
