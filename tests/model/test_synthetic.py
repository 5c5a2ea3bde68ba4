"""Synthetic checkpoints: the release's format, and the statistics that small uniform weights lack."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from dsv41.checkpoint import load_checkpoint
from dsv41.checkpoint_files import INDEX
from dsv41.config import DeepseekV41Config
from dsv41.errors import CheckpointError, ConfigError, InputError
from dsv41.fp8 import dequantize_blocks
from dsv41.hal.types import BlockScaledWeight
from dsv41.shards import write_shard
from dsv41.synthetic import make_checkpoint, small_config

from ..wording import refused

RELEASE_BASE = {
    "wq_a": ([1280, 5120], [40, 160]),
    "wq_b": ([32768, 1280], [1024, 40]),
    "wkv": ([512, 5120], [16, 160]),
    "wo_a": ([8192, 4096], [256, 128]),
    "wo_b": ([5120, 8192], [160, 256]),
}


def described(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Name -> (type, shape) of every tensor, as the files say."""
    found = {}
    for shard in sorted(path.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
    return found


def digest(path: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(path.iterdir()))).hexdigest()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 2 of the release's geometry: a KV source of ratio 2."""
    return make_checkpoint(tmp_path_factory.mktemp("release") / "layer2", layers=[2])


@pytest.fixture(scope="module")
def middle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 1, a KV source of ratio 2, of a model between the small one and the release."""
    config = replace(small_config(), hidden_size=1024, num_attention_heads=16, q_lora_rank=512, o_lora_rank=256)
    return make_checkpoint(tmp_path_factory.mktemp("middle") / "layer1", config=config, layers=[1])


def test_the_release_format(release: Path) -> None:
    """The table of the released checkpoint, typed by hand."""
    prefix = "layers.2.attn."
    wanted: dict[str, tuple[str, list[int]]] = {}
    for name, (shape, scale) in RELEASE_BASE.items():
        wanted[f"{prefix}{name}.weight"] = ("F8_E4M3", shape)
        wanted[f"{prefix}{name}.scale"] = ("F8_E8M0", scale)
    wanted[prefix + "indexer.wq_b.weight"] = ("F8_E4M3", [4096, 1280])
    wanted[prefix + "indexer.wq_b.scale"] = ("F8_E8M0", [128, 40])
    wanted[prefix + "attn_sink"] = ("F32", [64])
    wanted[prefix + "compressor.wkv.weight"] = ("F32", [512, 5120])
    wanted[prefix + "compressor.wgate.weight"] = ("F32", [512, 5120])
    for name, shape in {
        "q_norm": [1280],
        "kv_norm": [512],
        "compressor.norm": [512],
        "indexer.weights_proj": [32, 5120],
        "indexer.wk": [128, 512],
        "indexer.k_norm": [128],
    }.items():
        wanted[f"{prefix}{name}.weight"] = ("BF16", shape)
    assert described(release) == wanted

    config = json.loads((release / "config.json").read_text())
    assert config["text_config"]["hidden_size"] == 5120
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
    }
    assert DeepseekV41Config.from_json(release / "config.json") == DeepseekV41Config()
    index = json.loads((release / INDEX).read_text())
    assert set(index["weight_map"]) == set(wanted)
    assert index["metadata"]["layers"] == [2]


def test_which_layers_have_which_tensors(tmp_path: Path) -> None:
    names = described(make_checkpoint(tmp_path / "all", config=small_config()))

    def layers_with(suffix: str) -> list[str]:
        return sorted(name.removesuffix(f".attn.{suffix}") for name in names if name.endswith(f".attn.{suffix}"))

    assert layers_with("wq_a.scale") == [*(f"layers.{i}" for i in range(8)), "mtp.0"]
    assert layers_with("compressor.wkv.weight") == layers_with("indexer.wk.weight") == ["layers.1", "layers.4"]
    assert layers_with("compressor.wgate.weight") == ["layers.1"]
    assert layers_with("indexer.wq_b.scale") == ["layers.1", "layers.3", "layers.4", "layers.6"]


def matrix(weight: object) -> Tensor:
    return dequantize_blocks(weight) if isinstance(weight, BlockScaledWeight) else torch.as_tensor(weight).float()


def test_fr_118_weights_have_the_ranges_of_real_ones(middle: Path) -> None:
    """Outlier channels of 10 to 50 times the rest, block scales from 2**-127 up, norms around 1 with outliers."""
    loaded = load_checkpoint(middle)
    assert loaded.find_nan() == []
    lowest, highest = 255, 0
    for name, weight in loaded.tensors():
        if not isinstance(weight, BlockScaledWeight):
            continue
        values = matrix(weight)
        for channels in (values.square().mean(0).sqrt(), values.square().mean(1).sqrt()):
            outliers = channels / channels.median()
            assert 10 < float(outliers.max()) < 80, name
            assert float((outliers > 4).float().mean()) < 0.05, name
        assert len(weight.scale.unique()) > 10, name
        lowest, highest = min(lowest, int(weight.scale.min())), max(highest, int(weight.scale.max()))
        # Codes fill the range: scales as a quantiser would choose them, not all codes of one sign or size.
        codes = weight.data.view(torch.uint8)
        assert len(codes.unique()) > 200, name
        assert float((codes > 127).float().mean()) == pytest.approx(0.5, abs=0.02), name
    assert lowest < 8
    assert highest >= 127 + 4
    layer = loaded.weights[1]
    for norm in (layer.q_norm.float(), layer.kv_norm.float()):
        assert 0.9 < float(norm.median()) < 1.1
        assert 3 < float(norm.max()) < 20
    assert -4 < float(layer.attn_sink.min()) < float(layer.attn_sink.max()) < 8


def test_outputs_are_of_order_one(middle: Path) -> None:
    """A projection of N(0, 1), after its norm, stays in bf16's comfortable range whatever the outliers."""
    loaded = load_checkpoint(middle)
    weights = loaded.weights[1]
    torch.manual_seed(0)
    x = torch.randn(64, 1024)

    def normed(values: Tensor, weight: Tensor) -> Tensor:
        return values * values.square().mean(-1, keepdim=True).rsqrt() * weight.float()

    def rms(values: Tensor) -> float:
        return float(values.square().mean().sqrt())

    q = normed(x @ matrix(weights.wq_a).T, weights.q_norm) @ matrix(weights.wq_b).T
    kv = normed(x @ matrix(weights.wkv).T, weights.kv_norm)
    logits = (q.view(64, 16, 512) @ kv.T) / math.sqrt(512)
    assert 0.5 < rms(logits) < 10
    attended = (logits.softmax(-1) @ kv).view(64, 4, 2048)
    low = torch.einsum("tgi,goi->tgo", attended, matrix(weights.wo_a).view(4, 256, 2048)).flatten(1)
    assert 0.1 < rms(low @ matrix(weights.wo_b).T) < 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    path = make_checkpoint(tmp_path / "plain", config=small_config(), layers=[0, 1], quantized=False, dtype=dtype)
    assert {tag for name, (tag, _) in described(path).items() if "sink" not in name} == {
        "F32" if dtype == torch.float32 else "BF16"
    }
    loaded = load_checkpoint(path)
    assert loaded.dtype == dtype
    assert loaded.config == replace(small_config(), quantization_config=None)
    quantized = make_checkpoint(tmp_path / "fp8", config=small_config(), layers=[0, 1])
    fp8 = load_checkpoint(quantized).weights[0].wo_b
    torch.testing.assert_close(matrix(loaded.weights[0].wo_b), matrix(fp8), rtol=0, atol=0)


