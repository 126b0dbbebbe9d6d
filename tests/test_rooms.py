"""Every room says in a few lines what is in it, what it may import and where to start; and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
ROOMS = sorted(
    {file.parent for file in SOURCE.rglob("*.py") if file.name != "__init__.py" or any(file.parent.glob("*.md"))}
    - {SOURCE / "signalprop"}
)
INSIDE = {"html", "cli", "report"}  # of a room: its README speaks for them


def test_every_room_has_a_readme() -> None:
    for room in {room.parent if _inside(room) else room for room in ROOMS}:
        text = (room / "README.md").read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 30, room
        assert "May import" in text and "Start with" in text, room
        homes = (room, *room.parents[:2], *(inside for inside in room.iterdir() if inside.is_dir()))
        for name in re.findall(r"`([\w/]+\.py|[\w]+/)`", text):
            assert any((home / name).exists() for home in homes), (room, name)


def _inside(room: Path) -> bool:
    """The room around it speaks for it."""
    return room.parent.name == "sublayers" or (room.name in INSIDE and room.parent.name in ("report", "signalprop_lab"))


def test_the_idea_is_read_in_1500_lines() -> None:
    guide = (SOURCE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+(?:\.py|/))`", guide.split("### Read the idea")[1].split("\n\n")[1])
    places = [SOURCE / "signalprop" / name for name in named]
    files = [file for place in places for file in ([place] if place.is_file() else place.glob("*.py"))]
    assert len(named) == 6 and len(files) > 9
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 1500


def test_no_file_is_longer_than_400_lines() -> None:
    files = [file for room in ("src", "tests", "benchmarks") for file in (SOURCE.parent / room).rglob("*.[pj][ys]")]
    assert len(files) > 500
    assert [file.name for file in files if len(file.read_text(encoding="utf-8").splitlines()) > 400] == []
