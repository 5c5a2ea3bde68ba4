"""A report as one HTML page that needs nothing else."""

from __future__ import annotations

from itertools import groupby

from dsv41.testing.report import Report


def as_html(report: Report) -> str:
    """The page: verdict, what it ran on, failures with their commands, skips with their reasons, every clause."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("dsv41.testing", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = [
        (contract, list(part)) for contract, part in groupby(report.results, key=lambda result: result.contract)
    ]
    page: str = environment.get_template("report.html.jinja").render(report=report, sections=sections)
    return page
