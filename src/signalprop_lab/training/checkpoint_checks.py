"""Whether a checkpoint is as a run wrote it, and the newest one that is."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from signalprop.errors import InputError
from signalprop.files.storage import is_below, opened, read_json

SCHEMA = "signalprop/checkpoint/1"


MARKER = "complete.json"


def last_good(folder: Path) -> Path | None:
    """The newest checkpoint in a directory of them that is whole, or None; one line on stderr for each that is not."""
    for item in sorted(folder.glob("checkpoint-*"), key=step_of, reverse=True):
        problem = problem_of(item)
        if problem is None:
            return item
        print(f"signalprop: the checkpoint {item} is not used: {problem}", file=sys.stderr)
    return None


def step_of(folder: Path) -> int:
    """The step that a checkpoint's name says; -1 for another name."""
    number = folder.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1


def problem_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None: all its files are there, as they were written."""
    marker = folder / MARKER
    if not marker.is_file():
        return f"it has no {MARKER}, so it was not written to its end"
    try:
        data = read_json(marker)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or data.get("step") != step_of(folder):
            return f"its {MARKER} is not that of a checkpoint of this step ({SCHEMA})"
        for name, known in data["files"].items():
            if not is_below(name):
                return f"its {MARKER} names {name!r:.80}, which is not in it"
            size = (folder / name).stat().st_size
            if size != known["bytes"]:
                return f"{name} has {size} bytes; {known['bytes']} were written"
            if digest_of(folder / name) != known["sha256"]:
                return f"{name} is not what was written (its SHA-256 sum differs)"
        return None
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read: {error.strerror or error}"
    except InputError as error:
        return str(error)
    except (KeyError, TypeError, ValueError, AttributeError):
        return f"its {MARKER} is damaged"


def digest_of(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
