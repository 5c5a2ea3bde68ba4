"""The fields of a DeepSeek-V4.1 `config.json` that attention depends on, under their names there."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dsv41.errors import ConfigError
from dsv41.hal.types import Geometry
from dsv41.topology import check_schedule

# Every cache record and kernel is built for these.
_FIXED = {"num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
_MINIMUM = {"num_nextn_predict_layers": 0, "candidate_source_layer_id": -1}
_IDS = ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids")
_LARGEST = 2**20
_LARGEST_LENGTH = 2**40  # of positions, which size nothing by themselves
_LENGTHS = ("max_position_embeddings", "rope_scaling.original_max_position_embeddings")
_OPTIONAL = ("num_nextn_predict_layers", "dspark_block_size", "quantization_config")


def _integer(name: str, value: object, least: int, remedy: str) -> int:
    # bool is an int in Python, and `"hidden_size": true` is a mistake.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}: expected an integer of at least {least}; {remedy}")
    if value > (largest := _LARGEST_LENGTH if name in _LENGTHS else _LARGEST):
        raise ConfigError(f"{name} is {value}: expected at most {largest}, which no model exceeds; {remedy}")
    return value


def _positive(name: str, value: object, remedy: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value!r}: expected a finite number above 0; {remedy}")
    return float(value)


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}: expected a JSON object; give it as in the release's config.json")
    return value


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's change of the frequencies in layers with ratio > 0. V4.1 uses no magnitude scaling (no mscale)."""

    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow"):
            remedy = f"the release has {YarnScaling.__dataclass_fields__[name].default}"
            object.__setattr__(self, name, _positive(f"rope_scaling.{name}", getattr(self, name), remedy))
        original = self.original_max_position_embeddings
        _integer("rope_scaling.original_max_position_embeddings", original, 1, "the release has 65536")


@dataclass(frozen=True)
class QuantizationConfig:
    """How the projections are stored: fp8 e4m3 with one UE8M0 scale for each block of 32 x 32 weights."""

    quant_method: str = "fp8"
    weight_block_size: tuple[int, int] = (32, 32)
    scale_fmt: str = "ue8m0"
    activation_scheme: str = "dynamic"

    def __post_init__(self) -> None:
        block = self.weight_block_size
        if isinstance(block, list):
            object.__setattr__(self, "weight_block_size", block := tuple(block))
        if block != (32, 32):
            v4 = " (that is DeepSeek-V4's grid)" if block == (128, 128) else ""
            raise ConfigError(
                f"quantization_config.weight_block_size is {block!r}{v4}: expected [32, 32]; use a checkpoint in "
                "DeepSeek-V4.1's format"
            )
        for name, expected in (("quant_method", "fp8"), ("scale_fmt", "ue8m0"), ("activation_scheme", "dynamic")):
            if (value := getattr(self, name)) != expected:
                raise ConfigError(
                    f"quantization_config.{name} is {value!r}: expected {expected!r}; use a checkpoint in the "
                    "release's format, or drop quantization_config if its weights are plain BF16 or F32"
                )


