"""The layers run from memory that they did not allocate, driven by what is public, and do what a session does."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.cache import WINDOW, CacheSpec, allocate_caches, cache_specs
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.errors import LayoutError
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.layout import PagedCache
from dsv41.hal.select import select_backend
from dsv41.hal.types import ForwardBatch, LayerCaches, LayerSpec
from dsv41.session import Session
from dsv41.stack import AttentionStack

from ..wording import refused
from .toys import MAX_LEN, TOY, dyadic_checkpoint, quarter_turns, signs

ROOT = Path(__file__).parents[2]
SENTINEL = 0xA5
LAYERS = TOY.num_hidden_layers
STEPS: list[dict[int, int]] = [{0: 13, 1: 6}, {1: 1, 0: 1}, {0: 4, 1: 0, 2: 9}, {2: 1, 0: 5, 1: 5}, {1: 11, 2: 3}]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "toy"
    dyadic_checkpoint(path, torch.float32)
    return path


class Engine:
    """Memory of its own: one buffer, in which page p of every cache lies in block p, with bytes between that belong to
    no one. Pages are dealt in no order, tables are as wide as the engine likes."""

    def __init__(self, stack: AttentionStack, specs: list[CacheSpec], blocks: int, page_size: int) -> None:
        self.stack, self.specs, self.page_size = stack, specs, page_size
        unit = stack.backend.layouts.block_alignment
        ends = [0]
        for spec in specs:
            ends.append(-(-(ends[-1] + spec.page_bytes + unit) // unit) * unit)
        self.block_bytes = ends[-1] + unit
        self.memory = torch.full((blocks * self.block_bytes + 3 * unit,), SENTINEL, dtype=torch.uint8)
        whole = self.memory[unit : unit + blocks * self.block_bytes].view(blocks, self.block_bytes)
        self.views = {
            (spec.layer_id, spec.kind): PagedCache(spec.layout, whole[:, start : start + spec.layout.page_bytes])
            for spec, start in zip(specs, ends[:-1], strict=True)
        }
        state = torch.full((3, 5, 2, TOY.head_dim), torch.nan)  # slots in any order, rings as long as the engine likes
        self.caches = {
            layer: LayerCaches(
                **{kind: view for (owner, kind), view in self.views.items() if owner == layer},
                compressor_state=state if layer == 1 else None,
            )
            for layer in range(LAYERS)
        }
        self.slots = {0: 2, 1: 0, 2: 1}
        self.lengths = dict.fromkeys(range(3), 0)
        self.tables: dict[tuple[int, int], list[int]] = {(pool, r): [] for pool in (WINDOW, 1, 2) for r in range(3)}
        dealer = random.Random(0)
        self.free = {pool: dealer.sample(range(blocks), blocks) for pool in (WINDOW, 1, 2)}

    def batch(self, counts: dict[int, int]) -> ForwardBatch:
        for request, count in counts.items():
            self.lengths[request] += count
            for pool in (WINDOW, 1, 2):
                table = self.tables[pool, request]
                while len(table) * self.page_size < self.lengths[request] // max(pool, 1):
                    table.append(self.free[pool].pop())
        wide = 29

        def table_of(pool: int) -> Tensor:
            rows = [self.tables[pool, request] for request in counts]
            return torch.tensor([row + [-1] * (wide - len(row)) for row in rows], dtype=torch.int32)

        return ForwardBatch.from_host(
            query_lens=list(counts.values()),
            seq_lens=[self.lengths[request] for request in counts],
            window_pages=table_of(WINDOW),
            window_page_size=self.page_size,
            compressed_pages={ratio: table_of(ratio) for ratio in (1, 2)},
            compressed_page_size={1: self.page_size, 2: self.page_size},
            state_slots=[self.slots[request] for request in counts],
        )

    def rows(self, spec: CacheSpec, request: int) -> tuple[Tensor, Tensor]:
        """The bytes of a request's rows in one cache: those that the window still needs, or all."""
        return rows_of(
            self.views[spec.layer_id, spec.kind], self.tables[spec.pool, request], spec, self.lengths[request]
        )


