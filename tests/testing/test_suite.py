"""The frame of the suite: cases, the choice of clauses, what a port declares, and what a report may say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.errors import BackendError, Dsv41Error, InputError
from dsv41.hal import registry
from dsv41.hal.backend import CONTRACT_VERSION
from dsv41.testing import CLAUSES, BackendConformance, Case, Outcome, Port, Subject, check_backend
from dsv41.testing.capture import Watch
from dsv41.testing.clause import STAGES, Inapplicable
from dsv41.testing.docs import written_into
from dsv41.testing.needs import CAPABILITIES
from dsv41.testing.runner import check_clause, choose

from .wrong import SinkIgnored

DOCS = Path(__file__).parents[2] / "docs" / "conformance.md"
CASES = st.builds(
    Case,
    heads=st.integers(1, 128),
    requests=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=4).map(tuple),
    padding=st.integers(0, 3),
    layer=st.sampled_from(["window", "source"]),
    kv=st.sampled_from(["auto", "fp8_ds_mla"]),
    quantize=st.booleans(),
    first_seen=st.integers(0, 9),
)


@given(case=CASES)
def test_a_case_is_what_its_text_says(case: Case) -> None:
    assert Case.parse(str(case)) == case


@given(case=CASES)
def test_smaller_cases_are_smaller(case: Case) -> None:
    """So that shrinking ends."""

    def size(one: Case) -> tuple[int, ...]:
        tokens = sum(held + new for held, new in one.requests)
        rest = one.padding + one.heads + one.quantize + (one.preset != "normal") + (one.first_seen > 0)
        return len(one.requests) + tokens + rest, 0

    assert all(size(smaller) < size(case) for smaller in case.smaller())


@pytest.mark.parametrize("text", ["heads", "heads=many", "requests=3", "requests=1+-1", "colour=red"])
def test_a_case_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected"):
        Case.parse(text)


def test_clauses_are_whole() -> None:
    assert len({clause.id for clause in CLAUSES}) == len(CLAUSES)
    assert all(clause.sentence.endswith(".") for clause in CLAUSES)
    assert {need for clause in CLAUSES for need in clause.needs} <= set(CAPABILITIES)
    assert {clause.stage for clause in CLAUSES if clause.stage} == set(STAGES)
    assert choose(None) == list(CLAUSES)
    assert [clause.id for clause in choose(["index logits", "M1"])] == ["S2", "M1"]
    with pytest.raises(InputError, match="'M99' is unknown"):
        choose(["M99"])


def test_the_documentation_is_current() -> None:
    page = DOCS.read_text(encoding="utf-8")
    assert page == written_into(page), "run `python -m dsv41.testing.docs docs/conformance.md`"
    with pytest.raises(Dsv41Error, match="put both into the page"):
        written_into("# A page\n")


def test_the_suite_needs_no_pytest() -> None:
    code = "import sys, dsv41.testing.check_cli; print('pytest' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False"], done.stderr


# Backends


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(BackendError, match="unknown"):
        Subject.of("no-such-backend", "cpu")


def test_what_selection_refuses_is_refused_with_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="TRITON_INTERPRET=1"):
        Subject.of("portable", "cpu")


def test_a_backend_that_takes_few_head_counts_is_checked_with_those() -> None:
    class Picky(ReferenceBackend):
        def get_padded_num_q_heads(self, num_heads: int) -> int:
            if num_heads not in (8, 64):
                raise BackendError("8 or 64")
            return num_heads

    report = check_backend(Subject.of(Picky), only=["H1", "M1", "M7", "P2"])
    assert report.ok
    assert {result.id: result.cases for result in report.results} == {"H1": 1, "P2": 2, "M1": 1, "M7": 1}
    [heads] = [result for result in report.results if result.id == "M7"]
    assert len(heads.skips) == 3
    assert all("refuses" in reason for reason in heads.skips)


def test_a_backend_that_raises_fails_with_what_it_raised() -> None:
    class Raises(ReferenceBackend):
        def o_proj(self, *arguments: object) -> None:  # type: ignore[override]
            raise ZeroDivisionError("by nothing")

    [result] = check_backend(Subject.of(Raises), only=["O1"]).failures
    assert result.failure is not None
    assert "ZeroDivisionError: by nothing" in result.failure.message


def test_a_class_of_another_contract_version_is_refused_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = next(spec for spec in registry.all_specs() if spec.name == "reference")
    monkeypatch.setattr(ReferenceBackend, "contract_version", CONTRACT_VERSION + 1)
    with pytest.raises(BackendError, match=f"has contract version {CONTRACT_VERSION + 1}, dsv41 has"):
        registry.load(spec)


# What did not run has not passed


def only_clause(check: object, **options: object) -> tuple[Subject, object]:
    clause = replace(CLAUSES[0], check=check, **options)  # type: ignore[arg-type]
    return Subject.of(ReferenceBackend), clause


def test_a_clause_without_a_case_that_applies_is_skipped() -> None:
    def refuse(subject: Subject, case: Case) -> None:
        raise Inapplicable("not here")

    subject, clause = only_clause(refuse)
    result = check_clause(subject, clause)  # type: ignore[arg-type]
    assert result.outcome is Outcome.SKIPPED
    assert "not here" in result.skips[0]
    none = check_clause(subject, replace(clause, cases=lambda subject, full: []))  # type: ignore[type-var]
    assert none.outcome is Outcome.SKIPPED
    assert none.skips


def test_a_report_of_skips_alone_is_not_good() -> None:
    report = check_backend(Subject.of(ReferenceBackend), only=["G1", "G2"])
    assert not report.ok
    assert "was not checked (of G1, G2 alone): 2 skipped" in report.verdict
    assert report.stages == dict.fromkeys(STAGES, "not checked")


def test_a_report_is_json_that_says_what_ran() -> None:
    report = check_backend(Subject.of(ReferenceBackend), only=["D1"])
    data = json.loads(json.dumps(report.to_dict()))
    assert (data["backend"], data["device"], data["ok"], data["only"]) == ("reference", "cpu", True, ["D1"])
    assert data["facts"]["torch"]
    assert data["facts"]["contract version"] == "1"
    assert data["declared"]["class"] == "dsv41.backends.reference.backend:ReferenceBackend"


# Ports


def port(tmp_path: Path, text: str) -> Port:
    file = tmp_path / "port.toml"
    file.write_text(text, encoding="utf-8")
    return Port.load(file)


def test_a_port_expects_failures_and_surprises_show(tmp_path: Path) -> None:
    known = port(tmp_path, '[expected_failures]\nM10 = "no sink yet"\n')
    failing = check_backend(Subject.of(SinkIgnored), only=["M10", "D1"], port=known)
    assert {result.id: result.outcome for result in failing.results} == {"D1": Outcome.PASSED, "M10": Outcome.EXPECTED}
    assert failing.ok
    fixed = check_backend(Subject.of(ReferenceBackend), only=["M10", "D1"], port=known)
    assert {result.id: result.outcome for result in fixed.results} == {"D1": Outcome.PASSED, "M10": Outcome.FIXED}
    assert not fixed.ok


def test_what_a_port_does_not_support_is_skipped_with_its_reason(tmp_path: Path) -> None:
    declared = port(tmp_path, '[unsupported]\nwindow_replay = "not yet"\n')
    report = check_backend(Subject.of(ReferenceBackend), only=["M12", "M1"], port=declared)
    skipped = {result.id: result.skips for result in report.results if result.outcome is Outcome.SKIPPED}
    assert skipped == {"M12": ["the port declares window_replay unsupported: not yet"]}


@pytest.mark.parametrize(
    "text",
    [
        "[expected_failures]\nM99 = 'why'",
        "[expected_failures]\nM1 = ''",
        "[unsupported]\nwings = 'why'",
        "[unsupported",
        "[other]\na = 'b'",
        "M1 = 'a'",
    ],
)
def test_a_port_file_that_is_wrong_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="expected"):
        port(tmp_path, text)


# The class


def run_class(tmp_path: Path, body: str) -> str:
    file = tmp_path / "test_mine.py"
    file.write_text(
        "import sys\nsys.path.insert(0, " + repr(str(Path(__file__).parent)) + ")\n"
        "from dsv41.testing import BackendConformance\nfrom wrong import SinkIgnored\n\n"
        f"class TestMine(BackendConformance):\n    backend = SinkIgnored\n{body}",
        encoding="utf-8",
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "-k",
        "M10 or G1 or D1",
        str(file),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path).stdout


def test_a_port_inherits_every_clause_as_a_test(tmp_path: Path) -> None:
    output = run_class(tmp_path, "")
    assert "1 failed, 1 passed, 1 skipped" in output
    assert "M10 (forward_mqa): A head's sink joins the denominator only" in output
    assert "--only M10 --seed 0 --case heads=1,requests=0+1" in output
    (tmp_path / "mine.toml").write_text('[expected_failures]\nM10 = "no sink"\n', encoding="utf-8")
    output = run_class(tmp_path, "    port_file = 'mine.toml'\n")
    assert "XFAIL test_mine.py::TestMine::test_clause[M10] - no sink" in output
    (tmp_path / "mine.toml").write_text('[expected_failures]\nD1 = "no name"\n', encoding="utf-8")
    assert "take the entry out" in run_class(tmp_path, "    port_file = 'mine.toml'\n")


def test_a_class_of_its_own_has_a_subject_of_its_own() -> None:
    class One(BackendConformance):
        backend = ReferenceBackend

    class Two(One):
        backend = SinkIgnored

    assert One._subject()[0] is One._subject()[0]
    assert Two._subject()[0] is not One._subject()[0]


@pytest.mark.parametrize(
    ("wait", "noted"),
    [
        (lambda x: torch.where(x > 1), ["where"]),
        (lambda x: torch.where(x > 1, x, 0), []),
        (lambda x: x.repeat_interleave(x), ["repeat_interleave"]),
        (lambda x: torch.repeat_interleave(x), ["repeat_interleave"]),
        (lambda x: x.repeat_interleave(x, output_size=6), []),
        (lambda x: x.repeat_interleave(2), []),
        (lambda x: x[x > 1], ["__getitem__"]),
        (lambda x: x.max().item(), ["item"]),
    ],
)
def test_what_waits_for_the_device_is_noted(wait: Callable[[torch.Tensor], object], noted: list[str]) -> None:
    x = torch.tensor([1, 2, 3])
    with Watch(host=[]) as watch:
        wait(x)
    assert watch.found == noted
