"""What every error message owes its reader."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(error: type[ValueError], *named: object) -> Iterator[None]:
    """Expect `error`, with a message that names all of `named`, the expectation, and after it a remedy."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    for what in named:
        assert str(what) in message, f"{what!r} is not named in: {message}"
    assert re.search(r"expected .+[;:,] .*\w+", message, re.DOTALL), f"no expectation and remedy in: {message}"
