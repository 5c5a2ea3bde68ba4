"""Which tensors the checkpoint holds for a layer: names, shapes, types, and how ranks share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsv41.config import DeepseekV41Config
from dsv41.hal.types import LayerSpec

BLOCK = 32
"""Rows and columns of a weight block that has one scale."""


@dataclass(frozen=True)
class TensorInfo:
    """One weight as the checkpoint stores it, over all ranks.

    A `projection` is fp8 with a `.scale` beside it, or plain where the config has no `quantization_config`; a `linear`
    is plain; a `kept` tensor is used in the type it is stored in; a `sink` is always F32. `shard_dim` is the dimension
    that tensor-parallel ranks split evenly, None = every rank reads all of it.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["projection", "linear", "kept", "sink"]
    shard_dim: int | None = None

    @property
    def scale_name(self) -> str:
        return self.name.removesuffix("weight") + "scale"

    @property
    def scale_shape(self) -> tuple[int, ...]:
        return tuple(-(-size // BLOCK) for size in self.shape)


def layer_tensors(config: DeepseekV41Config, spec: LayerSpec) -> dict[str, TensorInfo]:
    """The tensors of a layer, in file order, keyed by their place in `LayerWeights` (such as "compressor.wkv")."""
    hidden, q_rank, dim = config.hidden_size, config.q_lora_rank, config.head_dim
    heads = config.num_attention_heads
    group = heads * dim // config.o_groups
    o_width = config.o_groups * config.o_lora_rank
    index_width = config.index_n_heads * config.index_head_dim
    found: dict[str, TensorInfo] = {}

    def add(key: str, kind: Literal["projection", "linear", "kept"], *shape: int, shard_dim: int | None = None) -> None:
        found[key] = TensorInfo(f"{spec.name}.{key}.weight", shape, kind, shard_dim)

    add("wq_a", "projection", q_rank, hidden)
    add("q_norm", "kept", q_rank)
    add("wq_b", "projection", heads * dim, q_rank, shard_dim=0)
    add("wkv", "projection", dim, hidden)
    add("kv_norm", "kept", dim)
    add("wo_a", "projection", o_width, group, shard_dim=0)
    add("wo_b", "projection", hidden, o_width, shard_dim=1)
    found["attn_sink"] = TensorInfo(f"{spec.name}.attn_sink", (heads,), "sink", 0)
    if spec.owns_compressed:
        add("compressor.wkv", "kept", dim, hidden)
        add("compressor.norm", "kept", dim)
        if spec.ratio > 1:
            add("compressor.wgate", "kept", dim, hidden)
    if spec.owns_selection:
        add("indexer.wq_b", "projection", index_width, q_rank)
        add("indexer.weights_proj", "linear", config.index_n_heads, hidden)
        if spec.owns_compressed:
            add("indexer.wk", "linear", config.index_head_dim, dim)
            add("indexer.k_norm", "kept", config.index_head_dim)
    return found
