"""`dsv41 probe`: what this machine is, and for each device which backend it gets and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsv41.hal.device import Device, Library, Platform
from dsv41.hal.plain import to_plain
from dsv41.hal.report import SelectionReport
from dsv41.hal.select import explain_backends

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def probe_reports(platform: Platform, **request: Any) -> dict[str, SelectionReport]:
    """What each device of a platform gets, by device key. `request` goes to `explain_backends`."""
    return {device.key: explain_backends(device=device, platform=platform, **request) for device in platform.devices}


def probe_report(platform: Platform, **request: Any) -> dict[str, Any]:
    """The JSON of `dsv41 probe --json`; its "platform" can be played back with `--as`.

    "chosen" is null for a device that nothing can use; "intended" is what the device gets once this package contains
    it and torch can use the device.
    """
    reports = probe_reports(platform, **request)
    backends: dict[str, dict[str, Any]] = {}
    for key, report in reports.items():
        for name, judgement in report.to_dict()["backends"].items():
            backends.setdefault(name, {})[key] = judgement
    return {
        "devices": [{"key": device.key, **to_plain(device)} for device in platform.devices],
        "chosen": {key: report.chosen for key, report in reports.items()},
        "intended": {key: report.intended for key, report in reports.items()},
        "backends": backends,
        "libraries": to_plain(platform.libraries),
        "torch": to_plain(platform.torch),
        "notes": list(platform.notes),
        "platform": platform.to_json(),
    }


def render(console: Console, platform: Platform, **request: Any) -> None:
    """The same for a person: devices, software, then a table of backends for each device."""
    reports = probe_reports(platform, **request)
    played = f" [dim](played back from {_plain(platform.origin)})[/dim]" if platform.origin else ""
    if platform.about or played:
        console.print(f"{_plain(platform.about or 'A platform')}{played}\n")
    console.print(_devices(platform, reports))
    console.print(_software(platform))
    for note in (note for note in platform.notes if note != platform.torch.problem):
        console.print(f"[yellow]note[/yellow] {_plain(note)}\n", highlight=False)
    for report in reports.values():
        console.print(_backends(report))


def _devices(platform: Platform, reports: dict[str, SelectionReport]) -> Table:
    table = _table("Devices", "device", "what it is", "backend", "meant for it")
    for device in platform.devices:
        report = reports[device.key]
        facts = [
            device.arch,
            f"{device.memory_bytes / 1024**3:.0f} GiB" if device.memory_bytes else "",
            f"{device.multiprocessors} {'cores' if device.vendor == 'cpu' else 'SM/CU'}"
            if device.multiprocessors
            else "",
            f"{device.shared_memory_bytes // 1024} KiB shared" if device.shared_memory_bytes else "",
            f"fp8 {device.fp8_dialect}" if device.fp8_dialect else "",
        ]
        table.add_row(
            device.key,
            _plain("\n".join((device.name, ", ".join(filter(None, facts))))),
            _plain(report.chosen) if report.chosen else "[red]none[/red]",
            _plain(report.intended or "-"),
        )
    return table


def _software(platform: Platform) -> Table:
    table = _table("Software", "what", "version", "state")
    torch = platform.torch
    table.add_row("torch", _plain(torch.version or "-"), _plain(torch.problem or f"{torch.kind} build"))
    table.add_row("driver", _plain(platform.driver or "-"), "")
    for name, library in sorted(platform.libraries.items()):
        table.add_row(_plain(name), _plain(library.version or "-"), _plain(_state(library)))
    return table


def _state(library: Library) -> str:
    if library.problem:
        return library.problem
    return ", ".join(sorted(library.features)) if library.installed else "not installed"


def _backends(report: SelectionReport) -> Table:
    device: Device = report.device
    table = _table(f"Backends on {device.key}: {_plain(device.name)}, {device.arch}", "backend", "", "why")
    table.caption = _plain(str(report.request))
    for candidate in report.candidates:
        if candidate.name == report.chosen:
            state = "[green]chosen[/green]"
        else:
            state = "usable" if candidate.usable else "[red]no[/red]"
        why = candidate.details or [candidate.summary]
        name = (
            f"{candidate.name} (intended)"
            if report.is_stopgap and candidate.name == report.intended
            else candidate.name
        )
        table.add_row(_plain(name), state, _plain("\n".join(why)))
    return table


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption_justify="left", show_lines="why" in columns)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _plain(text: str) -> str:
    """Text in which square brackets are not markup."""
    from rich.markup import escape

    return escape(text)
