"""The adapter of docs/integration.md runs as it stands there, and its tables say what the code says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv41
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.cache import WINDOW, bytes_per_token, cache_specs, request_bytes
from dsv41.config import DeepseekV41Config
from dsv41.synthetic import small_config

ROOT = Path(__file__).parents[1]
DOC = ROOT / "docs" / "integration.md"
TEXT = DOC.read_text(encoding="utf-8")
KINDS = ("window", "compressed", "index")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def adapter() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 75
    names: dict[str, Any] = {}
    exec(compile(code, str(DOC), "exec", dont_inherit=True), names)
    return names


def test_the_adapter_does_what_a_session_does(adapter: dict[str, Any], tmp_path: Path) -> None:
    """Prefill in chunks, mixed phases, drafts refused in part, requests that end; and every page comes back."""
    config = small_config()
    path = dsv41.make_checkpoint(tmp_path / "small", config=config)
    pages = {WINDOW: 12, 1: 20, 2: 12}
    engine = adapter["Attention"](path, pages, max_requests=2, max_draft=4, max_len=1024)
    backend = dsv41.select_backend(config=config)
    stack = dsv41.AttentionStack(dsv41.load_checkpoint(path, device=backend.device), backend, max_len=1024)
    session = dsv41.Session(stack, max_requests=2, max_tokens=1024, max_draft=4)
    a, b = (adapter["Request"](slot) for slot in (1, 0))
    requests = {session.add_request(): a, session.add_request(): b}
    generator = torch.Generator().manual_seed(0)
    steps: list[dict[int, int]] = [{0: 100, 1: 33}, {0: 100}, {1: 64, 0: 1}, {0: 5, 1: 5}, {0: 5, 1: 0}, {1: 100, 0: 5}]
    for number, counts in enumerate(steps):
        drawn = {r: torch.randn(n, config.hidden_size, generator=generator) for r, n in counts.items()}
        inputs = {r: hidden.to(backend.device, stack.dtype) for r, hidden in drawn.items()}
        expected = torch.cat(list(session.step(inputs).values()))
        found = engine.step([requests[r] for r in counts], list(counts.values()), torch.cat(list(inputs.values())))
        assert torch.equal(found, expected)
        if number >= 3:
            for request, refused in ((0, 3), (1, 4 if number == 3 else 0)):
                session.truncate(request, session.length(request) - refused)
                engine.truncate(requests[request], requests[request].length - refused)
    for request, mine in requests.items():
        assert mine.length == session.length(request)
        assert len(mine.pages[WINDOW]) - mine.pages[WINDOW].count(-1) <= 3
        engine.resize(mine, 0)
    assert {pool: sorted(free) for pool, free in engine.free_pages.items()} == {
        pool: list(range(count)) for pool, count in pages.items()
    }


@pytest.mark.parametrize("draft", [False, True])
def test_the_adapter_takes_the_layers_that_there_are(adapter: dict[str, Any], tmp_path: Path, draft: bool) -> None:
    """Window layers alone, or draft layers, need no other pool."""
    config = small_config()
    path = dsv41.make_checkpoint(tmp_path / "few", config=config, layers=[8 if draft else 0])
    engine = adapter["Attention"](path, {WINDOW: 2}, max_requests=1, max_len=64)
    assert list(engine.page_size) == [WINDOW]
    if not draft:
        hidden = torch.randn(3, config.hidden_size, dtype=engine.stack.dtype, device=engine.backend.device)
        assert engine.step([adapter["Request"](0)], [3], hidden).shape == hidden.shape


# Tables

LAYOUTS = {
    "release: 528, `nvfp4` 288, `mxfp4` 68": "nvfp4_ds_mla",
    "V4 record 584": "fp8_ds_mla_v4",
    "bf16": "bfloat16",
}


def memory_tables() -> tuple[str, str]:
    """Of the release: bytes a token, and what a request holds at 128k and 1M tokens."""
    config = DeepseekV41Config()
    each = [
        "| records | window, 40 layers | compressed, 4 layers | index, 4 layers | grows by |",
        "| --- | --- | --- | --- | --- |",
    ]
    held = [
        "| records | context | window | compressed | index | total |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, kv in LAYOUTS.items():
        specs = cache_specs(config, ReferenceBackend(kv_cache_dtype=kv))
        token = bytes_per_token(specs)
        grows = token["compressed"] + token["index"]
        each.append(f"| {name} | " + " | ".join(f"{token[kind]:,.0f}" for kind in KINDS) + f" | {grows:,.0f} |")
        for context, tokens in (("128k", 131_072), ("1M", 1_048_576)):
            total = request_bytes(specs, tokens, config.sliding_window + 8)
            parts = [*(total[kind] for kind in KINDS), sum(total.values())]
            held.append(f"| {name} | {context} | " + " | ".join(f"{part / 2**20:,.1f} MiB" for part in parts) + " |")
    return "\n".join(each), "\n".join(held)


def test_the_memory_tables_are_current() -> None:
    for table in memory_tables():
        assert f"\n{table}\n" in TEXT, f"put this into {DOC.name}:\n{table}"


def test_the_numbers_of_the_release() -> None:
    """Counted by hand: 40 window caches; 3 sources of ratio 2 and one of ratio 1."""
    specs = cache_specs(DeepseekV41Config(), ReferenceBackend())
    assert bytes_per_token(specs) == {"window": 40 * 528, "compressed": 2.5 * 288, "index": 2.5 * 68}
    assert request_bytes(specs, 1_048_576, 136) == {
        "window": 40 * 4 * 64 * 528,
        "compressed": 1_048_576 * 720,
        "index": 1_048_576 * 170,
    }
    # A page each, also of the window, for a single token; window pages stop where the window does.
    assert request_bytes(specs, 1, 136)["window"] == 40 * 64 * 528
    assert request_bytes(specs, 65, 136)["compressed"] == (3 * 1 + 2) * 64 * 288
    windows = [request_bytes(specs, tokens, 136)["window"] for tokens in (192, 193, 256, 10**6)]
    assert windows == [40 * n * 64 * 528 for n in (3, 4, 4, 4)]


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!http)([^)]+)\)", TEXT):
        assert (DOC.parent / link).exists(), link
    assert "(docs/integration.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
