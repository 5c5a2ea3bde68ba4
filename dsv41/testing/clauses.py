"""Every clause, in the order in which they are checked: the one list that tests, command line and docs are made from.

Write the table in the docs anew with `python -m dsv41.testing.clauses docs/conformance.md`.
"""

from __future__ import annotations

from dsv41.testing import declarations
from dsv41.testing.case import Case
from dsv41.testing.clause import CACHE_STAGE, DECLARATIONS, LAYOUTS, PADDED_HEADS, Clause
from dsv41.testing.subject import Subject


def _once(subject: Subject, full: bool) -> list[Case]:
    return [Case(heads=subject.default_heads)]


def _each_dtype(subject: Subject, full: bool) -> list[Case]:
    """Each KV format beside the default index format, and each index format beside the default KV format."""
    heads = subject.default_heads
    kinds = [Case(heads=heads, kv=kv) for kv in subject.kv_cache_dtypes]
    return kinds + [Case(heads=heads, index=index) for index in subject.index_cache_dtypes]


CLAUSES: tuple[Clause, ...] = (
    Clause(
        "D1",
        DECLARATIONS,
        "Every property has a value of its type, and name, device and contract version are what was asked for.",
        declarations.properties,
        _once,
        sized=False,
    ),
    Clause(
        "D2",
        DECLARATIONS,
        "The class says what the `BackendSpec` that it is registered by says.",
        declarations.agrees_with_its_spec,
        _once,
        sized=False,
    ),
    Clause(
        "H1",
        PADDED_HEADS,
        "`get_padded_num_q_heads(n)` is a whole number of at least n, the same each time, or refuses by BackendError.",
        declarations.padded_heads,
        _once,
        sized=False,
    ),
    Clause(
        "H2",
        PADDED_HEADS,
        "It takes the heads of the release on one of 1, 2, 4 or 8 ranks.",
        declarations.released_heads,
        _once,
        sized=False,
    ),
    Clause(
        "L1",
        LAYOUTS,
        "Every name of a cache dtype becomes a specific one, or is refused by LayoutError.",
        declarations.names_resolve,
        _once,
        sized=False,
    ),
    Clause("L2", LAYOUTS, "`auto` becomes `packed_kv_cache_dtype`.", declarations.auto_is_declared, _once, sized=False),
    Clause(
        "L3",
        LAYOUTS,
        "A specific name resolves to itself, each time to the same layouts.",
        declarations.names_are_stable,
        _once,
        sized=False,
    ),
    Clause(
        "L4",
        LAYOUTS,
        "Each layout is of a known record of the right dims, can be described, and gives rows back within its bounds.",
        declarations.layouts_are_whole,
        _each_dtype,
        stage=CACHE_STAGE,
        sized=False,
    ),
    Clause(
        "L5",
        LAYOUTS,
        "`check_caches` takes caches of the backend's own layouts.",
        declarations.own_caches_taken,
        _each_dtype,
        sized=False,
    ),
)
