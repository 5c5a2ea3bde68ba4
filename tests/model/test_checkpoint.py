"""Loading: one rank's shard and nothing else, and every broken file named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import dsv41.checkpoint
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.checkpoint_files import INDEX
from dsv41.errors import CheckpointError, ConfigError, InputError
from dsv41.fp8 import dequantize_blocks
from dsv41.hal.types import BlockScaledWeight
from dsv41.synthetic import make_checkpoint, small_config
from dsv41.tensors import layer_tensors

from ..golden_cases import case_dirs, expand, load_case
from ..wording import refused

LAYERS = [0, 1, 4, 6]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small fp8 checkpoint of layers with every role, in several shards with an index."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "fp8", config=small_config(), layers=LAYERS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, unquantised in F32."""
    path = tmp_path_factory.mktemp("checkpoint") / "f32"
    return make_checkpoint(path, config=small_config(), layers=LAYERS, quantized=False, dtype=torch.float32)


def all_tensors(path: Path) -> Tensors:
    return {
        name: tensor for shard in sorted(path.glob("model*.safetensors")) for name, tensor in load_file(shard).items()
    }


def rewritten(path: Path, out: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy in one shard without an index, its tensors changed."""
    out.mkdir()
    shutil.copy(path / "config.json", out)
    tensors = all_tensors(path)
    change(tensors)
    save_file(tensors, out / "model.safetensors")
    return out


def same(a: object, b: object) -> bool:
    if isinstance(a, BlockScaledWeight) and isinstance(b, BlockScaledWeight):
        bits = (a.data.view(torch.uint8), b.data.view(torch.uint8))
        return a.block == b.block and torch.equal(*bits) and torch.equal(a.scale, b.scale)
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    found, wanted = dict(a.tensors()), dict(b.tensors())
    assert found.keys() == wanted.keys()
    assert not [name for name in found if not same(found[name], wanted[name])]


def test_weights_stay_fp8_with_bytes_for_scales(checkpoint: Path) -> None:
    loaded = load_checkpoint(checkpoint)
    stored = all_tensors(checkpoint)
    assert [spec.layer_id for spec in loaded.specs] == LAYERS == sorted(loaded.weights)
    assert loaded.dtype == torch.bfloat16
    assert loaded.path == checkpoint
    assert loaded.bytes_read == sum(tensor.nbytes for tensor in stored.values())
    assert not loaded.ignored
    for name, weight in loaded.tensors():
        if isinstance(weight, BlockScaledWeight):
            assert weight.data.dtype == torch.float8_e4m3fn
            assert weight.scale.dtype == torch.uint8
            assert torch.equal(weight.data.view(torch.uint8), stored[name].view(torch.uint8))
            assert torch.equal(weight.scale, stored[name.replace("weight", "scale")].view(torch.uint8))
        else:
            assert weight.dtype == stored[name].dtype
            assert torch.equal(weight, stored[name])
    assert loaded.weights[0].compressor is None
    assert loaded.weights[0].indexer is None
    gated, ungated, reader = (loaded.weights[i] for i in (1, 4, 6))
    assert gated.compressor is not None and gated.compressor.wgate is not None  # noqa: PT018
    assert ungated.compressor is not None and ungated.compressor.wgate is None  # noqa: PT018
    assert ungated.indexer is not None and ungated.indexer.wk is not None  # noqa: PT018
    assert reader.compressor is None
    assert reader.indexer is not None and reader.indexer.wk is None and reader.indexer.k_norm is None  # noqa: PT018


def test_draft_layers_are_loaded_where_they_are_asked_for(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "whole", config=small_config())
    assert [spec.layer_id for spec in load_checkpoint(path).specs] == list(range(8))
    draft = load_checkpoint(path, layers=[8])
    assert next(name for name, _ in draft.tensors()) == "mtp.0.attn.wq_a.weight"
    assert not draft.specs[0].causal


@pytest.mark.parametrize("path", case_dirs("short-*"), ids=lambda path: path.name)
def test_golden_weights_are_loaded_as_they_are(path: Path, tmp_path: Path) -> None:
    loaded = load_checkpoint(expand(path, tmp_path))
    case = load_case(path)
    assert loaded.dtype == case.dtype
    found = dict(loaded.tensors())
    assert found.keys() == case.weights.keys()
    assert all(same(found[name], tensor) for name, tensor in case.weights.items())


def test_one_shard_without_an_index_loads_the_same(checkpoint: Path, tmp_path: Path) -> None:
    single = rewritten(checkpoint, tmp_path / "single", lambda tensors: None)
    assert_same(load_checkpoint(single, layers=LAYERS), load_checkpoint(checkpoint))
    several = tmp_path / "several"
    shutil.copytree(checkpoint, several)
    (several / INDEX).unlink()
    assert_same(load_checkpoint(several, layers=LAYERS), load_checkpoint(checkpoint))


def test_unknown_tensors_of_a_layer_are_listed(checkpoint: Path, tmp_path: Path) -> None:
    extra = {
        "layers.0.attn.more.weight": torch.zeros(2),
        "layers.0.mlp.weight": torch.zeros(2),
        "embed": torch.zeros(2),
    }
    path = rewritten(checkpoint, tmp_path / "extra", lambda tensors: tensors.update(extra))
    assert load_checkpoint(path, layers=LAYERS).ignored == ("layers.0.attn.more.weight",)


def test_dtype_chooses_what_plain_projections_become(plain: Path, checkpoint: Path) -> None:
    assert load_checkpoint(plain).dtype == torch.float32
    loaded = load_checkpoint(plain, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    layer = loaded.weights[1]
    assert isinstance(layer.wq_a, Tensor)
    assert layer.compressor is not None
    assert (layer.wq_a.dtype, layer.compressor.wkv.dtype, layer.attn_sink.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    assert load_checkpoint(checkpoint, dtype=torch.float32).dtype == torch.float32
    with refused(InputError, "float16"):
        load_checkpoint(checkpoint, dtype=torch.float16)


@pytest.mark.parametrize("device", ["nope", "cuda:99", 99, None, ["cpu"]])
def test_a_device_that_torch_cannot_use_is_refused(checkpoint: Path, device: Any) -> None:
    with refused(InputError, repr(device), "use 'cpu'"):
        load_checkpoint(checkpoint, device=device)


def test_other_mistakes_are_refused(checkpoint: Path) -> None:
    with refused(ConfigError, "layers is 3"):
        load_checkpoint(checkpoint, layers=3)  # type: ignore[arg-type]
    with refused(CheckpointError, "is missing"):
        load_checkpoint("x" * 5000)


def shards_of(path: Path, tp_size: int) -> list[Checkpoint]:
    return [load_checkpoint(path, tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]


def joined(parts: list[Any], dim: int) -> Any:
    if isinstance(parts[0], BlockScaledWeight):
        data = torch.cat([part.data.view(torch.uint8) for part in parts], dim).view(torch.float8_e4m3fn)
        return replace(parts[0], data=data, scale=torch.cat([part.scale for part in parts], dim))
    return torch.cat(parts, dim)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["checkpoint", "plain"])
def test_shards_put_together_are_the_whole(kind: str, tp_size: int, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(kind)
    whole = load_checkpoint(path)
    ranks = shards_of(path, tp_size)
    for spec in whole.specs:
        split = {info.name: info.shard_dim for info in layer_tensors(whole.config, spec).values()}
        parts = [dict(rank.tensors()) for rank in ranks]
        for name, weight in whole.tensors():
            if name in split and split[name] is None:
                assert all(same(part[name], weight) for part in parts)
            elif name in split:
                assert same(joined([part[name] for part in parts], split[name] or 0), weight)
    assert all(rank.specs[0].num_heads * tp_size == whole.specs[0].num_heads for rank in ranks)


def test_fr_73_sinks_are_split_with_their_heads(checkpoint: Path, tmp_path: Path) -> None:
    """Each rank gets the sinks of its own heads, for every tp_size that divides them, and a refusal for the others."""
    sinks = torch.arange(8, dtype=torch.float32)

    def distinct(tensors: Tensors) -> None:
        for layer in LAYERS:
            tensors[f"layers.{layer}.attn.attn_sink"] = sinks + 100 * layer

    path = rewritten(checkpoint, tmp_path / "sinks", distinct)
    for tp_size in range(1, 17):
        if 4 % tp_size:
            with refused(ConfigError, f"tp_size is {tp_size}", "[1, 2, 4]"):
                load_checkpoint(path, layers=LAYERS, tp_size=tp_size)
            continue
        for rank in range(tp_size):
            loaded = load_checkpoint(path, layers=LAYERS, tp_rank=rank, tp_size=tp_size)
            for layer in LAYERS:
                assert torch.equal(loaded.weights[layer].attn_sink, sinks.chunk(tp_size)[rank] + 100 * layer)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_fr_74_ranks_hold_whole_output_groups(plain: Path, tp_size: int) -> None:
    """Heads through wo_a and wo_b, by groups: the ranks' partial sums are the whole, so that no group was cut."""
    whole = load_checkpoint(plain)
    config = whole.config
    torch.manual_seed(0)
    attended = torch.randn(3, config.num_attention_heads, config.head_dim, dtype=torch.float64)

    def project(loaded: Checkpoint, heads: Tensor) -> Tensor:
        weights, spec = loaded.weights[0], loaded.specs[0]
        assert isinstance(weights.wo_a, Tensor)
        assert isinstance(weights.wo_b, Tensor)
        grouped = heads.reshape(3, spec.o_groups, -1)
        low = torch.einsum("tgi,goi->tgo", grouped, weights.wo_a.double().view(spec.o_groups, spec.o_lora_rank, -1))
        return low.flatten(1) @ weights.wo_b.double().T

    parts = [
        project(rank, heads) for rank, heads in zip(shards_of(plain, tp_size), attended.chunk(tp_size, 1), strict=True)
    ]
    torch.testing.assert_close(sum(parts), project(whole, attended))


def test_a_rank_reads_its_own_bytes_only(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int]] = []
    real = dsv41.checkpoint.safe_open

    class Spy:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.file = real(*arguments, **options)

        def get_slice(self, name: str) -> Any:
            class Slice:
                def __getitem__(_, part: Any) -> Tensor:
                    tensor: Tensor = self.file.get_slice(name)[part]
                    read.append((name, tensor.nbytes))
                    return tensor

            return Slice()

    monkeypatch.setattr(dsv41.checkpoint, "safe_open", Spy)
    loaded = load_checkpoint(checkpoint, layers=[0, 1], tp_rank=1, tp_size=4)
    split = ("wq_b.", "wo_a.", "wo_b.", "attn_sink")
    due = {
        name: tensor.nbytes // (4 if any(part in name for part in split) and "indexer" not in name else 1)
        for name, tensor in all_tensors(checkpoint).items()
        if name.startswith(("layers.0.", "layers.1."))
    }
    assert dict(read) == due
    assert len(read) == len(due)
    assert loaded.bytes_read == sum(due.values())


