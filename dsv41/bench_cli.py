"""What `dsv41 bench` prints and draws, from reports as dictionaries."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from dsv41.errors import BackendError

if TYPE_CHECKING:
    from rich.console import Console


def render(console: Console, report: dict[str, Any]) -> None:
    """A table a head count, with a second one where the peer also gathers, and below them what the columns count."""
    for heads in dict.fromkeys(case["heads"] for case in report["cases"]):
        table = Table(
            title=f"{report['backend']} on {escape(report['device'])}, {heads} heads, {report['record']}",
            title_justify="left",
        )
        columns = ["phase", "tokens", "us", "TFLOP/s", "GB/s", "floor us", "bound", "x floor", "extra MB", "error"]
        if report["peer"]:
            columns += ["peer us", "planned", "x peer", "difference"]
        for column in columns:
            table.add_column(column, justify="left" if column in ("phase", "bound") else "right")
        cases = [case for case in report["cases"] if case["heads"] == heads]
        for case in cases:
            table.add_row(*cells(case, peer=bool(report["peer"])))
        console.print(table)
        if gathered := [case for case in cases if case["peer_gathered_seconds"] is not None]:
            console.print(_gathered(gathered))
    console.print("\n".join(notes(report)), highlight=False, soft_wrap=True)
    for failure in report["failures"]:
        console.print(f"[bold red]wrong[/bold red]: {escape(failure)}", highlight=False, soft_wrap=True)


def cells(case: dict[str, Any], *, peer: bool) -> list[str]:
    """A case as text."""
    shown = [
        case["phase"],
        str(case["tokens"]),
        f"{case['microseconds']:.1f}",
        f"{case['tflops_per_second']:.0f}",
        f"{case['gigabytes_per_second']:.0f}",
        f"{case['floor_seconds'] * 1e6:.1f}",
        case["bound"],
        f"{case['over_floor']:.2f}",
        _megabytes(case["extra_bytes"]),
        _error(case["error"]),
    ]
    if peer:
        shown += [_microseconds(case[f"peer_{what}seconds"]) for what in ("", "planned_")]
        shown += [f"{case['over_peer']:.2f}", _error(case["peer_error"])]
    return shown


def _gathered(cases: list[dict[str, Any]]) -> Table:
    """Ours beside the peer's path over rows that it gathers, in time and in memory."""
    table = Table(title="beside the peer's gathered path", title_justify="left")
    columns = (
        "phase",
        "tokens",
        "us",
        "gathered us",
        "its kernel",
        "x gathered",
        "extra MB",
        "gathered MB",
        "difference",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "phase" else "right")
    for case in cases:
        table.add_row(
            case["phase"],
            str(case["tokens"]),
            _microseconds(case["seconds"]),
            _microseconds(case["peer_gathered_seconds"]),
            _microseconds(case["peer_gathered_kernel_seconds"]),
            f"{case['over_gathered']:.2f}",
            _megabytes(case["extra_bytes"]),
            _megabytes(case["peer_gathered_extra_bytes"]),
            _error(case["peer_gathered_error"]),
        )
    return table


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.1f}"


