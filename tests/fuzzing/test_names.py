"""Names and texts that come from a file: on a page, on a terminal, as directories."""

from __future__ import annotations

import json
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from damage import check_command, commanded
from reported import HOSTILE, predicted, table_of
from signalprop.errors import InputError, as_line, printable
from signalprop.report.html import document, read, render
from signalprop.report.sections import Chart, HeatMap
from signalprop_lab.training.grid import Point, grid_of
from signalprop_lab.training.recipe_files import read_recipe
from signalprop_lab.training.sweep_definition import Sweep

ESCAPES = "\x1b[2J\x1b]0;gone\x07\x9b31m\u202etxt\r\x08"
STRINGS = (
    *HOSTILE,
    ESCAPES,
    "\ud800 half",
    "{{7*7}}${7*7}#{7*7}",
    "javascript:alert(1)",
    "' onmouseover='window.broken=1",
)
ESTIMATE = {"value": 1.5, "standard_error": 0.1}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all strings in a document."""
    if isinstance(value, str):
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in places(item, (*path, key))]


@cache
def documents() -> dict[str, Any]:
    """A file of every kind that a page shows."""
    profile = predicted("xavier", n_layers=2).to_json() | {"notes": ["a note"]}
    kernel = commanded("kernel", "tgs", "--layers", "2", "--seq-len", "6", "--json", "-")
    layer = {"layer": 0, "stack": "decoder", "variance": 1.0, "entropy": [0.5]}
    diagnosis = {
        "schema": "signalprop/diagnosis/1", "model": "m", "family": "gpt2", "n_parameters": 10, "loss": ESTIMATE,
        "data": {"source": "book", "sequences": 2, "tokens": 16, "length": 8, "skip_first": 1}, "signal": [layer],
        "casts": [{"format": "int8", "of": "both", "scaled": True, "loss": ESTIMATE, "increase": ESTIMATE}],
        "findings": [
            {"severity": "fault", "name": "dead head", "layers": [0], "text": "it is", "cause": "so", "remedy": "do"}
        ],
        "notes": ["a note"],
    }  # fmt: skip
    return {
        "profile": profile,
        "comparison": {"schema": "signalprop/comparison/1", "predicted": profile, "measured": profile},
        "parametrization": table_of("deepscalelm", n_layers=2).to_json() | {"options": {"k": "2"}},
        "diagnosis": diagnosis,
        "kernels": json.loads(kernel.out),
    }


class _Page(HTMLParser):
    """What a page is made of beside its texts."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(sorted(name for name, _ in attrs))))


def elements(page: str) -> set[tuple[str, tuple[str, ...]]]:
    found = _Page()
    found.feed(page)
    return set(found.elements)


def scripts(page: str) -> int:
    found = _Page()
    found.feed(page)
    return sum(tag == "script" for tag, _ in found.elements)


def hostile_files(folder: Path) -> dict[str, list[Path]]:
    """By kind: files in which one string each is hostile, as far as they are read."""
    out: dict[str, list[Path]] = {}
    for kind, good in documents().items():
        (folder / kind).mkdir(parents=True)
        for i, path in enumerate(places(good)):
            data = json.loads(json.dumps(good))
            place = data
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = STRINGS[i % len(STRINGS)]
            file = folder / kind / f"{i}.json"
            file.write_text(json.dumps(data))
            out.setdefault(kind, []).append(file)
    return out


class TestPages:
    def test_every_string_of_every_file_stays_a_text(self, tmp_path: Path) -> None:
        read_at_all = 0
        for kind, files in hostile_files(tmp_path).items():
            good = tmp_path / f"{kind}.json"
            good.write_text(json.dumps(documents()[kind]))
            known = elements(render(document(list(read(good).items())))) | {("p", ("class",))}
            for file in files:
                try:
                    items = list(read(file).items())
                except InputError:
                    continue
                read_at_all += 1
                content = document(items)
                page = render(content)
                new = {tag for tag, names in elements(page) - known if tag in ("script", "img", "a", "svg") or
                       any(name.startswith("on") for name in names)}  # fmt: skip
                assert not new, (file, new)
                drawn = [b for s in content.sections for b in s.blocks if isinstance(b, Chart | HeatMap)]
                assert scripts(page) == 1 + len(drawn)
        assert read_at_all >= 10  # others have a fixed choice of words


class TestTerminals:
    @pytest.mark.parametrize("text", [*STRINGS, "plain", "two\nlines", "caf\u00e9 \u6f22\u5b57"])
    def test_a_message_is_one_printable_line(self, text: str) -> None:
        assert as_line(text).isprintable() and str(InputError(text)) == as_line(text)
        assert printable(text).replace("\n", "").isprintable()
        assert (printable(text) == text) == text.replace("\n", "").isprintable()
        assert len(as_line(text * 100_000)) <= 1100

    def test_tables_show_escapes_as_text(self, tmp_path: Path) -> None:
        for kind, files in hostile_files(tmp_path).items():
            for file in files:
                commands = {
                    "parametrization": [["predict", file]],
                    "diagnosis": [["diagnose", file]],
                }.get(kind, [])
                for arguments in commands:
                    check_command(commanded(*arguments))
        table = table_of("xavier", n_layers=2).to_json() | {"scheme": ESCAPES}
        (tmp_path / "t.json").write_text(json.dumps(table))
        result = commanded("predict", tmp_path / "t.json")
        check_command(result)
        assert result.status == 0


class TestDirectories:
    """Names of sweeps, cells and runs make no path that leads out of the directory of results."""

    @pytest.mark.parametrize(
        "name", ["..", ".", "../x", "a/b", "/tmp/x", "a\n", "", "\x00", "a" * 101, "-x", ".hidden"]
    )
    def test_names_of_recipes_and_sweeps(self, name: str) -> None:
        from signalprop_lab.training.recipe import parse

        with pytest.raises(InputError, match="name"):
            parse({**read_recipe("gpt-small"), "name": name})
        with pytest.raises(InputError, match="name"):
            Sweep(schema="signalprop/sweep/1", name=name, base="gpt-small", axes={"a": {"x": {}}})

    @pytest.mark.parametrize("labels", [["..", "x"], [".", "x"], ["../../x", "y"], ["/etc", "y"], ["~", "y"],
        ["\x00", "y"],
                                        ["...", "x"]])  # fmt: skip
    @pytest.mark.parametrize(
        "key", ["optimizer.learning_rate", "parallel.fsdp_config.x/../../y", "parallel.fsdp_config.\x00"]
    )
    def test_cells(self, tmp_path: Path, labels: list[str], key: str) -> None:
        data: dict[str, Any] = {
            "schema": "signalprop/sweep/1", "name": "s", "base": read_recipe("gpt-small"), "tune": {"key": key,
            "values": [0.1]},
            "axes": {"a": {label: {"budget.steps": i + 1} for i, label in enumerate(labels)}},
        }  # fmt: skip
        grid = grid_of(Sweep(**data), data["base"])
        for cell in grid.cells:
            path = (tmp_path / grid.directory(Point(cell, 0.1, 0))).resolve()
            assert path.parent.parent.parent == (tmp_path / "runs").resolve()
