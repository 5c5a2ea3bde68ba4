"""What holds of requests whatever the backend, on the portable one: small on a CPU, at length on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.borders import settle_window_rows
from dsv41.checkpoint import load_checkpoint
from dsv41.config import DeepseekV41Config
from dsv41.errors import BackendError
from dsv41.golden import TOLERANCE, Golden, GoldenTap
from dsv41.hal.backend import AttentionBackend
from dsv41.hal.select import select_backend
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.verify import Trace, compare_with_reference, relative_error

from ..golden_cases import case_dirs, expand
from .portables import DEVICE, portable
from .toys import MAX_LEN, TOY, Ledger, all_free, noise, quarter_turns, signs

GPU = DEVICE != "cpu"
RATIO_2, RATIO_1 = [1], [4, 5]
"""Layers that a test does with: a source of ratio 2; one of ratio 1 that publishes candidates, and one that reads them.
On a GPU, all layers."""


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def make_stack(
    path: Path, layers: list[int] | None, backend: AttentionBackend, dtype: torch.dtype = torch.float32
) -> AttentionStack:
    chosen = None if GPU else layers
    stack = AttentionStack(
        load_checkpoint(path, layers=chosen, device=backend.device, dtype=dtype), backend, max_len=MAX_LEN
    )
    quarter_turns(stack)
    return stack


def ledger(path: Path, layers: list[int], **limits: Any) -> Ledger:
    """Of a session and a straight run that share a stack."""
    stack = make_stack(path, layers, portable())
    return Ledger(Session(stack, page_size=4, **limits), stack)


# However it is cut


@pytest.mark.parametrize("layers", [RATIO_2, RATIO_1], ids=["ratio 2", "ratio 1"])
def test_any_chunks_give_what_one_prefill_gives_bit_for_bit(dyadic: Path, layers: list[int]) -> None:
    """Two requests side by side, padding, groups and pages that end anywhere, across the window and the top-k."""
    book = ledger(dyadic, layers, max_requests=2, max_draft=2)
    one, two = book.add(), book.add()
    steps = [{one: 5}, {one: 6, two: 1}, {two: 2, one: 1}, {one: 2}]
    for number, counts in enumerate(steps + [{one: 1, two: 3}] * (12 if GPU else 0)):
        book.step(counts, padding=2 if number == 1 else None)
    book.check(one)
    book.check(two)


def test_refused_drafts_leave_nothing_behind(dyadic: Path) -> None:
    """An odd length reopens a group of the compressor."""
    book = ledger(dyadic, RATIO_2, max_requests=1, max_draft=3)
    request = book.add()
    book.step({request: 4})
    for refused in (2, 3):
        book.step({request: 3})
        book.truncate(request, len(book.given[request]) - refused)
    book.step({request: 2})
    book.check(request)


def test_a_prefix_goes_on_from_shared_pages_or_from_a_replay(dyadic: Path) -> None:
    book = ledger(dyadic, RATIO_2, max_requests=3, max_draft=2)
    request = book.add()
    book.step({request: 10})
    shared = book.fork(request, 9)
    replayed = book.fork(request, 10, replay=book.hidden(book.given[request][2:10]))
    book.step({shared: 1, replayed: 2})
    for child in (shared, replayed):
        book.check(child)
        book.free(child)
    book.free(request)
    assert all_free(book.session)


@pytest.mark.parametrize("there", ["reference", "portable"])
def test_a_request_moves_between_backends(dyadic: Path, tmp_path: Path, there: str) -> None:
    """In the same layouts its bytes are the same, and it goes on as it would have."""
    backends: dict[str, AttentionBackend] = {"reference": ReferenceBackend(device=DEVICE), "portable": portable()}
    here = "portable" if there == "reference" else "reference"
    hidden = signs(7, 12, TOY.hidden_size).to(DEVICE)
    hidden = hidden if GPU else hidden[:1]
    stacks = {name: make_stack(dyadic, RATIO_2, backend) for name, backend in backends.items()}
    source, target = (Session(stacks[name], max_requests=1, max_tokens=32, page_size=4) for name in (here, there))
    request = source.add_request()
    source.step({request: hidden[:, :9]})
    exported = source.export_request(request, tmp_path / "request")
    moved = target.import_request(tmp_path / "request").request
    assert target.export_request(moved, tmp_path / "again").sha256 == exported.sha256
    expected = source.step({request: hidden[:, 9:]})[request]
    found = target.step({moved: hidden[:, 9:]})[moved]
    assert relative_error(found, expected) < 1e-6


# Other layers, other ranks, other weights


def test_a_draft_block_is_that_of_the_reference(tmp_path: Path) -> None:
    config = replace(TOY, num_nextn_predict_layers=1)
    path = make_checkpoint(tmp_path / "toy", config=config, layers=[7], quantized=False, dtype=torch.float32)
    target, block = noise(1, 11, config.hidden_size).to(DEVICE), noise(1, 5, config.hidden_size, seed=1).to(DEVICE)
    outputs = []
    for kind in (ReferenceBackend, None):
        dtypes = {"kv_cache_dtype": "float32", "index_cache_dtype": "float32"}
        backend = portable(**dtypes) if kind is None else kind(device=DEVICE, **dtypes)
        stack = AttentionStack(load_checkpoint(path, layers=[7], device=DEVICE), backend, max_len=MAX_LEN)
        session = Session(stack, max_requests=2, max_tokens=32)
        one, two = session.add_request(), session.add_request()
        session.insert_window({one: target, two: target[:, :2]})
        found = session.draft({one: block, two: block[:, :3]}, pad_to=9)
        assert session.length(one) == 11
        outputs.append(torch.cat([found[one], found[two]], dim=1))
    assert relative_error(outputs[1], outputs[0]) < 1e-5


def test_ranks_sum_to_the_whole(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "toy", config=TOY, layers=[0, 1], quantized=False, dtype=torch.float32)
    hidden = noise(2, 6, TOY.hidden_size).to(DEVICE)

    def serve(rank: int, size: int) -> torch.Tensor:
        backend = portable(kv_cache_dtype="float32", index_cache_dtype="float32")
        checkpoint = load_checkpoint(path, tp_rank=rank, tp_size=size, device=DEVICE)
        session = Session(AttentionStack(checkpoint, backend, max_len=MAX_LEN), max_requests=1, max_tokens=8)
        return session.step({session.add_request(): hidden})[0]

    assert relative_error(serve(0, 2) + serve(1, 2), serve(0, 1)) < 1e-5


# The vectors of others


def known_cases() -> list[Path]:
    """On a GPU all of them, otherwise the small one whose numbers bind closest."""
    return case_dirs() if GPU else case_dirs("tiny-float32")


@pytest.mark.parametrize("path", known_cases(), ids=lambda path: path.name)
def test_the_golden_vectors_are_met(path: Path, tmp_path: Path) -> None:
    """In a prefill and decode steps; on a CPU, the first tokens, past the window, the top-k and the candidates."""
    folder = expand(path, tmp_path)
    checkpoint = load_checkpoint(folder, device=DEVICE)
    golden = Golden(folder / "io.safetensors", checkpoint.specs, DEVICE)
    # Window rows that the file does not have are worked out by the reference.
    settled = settle_window_rows(AttentionStack(checkpoint, ReferenceBackend(device=DEVICE)), golden)
    stack = AttentionStack(load_checkpoint(folder, device=DEVICE), portable(), max_len=golden.tokens)
    tap = GoldenTap(golden, stack, settled)
    tokens = golden.tokens if GPU else 20
    session = Session(stack, max_requests=1, max_tokens=tokens, page_size=16)
    request = session.add_request()
    for start, stop in ((0, tokens - 3), (tokens - 3, tokens - 1), (tokens - 1, tokens)):
        session.step({request: golden.inputs[:, start:stop]}, tap=tap)
    result = tap.finish()
    assert result.failures == []
    assert result.max_relative_error <= TOLERANCE[stack.dtype]
    assert sorted(result.layers) == [spec.layer_id for spec in stack.specs]
    assert tokens >= stack.config.sliding_window or path.name.startswith("short")


# Chosen by name


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("kv", ["nvfp4_ds_mla", "fp8_ds_mla", "fp8_ds_mla_v4", "bfloat16", "fp8_e4m3", "float32"])
def test_a_selected_backend_agrees_with_the_reference_in_the_same_records(tmp_path: Path, kv: str) -> None:
    config: DeepseekV41Config = replace(TOY, num_attention_heads=16, o_groups=2)
    checkpoint = load_checkpoint(make_checkpoint(tmp_path / "toy", config=config), device="cuda")
    backend = select_backend("portable", config=config, kv_cache_dtype=kv)
    stack, trace = AttentionStack(checkpoint, backend, max_len=64, quantize_activations=True), Trace()
    session = Session(stack, max_requests=1, max_tokens=64)
    request = session.add_request()
    hidden = noise(7, 64, config.hidden_size).to("cuda", stack.dtype)
    for part in hidden.split([40, 20, 1, 1, 2], dim=1):
        session.step({request: part}, tap=trace)
    result = compare_with_reference(checkpoint, backend, trace, 1, prompt=40, quantize_activations=True)
    assert result.failures == []


@pytest.mark.skipif(GPU, reason="needs a machine without a GPU")
@pytest.mark.parametrize("by", ["argument", "DSV41_BACKEND"])
def test_without_a_gpu_it_is_refused_with_the_reason(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is for tests: minutes for what takes the reference a second."""
    monkeypatch.setenv("DSV41_BACKEND", "portable" if by == "DSV41_BACKEND" else "")
    with pytest.raises(BackendError, match="needs an NVIDIA GPU or an AMD GPU; this device is the CPU") as caught:
        select_backend("portable" if by == "argument" else None)
    assert "What can run this here: reference." in str(caught.value)
