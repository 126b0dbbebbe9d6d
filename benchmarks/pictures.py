"""Pictures of pages for the documentation, small enough to be kept in its repository."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image
from tests.browser import Page

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
LARGEST = 150_000  # bytes of one


def keep(page: Page, name: str) -> None:
    """Keep what the window shows, with as many colours as fit its size."""
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
