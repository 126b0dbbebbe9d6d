"""Environments of their own for the packages that we are compared with, which nobody needs who uses signalprop.

An environment lies under out/environments and is made once; when its requirements change, it is made anew.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "out" / "environments"


def environment(name: str, requirements: Sequence[str]) -> Path:
    """The Python of an environment with these packages.

    Args:
        requirements: what pip takes, pinned ("jax==0.4.38"); `"--editable", "."` is this package. Versions in
            constraints-dev.txt hold here too.

    Raises:
        RuntimeError: pip could not install them; the message ends with what pip said.
    """
    folder = FOLDER / name
    python = folder / "bin" / "python"
    stamp, wanted = folder / "requirements.txt", "\n".join([f"# Python {sys.version}", *requirements]) + "\n"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"making the environment of {name}: {' '.join(requirements)}", file=sys.stderr, flush=True)
    for arguments in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
         "--constraint", "constraints-dev.txt", *requirements],
    ):  # fmt: skip
        found = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
        if found.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            last = "\n".join(found.stderr.strip().splitlines()[-5:])
            raise RuntimeError(f"cannot make the environment of {name}: {' '.join(arguments)}\n{last}")
    stamp.write_text(wanted)  # last: an environment without it is not whole
    return python
