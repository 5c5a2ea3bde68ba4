"""`dsv41 probe` as a person sees it."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from dsv41.hal.builtin import REFERENCE
from dsv41.hal.device import Library, Platform, platform_names
from dsv41.hal.probe import probe
from dsv41.hal.registry import register, unregister
from dsv41.probe_cli import probe_report, render


def shown(platform: Platform, width: int = 200) -> str:
    stream = io.StringIO()
    render(Console(file=stream, width=width), platform)
    return stream.getvalue()


@pytest.mark.parametrize("name", platform_names())
def test_every_platform_can_be_shown(name: str) -> None:
    text = shown(Platform.load(name))
    for words in (f"(played back from {name})", "flashmla-mega", "reference", "chosen", "[arch]"):
        assert words in text


def test_a_narrow_terminal_loses_nothing() -> None:
    narrow = shown(Platform.load("h200-no-flashmla"), width=60)
    assert "tokenspeed-flashmla" in "".join(line.strip("│ ").split("│")[-1].strip() for line in narrow.splitlines())


def test_what_is_intended_and_what_is_chosen_are_both_shown() -> None:
    register(replace(REFERENCE, name="later", target=None, priority=99, slow_on_gpu=False))
    try:
        text = shown(Platform.load("mi355x"))
    finally:
        unregister("later")
    assert "later (intended)" in text
    assert "[planned]" in text
    (row,) = [line for line in text.splitlines() if "│ cuda:0" in line and "MI355X" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")][-2:] == ["aiter", "later"]


def test_this_machine_can_be_shown() -> None:
    platform = probe()
    assert "played back" not in shown(platform)
    assert set(probe_report(platform)) >= {"devices", "chosen", "backends", "libraries", "torch", "notes"}


def test_what_a_platform_says_is_no_markup() -> None:
    """Whatever text a file holds is shown as it is."""
    odd, base = "see [/x] [red]here", Platform.load("h200")
    devices = (replace(base.devices[0], name=odd, problem=odd), base.devices[1])
    library = Library(True, odd, frozenset({odd}), None)
    platform = replace(
        base,
        about=f"about {odd}",
        origin=f"origin {odd}",
        devices=devices,
        torch=replace(base.torch, version=f"torch {odd}"),
        driver=f"driver {odd}",
        notes=(f"note {odd}",),
        libraries={**base.libraries, odd: library, "triton": replace(library, problem=odd)},
    )
    text = shown(platform, width=400)
    for words in ("about", "origin", "torch", "driver", "note"):
        assert f"{words} {odd}" in text
    assert text.count(odd) > 10


def test_the_request_goes_through() -> None:
    report = probe_report(Platform.load("h200"), kv_cache_dtype="nvfp4_ds_mla", tp_size=8)
    assert report["intended"]["cuda:0"] == "portable"
    (reason, *_) = report["backends"]["flashmla"]["cuda:0"]["reasons"]
    assert reason["class"] == "dtype"
