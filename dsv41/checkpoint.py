"""Loading one tensor-parallel shard of a checkpoint: only the bytes that it needs, checked before they are used."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv41.checkpoint_files import CheckpointFiles
from dsv41.config import DeepseekV41Config
from dsv41.errors import CheckpointError, ConfigError, InputError
from dsv41.fp8 import scale_bytes
from dsv41.hal.codecs import count_nan
from dsv41.hal.types import BlockScaledWeight, CompressorWeights, IndexerWeights, LayerSpec, LayerWeights, Weight
from dsv41.tensors import BLOCK, TensorInfo, layer_tensors
from dsv41.topology import check_tp_size, layer_specs

_PLAIN = {"BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True)
class Checkpoint:
    """The attention weights of some layers on one rank.

    `weights` is keyed by layer id; `specs` has the same layers in ascending order. `dtype` is what activations are
    computed in, and `bytes_read` what was read of the tensors. `ignored` names tensors of these layers that V4.1's
    attention does not have.
    """

    config: DeepseekV41Config
    weights: dict[int, LayerWeights]
    specs: list[LayerSpec]
    path: Path
    dtype: torch.dtype
    bytes_read: int
    ignored: tuple[str, ...] = field(default=(), repr=False)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """Every weight on this rank with its checkpoint name."""
        for spec in self.specs:
            for key, info in layer_tensors(self.config, spec).items():
                value: Any = self.weights[spec.layer_id]
                for attribute in key.split("."):
                    value = getattr(value, attribute)
                yield info.name, value

    def find_nan(self) -> list[tuple[str, int]]:
        """The weights that hold NaN and how many, counting fp8 NaN codes and elements under a NaN scale."""
        counts = (
            (name, count_nan(value) if isinstance(value, BlockScaledWeight) else int(value.isnan().sum()))
            for name, value in self.tensors()
        )
        return [(name, count) for name, count in counts if count]


def load_checkpoint(
    path: str | Path,
    *,
    layers: Sequence[int] | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Checkpoint:
    """Load the attention weights of a checkpoint folder, one tensor-parallel shard of them.

    `layers` chooses layers by id (draft layer M is `num_hidden_layers + M`); None = every target layer, or those that
    the checkpoint says it was made of. Projections stay fp8 with their scale bytes. Of query heads and output groups
    only the rank's rows and columns are read; the rest is replicated. `dtype` is what activations are computed in:
    by default float32 where the projections are F32, else bfloat16; projections that are stored plain are converted.

    Raises ConfigError for the configuration, `layers` or `tp_size`; CheckpointError, naming the tensor, for a tensor
    or file that is missing, truncated, or of another shape, type or format; InputError for a bad rank, device or dtype.
    """
    path = Path(path)
    if dtype not in (None, torch.float32, torch.bfloat16):
        raise InputError(f"dtype is {dtype}: expected torch.float32 or torch.bfloat16; choose one, or None")
    device = _usable(device)
    if not os.path.isdir(path):  # False, too, where the name is too long to ask
        raise CheckpointError(
            f"{path} is {'a file' if os.path.exists(path) else 'missing'}: expected a folder with config.json and "
            "safetensors shards; give the path of a checkpoint"
        )
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} has no config.json: expected one beside the safetensors shards; fetch it, or give the path of a "
            "checkpoint"
        )
    config = DeepseekV41Config.from_json(path / "config.json")
    check_tp_size(config, tp_size)
    if type(tp_rank) is not int or not 0 <= tp_rank < tp_size:
        raise InputError(f"tp_rank is {tp_rank!r}: expected 0 to {tp_size - 1} with tp_size {tp_size}; give the rank")
    files = CheckpointFiles(path, config)
    specs = layer_specs(config, tp_size=tp_size, layers=files.default_layers() if layers is None else layers)
    # Everything that the headers can tell is checked before a byte of a tensor is read.
    tensors = {spec.layer_id: layer_tensors(config, spec) for spec in specs}
    for spec in specs:
        files.check_layer(spec, tensors[spec.layer_id])
    projections = [info for layer in tensors.values() for info in layer.values() if info.kind == "projection"]
    if config.quantization_config is not None:
        _check_blocks(projections, tp_size)
    dtype = dtype or _activation_dtype(files, projections)
    loader = _Loader(files, tp_rank, tp_size, device, dtype)
    weights = {layer: _assemble({key: loader.load(info) for key, info in tensors[layer].items()}) for layer in tensors}
    return Checkpoint(config, weights, specs, path, dtype, loader.bytes_read, files.ignored(specs, tensors))


def _usable(device: torch.device | str) -> torch.device:
    """The device, once torch has allocated on it."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        # The first line: advice on debugging kernels may follow.
        said = str(error).splitlines()[0]
        raise InputError(
            f"device is {device!r}: expected one that this torch can use ({said:.200}); use 'cpu', or see `dsv41 probe`"
        ) from error
    return found


