"""Reading config.json: every spelling that is in use, and every mistake named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41.config import DeepseekV41Config, QuantizationConfig, YarnScaling
from dsv41.errors import ConfigError
from dsv41.hal.types import Geometry

from ..golden_cases import case_dirs
from ..wording import refused

RELEASE = DeepseekV41Config()
YARN = {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}
OPTIONAL = {"num_nextn_predict_layers", "dspark_block_size", "quantization_config"}


def release(**changes: Any) -> dict[str, Any]:
    return RELEASE.to_dict() | changes


def without(data: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in names}


def test_the_defaults_are_the_release() -> None:
    assert len(RELEASE.compress_ratios) == RELEASE.num_hidden_layers + RELEASE.num_nextn_predict_layers == 43
    assert [RELEASE.compress_ratios.count(ratio) for ratio in (0, 2, 1)] == [5, 18, 20]
    assert RELEASE.draft_layer_ids == range(40, 43)
    assert RELEASE.rope_scaling == YarnScaling(16, 32, 1, 65536)
    assert RELEASE.geometry == Geometry()


@pytest.mark.parametrize("path", case_dirs(), ids=lambda path: path.name)
def test_golden_configs_are_read(path: Path) -> None:
    data = json.loads((path / "config.json").read_text())
    config = DeepseekV41Config.from_json(path / "config.json")
    assert without(config.to_dict(), *OPTIONAL, "rope_scaling") == without(data, "rope_scaling")
    assert config.quantization_config is None
    assert not config.draft_layer_ids
    assert not config.ignored_keys


def test_to_dict_is_read_back_flat_and_nested() -> None:
    flat = json.loads(json.dumps(RELEASE.to_dict()))
    assert DeepseekV41Config.from_dict(flat) == RELEASE
    nested = {"quantization_config": flat.pop("quantization_config"), "text_config": flat}
    assert DeepseekV41Config.from_dict(nested) == RELEASE
    assert DeepseekV41Config.from_dict(flat) == replace(RELEASE, quantization_config=None)


@pytest.mark.parametrize("kind", ["type", "rope_type"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_every_spelling_of_rope_scaling_is_the_same(key: str, kind: str) -> None:
    base = without(release(), "rope_scaling")
    flat = {kind: "yarn", **YARN}
    main = {kind: "default", "rope_theta": 10000.0}
    nested = {"main": main, "compress": flat | {"rope_theta": 160000}}
    bare = without(base, "rope_theta", "compress_rope_theta")
    assert DeepseekV41Config.from_dict(base | {key: flat}) == RELEASE
    assert DeepseekV41Config.from_dict(base | {key: flat | {"rope_theta": 10000}}) == RELEASE
    assert DeepseekV41Config.from_dict(base | {key: nested}) == RELEASE
    assert DeepseekV41Config.from_dict(bare | {key: nested}) == RELEASE
    assert DeepseekV41Config.from_dict(base | {key: {"main": flat, "compress": flat}}) == RELEASE


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_scaling": {"type": "default"}},
        {
            "rope_parameters": {
                "main": {"type": "default"},
                "compress": {"rope_type": "default", "rope_theta": 160000.0},
            }
        },
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 10000.0}},
    ],
)
def test_default_means_no_yarn(rope: dict[str, Any]) -> None:
    config = DeepseekV41Config.from_dict(without(release(), "rope_scaling") | rope)
    assert config == replace(RELEASE, rope_scaling=None)
    assert DeepseekV41Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({}, ["rope_scaling", "rope_parameters"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "'yarn'"]),
        ({"rope_scaling": YARN}, ["rope_scaling.rope_type", "missing"]),
        ({"rope_scaling": {}}, ["rope_scaling.rope_type", "missing"]),
        ({"rope_parameters": {}}, ["rope_parameters.rope_type", "missing"]),
        ({"rope_parameters": {"main": {"rope_theta": 1e4}, "compress": {}}}, ["compress.rope_type", "missing"]),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, ["rope_scaling.rope_type", "'linear'"]),
        ({"rope_scaling": {"type": ["yarn"], **YARN}}, ["rope_scaling.rope_type", "['yarn']"]),
        ({"rope_scaling": {"type": "yarn", "rope_type": "default", **YARN}}, ["rope_type", "'yarn'", "'default'"]),
        ({"rope_scaling": {"type": "yarn", **without(YARN, "factor")}}, ["rope_scaling lacks factor", 16.0]),
        ({"rope_scaling": {"type": "yarn", **YARN, "factor": 0}}, ["rope_scaling.factor", "0", 16.0]),
        ({"rope_scaling": {"type": "yarn", **YARN, "beta_fast": True}}, ["rope_scaling.beta_fast", "True"]),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "original_max_position_embeddings": 4096.0}},
            ["original_max_position_embeddings", "4096.0"],
        ),
        ({"rope_parameters": {"main": {"rope_theta": 1e4}}}, ["rope_parameters.compress", "None"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5000}}, ["rope_theta", 10000.0, 5000]),
    ],
)
def test_wrong_rope_scaling_is_refused(rope: dict[str, Any], named: list[object]) -> None:
    with refused(ConfigError, *named):
        DeepseekV41Config.from_dict(without(release(), "rope_scaling") | rope)


INTEGERS = [
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_topk",
    "candidate_topk_blocks",
    "candidate_block_size",
    "max_position_embeddings",
    "dspark_block_size",
]


@pytest.mark.parametrize("value", [0, -3, 1.5, 128.0, "5120", None, True, [8]])
@pytest.mark.parametrize("name", INTEGERS)
def test_wrong_integers_are_refused(name: str, value: object) -> None:
    with refused(ConfigError, name, repr(value), f"the release has {getattr(RELEASE, name)}"):
        DeepseekV41Config.from_dict(release(**{name: value}))


@pytest.mark.parametrize("name", INTEGERS)
def test_sizes_that_no_model_has_are_refused(name: str) -> None:
    largest = 2**40 if name == "max_position_embeddings" else 2**20
    with refused(ConfigError, name, largest + 1, f"at most {largest}"):
        DeepseekV41Config.from_dict(release(**{name: largest + 1}))
    with refused(ConfigError, name, 10**30):
        DeepseekV41Config.from_dict(release(**{name: 10**30}))


@pytest.mark.parametrize("value", [0, -1e-6, float("nan"), float("inf"), "1e-6", None, True])
@pytest.mark.parametrize("name", ["rope_theta", "compress_rope_theta", "rms_norm_eps"])
def test_wrong_numbers_are_refused(name: str, value: object) -> None:
    with refused(ConfigError, name, repr(value), f"the release has {getattr(RELEASE, name)}"):
        DeepseekV41Config.from_dict(release(**{name: value}))


@pytest.mark.parametrize("value", [576, 512.0, "512", True])
@pytest.mark.parametrize("name", ["num_key_value_heads", "head_dim", "qk_rope_head_dim", "index_head_dim"])
def test_what_the_records_fix_cannot_be_changed(name: str, value: object) -> None:
    with refused(ConfigError, name, repr(value), getattr(RELEASE, name)):
        DeepseekV41Config.from_dict(release(**{name: value}))


@pytest.mark.parametrize("value", [7, "0,2", None, [0, 2.0], [0, -1], [True]])
@pytest.mark.parametrize("name", ["compress_ratios", "kv_source_layer_ids", "index_source_layer_ids"])
def test_wrong_lists_are_refused(name: str, value: object) -> None:
    with refused(ConfigError, name, repr(value[-1] if isinstance(value, list) else value)):
        DeepseekV41Config.from_dict(release(**{name: value}))


@pytest.mark.parametrize("value", [-2, 20.0, None, "20"])
def test_a_wrong_candidate_source_is_refused(value: object) -> None:
    with refused(ConfigError, "candidate_source_layer_id", repr(value)):
        DeepseekV41Config.from_dict(release(candidate_source_layer_id=value))


def test_candidate_sizes_may_be_zero_where_the_filter_is_off() -> None:
    off = release(candidate_source_layer_id=-1, candidate_topk_blocks=0, candidate_block_size=0)
    assert DeepseekV41Config.from_dict(off).candidate_source_layer_id == -1


def test_heads_must_fill_the_output_groups() -> None:
    with refused(ConfigError, "num_attention_heads is 60", "o_groups 8"):
        DeepseekV41Config.from_dict(release(num_attention_heads=60))


@pytest.mark.parametrize("name", sorted(set(RELEASE.to_dict()) - OPTIONAL - {"rope_scaling"}))
def test_geometry_is_never_guessed(name: str) -> None:
    with refused(ConfigError, f"lacks {name}", f"the release has {getattr(RELEASE, name)!r}"):
        DeepseekV41Config.from_dict(without(release(), name))


def test_all_missing_fields_are_named_at_once() -> None:
    with refused(ConfigError, "hidden_size", "o_groups", "compress_ratios"):
        DeepseekV41Config.from_dict({"rope_scaling": None})


def test_draft_layers_are_counted_from_the_schedule_where_they_are_not_given() -> None:
    assert DeepseekV41Config.from_dict(without(release(), "num_nextn_predict_layers")) == RELEASE
    target = without(release(compress_ratios=list(RELEASE.compress_ratios[:40])), "num_nextn_predict_layers")
    assert not DeepseekV41Config.from_dict(target).draft_layer_ids


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"weight_block_size": [128, 128]}, ["weight_block_size", "(128, 128)", "DeepSeek-V4's grid", "[32, 32]"]),
        ({"weight_block_size": 32}, ["weight_block_size", "32", "[32, 32]"]),
        ({"quant_method": "awq"}, ["quant_method", "'awq'", "'fp8'"]),
        ({"scale_fmt": None}, ["scale_fmt", "None", "'ue8m0'"]),
        ({"activation_scheme": "static"}, ["activation_scheme", "'static'", "'dynamic'"]),
    ],
)
def test_fr_116_another_quantisation_is_refused(changes: dict[str, Any], named: list[str]) -> None:
    """A V4 checkpoint's 128 x 128 grid, or any other scheme, is refused by its config before a tensor is read."""
    quantization = RELEASE.to_dict()["quantization_config"] | changes
    with refused(ConfigError, *named):
        DeepseekV41Config.from_dict(release(quantization_config=quantization))
    with refused(ConfigError, *named):
        DeepseekV41Config.from_dict(
            {"text_config": without(release(), "quantization_config")} | {"quantization_config": quantization}
        )


