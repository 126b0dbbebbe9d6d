"""Every scheme of the code is on docs/schemes.md."""

from __future__ import annotations

from pathlib import Path

from signalprop.schemes import SCHEMES

PAGE = (Path(__file__).parents[2] / "docs" / "schemes.md").read_text(encoding="utf-8")


def test_every_scheme_is_in_the_table_of_the_page() -> None:
    table = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert [name for name in SCHEMES if not any(f"`{name}`" in names for names in table)] == []
