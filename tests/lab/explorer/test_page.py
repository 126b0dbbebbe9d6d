"""The explorer in a real browser: controls redraw, numbers are the library's, pins, copies, keyboard, narrow, dark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("plotly")
pytest.importorskip("uvicorn")

from browser import Page, browser, executable
from exploring import choose, explorer, settle
from signalprop_lab.explorer.curves import predicted
from signalprop_lab.explorer.settings import Settings

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