def test_what_is_loaded_needs_the_files_no_more(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    loaded, wanted = load_checkpoint(copy), load_checkpoint(checkpoint)
    for shard in copy.glob("*.safetensors"):
        shard.write_bytes(b"")
    assert_same(loaded, wanted)


def test_fr_21_scales_load_the_same_from_e8m0_and_from_fp32(checkpoint: Path, tmp_path: Path) -> None:
    """Powers of two in F32, and raw bytes as U8, become the same scale bytes, from 2**-127 up."""

    def as_floats(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".scale")]:
            tensors[name] = tensors[name].float()

    def as_bytes(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".scale")]:
            tensors[name] = tensors[name].view(torch.uint8)

    wanted = load_checkpoint(checkpoint)
    assert min(int(w.scale.min()) for _, w in wanted.tensors() if isinstance(w, BlockScaledWeight)) < 32
    for change in (as_floats, as_bytes):
        loaded = load_checkpoint(rewritten(checkpoint, tmp_path / change.__name__, change), layers=LAYERS)
        assert_same(loaded, wanted)
        weight = loaded.weights[0].wq_a
        assert isinstance(weight, BlockScaledWeight)
        assert torch.equal(dequantize_blocks(weight), dequantize_blocks(wanted.weights[0].wq_a))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.75, 0.0, -1.0, float("inf")])
