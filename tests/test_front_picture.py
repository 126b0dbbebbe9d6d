"""The picture at the top of README.md: its numbers are today's predictions, and it is drawn from them."""

from __future__ import annotations

import json
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
        assert curve["predicted"] == pytest.approx(gradient["stream_in"].variance[::2], rel=1e-3)
        errors = np.abs(np.log(curve["predicted"]) - np.log(curve["measured"]))
        assert np.median(errors) < (0.9 if scheme == "xavier" else 0.2)


def test_the_picture_is_drawn_from_them(tmp_path: Path) -> None:
    front.drawn(STORED).savefig(tmp_path / "again.png")
    again, kept = (matplotlib.image.imread(path)[..., :3] for path in (tmp_path / "again.png", front.PICTURE))
    assert again.shape == kept.shape and np.abs(again - kept).mean() < 0.02
    assert "docs/pictures/deep.png" in (front.FOLDER.parent.parent / "README.md").read_text()
