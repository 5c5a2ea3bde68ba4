"""Synthetic checkpoints: the release's format and geometry, with the statistics that real weights have.

Small uniform random weights reach neither the ranges nor the block scales of real ones, so a kernel can be exact on
them and wrong on the release. These have outlier channels, in rows and in columns; block scales over many powers of
two, extremes included; norm weights around 1 with outliers; sinks that matter. They are tame where it counts: hidden
states around N(0, 1) give outputs of order 1.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv41.checkpoint_files import INDEX
from dsv41.config import DeepseekV41Config, QuantizationConfig, YarnScaling
from dsv41.errors import CheckpointError, InputError
from dsv41.fp8 import dequantize_blocks
from dsv41.hal.codecs import Dialect, decode_e4m3, encode_e4m3
from dsv41.hal.types import BlockScaledWeight
from dsv41.shards import ITEM_BYTES, write_shard, writing
from dsv41.tensors import BLOCK, TensorInfo, layer_tensors
from dsv41.topology import layer_specs

_TAGS = {torch.float32: "F32", torch.bfloat16: "BF16"}
_SIGMA = 100.0  # in units of the scale: the largest of a block's 1024 codes then fills the upper half of e4m3's range
_OUTLIERS_EVERY = 512
_GAIN = {"wq_b": 2.0, "wo_a": 1.5, "wo_b": 1.5, "compressor.wgate": 1.5}  # over 1 / sqrt(inputs)


def small_config() -> DeepseekV41Config:
    """A model of a few MB that has every role: 8 layers of 256 hidden channels and 8 heads, and one draft layer."""
    return DeepseekV41Config(
        num_hidden_layers=8,
        hidden_size=256,
        num_attention_heads=8,
        q_lora_rank=128,
        o_groups=4,
        o_lora_rank=64,
        sliding_window=32,
        index_n_heads=4,
        index_topk=16,
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1, 0),
        kv_source_layer_ids=(1, 4),
        index_source_layer_ids=(1, 3, 4, 6),
        candidate_source_layer_id=4,
        candidate_topk_blocks=8,
        candidate_block_size=4,
        rope_scaling=YarnScaling(original_max_position_embeddings=4096),
        max_position_embeddings=65536,
        num_nextn_predict_layers=1,
    )


def make_checkpoint(
    path: str | Path,
    *,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    config: DeepseekV41Config | None = None,
    quantized: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    shards: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a synthetic checkpoint into the folder `path` and return it.

    `layers` chooses layers by id, each with the sources that it reads; None = all, draft layers too. The index names
    them, so that `load_checkpoint` needs no `layers`. `config` None = the release's geometry. With `quantized`,
    projections are fp8 with UE8M0 scales, as released; without, all weights are plain, in `dtype`. `shards` is the
    number of files, by default one a layer. `progress(done, total)` is told bytes. A layer's weights depend on `seed`
    and its own name only, and one tensor at a time is held in memory.

    Raises CheckpointError where `path` already holds a checkpoint or cannot be written, ConfigError for `layers`,
    InputError for the rest.
    """
    path = Path(path)
    if dtype not in _TAGS:
        raise InputError(f"dtype is {dtype}: expected torch.bfloat16 or torch.float32; choose one")
    if shards is not None and (type(shards) is not int or shards < 1):
        raise InputError(f"shards is {shards!r}: expected an integer of at least 1; give the number of files, or None")
    with writing(path):
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path} is a file: expected a folder, or a path to make one; choose another path")
        there = sorted(file.name for file in (*path.glob("*.safetensors*"), *path.glob("config.json")))
    if there:
        raise CheckpointError(
            f"{path} already holds {there[0]}: expected no checkpoint there; remove it, or choose another"
        )
    config = replace(config or DeepseekV41Config(), quantization_config=QuantizationConfig() if quantized else None)
    everything = [*range(config.num_hidden_layers), *config.draft_layer_ids]
    specs = layer_specs(config, layers=everything if layers is None else layers)
    maker = _Maker(seed, quantized, dtype)
    per_layer = [list(layer_tensors(config, spec).items()) for spec in specs]
    files = per_layer if shards is None else _deal([item for layer in per_layer for item in layer], shards, maker)
    total = sum(maker.bytes_of(info) for file in files for _, info in file)

    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    done = 0
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        stored = {stored: what for _, info in tensors for stored, what in maker.stored(info).items()}
        weight_map |= dict.fromkeys(stored, name)

        def data(tensors: list[tuple[str, TensorInfo]] = tensors) -> Iterator[memoryview]:
            nonlocal done
            for key, info in tensors:
                for part in maker.make(key, info):
                    yield part.contiguous().flatten().view(torch.uint8).numpy().data
                done += maker.bytes_of(info)
                if progress is not None:
                    progress(done, total)

        write_shard(path / name, stored, data())
    metadata = {"total_size": total, "layers": [spec.layer_id for spec in specs]}
    _write_json(path / INDEX, {"metadata": metadata, "weight_map": weight_map})
    text = config.to_dict()
    outer = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "text_config": text}
    if quantized:
        outer["quantization_config"] = text.pop("quantization_config")
    _write_json(path / "config.json", outer)  # last: a folder without it is no checkpoint yet
    return path


