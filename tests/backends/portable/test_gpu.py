"""What only a GPU can show: large caches, no waiting, no allocation, nothing written out of bounds, the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv41.backends.portable.attention import attend, workspace_bytes
from dsv41.backends.portable.backend import PortableBackend
from dsv41.backends.portable.caches import flat
from dsv41.backends.portable.insert import insert_rows
from dsv41.checkpoint import load_checkpoint
from dsv41.hal.layout import CacheLayout, PagedCache, ScalePlacement
from dsv41.hal.records import NVFP4_288, Dialect, v4_584, v41_528
from dsv41.hal.types import ForwardBatch
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint, small_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYOUTS = [
    CacheLayout(v4_584(Dialect.OCP), 64, ScalePlacement.PAGE),
    CacheLayout(v41_528(Dialect.OCP), 64, ScalePlacement.TOKEN),
    CacheLayout(NVFP4_288, 64, ScalePlacement.TOKEN),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> AttentionStack:
    path = make_checkpoint(tmp_path_factory.mktemp("gpu") / "small", config=small_config())
    return AttentionStack(load_checkpoint(path, device="cuda"), PortableBackend(device="cuda"), max_len=2048)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.record.name)
def test_fr_63_fr_66_pages_above_two_gibibytes(layout: CacheLayout) -> None:
    """The same rows in the highest pages of a cache of over 2**31 bytes and in a small one: the same bits."""
    pages = (1 << 31) // layout.stride + 40
    rows, tokens, heads = 192, 3, 16
    numbers = torch.randn(rows, 512, device="cuda").bfloat16()
    positions = torch.arange(rows, device="cuda")
    table = torch.randn(rows, 64, device="cuda")
    chosen = torch.stack([torch.randperm(rows, device="cuda")[:128] for _ in range(tokens)])
    q = torch.randn(tokens, heads, 512, device="cuda").bfloat16()
    found: list[Tensor] = []
    for count in (3, pages):
        cache = PagedCache(layout, torch.full((count, layout.stride), 0xFF, dtype=torch.uint8, device="cuda"))
        first = (count - 3) * layout.page_size
        insert_rows(numbers.clone(), None, 1e-6, positions, 1, table, positions + first, *flat(cache))
        assert (count - 3) * layout.stride > (1 << 31) or count == 3
        window = cache if layout.record != NVFP4_288 else PagedCache.allocate(LAYOUTS[1], 1, "cuda")
        window_slots = chosen + first if window is cache else torch.full_like(chosen, -1)
        out = torch.full_like(q, float("nan"))
        space = torch.empty(workspace_bytes(tokens, heads, 128, 128, q.dtype), dtype=torch.uint8, device="cuda")
        attend(
            q, heads, torch.zeros(heads, device="cuda"), 512**-0.5, *flat(window), window_slots, *flat(cache),
            chosen + first, positions[:tokens], table, False, False, space, out, None,
        )  # fmt: skip
        found.append(out)
        del cache, window
    assert found[0].isfinite().all()
    assert torch.equal(*found)


def test_a_step_never_waits_for_the_device_and_allocates_none_of_its_memory(stack: AttentionStack) -> None:
    """Synchronising calls raise; after the first steps, memory that torch has from the device is enough for all."""
    session = Session(stack, max_requests=2, max_tokens=1024, max_step_tokens=64)
    requests = [session.add_request() for _ in range(2)]
    hidden = torch.randn(64, stack.config.hidden_size, device="cuda").bfloat16()
    for _ in range(8):
        session.step(dict.fromkeys(requests, hidden[:32]))
    session.step(dict.fromkeys(requests, hidden[:1]))
    batch = ForwardBatch.from_host(
        query_lens=[1, 1],
        seq_lens=[100, 100],
        window_pages=torch.arange(4, dtype=torch.int32).view(2, 2),
        window_page_size=64,
        compressed_pages={r: torch.arange(4, dtype=torch.int32).view(2, 2) for r in (1, 2)},
        compressed_page_size={1: 64, 2: 64},
        device="cuda",
    )
    stack.forward(hidden[:2], batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            stack.forward(hidden[:2], batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


def test_nothing_is_written_around_a_cache_or_read_from_around_it(stack: AttentionStack) -> None:
    """Every cache lies between NaN bytes that stay as they are; 20 runs of the same requests give the same bits."""
    session = Session(stack, max_requests=2, max_tokens=512, max_step_tokens=64)
    guards: list[Tensor] = []
    caches = {}
    for layer, own in session.caches.items():
        parts = {}
        for kind in ("window", "compressed", "index"):
            cache = getattr(own, kind)
            if cache is None:
                parts[kind] = None
                continue
            size, edge = cache.data.numel(), 1 << 16
            buffer = torch.full((size + 2 * edge,), 0xFF, dtype=torch.uint8, device="cuda")
            guards += [buffer[:edge], buffer[edge + size :]]
            parts[kind] = PagedCache(cache.layout, buffer[edge : edge + size].view(cache.data.shape))
        caches[layer] = type(own)(**parts, compressor_state=own.compressor_state)
    session.caches = caches
    stack.bind(caches)
    hidden = torch.randn(80, stack.config.hidden_size, device="cuda").bfloat16()
    first: Tensor | None = None
    for _ in range(20):
        request = session.add_request()
        out = torch.cat([session.step({request: part})[request] for part in hidden.split([40, 33, 1, 1, 5])])
        session.free(request)
        assert first is None or torch.equal(out, first)
        first = out
    assert first is not None
    assert first.isfinite().all()
    assert all((guard == 0xFF).all() for guard in guards)