@pytest.mark.parametrize("name", ["quant_method", "weight_block_size", "scale_fmt"])
def test_a_partial_quantisation_config_is_refused(name: str) -> None:
    quantization = without(RELEASE.to_dict()["quantization_config"], name)
    with refused(ConfigError, f"quantization_config lacks {name}"):
        DeepseekV41Config.from_dict(release(quantization_config=quantization))
    with refused(ConfigError, "quantization_config", "'fp8'"):
        DeepseekV41Config.from_dict(release(quantization_config="fp8"))


def test_fr_116_the_text_config_is_read_and_unknown_keys_are_listed() -> None:
    """The outer config of a composite model has fields of the same name; only the text config's count."""
    quantization = RELEASE.to_dict()["quantization_config"] | {"modules_to_not_convert": ["norm"]}
    text = without(release(vocab_size=129280), "quantization_config")
    outer = {
        "model_type": "deepseek_v41",
        "hidden_size": 1024,
        "vision_config": {"num_hidden_layers": 1},
        "text_config": text,
        "quantization_config": quantization,
    }
    config = DeepseekV41Config.from_dict(outer)
    assert config == RELEASE
    assert config.quantization_config == QuantizationConfig()
    assert config.ignored_keys == (
        "model_type",
        "quantization_config.modules_to_not_convert",
        "vision_config",
        "vocab_size",
    )


