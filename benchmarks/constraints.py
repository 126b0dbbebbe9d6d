"""constraints-dev.txt written anew: the exact version of every package that `pip install '.[dev]'` brings.

    make constraints

pip resolves without installing. PyTorch stays at the version that the file names, as its builds are many and large:
change that line by hand first. The standard library is enough to run this.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "constraints-dev.txt"
# PyTorch needs setuptools from Python 3.12 on; whoever resolves under 3.11 would not find it.
WANTED = (".[dev]", "setuptools")
OLDEST = "3.11.0"  # the Python for which versions are chosen: some packages leave the first patch releases behind
HEADER = """\
# The exact versions that `make demo`, `make test` and CI install; users are free (see the bounds in pyproject.toml).
# `make constraints` chose them for Python {python} on {platform}; `make test` tests them. What is installed of them
# differs with Python (3.11 to 3.13) and platform, as the packages' markers say.
"""


def pinned(report: Mapping[str, Any]) -> list[str]:
    """`name==version` of each package in pip's installation report but our own, sorted; without local labels (+cpu)."""
    found = {item["metadata"]["name"]: item["metadata"]["version"].partition("+")[0] for item in report["install"]}
    names = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found.items()}
    return [f"{name}=={version}" for name, version in sorted(names.items()) if name != "signalprop"]


def main() -> None:
    """Resolve, then write the file."""
    with tempfile.TemporaryDirectory() as folder:
        torch = Path(folder) / "torch.txt"
        torch.write_text("".join(re.findall(r"^torch==.+\n", FILE.read_text(encoding="utf-8"), re.MULTILINE)), "utf-8")
        report = Path(folder) / "report.json"
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", report,
             "--target", Path(folder) / "nothing", "--python-version", OLDEST, "--only-binary", ":all:",
             "--constraint", torch, *WANTED],
            check=True,
            cwd=ROOT,
        )  # fmt: skip
        lines = pinned(json.loads(report.read_text(encoding="utf-8")))
    header = HEADER.format(python=OLDEST, platform=sys.platform)
    FILE.write_text(header + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{FILE.name}: {len(lines)} packages; now `make test`")


if __name__ == "__main__":
    main()
