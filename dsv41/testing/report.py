"""What a check found, as data."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

import dsv41
from dsv41.hal.backend import CONTRACT_VERSION
from dsv41.testing.clause import STAGES

if TYPE_CHECKING:
    from dsv41.testing.subject import Subject


class Outcome(StrEnum):
    """How a clause came out. Only `PASSED` ran and held."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    EXPECTED = "expected failure"
    FIXED = "passed unexpectedly"
    """The port's file expects a failure: take the entry out."""


@dataclass(frozen=True)
class Failure:
    """The smallest case that was found to fail, what was found there, and the command that shows it again."""

    case: str
    message: str
    seed: int
    command: str
    first_case: str


@dataclass
class Result:
    """One clause. `cases` ran; `skips` has the reason of each case that did not, or of the whole clause."""

    id: str
    contract: str
    sentence: str
    stage: str | None
    outcome: Outcome
    cases: int = 0
    skips: list[str] = field(default_factory=list)
    failure: Failure | None = None
    expected: str | None = None
    seconds: float = 0.0


@dataclass
class Report:
    """All clauses that were asked for, and on what they ran.

    `backend` is the name of the backend that was really used, `asked` what was asked for. `only` has the clauses asked
    for where those are not all, so that a part is never taken for the whole.
    """

    asked: str
    backend: str
    device: str
    device_name: str
    geometry: str
    mode: str
    seed: int
    only: list[str] | None
    facts: dict[str, str]
    declared: dict[str, Any]
    notes: list[str]
    results: list[Result] = field(default_factory=list)

    @property
    def counts(self) -> Mapping[Outcome, int]:
        found = Counter(result.outcome for result in self.results)
        return {outcome: found[outcome] for outcome in Outcome}

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if result.outcome is Outcome.FAILED]

    @property
    def ok(self) -> bool:
        """Whether something ran, nothing failed, and no expectation is out of date."""
        counts = self.counts
        return counts[Outcome.PASSED] > 0 and not counts[Outcome.FAILED] and not counts[Outcome.FIXED]

    @property
    def stages(self) -> dict[str, str]:
        """Of each stage: "right", "wrong" or "not checked"."""
        found: dict[str, str] = {}
        for stage in STAGES:
            outcomes = {result.outcome for result in self.results if result.stage == stage}
            if Outcome.FAILED in outcomes or Outcome.EXPECTED in outcomes:
                found[stage] = "wrong"
            else:
                found[stage] = "right" if Outcome.PASSED in outcomes else "not checked"
        return found

    @property
    def advice(self) -> str | None:
        """Which stage is wrong, and what to report; None where none is."""
        wrong = [stage for stage, state in self.stages.items() if state == "wrong"]
        if not wrong:
            return None
        failed = (Outcome.FAILED, Outcome.EXPECTED)
        clauses = [result.id for result in self.results if result.stage == wrong[0] and result.outcome in failed]
        later = (
            f" The stages behind it ({', '.join(wrong[1:])}) may be wrong for that reason alone." if wrong[1:] else ""
        )
        return (
            f"{wrong[0]} of {self.backend} is wrong (clauses {', '.join(clauses)}).{later} Report it to the author of "
            f"{self.declared['class']} with the file that --report writes, which has the commands that show it again, "
            "and use another backend until then."
        )

    @property
    def verdict(self) -> str:
        """One line. It never says that what did not run has passed."""
        counts = self.counts
        parts = [f"{count} {outcome}" for outcome, count in counts.items() if count]
        state = "conforms, as far as it was checked" if self.ok else "does not conform"
        if not counts[Outcome.PASSED] and not counts[Outcome.FAILED]:
            state = "was not checked"
        part = "" if self.only is None else f" (of {', '.join(self.only)} alone)"
        return f"{self.backend} on {self.device} {state}{part}: {', '.join(parts) or 'no clause ran'}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        data = asdict(self)
        for result in data["results"]:
            result["outcome"] = str(result["outcome"])
        counts = {str(outcome): count for outcome, count in self.counts.items()}
        found = {"stages": self.stages, "advice": self.advice, "ok": self.ok, "verdict": self.verdict}
        return {"format": 1, **data, "counts": counts, **found}


def make_report(subject: Subject, asked: str, mode: str, seed: int, only: list[str] | None) -> Report:
    """An empty report of a subject."""
    backend = subject.plain
    name = backend.facts.name if backend.facts is not None else platform.processor() or platform.machine()
    flags = ("accepts_unnormed_unroped_query", "supports_graph_capture", "replays_window", "trusts_cache_bytes")
    return Report(
        asked=asked,
        backend=backend.name,
        device=subject.device_key,
        device_name=name,
        geometry=subject.geometry,
        mode=mode,
        seed=seed,
        only=only,
        facts=_facts(subject),
        declared={
            "class": f"{type(backend).__module__}:{type(backend).__qualname__}",
            "kv_cache_dtypes": subject.kv_cache_dtypes,
            "index_cache_dtypes": subject.index_cache_dtypes,
            **{flag: getattr(backend, flag, None) for flag in flags},
        },
        notes=list(subject.notes),
    )


def _facts(subject: Subject) -> dict[str, str]:
    facts = {
        "dsv41": dsv41.__version__,
        "contract version": str(CONTRACT_VERSION),
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "torch CUDA": str(torch.version.cuda),
        "torch HIP": str(torch.version.hip),
    }
    libraries = {"triton", *(subject.spec.libraries if subject.spec else ())}
    for library in sorted(libraries):
        facts[library] = _version(library)
    return facts


def _version(library: str) -> str:
    from dsv41.hal.libraries import inspect

    found = inspect(library, torch.__version__)
    return found.problem or found.version or ("installed" if found.installed else "not installed")