def rows_of(cache: PagedCache, table: list[int], spec: CacheSpec, length: int) -> tuple[Tensor, Tensor]:
    size = cache.layout.page_size
    first = max(0, length - TOY.sliding_window) if spec.pool == WINDOW else 0
    rows = range(first, length // spec.ratio)
    return cache.read_bytes(torch.tensor([table[row // size] * size + row % size for row in rows], dtype=torch.int64))


def of_request(request: int, start: int, count: int) -> Tensor:
    return signs(LAYERS, 40, TOY.hidden_size, seed=request)[:, start : start + count]


@pytest.mark.parametrize(
    ("kv", "page_size"), [("auto", 4), ("fp8_ds_mla_v4", 3), ("bfloat16", 5), ("fp8_ds_mla", 1)], ids=str
)
def test_fr_27_fr_28_layers_in_an_engine_s_own_memory_do_what_a_session_does(
    checkpoint_folder: Path, kv: str, page_size: int
) -> None:
    """The same bytes in every cache and the same outputs, bit for bit; and no byte between pages is touched."""
    checkpoint = load_checkpoint(checkpoint_folder, dtype=torch.float32)
    backend = select_backend("reference", device="cpu", config=checkpoint.config, kv_cache_dtype=kv)
    backend.layouts = backend.layouts.with_page_size(window=page_size, compressed=page_size)
    stack = AttentionStack(checkpoint, backend, max_len=MAX_LEN)
    quarter_turns(stack)
    engine = Engine(stack, cache_specs(checkpoint.config, backend), 60, page_size)
    stack.bind(engine.caches)
    session = Session(session_stack(checkpoint, backend), max_requests=3, max_step_tokens=40)
    for request in range(3):
        assert session.add_request() == request

    start = dict.fromkeys(range(3), 0)
    for counts in STEPS:
        inputs = {r: of_request(r, start[r], count) for r, count in counts.items()}
        expected = torch.cat(list(session.step(inputs).values()), dim=1)
        plan, published = backend.plan(engine.batch(counts), stack.specs), None
        hidden = torch.cat(list(inputs.values()), dim=1)
        for i, layer in enumerate(stack.layers):
            output, published = layer.forward(hidden[i], plan, published)
            assert torch.equal(output, expected[i])
        start = {r: start[r] + counts.get(r, 0) for r in start}

    for spec in engine.specs:
        for request in range(3):
            cache = getattr(session.caches[spec.layer_id], spec.kind)
            table = session.find(request).pages.tables[spec.pool]
            theirs = rows_of(cache, table, spec, session.length(request))
            assert all(map(torch.equal, engine.rows(spec, request), theirs)), spec.name
    untouched = engine.memory.clone()
    for view in engine.views.values():
        inside = torch.as_strided(untouched, view.data.shape, view.data.stride(), view.data.storage_offset())
        assert (inside != SENTINEL).any()
        inside.fill_(SENTINEL)
    assert (untouched == SENTINEL).all()


def session_stack(checkpoint: Checkpoint, backend: AttentionBackend) -> AttentionStack:
    stack = AttentionStack(checkpoint, backend, max_len=MAX_LEN)
    quarter_turns(stack)
    return stack


@pytest.mark.parametrize("kv", ["auto", "fp8_ds_mla_v4", "bfloat16"])
def test_fr_42_page_0_and_slot_0_are_ordinary_and_minus_one_writes_nothing(kv: str) -> None:
    layouts = ReferenceBackend(kv_cache_dtype=kv).layouts.with_page_size(window=4, compressed=4)
    for layout in (layouts.window, layouts.compressed, layouts.index):
        cache = PagedCache.allocate(layout, 3, fill=SENTINEL)
        cache.write(torch.tensor([-1, 0, 11, -1]), signs(4, layout.record.dim))
        values, scales = cache.read_bytes(torch.arange(12))
        written = ((values != SENTINEL).any(1) | (scales != SENTINEL).any(1)).nonzero().flatten()
        assert written.tolist() == [0, 11]


# What is refused at bind


def bound_caches(folder: Path, backend: ReferenceBackend) -> tuple[AttentionStack, dict[int, LayerCaches]]:
    stack = AttentionStack(load_checkpoint(folder, dtype=torch.float32), backend, max_len=MAX_LEN)
    pages = {WINDOW: 4, 1: 4, 2: 4}
    return stack, allocate_caches(cache_specs(stack.config, backend), pages, state_slots=1, ring=2, device="cpu")


def spread(cache: PagedCache, stride: int) -> PagedCache:
    memory = torch.zeros(cache.num_pages * stride, dtype=torch.uint8).view(cache.num_pages, stride)
    return PagedCache(cache.layout, memory[:, : cache.layout.page_bytes])


def test_fr_27_a_backend_that_cannot_address_a_stride_refuses_it_at_bind(checkpoint_folder: Path) -> None:
    class Compact(ReferenceBackend):
        name = "compact"

        def check_caches(self, spec: LayerSpec, caches: LayerCaches) -> None:
            stride = caches.window.data.stride(0)
            if stride != caches.window.layout.stride:
                raise LayoutError(
                    f"{spec.name}: pages of the window cache are {stride} bytes apart: expected "
                    f"{caches.window.layout.stride}; allocate it apart from others"
                )

    stack, caches = bound_caches(checkpoint_folder, Compact())
    stack.bind(caches)
    layout = caches[3].window.layout
    wide = {**caches, 3: replace(caches[3], window=spread(caches[3].window, layout.stride + layout.alignment))}
    with refused(LayoutError, "layers.3.attn", str(layout.stride + layout.alignment), str(layout.stride)):
        stack.bind(wide)
    assert stack.layers[3].state.caches is not None
    assert stack.layers[3].state.caches.window is caches[3].window
    reading, _ = bound_caches(checkpoint_folder, ReferenceBackend())
    reading.bind(wide)


def test_fr_27_pages_off_their_alignment_make_no_cache(checkpoint_folder: Path) -> None:
    _, caches = bound_caches(checkpoint_folder, ReferenceBackend())
    with pytest.raises(LayoutError, match="bytes apart: need a multiple of 512"):
        spread(caches[0].window, caches[0].window.layout.stride + 8)


@pytest.mark.parametrize("kv", ["auto", "fp8_ds_mla_v4", "bfloat16"])
def test_an_engine_is_told_what_it_must_allocate(kv: str) -> None:
    backend = ReferenceBackend(kv_cache_dtype=kv)
    specs = cache_specs(TOY, backend)
    assert [spec.name for spec in specs if spec.layer_id in (0, 1)] == [
        "layers.0.attn.window",
        "layers.1.attn.window",
        "layers.1.attn.compressed",
        "layers.1.attn.index",
    ]
    for spec in specs:
        assert spec.pool == (WINDOW if spec.kind == "window" else spec.ratio)
        assert spec.tokens_per_page == spec.layout.page_size * spec.ratio
        cache = PagedCache.allocate(spec.layout, 3)
        assert cache.data.stride(0) == spec.page_bytes
        assert backend.layouts.block_alignment % spec.layout.alignment == 0
    assert backend.reserve(1024, 8, 4096) == 0


def test_fr_90_draft_layers_own_a_window_and_nothing_else() -> None:
    """Whether the schedule lists them or ends before them."""
    for ratios in (TOY.compress_ratios, (*TOY.compress_ratios, 0, 0, 0)):
        config = replace(TOY, num_nextn_predict_layers=3, compress_ratios=ratios)
        specs = cache_specs(config, ReferenceBackend(), [*range(7), 7, 8, 9])
        drafts = [spec for spec in specs if spec.layer_id >= 7]
        assert [(spec.name, spec.kind, spec.ratio, spec.pool) for spec in drafts] == [
            (f"mtp.{draft}.attn.window", "window", 1, WINDOW) for draft in range(3)
        ]
        assert cache_specs(config, ReferenceBackend()) == specs[: -len(drafts)]


# A session is such an engine


def private_uses(source: str) -> list[str]:
    """Names with an underscore that are not the source's own: imported, or read from anything but `self`."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [name for name in names if name.startswith("_") and name != "__future__"]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if "._" in alias.name or alias.name.startswith("_")]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "vars"):
            found += [ast.unparse(node) for part in node.args[1:] if "'_" in ast.unparse(part)]
    return found


def test_a_session_uses_what_is_public_alone() -> None:
    assert private_uses((ROOT / "dsv41" / "session.py").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "from dsv41.stack import _check",
        "from dsv41._private import check",
        "import dsv41._private",
        "self.stack._check(hidden)",
        "def f(self, stack): stack._tables = {}",
        "self.pages._copy([])",
        "getattr(stack, '_check')(1)",
    ],
)
def test_what_is_private_is_found(source: str) -> None:
    assert private_uses(source)


def test_what_is_its_own_is_not() -> None:
    source = (
        "from __future__ import annotations\nimport dsv41.stack\nself._run()\nstack.__class__\ngetattr(c, spec.kind)"
    )
    assert private_uses(source) == []
