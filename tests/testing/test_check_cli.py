"""`dsv41 check`: its exit code, what it prints and writes, and that it says which stage is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.cli import main
from dsv41.hal.types import AttnInputs, AttnOutput, LayerState, Selection, StepPlan
from dsv41.testing import CLAUSES, Subject, check_backend
from dsv41.testing.html import as_html

from .wrong import SinkIgnored

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)])


def check(*arguments: object) -> tuple[int, dict[str, Any]]:
    result = command("--device", "cpu", "--json", *arguments)
    return result.exit_code, json.loads(result.stdout)


def test_one_clause_of_a_backend() -> None:
    code, data = check("--backend", "reference", "--only", "H1", "--only", "select")
    assert code == 0
    assert check("--backend", "dsv41.backends.reference.backend:ReferenceBackend", "--only", "H1")[0] == 0
    assert data["only"] == ["H1", *(clause.id for clause in CLAUSES if clause.contract == "select")]
    assert data["verdict"].startswith("reference on cpu conforms, as far as it was checked (of H1, ")


def test_it_prints_every_clause_and_what_did_not_run() -> None:
    result = command("--backend", "reference", "--device", "cpu", "--only", "H1", "--only", "G1")
    assert result.exit_code == 0
    assert "1 passed, 1 skipped" in result.output
    assert "not run G1: graph_capture: it does not declare supports_graph_capture" in result.output
    assert all(clause.id in command("--list").output for clause in CLAUSES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "no-such"], "unknown"),
        (["--backend", "no.such:Class"], "package.module:Class"),
        (["--backend", "reference", "--device", "cpu", "--only", "Z9"], "'Z9' is unknown"),
        (["--backend", "reference", "--case", "heads=1"], "--only beside it"),
        (["--backend", "reference", "--device", "cpu", "--only", "M1", "--case", "heads=x"], "expected a number"),
        (["--backend", "reference", "--report", "out.pdf"], ".json or .html"),
        (["--backend", "reference", "--device", "cpu", "--port", "no-such.toml"], "expected a TOML file"),
    ],
)
def test_a_mistake_costs_one_line(arguments: list[str], message: str) -> None:
    result = command(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) < 4 or "unknown" in message


def test_a_failure_is_reported_and_its_command_shows_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceBackend, "prepare_selection", lambda self, selection, layer, plan: selection)
    out = tmp_path / "out.json"
    code, data = check("--backend", "reference", "--only", "M1", "--seed", 3, "--report", out)
    assert code == 1
    assert json.loads(out.read_text()) == data
    failure = data["results"][0]["failure"]
    assert failure["seed"] == 3
    words = failure["command"].split()
    assert words[:2] == ["dsv41", "check"]
    again = CliRunner().invoke(main, [*words[1:], "--json"])
    assert again.exit_code == 1
    assert json.loads(again.stdout)["mode"] == "one case"
    result = command("--backend", "reference", "--device", "cpu", "--only", "M1", "--seed", 3)
    assert f"again: {failure['command']}" in result.output


# Faults in each stage of the backend that this machine would use


def wrong_rows(self: ReferenceBackend, hidden: Tensor, layer: LayerState, plan: StepPlan) -> Tensor:
    return _write_window(self, hidden.flip(-1), layer, plan)


def wrong_logits(self: ReferenceBackend, inputs: AttnInputs, layer: LayerState, plan: StepPlan) -> Tensor:
    return -_index_scores(self, inputs, layer, plan) if self.name == "reference" else torch.empty(0)


_write_window, _index_scores = ReferenceBackend._write_window, ReferenceBackend.index_scores
_select, _forward_mqa, _o_proj = ReferenceBackend.select, ReferenceBackend.forward_mqa, ReferenceBackend.o_proj


def wrong_choice(
    self: ReferenceBackend, inputs: AttnInputs, layer: LayerState, plan: StepPlan, published: Selection | None
) -> Selection:
    found = _select(self, inputs, layer, plan, published)
    rows = torch.where(found.topk_indices == found.topk_indices.amax(1, keepdim=True), -1, found.topk_indices)
    return replace(found, topk_indices=rows)


def wrong_attention(
    self: ReferenceBackend,
    inputs: AttnInputs,
    layer: LayerState,
    selection: Selection | None,
    plan: StepPlan,
    out: AttnOutput,
) -> None:
    _forward_mqa(self, inputs, replace(layer, spec=replace(layer.spec, scale=1.0)), selection, plan, out)


def wrong_projection(self: ReferenceBackend, out: AttnOutput, layer: LayerState, positions: Tensor) -> Tensor:
    return _o_proj(self, replace(out, rotated_back=True), layer, positions)


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "cache read-back": ("_write_window", wrong_rows),
    "index logits": ("index_scores", wrong_logits),
    "selection": ("select", wrong_choice),
    "attention": ("forward_mqa", wrong_attention),
    "projection": ("o_proj", wrong_projection),
}


@pytest.mark.parametrize("stage", FAULTS)
def test_fr_119_a_fault_in_a_stage_of_the_selected_backend_is_found_there(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the backend that selection chooses; the oracle stays as it is."""
    name, fault = FAULTS[stage]
    monkeypatch.delenv("DSV41_BACKEND", raising=False)
    subject = Subject.of(None, "cpu")
    assert subject.name == "reference"

    class Faulty(ReferenceBackend):
        pass

    setattr(Faulty, name, fault)
    monkeypatch.setattr(subject, "_make", Faulty)
    monkeypatch.setattr(Subject, "of", staticmethod(lambda *arguments, **options: subject))
    code, data = check()
    assert code == 1
    first = next(found for found, state in data["stages"].items() if state != "right")
    assert (first, data["stages"][stage]) == (stage, "wrong")
    assert data["advice"].startswith(f"{stage} of reference is wrong (clauses ")
    assert "Report it to the author" in command("--device", "cpu").output.replace("\n", " ")


