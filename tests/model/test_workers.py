"""Worker processes: answers, crashes, and what is said about them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv41.workers import Worker, Workers

SOURCE = """
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    if request.get("die"):
        print("a line of no interest", file=sys.stderr)
        print("LLVM ERROR: Cannot select: intrinsic", file=sys.stderr)
        print("Stack dump: 0. Program arguments", file=sys.stderr, flush=True)
        os.abort()
    if request.get("fail"):
        print("kernel.py:20:0: error: no such layout", file=sys.stderr, flush=True)
        print(json.dumps({"error": "RuntimeError: a pass failed"}), flush=True)
        continue
    if request.get("leave"):
        sys.exit(3)
    time.sleep(request.get("sleep", 0))
    print(json.dumps({"twice": request["number"] * 2, "process": os.getpid()}), flush=True)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_worker_of_this_test.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "a_worker_of_this_test"


@pytest.fixture
def worker(module: str) -> Iterator[Worker]:
    made = Worker(module, timeout=30)
    yield made
    made.close()


def test_one_process_answers_one_question_after_the_other(worker: Worker) -> None:
    first, second = (worker.ask({"number": number}) for number in (1, 2))
    assert (first["twice"], second["twice"]) == (2, 4)
    assert first["process"] == second["process"]


def test_a_crash_is_an_answer_with_the_compilers_words(worker: Worker) -> None:
    answer = worker.ask({"die": True})
    assert "signal 6" in answer["error"]
    assert "LLVM ERROR: Cannot select: intrinsic" in answer["error"]
    assert worker.ask({"number": 3})["twice"] == 6


def test_an_error_is_answered_with_what_was_printed(worker: Worker) -> None:
    expected = "RuntimeError: a pass failed (kernel.py:20:0: error: no such layout)"
    assert worker.ask({"fail": True})["error"] == expected
    assert worker.ask({"fail": True})["error"] == expected
    assert worker.ask({"number": 1})["twice"] == 2


def test_a_process_that_leaves_is_an_answer_too(worker: Worker) -> None:
    assert "status 3" in worker.ask({"leave": True})["error"]


def test_what_takes_too_long_is_stopped(module: str) -> None:
    worker = Worker(module, timeout=0.5)
    assert "longer than 0.5 s" in worker.ask({"number": 1, "sleep": 60})["error"]
    worker.close()


def test_a_module_that_does_not_start_is_an_answer() -> None:
    answer = Worker("no_such_module_as_this").ask({"number": 1})
    assert "status 1" in answer["error"]
    assert "no_such_module_as_this" in answer["error"]


def test_jobs_are_bounded_and_answers_carry_their_numbers(module: str) -> None:
    requests = [{"number": number, "sleep": 0.01, "die": number == 4} for number in range(9)]
    with Workers(module, jobs=2, timeout=30) as workers:
        answers = dict(workers.ask_all(requests))
    assert sorted(answers) == list(range(9))
    assert "error" in answers.pop(4)
    assert all(answer["twice"] == 2 * number for number, answer in answers.items())
    assert len({answer["process"] for answer in answers.values()}) <= 3  # two, and one for that which died


def test_leaving_early_ends_the_processes(module: str) -> None:
    with Workers(module, jobs=1, timeout=30) as workers:
        _, answer = next(iter(workers.ask_all([{"number": 1}, {"number": 2, "sleep": 60}])))
    with pytest.raises(ProcessLookupError):
        os.kill(answer["process"], 0)
