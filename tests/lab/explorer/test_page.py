"""The explorer in a real browser: controls redraw the library's numbers, the address is the state, pins, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("plotly")
pytest.importorskip("dash")

from browser import Page, browser, executable
from exploring import explorer
from signalprop_lab.explorer.app import Settings, address, predicted

pytestmark = pytest.mark.skipif(executable() is None, reason="no Chromium is installed (Debian: apt install chromium)")
SMALL = Settings(n_layers=6, seq_len=32)


@pytest.fixture(scope="module")
def where() -> Iterator[str]:
    with explorer() as running:
        yield running.address


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


def opened(page: Page, url: str, wanted: Settings) -> None:
    page.open(url, ready="document.getElementById('command')?.textContent")
    settle(page, wanted)


def settle(page: Page, wanted: Settings) -> None:
    """Wait for the curves of settings."""
    page.wait(f"document.getElementById('command').textContent === {json.dumps(wanted.command())}")
    page.wait("document.querySelectorAll('#charts .js-plotly-plot').length === 4")


def typed(page: Page, name: str, text: str) -> None:
    """Put a text into a field, as a reader does."""
    page.click(f"#{name}")
    page.run(f"document.getElementById('{name}').select()")
    page.call("Input.insertText", text=text)
    page.key("Enter", "\r")


def heights(page: Page) -> dict[str, list[float]]:
    """Of the curves of the first chart, by name."""
    return page.run(
        "Object.fromEntries(document.querySelector('#charts .js-plotly-plot').data"
        ".filter((t) => t.hoverinfo !== 'skip').map((t) => [t.name, [...t.y]]))"
    )


def variances(settings: Settings) -> Any:
    return pytest.approx(predicted(settings).forward["stream_out"].variance, rel=1e-5)


@pytest.mark.slow
def test_controls_address_pins_and_refusals(page: Page, where: str) -> None:
    opened(page, where + address(SMALL), SMALL)
    assert heights(page) == {"xavier": variances(SMALL)}
    assert page.run("document.getElementById('python').textContent") == SMALL.python()

    page.click("#pin")
    deep = SMALL.model_copy(update={"n_layers": 12})
    typed(page, "n_layers", "12")
    settle(page, deep)
    both = {"xavier, n_layers 12": variances(deep), "xavier, n_layers 6": variances(SMALL)}
    assert heights(page) == both
    shared = page.run("location.href")
    assert shared == where + address(deep, [SMALL])

    typed(page, "n_heads", "7")
    page.wait("document.getElementById('problem').textContent.includes('d_model 256 is not divisible by n_heads 7')")
    assert heights(page) == both, "the last curves stay"
    typed(page, "n_heads", "many")
    page.wait("document.getElementById('problem').textContent.includes('n_heads')")

    page.run("history.back()")
    settle(page, SMALL)
    opened(page, shared, deep)
    assert heights(page) == both
    page.click("#pins button")
    page.wait("!location.search.includes('pin=')")
    assert [m for m in page.messages if "favicon" not in m] == []
    assert all(url.startswith(("http://127.0.0.1:", "data:", "blob:", "about:")) for url in page.requests)


def test_a_page_of_another_host_is_refused(where: str) -> None:
    with pytest.raises(OSError, match="403"):
        urlopen(Request(where, headers={"Host": "evil.example"}), timeout=60)


@pytest.mark.slow
def test_the_command_ends_with_ctrl_c() -> None:
    with explorer() as running:
        assert urlopen(running.address, timeout=60).status == 200
        status, out, err = running.interrupt()
    assert (status, err) == (0, "") and "ended" in out
