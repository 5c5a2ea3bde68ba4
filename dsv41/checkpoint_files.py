"""The files of a checkpoint folder: which shard holds a tensor, and what its header says of it."""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from dsv41.config import DeepseekV41Config
from dsv41.errors import CheckpointError
from dsv41.hal.types import LayerSpec
from dsv41.shards import Entry, read_header
from dsv41.tensors import TensorInfo
from dsv41.topology import layer_specs

INDEX = "model.safetensors.index.json"
_PLAIN = ("BF16", "F32")
_SCALES = ("F8_E8M0", "U8", "F32")


class CheckpointFiles:
    """The files of a checkpoint: which shard holds a tensor, and what its header says of it."""

    def __init__(self, path: Path, config: DeepseekV41Config) -> None:
        self.path, self.config = path, config
        self.index = _read_index(path / INDEX) if (path / INDEX).exists() else None
        self._headers: dict[Path, dict[str, Entry]] = {}

    @cached_property
    def shard_of(self) -> dict[str, Path]:
        """Tensor name -> file, from the index, or from the headers where there is no index."""
        if self.index is not None:
            return {name: self.path / file for name, file in self.index["weight_map"].items()}
        found: dict[str, Path] = {}
        for file in _find_shards(self.path):
            for name in self.header(file):
                if name in found:
                    raise CheckpointError(
                        f"tensor {name} is in {found[name].name} and in {file.name}: expected it once; remove a shard, "
                        f"or add {INDEX}"
                    )
                found[name] = file
        return found

    def header(self, file: Path) -> dict[str, Entry]:
        if file not in self._headers:
            if not file.is_file():
                raise CheckpointError(
                    f"{INDEX} names the shard {file.name}, which {self.path} lacks: expected every shard; fetch it"
                )
            self._headers[file] = read_header(file)
        return self._headers[file]

    def entry(self, name: str) -> Entry:
        """What the header says of a tensor that `shard_of` has."""
        file = self.shard_of[name]
        header = self.header(file)
        if name not in header:
            raise CheckpointError(
                f"tensor {name} is missing from {file.name}, where {INDEX} places it: expected it there; fetch both"
            )
        return header[name]

    def default_layers(self) -> list[int] | None:
        """The layers that the checkpoint was made of, where its index says so; None = all."""
        if self.index is not None and "layers" in self.index.get("metadata", {}):
            listed = self.index["metadata"]["layers"]
            if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
                raise CheckpointError(
                    f"{INDEX} has metadata.layers {listed!r}: expected a list of layer ids; correct or remove it"
                )
            return [layer for layer in listed if layer not in self.config.draft_layer_ids] or listed
        absent = [spec.layer_id for spec in layer_specs(self.config) if not self._names(spec)]
        if absent and len(absent) < self.config.num_hidden_layers:
            present = [i for i in range(self.config.num_hidden_layers) if i not in absent]
            raise CheckpointError(
                f"{self.path} has no tensor of layer {absent[0]} ({len(absent)} layers of "
                f"{self.config.num_hidden_layers} are missing): expected all; fetch the missing shards, or load what "
                f"is there with layers={present}"
            )
        return None

    def check_layer(self, spec: LayerSpec, tensors: dict[str, TensorInfo]) -> None:
        """Raise CheckpointError unless every tensor of a layer is there, in shape and type."""
        for info in tensors.values():
            self._check_tensor(info)
        scales = {info.scale_name for info in tensors.values() if info.kind == "projection"}
        for name in self._names(spec):
            if name.endswith(".scale") and name not in scales:
                raise CheckpointError(
                    f"scale {name} has no fp8 weight beside it: expected {name.removesuffix('scale')}weight in F8_E4M3 "
                    "with it; fetch the checkpoint again"
                )

    def ignored(self, specs: list[LayerSpec], tensors: dict[int, dict[str, TensorInfo]]) -> tuple[str, ...]:
        known = {name for layer in tensors.values() for info in layer.values() for name in (info.name, info.scale_name)}
        return tuple(name for spec in specs for name in self._names(spec) if name not in known)

    def _names(self, spec: LayerSpec) -> list[str]:
        return sorted(self._by_layer.get(spec.name, ()))

    @cached_property
    def _by_layer(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self.shard_of:
            found.setdefault(".".join(name.split(".", 3)[:3]), []).append(name)
        return found

    def _check_tensor(self, info: TensorInfo) -> None:
        quantized = info.kind == "projection" and self.config.quantization_config is not None
        scaled = info.kind == "projection" and info.scale_name in self.shard_of
        if info.name not in self.shard_of:
            what = f"; its scale {info.scale_name} is there without it" if scaled else ""
            raise CheckpointError(
                f"tensor {info.name} is missing from {self.path}{what}: expected {list(info.shape)}; fetch the shard "
                "that holds it, or correct config.json if the model has no such layer"
            )
        entry = self.entry(info.name)
        expected = ("F8_E4M3",) if quantized else ("F32",) if info.kind == "sink" else _PLAIN
        if entry.dtype not in expected:
            remedy = "use a checkpoint in the release's format"
            if entry.dtype == "F8_E4M3" and info.kind == "projection":
                remedy = "the config has no quantization_config, add the release's"
            elif quantized and entry.dtype in _PLAIN:
                remedy = "remove quantization_config from config.json if the weights are plain"
            raise CheckpointError(
                f"tensor {info.name} has dtype {entry.dtype}: expected {' or '.join(expected)}; {remedy}"
            )
        if entry.shape != info.shape:
            raise CheckpointError(
                f"tensor {info.name} has shape {list(entry.shape)}: expected {list(info.shape)} by config.json; "
                "correct the config, or fetch the checkpoint that it belongs to"
            )
        if quantized:
            self._check_scale(info)
        elif scaled:
            raise CheckpointError(
                f"scale {info.scale_name} belongs to a weight of dtype {entry.dtype}: expected F8_E4M3 under a scale; "
                "fetch the fp8 checkpoint with its quantization_config, or remove the scale"
            )

    def _check_scale(self, info: TensorInfo) -> None:
        if info.scale_name not in self.shard_of:
            raise CheckpointError(
                f"tensor {info.name} has no scale: expected {info.scale_name} of shape {list(info.scale_shape)} beside "
                "it; fetch the shard that holds it"
            )
        entry = self.entry(info.scale_name)
        if entry.dtype not in _SCALES:
            raise CheckpointError(
                f"scale {info.scale_name} has dtype {entry.dtype}: expected F8_E8M0 as in the release, or U8 bytes, or "
                "powers of two in F32; convert it"
            )
        if entry.shape != info.scale_shape:
            v4 = entry.shape == tuple(-(-size // 128) for size in info.shape)
            found = "one scale per 128x128 block, DeepSeek-V4's grid" if v4 else "another grid"
            raise CheckpointError(
                f"scale {info.scale_name} has shape {list(entry.shape)} ({found}): expected {list(info.scale_shape)}, "
                f"one per 32x32 block of {list(info.shape)}; use a checkpoint in DeepSeek-V4.1's format"
            )


def _read_index(file: Path) -> dict[str, Any]:
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror}): expected the index of the shards; check it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is not JSON ({error}): expected the index of the shards; fetch it again"
        ) from error
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise CheckpointError(f"{file} has no weight_map: expected an object of tensor names to shards; fetch it again")
    for name, shard in index["weight_map"].items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{file} places tensor {name} in {shard!r}: expected the name of a file beside it; fetch it again"
            )
    if not isinstance(index.get("metadata", {}), dict):
        raise CheckpointError(f"{file} has metadata {index['metadata']!r:.200}: expected an object; fetch it again")
    return index


def _find_shards(path: Path) -> list[Path]:
    """The shards of a folder without an index: `model.safetensors`, or a whole set of `model-1-of-N.safetensors`."""
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    shards = sorted(path.glob("model-*.safetensors"))
    numbers = [re.fullmatch(r"model-0*(\d+)-of-0*(\d+)\.safetensors", shard.name) for shard in shards]
    if not shards or not all(numbers):
        others = ", ".join(sorted(file.name for file in path.iterdir())[:8])
        raise CheckpointError(
            f"{path} has neither model.safetensors nor {INDEX} (it has {others}): expected safetensors shards; fetch "
            "them, or give the path of a checkpoint"
        )
    have = {int(match[1]) for match in numbers if match}
    total = max(int(match[2]) for match in numbers if match)
    if missing := sorted(set(range(1, total + 1)) - have):
        raise CheckpointError(
            f"{path} lacks the shards {missing} of {total}: expected all, since there is no {INDEX} to tell what they "
            "hold; fetch them"
        )
    return shards
