"""Peak memory of `signalprop diagnose`, over that of loading the model.

    python -m benchmarks.diagnosing [--json FILE]
    python -m benchmarks.diagnosing --large [-- options of diagnose]   # 1.1 billion parameters, 2.2 GB of disk

Weights are random, in directories of their own, removed afterwards.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.memory import peak
from benchmarks.page import table
from benchmarks.timing import command_line, write_rows


@dataclass(frozen=True)
class Case:
    """A Llama with 64 features per head, and what it reads in batches of two sequences."""

    layers: int = 12
    width: int = 256
    vocabulary: int = 8000
    tokens: int = 2048
    length: int = 512


BASE = Case()
CASES = (
    BASE,
    *(replace(BASE, layers=n) for n in (3, 48)),
    replace(BASE, width=1024),
    *(replace(BASE, vocabulary=n) for n in (500, 128000)),
    *(replace(BASE, tokens=n) for n in (1024, 16384)),
    replace(BASE, length=1024),
)
LARGE_BOUND = 8.0  # GiB
LARGE = {
    "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
    "intermediate_size": 5632, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip

TITLE = "Memory of a diagnosis"
ABOUT = """
`python -m benchmarks.diagnosing`: `signalprop diagnose` on Llamas with random weights in float32, on one thread, in
batches of two sequences; the largest resident memory of the process, mapped files included. *Loading* is a process
that imports the same modules, loads the model, and reads every weight once.
"""
READING = """\
The floor is what the pass itself needs beside the weights: a batch's logits and their gradients (2 × length ×
vocabulary numbers each), the gradient of the loss with respect to the layers' streams with what autograd keeps for
it, and the weights of attention of one layer (2 × heads × length²). More tokens mean more batches, which are
streamed."""

_LOADING = """
import sys
import signalprop.diagnosis.run, signalprop.report.diagnosis_tables
from signalprop.diagnosis.loading import load
for p in load(sys.argv[1], dtype=sys.argv[2]).model.parameters():
    p.sum()
"""
_WRITING = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
with torch.device("meta"):
    model = LlamaForCausalLM(LlamaConfig(**json.loads(sys.argv[2]))).to(getattr(torch, sys.argv[3]))
model.to_empty(device="cpu")
torch.manual_seed(0)
with torch.no_grad():
    for name, p in model.named_parameters():
        p.fill_(1.0) if "norm" in name else p.normal_(0.0, 0.02)
model.save_pretrained(sys.argv[1])
"""


def write(folder: Path, config: Mapping[str, int], dtype: str) -> None:
    """A checkpoint of random weights, written by a process of its own."""
    peak(["-c", _WRITING, str(folder), json.dumps(dict(config)), dtype])


def diagnosed(folder: Path, dtype: str, options: Sequence[str]) -> tuple[int, float]:
    """Peak memory of a diagnosis, and its CPU seconds."""
    command = ["-m", "signalprop", "diagnose", str(folder), "--dtype", dtype, "--no-report", "--json", os.devnull]
    return peak([*command, *options])


def measure(case: Case) -> dict[str, Any]:
    """A row: peak memory in bytes."""
    config = {
        "hidden_size": case.width, "num_hidden_layers": case.layers, "num_attention_heads": case.width // 64,
        "num_key_value_heads": case.width // 64, "intermediate_size": round(8 * case.width / 3),
        "vocab_size": case.vocabulary, "max_position_embeddings": 2048,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write(folder, config, "float32")
        loading, _ = peak(["-c", _LOADING, str(folder), "float32"])
        options = ["--tokens", str(case.tokens), "--seq-len", str(case.length), "--batch-size", "2"]
        most, seconds = diagnosed(folder, "float32", options)
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    logits = 4 * 2 * case.length * case.vocabulary
    return {
        "case": list(astuple(case)), "weights": weights, "loading": loading, "diagnosing": most, "logits": logits,
        "seconds": seconds,
    }  # fmt: skip


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of the page."""

    def mebibytes(number: float) -> str:
        return f"{number / 2**20:,.0f} MiB"

    cells = []
    for row in rows:
        layers, width, vocabulary, tokens, length = row["case"]
        numbers = [row["weights"], row["loading"], row["diagnosing"], row["diagnosing"] - row["loading"], row["logits"]]
        shape = [f"{layers} × {width}", f"{vocabulary:,}", f"{tokens:,}", f"{length:,}"]
        cells.append([*shape, *(mebibytes(number) for number in numbers), f"{row['seconds']:.0f} s"])
    header = ["layers × width", "vocabulary", "tokens", "length", "weights", "loading", "diagnose", "difference"]
    return "\n\n".join([table([*header, "logits of a batch", "CPU"], cells), READING])


def large(options: Sequence[str]) -> int:
    """The peak on TinyLlama's shape in bfloat16 against a bound; 1 where it is above."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write(folder, LARGE, "bfloat16")
        most, seconds = diagnosed(folder, "auto", options)
    print(f"peak {most / 2**30:.2f} GiB (bound {LARGE_BOUND:g}), {seconds:.0f} s of CPU: {' '.join(options)}")
    return int(most > LARGE_BOUND * 2**30)


def main() -> int:
    """Command line of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--large", action="store_true", help="only the model of 1.1 billion parameters")
    parser.add_argument("options", nargs="*", help="options of diagnose for --large, after --")
    given = parser.parse_args()
    if given.large:
        return large(given.options or ["--tokens", "1024", "--seq-len", "512", "--batch-size", "2"])
    rows = [measure(case) for case in CASES]
    print(section(rows))
    write_rows(given.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
