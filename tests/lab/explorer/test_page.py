"""The explorer in a real browser: controls redraw, numbers are the library's, pins, copies, keyboard, narrow, dark."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")
pytest.importorskip("uvicorn")

from browser import Page, browser, executable
from exploring import choose, explorer, settle
from signalprop_lab.explorer.curves import predicted
from signalprop_lab.explorer.settings import Settings, of_preset, read

pytestmark = pytest.mark.skipif(executable() is None, reason="no Chromium is installed (Debian: apt install chromium)")
CHARTS = ("forward-variance", "gradient-variance", "token-correlation", "sensitivity")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with explorer() as running:
        yield running.address


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.fixture
def page(tab: Page, address: str) -> Page:
    tab.open(address)
    return tab


def text(page: Page, part: str) -> str:
    return page.run(f"document.getElementById('{part}').textContent")


def heights(page: Page, chart: str) -> dict[str, list[float]]:
    """Heights of the curves of a chart, by name; bands have none."""
    return page.run(
        f"Object.fromEntries(document.querySelector('#{chart} .plot').data"
        ".filter((t) => t.name && !(t.line.color || '').startsWith('rgba(0,0,0,0)')).map((t) => [t.name, [...t.y]]))"
    )


def assert_drawn(page: Page, s: Settings, name: str) -> None:
    """The four curves of that name are those of a prediction."""
    p = predicted(s).profile
    assert p.gradient is not None
    stream = p.forward["stream_out"]
    wanted = (stream.variance, p.gradient["stream_in"].variance, stream.token_correlation, p.layer_sensitivities)
    for chart, values in zip(CHARTS, wanted, strict=True):
        assert heights(page, chart)[name] == pytest.approx(values, rel=1e-7), chart


@pytest.mark.slow
def test_every_control_redraws_the_prediction(page: Page) -> None:
    assert_drawn(page, Settings(), "xavier")
    choose(page, fidelity="moments")
    state = Settings(fidelity="moments")
    changes: dict[str, Any] = {
        "n_layers": 12, "d_model": 128, "n_heads": 8, "kind": "decoder", "norm_placement": "pre", "activation": "silu",
        "seq_len": 64, "dropout": 0.3, "scheme": "deepscalelm", "k": 1.5, "alpha": 0.75, "qk_scale": 2,
    }  # fmt: skip
    for name, value in changes.items():
        choose(page, **{name: value})
        state = Settings(**{**state.model_dump(), name: value})
        assert_drawn(page, state, state.scheme)
        assert text(page, "command") == state.command()
        assert text(page, "python") == state.python()
    choose(page, fidelity="auto")
    state = Settings(**{**state.model_dump(), "fidelity": "auto"})
    assert predicted(state).profile.fidelity == "kernel"
    assert_drawn(page, state, state.scheme)
    assert "rough guide" not in text(page, "says")
    assert page.messages == []
    assert {url.partition("/")[0] for url in page.requests} <= {"http:", "data:"}
    assert all(url.startswith(("http://127.0.0.1:", "data:")) for url in page.requests)


@pytest.mark.slow
def test_a_preset_sets_the_controls(page: Page) -> None:
    choose(page, preset="gpt2")
    state = read({"preset": "gpt2", **of_preset("gpt2")})
    assert text(page, "command") == state.command()
    assert state.scheme == "huggingface" and predicted(state).profile.fidelity == "kernel"
    assert_drawn(page, state, "huggingface")
    assert page.run("[...document.querySelectorAll('.pair')].every((p) => p.lastChild.value === "
                    "p.firstChild.getAttribute('aria-valuetext'))")  # fmt: skip
    choose(page, n_layers=6)
    assert_drawn(page, state.model_copy(update={"n_layers": 6}), "huggingface")


@pytest.mark.slow
def test_token_kernels_follow_their_draft_and_only_the_last_ones(page: Page) -> None:
    choose(page, fidelity="moments", kind="decoder", n_layers=24, seq_len=48)
    page.run(
        "(() => { const f = document.getElementById('controls').elements; f.fidelity.value = 'auto';"
        " f.fidelity.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    page.wait("document.getElementById('latency').textContent.includes('token kernels follow')")
    assert page.run("document.getElementById('pin').disabled")
    choose(page, dropout=0.2)  # while the kernels of the former settings are under way
    state = Settings(kind="decoder", n_layers=24, seq_len=48, fidelity="auto", dropout=0.2)
    assert predicted(state).profile.fidelity == "kernel"
    assert_drawn(page, state, "xavier")
    assert page.run("document.getElementById('latency').textContent").startswith("on screen after")
    assert not page.run("document.getElementById('pin').disabled")
    assert page.messages == []


@pytest.mark.slow
def test_a_pin_stays_while_the_curve_moves_on(page: Page) -> None:
    page.click("#pin")
    settle(page)
    assert page.run("document.getElementById('pin').disabled")
    choose(page, norm_placement="pre")
    assert set(heights(page, "forward-variance")) == {"xavier, pre-norm (now)", "xavier, post-norm"}
    assert_drawn(page, Settings(), "xavier, post-norm")
    assert_drawn(page, Settings(norm_placement="pre"), "xavier, pre-norm (now)")
    page.click("#pins button")
    settle(page)
    assert set(heights(page, "forward-variance")) == {"xavier"}


def inks(page: Page) -> dict[str, str]:
    """Colours of the curves, by name."""
    return page.run(
        "Object.fromEntries(document.querySelector('#forward-variance .plot').data"
        ".filter((t) => !(t.line.color || '').startsWith('rgba(0,0,0,0)')).map((t) => [t.name, t.line.color]))"
    )


@pytest.mark.slow
def test_a_curve_keeps_its_colour(page: Page) -> None:
    first = inks(page)["xavier"]
    page.click("#pin")
    settle(page)
    choose(page, n_layers=12)
    page.click("#pin")
    settle(page)
    choose(page, n_layers=6)
    before = inks(page)
    assert before["xavier, 48 layers"] == first and len(set(before.values())) == 3
    page.click("#pins button")  # the first of the pinned ones
    settle(page)
    after = inks(page)
    assert {name: before[name] for name in after} == after


@pytest.mark.slow
def test_the_address_is_the_state(page: Page, address: str) -> None:
    """It opens elsewhere as it is here; the back button leads to where the controls were."""
    page.click("#starts a")
    page.wait("document.querySelectorAll('#pins li').length === 2")
    settle(page)
    names = {"deepscalelm (now)", "xavier"}
    assert set(heights(page, "gradient-variance")) == names
    shared = page.run("location.href")
    choose(page, n_layers=12)
    page.wait("location.hash.includes('n_layers=12')")
    page.open(shared)
    assert set(heights(page, "gradient-variance")) == names
    assert text(page, "command") == Settings(n_layers=192, scheme="deepscalelm").command()
    choose(page, n_layers=6)
    page.wait("location.hash.includes('n_layers=6')")
    page.run("history.back()")
    page.wait("document.getElementById('command').textContent.includes('--layers 192')")
    page.open(address)
    assert text(page, "command") == Settings().command()


def test_printing_leaves_the_labels_of_the_axes(page: Page) -> None:
    before, paper, after = page.printed_labels()
    assert len(before) >= len(CHARTS) and before == after
    assert all(set(labels) & set(paper[figure]) for figure, labels in before.items())


def test_bad_input_is_a_line_and_goes_away(page: Page) -> None:
    before = heights(page, "forward-variance")
    choose(page, n_heads=7)
    assert "d_model 256 is not divisible by n_heads 7" in text(page, "problem")
    assert not page.run("document.getElementById('problem').hidden")
    assert heights(page, "forward-variance") == before
    assert page.run("[...document.querySelectorAll('#pin, #download, [data-copy]')].every((b) => b.disabled)")
    choose(page, n_heads="")
    assert "n_heads" in text(page, "problem")
    choose(page, n_heads=8)
    assert page.run("document.getElementById('problem').hidden")
    assert_drawn(page, Settings(n_heads=8), "xavier")
    assert page.messages == [], "a refusal is no error of the page"


@pytest.mark.slow
def test_copies_reach_the_clipboard(page: Page, address: str) -> None:
    allowed = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    page.call("Browser.grantPermissions", origin=address.rstrip("/"), permissions=allowed)
    page.call("Emulation.setFocusEmulationEnabled", enabled=True)
    for name, wanted in (("python", Settings().python()), ("command", Settings().command())):
        page.click(f"[data-copy={name}]")
        page.wait(f"document.querySelector('[data-copy={name}]').textContent === 'Copied'")
        assert page.run("navigator.clipboard.readText()") == wanted


@pytest.mark.slow
def test_the_report_is_downloaded(page: Page, tmp_path: Path) -> None:
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.click("#pin")
    settle(page)
    choose(page, scheme="deepnorm")
    page.click("#download")
    file = tmp_path / "signalprop-report.html"
    end = time.monotonic() + 180
    while not file.exists() and time.monotonic() < end:  # Chromium gives it its name when it is whole
        page.run("new Promise((done) => setTimeout(done, 50))")
    made = file.read_text(encoding="utf-8")
    data = json.loads(made.partition('id="data">')[2].partition("</script>")[0])
    assert len(data["sections"][0]["groups"]) == 2
    page.open(file)
    assert page.messages == []


@pytest.mark.slow
def test_the_keyboard_alone_suffices(page: Page) -> None:
    page.run("document.getElementById('controls').elements.n_layers.previousSibling.focus()")
    page.key("ArrowRight")
    settle(page)
    assert page.run("document.getElementById('controls').elements.n_layers.value") == "64"
    assert page.run("document.activeElement.getAttribute('aria-valuetext')") == "64"
    assert_drawn(page, Settings(n_layers=64), "xavier")
    page.run("document.getElementById('pin').focus()")
    page.key("Enter", "\r")
    settle(page)
    assert page.run("document.querySelectorAll('#pins li').length") == 2
    page.run("document.querySelector('#token-correlation .plot').focus()")
    page.key("End")
    r = predicted(Settings(n_layers=64)).profile.forward["stream_out"].token_correlation[-1]
    said = page.run("document.querySelector('#token-correlation .reading').textContent")
    assert float(said.split("(now) ")[1].split(";")[0]) == pytest.approx(r, rel=1e-4)


@pytest.mark.slow
def test_everything_has_a_name(page: Page) -> None:
    unnamed = page.run(
        "[...document.querySelectorAll('button, input, select, pre, ul, .plot')]"
        ".filter((e) => e.getClientRects().length && !(e.getAttribute('aria-label') || e.textContent.trim()"
        " || e.closest('label')?.textContent.trim())).length"
    )
    assert unnamed == 0
    assert page.run("document.querySelectorAll('h1').length") == 1
    ids = page.run("[...document.querySelectorAll('[id]')].map((e) => e.id).filter(Boolean)")
    assert len(set(ids)) == len(ids)
    page.wait("document.getElementById('heard').textContent.startsWith('xavier, 48 layers: ')")


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_texts_have_contrast(tab: Page, address: str, dark: bool) -> None:
    tab.open(address, dark=dark)
    choose(tab, norm_placement="none", n_layers=96)  # warnings
    tab.click("#pin")
    settle(tab)
    tab.click("#token-correlation .numbers summary")
    assert tab.faint() == []
    choose(tab, n_heads=7)  # a refusal
    assert tab.faint() == []


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1400, True)])
def test_narrow_and_dark(tab: Page, address: str, width: int, dark: bool) -> None:
    tab.open(address, width=width, dark=dark)
    assert tab.run("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
    outside = tab.run(
        "[...document.querySelectorAll('.plot .main-svg')].filter((e) => e.getBoundingClientRect().right >"
        " e.closest('figure').getBoundingClientRect().right + 1).length"
    )
    assert outside == 0
    if width < 600:  # the curves before the controls
        top = "document.querySelector('{}').getBoundingClientRect().top"
        assert tab.run(top.format("#charts")) < min(500, tab.run(top.format("#controls")))
    back = tab.run("getComputedStyle(document.body).backgroundColor")
    assert sum(int(part) for part in back[4:-1].split(",")) < 180
    assert tab.messages == []
