"""A wall clock that jumps: what is measured goes by one that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import killing

LIBRARY = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)


@pytest.mark.slow
@pytest.mark.skipif(LIBRARY is None, reason="there is no faketime here")
@pytest.mark.parametrize("jump", ["-3600", "+3600"])
def test_a_run_meets_a_jump(jump: str, tmp_path: Path) -> None:
    given, folder, whole = tmp_path / "given", tmp_path / "out", tmp_path / "whole"
    killing.prepare(given, trained_run=False)
    case = killing.cases(given)["train"]
    assert killing.run(case.arguments, whole).status == 0
    folder.mkdir()
    offset = tmp_path / "offset"
    offset.write_text("+0\n")
    environment = os.environ | {
        "LD_PRELOAD": str(LIBRARY), "FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_CACHE_DURATION": "1",
        "DONT_FAKE_MONOTONIC": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "signalprop", *case.arguments], cwd=folder, env=environment, stderr=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (folder / "run" / "tensorboard").exists():
        assert process.poll() is None
        time.sleep(0.02)
    offset.write_text(f"{jump}\n")
    _, err = process.communicate(timeout=300)
    took = time.monotonic() - began
    assert process.returncode == 0, err
    assert killing.different(whole, folder, case.written) == []
    result = json.loads((folder / "run" / "result.json").read_text())
    assert 0 <= result["seconds"] <= took and result["throughput"] > 0
