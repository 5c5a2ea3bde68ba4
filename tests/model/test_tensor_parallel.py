"""Shards of heads and output groups: their outputs sum to that of the whole layer, and all else is the same on each."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.checkpoint import load_checkpoint
from dsv41.errors import ConfigError, InputError
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.verify import Trace, relative_error

from ..wording import refused
from .toys import MAX_LEN, TOY, noise

TOKENS = 29
CONFIG = replace(TOY, num_attention_heads=8, o_groups=8, o_lora_rank=16)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32, 8 heads in 8 groups."""
    path = tmp_path_factory.mktemp("tp") / "toy"
    return make_checkpoint(path, config=CONFIG, quantized=False, dtype=torch.float32)


def stack_of(path: Path, rank: int, size: int) -> AttentionStack:
    backend = ReferenceBackend(kv_cache_dtype="float32", index_cache_dtype="float32")
    return AttentionStack(load_checkpoint(path, tp_rank=rank, tp_size=size), backend, max_len=MAX_LEN)


def serve(stack: AttentionStack, hidden: Tensor, tap: Trace | None = None) -> tuple[Session, Tensor]:
    """A prefill, a chunk and decode tokens."""
    session = Session(stack, max_requests=1, max_tokens=TOKENS)
    request, parts = session.add_request(), []
    for part in hidden.split([17, 7, *[1] * (hidden.shape[1] - 24)], dim=1):
        parts.append(session.step({request: part}, tap=tap)[request])
    return session, torch.cat(parts, dim=1)


@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_fr_73_shards_with_their_own_sinks_sum_to_the_whole(whole: Path, tp_size: int) -> None:
    hidden, stack = noise(CONFIG.num_hidden_layers, TOKENS, CONFIG.hidden_size), stack_of(whole, 0, 1)
    for layer in stack.layers:
        assert len(layer.state.weights.attn_sink.unique()) == 8
    _, expected = serve(stack, hidden)
    shards = [serve(stack_of(whole, rank, tp_size), hidden)[1] for rank in range(tp_size)]
    for layer in range(CONFIG.num_hidden_layers):
        found = torch.stack([shard[layer] for shard in shards])
        assert relative_error(found.sum(0), expected[layer]) <= 1e-5
        assert relative_error(found[0] * tp_size, expected[layer]) > 0.1


@pytest.mark.parametrize("heads", [4, 8, 16])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_fr_74_heads_by_groups_by_ranks_equal_the_whole_or_are_refused(tmp_path: Path, heads: int, groups: int) -> None:
    """A rank with half a group would project other heads' outputs, with every shape still valid."""
    if heads % groups:
        with refused(ConfigError, f"num_attention_heads is {heads}", f"o_groups {groups}"):
            replace(CONFIG, num_attention_heads=heads, o_groups=groups)
        return
    config = replace(CONFIG, num_attention_heads=heads, o_groups=groups, o_lora_rank=64 // groups)
    path = make_checkpoint(tmp_path / "toy", config=config, layers=[0, 1], quantized=False, dtype=torch.float32)
    hidden = noise(2, TOKENS, config.hidden_size)
    _, expected = serve(stack_of(path, 0, 1), hidden)
    for tp_size in (2, 3, 4, 8, 16):
        if groups % tp_size:
            with refused(ConfigError, f"tp_size is {tp_size}"):
                stack_of(path, 0, tp_size)
            continue
        shards = [serve(stack_of(path, rank, tp_size), hidden)[1] for rank in range(tp_size)]
        assert relative_error(sum(shards, torch.zeros(())), expected) <= 1e-5


def test_fr_75_caches_and_selections_are_the_same_on_every_rank(whole: Path) -> None:
    hidden = noise(CONFIG.num_hidden_layers, TOKENS, CONFIG.hidden_size)
    ranks = []
    for rank in range(2):
        trace = Trace()
        session, _ = serve(stack_of(whole, rank, 2), hidden, trace)
        ranks.append(
            (
                session.caches,
                [trace.selection_of("chosen", layer, 0).topk_indices for layer in CONFIG.index_source_layer_ids],
            )
        )
    (caches, topk), (other_caches, other_topk) = ranks
    assert all(torch.equal(a, b) for a, b in zip(topk, other_topk, strict=True))
    for layer, mine in caches.items():
        for a, b in zip(vars(mine).values(), vars(other_caches[layer]).values(), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert torch.equal(getattr(a, "data", a), getattr(b, "data", b))


def test_a_rank_has_no_residual_stream_of_its_own(whole: Path) -> None:
    """Its outputs are partial sums, and this package does no collectives."""
    session = Session(stack_of(whole, 1, 2), max_requests=1, max_tokens=TOKENS)
    request = session.add_request()
    with refused(InputError, "[3, 64]", "4 of the model's 8 heads", "partial sum", "all-reduce"):
        session.step({request: noise(3, CONFIG.hidden_size)})
    assert session.length(request) == 0


WORKER = """
    import sys
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from dsv41.backends.reference.backend import ReferenceBackend
    from dsv41.checkpoint import load_checkpoint
    from dsv41.hal.types import ForwardBatch
    from dsv41.session import Session
    from dsv41.stack import AttentionStack

    torch.set_grad_enabled(False)
    path, rank, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=2)
    backend = ReferenceBackend(kv_cache_dtype="float32", index_cache_dtype="float32")
    stack = AttentionStack(load_checkpoint(path, tp_rank=rank, tp_size=2), backend, max_len=64)
    hidden, stream = torch.load(out / "inputs.pt")

    # Each layer its own input, in chunks; one sum at the end.
    session = Session(stack, max_requests=1, max_tokens=64)
    request = session.add_request()
    parts = [session.step({request: part})[request] for part in hidden.split([17, 7, 1, 1, 3], dim=1)]
    outputs = torch.cat(parts, dim=1)
    dist.all_reduce(outputs)

    # A residual stream, layer by layer with a sum after each, as an engine runs it.
    session.free(request)
    session.stack.bind(session.caches)
    page = torch.zeros(1, 1, dtype=torch.int32)
    batch = ForwardBatch.from_host(
        query_lens=[len(stream)],
        seq_lens=[len(stream)],
        window_pages=page,
        window_page_size=64,
        compressed_pages={1: page, 2: page},
        compressed_page_size={1: 64, 2: 64},
    )
    plan, published = backend.plan(batch, stack.specs), None
    for layer in stack.layers:
        output, published = layer.forward(stream, plan, published)
        dist.all_reduce(output)
        stream = stream + output
    torch.save((outputs, stream), out / f"rank{rank}.pt")
    dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_two_processes_reduce_to_one(whole: Path, tmp_path: Path) -> None:
    """Rank by rank in processes of their own, summed by all-reduce over gloo."""
    hidden, stream = noise(CONFIG.num_hidden_layers, TOKENS, CONFIG.hidden_size), noise(TOKENS, CONFIG.hidden_size)
    torch.save((hidden, stream), tmp_path / "inputs.pt")
    command = [sys.executable, "-c", textwrap.dedent(WORKER), str(whole)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
    stack = stack_of(whole, 0, 1)
    _, expected = serve(stack, hidden)
    session = Session(stack, max_requests=1, max_tokens=TOKENS)
    expected_stream = session.step({session.add_request(): stream})[0]
    for rank in range(2):
        outputs, found_stream = torch.load(tmp_path / f"rank{rank}.pt")
        for layer in range(CONFIG.num_hidden_layers):
            assert relative_error(outputs[layer], expected[layer]) <= 1e-5
        assert relative_error(found_stream, expected_stream) <= 1e-5
