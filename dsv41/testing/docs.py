"""The clauses and capabilities as tables: `docs/conformance.md` contains them.

Write them anew with `python -m dsv41.testing.docs docs/conformance.md`, which leaves the rest of the page as it is.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from dsv41.errors import Dsv41Error
from dsv41.testing.clauses import CLAUSES
from dsv41.testing.needs import CAPABILITIES

BEGIN = "<!-- Made by `python -m dsv41.testing.docs docs/conformance.md`; a test compares. -->"
END = "<!-- End of what is made. -->"


def as_markdown() -> str:
    """A table for each contract, and one of the capabilities that clauses need."""
    parts = []
    for contract, clauses in groupby(CLAUSES, key=lambda clause: clause.contract):
        rows = [
            f"| {clause.id} | {clause.sentence} | {', '.join(f'`{need}`' for need in clause.needs)} "
            f"| {clause.stage or ''} |"
            for clause in clauses
        ]
        parts.append("\n".join([f"### {contract}", "", "| id | what must hold | needs | stage |", _rule(4), *rows]))
    rows = [f"| `{name}` | {meaning} |" for name, (meaning, _) in CAPABILITIES.items()]
    parts.append("\n".join(["### Capabilities", "", "| name | means that the backend |", _rule(2), *rows]))
    return "\n\n".join(parts) + "\n"


def written_into(page: str) -> str:
    """The page with what is between its two marks made anew. Raises Dsv41Error where it has no such marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise Dsv41Error(f"a page without the marks: expected {BEGIN!r} and, after it, {END!r}; put both into the page")
    return f"{before}{BEGIN}\n\n{as_markdown()}\n{END}{after}"


def _rule(columns: int) -> str:
    return "|" + " --- |" * columns


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(written_into(path.read_text(encoding="utf-8")), encoding="utf-8")
