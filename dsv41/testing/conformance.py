"""The suite as tests: what a port inherits in a pytest file of its own. Needs pytest only when its tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from dsv41.testing.clauses import CLAUSES
from dsv41.testing.port import Port
from dsv41.testing.report import Outcome
from dsv41.testing.runner import check_clause
from dsv41.testing.subject import Factory, Subject


class BackendConformance:
    """Every clause as a test of a backend: `class TestMine(BackendConformance): backend = "mine"`.

    `backend` is a registered name, or a class that need not be registered; `device` where it runs (None = the first
    GPU, else the CPU; of a class, the CPU); `port_file` the port's own file of what it does not support and where it is
    known to fail; `geometry` the models that it is checked on (None = the first that it takes); `full` runs the long
    form. These names, and `test_clause`, are public API.
    """

    backend: ClassVar[str | Factory]
    device: ClassVar[str | None] = None
    port_file: ClassVar[str | Path | None] = None
    geometry: ClassVar[str | None] = None
    full: ClassVar[bool] = False
    seed: ClassVar[int] = 0

    _subjects: ClassVar[dict[type, tuple[Subject, Port]]] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if metafunc.function.__name__ == "test_clause":
            metafunc.parametrize("clause", CLAUSES, ids=[clause.id for clause in CLAUSES])

    def test_clause(self, clause: Any) -> None:
        import pytest

        subject, port = self._subject()
        result = check_clause(subject, clause, full=self.full, port=port)
        match result.outcome:
            case Outcome.SKIPPED:
                pytest.skip("; ".join(result.skips))
            case Outcome.EXPECTED:
                pytest.xfail(str(result.expected))
            case Outcome.FIXED:
                pytest.fail(f"{clause.id} holds, and {self.port_file} expects a failure: take the entry out")
            case Outcome.FAILED:
                assert result.failure is not None
                pytest.fail(
                    f"{clause.id} ({clause.contract}): {clause.sentence}\n{result.failure.message}\n"
                    f"smallest case: {result.failure.case or 'the default one'}\nagain: {result.failure.command}",
                    pytrace=False,
                )

    @classmethod
    def _subject(cls) -> tuple[Subject, Port]:
        """One for all tests of the class, since making it takes longer than a clause."""
        if cls not in cls._subjects:
            options = {} if cls.geometry is None else {"geometry": cls.geometry}
            subject = Subject.of(cls.backend, cls.device, seed=cls.seed, **options)
            cls._subjects[cls] = subject, Port.load(cls.port_file) if cls.port_file else Port()
        return cls._subjects[cls]
