"""Which tokens are gathered for, at the borders of the rule, and which rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv41.backends.cuda import prefill
from dsv41.backends.cuda.prefill import Run, all_full, cut, most_rows, pays
from dsv41.hal.types import ForwardBatch

WINDOW, KEYS = 128, 640


def batch(*requests: tuple[int, int], **options: Any) -> ForwardBatch:
    """Of requests with so many new tokens and so many held."""
    pages = torch.zeros(len(requests), 1, dtype=torch.int32)
    return ForwardBatch.from_host(
        query_lens=[tokens for tokens, _ in requests],
        seq_lens=[held for _, held in requests],
        window_pages=pages,
        window_page_size=64,
        **options,
    )


def shape(runs: list[Run]) -> list[tuple[int, int, int]]:
    """First and last token of each run, and how many rows are gathered for it."""
    return [(run.tokens.start, run.tokens.stop, run.gathered.rows if run.gathered else 0) for run in runs]


def test_gathering_pays_while_it_costs_less_than_it_saves() -> None:
    """0.65 ns a row against 0.12 us a token of 640 keys, and less where a token attends to less."""
    assert pays(512, 94523, KEYS)
    assert not pays(512, 94524, KEYS)
    assert pays(4096, 756184, KEYS)
    assert not pays(4096, 756185, KEYS)
    assert pays(512, 18904, 128)
    assert not pays(512, 18905, 128)
    assert not pays(1, 1, KEYS)


def test_a_chunk_of_many_tokens_is_gathered_and_one_of_fewer_is_not() -> None:
    assert shape(cut(batch((512, 512)), WINDOW, 1, KEYS)) == [(0, 512, 512 + 512)]
    assert shape(cut(batch((511, 511)), WINDOW, 1, KEYS)) == [(0, 511, 0)]
    assert shape(cut(batch((511, 511), num_tokens=600), WINDOW, 1, KEYS)) == [(0, 600, 0)]
    # Held rows: 127 of the window before the chunk; all of ratio 1, half of ratio 2, none of ratio 0.
    for ratio, rows in ((0, 639), (1, 639 + 10001), (2, 639 + 5000)):
        assert shape(cut(batch((512, 10001)), WINDOW, ratio, KEYS)) == [(0, 512, rows)]


def test_a_request_that_holds_too_much_is_read_in_place() -> None:
    assert shape(cut(batch((512, 93884)), WINDOW, 1, KEYS)) == [(0, 512, 639 + 93884)]
    assert shape(cut(batch((512, 93885)), WINDOW, 1, KEYS)) == [(0, 512, 0)]


def test_short_prompts_that_follow_one_another_are_gathered_together() -> None:
    prompts = [(300, 300), (212, 212)]
    assert shape(cut(batch(*prompts), WINDOW, 2, KEYS)) == [(0, 512, 512 + 256)]
    assert shape(cut(batch((300, 300), (1, 500), (212, 212)), WINDOW, 2, KEYS)) == [(0, 513, 0)]


def test_decode_and_prefill_are_cut_apart_and_padding_goes_with_the_last() -> None:
    mixed = batch((1, 300), (1, 40), (600, 700), (0, 0), (1, 9), num_tokens=610)
    runs = cut(mixed, WINDOW, 2, KEYS)
    assert shape(runs) == [(0, 2, 0), (2, 602, 700 + 350), (602, 610, 0)]
    gathered = runs[1].gathered
    assert gathered is not None
    assert gathered.requests == slice(2, 3)
    assert gathered.spans.tolist() == [[[0, 700, 0], [0, 350, 700]]]
    last = cut(batch((1, 300), (600, 800), num_tokens=610), WINDOW, 0, KEYS)
    assert shape(last) == [(0, 1, 0), (1, 610, 727)]


def test_spans_follow_the_requests_and_skip_those_without_a_token() -> None:
    starts = {"window_starts": [0, 0, 650, 0]}
    [run] = cut(batch((300, 1000), (0, 50), (300, 900), (2, 2), **starts), WINDOW, 2, KEYS)
    assert run.gathered is not None
    assert run.gathered.requests == slice(0, 4)
    assert run.gathered.longest == (427, 500)
    assert run.gathered.rows == 427 + 250 + 2 + 500 + 450 + 1
    assert run.gathered.spans.tolist() == [
        [[573, 427, 0], [0, 500, 679]],
        [[0, 0, 0], [0, 0, 0]],
        [[650, 250, 427], [0, 450, 1179]],
        [[0, 2, 677], [0, 1, 1629]],
    ]


def test_no_more_is_gathered_at_a_time_than_the_workspace_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MOST_BYTES", 2000 * 1024)
    requests = [(600, 600), (600, 600), (600, 600), (600, 1302)]
    runs = shape(cut(batch(*requests), WINDOW, 2, KEYS))
    assert runs == [(0, 1200, 1800), (1200, 1800, 900), (1800, 2400, 727 + 651)]
    # One that does not fit by itself, and a rest that is too few tokens.
    runs = shape(cut(batch((600, 2600), (600, 600), (600, 600), (300, 300)), WINDOW, 2, KEYS))
    assert runs == [(0, 600, 0), (600, 1800, 1800), (1800, 2100, 0)]


def test_a_draft_and_a_graph_are_read_in_place() -> None:
    for options in ({"causal": False}, {"max_seq_len": 1024}):
        assert shape(cut(batch((600, 600), **options), WINDOW, 0, KEYS)) == [(0, 600, 0)]
    assert shape(cut(batch(), WINDOW, 0, KEYS)) == [(0, 0, 0)]


def test_what_is_reserved_holds_for_every_step_within_it() -> None:
    tokens, requests, longest = 1000, 3, 4000
    for ratio in (0, 1, 2):
        bound = most_rows(tokens, requests, longest, WINDOW, ratio, KEYS)
        for first in (1, 400, 600, 998):
            steps = batch((first, longest), (1000 - first - 1, longest), (1, 100))
            found = [run.gathered.rows for run in cut(steps, WINDOW, ratio, KEYS) if run.gathered]
            assert max(found, default=0) <= bound
    assert most_rows(511, 8, 1 << 20, WINDOW, 1, KEYS) == 0
    assert most_rows(512, 8, 1 << 20, WINDOW, 1, KEYS) == 94523
    assert most_rows(4096, 8, 1 << 20, WINDOW, 1, KEYS) == (256 << 20) // 1024
    assert most_rows(512, 1, 512, WINDOW, 2, KEYS) == 512 + 127 + 256


@pytest.mark.parametrize(
    ("requests", "options", "full"),
    [
        ([(1, 1024), (1, 5000)], {}, True),
        ([(1, 1023), (1, 5000)], {}, False),
        ([(2, 1025)], {}, True),
        ([(2, 1024)], {}, False),
        ([(1, 1024), (0, 3)], {}, True),
        ([(1, 1024)], {"num_tokens": 2}, False),
        ([(1, 1024)], {"max_seq_len": 4096}, False),
        ([(1, 1024)], {"causal": False}, False),
        ([(1, 1024)], {"window_starts": [1024 - WINDOW]}, True),
        ([(1, 1024)], {"window_starts": [1025 - WINDOW]}, False),
        ([(0, 0)], {}, False),
    ],
)
def test_lengths_are_left_out_only_where_every_token_sees_all(
    requests: list[tuple[int, int]], options: dict[str, Any], full: bool
) -> None:
    assert all_full(batch(*requests, **options), WINDOW, 2, 512) == full
    assert all_full(batch((1, WINDOW)), WINDOW, 0, 512)
    assert not all_full(batch((1, WINDOW - 1)), WINDOW, 0, 512)
