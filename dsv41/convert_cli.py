"""What `dsv41 convert` asks a backend and prints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dsv41.errors import BackendError
from dsv41.hal import registry
from dsv41.hal.layout import CacheLayout, CacheLayouts
from dsv41.hal.names import suggest

if TYPE_CHECKING:
    from rich.console import Console

    from dsv41.transfer import ConvertReport


def layouts_of(backend: str, kv_cache_dtype: str, index_cache_dtype: str) -> CacheLayouts:
    """What a backend reads for these names. It is made for no device, since nothing is to be run.

    Raises BackendError for a backend that is unknown or not part of this version, LayoutError for a name that it does
    not read.
    """
    specs = {spec.name: spec for spec in registry.all_specs()}
    if (spec := specs.get(backend)) is None:
        raise BackendError(
            f"backend {backend!r} is unknown: {suggest(backend, specs)}expected one of {', '.join(specs)}; name one"
        )
    if spec.fault is not None:
        raise BackendError(f"backend {backend!r} cannot be used: {spec.fault}")
    if spec.target is None:
        here = ", ".join(name for name, other in specs.items() if other.target is not None)
        raise BackendError(
            f"backend {backend!r} is not part of this version of dsv41, so its layouts are not known: expected one of "
            f"{here}; upgrade dsv41 once a version has it"
        )
    made = registry.load(spec)(kv_cache_dtype=kv_cache_dtype, index_cache_dtype=index_cache_dtype)
    return made.layouts


def as_dict(report: ConvertReport) -> dict[str, Any]:
    """JSON-able; an infinite error is null."""
    caches = {}
    for name, (before, after) in report.layouts.items():
        moved, error = report.caches[name], report.caches[name].max_relative_error
        caches[name] = {
            "from": before.to_dict(),
            "to": after.to_dict(),
            "rows": moved.rows,
            "exact": moved.exact,
            "max_relative_error": error if math.isfinite(error) else None,
        }
    return {
        "length": report.length,
        "bytes": report.bytes,
        "sha256": report.sha256,
        "caches": caches,
        "scrubbed": report.scrubbed,
    }


def render(console: Console, report: ConvertReport, out: Path) -> None:
    """The caches as a table, one line each, then what else was done."""
    table = Table("cache", "rows", "from", "to", "exact", "largest error", title=f"{report.length} tokens")
    for name, (before, after) in report.layouts.items():
        moved = report.caches[name]
        exact = "yes" if moved.exact else "no"
        table.add_row(name, str(moved.rows), _short(before), _short(after), exact, f"{moved.max_relative_error:.2e}")
    console.print(table)
    for name, count in report.scrubbed.items():
        console.print(f"{name}: {count} groups with NaN or infinite numbers are zero now")
    console.print(f"wrote {out}, {report.bytes:,} bytes", soft_wrap=True)


def _short(layout: CacheLayout) -> str:
    """Record, placement, rows a page; tiles where there are some."""
    tiles = ", tiled" if layout.value_tile or layout.scale_tile else ""
    return f"{layout.record.name}, {layout.scale_placement}, {layout.page_size} a page{tiles}"
