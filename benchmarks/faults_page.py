"""The page docs/faults.md, from what `benchmarks.faults` has counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from signalprop_lab.training.tables import wrapped

Row = dict[str, Any]
_COUNTS = {
    "faults": "faults", "early": "before", "amid": "amid", "late": "after", "reported": "reported",
    "lost": "of it lost", "broken": "half files", "left": "left a .tmp", "finished": "ran again", "same": "the same",
}  # fmt: skip
_ALWAYS = ("faults", "lost", "broken", "finished", "same")
_HEAD = """
Written by `python -m benchmarks.faults` from `faults.json`: do not edit. What a command does when it is disturbed, and
how to go on, is in [When something breaks](training-faults.md).

**{faults} faults. {reported} files, directories and runs had been reported as written or done before them; {lost} of
these were lost. {broken} files with a final name were half written. {finished} commands ran again, {same} of them to
the same files.**

What the columns count:

- *before*, *amid*, *after*: faults before the first change to a file, between that and the beginning of the last, and
  after it
- *reported*: files and directories that the command had named as written, and runs that a sweep had named as done
- *of it lost*: of these, what was then not there, not whole, or not the same as without a fault; of a sweep, runs that
  were reported again
- *half files*: files with a final name that could not be read to their end (but for checkpoints that were being
  removed, which nobody reads)
- *left a .tmp*: how often a temporary file or directory stayed
- *ran again*: how often the command was then run to its end; *the same*: how often all its files were then those of a
  command that nothing had disturbed, bit by bit but for times
"""


class Section(NamedTuple):
    """A kind of fault on the page; `keys`: what tells its rows apart."""

    title: str
    text: str
    keys: tuple[str, ...]


SECTIONS = {
    "kills": Section(
        "kill -9 at random moments",
        """Half of the moments are uniform over the time that the command takes; half are soon after a change to a file
        (made, opened for writing, renamed, removed), each change as likely as any other. `train --resume` and `sweep`
        are killed up to five times before they may end; the others run again after every kill.""",
        ("command",),
    ),
    "changes": Section(
        "kill -9 in place of a change",
        """The process is killed instead of its first, second, ... change to a file: of every command each of them in
        turn; of `train` and `sweep`, which make hundreds, a random sample.""",
        ("command",),
    ),
    "workers": Section(
        "A sweep of two processes",
        """With `--jobs 2`, SIGKILL at a random moment to one of the two, to the process that started them, or to all
        three; then `--jobs 1` goes on.""",
        ("command",),
    ),
    "signals": Section(
        "SIGTERM and Ctrl-C",
        """At random moments, as above. While it trains, `train` ends after its step with a checkpoint and exit status
        1, a sweep likewise with 130; anything else ends at once with 143 (SIGTERM) or 130 (Ctrl-C) and a line that says
        so.""",
        ("signal", "command", "statuses"),
    ),
    "disk": Section(
        "Full disks",
        """File systems in memory of different sizes, from one page of 4 KiB up, so that the disk is full at another
        place each time; then it grows, and the command runs again. Sizes with which a command ends well do not
        count.""",
        ("command",),
    ),
    "read-only": Section("A read-only directory", "What each command says, with exit status 2.", ("command", "line")),
    "cut": Section(
        "Files cut short",
        """A random file among those named, cut at a random place: what a run or a sweep goes on from, what a model or a
        report is read from. *refused*: one line, exit status 2.""",
        ("command", "files", "refused"),
    ),
    "clock": Section(
        "A clock that jumps",
        """The wall clock jumps for all processes of a command while a run trains (faketime); the monotonic clock goes
        on. Seconds and rates are checked to be possible: positive, and no more than passed.""",
        ("command", "jump"),
    ),
}


def page(stored: dict[str, Any]) -> str:
    """The page, of the kinds that are stored."""
    rows = [row for kind in stored.values() for row in kind["rows"]]
    total = {name: sum(row[name] for row in rows) for name in _COUNTS}
    parts = ["# Faults: what was lost", wrapped(_HEAD.format(**total))]
    for kind, section in SECTIONS.items():
        if kind in stored:
            about = stored[kind]
            found = about["rows"]
            parts += [f"## {section.title}", wrapped(" ".join(section.text.split())), _table(found, section.keys)]
            where = f"{about['machine']['processor']}, torch {about['versions'].get('torch', '-')}"
            parts += [*_notes(found), wrapped(f"{about['date']}, {where}.")]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Row], keys: Sequence[str]) -> str:
    """The rows with the counts that are not zero in all of them, and those that are what this is about."""
    counts = [name for name in _COUNTS if name in _ALWAYS or any(row[name] for row in rows)]
    if "line" in keys:
        counts = ["finished", "same"]
    named = [key for key in keys if any(str(row[key]) for row in rows)]
    lines = [[*named, *(_COUNTS[name] for name in counts)], [*("---" for _ in named), *("---:" for _ in counts)]]
    lines += [[*(_cell(row[key]) for key in named), *(str(row[name]) for name in counts)] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {n}" for key, n in sorted(value.items()))
    return f"`{value}`" if any(mark in str(value) for mark in "*/:-") and " " not in str(value)[:3] else str(value)


def _notes(rows: Sequence[Row]) -> list[str]:
    """Steps of training that were lost, and everything that was not as it should be."""
    notes = [
        wrapped(
            f"A kill of `train` cost {row['steps_lost'] / row['faults']:.2f} steps in the mean, "
            f"{row['most_steps_lost']} at most: those that were in the log, but after the last checkpoint. There is "
            "one every two steps here."
        )
        for row in rows
        if row.get("most_steps_lost")
    ]
    problems = [f"- {row['command']}: {' '.join(problem.split())[:300]}" for row in rows for problem in row["problems"]]
    return notes + (["Not as it should be:", "\n".join(problems)] if problems else [])