def test_fr_21_a_scale_that_is_no_power_of_two_is_refused(checkpoint: Path, tmp_path: Path, value: float) -> None:
    def change(tensors: Tensors) -> None:
        tensors["layers.0.attn.wkv.scale"] = tensors["layers.0.attn.wkv.scale"].float()
        tensors["layers.0.attn.wkv.scale"][3, 1] = value

    with refused(CheckpointError, "layers.0.attn.wkv.scale", "powers of two"):
        load_checkpoint(rewritten(checkpoint, tmp_path / "scale", change), layers=LAYERS)


def drop(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(f"layers.{name}") for name in names]


def put(name: str, tensor: Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"layers.{name}": tensor})


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop("0.attn.wkv.weight", "0.attn.wkv.scale"), ["layers.0.attn.wkv.weight", "missing", "[512, 256]"]),
        (drop("1.attn.compressor.wgate.weight"), ["layers.1.attn.compressor.wgate.weight", "missing", "[512, 256]"]),
        (drop("4.attn.indexer.k_norm.weight"), ["layers.4.attn.indexer.k_norm.weight", "missing", "[128]"]),
        (drop("0.attn.attn_sink"), ["layers.0.attn.attn_sink", "missing", "[8]"]),
        (drop("0.attn.wkv.weight"), ["layers.0.attn.wkv.weight", "missing", "layers.0.attn.wkv.scale"]),
        (drop("0.attn.wkv.scale"), ["layers.0.attn.wkv.weight", "no scale", "layers.0.attn.wkv.scale", "[16, 8]"]),
        (put("0.attn.q_norm.scale", torch.ones(4)), ["layers.0.attn.q_norm.scale", "layers.0.attn.q_norm.weight"]),
        (put("0.attn.other.scale", torch.ones(4)), ["layers.0.attn.other.scale", "F8_E4M3"]),
        (
            put("0.attn.wkv.weight", torch.zeros(512, 128).to(FP8)),
            ["layers.0.attn.wkv.weight", "[512, 128]", "[512, 256]"],
        ),
        (
            put("0.attn.wkv.weight", torch.zeros(256, 512).to(FP8)),
            ["layers.0.attn.wkv.weight", "[256, 512]", "[512, 256]"],
        ),
        (put("0.attn.attn_sink", torch.zeros(64)), ["layers.0.attn.attn_sink", "[64]", "[8]"]),
        (put("0.attn.q_norm.weight", torch.zeros(1, 128)), ["layers.0.attn.q_norm.weight", "[1, 128]", "[128]"]),
        (
            put("0.attn.wkv.weight", torch.zeros(512, 256, dtype=torch.bfloat16)),
            ["layers.0.attn.wkv.weight", "BF16", "F8_E4M3", "quantization_config"],
        ),
        (
            put("0.attn.wkv.weight", torch.zeros(512, 256, dtype=torch.float8_e4m3fnuz)),
            ["layers.0.attn.wkv.weight", "F8_E4M3FNUZ", "F8_E4M3"],
        ),
        (
            put("0.attn.q_norm.weight", torch.zeros(128, dtype=torch.float16)),
            ["layers.0.attn.q_norm.weight", "F16", "BF16 or F32"],
        ),
        (put("0.attn.attn_sink", torch.zeros(8).bfloat16()), ["layers.0.attn.attn_sink", "BF16", "F32"]),
        (
            put("4.attn.indexer.wk.weight", torch.zeros(128, 512).to(FP8)),
            ["layers.4.attn.indexer.wk.weight", "F8_E4M3", "BF16 or F32"],
        ),
        (
            put("0.attn.wkv.scale", torch.ones(16, 8, dtype=torch.float16)),
            ["layers.0.attn.wkv.scale", "F16", "F8_E8M0"],
        ),
        (
            put("0.attn.wkv.scale", torch.ones(8, 16, dtype=torch.uint8)),
            ["layers.0.attn.wkv.scale", "[8, 16]", "[16, 8]", "32x32"],
        ),
        (
            put("0.attn.wkv.scale", torch.ones(4, 2, dtype=torch.uint8)),
            ["layers.0.attn.wkv.scale", "[4, 2]", "[16, 8]", "128x128", "DeepSeek-V4's grid"],
        ),
    ],
)
def test_fr_116_tensors_that_do_not_fit_are_refused(
    checkpoint: Path, tmp_path: Path, change: Callable[[Tensors], object], named: list[str]
) -> None:
    """Missing, misshapen and mistyped tensors, lone scales and weights, V4's grid: key, expected and found."""
    path = rewritten(checkpoint, tmp_path / "changed", change)
    with refused(CheckpointError, *named):
        load_checkpoint(path, layers=LAYERS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            put("0.attn.wkv.weight", torch.zeros(512, 256).to(FP8)),
            ["layers.0.attn.wkv.weight", "F8_E4M3", "BF16 or F32", "quantization_config"],
        ),
        (put("0.attn.wkv.scale", torch.ones(16, 8)), ["layers.0.attn.wkv.scale", "F32", "F8_E4M3"]),
        (
            put("0.attn.wkv.weight", torch.zeros(512, 256).bfloat16()),
            ["layers.0.attn.wkv.weight", "BF16", "F32", "dtype="],
        ),
    ],
)
def test_plain_checkpoints_that_do_not_fit_are_refused(
    plain: Path, tmp_path: Path, change: Callable[[Tensors], object], named: list[str]
) -> None:
    path = rewritten(plain, tmp_path / "changed", change)
    with refused(CheckpointError, *named):
        load_checkpoint(path, layers=LAYERS)


