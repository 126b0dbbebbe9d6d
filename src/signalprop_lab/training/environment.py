"""Where a run happened: versions, machine, command, git revision."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from signalprop.errors import InputError
from signalprop.files.storage import read_text

_PACKAGES = ("signalprop", "torch", "transformers", "accelerate", "numpy", "peft", "datasets", "tokenizers")


def environment() -> dict[str, Any]:
    """Where a run happened: versions, machine, command, git revision."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "versions": versions,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {processor()}, {os.cpu_count()} cores",
        "device": device,
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "command": sys.argv,
        "git": _revision(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _revision() -> str | None:
    """The git revision of the signalprop that runs, with `-dirty` where its files have been changed since; None: it is
    installed, not a clone. The current directory may be a user's own repository, and does not count.

    An interrupt reaches the thread that waits, not the one that runs git: no child process remains.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_described).result()


def _described() -> str | None:
    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True, timeout=10)
        if tracked.returncode:
            return None  # it lies in somebody's repository, as a virtual environment may
        described = [*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        done = subprocess.run(described, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def processor() -> str:
    """The processor's name, where the system reports it."""
    with suppress(InputError):
        for line in read_text("/proc/cpuinfo").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
