"""Who does what: which layers own a compressed cache, which choose the top-k, and which read those of another layer.

The rules are those of the released schedule: a layer reads the compressed rows of the nearest KV source at or below
it, and the selection of the nearest index source at or below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from dsv41.errors import ConfigError
from dsv41.hal.types import LayerSpec

if TYPE_CHECKING:
    from dsv41.config import DeepseekV41Config


def layer_specs(config: DeepseekV41Config, *, tp_size: int = 1, layers: Sequence[int] | None = None) -> list[LayerSpec]:
    """The static facts of each layer on one of `tp_size` ranks, in ascending order of layer.

    `layers` chooses some, by id; draft layer M has the id `num_hidden_layers + M` and must be asked for, since draft
    layers do not run in the target model's step. None = every target layer. `padded_heads` is the number of local
    heads until a backend says what it pads to.

    Raises ConfigError for a `tp_size` that does not divide heads and output groups, for unknown or repeated ids, and
    for a choice that lacks the source of one of its layers.
    """
    check_tp_size(config, tp_size)
    chosen = list(range(config.num_hidden_layers)) if layers is None else _check_layers(config, layers)
    specs = [_spec(config, layer, tp_size) for layer in chosen]
    _check_sources_chosen(specs)
    return specs


def role(spec: LayerSpec) -> str:
    """What a layer does, in a few words, such as "kv source, ratio 2, index source"."""
    if not spec.causal:
        return "draft, window only"
    if spec.ratio == 0:
        return "window only"
    parts = ["kv source" if spec.owns_compressed else f"kv of layer {spec.kv_source}", f"ratio {spec.ratio}"]
    parts.append("index source" if spec.owns_selection else f"top-k of layer {spec.index_source}")
    if spec.publishes_candidates:
        parts.append("publishes candidates")
    if spec.reads_candidates:
        parts.append("reads candidates")
    return ", ".join(parts)


def check_tp_size(config: DeepseekV41Config, tp_size: int) -> None:
    """Raise ConfigError unless every rank gets whole heads and whole output groups."""
    if type(tp_size) is not int or tp_size < 1:
        raise ConfigError(f"tp_size is {tp_size!r}: expected an integer of at least 1; give the number of ranks")
    for name, count in (("num_attention_heads", config.num_attention_heads), ("o_groups", config.o_groups)):
        if count % tp_size:
            usable = [n for n in range(1, config.o_groups + 1) if config.o_groups % n == 0]
            raise ConfigError(
                f"tp_size is {tp_size} with {name} {count}: expected a divisor of num_attention_heads and of o_groups, "
                f"since a split group would mix other heads; choose one of {usable}"
            )


def check_schedule(config: DeepseekV41Config) -> None:
    """Raise ConfigError, naming the layer, for a schedule in which some layer's role cannot be settled."""
    ratios, count = config.compress_ratios, config.num_hidden_layers
    if len(ratios) < count:
        raise ConfigError(
            f"compress_ratios has {len(ratios)} entries, none for layer {len(ratios)}: expected one for each of the "
            f"num_hidden_layers {count}; add the missing ones"
        )
    for layer, ratio in enumerate(ratios):
        if ratio not in (0, 1, 2):
            v4 = " (4 and 128 are DeepSeek-V4's ratios)" if ratio in (4, 128) else ""
            raise ConfigError(
                f"compress_ratios[{layer}] is {ratio}{v4}: layer {layer} can read no such cache; expected 0 (window "
                "only), 1 or 2; use a DeepSeek-V4.1 config"
            )
        if ratio and layer >= count:
            raise ConfigError(
                f"compress_ratios[{layer}] is {ratio}, but layer {layer} is draft layer {layer - count}: expected 0, "
                "draft layers are window only; set it to 0 or correct num_hidden_layers"
            )
    for name, ids in (
        ("kv_source_layer_ids", config.kv_source_layer_ids),
        ("index_source_layer_ids", config.index_source_layer_ids),
    ):
        _check_sources(name, ids, config)
    for layer in config.kv_source_layer_ids:
        if layer not in config.index_source_layer_ids:
            raise ConfigError(
                f"kv_source_layer_ids has layer {layer}, which index_source_layer_ids lacks: expected every KV source "
                f"to be an index source, since no selection fits its new rows; add {layer} to index_source_layer_ids"
            )
    for layer, ratio in enumerate(ratios):
        if ratio:
            _check_reader(layer, ratio, config)
    candidate = config.candidate_source_layer_id
    if candidate != -1 and candidate not in config.kv_source_layer_ids:
        raise ConfigError(
            f"candidate_source_layer_id is {candidate}, but layer {candidate} is no KV source: expected one of "
            f"kv_source_layer_ids {list(config.kv_source_layer_ids)}; use one of them, or -1 for no candidate filter"
        )