def test_a_split_through_a_block_is_refused(tmp_path: Path) -> None:
    config = replace(small_config(), o_lora_rank=48)
    path = make_checkpoint(tmp_path / "odd", config=config, layers=[0])
    assert load_checkpoint(path).specs
    assert load_checkpoint(path, tp_size=2).specs
    with refused(ConfigError, "tp_size is 4", "48", "layers.0.attn.wo_a.weight", 32):
        load_checkpoint(path, tp_size=4)


@pytest.mark.parametrize("rank", [-1, 2, 0.0, None])
def test_a_rank_outside_the_group_is_refused(checkpoint: Path, rank: Any) -> None:
    with refused(InputError, "tp_rank", repr(rank), "0 to 1"):
        load_checkpoint(checkpoint, tp_rank=rank, tp_size=2)


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    shutil.copytree(checkpoint, tmp_path / "copy")
    return tmp_path / "copy"


def test_what_is_no_checkpoint_folder_is_refused(copy: Path) -> None:
    with refused(CheckpointError, copy / "nowhere", "missing", "config.json"):
        load_checkpoint(copy / "nowhere")
    with refused(CheckpointError, copy / "config.json", "a file", "folder"):
        load_checkpoint(copy / "config.json")
    (copy / "config.json").unlink()
    with refused(CheckpointError, copy, "no config.json"):
        load_checkpoint(copy)