def test_a_v4_config_is_refused_by_name() -> None:
    v4 = {"model_type": "deepseek_v4", "compress_ratios": [0, 4, 128], "rope_scaling": None}
    with refused(ConfigError, "deepseek_v4", "kv_source_layer_ids"):
        DeepseekV41Config.from_dict(v4)


@pytest.mark.parametrize("data", [None, [], "config", {"text_config": []}])
def test_what_is_no_object_is_refused(data: Any) -> None:
    with refused(ConfigError, "config", "JSON object"):
        DeepseekV41Config.from_dict(data)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with refused(ConfigError, tmp_path / "config.json", "No such file"):
        DeepseekV41Config.from_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with refused(ConfigError, tmp_path / "config.json", "not JSON"):
        DeepseekV41Config.from_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with refused(ConfigError, tmp_path / "config.json", "not JSON"):
        DeepseekV41Config.from_json(tmp_path / "config.json")


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["main", "type", "factor"]), inner),
    max_leaves=5,
)


@given(name=st.sampled_from(sorted({*RELEASE.to_dict(), "rope_parameters", "text_config"})), value=values)
def test_any_value_of_any_field_is_read_or_refused(name: str, value: Any) -> None:
    try:
        config = DeepseekV41Config.from_dict(release(**{name: value}))
    except ConfigError:
        return
    assert DeepseekV41Config.from_dict(config.to_dict()) == config
