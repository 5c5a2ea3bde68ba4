"""Requests that begin with what another one computed: shared pages, and the replay of a window that is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.cache import WINDOW, CacheSpec, PrefixHit, cache_specs, prefix_hit
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.errors import BackendError, InputError, PoolExhausted, RequestError
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint, small_config
from dsv41.verify import relative_error

from ..wording import refused
from .test_session import unchanged
from .toys import MAX_LEN, TOY, Ledger, all_free, dyadic_checkpoint, noise, plain_checkpoint, quarter_turns

DOCS = Path(__file__).parents[2] / "docs" / "integration.md"
WINDOW_ROWS, LAYERS = TOY.sliding_window, TOY.num_hidden_layers
TOKENS = 44
OFFSETS = range(2 * WINDOW_ROWS + 1)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return dyadic_checkpoint(tmp_path_factory.mktemp("prefixes") / "toy", torch.float32)


def make_stack(checkpoint: Checkpoint, backend: ReferenceBackend | None = None) -> AttentionStack:
    stack = AttentionStack(checkpoint, backend or ReferenceBackend(), max_len=MAX_LEN)
    quarter_turns(stack)
    return stack


def make_ledger(checkpoint: Checkpoint, page_size: int | None = 4, max_draft: int = 3, **sizes: int) -> Ledger:
    session = Session(
        make_stack(checkpoint),
        max_requests=4,
        max_tokens=4 * TOKENS,
        page_size=page_size,
        max_draft=max_draft,
        **sizes,
    )
    return Ledger(session, make_stack(checkpoint))


@pytest.fixture
def ledger(checkpoint: Checkpoint) -> Ledger:
    """Request 0 holds 40 tokens, of which the window caches have the last 11."""
    ledger = make_ledger(checkpoint)
    ledger.step({ledger.add(): 40})
    return ledger


def fork_by_replay(ledger: Ledger, request: int, length: int, replayed: int = WINDOW_ROWS) -> int:
    given = ledger.given[request][max(0, length - replayed) : length]
    return ledger.fork(request, length, replay=ledger.hidden(given))


# A hit gives what a cold run gives


@pytest.mark.parametrize("page_size", [1, 4])
def test_fr_92_a_hit_at_every_offset_is_a_cold_run_bit_for_bit(checkpoint: Checkpoint, page_size: int) -> None:
    """A request that repeats the first `offset` tokens of a longer one, in as long a prefix as can be shared."""
    ledger = make_ledger(checkpoint, page_size)
    source = ledger.add()
    ledger.step({source: 40})
    for offset in (*OFFSETS, 31, 40):
        hit = prefix_hit(ledger.session.cache_specs, offset, WINDOW_ROWS)
        child = fork_by_replay(ledger, source, hit.length)
        ledger.step({child: offset - hit.length})
        ledger.step({child: 3})
        ledger.check(child)
        ledger.free(child)
    ledger.step({source: 4})
    ledger.check(source)


@pytest.mark.parametrize("max_step_tokens", [1, 3, 8])
def test_a_replay_may_be_cut_into_steps(checkpoint: Checkpoint, max_step_tokens: int) -> None:
    ledger = make_ledger(checkpoint, max_step_tokens=max_step_tokens)
    source = ledger.add()
    while len(ledger.given[source]) < 30:
        ledger.step({source: min(max_step_tokens, 30 - len(ledger.given[source]))})
    for length, replayed in ((20, 8), (20, 13), (30, 30), (6, 6)):
        child = fork_by_replay(ledger, source, length, replayed)
        ledger.step({child: 1})
        ledger.check(child)
        ledger.free(child)
    ledger.free(source)
    assert all_free(ledger.session)


@pytest.mark.parametrize("length", [3, 7, 8, 9, 10, 11])
def test_a_prefix_whose_window_rows_are_held_needs_no_replay(checkpoint: Checkpoint, length: int) -> None:
    """Also at odd lengths, where the raw row of the open group is copied."""
    ledger = make_ledger(checkpoint, max_draft=8)
    source = ledger.add()
    ledger.step({source: 11})
    child = ledger.fork(source, length)
    ledger.step({child: 1, source: 1})
    ledger.step({child: 4, source: 3})
    for request in (child, source):
        ledger.check(request)


def test_a_hit_can_be_cut_back_as_it_grows_and_be_hit_itself(ledger: Ledger) -> None:
    child = fork_by_replay(ledger, 0, 24)
    ledger.step({child: 5})
    ledger.truncate(child, 27)
    grandchild = fork_by_replay(ledger, child, 26)
    ledger.free(0)
    ledger.step({child: 2, grandchild: 3})
    great = ledger.fork(grandchild, 28)
    ledger.step({great: 2, grandchild: 2})
    for request in (child, grandchild, great):
        ledger.check(request)
        ledger.free(request)
    assert all_free(ledger.session)


def test_a_source_may_be_freed_before_its_prefix_is_used(ledger: Ledger) -> None:
    child = fork_by_replay(ledger, 0, 32)
    ledger.free(0)
    ledger.step({ledger.add(): 40, child: 1})
    ledger.step({child: 4})
    ledger.check(child)


def test_a_replay_in_bits_that_round_is_near(tmp_path: Path) -> None:
    """Realistic weights and inputs for each layer, nothing quantised: 1e-5, which the order of sums may cost."""
    backend = ReferenceBackend(kv_cache_dtype="float32", index_cache_dtype="float32")
    stack = AttentionStack(plain_checkpoint(tmp_path / "toy"), backend, max_len=MAX_LEN)
    session = Session(stack, max_requests=2, page_size=4)
    hidden = noise(LAYERS, 40, TOY.hidden_size)
    source = session.add_request()
    cold = session.step({source: hidden})[source]
    for length in (4, 8, 12, 16, 28):
        child = session.fork(source, length, replay=hidden[:, max(0, length - WINDOW_ROWS) : length])
        found = session.step({child: hidden[:, length:]})[child]
        for mine, theirs in zip(found, cold[:, length:], strict=True):
            assert relative_error(mine, theirs) <= 1e-5
        session.free(child)


# One residual stream


def documented() -> dict[int, dict[int, float]]:
    """Size of the stream -> windows replayed -> the largest relative error that the documentation allows."""
    number = r" ([\d.]+) \|"
    rows = re.findall(rf"^\|{number * 5}$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    for row in rows:
        assert float(row[1]) <= float(row[2])
        assert float(row[3]) <= float(row[4])
    return {size: {int(row[0]): float(row[column]) for row in rows} for size, column in ((1, 2), (16, 4))}


class Stream:
    """A long request of one residual stream, and what others that share its prefix get."""

    def __init__(self, path: Path, size: int, *, quantized: bool) -> None:
        config = small_config()
        self.window, self.layers = config.sliding_window, config.num_hidden_layers
        if not path.exists():
            make_checkpoint(path, config=config, quantized=quantized, dtype=torch.float32)
        dtype = "auto" if quantized else "float32"
        backend = ReferenceBackend(kv_cache_dtype=dtype, index_cache_dtype=dtype)
        checkpoint = load_checkpoint(path, dtype=torch.bfloat16 if quantized else torch.float32)
        self.session = Session(AttentionStack(checkpoint, backend, max_len=1024), max_requests=2, max_tokens=1024)
        self.hidden = (size * noise(self.layers * self.window + 40, config.hidden_size)).to(checkpoint.dtype)
        self.source = self.session.add_request()
        self.cold = self.session.prefill(self.source, self.hidden)

    def error(self, length: int, replayed: int) -> float:
        """Of 8 tokens after a hit of `length` tokens, the last `replayed` of which are replayed."""
        child = self.session.fork(self.source, length, replay=self.hidden[length - replayed : length])
        found = self.session.step({child: self.hidden[length : length + 8]})[child]
        self.session.free(child)
        return relative_error(found, self.cold[length : length + 8])


@pytest.mark.parametrize("size", [1, 16])
def test_fr_93_a_hit_in_one_residual_stream_is_within_the_documented_tolerance(tmp_path: Path, size: int) -> None:
    """At every offset up to twice the window: exact as long as nothing came before what is replayed."""
    stream, limits = Stream(tmp_path / "small", size, quantized=False), documented()[size]
    window = stream.window
    for offset in range(0, 2 * window + 1, 2):
        assert stream.error(offset, offset) <= 1e-5
        if offset > window:
            assert 1e-3 < stream.error(offset, window) <= limits[1]


@pytest.mark.parametrize("quantized", [False, True], ids=["fp32", "release"])
@pytest.mark.parametrize("size", [1, 16])
def test_fr_93_the_more_is_replayed_the_nearer(tmp_path: Path, size: int, quantized: bool) -> None:
    stream, limits = Stream(tmp_path / "small", size, quantized=quantized), documented()[size]
    assert sorted(limits) == [1, 2, 4, stream.layers]
    assert limits[stream.layers] == 0
    for windows, limit in limits.items():
        for length in (stream.layers * stream.window, stream.layers * stream.window + 22):
            code_steps = 0.05 if quantized else 1e-5
            assert stream.error(length, windows * stream.window) <= max(limit, code_steps)


# What a replay may touch


def compressed_bytes(session: Session) -> list[Tensor]:
    return [
        cache.data.clone()
        for caches in session.caches.values()
        for cache in (caches.compressed, caches.index)
        if cache is not None
    ]


@pytest.mark.parametrize("length", [2, 8, 14, 24, 40])
def test_fr_92_a_replay_rewrites_no_compressed_row(ledger: Ledger, length: int) -> None:
    """Even where its hidden states are wrong, as those of one residual stream are."""
    session = ledger.session
    before = compressed_bytes(session)
    free = {pool: pages.free_pages for pool, pages in session.pages.pools.items()}
    child = session.fork(0, length, replay=-ledger.hidden(ledger.given[0][:length]))
    assert all(map(torch.equal, before, compressed_bytes(session)))
    mine, theirs = session.find(child).pages.tables, session.find(0).pages.tables
    for pool in (1, 2):
        assert mine[pool] == theirs[pool][: -(-length // pool // 4)]
        assert session.pages.pools[pool].free_pages == free[pool]
    assert not set(mine[WINDOW]) & set(theirs[WINDOW]) - {-1}
    ledger.step({0: 2})
    ledger.check(0)


def test_what_follows_a_hit_is_written_beside_the_shared_pages(ledger: Ledger) -> None:
    session = ledger.session
    hit = prefix_hit(session.cache_specs, 29, WINDOW_ROWS)
    children = [fork_by_replay(ledger, 0, hit.length) for _ in range(2)]
    ledger.step(dict.fromkeys(children, 7))
    tables = [session.find(request).pages.tables for request in (0, *children)]
    for pool in (1, 2):
        shared = [table[pool][: hit.pages[pool]] for table in tables]
        assert shared[0] == shared[1] == shared[2]
        own = [set(table[pool][hit.pages[pool] :]) for table in tables]
        assert not own[0] & own[1] | own[0] & own[2] | own[1] & own[2]
    for request in (0, *children):
        ledger.check(request)


# Where prefixes can be shared


def specs_with(window: int, compressed: int) -> list[CacheSpec]:
    backend = ReferenceBackend()
    backend.layouts = backend.layouts.with_page_size(window=window, compressed=compressed)
    return cache_specs(TOY, backend)


@pytest.mark.parametrize("compressed", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("drafted", range(9))
def test_fr_94_what_is_stored_is_what_is_found(window: int, compressed: int, drafted: int) -> None:
    """A request stores what it holds, drafts of which some may yet be refused left out; another looks up any length."""
    specs = specs_with(window, compressed)
    unit = 2 * compressed
    stored: set[int] = set()
    for held in range(300):
        hit = prefix_hit(specs, held, TOY.sliding_window)
        assert held - unit < hit.length <= held
        assert prefix_hit(specs, hit.length, TOY.sliding_window) == hit
        assert hit.pages == {1: hit.length // compressed, 2: hit.length // unit}
        assert hit.window_start == max(0, hit.length - TOY.sliding_window)
        stored.add(prefix_hit(specs, max(0, held - drafted), TOY.sliding_window).length)
    found = {prefix_hit(specs, asked, TOY.sliding_window).length for asked in range(300 - drafted)}
    assert found == stored
    assert len(found) > 1


def test_prefixes_of_window_layers_can_be_cut_anywhere() -> None:
    config = replace(TOY, num_nextn_predict_layers=3)
    specs = cache_specs(config, ReferenceBackend(), [0, 7, 8, 9])
    assert prefix_hit(specs, 13, 8) == PrefixHit(13, {}, 5)
    assert prefix_hit(specs, 5, 8) == PrefixHit(5, {}, 0)


@pytest.mark.parametrize(("tokens", "window"), [(-1, 8), (4, 0)])
def test_a_prefix_is_counted(tokens: int, window: int) -> None:
    with refused(InputError, f"tokens is {tokens} and window {window}"):
        prefix_hit(specs_with(4, 4), tokens, window)


# Refusals


def test_fr_93_a_backend_that_cannot_clamp_its_window_refuses_a_replay(checkpoint: Checkpoint) -> None:
    class Unclamped(ReferenceBackend):
        name = "unclamped"
        replays_window = False

    session = Session(make_stack(checkpoint, Unclamped()), max_requests=2)
    ledger = Ledger(session, make_stack(checkpoint))
    request = ledger.add()
    ledger.step({request: 24})
    with unchanged(session), refused(BackendError, "'unclamped' cannot replay", "replays_window"):
        fork_by_replay(ledger, request, 16)
    child = ledger.fork(request, 20)  # its window rows are held
    ledger.step({child: 3})
    ledger.check(child)


def test_fr_92_a_hit_that_lacks_its_window_is_refused(ledger: Ledger) -> None:
    with unchanged(ledger.session), refused(RequestError, "no window rows before 29", "from 16 on", "fork with replay"):
        ledger.session.fork(0, 24)


REPLAYS = {
    "too short": (24, (LAYERS, 7, 64), InputError, ["7 tokens", "expected 8, the window before token 24, to 24"]),
    "too long": (24, (LAYERS, 25, 64), InputError, ["25 tokens", "expected 8", "to 24"]),
    "too short for a short prefix": (6, (LAYERS, 5, 64), InputError, ["5 tokens", "expected 6"]),
    "of another width": (24, (LAYERS, 8, 65), InputError, ["[7, 8, 65]", "64"]),
    "of other layers": (24, (3, 8, 64), InputError, ["[3, 8, 64]"]),
    "to an odd length": (23, (LAYERS, 8, 64), RequestError, ["23 tokens", "open", "even", "prefix_hit"]),
    "past the end": (42, (LAYERS, 8, 64), RequestError, ["42 tokens", "expected 0 to 40"]),
}


@pytest.mark.parametrize("what", REPLAYS)
def test_a_replay_that_cannot_be_is_refused(ledger: Ledger, what: str) -> None:
    length, shape, error, named = REPLAYS[what]
    with unchanged(ledger.session), refused(error, *named):
        ledger.session.fork(0, length, replay=torch.ones(shape))


def test_a_replay_without_pages_changes_nothing(ledger: Ledger) -> None:
    session = ledger.session
    pool = session.pages.pools[WINDOW]
    taken = [pool.take() for _ in range(pool.free_pages - 1)]
    before = repr(session.find(0))
    with refused(PoolExhausted, "window pages", "at most 1"):
        fork_by_replay(ledger, 0, 24)
    assert (pool.free_pages, repr(session.find(0))) == (1, before)
    for page in taken:
        pool.give_back(page)
    child = fork_by_replay(ledger, 0, 24)
    ledger.step({child: 1})
    ledger.check(child)


def test_a_full_session_forks_nothing(ledger: Ledger) -> None:
    for _ in range(3):
        ledger.add()
    with unchanged(ledger.session), refused(RequestError, "holds 4 requests"):
        ledger.session.fork(0)


def test_a_replay_near_the_longest_request_is_possible(ledger: Ledger) -> None:
    """The tokens replayed are not tokens more, even where the source could hold none."""
    ledger.step({0: MAX_LEN - 40})
    child = fork_by_replay(ledger, 0, MAX_LEN - 2)
    ledger.step({child: 2})
    ledger.check(child)
