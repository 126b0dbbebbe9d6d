"""The pictures of docs/tour.md and docs/measuring.md: terminals, reports and the explorer as they are today.

`PYTHONPATH=tests python -m benchmarks.pictures` types the tour's commands in an empty directory and takes each picture
in headless Chromium: a terminal of 80 columns, or the page that a command wrote. About three minutes.
"""

from __future__ import annotations

import argparse
import base64
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from browser import browser  # type: ignore[import-not-found]  # of the tests
from exploring import explorer  # type: ignore[import-not-found]  # likewise
from signalprop_lab.explorer.app import Settings, address

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
DRAWN = "document.querySelectorAll('.plotly .main-svg').length > 0"
_HEIGHT = 1000  # pixels of a page; a terminal is as high as its text


def typed(command: str, folder: Path) -> str:
    """What a command prints on a terminal of 80 columns, with its colours."""
    lines: list[bytes] = []

    def read(descriptor: int) -> bytes:
        lines.append(os.read(descriptor, 1 << 16))
        return lines[-1]

    before = Path.cwd()
    os.chdir(folder)
    os.environ |= {"COLUMNS": "80", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    try:
        status = pty.spawn(["sh", "-c", f"stty cols 80 rows 50; {command}"], read)
    finally:
        os.chdir(before)
    text = b"".join(lines).decode().replace("\r\n", "\n")
    if status:
        raise SystemExit(f"{command!r} ended with status {os.waitstatus_to_exitcode(status)}:\n{text}")
    return re.sub(r"[^\n]*\r", "", re.sub(r"\x1b\[[0-9?;]*[A-LN-Za-lo-z]", "", text))  # of a bar its last state


def terminal(*commands: str) -> Callable[[Path], Path]:
    """A page that shows commands and what they print."""

    def make(folder: Path) -> Path:
        console = Console(record=True, width=80, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
        for command in commands:
            console.print(Text(f"$ {command}", style="bold"))
            console.print(Text.from_ansi(typed(command, folder)))
        page = folder / "terminal.html"
        style = "<style>body{margin:16px} pre{font-size:14px;line-height:1.35}</style>"
        page.write_text(style + console.export_html(inline_styles=True))
        return page

    return make


PREDICTED = [f"signalprop predict tgs --layers 192 --norm post --scheme {name} --json {name}.json --overwrite"
             for name in ("xavier", "deepscalelm")]  # fmt: skip
CONFIG = """
from transformers import GPT2Config

size = {"n_layer": 8, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 64}
config = GPT2Config(architectures=["GPT2LMHeadModel"], **size, bos_token_id=0, eos_token_id=0)
config.save_pretrained("deep")
"""
COMPARED = (
    "signalprop compare tgs --layers 4 --set d_model=64 --set vocab_size=500 --seq-len 32 --norm post "
    "--scheme deepscalelm --seeds 2 --plot comparison.html"
)
REPAIRED = ("signalprop apply deep --scheme deepscalelm --out scaled", "signalprop check scaled",
            "signalprop fold scaled --out plain")  # fmt: skip
TRAINED = (
    "signalprop train bytes-decoder --set model.architecture.n_layers=2 --set budget.steps=4 --set cadence.signal=2 "
    "--out runs/first"
)
REPORTED = "signalprop report xavier.json deepscalelm.json found.json runs/first --out tour.html"
SWEPT = ROOT / "records" / "results" / "lns.json"


def pictures(folder: Path, take: Callable[..., None]) -> None:
    """All of them, in the tour's order, since later commands read what earlier ones wrote."""
    take("tour-0", terminal("signalprop predict gpt2"))
    take("tour-1", terminal(*PREDICTED))
    take("tour-2", terminal(COMPARED))
    take("tour-2-page", lambda _: folder / "comparison.html")
    subprocess.run([sys.executable, "-c", CONFIG], cwd=folder, check=True)
    take("tour-3", terminal(*REPAIRED))
    take("tour-4", terminal("signalprop diagnose plain --tokens 256 --json found.json"))
    take("tour-5", terminal(TRAINED))
    typed(REPORTED, folder)
    for name, options in {
        "wide": {},
        "dark": {"dark": True},
        "phone": {"width": 390},
        "print": {"media": "print"},
    }.items():
        take(f"tour-6-{name}", lambda _: folder / "tour.html", **options)
    typed("signalprop report found.json --out diagnosis.html", folder)
    take("report-diagnosis", lambda _: folder / "diagnosis.html")
    typed("signalprop kernel gpt2 --layers 24 --seq-len 64 --scheme gpt2,xavier --plot kernels.html", folder)
    take("report-kernels", lambda _: folder / "kernels.html")
    typed(f"signalprop report {SWEPT} --out sweep.html", folder)
    take("report-sweep", lambda _: folder / "sweep.html")


def explored(page: Any) -> None:
    """The explorer with two pinned schemes and a third, in the browser's window."""
    deepest = Settings(n_layers=192, scheme="deepscalelm")
    pinned = [deepest.model_copy(update={"scheme": name}) for name in ("xavier", "deepnorm")]
    with explorer() as running:
        page.open(running.address + address(deepest, pinned), width=1200, height=_HEIGHT,
                  ready="document.querySelectorAll('#charts .js-plotly-plot').length === 4")  # fmt: skip
        time.sleep(1)  # for the curves, which are drawn after the charts


def main(names: list[str]) -> None:
    """Take all pictures, or store only those named; the commands run all the same."""
    with tempfile.TemporaryDirectory() as place, browser() as page:

        def take(name: str, make: Callable[[Path], Path], **options: Any) -> None:
            file = make(Path(place))
            if names and name not in names:
                return
            text = file.name == "terminal.html"
            page.open(file, width=options.get("width", 760 if text else 1200), height=_HEIGHT,
                      dark=options.get("dark", False), **({} if text else {"ready": DRAWN}))  # fmt: skip
            if "media" in options:
                page.call("Emulation.setEmulatedMedia", media=options["media"])
            shoot(page, name, whole=text)

        if names != ["explore"]:
            pictures(Path(place), take)
        if not names or "explore" in names:
            explored(page)
            shoot(page, "explore")


def shoot(page: Any, name: str, *, whole: bool = False) -> None:
    """Store what the browser shows; `whole`: down to the end of the page."""
    size = page.run("({width: innerWidth, height: document.documentElement.scrollHeight})")
    clip = {"x": 0, "y": 0, "scale": 1, "width": size["width"], "height": size["height"] if whole else _HEIGHT}
    shot = page.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
    (FOLDER / f"{name}.png").write_bytes(base64.b64decode(shot))
    print(name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="pictures to store (default: all)")
    main(parser.parse_args().names)
