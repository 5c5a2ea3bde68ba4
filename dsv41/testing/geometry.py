"""The models that backends are checked on: small ones with every role of a layer."""

from __future__ import annotations

import tempfile
from functools import cache
from math import gcd
from pathlib import Path

import torch

from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.config import DeepseekV41Config, YarnScaling
from dsv41.synthetic import make_checkpoint

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

WINDOW_ONLY, SOURCE_2, INDEXER_2, SOURCE, READER, CONSUMER, DRAFT = 0, 1, 2, 3, 4, 5, 6
ROLES = {
    "window": WINDOW_ONLY,
    "source2": SOURCE_2,
    "indexer2": INDEXER_2,
    "source": SOURCE,
    "reader": READER,
    "consumer": CONSUMER,
    "draft": DRAFT,
}
"""Layer ids by role: window rows alone; a KV source of ratio 2; an index source on its keys; a KV source of ratio 1
that publishes candidates; an index source that is restricted to them; a layer that takes over a selection of ratio 1; a
draft layer."""


def small(heads: int) -> DeepseekV41Config:
    """Windows and selections of a few rows: cheap in an interpreter, and long requests are short."""
    return _config(heads, hidden_size=64, window=4, topk=4, blocks=3, block_size=2, index_heads=2)


def released_rows(heads: int) -> DeepseekV41Config:
    """The release's window and top-k over few hidden channels, for kernels that are built for these."""
    return _config(heads, hidden_size=256, window=128, topk=512, blocks=96, block_size=8, index_heads=32)


GEOMETRIES = {"small": small, "released-rows": released_rows}
"""In the order in which a backend is offered them."""


def _config(
    heads: int, *, hidden_size: int, window: int, topk: int, blocks: int, block_size: int, index_heads: int
) -> DeepseekV41Config:
    return DeepseekV41Config(
        num_hidden_layers=6,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        q_lora_rank=32,
        # Eight heads a group, as released; of fewer heads two groups where they can be shared out.
        o_groups=heads // 8 if heads % 8 == 0 else gcd(heads, 2),
        o_lora_rank=32,
        sliding_window=window,
        index_n_heads=index_heads,
        index_topk=topk,
        compress_ratios=(0, 2, 2, 1, 1, 1, 0),
        kv_source_layer_ids=(SOURCE_2, SOURCE),
        index_source_layer_ids=(SOURCE_2, INDEXER_2, SOURCE, READER),
        candidate_source_layer_id=SOURCE,
        candidate_topk_blocks=blocks,
        candidate_block_size=block_size,
        rope_scaling=YarnScaling(original_max_position_embeddings=4096),
        max_position_embeddings=65536,
        num_nextn_predict_layers=1,
    )


@cache
def checkpoint(geometry: str, heads: int, dtype: str, seed: int, device: torch.device) -> Checkpoint:
    """All layers of a model, with weights in fp8 of the statistics of real ones. Nobody may change them."""
    with tempfile.TemporaryDirectory(prefix="dsv41-check-") as folder:
        path = make_checkpoint(Path(folder) / "model", config=GEOMETRIES[geometry](heads), seed=seed)
        return load_checkpoint(path, device=device, dtype=DTYPES[dtype], layers=sorted(ROLES.values()))
