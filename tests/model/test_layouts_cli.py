"""The drawing of records and the page generated from it."""

import io
from pathlib import Path

from rich.console import Console

from dsv41.hal.records import RECORDS
from dsv41.layouts_cli import as_markdown, render_layouts, segments

DOCS = Path(__file__).parents[2] / "docs" / "layouts.md"


def test_the_documentation_is_current() -> None:
    assert DOCS.read_text() == as_markdown(), "run `python -m dsv41.layouts_cli > docs/layouts.md`"


def test_every_byte_of_every_record_is_drawn_once() -> None:
    for record in RECORDS.values():
        parts = list(segments(record))
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == record.bytes
        assert all(part.stop > part.start for part in parts)


def test_the_console_shows_every_record() -> None:
    out = io.StringIO()
    render_layouts(Console(file=out, width=120))
    text = out.getvalue()
    for record in RECORDS.values():
        assert f"{record.name}  {record.bytes} bytes a row" in text
    assert "576..582" in text
    assert "the even dim in the low nibble" in text
    assert "37376 + 64" in text
