"""How soon the explorer shows a change: from the event of a control to the drawn frame, in headless Chromium.

The dropout is changed many times (to a value that was never asked for); the page's own measure of each redraw is read.
On a busy machine the times are those of the machine: CPU time, of the server and of all processes of Chromium, tells
what a change costs. `python -m benchmarks.explore` takes the picture of the documentation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
from tests.browser import Page, browser
from tests.exploring import choose, explorer, settle

from benchmarks.pictures import keep
from benchmarks.timing import summary, table

TITLE = "The explorer in a browser"
ABOUT = """
A change of one control, from its event to the drawn frame, in headless Chromium without graphics hardware; every change
asks for a value that was never asked for before. Milliseconds; CPU time is that of a change, all threads and processes
together. Where token kernels follow the first curves, the redraw is that of the first; the last column is theirs."""
# What is measured, and how the controls stand. `pins`: curves that stay beside the one that changes.
CASES: dict[str, dict[str, Any]] = {
    "192 layers": {"n_layers": 192, "scheme": "deepscalelm"},
    "192 layers, two pinned": {"n_layers": 192, "scheme": "deepscalelm", "pins": 2},
    "768 layers": {"n_layers": 768, "scheme": "deepscalelm"},
    "48 layers, decoder, 64 tokens, auto": {
        "kind": "decoder", "n_layers": 48, "seq_len": 64, "scheme": "deepscalelm", "fidelity": "auto",
    },
}  # fmt: skip
START: dict[str, Any] = {
    "kind": "encoder",
    "n_layers": 48,
    "seq_len": 512,
    "scheme": "xavier",
    "fidelity": "moments",
    "dropout": 0.1,
}
WARM_UP = 8  # changes that are not counted
_DROPOUTS = (round(0.1 + 1e-4 * k, 4) for k in itertools.count(1))  # none twice: the server remembers


def take_picture(page: Page) -> None:
    """Two pinned schemes and a third at 192 post-norm layers."""
    choose(page, n_layers=192, norm_placement="post")
    for name in ("xavier", "deepnorm"):
        choose(page, scheme=name)
        page.click("#pin")
        settle(page)
    choose(page, scheme="deepscalelm")
    page.run("scrollTo(0, 0)")
    page.run("new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); })")
    keep(page, "explore")


def changed(page: Page, case: dict[str, Any], changes: int, server: psutil.Process) -> dict[str, Any]:
    """Milliseconds of one case: redraws, the server's share of the median one, CPU time per change, and where token
    kernels follow the first curves, how long they took.
    """
    wanted = dict(case)
    pins = wanted.pop("pins", 0)
    choose(page, **START)
    for k in range(pins):
        choose(page, **{**wanted, "qk_scale": 2.0 + k})
        page.click("#pin")
        settle(page)
    choose(page, **{**wanted, "qk_scale": 1.0})
    for _ in range(WARM_UP):
        choose(page, dropout=next(_DROPOUTS))
    redraws, shares, kernels = [], [], []
    slow = wanted.get("fidelity") == "auto"
    changes = min(changes, 7) if slow else changes
    tabs = [item for item in psutil.Process().children(recursive=True) if item != server]
    before = cpu_time([server]), cpu_time(tabs)
    for _ in range(changes):
        page.run("performance.clearMeasures('redraw')")
        choose(page, dropout=next(_DROPOUTS))
        found = page.run("performance.getEntriesByName('redraw').map((e) => [e.duration, e.detail.server])")
        redraws.append(found[0][0])
        shares.append(found[0][1])
        if len(found) > 1:
            kernels.append(found[1][0])
    used = [
        (now - then) / changes * 1000 for now, then in zip((cpu_time([server]), cpu_time(tabs)), before, strict=True)
    ]
    for _ in range(pins):
        page.click("#pins button")
        settle(page)
    return {
        "redraw": summary(redraws), "best": min(redraws), "worst": max(redraws),
        "server": sorted(shares)[len(shares) // 2], "server_cpu": used[0], "browser_cpu": used[1], "kernels": kernels,
    }  # fmt: skip


def cpu_time(processes: list[psutil.Process]) -> float:
    """Seconds that processes have computed until now; one that has ended counts no more."""
    total = 0.0
    for item in processes:
        with suppress(psutil.NoSuchProcess):
            times = item.cpu_times()
            total += times.user + times.system
    return total


def measured(changes: int = 25) -> Iterator[str]:
    """The section of the page."""
    lines = []
    with explorer() as running, browser() as page:
        page.open(running.address)
        server = psutil.Process(running.process.pid)
        for name, case in CASES.items():
            row = changed(page, case, changes, server)
            redraw = row["redraw"]
            kernels = f"{sorted(row['kernels'])[len(row['kernels']) // 2]:.0f}" if row["kernels"] else ""
            others = (f"{row[key]:.0f}" for key in ("best", "worst", "server", "server_cpu", "browser_cpu"))
            times = f"{redraw['median']:.0f} [{redraw['low']:.0f}, {redraw['high']:.0f}]"
            lines.append([name, times, *others, kernels])
    header = ["what changes", "redraw: median [quartiles]", "best", "worst", "the server in it", "CPU, server",
              "CPU, Chromium", "token kernels"]  # fmt: skip
    yield table(header, lines)


if __name__ == "__main__":
    with explorer() as running, browser() as page:
        page.open(running.address)
        take_picture(page)
