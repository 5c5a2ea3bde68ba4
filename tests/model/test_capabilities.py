"""The table of capabilities, and the page that contains it."""

from pathlib import Path

import pytest

from dsv41.capabilities import CUDA, as_markdown, written_into
from dsv41.errors import Dsv41Error
from dsv41.hal.builtin import BUILTIN
from dsv41.hal.requirements import Requirement

DOCS = Path(__file__).parents[2] / "docs" / "backends-cuda.md"


def test_the_documentation_is_current() -> None:
    page = DOCS.read_text(encoding="utf-8")
    assert page == written_into(page), "run `python -m dsv41.capabilities docs/backends-cuda.md`"


def test_every_backend_for_cuda_has_a_column() -> None:
    assert {spec.name for spec in BUILTIN} - {spec.name for spec in CUDA} == {"aiter", "reference"}


def test_every_requirement_is_in_its_backends_column() -> None:
    (needs,) = (line for line in as_markdown().splitlines() if line.startswith("| needs |"))
    cells = needs.split(" | ")[1:]
    for spec, cell in zip(CUDA, cells, strict=True):
        assert all(isinstance(check, Requirement) and check.summary in cell for check in spec.requirements)


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(Dsv41Error, match="put both into the page"):
        written_into("# A page\n")