def _check_blocks(projections: list[TensorInfo], tp_size: int) -> None:
    """Refuse a split that would cut through a block, whose halves have one scale."""
    for info in projections:
        if tp_size > 1 and info.shard_dim is not None and (part := info.shape[info.shard_dim] // tp_size) % BLOCK:
            raise ConfigError(
                f"tp_size is {tp_size}, which gives each rank {part} rows or columns of {info.name}: expected whole "
                f"blocks of {BLOCK}, which share a scale; use a smaller tp_size"
            )


def _activation_dtype(files: CheckpointFiles, projections: list[TensorInfo]) -> torch.dtype:
    if files.config.quantization_config is not None:
        return torch.bfloat16
    stored = {files.entry(info.name).dtype: info.name for info in projections}
    if len(stored) > 1:
        found = " but ".join(f"{name} is {dtype}" for dtype, name in sorted(stored.items()))
        raise CheckpointError(
            f"{found}: expected projections of one type, in which activations are computed; choose one with dtype="
        )
    return _PLAIN[next(iter(stored))]


def _assemble(values: dict[str, Weight]) -> LayerWeights:
    nested: dict[str, dict[str, Any]] = {"": {}, "compressor": {}, "indexer": {}}
    for key, value in values.items():
        part, _, name = key.rpartition(".")
        nested[part][name] = value
    return LayerWeights(
        **nested[""],
        compressor=CompressorWeights(**nested["compressor"]) if nested["compressor"] else None,
        indexer=IndexerWeights(**nested["indexer"]) if nested["indexer"] else None,
    )


class _Loader:
    """Reads one rank's part of each tensor."""

    def __init__(
        self, files: CheckpointFiles, tp_rank: int, tp_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.files, self.tp_rank, self.tp_size, self.device, self.dtype = files, tp_rank, tp_size, device, dtype
        self.bytes_read = 0
        self._open: tuple[Path, Any] | None = None

    def load(self, info: TensorInfo) -> Weight:
        config = self.files.config
        if info.kind == "projection" and config.quantization_config is not None:
            data = self._read(info.name, info.shard_dim)
            return BlockScaledWeight(data, self._read_scale(info), config.quantization_config.weight_block_size)
        value = self._read(info.name, info.shard_dim)
        return value.to(self.dtype) if info.kind in ("projection", "linear") else value

    def _read_scale(self, info: TensorInfo) -> Tensor:
        scale = self._read(info.scale_name, info.shard_dim)
        if scale.dtype != torch.float32:
            return scale.view(torch.uint8)
        converted = scale_bytes(scale)
        if converted is None:
            raise CheckpointError(
                f"scale {info.scale_name} is F32 with values that are no powers of two: expected UE8M0 scales; "
                "quantise the weight again with 32x32 blocks and power-of-two scales"
            )
        return converted

    def _read(self, name: str, shard_dim: int | None) -> Tensor:
        """The rank's part of a tensor, on the device, in memory of its own (a slice alone still maps the file)."""
        part = [slice(None)] * len(self.files.entry(name).shape)
        if shard_dim is not None:
            size = self.files.entry(name).shape[shard_dim] // self.tp_size
            part[shard_dim] = slice(self.tp_rank * size, (self.tp_rank + 1) * size)
        try:
            view: Tensor = self._handle(self.files.shard_of[name]).get_slice(name)[tuple(part)]
            self.bytes_read += view.numel() * view.element_size()
            if self.device.type == "cpu":
                return view.clone(memory_format=torch.contiguous_format)
            return view.contiguous().to(self.device)
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"tensor {name} in {self.files.shard_of[name]} cannot be read ({error}): expected a whole safetensors "
                "file; fetch it again"
            ) from error

    def _handle(self, file: Path) -> Any:
        # One at a time: closing a shard gives back the memory that its pages took.
        if self._open is None or self._open[0] != file:
            self._open = (file, safe_open(file, framework="pt", device="cpu"))
        return self._open[1]
