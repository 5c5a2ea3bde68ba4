"""A step runs on its caller's stream alone: nothing has to be joined, and no buffer is used again too early.

The one module that forks, in captured steps alone, has tests of its own: rocm/test_fork.py, cuda/test_overlap.py.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_BACKENDS = Path(__file__).parents[2] / "backends"
FILES = sorted({*_BACKENDS.rglob("*.py")} - {_BACKENDS / "portable/fork.py"})
FORBIDDEN = ("Stream", "ExternalStream", "Event", "wait_stream", "wait_event", "record_stream", "stream", "query")
"""What forks a stream, orders two, or asks one whether it is done."""


def forks(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN:
            whole = ast.unparse(node)
            if node.attr.startswith(("wait_", "record_")) or whole.startswith("torch.cuda."):
                yield whole


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_fr_83_fr_84_fr_85_fr_86_no_backend_forks_a_stream(path: Path) -> None:
    assert list(forks(path.read_text())) == []


@pytest.mark.parametrize(
    "source", ["with torch.cuda.stream(side): f()", "s = torch.cuda.Stream()", "q.record_stream(s)", "a.wait_stream(b)"]
)
def test_a_fork_is_found(source: str) -> None:
    assert list(forks(source))