def test_missing_shards_are_refused(copy: Path) -> None:
    shards = sorted(copy.glob("*.safetensors"))
    shards[1].unlink()
    with refused(CheckpointError, shards[1].name, INDEX):
        load_checkpoint(copy)
    assert load_checkpoint(copy, layers=[0]).specs  # of which no tensor is in the missing shard
    (copy / INDEX).unlink()
    with refused(CheckpointError, "[2]", INDEX):
        load_checkpoint(copy)
    for shard in copy.glob("*.safetensors"):
        shard.unlink()
    with refused(CheckpointError, "model.safetensors", "config.json"):
        load_checkpoint(copy)


def test_layers_that_are_not_there_are_named(checkpoint: Path, tmp_path: Path) -> None:
    path = rewritten(checkpoint, tmp_path / "part", lambda tensors: None)
    with refused(CheckpointError, "layer 2", "layers=[0, 1, 4, 6]"):
        load_checkpoint(path)
    with refused(CheckpointError, "layers.2.attn.wq_a.weight"):
        load_checkpoint(path, layers=[1, 2])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("{", ["not JSON"]),
        ("[" * 100000, ["not JSON"]),
        ("[]", ["weight_map"]),
        ('{"weight_map": []}', ["weight_map"]),
        ('{"weight_map": {"layers.0.attn.wkv.weight": 3}}', ["layers.0.attn.wkv.weight", "3"]),
        ('{"weight_map": {"layers.0.attn.wkv.weight": "../x"}}', ["layers.0.attn.wkv.weight", "'../x'"]),
        ('{"weight_map": {}, "metadata": []}', ["metadata", "[]"]),
        ('{"weight_map": {}, "metadata": {"layers": "all"}}', ["metadata.layers", "'all'"]),
        ('{"weight_map": {}, "metadata": {"layers": [0]}}', ["layers.0.attn.wq_a.weight", "missing"]),
    ],
)
def test_a_broken_index_is_refused(copy: Path, change: str, named: list[str]) -> None:
    (copy / INDEX).write_text(change)
    with refused(CheckpointError, *named):
        load_checkpoint(copy)


