"""What cannot fit into memory is not even tried: the line says how much it needs."""

from __future__ import annotations

import gzip
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from damage import check_command, commanded
from signalprop.files.limits import check_fits, memory_limit


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["predict", "gpt2", "--fidelity", "kernel", "--seq-len", "1000000"],
            "a token kernel of 1,000,000 tokens needs at least 280,000.0 GB",
        ),
        (["kernel", "gpt2 xavier", "--seq-len", "1000000"], "fewer tokens"),
        (["measure", "tgs", "--d-model", "1000000", "--layers", "4"], "parameters needs at least"),
        (["predict", "tgs", "--layers", "100000", "--fidelity", "kernel", "--seq-len", "100000"], "needs at least"),
    ],
)
def test_the_memory_needed_is_stated(arguments: list[str], says: str) -> None:
    begun = time.process_time()
    result = commanded(*arguments)
    check_command(result)
    assert result.status == 2 and says in result.err and "GB of memory; there are" in result.err
    assert time.process_time() - begun < 20


def test_what_fits_is_left_alone() -> None:
    limit = memory_limit()
    assert limit is not None and limit > 10 * 1024**2
    check_fits(limit, "this", "do that")


@pytest.mark.slow
def test_packed_lines_of_gigabytes(tmp_path: Path) -> None:
    """A small file that stands for much, read by a process that may take 6 GB."""
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(3000):
            file.write(b" " * (1 << 20))
    code = (
        "from damage import outcome\nfrom signalprop_lab.training.sources import documents\n"
        "from signalprop_lab.training.recipe import Data\n"
        "from signalprop_lab.training.sources import training_place\n"
        "data = Data(source='a.jsonl.gz')\n"
        "print(outcome(lambda: list(documents(data, training_place(data)))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)),
    )  # fmt: skip
    assert done.stdout == "refused\n"
