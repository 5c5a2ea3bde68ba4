"""What each CUDA backend reads and needs, as a table: `docs/backends-cuda.md` contains it.

Write it anew with `python -m dsv41.capabilities docs/backends-cuda.md`, which leaves the rest of the page as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from dsv41.errors import Dsv41Error
from dsv41.hal.builtin import FLASHINFER_SM100, FLASHINFER_SM120, FLASHMLA, FLASHMLA_MEGA, PORTABLE
from dsv41.hal.registry import BackendSpec
from dsv41.hal.requirements import Requirement

CUDA = (FLASHMLA_MEGA, FLASHMLA, FLASHINFER_SM120, FLASHINFER_SM100, PORTABLE)
BEGIN = "<!-- Made by `python -m dsv41.capabilities docs/backends-cuda.md`; a test compares. -->"
END = "<!-- End of what is made. -->"


def as_markdown(specs: Iterable[BackendSpec] = CUDA) -> str:
    """One column a backend, from its spec and the summaries of its requirements."""
    specs = tuple(specs)
    rows = {
        "": [f"`{spec.name}`" for spec in specs],
        "---": ["---"] * len(specs),
        "is": [spec.summary for spec in specs],
        "priority": [str(spec.priority) for spec in specs],
        "`kv_cache_dtype`": [_lines(f"`{name}`" for name in spec.kv_cache_dtypes) for spec in specs],
        "`auto` becomes": [f"`{spec.packed_kv_cache_dtype}`" for spec in specs],
        "`index_cache_dtype`": [_lines(f"`{name}`" for name in spec.index_cache_dtypes) for spec in specs],
        "needs": [_lines(_summaries(spec)) for spec in specs],
    }
    return "".join(f"| {' | '.join([what, *cells])} |\n" for what, cells in rows.items())


def written_into(page: str) -> str:
    """The page with the table between its two marks made anew. Raises Dsv41Error where it has no such marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise Dsv41Error(f"a page without the marks: expected {BEGIN!r} and, after it, {END!r}; put both into the page")
    return f"{before}{BEGIN}\n\n{as_markdown()}\n{END}{after}"


def _lines(items: Iterable[str]) -> str:
    return "<br>".join(items)


def _summaries(spec: BackendSpec) -> Iterable[str]:
    return (check.summary for check in spec.requirements if isinstance(check, Requirement))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(written_into(path.read_text(encoding="utf-8")), encoding="utf-8")
