"""`signalprop report`, and the report that other commands write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from commandline import TINY, Command
from reported import figures_of, titles_of, write_run
from signalprop.files.storage import read_json

pytest.importorskip("plotly")


class TestReport:
    def test_files_of_every_command_and_a_run(self, command: Command, tmp_path: Path) -> None:
        table, profile = tmp_path / "table.json", tmp_path / "profile.json"
        kernel = tmp_path / "kernel.json"
        assert command("schemes", "noci", "--for", "tgs", "--layers", "2", "--json", str(table)).status == 0
        assert command("predict", "tgs", *TINY, "--json", str(profile)).status == 0
        assert command("kernel", "tgs", *TINY, "--json", str(kernel)).status == 0
        run = write_run(tmp_path / "run", status="finished")
        out = tmp_path / "page.html"
        status, shown, err = command("report", *map(str, (profile, table, kernel, run)), "--out", str(out))
        assert (status, err) == (0, "") and str(out) in shown
        assert titles_of(out.read_text(encoding="utf-8")) == [
            "The signal over depth", "In numbers", "Training", "The signal through training", "Token kernels",
            "The numbers of the network",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["{}/none.json"], "cannot read"),
            (["{}"], "is not the directory of a training run"),
            (["{}/new.json"], "newer than this version reads"),
            (["{}/new.json", "--out", "{}/no/such.html"], "there is no directory"),
            ([], "Missing argument"),
        ],
    )
    def test_one_line_per_mistake(
        self, refused: Callable[..., str], tmp_path: Path, arguments: list[str], message: str
    ) -> None:
        (tmp_path / "new.json").write_text('{"schema": "signalprop/profile/9"}')
        assert message in refused("report", *(item.format(tmp_path) for item in arguments))


class TestOtherCommands:
    def test_the_numbers_in_the_report_are_those_in_the_json(self, command: Command, tmp_path: Path) -> None:
        file, page = tmp_path / "c.json", tmp_path / "c.html"
        assert command("compare", "tgs", *TINY, "--seeds", "2", "--json", str(file), "--plot", str(page)).status == 0
        comparison = read_json(file)
        titles = titles_of(page.read_text(encoding="utf-8"))
        assert titles == ["The signal over depth", "In numbers", "The numbers of the network"]
        found = {trace["name"]: trace["y"] for trace in figures_of(page.read_text(encoding="utf-8"))[0]}
        for side in ("predicted", "measured"):
            wanted = [row["stream_out"]["variance"] for row in comparison[side]["sublayers"]]
            assert np.allclose(found[side], wanted, rtol=1e-5, atol=0)

    def test_mistakes_are_found_before_the_work(self, refused: Callable[..., str], tmp_path: Path) -> None:
        run = ["compare", "tgs", "--layers", "500", "--seeds", "100"]
        assert "there is no directory" in refused(*run, "--plot", str(tmp_path / "no" / "a.html"))
        assert "commands also write .html" in refused(*run, "--plot", "a.htm.txt")
