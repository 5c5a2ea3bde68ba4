"""What `dsv41 check` runs, prints and writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsv41.errors import InputError
from dsv41.testing.case import Case
from dsv41.testing.clauses import CLAUSES
from dsv41.testing.html import as_html
from dsv41.testing.port import Port
from dsv41.testing.report import Outcome, Report, Result
from dsv41.testing.runner import check_backend
from dsv41.testing.subject import Subject

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, int, int], None]

_WRITERS: dict[str, Callable[[Report], str]] = {
    ".json": lambda report: json.dumps(report.to_dict(), indent=2) + "\n",
    ".html": as_html,
}
_STYLES = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.SKIPPED: "yellow",
    Outcome.EXPECTED: "magenta",
    Outcome.FIXED: "bold magenta",
}


@dataclass(frozen=True)
class CheckOptions:
    """What to check; the names are those of the command line. Raises InputError for a report of another kind."""

    backend: str | None = None
    device: str | None = None
    quick: bool = True
    seed: int = 0
    only: tuple[str, ...] = ()
    case: str | None = None
    port: Path | None = None
    report: Path | None = None

    def __post_init__(self) -> None:
        if self.report is not None and self.report.suffix not in _WRITERS:
            raise InputError(f"report {str(self.report)!r}: expected a name that ends in {' or '.join(_WRITERS)}")
        if self.case is not None and not self.only:
            raise InputError(f"case {self.case!r} without a clause: expected --only beside it, as a report gives both")


def check(options: CheckOptions, progress: Progress) -> Report:
    """Run the check and write the report that was asked for.

    Raises BackendError for a backend that cannot run here, InputError for options that cannot be.
    """
    port = Port.load(options.port) if options.port else None
    case = Case.parse(options.case) if options.case is not None else None
    subject = Subject.of(options.backend, options.device, seed=options.seed)
    report = check_backend(
        subject,
        full=not options.quick,
        only=list(options.only) or None,
        stages_only=options.backend is None and not options.only,
        case=case,
        port=port,
        asked=options.backend or "what this machine would use",
        progress=progress,
    )
    if options.report is not None:
        try:
            options.report.write_text(_WRITERS[options.report.suffix](report), encoding="utf-8")
        except OSError as error:
            raise InputError(f"report {str(options.report)!r} cannot be written: {error}") from error
    return report


def render(console: Console, report: Report) -> None:
    """The report for a terminal."""
    from rich.markup import escape
    from rich.table import Table

    title = f"{report.backend} on {report.device} ({report.device_name}), {report.mode}"
    table = Table("clause", "contract", "outcome", "cases", "skips", "s", title=escape(title))
    for result in report.results:
        table.add_row(
            result.id,
            result.contract,
            f"[{_STYLES[result.outcome]}]{result.outcome}[/]",
            str(result.cases),
            str(len(result.skips) or ""),
            f"{result.seconds:.1f}",
        )
    console.print(table)
    _render_stages(console, report)
    for note in report.notes:
        console.print(f"[yellow]note[/]: {escape(note)}", soft_wrap=True)
    for result in report.results:
        _render_result(console, result)
    style = "bold green" if report.ok else "bold red"
    console.print(f"[{style}]{escape(report.verdict)}[/]", soft_wrap=True)


def _render_stages(console: Console, report: Report) -> None:
    from rich.table import Table

    table = Table("stage", "is")
    for stage, state in report.stages.items():
        table.add_row(stage, f"[{'green' if state == 'right' else 'red' if state == 'wrong' else 'yellow'}]{state}[/]")
    console.print(table)
    if advice := report.advice:
        console.print(f"[bold red]{advice}[/]", soft_wrap=True)


def _render_result(console: Console, result: Result) -> None:
    from rich.markup import escape

    if result.failure is not None:
        failure = result.failure
        console.print(f"\n[{_STYLES[result.outcome]}]{result.id}[/] {escape(result.sentence)}", soft_wrap=True)
        if result.expected:
            console.print(f"  expected to fail: {escape(result.expected)}", soft_wrap=True)
        console.print(f"  found: {escape(failure.message)}", soft_wrap=True)
        console.print(
            f"  smallest case: {escape(failure.case or 'the default one')}, seed {failure.seed}", soft_wrap=True
        )
        console.print(f"  again: {escape(failure.command)}", soft_wrap=True)
    if result.outcome is Outcome.FIXED:
        console.print(f"{result.id} passes, and the port expects a failure ({result.expected}): take it out")
    if result.skips:
        many = f" (and {len(result.skips) - 1} more)" if len(result.skips) > 1 else ""
        console.print(f"[yellow]not run[/] {result.id}: {escape(result.skips[0])}{many}", soft_wrap=True)


def render_clauses(console: Console) -> None:
    """Every clause."""
    from rich.table import Table

    table = Table("id", "contract", "what must hold", "needs")
    for clause in CLAUSES:
        table.add_row(clause.id, clause.contract, clause.sentence, ", ".join(clause.needs))
    console.print(table)
