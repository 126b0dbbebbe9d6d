"""Accuracy beside the loss: tasks of lm-evaluation-harness."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from signalprop.diagnosis.result import Estimate
from signalprop.errors import InputError, require
from signalprop.files.storage import read_text


def harness(tasks: Sequence[str], tokenizer: Any) -> Callable[[nn.Module], Estimate]:
    """A function of a causal model: its mean accuracy over tasks of lm-evaluation-harness (package `lm_eval`).

    Args:
        tasks: names, or YAML files of your tasks.
    """
    lm_eval = require("lm_eval", "tasks")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager, get_task_dict

    files = [Path(task) for task in tasks if is_task_file(task)]
    names = [_name_in(Path(task)) if is_task_file(task) else task for task in tasks]
    with _silence():
        manager = TaskManager(include_path=[str(folder) for folder in {file.parent for file in files}] or None)
    known = set(manager.all_tasks)
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise InputError(
                f"lm_eval has no task {name!r}{f'; did you mean {near[0]}?' if near else ''} (a file of a task of your "
                "own ends in .yaml)"
            )

    def run(what: Callable[[], Any]) -> Any:
        try:
            with _silence():
                return what()
        except Exception as error:  # no data and no connection to read it, and all that a task's code can raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"lm_eval cannot run {', '.join(names)}: {reason[:200]}") from None

    run(lambda: get_task_dict(names, manager))  # or an error now, not after the long work

    def accuracy(model: nn.Module) -> Estimate:
        def evaluated() -> Any:
            return lm_eval.simple_evaluate(
                model=HFLM(pretrained=model, tokenizer=tokenizer), tasks=names, task_manager=manager
            )

        results = run(evaluated)
        scores = [results["results"].get(name, {}) for name in names]
        for name, score in zip(names, scores, strict=True):
            if "acc,none" not in score:
                raise InputError(f"the task {name} gives no accuracy; choose one that does, e.g. arc_easy")
        errors = [score.get("acc_stderr,none") for score in scores]
        given = all(isinstance(error, float) for error in errors)
        return Estimate(
            value=sum(score["acc,none"] for score in scores) / len(scores),
            standard_error=math.hypot(*errors) / len(scores) if given else None,
        )

    return accuracy


@contextmanager
def _silence() -> Iterator[None]:
    """Nothing on standard error: lm_eval's bars, remarks, and what git says where it looks for its version.

    The last is another process's, so the file descriptor is turned away as well.
    """
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        kept = os.dup(2)
        try:
            os.dup2(nowhere.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def is_task_file(task: str) -> bool:
    """Whether a task of lm-evaluation-harness is given as a YAML file, not by its name."""
    return Path(task).suffix.lower() in (".yaml", ".yml")


def _name_in(path: Path) -> str:
    """What a task calls itself in its YAML file (which may hold tags that only lm_eval reads)."""
    found = re.search(r"^task:\s*['\"]?([^\s'\"#]+)", read_text(path), re.MULTILINE)
    if found is None:
        raise InputError(f"{path} names no task; expected a line `task: NAME`, as lm-evaluation-harness has it")
    return found[1]
