"""A planted row is found among thousands, wherever it was written; and thousands of equal scores are no trouble.

Perplexity does not see an error of sparse selection, so retrieval is tested by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.hal.types import AttnInputs, AttnOutput, LayerState, Selection, StepPlan
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.tensors import layer_tensors
from dsv41.topology import layer_specs
from dsv41.verify import Trace

from .toys import TOY, signs

CONFIG = replace(
    TOY,
    num_hidden_layers=3,
    num_attention_heads=2,
    o_groups=1,
    index_topk=16,
    compress_ratios=(2, 1, 1),
    kv_source_layer_ids=(0, 1),
    index_source_layer_ids=(0, 1, 2),
    candidate_source_layer_id=1,
    candidate_topk_blocks=8,
    candidate_block_size=8,
    max_position_embeddings=1 << 17,
)
"""A source of ratio 2; one of ratio 1 that publishes candidates, and an indexer that reads them."""
HALF = CONFIG.hidden_size // 2


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def pick(rows: Tensor, columns: int) -> Tensor:
    """A matrix whose row i takes input `rows[i]`."""
    return torch.nn.functional.one_hot(rows, columns).float()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The first half of a token's input is what it is asked for, the second half what it answers.

    Query and key are the first half of their tokens, so a token finds those with its own first half: dot products of
    32 signs, of which those of random tokens are far below 32. The output is the second half of the row attended to.
    """
    dim, index_dim, rank = CONFIG.head_dim, CONFIG.index_head_dim, CONFIG.q_lora_rank
    channel, half = torch.arange(dim), torch.arange(HALF)
    asked = pick(channel % 64, rank + HALF)[:, :rank] * (channel < 448)[:, None]
    key_dim = torch.arange(index_dim)
    made = {
        "wq_a": pick(half, 64),
        "wkv": pick(channel % 64, 64),
        "wq_b": torch.cat([asked] * CONFIG.num_attention_heads) * 8,
        "wo_a": pick(HALF + half, 2 * dim),
        "wo_b": torch.eye(64)[:, :HALF],
        "attn_sink": torch.zeros(CONFIG.num_attention_heads),
        "compressor.wkv": pick(channel % 64, 64),
        "compressor.wgate": torch.zeros(dim, 64),
        "indexer.wq_b": torch.cat([pick(key_dim % rank, rank)] * CONFIG.index_n_heads),
        "indexer.weights_proj": torch.cat((torch.ones(CONFIG.index_n_heads, 1), torch.zeros(2, 63)), dim=1),
        "indexer.wk": pick(key_dim % rank, dim),
        "indexer.k_norm": (key_dim < 64).float(),  # nothing in the dims that turn with the position
    }
    tensors = {}
    for spec in layer_specs(CONFIG):
        for name, info in layer_tensors(CONFIG, spec).items():
            tensors[info.name] = made.get(name, torch.ones(info.shape)).reshape(info.shape).contiguous()
    path: Path = tmp_path_factory.mktemp("retrieval")
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    return load_checkpoint(path)


def haystack(tokens: int, needle: int) -> tuple[Tensor, Tensor]:
    """`[tokens, 64]` of random signs, with a needle in the pair at `needle` and the question at the end; the answer.

    The first sign, which weighs the index heads, is the same for all.
    """
    hidden = signs(tokens, 64, seed=tokens + needle)
    hidden[:, 0] = 1
    hidden[needle + 1] = hidden[needle]
    hidden[-1, :HALF] = hidden[needle, :HALF]
    return hidden, hidden[needle, HALF:].clone()


def each_layer(hidden: Tensor) -> Tensor:
    return hidden.expand(CONFIG.num_hidden_layers, *hidden.shape)


