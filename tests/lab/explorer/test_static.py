"""The explorer without a server, in a real browser: its numbers, words and refusals are the library's."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly")

from browser import Page, browser, executable
from exploring import choose, settle
from signalprop.data.batches import default_statistics
from signalprop.errors import InputError
from signalprop.network.activations import ACTIVATIONS
from signalprop.report.html import blocks
from signalprop.theory.network import predict_moments
from signalprop_lab.explorer.curves import shown
from signalprop_lab.explorer.settings import Settings, address, of_preset
from signalprop_lab.explorer.static import presets, write_static

pytestmark = pytest.mark.skipif(executable() is None, reason="no Chromium is installed (Debian: apt install chromium)")
HEADS, PLACEMENTS = (1, 4, 8), ("pre", "post", "sandwich", "none", "res-post")
DATA = "JSON.parse(document.getElementById('closed-form').textContent).presets"
CONTROLS = "JSON.parse(document.getElementById('data').textContent).presets"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("static") / "explorer.html"
    write_static(path)
    return path


@pytest.fixture(scope="module")
def page(file: Path) -> Iterator[Page]:
    with browser() as opened:
        opened.open(file)
        yield opened


def drawn(rng: random.Random, scheme: str) -> Settings:
    """Any settings that the page has, of one scheme."""
    heads = rng.choice(HEADS)
    options = {"k": rng.choice((None, 1.5)), "alpha": rng.choice((None, 0.8))}
    both = ("k", "alpha")
    names = {"deepscalelm": both, "deepscalelm-simple": both, "normalised-skip": ("k",), "ds-init": ("alpha",)}
    return Settings(
        preset=rng.choice(sorted(presets())),
        kind=rng.choice(("encoder", "decoder")),
        n_layers=rng.choice((1, 3, 12)),
        d_model=heads * rng.choice((8, 64, 100)),
        n_heads=heads,
        norm_placement=rng.choice(PLACEMENTS),
        activation=rng.choice(sorted({item.name for item in ACTIVATIONS.values()})),
        seq_len=rng.choice((1, 6, 128)),
        dropout=rng.choice((0.0, 0.1, 0.3)),
        scheme=scheme,
        qk_scale=rng.choice((1.0, 3.0)),
        fidelity="moments",
        **{name: options[name] for name in names.get(scheme, ())},
    )


def asked(page: Page, several: list[Settings]) -> list[dict[str, Any]]:
    """What the page predicts for each, or its refusal."""
    given = json.dumps([item.model_dump() for item in several])
    one = (
        "try { return closedForm.predict(schemes.table(s, known)); } catch (error) { return {refused: error.message}; }"
    )
    return page.run(f"(() => {{ const known = {DATA}; return {given}.map((s) => {{ {one} }}); }})()")


def compared(found: dict[str, Any], s: Settings) -> float:
    """The largest relative difference from Python's prediction; of a refusal 0, where Python refuses too."""
    if "refused" in found:
        with pytest.raises(InputError) as refusal:
            s.table()
        said = str(refusal.value)
        assert found["refused"] in said or "default initialisation of" in said
        return 0.0
    table = s.table()
    p = predict_moments(table, default_statistics(table.architecture))
    stream, gradient = p.forward["stream_out"], p.gradient["stream_in"]
    logs = [
        (found["forward"]["out"], stream.log_variance),
        (found["forward"]["branch"], p.forward["branch"].log_variance),
        (found["gradient"]["in"], gradient.log_variance),
    ]
    plain = [
        (found["forward"]["rOut"], stream.token_correlation),
        (found["gradient"]["rIn"], gradient.token_correlation),
        (found["sensitivity"], p.layer_sensitivities),
    ]
    absent = -1e11  # the logarithm of no signal
    differences = [np.abs(np.maximum(x, absent) - np.maximum(y, absent)) for x, y in logs]
    differences += [np.abs(np.array(x) - y) / np.maximum(np.abs(y), 1e-3) for x, y in plain]
    return float(max(each.max() for each in differences))


def test_numbers_are_pythons(page: Page) -> None:
    rng = random.Random(0)
    several = [drawn(rng, scheme) for scheme in page.run("schemes.names")]
    found = asked(page, several)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schemes that stand on others
        differences = [compared(each, s) for each, s in zip(found, several, strict=True)]
    assert sum("refused" in each for each in found) < len(found) / 2
    assert max(differences) < 1e-9, several[int(np.argmax(differences))]


@pytest.mark.parametrize(
    ("current", "pinned"),
    [
        (Settings(n_layers=192), [Settings(n_layers=192, scheme="deepscalelm", k=1.5), Settings(scheme="lns")]),
        (Settings(preset="llama-7b", **of_preset("llama-7b")), [Settings()]),
        (Settings(n_layers=24, norm_placement="none", qk_scale=3.0, scheme="pytorch"), []),
        (Settings(preset="llama-130m", kind="decoder", norm_placement="none", activation="silu", dropout=0), []),
        (Settings(preset="olmo2-7b", **of_preset("olmo2-7b")), []),
    ],
)
def test_words_charts_and_tables_are_the_servers(page: Page, current: Settings, pinned: list[Settings]) -> None:
    every = [item.model_copy(update={"fidelity": "moments"}) for item in (current, *pinned)]
    question = {"current": every[0].model_dump(), "pinned": [item.model_dump() for item in every[1:]]}
    found, wanted = page.run(f"offline.answer({json.dumps(question)}, {CONTROLS})"), shown(every[0], every[1:])
    for name in ("label", "python", "command", "warnings", "table"):
        assert found[name] == wanted[name], name
    rough = "moments are only a rough guide here"
    assert [note for note in found["notes"] if not note.startswith(rough)] == [
        note for note in wanted["notes"] if not note.startswith((rough, "how single networks"))
    ]
    assert any(note.startswith(rough) for note in found["notes"]) == (every[0].kind == "decoder")
    mine, theirs = found["section"], wanted["section"]
    assert (mine["groups"], mine["places"], mine["sources"]) == (theirs["groups"], theirs["places"], theirs["sources"])
    for block, other in zip(mine["blocks"], theirs["blocks"], strict=True):
        assert (block["scale"], block["caption"]) == (other["scale"], other["caption"])
        for one, same in zip(block["series"], other["series"], strict=True):
            assert one["place"] == same["place"]
            for name in ("y", "log10"):
                assert blocks.numbers(one.get(name, [])) == pytest.approx(
                    blocks.numbers(same.get(name, [])), rel=1e-7, nan_ok=True
                )


def test_it_needs_no_network_and_follows_controls_and_address(page: Page, file: Path) -> None:
    chosen = Settings(n_layers=12, fidelity="moments")
    page.open(file.resolve().as_uri() + address(chosen, [Settings(fidelity="moments")]))
    assert all(url.startswith(("file:", "data:", "blob:")) for url in page.requests)
    assert page.run("[...document.querySelectorAll('#pins li')].map((e) => e.textContent)") == [
        "xavier, 12 layers (now)",
        "xavier, 48 layers✕",
    ]
    choose(page, n_heads=7)
    assert page.run("document.getElementById('problem').textContent").startswith("d_model 256 is not divisible by")
    choose(page, n_heads=4, preset="gpt2")
    settle(page)
    assert page.run("document.getElementById('command').textContent").startswith("signalprop predict gpt2")
    assert page.messages == []
