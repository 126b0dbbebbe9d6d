"""The picture at the top of README.md: its numbers are today's predictions, and it is drawn from them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import signalprop as sp
from signalprop.data import default_batch

matplotlib = pytest.importorskip("matplotlib")
front = pytest.importorskip("benchmarks.front_picture")
STORED = json.loads(front.NUMBERS.read_text())


def test_the_predicted_lines_are_those_of_today() -> None:
    inputs = default_batch(front.ARCHITECTURE, batch_size=2, seed=0).statistics(front.ARCHITECTURE)
    for scheme, curve in STORED.items():
        gradient = sp.predict(front.ARCHITECTURE, inputs, scheme=scheme).gradient
        assert gradient is not None
        assert curve["predicted"] == pytest.approx(gradient["stream_in"].variance[::2], rel=1e-3)
        errors = np.abs(np.log(curve["predicted"]) - np.log(curve["measured"]))
        assert np.median(errors) < (0.9 if scheme == "xavier" else 0.2)


def test_the_picture_is_drawn_from_them(tmp_path: Path) -> None:
    front.drawn(STORED).savefig(tmp_path / "again.png")
    again, kept = (matplotlib.image.imread(path)[..., :3] for path in (tmp_path / "again.png", front.PICTURE))
    assert again.shape == kept.shape and np.abs(again - kept).mean() < 0.02
    assert "docs/pictures/deep.png" in (front.FOLDER.parent.parent / "README.md").read_text()


def test_the_animation_follows_every_depth() -> None:
    """From tokens that differ to one vector where nothing keeps them apart; small enough for a page."""
    image = pytest.importorskip("PIL.Image")
    moving = pytest.importorskip("benchmarks.kernel_animation")
    assert moving.PICTURE.stat().st_size < 1e6
    assert "docs/pictures/kernels.gif" in (front.FOLDER.parent.parent / "README.md").read_text()
    panels = []
    with image.open(moving.PICTURE) as gif:
        assert gif.n_frames == len(moving.DEPTHS)
        for frame in (0, gif.n_frames - 1):
            gif.seek(frame)
            pixels = np.asarray(gif.convert("RGB"), float)[60:140]
            panels.append(
                [
                    part[:, 20:-20].reshape(-1, 3).std(0).max()
                    for part in np.split(pixels[:, : 7 * (pixels.shape[1] // 7)], 7, 1)
                ]
            )
    names = list(moving.figure_7(2, 8))
    assert all(spread > 5 for spread in panels[0]), "at the input tokens differ"
    flat = {name for name, spread in zip(names, panels[1], strict=True) if spread < 5}
    assert flat >= {"skipless"} and not flat & {"U-SPA", "E-SPA"}


def test_the_walk_shows_a_picture_of_every_step() -> None:
    walk = pytest.importorskip("benchmarks.tour")
    text = walk.PAGE.read_text(encoding="utf-8")
    made = {f"tour-{number}" for number in range(len(walk.steps(text)))} | {shown[1] for shown in walk.SHOWN}
    assert set(re.findall(r"pictures/(tour-[\w-]+)\.png", text)) == made
    assert all((front.FOLDER / f"{name}.png").stat().st_size < 200_000 for name in made)


@pytest.mark.parametrize("name", ["report-wide", "report-signal", "report-phone", "explore"])
def test_pictures_of_pages_say_what_the_pages_say(name: str) -> None:
    """The titles, axes and leads that were on screen are still those of the source."""
    with pytest.importorskip("PIL.Image").open(front.FOLDER / f"{name}.png") as picture:
        words = picture.info["words"].splitlines()
    source = (Path(sp.__file__).parent / "report" / "html" / "signal.py").read_text(encoding="utf-8")
    source = re.sub(r'"\s+"', "", source)
    assert len(words) >= 2 and [line for line in words if line not in source] == []
