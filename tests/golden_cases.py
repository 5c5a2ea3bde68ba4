"""The golden cases: what public implementations computed, with weights and inputs made again from a seed.

A case stores `config.json`, `case.json` (seed, tokens, type, SHA-256) and `golden.safetensors` (the outputs). Weights
and layer inputs are pseudo-random integers rounded once, the same on every machine, and checked against the SHA-256.
The small cases are in `golden/`; the wide ones are found through $DSV41_GOLDEN_DIR.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv41.config import DeepseekV41Config
from dsv41.shards import write_shard
from dsv41.tensors import TensorInfo, layer_tensors
from dsv41.topology import layer_specs

SMALL = Path(__file__).parent / "golden"
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_TAGS = {dtype: tag for tag, dtype in _DTYPES.items()} | {torch.int32: "I32", torch.bool: "BOOL"}

# Gain of the weights over 1 / sqrt(inputs); 1 where it is not listed.
_GAIN = {"wq_b": 2.0, "wo_a": 1.5, "wo_b": 1.5, "compressor.wgate": 1.5}


@dataclass(frozen=True)
class GoldenCase:
    """One sequence through a stack of layers, from position 0. `io` holds `layers.L.input` and what was computed."""

    name: str
    path: Path
    config: DeepseekV41Config
    tokens: int
    dtype: torch.dtype
    weights: dict[str, Tensor]
    io: dict[str, Tensor]

    @property
    def hidden(self) -> Tensor:
        """`[layers, tokens, hidden]`: each layer's own input."""
        return torch.stack([self.io[f"layers.{i}.input"] for i in range(self.config.num_hidden_layers)])


def case_dirs(pattern: str = "*") -> list[Path]:
    """The folders of all cases whose name matches, the wide ones only where $DSV41_GOLDEN_DIR is set."""
    roots = [SMALL, *map(Path, filter(None, [os.environ.get("DSV41_GOLDEN_DIR")]))]
    found = {path.parent.name: path.parent for root in reversed(roots) for path in root.glob(f"{pattern}/case.json")}
    return [found[name] for name in sorted(found)]


def load_case(path: Path) -> GoldenCase:
    """A case in memory, not checked against its SHA-256 (`expand` does that)."""
    case = json.loads((path / "case.json").read_text())
    config = DeepseekV41Config.from_json(path / "config.json")
    seed, tokens, dtype = case["seed"], case["tokens"], _DTYPES[case["tag"]]
    weights = {
        info.name: _weight(seed, key, info, dtype)
        for spec in layer_specs(config)
        for key, info in layer_tensors(config, spec).items()
    }
    names = [f"layers.{layer}.input" for layer in range(config.num_hidden_layers)]
    io = {name: bell_shaped(seed, name, (tokens, config.hidden_size)).to(dtype) for name in names}
    io |= load_file(path / "golden.safetensors")
    return GoldenCase(path.name, path, config, tokens, dtype, weights, io)


def expand(path: Path, out: Path) -> Path:
    """Write a case as a checkpoint: `out/<case>/` with config.json, model.safetensors and io.safetensors.

    Raises AssertionError where a file's SHA-256 is not the recorded one.
    """
    case, wanted = load_case(path), json.loads((path / "case.json").read_text())["sha256"]
    target = out / case.name
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path / "config.json", target / "config.json")
    for kind, tensors in (("model", case.weights), ("io", _in_stored_order(case))):
        file = target / f"{kind}.safetensors"
        described = {name: (_TAGS[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
        write_shard(file, described, (_bytes(tensor) for tensor in tensors.values()))
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        assert found == wanted[kind], f"{file} has SHA-256 {found}, the case records {wanted[kind]}"
    return target


def bell_shaped(seed: int, name: str, shape: tuple[int, ...], mean: float = 0.0, std: float = 1.0) -> Tensor:
    """float32 numbers of a named stream: four 16-bit fields of a counter's splitmix64 hash, added, centred, scaled."""
    key = np.frombuffer(hashlib.sha256(f"{seed}:{name}".encode()).digest(), dtype="<u8", count=1)[0]
    with np.errstate(over="ignore"):
        hashed = key + np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            hashed = (hashed ^ (hashed >> np.uint64(shift))) * np.uint64(factor)
        hashed ^= hashed >> np.uint64(31)
    fields = hashed.astype("<u8").view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int64)
    # 131070 is the mean of four fields and 37837.227 their standard deviation.
    values = mean + std * ((fields - 131070) / 37837.227)
    return torch.from_numpy(values.astype(np.float32).reshape(shape))


def _weight(seed: int, key: str, info: TensorInfo, dtype: torch.dtype) -> Tensor:
    if info.kind == "sink":
        return bell_shaped(seed, info.name, info.shape, 3.0, 1.5)
    if len(info.shape) == 1:
        return bell_shaped(seed, info.name, info.shape, 1.0, 0.2).to(dtype)
    return bell_shaped(seed, info.name, info.shape, 0.0, _GAIN.get(key, 1.0) / info.shape[1] ** 0.5).to(dtype)


def _in_stored_order(case: GoldenCase) -> dict[str, Tensor]:
    """`io` with the outputs in the order of the bytes in their file, which `load_file` does not keep."""
    with (case.path / "golden.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    inputs = {name: tensor for name, tensor in case.io.items() if name not in header}
    return inputs | {name: case.io[name] for name in header}


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
