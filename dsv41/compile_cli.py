"""What `dsv41 compile` and `dsv41 warmup` print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from dsv41.compile import CompileReport

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = "regs, spill: registers and spilt bytes of a thread. shared: bytes (LDS) of a block. matrix: instructions."


def render(console: Console, report: CompileReport) -> None:
    """A table a target, then what was skipped and what failed."""
    for target in dict.fromkeys(row.target for row in report.rows):
        table = Table(title=f"{target}, Triton {report.triton}", title_justify="left")
        table.add_column("kernel", overflow="fold")
        for column in ("regs", "spill", "shared", "matrix", "code"):
            table.add_column(column, justify="right")
        for row in (row for row in report.rows if row.target == target):
            if row.figures is None:
                table.add_row(escape(row.name), "[red]failed[/red]")
            else:
                figures = row.figures
                spilt = f"[yellow]{figures['spill_bytes']:,}[/yellow]" if figures["spill_bytes"] else "0"
                shown = [f"{figures[name]:,}" for name in ("registers", "shared_bytes", "matrix", "code_bytes")]
                table.add_row(escape(row.name), shown[0], spilt, *shown[1:])
        console.print(table)
    for target, why in report.skipped.items():
        console.print(f"[yellow]skipped[/yellow] {target}: {escape(why)}", highlight=False, soft_wrap=True)
    for failure in report.failures:
        console.print(f"[bold red]failed[/bold red]: {escape(failure)}", highlight=False, soft_wrap=True)
    console.print(_COLUMNS, highlight=False, soft_wrap=True)
    console.print(_summary(report), highlight=False, soft_wrap=True)


def _summary(report: CompileReport) -> str:
    built = sum(row.error is None for row in report.rows)
    return (
        f"{built} of {len(report.rows)} kernels with Triton {report.triton}: {report.compiled} compiled, "
        f"{built - report.compiled} in the cache already ({escape(report.cache)})"
    )


def render_summary(console: Console, report: CompileReport) -> None:
    """What failed, and how much was done."""
    for failure in report.failures:
        console.print(f"[bold red]failed[/bold red]: {escape(failure)}", highlight=False, soft_wrap=True)
    console.print(_summary(report), highlight=False, soft_wrap=True)
