"""The tour, walked: docs/tour.md from `git clone` on, as it is typed, and a picture of every step.

`python -m benchmarks.tour` runs its commands one after the other in an empty folder, in a terminal of 110 columns, and
writes docs/pictures/tour-*.png: terminals with the seconds that each command took, and the pages that were made, wide,
on a phone, dark, and as they are printed.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from tests.browser import Page, browser

from benchmarks.pictures import keep

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tour.md"
COLUMNS, LINES = 110, 30  # of a terminal; of what is shown of one command
# Pages that the steps leave: file, name of the picture, width of the window, whether it is dark, or printed.
SHOWN = (
    ("signalprop-comparison.html", "tour-2-page", 1400, "light"),
    ("tour.html", "tour-6-wide", 1400, "light"),
    ("tour.html", "tour-6-dark", 1400, "dark"),
    ("tour.html", "tour-6-phone", 390, "light"),
    ("tour.html", "tour-6-print", 800, "print"),
)
_STYLE = (
    "body{margin:0;background:#11151c;color:#d6dde6}pre{margin:14px 18px;font:14px/1.45 'DejaVu Sans Mono',monospace}"
)


def steps(text: str) -> list[list[tuple[str, str]]]:
    """Of every numbered section of the page its blocks: (language, text)."""
    sections = re.split(r"^## \d+\. ", text, flags=re.MULTILINE)[1:]
    return [re.findall(r"^```(console|sh|python)\n(.*?)^```", one, flags=re.DOTALL | re.MULTILINE) for one in sections]


def typed(line: str, folder: Path) -> str:
    """What a terminal shows of one command: itself, its output (the middle left out of a long one), and its seconds."""
    ours, theirs = pty.openpty()
    words = line.replace("signalprop", f"{shlex.quote(sys.executable)} -m signalprop", line.startswith("signalprop"))
    environment = os.environ | {"COLUMNS": str(COLUMNS), "LINES": "50", "TERM": "xterm-256color"}
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        running = subprocess.Popen(["bash", "-c", words], cwd=folder, stdout=theirs, stderr=errors, env=environment)
        os.close(theirs)
        found = b""
        while part := _read(ours):
            found += part
        status = running.wait()
        errors.seek(0)
        told = errors.read().decode()
    os.close(ours)
    if status not in (0, 1):
        raise RuntimeError(f"{line}: {told}")
    lines = found.decode().replace("\r", "").rstrip("\n").split("\n")
    if len(lines) > LINES + 4:
        lines = [*lines[: LINES // 2], f"\x1b[2m... {len(lines) - LINES} lines ...\x1b[0m", *lines[-LINES // 2 :]]
    seconds = f"\x1b[2m# {time.perf_counter() - begun:.1f} s\x1b[0m"
    lines = [text.replace(str(folder), "~") for text in lines]
    return "\n".join(filter(None, [f"\x1b[1;32m$\x1b[0m \x1b[1m{line}\x1b[0m", *lines, seconds]))


def _read(ours: int) -> bytes:
    """What comes next; nothing at the end, which a terminal says by an error."""
    try:
        return os.read(ours, 1 << 16)
    except OSError:
        return b""


def cloned(lines: list[str], folder: Path) -> list[str]:
    """The first step: a clone of this repository, in an environment of its own."""
    shown, before = [], "unset PYTHONPATH; "
    for line in lines:
        words = before + line.replace("REPOSITORY", shlex.quote(str(ROOT)))
        shown.append(typed(words, folder).replace(words, line))
        if line.startswith("cd ") or "activate" in line:
            before += f"{line.replace('python3 -m venv .venv && ', '')} && "
    return shown


def terminal(page: Page, name: str, said: list[str]) -> None:
    """Keep a picture of a terminal."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), color_system="truecolor")  # noqa: SIM115
    for part in said:
        console.print(Text.from_ansi(part))
    code = console.export_html(inline_styles=True, code_format="{code}", theme=MONOKAI)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "terminal.html")
        file.write_text(
            f'<!doctype html><html data-state="ready"><meta charset="utf-8"><style>{_STYLE}</style><pre>{code}</pre>',
            encoding="utf-8",
        )
        page.open(file, width=980, height=400)
        page.size(980, int(page.run("document.querySelector('pre').offsetHeight")) + 28)
        keep(page, name)


def page_shown(page: Page, file: Path, name: str, width: int, look: str) -> None:
    """Keep a picture of a page that a step left."""
    page.open(file, width=width, height=844 if width < 600 else 1000, dark=look == "dark")
    if look == "print":
        page.call("Emulation.setEmulatedMedia", media="print")
        page.run("dispatchEvent(new Event('beforeprint'))")
    if width < 600:
        page.run("document.querySelectorAll('main section')[1].scrollIntoView({behavior: 'instant'})")
    page.wait("[...document.querySelectorAll('figure.block')].some((f) => f.querySelector('.main-svg'))")
    page.run("new Promise((done) => { requestAnimationFrame(() => setTimeout(done, 300)); })")
    keep(page, name)
    if look == "print":
        page.call("Emulation.setEmulatedMedia", media="")


def main() -> None:
    """Walk, and take the pictures."""
    with tempfile.TemporaryDirectory() as name, browser() as page:
        folder = Path(name)
        for number, blocks in enumerate(steps(PAGE.read_text(encoding="utf-8"))):
            said = []
            for language, text in blocks:
                lines = text.splitlines()
                if language == "python":
                    subprocess.run([sys.executable, "-c", text], cwd=folder, check=True)
                elif language == "console":
                    said += cloned(lines, folder)
                else:
                    said += [typed(line, folder) for line in lines if line]
            terminal(page, f"tour-{number}", said)
        for file, picture, width, look in SHOWN:
            page_shown(page, folder / file, picture, width, look)


if __name__ == "__main__":
    main()
