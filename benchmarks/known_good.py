"""`python -m benchmarks.known_good`: the start of models that are known to train, which verdicts are held against.

Every model at its own initialisation (scheme `huggingface`), predicted with Zipf's law at 128 tokens at most. Writes
`src/signalprop/report/known_good.json` and the table in `docs/will-it-train.md`. Half a minute.
"""

from __future__ import annotations

import math
from pathlib import Path

from signalprop.data.batches import shortened
from signalprop.files.storage import read_text, write_json, write_text
from signalprop.network.architecture import Architecture
from signalprop.prediction import predict
from signalprop.report.findings import halves, warnings
from signalprop.results.text import number, percent
from signalprop_lab.training.tables import markdown_table as table

MODELS = {
    "GPT-2": "gpt2", "GPT-2 XL": "gpt2-xl", "OPT 125M": "opt-125m", "Llama 7B": "llama-7b", "BERT base": "bert-base",
    "BERT large": "bert-large", "ViT base": "vit-base", "T5 base": "t5-base", "BART base": "bart-base",
    "BART large": "bart-large", "Llama 3 8B": "llama3-8b", "Mistral 7B": "mistral-7b", "Mixtral 8x7B": "mixtral-8x7b",
    "OLMoE 1B-7B": "olmoe-1b-7b", "Qwen3 8B": "qwen3-8b", "Qwen3 30B-A3B": "qwen3-30b-a3b", "Gemma 2 9B": "gemma2-9b",
    "LFM2 1.2B": "lfm2-1.2b",
}  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "src" / "signalprop" / "report" / "known_good.json"
PAGE = ROOT / "docs" / "will-it-train.md"
HEADING = "## Models that are known to train\n"


def start_of(preset: str) -> dict[str, float]:
    """What the verdicts read of a preset's prediction. No warning is given of it, or this raises an AssertionError."""
    profile = predict(shortened(Architecture.preset(preset)))
    assert profile.gradient is not None
    assert warnings(profile) == []
    parts = halves(profile)
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


def main() -> None:
    """Predict all, and write both files."""
    rows = {name: start_of(preset) for name, preset in MODELS.items()}
    write_json(DATA, rows)
    before, _, rest = read_text(PAGE).partition(HEADING)
    prose, _, after = rest.partition("\n| model")
    _, end, following = after.partition("\n\n")
    write_text(PAGE, f"{before}{HEADING}{prose}\n{table_of(rows)}{end}{following}")


if __name__ == "__main__":
    main()
