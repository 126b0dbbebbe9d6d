"""The report in a real browser: it draws without errors or requests, follows the system's colours, and prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import Page, browser, contrast, executable
from diagnosing import diagnosed, tiny
from reported import HOSTILE, as_measured, predicted, table_of, write_run
from signalprop.kernels.trace import trace
from signalprop.report.html import write_report
from signalprop.results.comparison import compare
from signalprop.results.profile import Profile
from signalprop_lab.report.runs import read_run

pytest.importorskip("plotly")
pytestmark = pytest.mark.skipif(executable() is None, reason="no Chromium is installed (Debian: apt install chromium)")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of one of each kind, two of hostile names."""
    root = tmp_path_factory.mktemp("report")
    p = predicted("xavier", norm_placement="post")
    other = predicted("deepscalelm", norm_placement="post").to_json()
    items: list[tuple[str, Any]] = [
        *((name, Profile.from_json({**other, "scheme": name, "notes": list(HOSTILE)})) for name in HOSTILE),
        ("comparison", compare(p, as_measured(p))),
        ("diagnosis", diagnosed(tiny("llama"), name="first", remove=True, cast=["int8"])),
        ("run", read_run(write_run(root / "run", status="finished"))),
        ("network", trace(table_of("xavier"), at=[0, 3, 6])),
        ("table", table_of("deepscalelm")),
    ]
    write_report(root / "report.html", items, title=HOSTILE[1])
    assert (root / "report.html").stat().st_size <= 5_000_000
    return root / "report.html"


def undrawn(page: Page) -> list[str]:
    """Titles of figures without a drawing."""
    return page.run(
        "[...document.querySelectorAll('figure.block')].filter((f) => !f.querySelector('.main-svg'))"
        ".map((f) => f.querySelector('h3').textContent)"
    )


@pytest.mark.parametrize(("width", "dark"), [(1400, False), pytest.param(390, True, marks=pytest.mark.slow)])
def test_everything_is_drawn_without_an_error_or_a_request(
    page: Page, everything: Path, width: int, dark: bool
) -> None:
    page.open(everything, width=width, dark=dark)
    assert page.run("document.querySelectorAll('figure.block').length") > 20
    assert undrawn(page) == [] and page.messages == []
    assert [address for address in page.requests if not address.startswith(("file:", "data:", "blob:"))] == []
    assert page.run("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
    paper = page.run("getComputedStyle(document.body).backgroundColor")
    assert (np.mean([int(part) for part in paper[4:-1].split(",")]) < 60) == dark
    assert page.faint() == []
    assert page.run("window.broken") is None
    drawn = page.run("[...document.querySelectorAll('.legendtext')].map((t) => t.textContent)")
    assert {f"{name}, predicted" for name in HOSTILE[:2]} <= {*drawn}
    assert page.run("document.querySelectorAll('.plot a[*|href]').length") == 0


@pytest.mark.slow
def test_a_slider_moves_the_signal_through_training(page: Page, everything: Path) -> None:
    run = read_run(everything.parent / "run")
    page.open(everything)
    slid = "(d) => d.layout.sliders && d.data[0].type === 'scatter'"
    chart = f"[...document.querySelectorAll('.plot .js-plotly-plot')].find({slid})"
    for step, profile in run.signal[:2]:
        page.run(f"Plotly.animate({chart}, ['{step}'], {{mode: 'immediate', frame: {{duration: 0}}}})")
        heights = page.run(f"[...{chart}.data[0].y]")
        assert heights == pytest.approx(profile.forward["stream_out"].variance, rel=1e-5)


@pytest.mark.slow
def test_buttons_tables_and_headings_serve_the_keyboard(page: Page, everything: Path) -> None:
    page.open(everything)
    assert page.run(
        "[...document.querySelectorAll('.modebar-btn')].every((b) => b.tagName === 'BUTTON' && b.ariaLabel)"
    )
    assert page.run("[...document.querySelectorAll('figure.block')].every((f) => f.querySelector('details table'))")
    page.run("document.querySelector('figure.block summary').focus()")
    page.key("Enter", "\r")
    assert page.run("document.querySelector('figure.block details').open")
    assert page.run("document.querySelectorAll('h1').length") == 1


@pytest.mark.slow
def test_on_paper_everything_is_drawn_in_dark_ink(page: Page, everything: Path, tmp_path: Path) -> None:
    page.open(everything, dark=True)
    label = "getComputedStyle(document.querySelector('.xtick text')).fill"
    assert contrast(page.run(label), "rgb(255, 255, 255)") < 4.5
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.call("Emulation.setEmulatedMedia", media="print", features=dark)
    assert contrast(page.run(label), "rgb(255, 255, 255)") >= 4.5
    page.call("Emulation.setEmulatedMedia", media="", features=dark)
    page.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 50_000