def test_without_a_fault_every_stage_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSV41_BACKEND", raising=False)
    code, data = check()
    assert code == 0
    assert (data["asked"], data["backend"]) == ("what this machine would use", "reference")
    assert set(data["stages"].values()) == {"right"}
    assert data["advice"] is None


# The page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    report = check_backend(Subject.of(SinkIgnored), only=["D1", "M10", "G1"])
    report.notes.append("<script>alert('not run')</script>")
    path = tmp_path_factory.mktemp("page") / "out.html"
    path.write_text(as_html(report), encoding="utf-8")
    return path


class _Elements(HTMLParser):
    """Every element with its attributes and text; complains of tags that do not match."""

    VOID = frozenset(("meta", "br", "link"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[int] = []
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        if tag not in self.VOID:
            self.open.append(len(self.found) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.found[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for place in self.open:
            self.found[place][2].append(data)

    def text(self, tag: str, **attributes: str) -> str:
        [text] = [
            " ".join("".join(parts).split())
            for name, attrs, parts in self.found
            if name == tag and attributes.items() <= attrs.items()
        ]
        return text


def hold_page(source: str) -> None:
    """What a reader must find in the page, and nothing that is loaded from elsewhere."""
    elements = _Elements()
    elements.feed(source)
    elements.close()
    assert not elements.open
    assert "does not conform" in elements.text("p", id="verdict")
    failure = elements.text("article", id="failure-M10")
    assert "A head's sink joins the denominator only" in failure
    assert "wrong:SinkIgnored --device cpu --only M10 --seed 0 --case heads=1,requests=0+1" in failure
    assert "supports_graph_capture" in elements.text("section", id="skips")
    assert "contract version" in elements.text("section", id="ran-on")
    contracts = [parts for tag, attrs, parts in elements.found if attrs.get("class") == "contract"]
    assert [" ".join("".join(parts).split()).split(" clause")[0] for parts in contracts] == [
        "declarations",
        "forward_mqa",
        "graph capture",
    ]
    assert not [attrs for _, attrs, _ in elements.found if {"src", "href"} & attrs.keys()]
    assert not [tag for tag, *_ in elements.found if tag == "script"]


def test_the_page_is_whole(page: Path) -> None:
    hold_page(page.read_text(encoding="utf-8"))


def test_a_browser_shows_the_page(page: Path, tmp_path: Path) -> None:
    """What it makes of the page holds the same, and it can draw it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser on the PATH: one of {', '.join(BROWSERS)}")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    picture = tmp_path / "page.png"
    for wanted in ("--dump-dom", f"--screenshot={picture}"):
        done = subprocess.run(
            [browser, *options, wanted, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
        if wanted == "--dump-dom":
            hold_page(done.stdout)
    assert picture.stat().st_size > 10_000


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    result = command("--backend", "reference", "--device", "cpu", "--only", "H1", "--report", out)
    assert result.exit_code == 0
    assert "<h1>reference on cpu</h1>" in out.read_text(encoding="utf-8")
    assert command("--backend", "reference", "--device", "cpu", "--report", tmp_path / "no" / "out.html").exit_code == 2


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("layer=foo", "layer='foo' in a case: expected one of window, source2"),
        ("layout=zzz", "layout='zzz' in a case: expected one of own"),
        ("preset=zzz", "preset='zzz' in a case: expected one of normal"),
        ("sinks=zz", "expected one of own, mixed"),
        ("kv=zzz", "expected one of auto"),
        ("heads=0", "heads='0' in a case: expected a number from 1 to 128"),
        ("heads=-3", "expected a number from 1 to 128"),
        ("requests=1+99999999", "of at most 4096 tokens"),
        ("heads=1,heads=2", "names 'heads': expected some of heads"),
    ],
)
def test_a_case_that_cannot_be_is_refused_before_anything_is_blamed(case: str, says: str) -> None:
    done = CliRunner().invoke(main, ["check", "--backend", "reference", "--only", "M1", "--case", case])
    assert done.exit_code == 2
    assert says in done.output


@pytest.mark.parametrize("path", ["json:JSONEncoder", "os:getcwd"])
def test_a_class_that_is_no_backend_is_refused(path: str) -> None:
    done = CliRunner().invoke(main, ["check", "--backend", path])
    assert done.exit_code == 2
    assert "expected a class that derives from AttentionBackend" in done.output
