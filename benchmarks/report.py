"""Size of the interactive report, and how soon it answers its reader in headless Chromium.

`python -m benchmarks.report` writes reports of 6 schemes at 2 fidelities (moments, and kernels of 64 tokens) and opens
each several times in a running browser, which compiles the plotting library the first time. CPU time is that of all of
its processes for a later opening: about what a machine with nothing else to do would need. `--pictures` takes those of
the documentation instead.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from pathlib import Path

import psutil
from PIL import Image
from tests.browser import Page, browser

from signalprop.architecture import Architecture
from signalprop.comparison import compare
from signalprop.data import default_batch, default_statistics
from signalprop.kernels.trace import trace
from signalprop.models import build
from signalprop.prediction import predict
from signalprop.probes import measure
from signalprop.profile import Profile, average
from signalprop.report.html import Item, write_report
from signalprop.schemes import scheme

SCHEMES = ("xavier", "deepscalelm", "deepnorm", "noci", "ds-init", "stable-resnet")
DEPTHS = (24, 192, 768)
OPENED = 5
PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
LARGEST = 200_000  # bytes of a picture in the documentation


def main() -> None:
    """Print the table, or take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", action="store_true", help="take the documentation's pictures instead")
    if parser.parse_args().pictures:
        take_pictures()
        return
    print("| layers | size (MB) | writing (s) | first opening (s) | later openings (s) | of that CPU (s) |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for n_layers in DEPTHS:
            file = Path(folder, f"{n_layers}.html")
            items = profiles(n_layers)
            begun = time.perf_counter()
            write_report(file, items)
            written = time.perf_counter() - begun
            with browser() as page:
                page.call("Page.navigate", url="data:text/html,<svg><text>the browser itself has started</text></svg>")
                times = [opened(page, file) for _ in range(OPENED)]
            first, later = times[0][0], sorted(ready for ready, _ in times[1:])
            cpu = sorted(cpu for _, cpu in times[1:])[len(times) // 2 - 1]
            print(f"| {n_layers} | {file.stat().st_size / 1e6:.2f} | {written:.2f} | {first:.2f} | "
                  f"{later[0]:.2f} to {later[-1]:.2f} | {cpu:.2f} |", flush=True)  # fmt: skip


def profiles(n_layers: int) -> dict[str, Profile]:
    """Predictions of all schemes from scalars and from token kernels."""
    a = Architecture.preset("tgs", n_layers=n_layers, norm_placement="post", seq_len=64)
    out = {}
    for name in SCHEMES:
        p = scheme(name)(a, default_statistics(a))
        for fidelity in ("moments", "kernel"):
            out[f"{name} {fidelity}"] = predict(p, fidelity=fidelity)  # type: ignore[arg-type]
    return out


def opened(page: Page, file: Path) -> tuple[float, float]:
    """Seconds from the navigation until the charts in sight are drawn, and the CPU time that took."""
    before = cpu_time()
    page.open(file)
    ready = page.run("performance.getEntriesByName('ready')[0].startTime / 1000")
    return ready, cpu_time() - before


def cpu_time() -> float:
    """Of the processes that this one has started, in seconds."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(item.user + item.system for item in times)


def take_pictures() -> None:
    """A comparison of two schemes, measured on real text, and their kernels: wide, dark, and on a phone."""
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


def picture(page: Page, file: Path, name: str, width: int, height: int, section: str, *, dark: bool = False) -> None:
    """Show a section of a report and keep a picture of it, with as many colours as fit its size."""
    page.open(file, width=width, height=height, dark=dark)
    if section != "summary":
        page.run(f"document.getElementById('{section}').scrollIntoView({{behavior: 'instant'}})")
    time.sleep(2)
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "raw.png")
        page.screenshot(raw)
        image = Image.open(raw).convert("RGB")
    for colours in (None, 256, 64):
        kept = image if colours is None else image.quantize(colours)
        buffer = io.BytesIO()
        kept.save(buffer, "PNG", optimize=True)
        if buffer.tell() < LARGEST:
            break
    (PICTURES / f"{name}.png").write_bytes(buffer.getvalue())
    print(f"{name}.png {buffer.tell() / 1000:.0f} kB")


if __name__ == "__main__":
    main()
