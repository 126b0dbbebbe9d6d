"""The report in a real browser: it draws without errors, its controls work, and its numbers are those of the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import Page, browser, contrast, executable
from diagnosing import diagnosed, tiny
from reported import as_measured, predicted, table_of, write_run
from signalprop.kernels.state import normalised
from signalprop.kernels.trace import trace
from signalprop.prediction import predict
from signalprop.report.html import write_report
from signalprop.results.comparison import compare
from signalprop.results.profile import Profile
from signalprop_lab.report.runs import read_run

pytest.importorskip("plotly")
pytestmark = pytest.mark.skipif(executable() is None, reason="no Chromium is installed (Debian: apt install chromium)")

CUT_OFF = """[...document.querySelectorAll(".ytick text")].filter((label) =>
  label.getBoundingClientRect().left < label.closest(".plot").getBoundingClientRect().left)
  .map((label) => `${label.closest("figure").id}: ${label.textContent}`)"""
VISIBLE = """(id) => document.querySelector(`#${id} .plot`).data
  .filter((t) => t.hoverinfo !== "skip" && !(t.line.color || "").startsWith("rgba(0,0,0,0)"))"""


# Charts whose vertical axis has fewer than two numbers, with those that it has.
UNLABELLED = """[...document.querySelectorAll('figure.block:has(.main-svg)')].map((f) => [
    f.id, ...[...f.querySelectorAll('.ytick text')].map((text) => text.textContent)]).filter((f) => f.length < 3)"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def profiles() -> dict[str, Profile]:
    """Two schemes, each predicted and measured."""
    out = {}
    for k, name in enumerate(("xavier", "deepscalelm")):
        out[name] = predicted(name, norm_placement="post")
        out[f"{name} measured"] = as_measured(out[name], seed=k)
    return out


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory, profiles: dict[str, Profile]) -> Path:
    """A report of one of each kind."""
    root = tmp_path_factory.mktemp("report")
    runs = {name: read_run(write_run(root / name, status="finished")) for name in ("one", "two")}
    p = profiles["xavier"]
    items: list[tuple[str, Any]] = [
        *((name, item) for name, item in profiles.items() if "xavier" not in name),
        ("comparison", compare(p, profiles["xavier measured"])),
        ("diagnosis", diagnosed(tiny("llama"), name="first", remove=True, cast=["int8"])),
        ("against", diagnosed(tiny("llama", seed=1), name="second")),
        *runs.items(),
        ("network", trace(table_of("xavier"), at=[0, 3, 6])),
        ("table", table_of("deepscalelm")),
    ]
    write_report(root / "report.html", items)
    return root / "report.html"


@pytest.fixture
def opened(page: Page, everything: Path) -> Page:
    page.open(everything)
    return page


def pressed(page: Page, section: str) -> dict[str, bool]:
    """The switches of a section and whether they are on."""
    return page.run(
        f"Object.fromEntries([...document.querySelectorAll('#{section} .controls .toggle')]"
        ".map((b) => [b.textContent, b.getAttribute('aria-pressed') === 'true']))"
    )


def press(page: Page, section: str, label: str) -> None:
    """Click on a switch by its label."""
    page.run(
        f"[...document.querySelectorAll('#{section} .toggle')].forEach((b) => "
        f"b.toggleAttribute('data-wanted', b.textContent === {json.dumps(label)}))"
    )
    page.click(f"#{section} .toggle[data-wanted]")


def drawn(page: Page, chart: str) -> dict[str, list[float | None]]:
    """Heights of the visible curves of a chart, by name."""
    page.run(f"document.querySelector('#{chart}').scrollIntoView({{behavior: 'instant'}})")
    page.wait(f"document.querySelector('#{chart} .plot').data")
    return page.run(f"Object.fromEntries(({VISIBLE})('{chart}').map((t) => [t.name, [...t.y]]))")