def _write_json(file: Path, data: object) -> None:
    with writing(file):
        file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _deal(tensors: list[tuple[str, TensorInfo]], shards: int, maker: _Maker) -> list[list[tuple[str, TensorInfo]]]:
    """Runs of tensors of about the same bytes; never an empty one, so there may be fewer than `shards`."""
    total = sum(maker.bytes_of(info) for _, info in tensors)
    runs: list[list[tuple[str, TensorInfo]]] = [[] for _ in range(shards)]
    done = 0
    for key, info in tensors:
        runs[done * shards // total].append((key, info))
        done += maker.bytes_of(info)
    return [run for run in runs if run]


class _Maker:
    """Makes tensors from a seed and their names."""

    def __init__(self, seed: int, quantized: bool, dtype: torch.dtype) -> None:
        self.seed, self.quantized, self.dtype = seed, quantized, dtype

    def stored(self, info: TensorInfo) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (type, shape) of what the file holds for a weight."""
        if self.quantized and info.kind == "projection":
            return {info.name: ("F8_E4M3", info.shape), info.scale_name: ("F8_E8M0", info.scale_shape)}
        # The release may keep the compressors in F32.
        wide = info.kind == "sink" or (self.quantized and info.kind == "kept" and len(info.shape) == 2)
        return {info.name: ("F32" if wide else _TAGS[self.dtype], info.shape)}

    def bytes_of(self, info: TensorInfo) -> int:
        return sum(ITEM_BYTES[tag] * math.prod(shape) for tag, shape in self.stored(info).values())

    def make(self, key: str, info: TensorInfo) -> list[Tensor]:
        """What `stored` names, in its order."""
        noise = _Noise(f"{self.seed}:{info.name}")
        tag, _ = self.stored(info)[info.name]
        dtype = torch.float32 if tag == "F32" else torch.bfloat16
        if info.kind == "sink":
            return [2 + 1.5 * noise.normal(info.shape)]
        if len(info.shape) == 1:
            return [((1 + 0.2 * noise.normal(info.shape)) * noise.gains(info.shape[0], (2, 3), every=128)).to(dtype)]
        std = _GAIN.get(key, 1.0) / math.sqrt(info.shape[1])
        if info.kind != "projection":
            gains = noise.gains(info.shape[1], (4, 5))
            return [(noise.normal(info.shape) * gains * (std / _rms(gains))).to(dtype)]
        weight = _block_scaled(noise, info.shape, std)
        return [weight.data, weight.scale] if self.quantized else [dequantize_blocks(weight, dtype)]


def _block_scaled(noise: _Noise, shape: tuple[int, ...], std: float) -> BlockScaledWeight:
    """Normal weights of about `std`, made as codes and exponents: many times faster than quantising numbers."""
    rows, cols = shape
    codes = noise.codes(shape)
    row_gains, col_gains = noise.gains(rows, (4, 5)), noise.gains(cols, (4, 5))
    # Two of three blocks have the same exponent, and fewer and fewer lie further below, down to 2 ** -18 of it.
    spread = noise.normal((-(-rows // BLOCK), -(-cols // BLOCK))).square().int()
    exponent = round(math.log2(std / _SIGMA / _rms(col_gains))) - spread
    exponent += _widen_blocks(codes, row_gains)[:, None] + _widen_blocks(codes.T, col_gains)
    scale = (exponent + 127).to(torch.uint8)
    _add_extremes(noise, codes, scale)
    return BlockScaledWeight(codes.view(torch.float8_e4m3fn), scale, (BLOCK, BLOCK))


def _widen_blocks(codes: Tensor, gains: Tensor) -> Tensor:
    """Multiply rows of codes by their gains, in place, less what each row of blocks gets as the exponent returned.

    The outlier of a block sets its scale, so the other channels of the block keep fewer bits: as in real weights.
    """
    exponent = torch.zeros(-(-len(gains) // BLOCK), dtype=torch.int32)
    for block in sorted({int(i) // BLOCK for i in (gains > 1).nonzero()}):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        top = gains[part].max()
        exponent[block] = int(top.log2())
        codes[part] = encode_e4m3(decode_e4m3(codes[part], Dialect.OCP) * (gains[part] / top)[:, None], Dialect.OCP)
    return exponent


def _add_extremes(noise: _Noise, codes: Tensor, scale: Tensor) -> None:
    """Give a few blocks scales so small that they add nothing, down to 2 ** -127, and a few scales up to 2 ** 7 over a
    diagonal of the smallest codes."""
    count = max(1, scale.numel() // 1024)
    for row, col in noise.blocks(scale.shape, count):
        scale[row, col] = noise.integer(61)
    for row, col in noise.blocks(scale.shape, count):
        scale[row, col] = 127 + noise.integer(8)
        block = codes[row * BLOCK : (row + 1) * BLOCK, col * BLOCK : (col + 1) * BLOCK]
        block.zero_().diagonal().fill_(1)


def _rms(gains: Tensor) -> float:
    return float(gains.square().mean().sqrt())


@cache
def _quantiles() -> Tensor:
    """The standard normal distribution as 65536 equally likely numbers."""
    quantiles: Tensor = torch.special.ndtri((torch.arange(65536, dtype=torch.float64) + 0.5) / 65536)
    return quantiles.float()


@cache
def _code_table() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return encode_e4m3(_quantiles() * _SIGMA, Dialect.OCP).numpy()


class _Noise:
    """Random numbers that depend on a name only. Raw bits and tables, since numpy may change its distributions."""

    def __init__(self, name: str) -> None:
        self._bits = np.random.PCG64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little"))

    def _raw16(self, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint16]]:
        count = math.prod(shape)
        raw: np.ndarray[Any, np.dtype[np.uint16]] = self._bits.random_raw(-(-count // 4)).view(np.uint16)
        return raw[:count].reshape(shape)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """float32, standard normal."""
        return torch.from_numpy(_quantiles().numpy()[self._raw16(shape)])

    def codes(self, shape: tuple[int, ...]) -> Tensor:
        """uint8 e4m3 codes of normal numbers of standard deviation `_SIGMA`."""
        return torch.from_numpy(_code_table()[self._raw16(shape)])

    def integer(self, end: int) -> int:
        return int(self._bits.random_raw()) % end

    def blocks(self, grid: tuple[int, ...], count: int) -> list[tuple[int, int]]:
        return [(self.integer(grid[0]), self.integer(grid[1])) for _ in range(count)]

    def gains(self, size: int, exponents: tuple[int, ...], every: int = _OUTLIERS_EVERY) -> Tensor:
        """float32 `[size]`: 1, and a power of two with one of `exponents` for one channel in `every` (at least one)."""
        gains = torch.ones(size)
        for _ in range(max(1, size // every)):
            gains[self.integer(size)] = 2.0 ** exponents[self.integer(len(exponents))]
        return gains
