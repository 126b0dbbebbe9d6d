"""Every kind of result that a report shows: our own, and those that installed packages add."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from signalprop.report.html import diagnoses, kernels, monitored, signal, tables
from signalprop.report.html.parts import Part

GROUP = "signalprop.report"  # of entry points


@cache
def parts() -> tuple[Part, ...]:
    """Every kind of result, in the order of the page: our own, and those of installed packages between them."""
    others = [found.load() for found in sorted(entry_points(group=GROUP), key=lambda found: found.name)]
    return (signal.PART, diagnoses.PART, monitored.PART, *others, kernels.PART, tables.PART)
