"""The backends of this package under the suite, by the class that a port inherits.

On a CPU the portable kernels run in Triton's interpreter, which takes minutes for all of them: there matrix products
and attention are torch's, but for the clauses of the last test. `TRITON_INTERPRET=1 dsv41 check --backend portable`
runs them all.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from dsv41.testing import BackendConformance, Case, Outcome, Subject, check_backend

GPU = torch.cuda.is_available()
TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


class TestReference(BackendConformance):
    backend = "reference"
    device = "cpu"


@pytest.mark.skipif(not GPU, reason="no GPU")
class TestPortableOnTheGpu(BackendConformance):
    backend = "portable"


def interpreted(**options: Any) -> Any:
    from ..model.portables import Interpreted

    class Portable(Interpreted):
        supports_graph_capture = False  # torch's attention waits

    return Portable(**options)


@TRITON
@pytest.mark.skipif(GPU, reason="kernels are compiled here; the class before takes the place of this one")
class TestPortableInTheInterpreter(BackendConformance):
    backend = staticmethod(interpreted)


@TRITON
@pytest.mark.skipif(GPU, reason="kernels are compiled here; the class before takes the place of this one")
@pytest.mark.parametrize(
    ("clause", "case"),
    [
        ("G1", "heads=1,requests=15+1,layer=source"),
        ("M3", "heads=1,requests=9+1/0+2,padding=1"),
        ("M9", "heads=1,requests=9+1,layout=tiles"),
        ("W1", "heads=2,requests=9+1,layer=source"),
        ("O2", "heads=1,requests=4+1,layer=window,quantize=1"),
    ],
)
def test_the_portable_kernels_keep_to_a_clause(clause: str, case: str) -> None:
    from dsv41.backends.portable.backend import PortableBackend

    report = check_backend(Subject.of(PortableBackend), only=[clause], case=Case.parse(case))
    [result] = report.results
    assert result.outcome is Outcome.PASSED, result.failure or result.skips
