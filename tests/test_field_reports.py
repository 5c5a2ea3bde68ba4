"""docs/field-reports.md names tests that exist, and all those that are named after a report."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/field-reports.md").read_text(encoding="utf-8")
ROWS = [(int(number), cell) for number, cell in re.findall(r"^\| FR-(\d+) \|[^|]+\| (.+) \|$", PAGE, re.MULTILINE)]
TESTS = {
    str(path.relative_to(ROOT)): {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    for path in (ROOT / "tests").rglob("test_*.py")
}


def named(cell: str) -> set[tuple[str, str]]:
    """The tests of a row, each with its file: "`tests/a.py`: `test_one`, `test_two`"."""
    files = re.findall(r"`(tests/\S+?\.py)`: (`\w+`(?:, `\w+`)*)", cell)
    return {(file, name) for file, names in files for name in re.findall(r"`(\w+)`", names)}


def test_each_report_has_one_row_in_their_order() -> None:
    numbers = [number for number, _ in ROWS]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == PAGE.count("\n| FR-") > 100


def test_every_test_that_is_named_exists() -> None:
    missing = [(number, test) for number, cell in ROWS for test in named(cell) if test[1] not in TESTS.get(test[0], ())]
    assert missing == []


def test_every_mention_of_a_test_was_read() -> None:
    mentioned = Counter(re.findall(r"`(test_\w+)`", PAGE))
    assert mentioned == Counter(name for _, cell in ROWS for _, name in named(cell))


def test_every_test_named_after_a_report_stands_in_its_row() -> None:
    rows = {number: named(cell) for number, cell in ROWS}
    missing = [
        (number, file, name)
        for file, names in TESTS.items()
        for name in names
        if name.startswith("test_fr_")
        for number in map(int, re.findall(r"(?<=fr_)\d+", name))
        if (file, name) not in rows.get(number, set())
    ]
    assert missing == []


def test_a_row_without_a_test_says_why() -> None:
    words = ("impossible here", "not covered", "`dsv41 check`")
    assert [number for number, cell in ROWS if not named(cell) and not any(word in cell for word in words)] == []
