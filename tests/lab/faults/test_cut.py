"""Files that end in their midst: refused in one line, before anything is written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import killing


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read."""
    folder = tmp_path_factory.mktemp("cut") / "given"
    killing.prepare(folder, trained_run=False)
    return folder


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("fold", "applied/deep/model.safetensors"),
        ("fold", "applied/deep/signalprop.json"),
        ("fold", "applied/deep/generation_config.json"),
        ("diagnose", "plain/generation_config.json"),
        ("diagnose", "plain/config.json"),
    ],
)
def test_half_a_file_of_a_model(command: str, file: str, given: Path, tmp_path: Path) -> None:
    mine, folder = tmp_path / "given", tmp_path / "out"
    shutil.copytree(given, mine)
    os.truncate(mine / file, (mine / file).stat().st_size // 2)
    ended = killing.run(killing.cases(mine)[command].arguments, folder)
    assert ended.status == 2, ended.err
    said = [line for line in ended.err.splitlines() if line.startswith("signalprop: ")]
    assert len(said) == 1 and str((mine / file).parent) in said[0] and "Traceback" not in ended.err
    assert list(folder.iterdir()) == []