class TestLoading:
    @pytest.mark.parametrize(("width", "dark"), [(1400, False), pytest.param(390, True, marks=pytest.mark.slow)])
    def test_everything_is_drawn_without_an_error_or_a_request(
        self, page: Page, everything: Path, width: int, dark: bool
    ) -> None:
        page.open(everything, width=width, dark=dark)
        figures = page.run("[...document.querySelectorAll('figure.block')].map((f) => f.id)")
        assert len(figures) > 25
        for figure in figures:
            page.run(f"document.getElementById('{figure}').scrollIntoView({{behavior: 'instant'}})")
            page.wait(f"document.querySelector('#{figure} .plot .main-svg')")
        assert page.messages == []
        assert [address for address in page.requests if not address.startswith(("file:", "data:", "blob:"))] == []
        assert page.run(UNLABELLED) == []
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
        ink = page.run("getComputedStyle(document.body).backgroundColor")
        assert (np.mean([int(part) for part in ink[4:-1].split(",")]) < 60) == dark

    def test_an_axis_has_numbers_however_near_values_are(self, page: Page, tmp_path: Path) -> None:
        network = predict(table_of("xavier"))
        stream = network.forward["stream_out"]
        for low, high in ((11.4, 13.9), (0.99991, 0.99993), (3e-8, 4e-8)):
            values = np.linspace(low, high, len(stream.variance))
            near = replace(stream, variance=values, log_variance=np.log(values), variance_sd=None)
            shown = replace(network, forward={**network.forward, "stream_out": near}, notes=())
            write_report(tmp_path / "near.html", [("near", shown)])
            page.open(tmp_path / "near.html")
            page.wait("document.querySelector('figure.block .main-svg')")
            logarithmic = "[...document.querySelectorAll('figure.block button')].filter((b) => b.textContent === 'log')"
            page.run(f"{logarithmic}[0].click()")
            page.wait(f"{logarithmic}[0].getAttribute('aria-pressed') === 'true'")
            assert page.run(UNLABELLED) == []

    @pytest.mark.slow
    def test_printing_leaves_the_labels_of_the_axes(self, page: Page, everything: Path) -> None:
        page.open(everything, height=20_000)
        shown = "[...document.querySelectorAll('figure.block:not(.hidden)')]"
        page.wait(f"{shown}.every((figure) => figure.querySelector('.main-svg'))")
        assert page.run(CUT_OFF) == []
        before, paper, after = page.printed_labels()
        assert len(before) > 25 and before == after
        for figure, labels in before.items():  # on another size there may be fewer of them, or more
            assert len(set(labels) & set(paper[figure])) >= min(len(labels), len(paper[figure])) / 2, figure

    @pytest.mark.slow
    def test_without_the_library_the_numbers_stay(self, page: Page, everything: Path, tmp_path: Path) -> None:
        text = everything.read_text(encoding="utf-8").replace('id="library">H4', 'id="library">AA')
        (tmp_path / "broken.html").write_text(text, encoding="utf-8")
        page.call("Page.navigate", url=(tmp_path / "broken.html").as_uri())
        page.wait("document.querySelector('[role=alert]')")
        assert "cannot be drawn" in page.run("document.querySelector('[role=alert]').textContent")
        assert page.run("document.querySelector('#forward-variance table').rows.length") == 13


class TestCurves:
    def test_heights_are_those_of_the_profiles(self, opened: Page, profiles: dict[str, Profile]) -> None:
        curves = drawn(opened, "gradient-variance")
        assert set(curves) == {f"{s}, {w}" for s in ("xavier", "deepscalelm") for w in ("predicted", "measured")}
        for scheme in ("xavier", "deepscalelm"):
            for word, key in (("predicted", scheme), ("measured", f"{scheme} measured")):
                gradient = profiles[key].gradient
                assert curves[f"{scheme}, {word}"] == pytest.approx(gradient["stream_in"].variance, rel=1e-7)

    def test_switches_take_curves_away_and_bring_them_back(self, opened: Page) -> None:
        assert pressed(opened, "signal") == dict.fromkeys(("xavier", "deepscalelm", "predicted", "measured"), True)
        before = drawn(opened, "token-correlation")
        press(opened, "signal", "xavier")
        assert set(drawn(opened, "token-correlation")) == {"deepscalelm, predicted", "deepscalelm, measured"}
        press(opened, "signal", "measured")
        assert set(drawn(opened, "token-correlation")) == {"deepscalelm, predicted"}
        assert pressed(opened, "signal")["xavier"] is False
        press(opened, "signal", "xavier")
        press(opened, "signal", "measured")
        assert drawn(opened, "token-correlation") == before


