"""Ranks that train together, each a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_ranks(script: str, folder: Path, ranks: int = 2, seconds: float = 600) -> None:
    """Run `python script RANK N FOLDER` for every rank at once; all have to end well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, str(rank), str(ranks), str(folder)],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=seconds)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * ranks, "\n".join(error[-2000:] for error in errors)
