"""records/code-bases.md, of records/code-bases.json."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.code_bases.verbs import USED, VERBS
from benchmarks.timing import compact
from signalprop.files.storage import write_text

ROOT = Path(__file__).resolve().parent.parent.parent / "records"
FILE, PAGE = ROOT / "code-bases.json", ROOT / "code-bases.md"
HOW = ("works", "noted", "refused", "wrong", "raw")
SIGNS = {"works": "yes", "noted": "noted", "refused": "-", "wrong": "WRONG", "raw": "RAW"}

TEXT = """\
# Models that are not of transformers

Written by `python -m benchmarks.code_bases`: do not edit. {n} models in the shapes of public code bases, written for
this record (nothing is copied), as their users call them; {ran} ran. By verb, how many: a *refusal* is one line that
says what to do; *wrong* is a number away from plain hooks or from simulated networks without a word; *raw* is any
other error. *Noted*: a prediction that is further off, with a note that says why. Rows by commit: {commits}.

{table}

Largest distances from plain hooks after every layer (relative; of correlations, absolute), over all models that were
measured: {distances}. bfloat16 is left out.

Predicted and initialised models, the logarithm of the last stream variance over the mean of three networks of width 64,
at most: {predicted}.

{models}

## Refusals

{refusals}
"""


def counts(models: dict[str, Any]) -> dict[str, Counter[str]]:
    """By verb, how many models end how."""
    return {verb: Counter(record[verb]["how"] for record in models.values() if record["ran"]) for verb in VERBS}


def largest(models: dict[str, Any], verb: str, what: str) -> tuple[float, str]:
    """The largest distance of a verb that works, and of which model."""
    found = [
        (abs(r[verb][what]), name) for name, r in models.items() if r["ran"] and what in r[verb] and name != "bfloat16"
    ]
    return max(found, default=(float("nan"), ""))


def write(record: dict[str, Any]) -> None:
    """The page."""
    models = record["models"]
    by_verb = counts(models)
    rows = [[verb, *(str(by_verb[verb][how]) for how in HOW)] for verb in VERBS]
    empty = [""] * (len(VERBS) - 1)
    shown = [
        [name, *(SIGNS[r[verb]["how"]] for verb in VERBS)] if r["ran"] else [name, r["reason"], *empty]
        for name, r in models.items()
    ]
    far = [
        f"{what} {largest(models, verb, what)[0]:.1e} ({verb})"
        for verb in ("measure", "Probe")
        for what in ("variance", "correlation", "gradient")
    ]
    off = "; ".join(
        f"{largest(models, verb, 'variance')[0]:.2f} ({verb}: {largest(models, verb, 'variance')[1]})" for verb in USED
    )
    lines: dict[str, list[str]] = {}
    for name, r in models.items():
        for verb in VERBS:
            if r["ran"] and "reason" in r[verb]:
                lines.setdefault(r[verb]["reason"], []).append(f"{name} ({verb})")
    refusals = [f"- {', '.join(names)}: `{reason}`" for reason, names in lines.items()]
    commits = Counter(r["commit"] for r in models.values())
    text = TEXT.format(
        n=len(models),
        ran=sum(r["ran"] for r in models.values()),
        commits=", ".join(f"{n} at {commit}" for commit, n in commits.items()),
        table=compact(["verb", *HOW], rows),
        distances=", ".join(far),
        predicted=off,
        models=compact(["model", *VERBS], shown),
        refusals="\n".join(refusals),
    )
    write_text(PAGE, text)
