"""What a port says of itself in a file of its own: what it does not support, and where it is known to fail."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv41.errors import InputError
from dsv41.testing.clauses import CLAUSES
from dsv41.testing.needs import CAPABILITIES


@dataclass(frozen=True)
class Port:
    """`unsupported` has a reason by capability, `expected_failures` one by clause id."""

    unsupported: Mapping[str, str] = field(default_factory=dict)
    expected_failures: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def load(path: str | Path) -> Port:
        """Read a TOML file of two tables, `[unsupported]` and `[expected_failures]`, each of `name = "reason"`.

        Raises InputError for a file that cannot be read, or that names what does not exist.
        """
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read ({error}): expected a TOML file") from error
        known = {"unsupported": list(CAPABILITIES), "expected_failures": [clause.id for clause in CLAUSES]}
        for table, entries in data.items():
            if table not in known or not isinstance(entries, dict):
                raise InputError(f"{path} has {table!r}: expected the tables {', '.join(known)}")
            for name, reason in entries.items():
                _check(path, table, name, reason, known[table])
        return Port(**{table: data.get(table, {}) for table in known})


def _check(path: str | Path, table: str, name: str, reason: Any, known: list[str]) -> None:
    if name not in known:
        raise InputError(f"{path} names {name!r} in {table}: expected some of {', '.join(known)}")
    if not isinstance(reason, str) or not reason.strip():
        raise InputError(f"{path} gives {name} the reason {reason!r}: expected a sentence")
