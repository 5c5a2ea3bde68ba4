"""The account of a selection: what was asked, and every backend with all that speaks against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsv41.hal.device import Device
from dsv41.hal.plain import to_plain
from dsv41.hal.request import Reason, Request


@dataclass(frozen=True)
class Candidate:
    """One backend on one device. It is usable where `reasons` is empty; `remarks` say what using it costs, and `paths`,
    by op, what each uses (empty for a backend that does not say)."""

    name: str
    summary: str
    reasons: tuple[Reason, ...]
    remarks: tuple[str, ...] = ()
    paths: Mapping[str, str] = field(default_factory=dict)

    @property
    def details(self) -> list[str]:
        """Everything there is to say of it, a line each."""
        return [*map(str, self.reasons), *self.remarks, *(f"{op}: {uses}" for op, uses in self.paths.items())]

    @property
    def usable(self) -> bool:
        return not self.reasons

    def only(self, *classes: str) -> bool:
        """Whether nothing but reasons of these classes speaks against it."""
        return all(reason.cls in classes for reason in self.reasons)


@dataclass(frozen=True)
class SelectionReport:
    """Which backend was chosen for a device, by whom, and why none of the others.

    `source` is "argument", "DSV41_BACKEND" or "automatic". `asked` is the name that the first two gave. `chosen` is
    None where that one cannot run. `intended` is the backend that this hardware gets once this package contains it
    and torch can use the device; None where there is none. `candidates` are in order of preference.
    """

    request: Request
    device: Device
    source: str
    asked: str | None
    chosen: str | None
    intended: str | None
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()

    def candidate(self, name: str) -> Candidate:
        """The candidate of that name. Raises KeyError for an unknown one."""
        return {candidate.name: candidate for candidate in self.candidates}[name]

    @property
    def line(self) -> str:
        """The choice in one line, for a log."""
        wanted = f", the choice for this device once dsv41 contains it: {self.intended}" if self.is_stopgap else ""
        return f"{self.chosen} on {self.device.key} ({self.device.name}, {self.device.arch}), {self.source}{wanted}"

    @property
    def is_stopgap(self) -> bool:
        """Whether this hardware should get another backend, which this version does not contain."""
        return self.intended not in (None, self.chosen)

    def __str__(self) -> str:
        asked = f"{self.asked} ({self.source})" if self.asked else self.source
        lines = [
            f"device    {self.device.key}: {self.device.name}, {self.device.arch}",
            f"request   {self.request}",
            f"asked     {asked}",
            f"chosen    {self.chosen or 'none'}",
        ]
        if self.is_stopgap:
            lines.append(f"intended  {self.intended}")
        lines += [f"note      {note}" for note in self.notes]
        lines.append("backends, best first:")
        for candidate in self.candidates:
            state = "chosen" if candidate.name == self.chosen else "usable" if candidate.usable else "no"
            lines.append(f"  {candidate.name}: {state}")
            lines += [f"    - {text}" for text in candidate.details]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "request": to_plain(self.request),
            "device": {"key": self.device.key, **to_plain(self.device)},
            "source": self.source,
            "asked": self.asked,
            "chosen": self.chosen,
            "intended": self.intended,
            "backends": {
                candidate.name: {
                    "usable": candidate.usable,
                    "reasons": [reason.to_dict() for reason in candidate.reasons],
                    "remarks": list(candidate.remarks),
                    "paths": dict(candidate.paths),
                }
                for candidate in self.candidates
            },
            "notes": list(self.notes),
        }
