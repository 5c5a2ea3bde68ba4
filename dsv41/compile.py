"""Kernels compiled ahead of time, in worker processes, and held to a budget.

A backend that compiles its own kernels has a module `aot` beside the module of its class: a worker that lists the
builds of a target, or those that a configuration can meet, and compiles them one by one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dsv41.errors import BackendError, InputError
from dsv41.hal import registry
from dsv41.hal.names import suggest
from dsv41.workers import Workers

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
"""What must compile and keep to the budget."""
OTHER_TARGETS = ("sm_103", "gfx1201", "gfx1250")
"""What is compiled on request."""
FIGURES = ("registers", "spill_bytes", "shared_bytes", "matrix", "code_bytes")
COMPILING = ("portable", "flashmla")
"""The backends whose kernels they are."""
BUDGET = Path("ci/compile-budget.json")
"""Looked for where the command is run, which is the repository's root in CI."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Limit:
    """The least or the most that a figure may be, for builds of some kinds, targets, names and Triton versions (a
    prefix such as "3.6"; patterns as in a shell; None = any). `why` is for exceptions."""

    figure: str
    least: int | None = None
    most: int | None = None
    kinds: tuple[str, ...] | None = None
    targets: tuple[str, ...] | None = None
    kernels: tuple[str, ...] | None = None
    triton: str | None = None
    why: str = ""

    def speaks_of(self, row: Row, triton: str) -> bool:
        version = (self.triton or triton) + "."
        return (
            f"{triton}.".startswith(version)
            and (self.kinds is None or row.kind in self.kinds)
            and (self.targets is None or row.target in self.targets)
            and (self.kernels is None or any(fnmatchcase(row.name, pattern) for pattern in self.kernels))
        )


@dataclass(frozen=True)
class Budget:
    """Limits, in order: of those that speak of the same figure of a build, the last holds. `max_variants` is how many
    builds a backend may have."""

    limits: tuple[Limit, ...] = ()
    max_variants: int | None = None

    @staticmethod
    def load(path: Path) -> Budget:
        """Raises InputError for a file that is missing, no JSON or of another form."""
        try:
            data = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise InputError(f"budget {path} cannot be read ({error}): expected JSON; see {BUDGET}") from None
        try:
            limits = tuple(Limit(**_tuples(limit)) for limit in data["limits"])
            unknown = {limit.figure for limit in limits} - set(FIGURES)
            if unknown:
                raise ValueError(f"unknown figure {sorted(unknown)[0]!r}, known are {', '.join(FIGURES)}")
            return Budget(limits, data.get("max_variants"))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise InputError(
                f"budget {path} is of another form ({error}): expected a list of limits; see {BUDGET}"
            ) from None

    def excesses(self, row: Row, triton: str) -> list[str]:
        """A sentence for each figure of a build that breaks its limit."""
        found = []
        for figure in FIGURES:
            holding = [limit for limit in self.limits if limit.figure == figure and limit.speaks_of(row, triton)]
            if not holding or row.figures is None:
                continue
            value, limit = row.figures[figure], holding[-1]
            if limit.most is not None and value > limit.most:
                found.append(f"{row.name} on {row.target}: {figure} is {value}, the limit is {limit.most}")
            if limit.least is not None and value < limit.least:
                found.append(f"{row.name} on {row.target}: {figure} is {value}, the least is {limit.least}")
        return found


@dataclass
class Row:
    """One build: its figures, or why it could not be compiled."""

    name: str
    target: str
    kind: str
    figures: dict[str, int] | None = None
    cached: bool = False
    error: str | None = None


@dataclass
class CompileReport:
    """What was compiled. `skipped` are the targets that this Triton does not know, and the kernels
    that cannot be compiled here, with the reason; `failures` the
    builds that did not compile and the limits that were broken, a sentence each. `cache` is where the binaries lie."""

    triton: str
    cache: str
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def compiled(self) -> int:
        """Builds that were not in the cache yet."""
        return sum(row.error is None and not row.cached for row in self.rows)


