"""records/benchmarks.md, from the records in records/benchmarks/NAME.json and nothing else.

A benchmark is a module of MODULES (those of ON_A_GPU have a command of their own). It has

    TITLE           heading of its section
    ABOUT           Markdown: what is measured, and how
    measured()      measures; gives its tables and sentences, in Markdown, one after the other
    READING         Markdown: what the numbers mean (where there is something to say)
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from signalprop.files.storage import read_json, write_text
from signalprop_lab.training.tables import markdown_table as table

MODULES = (
    "waiting",
    "waiting_gpt2",
    "waiting_llama",
    "waiting_smollm2",
    "prediction",
    "watching",
    "compiled_probes",
    "monitored_step",
    "kernels",
    "variances",
    "weights",
    "cost_growth",
)
ON_A_GPU = ("gpu.ceilings", "gpu.wall", "gpu.overheads")  # `python -m benchmarks.gpu`
SECTIONS = (*MODULES, *ON_A_GPU)
ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "records" / "benchmarks"
PAGE = ROOT / "records" / "benchmarks.md"
WHERE = "{processor}, {cores} cores, {memory_gib} GiB of memory, {system}"

INTRODUCTION = """\
# Benchmarks

Written by `python -m benchmarks` (`make bench`) from the records in `records/benchmarks/`: do not edit. `python -m
benchmarks NAME` measures one section anew, `python -m benchmarks --page` only writes this page.

Seconds depend on the machine; what counts are the ratios. Variants that are compared run in one process (or in turns,
where each needs its own), on one thread, in an order that changes from round to round. Where a variant is listed as
its own control, the distance of that ratio from 1 is what the machine's noise does. A cell reads *median ± standard
error of the median [quartiles]* of the rounds' ratios. Peers run in environments of their own, at the
versions given.

A *floor* is what the job costs at least: the bytes that must be moved, the products that must be computed, or the
operations that any program of this kind needs, timed in the same run. The distance to it is what better code could
still win."""


def page(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The page.

    Args:
        records: by module, in the order of their sections.
    """
    parts = [INTRODUCTION, *_machines(records), "## What ran", _runs(records)]
    for name, record in records.items():
        written = _texts(name)
        parts += [f"## {written['title']}", written["about"], record["section"]]
        parts += [written["reading"]] if "reading" in written else []
    return "\n\n".join(parts) + "\n"


def _texts(name: str) -> dict[str, str]:
    """Title, about and reading of a module."""
    module = vars(importlib.import_module(f"benchmarks.{name}"))
    return {word: module[word.upper()].strip() for word in ("title", "about", "reading") if word.upper() in module}


def write_page() -> None:
    """The page of the records that there are."""
    files = {name: RECORDS / f"{name}.json" for name in SECTIONS}
    write_text(PAGE, page({name: read_json(file) for name, file in files.items() if file.is_file()}))


def _machines(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for every machine that records come from."""
    seen: dict[str, list[str]] = {}
    for name, record in records.items():
        line = record.get("where") or WHERE.format(**record["machine"])
        seen.setdefault(line, []).append(name)
    if len(seen) == 1:
        return [f"Machine: {next(iter(seen))}."]
    return [f"Machine of {', '.join(names)}: {line}." for line, names in seen.items()]


def _runs(records: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for record in records.values():
        load = record.get("machine", {}).get("load_average")
        used = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        took = f"{record['seconds']:.0f} s" if "seconds" in record else ""
        loads = f"{load['start']}, {load['end']}" if load else ""
        rows.append([f"`{record['command']}`", record["date"], record.get("revision", ""), took, loads, used])
    return table(["command", "date", "revision", "took", "load average before, after", "versions"], rows)