def _check_sources(name: str, ids: tuple[int, ...], config: DeepseekV41Config) -> None:
    for before, layer in pairwise(ids):
        if layer <= before:
            what = "repeats" if layer == before else "is not sorted at"
            raise ConfigError(
                f"{name} is {list(ids)}: it {what} layer {layer}; expected ascending ids without repeats; use "
                f"{sorted(set(ids))}"
            )
    for layer in ids:
        if layer >= config.num_hidden_layers:
            raise ConfigError(
                f"{name} has layer {layer}: expected ids below num_hidden_layers {config.num_hidden_layers}; remove it"
            )
        if config.compress_ratios[layer] == 0:
            raise ConfigError(
                f"{name} has layer {layer}, whose compress_ratios entry is 0: expected a ratio of 1 or 2 for a source; "
                f"remove {layer} from {name} or correct compress_ratios[{layer}]"
            )


def _check_reader(layer: int, ratio: int, config: DeepseekV41Config) -> None:
    for what, name, ids in (
        ("KV", "kv_source_layer_ids", config.kv_source_layer_ids),
        ("index", "index_source_layer_ids", config.index_source_layer_ids),
    ):
        if _nearest(ids, layer) is None:
            raise ConfigError(
                f"layer {layer} has ratio {ratio} but {name} {list(ids)} has no {what} source at or below it; expected "
                f"one; add {layer} or an earlier layer of ratio {ratio} to {name}, or set compress_ratios[{layer}] to 0"
            )
    source = _nearest(config.kv_source_layer_ids, layer)
    assert source is not None
    if config.compress_ratios[source] != ratio:
        raise ConfigError(
            f"layer {layer} has ratio {ratio} but its nearest KV source, layer {source}, has ratio "
            f"{config.compress_ratios[source]}: expected the same; correct compress_ratios[{layer}] or add a KV source "
            f"of ratio {ratio} between them"
        )


def _nearest(ids: tuple[int, ...], layer: int) -> int | None:
    return max((i for i in ids if i <= layer), default=None)


def _check_layers(config: DeepseekV41Config, layers: Sequence[int]) -> list[int]:
    end = config.num_hidden_layers + config.num_nextn_predict_layers
    if not isinstance(layers, Iterable):
        raise ConfigError(f"layers is {layers!r}: expected a list of ids of 0 .. {end - 1}; give [{layers!r}], say")
    for layer in layers:
        if type(layer) is not int or not 0 <= layer < end:
            raise ConfigError(
                f"layers has {layer!r}: expected ids of 0 .. {end - 1} ({config.num_hidden_layers} layers, then "
                f"{config.num_nextn_predict_layers} draft layers); remove it"
            )
    if not layers or len(set(layers)) != len(layers):
        raise ConfigError(f"layers is {list(layers)}: expected at least one id and none twice; name each layer once")
    return sorted(layers)


def _check_sources_chosen(specs: list[LayerSpec]) -> None:
    chosen = [spec.layer_id for spec in specs]
    needed = {
        source: f"layer {source}, the {what} source of layer {spec.layer_id}"
        for spec in reversed(specs)
        for what, source in (("index", spec.index_source), ("KV", spec.kv_source))
        if source is not None and source not in chosen
    }
    if needed:
        raise ConfigError(
            f"layers is {chosen}, which lacks {'; '.join(needed[s] for s in sorted(needed))}: expected the sources of "
            f"every chosen layer; add {sorted(needed)}"
        )


def _spec(config: DeepseekV41Config, layer: int, tp_size: int) -> LayerSpec:
    draft = layer - config.num_hidden_layers
    ratio = config.compress_ratios[layer] if draft < 0 else 0
    kv_source = _nearest(config.kv_source_layer_ids, layer) if ratio else None
    index_source = _nearest(config.index_source_layer_ids, layer) if ratio else None
    publishes = ratio > 0 and layer == config.candidate_source_layer_id
    # A new KV source discards the candidates of the one before, so they reach the index layers on the same rows only.
    reads = not publishes and index_source == layer and kv_source == config.candidate_source_layer_id
    filters = publishes or reads
    heads = config.num_attention_heads // tp_size
    return LayerSpec(
        layer_id=layer,
        name=f"layers.{layer}.attn" if draft < 0 else f"mtp.{draft}.attn",
        hidden_size=config.hidden_size,
        q_lora_rank=config.q_lora_rank,
        num_heads=heads,
        padded_heads=heads,
        head_dim=config.head_dim,
        rope_dim=config.qk_rope_head_dim,
        window=config.sliding_window,
        ratio=ratio,
        topk=config.index_topk,
        scale=config.head_dim**-0.5,
        eps=config.rms_norm_eps,
        o_groups=config.o_groups // tp_size,
        o_lora_rank=config.o_lora_rank,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        kv_source=kv_source,
        index_source=index_source,
        publishes_candidates=publishes,
        reads_candidates=reads,
        candidate_blocks=config.candidate_topk_blocks if filters else 0,
        candidate_block_size=config.candidate_block_size if filters else 0,
        causal=draft < 0,
    )
