"""What each op of a backend uses, where that hangs on the device, the request and what is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv41.hal.device import Device, Platform
from dsv41.hal.request import Request
from dsv41.hal.requirements import Check

_SAID = ("library", "switch", "dtype")
"""Classes of reasons against a path that a person can do something about on this device."""


@dataclass(frozen=True)
class Path:
    """One way to do `op`, such as "attention": what it `uses`, where nothing of its `requirements` speaks against it.

    A backend lists the paths of an op best first, the last one without requirements.
    """

    op: str
    uses: str
    requirements: tuple[Check, ...] = ()


def taken(paths: Sequence[Path], device: Device, platform: Platform, request: Request) -> dict[str, str]:
    """For each op the first path that nothing speaks against, and what it would take to have a better one."""
    found: dict[str, str] = {}
    wishes: dict[str, list[str]] = {}
    for path in paths:
        reasons = [reason for check in path.requirements if (reason := check(device, platform, request))]
        better = wishes.setdefault(path.op, [])
        if path.op in found:
            continue
        if not reasons:
            found[path.op] = "".join([path.uses, *better])
        elif all(reason.cls in _SAID for reason in reasons):
            better.append(f"; for {path.uses}: {' '.join(reason.text for reason in reasons)}")
    return found
