"""Parts that take times: cases one after the other, a row each, in one JSON file.

A part is a module of this folder. It has TITLE, ABOUT and READING (Markdown, as `benchmarks.page` has it), and

    cases(small)            what is timed, as mappings that JSON can hold
    measured(case, device)  times one: a mapping of numbers
    section(rows)           the tables, in Markdown; a row is {"case": ..., **numbers}
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import page
from benchmarks.gpu.__main__ import TIMED
from signalprop.errors import InputError
from signalprop.files.storage import make_folder, read_json, write_json
from signalprop_lab.training.environment import environment

SAME = ("device", "git", "versions")  # of all rows of a file


def measure(part: str, out: Path, pack: Path, rehearse: bool) -> int:
    """Time the cases that DIR/PART.json has no numbers of; how many failed."""
    module = importlib.import_module(f"benchmarks.gpu.{part}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    make_folder(out)
    path = out / f"{part}.json"
    store = begun(path, {"part": part, "rehearsed": rehearse, "environment": here(pack), "rows": []})
    rows: list[dict[str, Any]] = store["rows"]
    for case in module.cases(rehearse):
        if any(row["case"] == case and "error" not in row for row in rows):
            continue
        rows[:] = [row for row in rows if row["case"] != case]
        try:
            row = {"case": case} | module.measured(case, device)
        except (RuntimeError, ValueError) as error:  # out of memory, what cannot be captured: the others go on
            row = {"case": case, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        rows.append(row)
        write_json(path, store)
        print(f"gpu: {part}: {row}", file=sys.stderr, flush=True)
        free()
    return sum("error" in row for row in rows)


def begun(path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """What a part's file holds, or its beginning."""
    if not path.is_file():
        return fresh
    store: dict[str, Any] = read_json(path)
    for name, then, now in [
        ("rehearsed", store["rehearsed"], fresh["rehearsed"]),
        *((key, store["environment"][key], fresh["environment"][key]) for key in SAME),
    ]:
        if then != now:
            raise InputError(f"{path} has rows of {name} {then!r:.80}, and here it is {now!r:.80}; name another --out")
    return store


def here(pack: Path) -> dict[str, Any]:
    """Where and of what the numbers are: the revision is the pack's where this is not a clone."""
    found = environment()
    packed = pack / "pack.json"
    if found["git"] is None and packed.is_file():
        found["git"] = read_json(packed)["revision"]
    return found


def write_records(folder: Path, records: Path = page.RECORDS) -> list[str]:
    """Store what `folder` has as `benchmarks.page` takes it, and write the page anew; what was stored."""
    found = {part: read_json(path) for part in TIMED if (path := folder / f"{part}.json").is_file()}
    if not found:
        raise InputError(f"{folder} holds no results; expected files such as {TIMED[0]}.json")
    make_folder(records)
    for part, store in found.items():
        e = store["environment"]
        write_json(records / f"gpu.{part}.json", {
            "where": f"{e['device']}; {e['machine']}", "versions": e["versions"], "date": e["started"][:10],
            "command": f"python -m benchmarks.gpu {part}", "revision": e["git"],
            "section": importlib.import_module(f"benchmarks.gpu.{part}").section(store["rows"]),
        })  # fmt: skip
    if records == page.RECORDS:
        page.write_page()
    return [f"{records}/gpu.{part}.json" for part in found]


def free() -> None:
    """What is left of a case: compiled code, and memory."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wait(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def whole(action: Callable[[], Any], device: torch.device, times: int = 1) -> Callable[[], None]:
    """The action so many times, until the device is done."""

    def run() -> None:
        for _ in range(times):
            action()
        wait(device)

    return run