def compile_targets(
    targets: Sequence[str] = TARGETS,
    *,
    jobs: int | None = None,
    budget: Budget | None = None,
    progress: Progress = lambda *_: None,
) -> CompileReport:
    """Compile what can be selected on `targets`, and judge it by `budget`.

    Raises InputError for an unknown target, BackendError where no kernel can be compiled in this environment.
    """
    known = (*TARGETS, *OTHER_TARGETS)
    for target in targets:
        if target not in known:
            raise InputError(
                f"target {target!r} is unknown: {suggest(target, known)}expected one of {', '.join(known)}; name some"
            )
    if not targets:
        raise InputError(f"no target is named: expected some of {', '.join(known)}; name some, or leave --target out")
    reports = [_of_backend(backend, targets, jobs or default_jobs(), budget, progress) for backend in COMPILING]
    whole = reports[0]
    for report in reports[1:]:
        whole.rows += report.rows
        whole.skipped = report.skipped | whole.skipped
        whole.failures += report.failures
        whole.cache += f", {report.cache}"
    return whole


def _of_backend(
    backend: str, targets: Sequence[str], jobs: int, budget: Budget | None, progress: Progress
) -> CompileReport:
    with Workers(_aot_module(backend), jobs) as workers:
        answers = dict(workers.ask_all({"list": [target]} for target in dict.fromkeys(targets)))
        listed = [_checked(answers[number]) for number in sorted(answers)]
        report = CompileReport(listed[0]["triton"], listed[0]["cache"])
        for answer in listed:
            report.skipped.update(answer["skipped"])
        _compile(workers, [variant for answer in listed for variant in answer["variants"]], report, progress)
    if budget is not None:
        report.failures += [excess for row in report.rows for excess in budget.excesses(row, report.triton)]
        if budget.max_variants is not None and len(report.rows) > budget.max_variants:
            report.failures.append(f"{backend} has {len(report.rows)} builds, the limit is {budget.max_variants}")
    return report


def compile_met(
    request: dict[str, Any], *, backend: str, jobs: int | None = None, progress: Progress = lambda *_: None
) -> CompileReport:
    """Compile what a configuration can meet, as the backend's `aot` lists it for `request`, into the caches
    on disk.

    Raises BackendError for a backend that compiles nothing.
    """
    with Workers(_aot_module(backend), jobs or default_jobs()) as workers:
        [(_, answer)] = workers.ask_all([{"meet": request, "backend": backend}])
        listed = _checked(answer)
        report = CompileReport(listed["triton"], listed["cache"])
        _compile(workers, listed["variants"], report, progress)
    return report


def default_jobs() -> int:
    """One process a core that this process may use, but no more than a person would want: each takes about 1 GB."""
    return min(len(os.sched_getaffinity(0)), 8)


def _compile(workers: Workers, variants: list[dict[str, Any]], report: CompileReport, progress: Progress) -> None:
    rows = [Row(variant["name"], variant["target"], variant["kind"]) for variant in variants]
    if rows:
        progress("compiling", 0, len(rows))
    answers = workers.ask_all({"compile": variant["payload"]} for variant in variants)
    for done, (number, answer) in enumerate(answers, start=1):
        row = rows[number]
        row.figures, row.cached, row.error = answer.get("figures"), answer.get("cached", False), answer.get("error")
        progress("compiling", done, len(rows))
    report.rows += rows
    report.failures += [f"{row.name} on {row.target} does not compile: {row.error}" for row in rows if row.error]


def _tuples(limit: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in limit.items()}


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise BackendError(
            f"the kernels cannot be listed: {answer['error']}; expected a Triton that imports; "
            "`dsv41 probe` says what is installed"
        )
    return answer


def _aot_module(backend: str) -> str:
    """Raises BackendError where it is not there, or would not compile here."""
    spec = next((spec for spec in registry.all_specs() if spec.name == backend), None)
    package = spec.target.partition(":")[0].rpartition(".")[0] if spec is not None and spec.target else None
    if package is None or find_spec(f"{package}.aot") is None:
        raise BackendError(
            f"backend {backend!r} compiles no kernels: expected {' or '.join(COMPILING)}, or one like them; name it"
        )
    if os.environ.get("TRITON_INTERPRET", "") not in ("", "0"):
        raise BackendError(
            "TRITON_INTERPRET is set, so Triton runs kernels in Python and compiles none: expected it unset; unset it"
        )
    if find_spec("triton") is None:
        raise BackendError("triton is not installed: expected 3.6 or newer; `pip install triton`")
    return f"{package}.aot"
