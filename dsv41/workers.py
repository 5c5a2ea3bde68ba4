"""Worker processes that answer one JSON request a line, so that a crash in a compiler costs one answer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any

_TELLING = re.compile(r"error|assert|abort|fault|unsupported|killed", re.IGNORECASE)


class Worker:
    """A process running `python -m module`, started by the first question and again after a crash.

    Not for use by several threads at once.
    """

    def __init__(self, module: str, timeout: float = 600.0) -> None:
        self.module, self.timeout = module, timeout
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer, or {"error": what happened} where the worker died or took longer than `timeout` seconds. To an
        error that it answers, what it printed meanwhile is added."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        said = self._log.seek(0, os.SEEK_END)
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self.timeout, kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            if "error" in answer and (words := self._words(said)):
                answer["error"] += f" ({words})"
            return answer
        code = process.wait()
        words = self._words(said)
        self.close()
        if late.is_set():
            return {"error": f"took longer than {self.timeout:g} s and was stopped"}
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return {"error": f"the compiling process {how}" + (f": {words}" if words else "")}

    def close(self) -> None:
        """End the process; a later question starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout, self._log):
                assert stream is not None
                with suppress(BrokenPipeError):  # a question that the process did not live to read
                    stream.close()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        # -P: the folder that one happens to stand in is not where packages come from.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        return self._process

    def _words(self, start: int) -> str:
        """The line that says most of what went to stderr from byte `start` on."""
        self._log.seek(start)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if _TELLING.search(line)] or lines[-1:]
        return telling[0][:300] if telling else ""


class Workers:
    """At most `jobs` workers of one module, each started when it is needed; as a context manager, it ends them."""

    def __init__(self, module: str, jobs: int, *, timeout: float = 600.0) -> None:
        self.module, self.timeout = module, timeout
        self._pool = ThreadPoolExecutor(max_workers=jobs)
        self._local, self._workers = threading.local(), list[Worker]()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def ask_all(self, requests: Iterable[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The answers with the numbers of their requests, as they come."""
        numbers = {self._pool.submit(self._ask, request): number for number, request in enumerate(requests)}
        for done in as_completed(numbers):
            yield numbers[done], done.result()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if not hasattr(self._local, "worker"):
            self._local.worker = Worker(self.module, self.timeout)
            self._workers.append(self._local.worker)
        answer: dict[str, Any] = self._local.worker.ask(request)
        return answer