def test_a_seed_gives_the_same_bytes_whatever_the_layers(tmp_path: Path) -> None:
    config = small_config()
    first, again, other = (
        make_checkpoint(tmp_path / name, config=config, layers=[0, 1], seed=seed)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert digest(first) == digest(again) != digest(other)
    alone = dict(load_checkpoint(make_checkpoint(tmp_path / "d", config=config, layers=[1], seed=1)).tensors())
    both = dict(load_checkpoint(first).tensors())
    assert all(torch.equal(matrix(weight), matrix(both[name])) for name, weight in alone.items())


@pytest.mark.parametrize(("shards", "files"), [(None, 2), (1, 1), (3, 3), (1000, 22)])
def test_the_number_of_shards(tmp_path: Path, shards: int | None, files: int) -> None:
    path = make_checkpoint(tmp_path / "shards", config=small_config(), layers=[0, 1], shards=shards)
    names = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(names) <= files
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    whole = make_checkpoint(tmp_path / "whole", config=small_config(), layers=[0, 1])
    found, wanted = (dict(load_checkpoint(p).tensors()) for p in (path, whole))
    assert all(torch.equal(matrix(found[name]), matrix(wanted[name])) for name in wanted)


def test_progress_counts_the_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = make_checkpoint(
        tmp_path / "progress",
        config=small_config(),
        layers=[0],
        progress=lambda done, total: seen.append((done, total)),
    )
    total = load_checkpoint(path).bytes_read
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_a_folder_with_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "here", config=small_config(), layers=[0])
    before = digest(path)
    with refused(CheckpointError, path, "config.json"):
        make_checkpoint(path, config=small_config())
    (tmp_path / "file").write_text("")
    with refused(CheckpointError, tmp_path / "file", "a file"):
        make_checkpoint(tmp_path / "file", config=small_config())
    assert digest(path) == before


@pytest.mark.parametrize("where", ["file/below", "x" * 300, "/proc/nowhere/at/all", "/dev/full/at"])
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with refused(CheckpointError, tmp_path / where, "cannot be written"):
        make_checkpoint(tmp_path / where, config=small_config(), layers=[0])


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    with refused(CheckpointError, "/dev/full", "No space left"):
        write_shard(Path("/dev/full"), {"x": ("U8", (1 << 20,))}, [bytes(1 << 20)])


def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with refused(ConfigError, "[0, 3]", "layer 2"):
        make_checkpoint(tmp_path / "none", layers=[0, 3])
    with refused(InputError, "float16"):
        make_checkpoint(tmp_path / "none", dtype=torch.float16)
    for shards in (0, 2.0, True):
        with refused(InputError, "shards", repr(shards)):
            make_checkpoint(tmp_path / "none", shards=shards)  # type: ignore[arg-type]
    assert not (tmp_path / "none").exists()
