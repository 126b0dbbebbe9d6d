"""Packages that others wrote for the same jobs, each in an environment of its own, which is made when it is needed.

An environment lies under out/environments and sees what this one has installed (PyTorch, transformers, NumPy), so that
all compute with the same; pip adds the peer and what it needs beside, at the versions named here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "out" / "environments"
PEERS = {
    "torch-module-monitor": ("torch-module-monitor==0.1.0",),
    "torchinstruments": ("torchinstruments==0.10.2",),
    "unit-scaling": ("unit-scaling==0.3.5",),
    "nnsight": ("nnsight==0.8.1",),
    "transformer-lens": ("transformer-lens==4.3.0",),
    "anyinit": ("anyinit==0.4.0",),
    "neural-tangents": ("neural-tangents==0.6.5", "jax==0.4.38", "jaxlib==0.4.38"),  # it imports names of that jax
}
_LAST = 300  # characters of what a failed program said


class DidNotRun(Exception):
    """A peer that cannot be installed, or does not run, here; one line says why."""


def python_of(peer: str) -> Path:
    """The Python of a peer's environment, which is made where it is not there or is one of other versions.

    Raises:
        DidNotRun: pip cannot install it; with what pip said last.
    """
    folder = FOLDER / peer
    python, stamp, wanted = folder / "bin" / "python", folder / "requirements.txt", "\n".join(PEERS[peer])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"making the environment of {peer}: {' '.join(PEERS[peer])}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False)
    seen = [str(ROOT / "src"), str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    next(folder.glob("lib/python*/site-packages")).joinpath("ours.pth").write_text("\n".join(seen) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile", *PEERS[peer]]
    done = subprocess.run(pip, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        raise DidNotRun(f"pip cannot install {' '.join(PEERS[peer])}: {_last(done.stderr)}")
    stamp.write_text(wanted)  # last: an environment without it is not whole
    return python


def result_of(peer: str, module: str, *arguments: str, timeout: float = 600, **variables: str) -> Any:
    """What `python -m MODULE ARGUMENTS` in a peer's environment writes last, as JSON.

    Raises:
        DidNotRun: it cannot be installed, fails, or takes longer than `timeout` seconds.
    """
    command = [str(python_of(peer)), "-m", module, *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout, env=os.environ | variables
        )
    except subprocess.TimeoutExpired:
        raise DidNotRun(f"it took more than {timeout:.0f} s") from None
    if done.returncode:
        raise DidNotRun(f"it failed: {_last(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:_LAST] if lines else "nothing was said"