@dataclass(frozen=True)
class DeepseekV41Config:
    """The attention geometry and layer schedule of a model. The defaults are the release, DeepSeek-V4.1-Flash.

    Raises ConfigError for a field of wrong type or value and for every schedule that cannot be built, so an instance
    is always valid. `quantization_config` None means plain BF16 or F32 weights.
    """

    num_hidden_layers: int = 40
    hidden_size: int = 5120
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    compress_ratios: tuple[int, ...] = (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: YarnScaling | None = YarnScaling()
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-20
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    quantization_config: QuantizationConfig | None = QuantizationConfig()
    ignored_keys: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Keys of the dictionary that it was read from which attention does not use."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value, remedy = getattr(self, f.name), f"the release has {f.default!r}"
            if f.name in _FIXED:
                if type(value) is not int or value != _FIXED[f.name]:
                    raise ConfigError(
                        f"{f.name} is {value!r}: expected {_FIXED[f.name]}, which V4.1's cache records and kernels "
                        "are built for; use a DeepSeek-V4.1 config"
                    )
            elif f.name in _IDS:
                if not isinstance(value, list | tuple):
                    raise ConfigError(f"{f.name} is {value!r}: expected a list of integers; {remedy}")
                for i, item in enumerate(value):
                    _integer(f"{f.name}[{i}]", item, 0, remedy)
                object.__setattr__(self, f.name, tuple(value))
            elif f.type == "float":
                object.__setattr__(self, f.name, _positive(f.name, value, remedy))
            elif f.type == "int":
                unused = f.name.startswith("candidate_") and self.candidate_source_layer_id == -1
                _integer(f.name, value, _MINIMUM.get(f.name, 0 if unused else 1), remedy)
        if self.num_attention_heads % self.o_groups:
            raise ConfigError(
                f"num_attention_heads is {self.num_attention_heads} with o_groups {self.o_groups}: expected a multiple "
                "of o_groups, since each output group takes whole heads; change one of the two"
            )
        check_schedule(self)

    @classmethod
    def from_json(cls, path: str | Path) -> DeepseekV41Config:
        """Read a `config.json`. Raises ConfigError where it cannot be read or is no valid configuration."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}): expected the config.json of a checkpoint; check the path"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path} is not JSON ({error}): expected the config.json of a checkpoint; fetch it again"
            ) from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeepseekV41Config:
        """Build from the contents of a `config.json`, nested under `text_config` or flat.

        Only draft layers and `quantization_config` may be absent: geometry is never guessed. Keys that attention does
        not use are kept in `ignored_keys`. Raises ConfigError.
        """
        data = _mapping("config", data)
        text = _mapping("text_config", data["text_config"]) if "text_config" in data else data
        names = [f.name for f in fields(cls) if f.name not in ("ignored_keys", "rope_scaling")]
        values = {name: text[name] for name in names if name in text}
        rope, ignored = _read_rope(text)
        for name, value in rope.items():
            if values.setdefault(name, value) != value:
                raise ConfigError(
                    f"{name} is {values[name]!r} but {value!r} in rope_parameters: expected the same; remove one"
                )
        values.setdefault("quantization_config", data.get("quantization_config"))
        if values["quantization_config"] is not None:
            values["quantization_config"], more = _read_quantization(values["quantization_config"])
            ignored |= more
        ignored |= (set(data) | set(text)) - set(names) - {"text_config", "rope_scaling", "rope_parameters"}

        if missing := [name for name in names if name not in values and name not in _OPTIONAL]:
            v4 = " (model_type is 'deepseek_v4', which is not V4.1)" if text.get("model_type") == "deepseek_v4" else ""
            wanted = ", ".join(f"{name} (the release has {getattr(cls, name)!r})" for name in missing)
            raise ConfigError(
                f"the config lacks {', '.join(missing)}{v4}: expected every field of the attention geometry, none is "
                f"guessed; add {wanted}"
            )
        if "num_nextn_predict_layers" not in values:
            # The schedule has one entry a layer, draft layers included.
            ratios, layers = values["compress_ratios"], values["num_hidden_layers"]
            drafts = len(ratios) - layers if isinstance(ratios, list | tuple) and isinstance(layers, int) else 0
            values["num_nextn_predict_layers"] = max(0, drafts)
        return cls(**values, ignored_keys=tuple(sorted(ignored)))

    def to_dict(self) -> dict[str, Any]:
        """The flat form that `from_dict` reads back, ready for `json.dump`."""
        data = asdict(self)
        del data["ignored_keys"]
        if self.rope_scaling is not None:
            data["rope_scaling"] = {"rope_type": "yarn", **data["rope_scaling"]}
        if self.quantization_config is None:
            del data["quantization_config"]
        result: dict[str, Any] = json.loads(json.dumps(data))
        return result

    @property
    def draft_layer_ids(self) -> range:
        """Ids of the draft layers `mtp.M`: `num_hidden_layers + M`."""
        return range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers)

    @property
    def geometry(self) -> Geometry:
        """The shapes that a backend is judged by, before tensor parallelism."""
        return Geometry(
            num_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            rope_head_dim=self.qk_rope_head_dim,
            window=self.sliding_window,
            topk=self.index_topk,
            o_groups=self.o_groups,
            index_heads=self.index_n_heads,
            index_head_dim=self.index_head_dim,
            ratios=tuple(sorted(set(self.compress_ratios))),
        )


def _read_rope(text: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """`rope_scaling` and the bases of `rope_scaling` or `rope_parameters`, and the keys left unused.

    Nested as `{"main": ..., "compress": ...}`, only the base of "main" is read: layers with ratio 0 never use YaRN,
    and some exporters repeat the scaling there.
    """
    key = "rope_scaling" if text.get("rope_scaling") is not None else "rope_parameters"
    if key not in text and "rope_scaling" not in text:
        raise ConfigError(
            "the config has neither rope_scaling nor rope_parameters: expected one of them; add the release's (yarn, "
            'factor 16, original_max_position_embeddings 65536), or "rope_scaling": null for no YaRN'
        )
    if text.get(key) is None:
        return {"rope_scaling": None}, set()
    scaling = _mapping(key, text[key])
    result: dict[str, Any] = {}
    if "main" in scaling or "compress" in scaling:
        parts = {part: _mapping(f"{key}.{part}", scaling.get(part)) for part in ("main", "compress")}
        for part, name in (("main", "rope_theta"), ("compress", "compress_rope_theta")):
            if "rope_theta" in parts[part]:
                result[name] = parts[part]["rope_theta"]
        key, scaling = f"{key}.compress", parts["compress"]
    elif "rope_theta" in scaling:
        result["rope_theta"] = scaling["rope_theta"]

    kinds = {repr(scaling[name]) for name in ("rope_type", "type") if name in scaling}
    # A base alone says that there is nothing more; nothing at all says nothing.
    if kinds not in ({"'yarn'"}, {"'default'"}) and scaling.keys() != {"rope_theta"}:
        raise ConfigError(
            f"{key}.rope_type is {' and '.join(sorted(kinds)) or 'missing'}: expected 'yarn' or 'default' (no YaRN), "
            "V4.1 uses no other; set it as in the release's config.json"
        )
    if kinds != {"'yarn'"}:
        return result | {"rope_scaling": None}, set()
    names = [f.name for f in fields(YarnScaling)]
    for name in ("factor", "original_max_position_embeddings"):
        if name not in scaling:
            default = getattr(YarnScaling, name)
            raise ConfigError(f"{key} lacks {name}: expected it with YaRN; add it (the release has {default})")
    result["rope_scaling"] = YarnScaling(**{name: scaling[name] for name in names if name in scaling})
    return result, {f"{key}.{name}" for name in scaling.keys() - {*names, "type", "rope_type", "rope_theta"}}


def _read_quantization(value: object) -> tuple[QuantizationConfig, set[str]]:
    data = _mapping("quantization_config", value)
    names = [f.name for f in fields(QuantizationConfig)]
    for name in ("quant_method", "weight_block_size", "scale_fmt"):
        if name not in data:
            raise ConfigError(
                f"quantization_config lacks {name}: expected {getattr(QuantizationConfig, name)!r}; add it as in the "
                "release's config.json"
            )
    config = QuantizationConfig(**{name: data[name] for name in names if name in data})
    return config, {f"quantization_config.{name}" for name in data.keys() - set(names)}
