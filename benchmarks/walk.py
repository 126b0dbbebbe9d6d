"""Five questions that users bring, and how long they take: the commands, the seconds, and the line that answers.

`python -m benchmarks.walk` makes a small checkpoint, and one that is broken, runs the commands as they are typed,
each in a process of its own, and writes docs/questions.md.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from signalprop.files.storage import write_text

PAGE = Path(__file__).parent.parent / "docs" / "questions.md"


class Question(NamedTuple):
    """What a user asks.

    Attributes:
        commands: at most two, as they are typed after `signalprop`. answer: a pattern of the lines that answer.
    """

    words: str
    commands: tuple[str, ...]
    answer: str


QUESTIONS = (
    Question(
        "Will it train at 96 layers?",
        (
            "predict tgs --layers 96 --norm post --scheme xavier",
            "predict tgs --layers 96 --norm post --scheme xavier,deepscalelm,deepnorm",
        ),
        r"^warning|^(xavier|deepscalelm|deepnorm) ",
    ),
    Question(
        "Why did it die?",
        ("diagnose ./broken --data book.txt --tokens 512 --no-report",),
        r"^FAULT|^        [a-z]",
    ),
    Question(
        "Which layers can I drop?",
        ("diagnose ./my-checkpoint --data book.txt --tokens 512 --greedy 2 --no-report",),
        r"^ +[0-9] layers? |^NOTE|^[0-9]+ layers? ",
    ),
    Question("Does my initialisation match?", ("check ./my-checkpoint --scheme gpt2",), r"carries scheme|differ"),
    Question(
        "Will fp8 hurt?",
        ("diagnose ./my-checkpoint --data book.txt --tokens 512 --cast float8_e4m3fn --no-report",),
        r"float8_e4m3fn",
    ),
)  # fmt: skip


def prepare(folder: Path) -> None:
    """A text, a GPT-2 of eight layers as GPT-2 is initialised, and one of whose weights is 60 times too large."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import signalprop as sp
    from signalprop.data import load_text

    (folder / "book.txt").write_text(load_text()[:50_000], encoding="utf-8")
    torch.manual_seed(0)
    size = {"vocab_size": 256, "n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    sp.apply(model, "gpt2", seed=0)
    sp.save(model, folder / "my-checkpoint")
    with torch.no_grad():
        model.transformer.h[5].mlp.c_proj.weight.mul_(60)
    model.save_pretrained(folder / "broken")


def asked(question: Question, folder: Path) -> tuple[list[tuple[float, float]], list[str]]:
    """Of its commands the seconds until the last line, and those of the processor; and the lines that answer.

    Raises:
        RuntimeError: a command fails, or no line answers.
    """
    seconds: list[tuple[float, float]] = []
    lines: list[str] = []
    environment = os.environ | {"COLUMNS": "110"}
    for words in question.commands:
        begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "signalprop", *words.split()]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        seconds.append((time.perf_counter() - begun, used))
        if done.returncode not in (0, 1):
            raise RuntimeError(f"signalprop {words}: {done.stderr}")
        lines += [line for line in done.stdout.splitlines() if re.search(question.answer, line)]
    if not lines:
        raise RuntimeError(f"nothing answers {question.words}")
    return seconds, lines


_LEAD = """\
Each is answered by one or two commands. Seconds are from the start of the command to its last line, on a machine
whose two cores had other work, and beside them those that a processor worked, most of them to import PyTorch and
transformers. `python -m benchmarks.walk` writes this page: `my-checkpoint` is a GPT-2 of eight layers, as it is
initialised; of `broken` one weight is 60 times too large."""


def page(found: dict[str, tuple[list[tuple[float, float]], list[str]]]) -> str:
    """The page."""
    parts = [
        "# Five questions",
        _LEAD,
    ]
    for question in QUESTIONS:
        seconds, lines = found[question.words]
        pairs = zip(question.commands, seconds, strict=True)
        rows = [f"| `signalprop {words}` | {wall:.1f} | {used:.1f} |" for words, (wall, used) in pairs]
        table = "\n".join(["| command | seconds | of a processor |", "| --- | --- | --- |", *rows])
        parts.append(f"## {question.words}\n\n{table}\n\n" + "```text\n" + "\n".join(lines[:6]) + "\n```")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Ask all, and write the page."""
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        found = {question.words: asked(question, Path(name)) for question in QUESTIONS}
    write_text(PAGE, page(found))
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
