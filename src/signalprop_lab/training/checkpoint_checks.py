"""Whether a checkpoint is as a run wrote it, and the newest one that is."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from signalprop.errors import InputError
from signalprop.files.storage import is_below, opened, read_json, read_text

SCHEMA = "signalprop/checkpoint/1"


MARKER = "complete.json"


TRAINER_STATE = "trainer_state.json"  # the Trainer reads it by this name


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
        return _problem_of_state(folder, data["step"], data["files"])
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read: {error.strerror or error}"
    except InputError as error:
        return str(error)
    except (KeyError, TypeError, ValueError, AttributeError):
        return f"its {MARKER} is damaged"


def _problem_of_state(folder: Path, step: int, files: dict[str, Any]) -> str | None:
    """What the Trainer would be told that is not of this step; sums that agree do not make it what a run writes."""
    from transformers import TrainerState

    if TRAINER_STATE not in files:
        return f"it has no {TRAINER_STATE}"
    try:
        state = json.loads(read_text(folder / TRAINER_STATE))  # what was logged may hold NaN
    except (InputError, ValueError, RecursionError):
        return f"its {TRAINER_STATE} is not JSON"
    if not isinstance(state, dict) or state.keys() - {item.name for item in fields(TrainerState)}:
        return f"its {TRAINER_STATE} is not that of a Trainer"
    wrong = [name for name, holds in _STATE.items() if not holds(state.get(name), step)]
    if wrong:
        return f"its {TRAINER_STATE} is not that of step {step} ({wrong[0]} is {state.get(wrong[0])!r:.60})"
    return None


def _is_log(value: Any, step: int) -> bool:
    """Whether these are lines that were logged up to a step."""
    return isinstance(value, list) and all(isinstance(x, dict) and within(x.get("step"), step) for x in value)


def within(value: Any, last: int) -> bool:
    return type(value) is int and 0 <= value <= last


def _number(value: Any, _: int) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


# What the Trainer goes by, of its state: field, and whether a value can be that of a step.
_STATE: dict[str, Callable[[Any, int], bool]] = {
    "global_step": lambda value, step: type(value) is int and value == step,
    "max_steps": lambda value, step: type(value) is int and value >= step,
    "log_history": _is_log,
    "epoch": _number,
    "total_flos": _number,
    "num_input_tokens_seen": _number,
    "train_batch_size": lambda value, _: value is None or (type(value) is int and value > 0),
    "stateful_callbacks": lambda value, _: isinstance(value, dict),
}


def digest_of(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
