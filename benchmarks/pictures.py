"""Pictures of pages for the documentation, small enough to be kept in its repository."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tests.browser import Page

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
LARGEST = 150_000  # bytes of one


# Titles of charts, what their axes show, and how sections begin.
WORDS = """[...document.querySelectorAll('figure h3, figure .unit, section .lead')]
  .filter((e) => e.getClientRects().length && e.getBoundingClientRect().top >= 0
                 && e.getBoundingClientRect().bottom <= innerHeight)
  .map((e) => e.textContent.split('. ')[0]).join('\\n')"""


def keep(page: Page, name: str) -> None:
    """Keep what the window shows, with as many colours as fit its size; its words stand in the file, for tests."""
    info = PngInfo()
    info.add_itxt("words", page.run(WORDS))
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "raw.png")
        page.screenshot(raw)
        image = Image.open(raw).convert("RGB")
    for colours in (None, 256, 64):
        kept = image if colours is None else image.quantize(colours)
        buffer = io.BytesIO()
        kept.save(buffer, "PNG", optimize=True, pnginfo=info)
        if buffer.tell() < LARGEST:
            break
    (PICTURES / f"{name}.png").write_bytes(buffer.getvalue())
    print(f"{name}.png {buffer.tell() / 1000:.0f} kB")
