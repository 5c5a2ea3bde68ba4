"""Built-in backends take the formats that their specs name and no others, as selection goes by the specs."""

from __future__ import annotations

import pytest

from dsv41.hal import registry
from dsv41.hal.builtin import AITER, FLASHMLA
from dsv41.hal.device import Device
from dsv41.hal.registry import BackendSpec
from dsv41.testing import Subject, check_backend

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("spec", "arch"),
    [(FLASHMLA, "sm_90"), (FLASHMLA, "sm_100"), (AITER, "gfx950")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_spec_names_every_format_that_its_backend_takes(spec: BackendSpec, arch: str) -> None:
    subject = Subject(spec.name, registry.load(spec), "cpu", facts=Device.gpu(arch), spec=spec)
    report = check_backend(subject, only=["D2"])
    assert report.ok, report.failures
