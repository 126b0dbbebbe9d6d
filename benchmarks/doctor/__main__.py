"""Plant every fault, ask `diagnose` for its first finding, and write records/doctor-table.md and its record beside it.

python -m benchmarks.doctor                    # all; a quarter of an hour on one core
python -m benchmarks.doctor --only rotary      # those in whose name the word stands, in place of the stored ones
python -m benchmarks.doctor --models DIR       # the small trained models are kept there
python -m benchmarks.doctor --checkpoint DIR   # a released checkpoint among the healthy ones; may be repeated
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.doctor import healthy
from benchmarks.doctor.faults import FAULTS
from benchmarks.doctor.table import Healthy, Row, judged, judged_healthy
from signalprop.files.storage import read_text, write_json, write_text
from signalprop_lab.training.tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]
PAGE, RECORD = ROOT / "records" / "doctor-table.md", ROOT / "records" / "doctor-table.json"
ABOUT = """\
# What the doctor says of planted faults

Written by `python -m benchmarks.doctor` from `doctor-table.json`: do not edit.

Every fault is planted in a model, and `diagnose` is asked with its defaults. Models are small ones that were trained
on bytes for 200 steps, fresh ones, and a decoder in plain PyTorch (`own`). Faults are those that people report in
public threads (named where one is known) and variants of them. **Named**: the first finding is the fault's, with its
place. *Partly*: it comes later, or without its place. *Missed*: it is not found. *Wrong*: another cause is asserted.
The same code found the faults and planted them, by the same authors: the table shows what works, not how often strange
models come with a fault that is none of these."""


def told(row: Row) -> str:
    """One line."""
    return f"{row.verdict:9} {row.model}: {row.name} | {row.first[:200]} ({row.seconds:.1f} s)"


def counted(rows: Sequence[Row]) -> str:
    """How many of each."""
    return ", ".join(f"{n} {word}" for word, n in Counter(row.verdict for row in rows).most_common())


def page(bad: Sequence[Row], good: Sequence[Row]) -> str:
    """The page."""

    def cell(text: str) -> str:
        return text[:220].replace("|", "/").replace("\n", " ")

    faults = [[r.model, r.name, f"**{r.verdict}**", cell(r.first), r.source] for r in bad]
    fine = [[r.name, r.verdict, cell(r.first)] for r in good]
    parts = [
        ABOUT, f"## {len(bad)} faults: {counted(bad)}",
        markdown_table(["model", "fault", "verdict", "first finding", "reported in"], faults),
        f"## {len(good)} healthy models: {counted(good)}", markdown_table(["model", "found", "first finding"], fine),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Command line of the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--checkpoint", action="append", default=[])
    given = parser.parse_args()
    healthy.FOLDER = given.models
    bad, good = [], []
    for fault in FAULTS:
        if given.only in f"{fault.model}: {fault.name}":
            bad.append(judged(fault, given.models))
            print(told(bad[-1]), flush=True)
    released = [Healthy(f"checkpoint {Path(d).name}", partial(healthy.released, d)) for d in given.checkpoint]
    for one in (*healthy.HEALTHY, *released):
        if given.only in one.name:
            good.append(judged_healthy(one))
            print(told(good[-1]), flush=True)
    print(f"{len(bad)} faults: {counted(bad)}\n{len(good)} healthy: {counted(good)}")
    if given.only:
        stored = json.loads(read_text(RECORD))
        bad, good = (_replaced(stored[kind], new, kind) for kind, new in (("faults", bad), ("healthy", good)))
    write_json(RECORD, {"faults": [r._asdict() for r in bad], "healthy": [r._asdict() for r in good]})
    write_text(PAGE, page(bad, good))


def _replaced(stored: Sequence[dict[str, Any]], new: Sequence[Row], kind: str) -> list[Row]:
    """The stored rows of what is still asked, with those that were judged now in their places."""
    rows = {(row.model, row.name): row for row in [*(Row(**one) for one in stored), *new]}
    asked = [("", one.name) for one in healthy.HEALTHY] if kind == "healthy" else [(f.model, f.name) for f in FAULTS]
    beside = [key for key in rows if kind == "healthy" and key not in asked]  # released checkpoints
    return [rows[key] for key in (*asked, *beside) if key in rows]


if __name__ == "__main__":
    main()