def test_an_index_that_disagrees_with_its_shards_is_refused(copy: Path) -> None:
    index = json.loads((copy / INDEX).read_text())
    name = "layers.0.attn.wkv.weight"
    moved = index["weight_map"] | {name: index["weight_map"]["layers.1.attn.wkv.weight"]}
    (copy / INDEX).write_text(json.dumps(index | {"weight_map": moved}))
    with refused(CheckpointError, name, moved[name], INDEX):
        load_checkpoint(copy)
    del index["weight_map"][name]
    (copy / INDEX).write_text(json.dumps(index))
    with refused(CheckpointError, name, "missing"):
        load_checkpoint(copy)


def test_a_tensor_in_two_shards_is_refused(copy: Path) -> None:
    (copy / INDEX).unlink()
    shards = sorted(copy.glob("*.safetensors"))
    shutil.copy(shards[0], shards[1])
    with refused(CheckpointError, "layers.0.attn", shards[0].name, shards[1].name):
        load_checkpoint(copy)


def mangle(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a file's header, leaving its data."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


WKV = "layers.0.attn.wkv.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda h: h[WKV].update(shape=[512, 512]), [WKV, 512 * 256, 512 * 512]),
        (lambda h: h[WKV].update(shape=[-512, -256]), [WKV, "[-512, -256]"]),
        (lambda h: h[WKV].update(shape=[512.0, 256]), [WKV, "[512.0, 256]"]),
        (lambda h: h[WKV].update(shape="512"), [WKV, "'512'"]),
        (lambda h: h[WKV].update(dtype="F4", data_offsets=[9, 3]), [WKV, "spans -6 bytes"]),
        (lambda h: h[WKV].update(dtype=["F32"]), [WKV, "['F32']"]),
        (lambda h: h[WKV].update(data_offsets=[0]), [WKV, "data_offsets"]),
        (lambda h: h[WKV].pop("dtype"), [WKV, "dtype"]),
        (lambda h: h.update({WKV: None}), [WKV, "None"]),
        (lambda h: h[WKV].update(data_offsets=[10**12, 10**12 + 512 * 256]), [WKV, 10**12 + 512 * 256]),
        (lambda h: h[WKV].update(data_offsets=[0, 512 * 256]), ["begins at byte"]),
        (lambda h: h.pop(WKV), ["begins at byte"]),
    ],
)
def test_a_header_that_lies_is_refused(
    copy: Path, change: Callable[[dict[str, Any]], object], named: list[object]
) -> None:
    file = sorted(copy.glob("*.safetensors"))[0]
    mangle(file, change)
    with refused(CheckpointError, file.name, *named):
        load_checkpoint(copy)


@pytest.mark.parametrize("length", [0, 1, 2**40, 2**63, 2**64 - 1])
def test_a_header_that_lies_about_its_length_is_refused(copy: Path, length: int) -> None:
    file = sorted(copy.glob("*.safetensors"))[0]
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    with refused(CheckpointError, file, length, "truncated"):
        load_checkpoint(copy)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 5000, -1])
def test_truncated_shards_are_refused(copy: Path, kept: int) -> None:
    file = sorted(copy.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:kept])
    with refused(CheckpointError, file, "truncated", "expected at least 10" if kept in (0, 4, 8) else "expected"):
        load_checkpoint(copy)


