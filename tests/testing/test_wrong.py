"""The suite can fail: every wrong backend fails on the clause that it breaks, and the failure can be shown again."""

from __future__ import annotations

import pytest

from dsv41.hal.backend import AttentionBackend
from dsv41.testing import Case, Outcome, Report, Subject, check_backend
from dsv41.testing.clause import (
    DETERMINISM,
    FORWARD_MQA,
    LAYER,
    LAYOUTS,
    O_PROJ,
    PADDED_HEADS,
    PREPARE_INPUTS,
    ROBUSTNESS,
    SELECT,
    WEIGHTS,
)

from .outsiders import OUTSIDERS
from .wrong import WRONG, LeaksNaN, ScalesWhereItPutsThem, SinkIgnored


def checked(backend: type[AttentionBackend], only: list[str] | None = None, case: Case | None = None) -> Report:
    return check_backend(Subject.of(backend), only=only, case=case)


def failed(report: Report) -> list[str]:
    return [result.id for result in report.failures]


@pytest.mark.parametrize(("backend", "clause"), WRONG, ids=[backend.__name__ for backend, _ in WRONG])
def test_a_wrong_backend_fails_on_its_clause(backend: type[AttentionBackend], clause: str) -> None:
    report = checked(backend, [clause])
    assert report.failures, report.verdict
    assert not report.ok
    [result] = report.failures
    assert result.failure is not None
    # What is reported fails again, alone.
    again = checked(backend, [clause], Case.parse(result.failure.case))
    assert failed(again) == [result.id]


# Where a fault of an area shows: what another area hands on, or is handed, is part of its contract too.
_SHOWS = {
    "padded heads": {PADDED_HEADS, FORWARD_MQA, PREPARE_INPUTS},
    "cache layout": {LAYOUTS, PREPARE_INPUTS, SELECT, FORWARD_MQA},
    "plan": {PREPARE_INPUTS, SELECT, ROBUSTNESS, FORWARD_MQA},
    "prepare_inputs": {PREPARE_INPUTS},
    "select": {SELECT},
    "attend": {FORWARD_MQA},
    "forward_mqa": {FORWARD_MQA},
    "o_proj": {O_PROJ},
    "project": {O_PROJ, LAYER},
    "prepare_weights": {WEIGHTS},
}


@pytest.mark.parametrize(("backend", "area"), OUTSIDERS, ids=[backend.name for backend, _ in OUTSIDERS])
def test_the_faults_of_someone_who_had_not_read_the_suite_are_found(backend: type[AttentionBackend], area: str) -> None:
    found = {result.contract for result in checked(backend).failures}
    assert found & _SHOWS[area], found


@pytest.mark.parametrize(
    ("backend", "sound"),
    [
        (SinkIgnored, [PREPARE_INPUTS, SELECT, O_PROJ, PADDED_HEADS, LAYOUTS, WEIGHTS, DETERMINISM, "R1", "R3"]),
        (ScalesWhereItPutsThem, [PREPARE_INPUTS, SELECT, O_PROJ, WEIGHTS, ROBUSTNESS, LAYER, "M1", "M8", "M10"]),
        (LeaksNaN, [PREPARE_INPUTS, SELECT, PADDED_HEADS, LAYOUTS, "U1", "U2", "U3"]),
    ],
)
def test_what_is_right_in_a_wrong_backend_is_not_blamed(backend: type[AttentionBackend], sound: list[str]) -> None:
    assert failed(checked(backend, sound)) == []


def test_failures_are_as_small_as_they_get() -> None:
    [result] = checked(SinkIgnored, ["M10"]).failures
    assert result.outcome is Outcome.FAILED
    failure = result.failure
    assert failure is not None
    case = Case.parse(failure.case)
    assert (case.heads, case.requests, case.padding) == (1, ((0, 1),), 0)
    assert failure.first_case != failure.case
    assert failure.command.endswith(f"--only M10 --seed 0 --case {failure.case}")
    assert "wrong:SinkIgnored" in failure.command
