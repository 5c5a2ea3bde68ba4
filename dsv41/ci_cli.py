"""What `dsv41 ci` prints, and the record that it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from dsv41.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from dsv41.ci_run import Outcome
    from dsv41.hal.device import Platform

_COLOURS = {"passed": "green", "failed": "red", "skipped": "yellow"}


def require_extra() -> None:
    """Raises InputError where what only CI needs is not installed."""
    missing = [module for module in ("pydantic", "ruamel", "jinja2") if find_spec(module) is None]
    if missing:
        raise InputError(f"{' and '.join(missing)} not installed: `dsv41 ci` needs `pip install -e '.[test]'`")


def report(outcomes: Sequence[Outcome], platform: Platform) -> dict[str, Any]:
    """How each job ended, and where: the devices, torch and libraries of this machine."""
    return {"jobs": [asdict(outcome) for outcome in outcomes], "platform": platform.to_json()}


def render(console: Console, outcomes: Sequence[Outcome]) -> None:
    """A row a job, then how many ended how."""
    table = Table("job", "", "seconds", "why")
    for outcome in outcomes:
        colour = _COLOURS[outcome.state]
        seconds = f"{outcome.seconds:.1f}" if outcome.seconds else ""
        table.add_row(outcome.job, f"[{colour}]{outcome.state}[/{colour}]", seconds, escape(outcome.why))
    console.print(table)
    counts = {state: sum(outcome.state == state for outcome in outcomes) for state in _COLOURS}
    console.print(", ".join(f"{count} {state}" for state, count in counts.items()), highlight=False)
