"""What a clause is: one sentence of a contract, and what checks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv41.testing.case import Case
    from dsv41.testing.subject import Subject

DECLARATIONS = "declarations"
PADDED_HEADS = "padded heads"
LAYOUTS = "cache layouts"
PREPARE_INPUTS = "prepare_inputs"
SELECT = "select"
FORWARD_MQA = "forward_mqa"
O_PROJ = "o_proj"
LAYER = "whole layer"
GRAPH = "graph capture"
ROBUSTNESS = "robustness"
DETERMINISM = "determinism"
WEIGHTS = "weights"

CACHE_STAGE, LOGITS_STAGE, SELECTION_STAGE = "cache read-back", "index logits", "selection"
ATTENTION_STAGE, PROJECTION_STAGE = "attention", "projection"
STAGES = (CACHE_STAGE, LOGITS_STAGE, SELECTION_STAGE, ATTENTION_STAGE, PROJECTION_STAGE)
"""In the order in which a layer runs them: what one gets wrong reaches those after it."""


class Violation(AssertionError):
    """A backend does not keep to a clause; the message says what was found and what was expected."""


class Inapplicable(Exception):
    """A case that a backend may refuse, and does; the message is its reason. The case counts as skipped."""


Cases = Callable[["Subject", bool], Sequence["Case"]]
"""The cases of a clause for a backend, in quick form or, where the second argument is True, in full."""


@dataclass(frozen=True)
class Clause:
    """One thing that must hold.

    `id` never changes its meaning once released: ports name it in their files. `contract` is one of the names above,
    `sentence` what must hold. `check` raises Violation where it does not, Inapplicable where the case does not apply;
    whatever else it raises counts as a violation too. `needs` are capabilities (`needs.py`) without which the clause is
    skipped. `stage` is that of a layer's stages which fails where this clause does, None for none in particular.
    `full_only` clauses do not run in quick form. One that is not `sized` looks at no step, so a smaller case says no
    more.
    """

    id: str
    contract: str
    sentence: str
    check: Callable[[Subject, Case], None]
    cases: Cases
    needs: tuple[str, ...] = ()
    stage: str | None = None
    full_only: bool = False
    sized: bool = True


def expect(condition: bool, message: str) -> None:
    """Raise Violation with this message unless the condition holds."""
    if not condition:
        raise Violation(message)