@pytest.mark.slow
class TestSliders:
    def test_the_step_moves_the_signal_through_time(self, opened: Page, everything: Path) -> None:
        run = read_run(everything.parent / "one")
        for index, (step, profile) in enumerate(run.signal):
            opened.run(
                "(() => { const s = document.querySelector('#through-time input[type=range]');"
                f" s.value = {index}; s.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"
            )
            assert opened.run("document.querySelector('#through-time output').textContent") == f"step {step}"
            curve = drawn(opened, "time-forward-variance")["one, at the step"]
            assert curve == pytest.approx(profile.forward["stream_out"].variance, rel=1e-7)

    def test_the_depth_chooses_the_heat_map(self, opened: Page) -> None:
        found = trace(table_of("xavier"), at=[0, 3, 6])
        opened.run("document.querySelector('#kernel-map-0-forward').scrollIntoView({behavior: 'instant'})")
        opened.wait("document.querySelector('#kernel-map-0-forward .plot').data")
        for index, depth in ((1, 3), (0, 0), (2, 6)):
            opened.run(
                "(() => { const s = document.querySelector('#kernels input[type=range]');"
                f" s.value = {index}; s.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"
            )
            z = opened.run("document.querySelector('#kernel-map-0-forward .plot').data[0].z")
            assert np.abs(np.array(z) - normalised(found.kernels[depth])).max() < 2e-5


@pytest.mark.slow
class TestAccess:
    def test_everything_has_a_name_and_an_order(self, opened: Page) -> None:
        assert opened.run("document.querySelectorAll('h1').length") == 1
        assert opened.run("document.documentElement.lang") == "en"
        unnamed = opened.run(
            "[...document.querySelectorAll('button, input, .plot, [role=region], [role=group]')]"
            ".filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim())).length"
        )
        assert unnamed == 0
        levels = opened.run("[...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))")
        assert levels[0] == 1 and all(b - a <= 1 for a, b in pairwise(levels))
        ids = opened.run("[...document.querySelectorAll('[id]')].map((e) => e.id)")
        assert len(set(ids)) == len([item for item in ids if item])

    @pytest.mark.parametrize("dark", [False, True])
    def test_texts_have_contrast(self, page: Page, everything: Path, dark: bool) -> None:
        page.open(everything, dark=dark)
        page.click("#signal .toggle")  # one that is off, too
        drawn(page, "forward-variance")
        assert page.faint() == []

    def test_on_paper_everything_is_drawn_in_dark_ink(self, page: Page, everything: Path, tmp_path: Path) -> None:
        page.open(everything, dark=True)
        label = "getComputedStyle(document.querySelector('#forward-variance .xtick text')).fill"
        drawn(page, "forward-variance")
        on_screen = page.run(label)
        page.run("dispatchEvent(new Event('beforeprint'))")
        scheme = [{"name": "prefers-color-scheme", "value": "dark"}]  # of the screen, which goes on
        page.call("Emulation.setEmulatedMedia", media="print", features=scheme)
        assert page.faint() == []
        assert contrast(page.run(label), "rgb(255, 255, 255)") >= 4.5 > contrast(on_screen, "rgb(255, 255, 255)")
        page.call("Emulation.setEmulatedMedia", media="", features=scheme)
        page.run("dispatchEvent(new Event('afterprint'))")
        page.wait(f"{label} === {json.dumps(on_screen)}")
        page.pdf(tmp_path / "report.pdf")
        assert (tmp_path / "report.pdf").stat().st_size > 50_000
        assert page.run("[...document.querySelectorAll('figure.block:not(.hidden) .plot')].every((p) => p.data)")
        assert page.messages == []