def test_tensors_beside_attention_may_have_any_type(copy: Path) -> None:
    """Sizes of types that we do not know are checked by whoever loads such a tensor; attention does not."""
    file = sorted(copy.glob("*.safetensors"))[0]
    length = int.from_bytes(file.read_bytes()[:8], "little")
    end = file.stat().st_size - 8 - length
    file.write_bytes(file.read_bytes() + bytes(16))
    extra = {"dtype": "F4", "shape": [4, 8], "data_offsets": [end, end + 16]}
    mangle(file, lambda header: header.update({"layers.0.ffn.experts.0.w1.weight": extra}))
    assert load_checkpoint(copy).specs
    mangle(file, lambda header: header[WKV].update(dtype="F8_E3M4"))
    with refused(CheckpointError, WKV, "F8_E3M4", "F8_E4M3"):
        load_checkpoint(copy)


def test_a_shard_with_more_than_its_header_names_is_refused(copy: Path) -> None:
    file = sorted(copy.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes() + b"\0")
    with refused(CheckpointError, file, "appended"):
        load_checkpoint(copy)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("fuzz") / "one", config=small_config(), layers=[0])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_load_or_are_refused(one_layer: Path, data: st.DataObject) -> None:
    """Whatever happens to a shard, nothing but a CheckpointError comes out."""
    file = one_layer / "model-00001-of-00001.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    content = bytearray(whole)
    how = data.draw(st.sampled_from(["bytes", "cut", "append", "entry", "header"]))
    try:
        if how == "bytes":
            places = st.dictionaries(st.integers(0, 8 + length - 1), st.integers(0, 255), min_size=1, max_size=4)
            for place, byte in data.draw(places).items():
                content[place] = byte
            file.write_bytes(content)
        elif how == "cut":
            file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        elif how == "append":
            file.write_bytes(content + data.draw(st.binary(min_size=1, max_size=9)))
        elif how == "entry":
            name = data.draw(st.sampled_from(sorted(json.loads(whole[8 : 8 + length]))))
            field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
            mangle(file, lambda header: header[name].update({field: data.draw(json_values)}))
        else:
            mangle(file, lambda header: header.update({data.draw(st.text(max_size=5)): data.draw(json_values)}))
        with suppress(CheckpointError):
            load_checkpoint(one_layer)
    finally:
        file.write_bytes(whole)


def test_nan_is_found_by_tensor(checkpoint: Path, plain: Path, tmp_path: Path) -> None:
    def poison(tensors: Tensors) -> None:
        tensors["layers.0.attn.wkv.weight"].view(torch.uint8)[5, 7] = 0xFF
        tensors["layers.0.attn.wkv.weight"].view(torch.uint8)[6, 7] = 0x7F
        tensors["layers.1.attn.wo_b.scale"].view(torch.uint8)[0, 0] = 0xFF
        tensors["layers.1.attn.wo_b.weight"].view(torch.uint8)[0, 0] = 0x7F
        tensors["layers.4.attn.indexer.k_norm.weight"][3] = float("nan")
        tensors["layers.6.attn.attn_sink"][0] = float("inf")

    assert load_checkpoint(checkpoint).find_nan() == []
    assert load_checkpoint(plain).find_nan() == []
    loaded = load_checkpoint(rewritten(checkpoint, tmp_path / "nan", poison), layers=LAYERS)
    assert loaded.find_nan() == [
        ("layers.0.attn.wkv.weight", 2),
        ("layers.1.attn.wo_b.weight", 32 * 32),
        ("layers.4.attn.indexer.k_norm.weight", 1),
    ]


def test_fr_101_the_loader_needs_no_vendor_library(checkpoint: Path) -> None:
    """A meta path hook refuses every kernel library; making and loading a checkpoint still work."""
    script = f"""
        import sys
        from pathlib import Path

        import torch  # asks for some of these itself

        class Block:
            names = {{"triton", "deep_gemm", "flash_mla", "tokenspeed_flashmla", "flashinfer", "aiter", "vllm",
                     "sglang", "hip", "cutlass", "amdsmi", "pynvml"}}

            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in self.names:
                    raise OSError(f"libcudart.so.13: cannot open shared object file, wanted by {{name}}")

        sys.meta_path.insert(0, Block())
        import dsv41
        loaded = dsv41.load_checkpoint(Path({str(checkpoint)!r}), tp_rank=1, tp_size=2)
        assert loaded.find_nan() == [] and len(loaded.weights) == {len(LAYERS)}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