def _error(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"


def notes(report: dict[str, Any]) -> list[str]:
    """What the figures are, a sentence a line."""
    rates = report["rates"]
    origin = "measured" if rates["measured"] else "the vendor's data sheet"
    found = [
        f"Floor: {rates['bytes_per_second'] / 1e12:g} TB/s and {rates['flops_per_second'] / 1e12:g} TFLOP/s of bf16 "
        f"({rates['name']}, {origin}); records, indices, queries and outputs are moved once.",
        "Time: of one call in a CUDA graph of several on fresh rows, cold cache, median of 15 replays, all launches of "
        f"a call included{', and the rotations' if report['fused'] else ''}. Error: against the reference.",
        "Rows: in decode and prefill at random places; in a chunk those of one request's consecutive tokens, which "
        "share them, so that its floor counts each once. Extra MB: what one call holds beyond its inputs and output.",
    ]
    if report["peer"]:
        found.append(
            f"Peer: {report['peer']}, its decode kernel on the same records, queries and rows in decode and prefill, "
            "heads padded to 64 before. 'planned' has its schedule made in the graph, once a call."
        )
        found.append(
            "Gathered: the peer's prefill kernel, with the gathering of all pages that any token reads into a bf16 "
            "tensor of the call's own; 'its kernel' is without the gathering. Tables are made before."
        )
    return found


def render_steps(console: Console, report: dict[str, Any]) -> None:
    """A table of all sizes, and what one step of each launches, which a profiler saw."""
    title = (
        f"{report['backend']} on {escape(report['device'])}, kv {report['kv_cache_dtype']}, "
        f"index {report['index_cache_dtype']}"
    )
    table = Table(title=title, title_justify="left")
    for column in ("what", "context", "tokens", "us", "floor us", "bound", "x floor", "launches"):
        table.add_column(column, justify="left" if column in ("what", "bound") else "right")
    for row in report["rows"]:
        table.add_row(
            row["what"],
            f"{row['context']:,}",
            str(row["tokens"]),
            f"{row['microseconds']:.1f}",
            f"{row['floor_seconds'] * 1e6:.1f}",
            row["bound"],
            f"{row['over_floor']:.2f}",
            str(row["num_launches"]),
        )
    console.print(table)
    for row in report["rows"]:
        if row["launches"]:
            console.print(_launches(row))
    rates = report["rates"]
    console.print(
        f"Floor: {rates['bytes_per_second'] / 1e12:g} TB/s and {rates['flops_per_second'] / 1e12:g} TFLOP/s of bf16 "
        f"({rates['name']}); weights once, selected rows and scored index keys once a token.\n"
        f"Time: of one step of {report['steps']} in a CUDA graph, each over weights and caches of its own "
        f"({report['step_bytes'] / 2**20:,.0f} MiB), cold cache, median of 15 replays; what is planned once a step is "
        f"not in it. Workspace: {report['workspace_bytes'] / 2**20:,.0f} MiB.",
        highlight=False,
        soft_wrap=True,
    )


def render_products(console: Console, report: dict[str, Any]) -> None:
    """A row a product and size, and below the table what the columns count."""
    table = Table(title=f"{report['backend']} on {escape(report['device'])}, single products", title_justify="left")
    for column in ("product", "tokens", "us", f"{report['peer']} us", "floor us", "x floor", "x peer", "difference"):
        table.add_column(column, justify="left" if column == "product" else "right")
    for row in report["rows"]:
        table.add_row(
            row["what"],
            str(row["tokens"]),
            f"{row['microseconds']:.1f}",
            f"{row['peer_seconds'] * 1e6:.1f}",
            f"{row['floor_seconds'] * 1e6:.1f}",
            f"{row['over_floor']:.2f}",
            f"{row['over_peer']:.2f}",
            _error(row["difference"]),
        )
    console.print(table)
    console.print(
        f"Floor: {report['rates']['bytes_per_second'] / 1e12:g} TB/s ({report['rates']['name']}); weights, activations "
        "and results once.\n"
        "Time: of one call in a CUDA graph of one for each of some layers, cold cache, median of 15 replays. "
        "Difference: between the two results, relatively.",
        highlight=False,
        soft_wrap=True,
    )


def _launches(row: dict[str, Any]) -> Table:
    """Kernels with their share of the time that all of them take; gaps between them are in no share."""
    table = Table(title=f"{row['what']}, {row['context']:,} held, {row['tokens']} tokens", title_justify="left")
    for column in ("kernel", "launches", "us", "share"):
        table.add_column(column, justify="left" if column == "kernel" else "right", overflow="ellipsis", no_wrap=True)
    total = sum(launch["seconds"] for launch in row["launches"])
    for launch in row["launches"]:
        share = f"{100 * launch['seconds'] / total:.0f} %"
        table.add_row(escape(launch["kernel"]), str(launch["count"]), f"{launch['seconds'] * 1e6:.1f}", share)
    return table


def require_matplotlib() -> None:
    """Raises BackendError where nothing can be drawn."""
    if find_spec("matplotlib") is None:
        raise BackendError(
            "--plot draws with matplotlib, which is not installed: expected it; `pip install 'dsv41[plot]'`"
        )


def plot(report: dict[str, Any], path: Path) -> None:
    """Microseconds over tokens in decode, a panel a head count: the backend, the peer and the floor."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    decode = [case for case in report["cases"] if case["phase"] == "decode"]
    counts = list(dict.fromkeys(case["heads"] for case in decode)) or [0]
    figure, panels = pyplot.subplots(1, len(counts), figsize=(4.2 * len(counts), 3.6), sharey=True, squeeze=False)
    for panel, heads in zip(panels[0], counts, strict=True):
        cases = sorted((case for case in decode if case["heads"] == heads), key=lambda case: case["tokens"])
        tokens = [case["tokens"] for case in cases]
        panel.plot(tokens, [case["microseconds"] for case in cases], "o-", label=report["backend"])
        if report["peer"]:
            panel.plot(tokens, [case["peer_seconds"] * 1e6 for case in cases], "s-", label=report["peer"])
        panel.plot(tokens, [case["floor_seconds"] * 1e6 for case in cases], "k--", label="floor")
        panel.set(xscale="log", yscale="log", xlabel="decode tokens", title=f"{heads} heads")
        panel.set_xticks(tokens, [str(count) for count in tokens])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("microseconds")
    panels[0][0].legend()
    figure.suptitle(f"Sparse attention on {report['device']}, {report['record']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
