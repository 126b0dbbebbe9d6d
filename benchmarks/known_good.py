"""`python -m benchmarks.known_good`: verdicts on networks known to train, and on starts known to fail.

Predicted with Zipf's law at 128 tokens at most. Prints both tables; `--all` with the third of the rows that is kept
apart when bounds are set, `--write` also writes `src/signalprop/report/known_good.json` and the table in
`docs/will-it-train.md`. Two minutes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.known_networks import BAD, GOOD, LENGTH, Known
from signalprop.files.storage import read_text, write_json, write_text
from signalprop.prediction import predict
from signalprop.results.profile import Profile
from signalprop.results.text import number, percent, text_table
from signalprop.results.verdicts import halves
from signalprop_lab.training.tables import markdown_table as table

# Those of whose gradients summaries speak: released models with the start that transformers gives them.
LIKE = ("GPT-2", "GPT-2 XL", "OPT 125M", "Llama 7B", "BERT base", "BERT large", "ViT base", "T5 base", "BART base",
        "BART large", "Llama 3 8B", "Mistral 7B", "Mixtral 8x7B", "OLMoE 1B-7B", "Qwen3 8B", "Qwen3 30B-A3B",
        "Gemma 2 9B", "LFM2 1.2B")  # fmt: skip
ON_THE_PAGE = ("GPT-2", "GPT-2 XL", "Llama 7B", "BERT base", "T5 base", "Mixtral 8x7B", "Gemma 2 9B")
ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "src" / "signalprop" / "report" / "known_good.json"
PAGE = ROOT / "docs" / "will-it-train.md"
HEADING = "## Models that are known to train\n"


def found(known: Known) -> tuple[Profile, list[str]]:
    """Its prediction, and the names of what the rules find."""
    profile = predict(known.table())
    return profile, [item.name for item in profile.findings]


def judged(rows: Sequence[Known]) -> tuple[str, int]:
    """A table of them, and how many are judged wrongly: a finding on what trains, none on what fails."""
    lines, wrong = [], 0
    for known in rows:
        profile, names = found(known)
        missed = bool(names) if not known.expected else not set(names) & set(known.expected)
        wrong += missed
        a = profile.architecture
        lines.append(
            [known.name, f"{a.n_layers_total}", f"{a.d_model}", known.scheme, ", ".join(names) or "-", "WRONG" * missed]
        )
    return text_table(["network", "layers", "width", "scheme", "found", ""], lines), wrong


def start_of(name: str) -> dict[str, float]:
    """What summaries say of a model's start. No rule finds anything there, or this raises an AssertionError."""
    profile, names = found(next(known for known in GOOD if known.name == name))
    assert profile.gradient is not None
    assert names == []
    parts = halves(profile)[-1]
    return {
        "layers": profile.architecture.n_layers_total,
        "gradient_ratio": math.exp(profile.gradient["stream_in"].log_variance[0]),
        "lower_half": math.exp(parts.lower),
        "lower_growth": math.exp(parts.lower_growth),
        "upper_half": math.exp(parts.upper),
        "upper_growth": math.exp(parts.upper_growth),
        "token_correlation": float(profile.forward["stream_out"].token_correlation[-1]),
        "last_layer": float(profile.layer_sensitivities[-1]),
    }


def table_of(rows: dict[str, dict[str, float]]) -> str:
    """The table, in Markdown."""
    header = ["model", "layers", "gradient ratio", "in the lower half", "stream's growth there", "in the upper half",
              "token correlation", "the last layer adds"]  # fmt: skip
    body = [
        [name, f"{row['layers']}", *(number(row[key]) for key in _NUMBERS), percent(row["last_layer"])]
        for name, row in rows.items()
    ]
    return table(header, body)


_NUMBERS = ("gradient_ratio", "lower_half", "lower_growth", "upper_half", "token_correlation")


def write() -> None:
    """Write both files."""
    rows = {name: start_of(name) for name in LIKE}
    write_json(DATA, rows)
    before, _, rest = read_text(PAGE).partition(HEADING)
    prose, _, after = rest.partition("\n| model")
    _, end, following = after.partition("\n\n")
    shown = {name: rows[name] for name in ON_THE_PAGE}
    write_text(PAGE, f"{before}{HEADING}{prose}\n{table_of(shown)}{end}{following}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="also the rows that are kept apart")
    parser.add_argument("--write", action="store_true", help="write what the documentation and summaries show")
    given = parser.parse_args(arguments)
    for what, rows in (("known to train", GOOD), ("known to fail", BAD)):
        shown = [known for known in rows if given.all or not known.kept_apart]
        text, wrong = judged(shown)
        print(f"{what} ({len(shown)} of {len(rows)}, {LENGTH} tokens at most)\n\n{text}\n\nwrong: {wrong}\n")
    if given.write:
        write()


if __name__ == "__main__":
    main()
