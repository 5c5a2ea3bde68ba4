"""The conformance suite: whether a backend keeps to every clause of its contracts.

A port inherits `BackendConformance` in a pytest file; `dsv41 check` runs the same clauses without pytest; from Python,
`check_backend(Subject.of("mine"))` returns the report. See docs/conformance.md.
"""

from dsv41.testing.case import Case
from dsv41.testing.clause import Clause, Violation
from dsv41.testing.clauses import CLAUSES
from dsv41.testing.conformance import BackendConformance
from dsv41.testing.port import Port
from dsv41.testing.report import Failure, Outcome, Report, Result
from dsv41.testing.runner import check_backend
from dsv41.testing.subject import Subject

__all__ = [
    "CLAUSES",
    "BackendConformance",
    "Case",
    "Clause",
    "Failure",
    "Outcome",
    "Port",
    "Report",
    "Result",
    "Subject",
    "Violation",
    "check_backend",
]
