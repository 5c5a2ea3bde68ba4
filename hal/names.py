"""Names that a user types."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest(name: str, valid: Iterable[str]) -> str:
    """ "did you mean 'x'? " where a valid name is close, else nothing."""
    close = difflib.get_close_matches(name.strip().lower(), list(valid), n=1)
    return f"did you mean {close[0]!r}? " if close else ""
