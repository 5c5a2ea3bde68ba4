"""The schedule: who owns, who reads, and every schedule that cannot be built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41.config import DeepseekV41Config
from dsv41.errors import ConfigError
from dsv41.topology import layer_specs, role

from ..wording import refused

RELEASE = DeepseekV41Config()


def schedule(ratios: list[int], kv: list[int], index: list[int], candidate: int = -1, **more: Any) -> DeepseekV41Config:
    return replace(
        RELEASE,
        **{
            "num_hidden_layers": len(ratios),
            "compress_ratios": tuple(ratios),
            "kv_source_layer_ids": tuple(kv),
            "index_source_layer_ids": tuple(index),
            "candidate_source_layer_id": candidate,
            "num_nextn_predict_layers": 0,
            **more,
        },
    )


def test_the_released_roles() -> None:
    specs = layer_specs(RELEASE)
    assert [spec.layer_id for spec in specs] == list(range(40))
    assert [spec.layer_id for spec in specs if spec.owns_compressed] == [2, 8, 14, 20]
    assert [spec.layer_id for spec in specs if spec.owns_selection] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [spec.layer_id for spec in specs if spec.publishes_candidates] == [20]
    assert [spec.layer_id for spec in specs if spec.reads_candidates] == [24, 28, 32, 36]
    assert [spec.ratio for spec in specs] == list(RELEASE.compress_ratios[:40])
    assert (specs[1].kv_source, specs[1].index_source) == (None, None)
    assert (specs[7].kv_source, specs[7].index_source) == (2, 2)
    assert (specs[27].kv_source, specs[27].index_source) == (20, 24)
    assert (specs[24].candidate_blocks, specs[24].candidate_block_size) == (2048, 8)
    assert (specs[25].candidate_blocks, specs[25].candidate_block_size) == (0, 0)
    assert {spec.scale for spec in specs} == {512**-0.5}
    assert specs[39].name == "layers.39.attn"
    assert [role(specs[i]) for i in (0, 2, 3, 20, 24, 25)] == [
        "window only",
        "kv source, ratio 2, index source",
        "kv of layer 2, ratio 2, top-k of layer 2",
        "kv source, ratio 1, index source, publishes candidates",
        "kv of layer 20, ratio 1, index source, reads candidates",
        "kv of layer 20, ratio 1, top-k of layer 24",
    ]


@pytest.mark.parametrize("heads", [64, 128])
def test_fr_90_draft_layers_have_a_spec_of_their_own(heads: int) -> None:
    """A draft layer never borrows the ratio of a target layer, whatever the size of the model."""
    config = replace(RELEASE, num_attention_heads=heads)
    drafts = layer_specs(config, layers=[40, 41, 42])
    assert [spec.name for spec in drafts] == ["mtp.0.attn", "mtp.1.attn", "mtp.2.attn"]
    for spec in drafts:
        assert (spec.ratio, spec.causal, spec.kv_source, spec.index_source) == (0, False, None, None)
        assert role(spec) == "draft, window only"
    assert all(spec.causal for spec in layer_specs(config))
    # Draft layers past the end of the list count as 0.
    short = replace(config, compress_ratios=config.compress_ratios[:41])
    assert layer_specs(short, layers=[42]) == drafts[2:]


@pytest.mark.parametrize(("ratios", "layer"), [([128, 128, 4, 128], 0), ([0, 0, 4, 128], 2)])
def test_fr_90_v4_schedules_are_refused(ratios: list[int], layer: int) -> None:
    with refused(ConfigError, f"compress_ratios[{layer}]", f"layer {layer}", ratios[layer], "DeepSeek-V4's ratios"):
        schedule(ratios, [], [])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([0, 2], [1], [1], -1, {"num_hidden_layers": 4}), ["compress_ratios", "2 entries", "layer 2", "4"]),
        (([0, 3], [1], [1]), ["compress_ratios[1]", "3", "layer 1"]),
        (([0, 2, 2], [], [2]), ["layer 1", "ratio 2", "kv_source_layer_ids []", "KV source"]),
        (([0, 2, 2], [2], [2]), ["layer 1", "kv_source_layer_ids [2]", "KV source"]),
        (([2, 1], [0], [0]), ["layer 1", "ratio 1", "layer 0", "ratio 2"]),
        (([2, 1, 1], [0, 2], [0, 2]), ["layer 1", "ratio 1", "layer 0", "ratio 2"]),
        (([2, 2], [0, 1], [0]), ["kv_source_layer_ids", "layer 1", "index_source_layer_ids"]),
        (([2, 2], [0], []), ["kv_source_layer_ids", "layer 0", "index_source_layer_ids"]),
        (([0, 2], [0, 1], [0, 1]), ["kv_source_layer_ids", "layer 0", "compress_ratios"]),
        (([2, 0], [0], [0, 1]), ["index_source_layer_ids", "layer 1", "compress_ratios"]),
        (([2, 2, 2], [2, 0], [0, 2]), ["kv_source_layer_ids", "[2, 0]", "not sorted", "layer 0"]),
        (([2, 2, 2], [0], [0, 2, 2]), ["index_source_layer_ids", "[0, 2, 2]", "repeats layer 2"]),
        (([2, 2], [0], [0, 2]), ["index_source_layer_ids", "layer 2", "num_hidden_layers 2"]),
        (([2, 2], [0], [0, 1], 1), ["candidate_source_layer_id is 1", "layer 1", "[0]", "-1"]),
        (([2, 2], [0], [0, 1], 7), ["candidate_source_layer_id is 7", "layer 7"]),
        (
            ([0, 2, 1], [1], [1], -1, {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}),
            ["compress_ratios[2]", "layer 2", "draft layer 0"],
        ),
    ],
)
def test_schedules_that_cannot_be_built_are_refused(arguments: tuple[Any, ...], named: list[str]) -> None:
    more = arguments[4] if len(arguments) > 4 else {}
    with refused(ConfigError, *named):
        schedule(*arguments[:4], **more)


def test_a_new_kv_source_discards_the_candidates_of_the_one_before() -> None:
    specs = layer_specs(schedule([1, 1, 1, 1], kv=[0, 2], index=[0, 1, 2, 3], candidate=0))
    assert [spec.publishes_candidates for spec in specs] == [True, False, False, False]
    assert [spec.reads_candidates for spec in specs] == [False, True, False, False]


def test_no_candidate_source_no_filter() -> None:
    specs = layer_specs(replace(RELEASE, candidate_source_layer_id=-1))
    assert not any(spec.publishes_candidates or spec.reads_candidates or spec.candidate_blocks for spec in specs)


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([0, 3], ["[0, 3]", "layer 2, the KV source of layer 3", "add [2]"]),
        ([20, 25], ["[20, 25]", "layer 24, the index source of layer 25", "add [24]"]),
        ([25], ["layer 20, the KV source of layer 25", "layer 24, the index source of layer 25", "add [20, 24]"]),
        ([0, 43], ["43", "0 .. 42"]),
        ([-1], ["-1", "0 .. 42"]),
        (["0"], ["'0'", "0 .. 42"]),
        ([True], ["True", "0 .. 42"]),
        ([0, 1, 0], ["[0, 1, 0]", "twice"]),
        ([], ["[]", "at least one"]),
    ],
)
def test_a_choice_of_layers_that_cannot_run_is_refused(layers: list[Any], named: list[str]) -> None:
    with refused(ConfigError, *named):
        layer_specs(RELEASE, layers=layers)


def test_a_choice_of_layers_keeps_their_roles_in_order() -> None:
    full = layer_specs(RELEASE)
    assert layer_specs(RELEASE, layers=[24, 0, 20, 3, 2]) == [full[i] for i in (0, 2, 3, 20, 24)]


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("heads", [8, 16, 64, 96, 128])
def test_fr_74_ranks_get_whole_groups_or_a_refusal(heads: int, groups: int) -> None:
    """A rank's share of heads and groups keeps the width of a group; a tp_size that splits one is refused."""
    config = replace(RELEASE, num_attention_heads=heads, o_groups=groups)
    for tp_size in range(1, 17):
        if heads % tp_size or groups % tp_size:
            with refused(ConfigError, f"tp_size is {tp_size}"):
                layer_specs(config, tp_size=tp_size)
            continue
        for spec in layer_specs(config, tp_size=tp_size):
            assert spec.num_heads * tp_size == heads
            assert spec.padded_heads == spec.num_heads
            assert spec.num_heads / spec.o_groups == heads / groups
            assert spec.index_heads == config.index_n_heads


