"""Runs clauses on a subject: every case until one fails, then ever smaller cases while they fail too."""

from __future__ import annotations

import shlex
import time
import traceback
from collections.abc import Callable, Sequence

import torch

from dsv41.errors import InputError
from dsv41.testing.case import Case
from dsv41.testing.clause import Clause, Inapplicable, Violation
from dsv41.testing.clauses import CLAUSES
from dsv41.testing.needs import missing
from dsv41.testing.port import Port
from dsv41.testing.report import Failure, Outcome, Report, Result, make_report
from dsv41.testing.subject import Subject

Progress = Callable[[str, int, int], None]

_SHRINKS = 24
_SHRINK_SECONDS = 10.0


def check_backend(
    subject: Subject,
    *,
    full: bool = False,
    only: Sequence[str] | None = None,
    stages_only: bool = False,
    case: Case | None = None,
    port: Port | None = None,
    asked: str | None = None,
    progress: Progress = lambda *_: None,
) -> Report:
    """Check every clause, or those that `only` names by id, contract or stage, in quick form or in full.

    `case` runs that one case of the clauses instead of their own. Raises InputError for a name in `only` that is none.
    """
    chosen = choose(only)
    if stages_only:
        chosen = [clause for clause in chosen if clause.stage]
    mode = "one case" if case else "full" if full else "quick"
    names = None if len(chosen) == len(CLAUSES) else [clause.id for clause in chosen]
    report = make_report(subject, asked or subject.name, mode, subject.seed, names)
    for number, clause in enumerate(chosen):
        progress(f"{clause.id} {clause.contract}", number, len(chosen))
        report.results.append(check_clause(subject, clause, full=full, case=case, port=port))
    progress("done", len(chosen), len(chosen))
    return report


def choose(only: Sequence[str] | None) -> list[Clause]:
    """The clauses that these ids, contracts or stages name, in order; None = all."""
    if only is None:
        return list(CLAUSES)
    known = {name for clause in CLAUSES for name in (clause.id, clause.contract, clause.stage) if name}
    for name in only:
        if name not in known:
            raise InputError(
                f"clause {name!r} is unknown: expected an id ({', '.join(clause.id for clause in CLAUSES)}), a "
                f"contract or a stage ({', '.join(sorted(known - {clause.id for clause in CLAUSES}))})"
            )
    return [clause for clause in CLAUSES if {clause.id, clause.contract, clause.stage} & set(only)]


@torch.no_grad()
def check_clause(
    subject: Subject, clause: Clause, *, full: bool = False, case: Case | None = None, port: Port | None = None
) -> Result:
    """Check one clause."""
    port = port or Port()
    subject.unsupported |= port.unsupported
    result = Result(clause.id, clause.contract, clause.sentence, clause.stage, Outcome.SKIPPED)
    start = time.perf_counter()
    if clause.full_only and not full and case is None:
        result.skips.append("runs in full form only: use --full")
    elif reason := missing(subject, clause.needs):
        result.skips.append(reason)
    else:
        _run(
            subject,
            clause,
            [case] if case else clause.cases(subject, full),
            result,
            shrink=case is None and clause.sized,
        )
        _expect(result, port)
    result.seconds = time.perf_counter() - start
    return result


def _run(subject: Subject, clause: Clause, cases: Sequence[Case], result: Result, *, shrink: bool) -> None:
    for case in cases:
        try:
            message = _problem(subject, clause, case)
        except Inapplicable as reason:
            result.skips.append(f"{str(case) or 'the default case'}: {reason}")
            continue
        result.cases += 1
        result.outcome = Outcome.PASSED
        if message is not None:
            smallest, message = _shrink(subject, clause, case, message) if shrink else (case, message)
            command = (
                f"dsv41 check --backend {shlex.quote(subject.name)} --device {subject.device_key} --only {clause.id}"
            )
            command += f" --seed {subject.seed} --case {shlex.quote(str(smallest))}"
            result.failure = Failure(str(smallest), message, subject.seed, command, str(case))
            result.outcome = Outcome.FAILED
            return
    if not result.cases and not result.skips:
        result.skips.append("it has no case for this backend")


def _expect(result: Result, port: Port) -> None:
    if result.id in port.expected_failures:
        result.expected = port.expected_failures[result.id]
        if result.outcome is Outcome.FAILED:
            result.outcome = Outcome.EXPECTED
        elif result.outcome is Outcome.PASSED:
            result.outcome = Outcome.FIXED


def _problem(subject: Subject, clause: Clause, case: Case) -> str | None:
    """What is wrong, None where the clause holds."""
    try:
        clause.check(subject, case)
    except Violation as violation:
        return str(violation)
    except Inapplicable:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"it raises {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    return None


def _shrink(subject: Subject, clause: Clause, case: Case, message: str) -> tuple[Case, str]:
    """Greedily to a case of which no smaller neighbour fails, or as far as time allows."""
    stop, left = time.perf_counter() + _SHRINK_SECONDS, _SHRINKS
    tried = {case}
    while True:
        for smaller in case.smaller():
            if smaller in tried:
                continue
            if left == 0 or time.perf_counter() > stop:
                return case, message
            tried.add(smaller)
            left -= 1
            try:
                found = _problem(subject, clause, smaller)
            except Inapplicable:
                continue
            if found is not None:
                case, message = smaller, found
                break
        else:
            return case, message
