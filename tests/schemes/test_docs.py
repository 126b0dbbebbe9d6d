"""Schemes and options on docs/schemes.md are those of the code."""

from __future__ import annotations

from pathlib import Path

from signalprop.schemes import SCHEMES, scheme

PAGE = (Path(__file__).parents[2] / "docs" / "schemes.md").read_text(encoding="utf-8")


def test_every_scheme_and_option_is_on_the_page() -> None:
    for name in SCHEMES:
        row = next(line for line in PAGE.splitlines() if line.startswith("|") and f"`{name}`" in line)
        assert all(f"`{option}`" in row for option in scheme(name).options()) or "same" in row
