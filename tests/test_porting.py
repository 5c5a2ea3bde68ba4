"""What docs/porting.md shows is a backend that passes the suite, and it speaks of every clause."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from dsv41.hal.registry import register, unregister
from dsv41.testing import CLAUSES, BackendConformance, Outcome, Port, Subject, check_backend

PAGE = (Path(__file__).parents[1] / "docs/porting.md").read_text(encoding="utf-8")
FILES = re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(params=["at first", "in the end"])
def abacus(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's files, known to this process as if installed. One is there twice: at first it does nothing."""
    for name, text in FILES if request.param == "in the end" else reversed(FILES):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    register(import_module("dsv41_abacus.spec").SPEC)
    yield tmp_path
    unregister("abacus")
    for module in [name for name in sys.modules if name.startswith("dsv41_abacus")]:
        del sys.modules[module]


def test_the_port_of_the_page_passes(abacus: Path) -> None:
    report = check_backend(Subject.of("abacus", "abacus:0"), port=Port.load(abacus / "port.toml"))
    assert report.ok, report.verdict
    assert sum(result.outcome is Outcome.PASSED for result in report.results) > 30


def test_its_files_are_those_that_it_speaks_of() -> None:
    assert [name for name, _ in FILES] == [
        "pyproject.toml",
        "dsv41_abacus/__init__.py",
        "dsv41_abacus/spec.py",
        "dsv41_abacus/backend.py",
        "dsv41_abacus/backend.py",
        "tests/test_conformance.py",
        "port.toml",
    ]
    names: dict[str, type[BackendConformance]] = {}
    exec(dict(FILES)["tests/test_conformance.py"], names)
    assert (names["TestAbacus"].backend, names["TestAbacus"].device) == ("abacus", "abacus:0")


def test_every_clause_has_its_place_on_the_page() -> None:
    known = [clause.id for clause in CLAUSES]
    headed = set()
    for heading in re.findall(r"^### .*\((.+)\)$", PAGE, re.MULTILINE):
        for kind, first, _, last in re.findall(r"\b([A-Z])(\d+)( to [A-Z](\d+))?", heading):
            headed |= {f"{kind}{number}" for number in range(int(first), int(last or first) + 1)}
    assert headed == set(known)
    assert set(re.findall(r"(?<!Toy )\b[A-Z]\d+\b", PAGE)) <= headed