@pytest.mark.parametrize("needle", [0, 10, 254, 1500, 2030])
def test_fr_56_a_needle_is_found_in_whatever_chunk_it_came(checkpoint: Checkpoint, needle: int) -> None:
    """Prefill in chunks, the question in a decode step: index keys and compressed rows of all chunks are there."""
    hidden, answer = haystack(2049, needle)
    stack = AttentionStack(checkpoint, ReferenceBackend(), max_len=4096)
    session = Session(stack, max_requests=1, max_tokens=2049, max_step_tokens=2049)
    request, trace = session.add_request(), Trace()
    session.prefill(request, each_layer(hidden[:2040]), chunk=256)
    session.prefill(request, each_layer(hidden[2040:2048]), chunk=1)
    found = session.step({request: each_layer(hidden[2048:])}, tap=trace)[request]
    for layer, row in ((0, needle // 2), (1, needle), (2, needle)):
        assert row in trace.selection_of("chosen", layer, 0).topk_indices[0], layer
        assert torch.equal(found[layer, 0, :HALF].sign(), answer), layer


def test_a_missing_row_would_show(checkpoint: Checkpoint) -> None:
    """What the tests here are worth: without the needle in the selection the answer is another."""
    hidden, answer = haystack(513, 10)

    class Lose(Trace):
        def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
            rows = selection.topk_indices
            lost = rows // (1 if layer.spec.ratio == 2 else 2) == 5
            return replace(selection, topk_indices=torch.where(lost, -1, rows))

    session = Session(AttentionStack(checkpoint, ReferenceBackend(), max_len=4096))
    found = session.step({session.add_request(): each_layer(hidden)}, tap=Lose())[0]
    assert not any(torch.equal(found[layer, -1, :HALF].sign(), answer) for layer in range(3))


class WritesOnly(ReferenceBackend):
    """Fills every cache while a prompt comes in, but neither scores, at the square of its length, nor attends."""

    def forward_mqa(
        self, inputs: AttnInputs, layer: LayerState, selection: Selection | None, plan: StepPlan, out: AttnOutput
    ) -> None:
        if plan.batch.num_tokens == 1:
            super().forward_mqa(inputs, layer, selection, plan, out)
        else:
            out.data.zero_()

    def select(self, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None) -> Selection:
        if plan.batch.num_tokens == 1:
            return super().select(inputs, layer, plan, published)
        if layer.spec.owns_compressed:
            self._insert_index_keys(inputs, layer, plan)
        return Selection(torch.full((plan.batch.num_tokens, 0), -1))


def test_fr_59_a_needle_at_the_start_is_found_at_64k_positions(checkpoint: Checkpoint) -> None:
    tokens, needle = 1 << 16, 0
    hidden, answer = haystack(tokens + 1, needle)
    stack = AttentionStack(checkpoint, WritesOnly(), max_len=tokens + 1)
    session = Session(stack, max_requests=1, max_tokens=tokens + 1, max_step_tokens=8192)
    request, trace = session.add_request(), Trace()
    session.prefill(request, each_layer(hidden[:-1]), chunk=8192)
    found = session.step({request: each_layer(hidden[-1:])}, tap=trace)[request]
    for layer, row in ((0, needle // 2), (1, needle), (2, needle)):
        assert row in trace.selection_of("chosen", layer, 0).topk_indices[0], layer
        assert torch.equal(found[layer, 0, :HALF].sign(), answer), layer


@pytest.mark.parametrize("chunk", [3000, 700])
def test_fr_53_thousands_of_equal_scores_choose_the_oldest_rows(checkpoint: Checkpoint, chunk: int) -> None:
    """Head weights of zero make every score exactly zero: of ordinary length, since a ReLU cuts whole rows to zero."""
    stack = AttentionStack(checkpoint, ReferenceBackend(), max_len=4096)
    for layer in stack.layers:
        indexer = layer.state.weights.indexer
        assert indexer is not None
        zero = replace(indexer, weights_proj=torch.zeros_like(indexer.weights_proj))
        layer.state.weights = replace(layer.state.weights, indexer=zero)
    tokens = 3000
    session = Session(stack, max_requests=1, max_tokens=tokens, max_step_tokens=tokens)
    request, trace, blocks = session.add_request(), Trace(), list[Tensor]()

    class Candidates(Trace):
        def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
            if layer.spec.publishes_candidates:
                assert selection.candidates is not None
                width = CONFIG.candidate_topk_blocks - selection.candidates.shape[1]
                blocks.append(torch.nn.functional.pad(selection.candidates, (0, width), value=-1))
            return trace.selection(layer, plan, selection)

    for part in signs(tokens, 64).split(chunk):
        session.step({request: each_layer(part)}, tap=Candidates())
    position = torch.arange(tokens)[:, None]
    for layer, ratio in ((0, 2), (1, 1), (2, 1)):
        row = torch.arange(CONFIG.index_topk)
        expected = torch.where(row < (position + 1) // ratio, row, -1)
        assert torch.equal(trace.selection_of("chosen", layer, 0).topk_indices, expected)
    block, newest = torch.arange(8), position // 8
    expected = torch.where(newest < 8, torch.where(block <= newest, block, -1), torch.where(block < 7, block, newest))
    assert torch.equal(torch.cat(blocks), expected)
