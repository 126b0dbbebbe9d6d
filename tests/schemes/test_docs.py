"""Schemes, options and predictions on docs/schemes.md are those of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from signalprop.network.architecture import Architecture
from signalprop.prediction import predict
from signalprop.schemes import SCHEMES, scheme

PAGE = (Path(__file__).parents[2] / "docs" / "schemes.md").read_text(encoding="utf-8")


def test_every_scheme_and_option_is_on_the_page() -> None:
    for name in SCHEMES:
        row = next(line for line in PAGE.splitlines() if line.startswith("|") and f"`{name}`" in line)
        assert all(f"`{option}`" in row for option in scheme(name).options()) or "same" in row


def test_the_predictions_on_the_page() -> None:
    rows = re.findall(r"^\| `([\w-]+)`( \w+=\w+)? ((?:\| [\d.e+-]+ ){8})\|$", PAGE, re.MULTILINE)
    assert {"takase", "ds-init", "noci", "t-fixup"} <= {name for name, *_ in rows}
    for name, option, cells in rows:
        key, _, value = option.strip().partition("=")
        made = scheme(name, **{key: json.loads(value.lower())} if key else {})
        printed = [float(cell) for cell in cells.split("|")[1:]]
        found = []
        for n_layers in (48, 192):
            profile = predict(made(Architecture.preset("tgs", n_layers=n_layers)))
            stream, gradient = profile.forward["stream_out"], profile.gradient
            growth = stream.variance[-1] / profile.input["variance"]
            ratio, sensitivity = gradient["stream_in"].variance[0], profile.sensitivity()["mean"]
            found.append((growth, stream.token_correlation[-1], ratio, sensitivity))
        assert printed == pytest.approx([number for pair in zip(*found, strict=True) for number in pair], rel=5e-3)
