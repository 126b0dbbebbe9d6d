"""Accuracy beside the loss: questions with choices, by the likelihood of each; tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from signalprop.diagnosis.result import Estimate
from signalprop.errors import InputError, refusing, require
from signalprop.files.storage import read_text
from signalprop.files.validation import Value


class Question(Value):
    """A prompt, how it may go on, and which of the choices is right (counted from 0)."""

    prompt: str
    choices: tuple[str, ...] = Field(min_length=2)
    answer: int = Field(ge=0)


def read_task(path: str | Path) -> list[Question]:
    """The questions in a JSON-lines file: `{"prompt": "...", "choices": ["...", "..."], "answer": 0}` each."""
    out = []
    for i, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(
                f"{path} line {i} is not JSON; expected an object with prompt, choices and answer"
            ) from None
        if not isinstance(data, dict):
            raise InputError(f"{path} line {i} is not an object; expected one with prompt, choices and answer")
        try:
            fields: dict[str, Any] = {str(k): tuple(v) if isinstance(v, list) else v for k, v in data.items()}
            question = Question(**fields)
        except InputError as error:
            raise InputError(f"{path} line {i}: {error}") from None
        if question.answer >= len(question.choices):
            raise InputError(f"{path} line {i}: answer {question.answer} of {len(question.choices)} choices")
        out.append(question)
    if not out:
        raise InputError(f"{path} holds no question")
    return out


def multiple_choice(model: nn.Module, tokenizer: Any, questions: Sequence[Question]) -> Estimate:
    """Share of questions where the right choice has the largest likelihood per token, with its standard error."""
    right = 0
    device = next(model.parameters()).device
    for question in questions:
        with refusing("the tokenizer cannot read a question", "expected one with an unknown token"):
            prompt = tokenizer(question.prompt, add_special_tokens=True)["input_ids"]
            answers = [tokenizer(choice, add_special_tokens=False)["input_ids"] for choice in question.choices]
        scores = []
        for ids in answers:
            if not ids:
                raise InputError(f"a choice of {question.prompt!r:.40} has no tokens")
            whole = torch.tensor([[*prompt, *ids]], device=device)
            with torch.no_grad():
                logits = model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            scores.append(-float(F.cross_entropy(logits, whole[0, len(prompt) :])))
        right += max(range(len(scores)), key=scores.__getitem__) == question.answer
    n = len(questions)
    share = right / n
    return Estimate(value=share, standard_error=math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else None)


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
                f"lm_eval has no task {name!r}{f'; did you mean {near[0]}?' if near else ''} (a file of questions "
                "ends in .jsonl, your task in .yaml)"
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
