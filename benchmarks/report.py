"""Size of the interactive report, and how soon it answers its reader in headless Chromium.

Reports of 6 schemes at 2 fidelities (moments, and kernels of 64 tokens) are opened in fresh browsers and again in the
same ones, which have compiled the plotting library by then. On a busy machine the times are those of the machine; `chrt
-r 1` before the command gives the browser first call on the processors. `python -m benchmarks.report` takes the
documentation's pictures.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from tests.browser import Page, browser

from benchmarks.pictures import keep
from benchmarks.timing import table
from benchmarks.walk import prepare
from signalprop.data.batches import default_batch, default_statistics
from signalprop.kernels.trace import trace
from signalprop.measurement import measure
from signalprop.models import build
from signalprop.network.architecture import Architecture
from signalprop.prediction import predict
from signalprop.report.html import Item, read, write_report
from signalprop.results.comparison import compare
from signalprop.results.profile import Profile, average
from signalprop.schemes import scheme

TITLE = "The interactive report in a browser"
ABOUT = """
Reports of 6 schemes at 2 fidelities, opened in headless Chromium without graphics hardware: from the navigation until
the charts in sight are drawn. A fresh browser has to compile the plotting library (4.8 MB of JavaScript); later
openings find it compiled."""
SCHEMES = ("xavier", "deepscalelm", "deepnorm", "noci", "ds-init", "stable-resnet")
DEPTHS = (24, 192, 768)
BROWSERS = 3
RESULTS = Path(__file__).parent.parent / "docs" / "results"
MARKS = ("built", "inflated", "loaded", "ready")


def profiles(n_layers: int) -> dict[str, Profile]:
    """Predictions of all schemes from scalars and from token kernels."""
    a = Architecture.preset("tgs", n_layers=n_layers, norm_placement="post", seq_len=64)
    out = {}
    for name in SCHEMES:
        p = scheme(name)(a, default_statistics(a))
        for fidelity in ("moments", "kernel"):
            out[f"{name} {fidelity}"] = predict(p, fidelity=fidelity)  # type: ignore[arg-type]
    return out


def opened(file: Path) -> dict[str, dict[str, float]]:
    """Milliseconds until each mark of the page, and CPU seconds: in a fresh browser, and in the same one again."""
    found = {}
    with browser() as page:
        page.call("Page.navigate", url="data:text/html,<svg><text>the browser itself has started</text></svg>")
        for which in ("first", "again"):
            before = cpu_time()
            page.open(file)
            marks = page.run(
                "Object.fromEntries(performance.getEntriesByType('mark').map((m) => [m.name, m.startTime]))"
            )
            found[which] = {name: marks[name] for name in MARKS} | {"cpu": cpu_time() - before}
    return found


def cpu_time() -> float:
    """Of the processes that this one has started, in seconds."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(item.user + item.system for item in times)


def take_pictures() -> None:
    """Two schemes, measured on real text, and their kernels: wide, dark, on a phone; a sweep; a diagnosis."""
    items: dict[str, Item] = {}
    for name in ("xavier", "deepscalelm"):
        a = Architecture.preset("tgs", n_layers=96, d_model=128, norm_placement="post", seq_len=128)
        p = scheme(name)(a, default_statistics(a))
        batch = default_batch(a, batch_size=2)
        measured = average([measure(build(p, seed=k), batch, scheme=name) for k in range(4)])
        items[name] = compare(predict(p, batch.statistics(a)), measured)
        items[f"{name} table"] = p
        small = Architecture.preset("gpt2", n_layers=48, seq_len=96, dropout=0.0, attention_dropout=0.0)
        items[f"gpt2 {name}"] = trace(scheme(name)(small, default_statistics(small)))
    with tempfile.TemporaryDirectory() as folder, browser() as page:
        file = Path(folder, "report.html")
        write_report(file, items)
        picture(page, file, "report-wide", 1400, 1000, "summary")
        picture(page, file, "report-signal", 1400, 1000, "signal")
        picture(page, file, "report-kernels", 1400, 1000, "kernels", dark=True)
        picture(page, file, "report-phone", 390, 844, "signal")
        write_report(file, read(RESULTS / "tgs-tab8.json"))
        picture(page, file, "report-sweep", 1400, 1000, "sweep-0")
        prepare(Path(folder))
        words = "diagnose broken --data book.txt --tokens 512 --remove --report report.html"
        subprocess.run([sys.executable, "-m", "signalprop", *words.split()], cwd=folder, capture_output=True)
        picture(page, file, "report-diagnosis", 1400, 1300, "summary")


def picture(page: Page, file: Path, name: str, width: int, height: int, section: str, *, dark: bool = False) -> None:
    """Show a section of a report and keep a picture of it."""
    page.open(file, width=width, height=height, dark=dark)
    if section != "summary":
        page.run(f"document.getElementById('{section}').scrollIntoView({{behavior: 'instant'}})")
    page.wait(
        "[...document.querySelectorAll('figure.block')].filter((f) => f.getBoundingClientRect().top < innerHeight"
        " && f.getBoundingClientRect().bottom > 0).every((f) => f.querySelector('.main-svg'))"
    )
    page.run("new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); })")
    keep(page, name)


def measured() -> Iterator[str]:
    """The section of the page."""
    rows = []
    for n_layers in DEPTHS:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "report.html")
            items = profiles(n_layers)
            begun = time.process_time()
            write_report(file, items)
            writing = time.process_time() - begun
            openings = [opened(file) for _ in range(BROWSERS)]
            row = [str(n_layers), f"{file.stat().st_size / 1e6:.2f}", f"{writing:.2f}"]
            for which in ("first", "again"):
                row.append(" ".join(f"{found[which]['ready'] / 1000:.2f}" for found in openings))
                row.append(f"{statistics.median(found[which]['cpu'] for found in openings):.2f}")
            rows.append(row)
    header = [
        "layers",
        "size (MB)",
        "writing (CPU s)",
        "first openings (s)",
        "CPU (s)",
        "later openings (s)",
        "CPU (s)",
    ]
    yield table(header, rows)


if __name__ == "__main__":
    take_pictures()
