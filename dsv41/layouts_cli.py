"""`dsv41 layouts`: every cache record byte by byte, and where a page keeps them.

`docs/layouts.md` is `as_markdown()`; write it anew with `python -m dsv41.layouts_cli > docs/layouts.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsv41.hal.codecs import E2M1_MAX, e4m3_max
from dsv41.hal.layout import CacheLayout, ScalePlacement
from dsv41.hal.records import RECORDS, Encoding, Record, ScaleFormat

_PAGE_SIZES = (32, 64, 128, 256)
_BAR = 64
_MARKS = {"e4m3": "8", "e2m1": "4", "bf16": "h", "fp32": "f", "scale": "s", "pad": "0"}
_STYLES = {"e4m3": "cyan", "e2m1": "green", "bf16": "blue", "fp32": "blue", "scale": "yellow", "pad": "dim"}

_PLACEMENTS = {
    ScalePlacement.NONE: "the record has no scales; row t starts at t * value_bytes",
    ScalePlacement.TOKEN: "row t starts at t * (value_bytes + scale_bytes), its scales right after its values",
    ScalePlacement.PAGE: (
        "row t has its values at t * value_bytes and its scales at page_size * value_bytes + t * scale_bytes"
    ),
    ScalePlacement.POOL: "row t has its values at t * value_bytes, its scales at t * scale_bytes of the page's pool",
}


@dataclass(frozen=True)
class Segment:
    """Bytes `start` to `stop` (exclusive) of a row, values first, then scales."""

    kind: str
    start: int
    stop: int
    text: str

    @property
    def span(self) -> str:
        return str(self.start) if self.stop == self.start + 1 else f"{self.start}..{self.stop - 1}"


def segments(record: Record) -> Iterator[Segment]:
    """The row's bytes from the first to the last, in order and without gaps."""
    byte = 0
    for field in record.fields:
        dialect = f" {record.dialect}" if field.encoding is Encoding.E4M3 else ""
        pairs = ", the even dim in the low nibble" if field.encoding is Encoding.E2M1 else ""
        scaled = f", a scale for {field.group} dims" if field.group else ""
        text = f"dims {field.start}..{field.stop - 1}, {field.encoding}{dialect}{pairs}{scaled}"
        yield Segment(str(field.encoding), byte, byte + field.bytes, text)
        byte += field.bytes
    if record.scale_format is not None:
        size = record.num_scales * record.scale_format.bytes
        meaning = {
            ScaleFormat.UE8M0: "ue8m0 = 2**(byte - 127)",
            ScaleFormat.E4M3: "e4m3 ocp",
            ScaleFormat.FP32: "float32",
        }[record.scale_format]
        yield Segment("scale", byte, byte + size, f"{record.num_scales} x {meaning}, made as {_rule(record)}")
        byte += size
    if record.scale_pad:
        yield Segment("pad", byte, byte + record.scale_pad, "zero")


def _rule(record: Record) -> str:
    """How a group's scale follows from its largest magnitude."""
    limit = E2M1_MAX if record.dialect is None else e4m3_max(record.dialect)
    ratio = f"max(amax, {record.amax_floor:.3g}) / {limit:g}"
    return f"e4m3({ratio})" if record.scale_format is ScaleFormat.E4M3 else f"2**ceil(log2({ratio}))"


def _bar(record: Record) -> list[tuple[str, str]]:
    """The row drawn to scale as (kind, marks); the narrowest part still gets one mark."""
    parts = list(segments(record))
    widths = [max(1, round((part.stop - part.start) * _BAR / record.bytes)) for part in parts]
    widths[0] -= sum(widths) - _BAR
    return [(part.kind, _MARKS[part.kind] * width) for part, width in zip(parts, widths, strict=True)]


def _summary(record: Record) -> str:
    scale = ", one float32 scale for the whole cache" if record.tensor_scale else ""
    return f"{record.bytes} bytes a row of {record.dim} dims{scale}; pages a multiple of {record.alignment} bytes apart"


def _page(record: Record, page_size: int) -> str:
    placement = ScalePlacement.PAGE if record.scale_bytes else ScalePlacement.NONE
    layout = CacheLayout(record, page_size, placement)
    return f"{layout.page_bytes} + {layout.tail_bytes}"


def render_layouts(console: Console) -> None:
    """Draw every record to scale with its bytes, then the places for scales and the page sizes."""
    for record in RECORDS.values():
        console.print(Text(record.name, style="bold"), Text(f"  {_summary(record)}"), sep="")
        console.print(Text("  ").append_text(Text.assemble(*((marks, _STYLES[kind]) for kind, marks in _bar(record)))))
        for part in segments(record):
            console.print(Text.assemble((f"  {part.span:<12}", _STYLES[part.kind]), part.text))
        console.print()
    for placement, text in _PLACEMENTS.items():
        console.print(Text.assemble((f"{placement:>6}", "bold"), f"  {text}"))
    console.print()
    table = Table(title="bytes of a page + tail", title_justify="left")
    table.add_column("record")
    for page_size in _PAGE_SIZES:
        table.add_column(f"{page_size} rows", justify="right")
    for record in RECORDS.values():
        table.add_row(record.name, *(_page(record, page_size) for page_size in _PAGE_SIZES))
    console.print(table)


def as_markdown() -> str:
    """The same as a page of documentation."""
    lines = [
        "# Cache layouts",
        "",
        "<!-- Made by `python -m dsv41.layouts_cli > docs/layouts.md`; a test compares. -->",
        "",
        "A *record* is one token's row as bytes. A *layout* says where the rows of a page lie. Neither follows from a",
        "size: a record is known by its name, and dialect, scale format and placement are always said.",
        "",
        "## Records",
        "",
        f"Bars are to scale: {', '.join(f'`{mark}` {kind}' for kind, mark in _MARKS.items())}. Bytes count through a",
        "row's values and then its scales, wherever the layout puts these. An fp8 name without a suffix is in the OCP",
        "dialect.",
        "",
    ]
    for record in RECORDS.values():
        lines += [f"### `{record.name}`", "", f"{_summary(record)}.", "", "```"]
        lines += ["".join(marks for _, marks in _bar(record)), "```", "", "| bytes | hold |", "| --- | --- |"]
        lines += [f"| {part.span} | {part.text} |".replace("*", r"\*") for part in segments(record)]
        lines.append("")
    lines += ["## Where the scales lie", "", "| placement | in a page |", "| --- | --- |"]
    lines += [f"| `{placement}` | {text} |" for placement, text in _PLACEMENTS.items()]
    lines += [
        "",
        "Value rows, and scale rows that are not between them, may be cut into tiles of `r` rows x `b` bytes. Byte `c`",
        "of row `t` then lies at `t // r * (r * width) + c // b * (r * b) + t % r * b + c % b`. With `n` scale lanes,",
        "the scales of row `t` are in the place of row `t % n * (page_size / n) + t // n`, before they are cut.",
        "",
        "## Pages",
        "",
        "Bytes of a page + the tail that brings the distance between pages to a multiple of the record's alignment.",
        "",
        f"| record | {' | '.join(f'{page_size} rows' for page_size in _PAGE_SIZES)} |",
        f"| --- |{' ---: |' * len(_PAGE_SIZES)}",
    ]
    for record in RECORDS.values():
        lines.append(f"| `{record.name}` | {' | '.join(_page(record, size) for size in _PAGE_SIZES)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