@pytest.mark.parametrize("tp_size", [0, -1, 2.0, True, None])
def test_a_tp_size_that_is_no_count_is_refused(tp_size: Any) -> None:
    with refused(ConfigError, "tp_size", repr(tp_size)):
        layer_specs(RELEASE, tp_size=tp_size)


@given(st.data())
def test_every_layer_of_a_valid_schedule_has_its_sources(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    ids = st.lists(st.integers(0, count - 1), max_size=count).map(lambda found: sorted(set(found)))
    ratios, kv = data.draw(st.lists(st.sampled_from([0, 1, 2]), min_size=count, max_size=count)), data.draw(ids)
    index = data.draw(ids)
    try:
        config = schedule(ratios, kv, index, data.draw(st.sampled_from([-1, *kv])))
    except ConfigError:
        return
    specs = layer_specs(config)
    for spec in specs:
        sources = (spec.kv_source, spec.index_source)
        if not spec.ratio:
            assert sources == (None, None)
            continue
        kv_source, index_source = (specs[source] for source in sources if source is not None)
        assert kv_source.layer_id <= index_source.layer_id <= spec.layer_id
        assert kv_source.owns_compressed
        assert kv_source.ratio == spec.ratio
        assert index_source.owns_selection
        assert index_source.kv_source == spec.kv_source
        assert not spec.reads_candidates or kv_source.publishes_candidates
    assert layer_specs(config, layers=range(count)) == specs
