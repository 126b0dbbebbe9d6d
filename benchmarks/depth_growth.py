"""How the stream's variance grows with depth, before and through training: docs/depth-growth.md, .json and a picture.

    python -m benchmarks.depth_growth                # train what is missing (six minutes or so on one core)
    python -m benchmarks.depth_growth --minutes 3    # start no run after that time; the next call goes on
    python -m benchmarks.depth_growth --page         # only write the page from docs/depth-growth.json

Small decoders read the embedded text byte by byte, with pre-norm and with LayerNorm Scaling. Every finished run is kept
in out/depth-growth, so that a call that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import io
import math
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shortcuts import text
from signalprop.data.batches import Batch, windows
from signalprop.files.storage import read_json, write_bytes, write_json, write_text
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Embedding, Parametrization
from signalprop.prediction import predict
from signalprop.schemes import scheme
from signalprop.theory.bounds import GrowthFit, growth_fit

PAGE, STORE = Path("docs/depth-growth.md"), Path("docs/depth-growth.json")
PICTURE = Path("docs/pictures/depth-growth.png")
RUNS = Path("out/depth-growth")
SCHEMA = "signalprop/depth-growth/1"

# What every run has in common; a stored run with other numbers is not used. The standard deviation of the weights keeps
# d s^2 of the Llama of 130 M parameters (width 768, 0.02).
SETTINGS: dict[str, Any] = {
    "layers": 32, "width": 64, "heads": 4, "feed_forward": 172, "tokens": 64, "vocabulary": 256, "std": 0.0693,
    "embedding_std": 0.02, "steps": 600, "warm_up": 60, "batch": 4, "rate": 1e-3, "last_rate": 0.1, "windows": 16,
}  # fmt: skip
NAMES = {"fixed": "pre-norm", "lns": "LayerNorm Scaling"}
SEEDS = (0, 1)
FRESH = (24, 48, 96)  # layers of networks that are looked at before training alone
FRESH_SEEDS = range(4)
SAMPLED = (0, 10, 20, 30, 40, 60, 80, 100, 125, 150, 175, 200, 250, 300, 350, 400, 450, 500, 550, 600)
Run = Mapping[str, Any]


def parametrization(name: str, n_layers: int) -> Parametrization:
    """Llama layers whose weights all have one standard deviation; `lns` differs in the factors on norms alone."""
    s = SETTINGS
    a = Architecture.preset(
        "llama-130m", n_layers=n_layers, d_model=s["width"], n_heads=s["heads"], d_ff=s["feed_forward"],
        vocab_size=s["vocabulary"], seq_len=s["tokens"],
    )  # fmt: skip
    table = scheme("fixed", std=s["std"])(a)
    table = replace(table, embedding=Embedding(**table.embedding.model_dump() | {"token": s["embedding_std"]}))
    return table.with_columns(norm_scale=scheme(name)(a).norm_scale)


def held_out() -> Batch:
    """Windows of the validation text, on which every network is measured."""
    rows = windows(text()[1], SETTINGS["tokens"] + 1, SETTINGS["windows"], 0)
    return Batch(tokens=rows[:, :-1], targets=rows[:, 1:], source="sotu")


# --- measuring --------------------------------------------------------------------------------------------------------


def variances(model: Any) -> tuple[list[float], list[float]]:
    """Variance of the stream behind every layer, over all positions, and cosine of what layers add with the stream."""
    from signalprop.attachment.families import mapping_for
    from signalprop.diagnosis.signal import observe

    signal = observe(model, [held_out()], mapping_for(model, None), skip_first=0, gradient_sequences=0)
    return [float(s.variance or math.nan) for s in signal], [float(s.alignment or 0.0) for s in signal]


def train(name: str, seed: int) -> dict[str, Any]:
    """One run: the stream's variances on the way, and the loss at the end."""
    import torch

    from signalprop.diagnosis.stream import loss
    from signalprop.models import build

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    s = SETTINGS
    started = time.perf_counter()
    model = build(parametrization(name, s["layers"]), seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s["rate"], weight_decay=0.0, fused=True)
    samples = []
    for step in range(s["steps"] + 1):
        if step in SAMPLED:
            found, cosines = variances(model)
            samples.append({"step": step, "variance": found, "alignment": cosines})
        if step == s["steps"]:
            break
        optimizer.param_groups[0]["lr"] = s["rate"] * factor(step)
        ids = torch.from_numpy(windows(text()[0], s["tokens"] + 1, s["batch"], 100_000 * (seed + 1) + step))
        optimizer.zero_grad()
        value = model(ids[:, :-1], targets=ids[:, 1:]).loss
        value.backward()
        optimizer.step()
        if (step + 1) % 100 == 0:
            spent = time.perf_counter() - started
            print(f"{name}_{seed}: step {step + 1}, {float(value.detach()):.3f}, {spent:.0f} s", file=sys.stderr)
    return {
        "settings": s,
        "scheme": name,
        "seed": seed,
        "samples": samples,
        "validation": loss(model, [held_out()]).mean,
        "seconds": round(time.perf_counter() - started, 1),
        "torch": torch.__version__,
    }


def factor(step: int) -> float:
    """On the learning rate: linear warm-up, then a cosine."""
    s = SETTINGS
    if step < s["warm_up"]:
        return float((step + 1) / s["warm_up"])
    done = (step - s["warm_up"]) / (s["steps"] - s["warm_up"])
    return float(s["last_rate"] + (1 - s["last_rate"]) * 0.5 * (1 + math.cos(math.pi * done)))


def fresh() -> list[dict[str, Any]]:
    """Networks of several depths before training, and what theory predicts of them."""
    import torch

    from signalprop.models import build

    torch.set_num_threads(1)
    out = []
    for name in NAMES:
        for n in FRESH:
            p = parametrization(name, n)
            statistics = held_out().statistics(p.architecture)
            out.append(
                {
                    "scheme": name,
                    "layers": n,
                    "measured": [variances(build(p, seed=seed))[0] for seed in FRESH_SEEDS],
                    "predicted": predict(p, statistics).forward["stream_out"].variance[1::2].tolist(),
                }
            )
    return out


# --- stores -----------------------------------------------------------------------------------------------------------


def stored(name: str, seed: int) -> Run | None:
    """A finished run of these settings."""
    path = RUNS / f"{name}_{seed}.json"
    run = read_json(path) if path.exists() else None
    return run if run is not None and run["settings"] == SETTINGS else None


def train_missing(minutes: float) -> bool:
    """Train what lacks; start no run after so many minutes. Whether all are there."""
    RUNS.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * minutes
    for seed in SEEDS:
        for name in NAMES:
            if stored(name, seed) is None:
                if time.monotonic() > until:
                    print("time is up: call again to go on", file=sys.stderr)
                    return False
                write_json(RUNS / f"{name}_{seed}.json", train(name, seed))
    return True


def collect() -> dict[str, Any]:
    """What docs/depth-growth.json holds."""
    runs = [run for name in NAMES for seed in SEEDS if (run := stored(name, seed)) is not None]
    return {
        "schema": SCHEMA,
        "settings": SETTINGS,
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, one thread",
        "torch": runs[0]["torch"],
        "fresh": rounded(fresh()),
        "runs": [rounded({k: v for k, v in run.items() if k not in ("settings", "torch")}) for run in runs],
    }


def rounded(value: Any) -> Any:
    """Numbers at five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


# --- the page ---------------------------------------------------------------------------------------------------------


def exponents(run: Run) -> list[float]:
    """The exponent of growth at every sample."""
    return [growth_fit(sample["variance"]).exponent for sample in run["samples"]]


def of(store: Mapping[str, Any], name: str) -> list[Run]:
    """The runs of one kind."""
    return [run for run in store["runs"] if run["scheme"] == name]


def fresh_lines(store: Mapping[str, Any]) -> list[str]:
    lines = [
        "| network, not trained | layers | exponent, mean ± sd of networks | predicted "
        "| R² of ln l / l / l² / e^l, mean | predicted |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in store["fresh"]:
        fits = [growth_fit(values) for values in row["measured"]]
        found = [fit.exponent for fit in fits]
        theory = growth_fit(row["predicted"])
        lines.append(
            f"| {NAMES[row['scheme']]} | {row['layers']} | {np.mean(found):.2f} ± {np.std(found, ddof=1):.2f} | "
            f"{theory.exponent:.2f} | {laws(fits)} | {laws([theory])} |"
        )
    return lines


def laws(fits: Sequence[GrowthFit]) -> str:
    names = ("logarithmic", "linear", "quadratic", "exponential")
    means = {name: float(np.mean([getattr(fit, name) for fit in fits])) for name in names}
    best = max(means, key=means.__getitem__)
    return " / ".join(f"**{value:.3f}**" if name == best else f"{value:.3f}" for name, value in means.items())


def run_lines(store: Mapping[str, Any]) -> list[str]:
    lines = [
        "| run | seed | loss, nats per byte | variance behind the last layer: start, peak (step), end | exponent: "
        "start, highest (step), end | alignment, layers 9 to 32: start, highest, end |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for run in store["runs"]:
        steps = [sample["step"] for sample in run["samples"]]
        last, found = [sample["variance"][-1] for sample in run["samples"]], exponents(run)
        cosines = [float(np.mean(sample["alignment"][8:])) for sample in run["samples"]]
        lines.append(
            f"| {NAMES[run['scheme']]} | {run['seed']} | {run['validation']:.3f} | {last[0]:.2f}, {max(last):.1f} "
            f"({steps[int(np.argmax(last))]}), {last[-1]:.2f} | {found[0]:.2f}, {max(found):.2f} "
            f"({steps[int(np.argmax(found))]}), {found[-1]:.2f} | {cosines[0]:.2f}, {max(cosines):.2f}, "
            f"{cosines[-1]:.2f} |"
        )
    return lines


def top(run: Run) -> dict[str, Any]:
    """The sample with the highest exponent."""
    found: dict[str, Any] = run["samples"][int(np.argmax(exponents(run)))]
    return found


def added(sample: Mapping[str, Any]) -> np.ndarray:
    """About the root mean square of what layers 2, 3, ... add, from the stream before and behind and the cosine."""
    variance, cosine = np.array(sample["variance"]), np.array(sample["alignment"])[1:]
    along = cosine * np.sqrt(variance[:-1])
    return np.asarray(np.sqrt(np.maximum(along**2 + np.diff(variance), 0.0)) - along)


def top_lines(store: Mapping[str, Any]) -> list[str]:
    lines = [
        "| run | seed | step | R² of ln l / l / l² / e^l | size of what layers 9 to 16 add | 25 to 32 "
        "| alignment there | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in store["runs"]:
        sample = top(run)
        size, cosine = added(sample), np.array(sample["alignment"])
        lines.append(
            f"| {NAMES[run['scheme']]} | {run['seed']} | {sample['step']} | {laws([growth_fit(sample['variance'])])} | "
            f"{size[7:15].mean():.3f} | {size[23:31].mean():.3f} | {cosine[8:16].mean():.2f} | "
            f"{cosine[24:32].mean():.2f} |"
        )
    return lines


def seen(store: Mapping[str, Any]) -> list[str]:
    """Every claim with the numbers that bear on it, and whether they do."""
    plain, scaled = of(store, "fixed"), of(store, "lns")
    starts = {name: [exponents(run)[0] for run in of(store, name)] for name in NAMES}
    tops = {name: [max(exponents(run)) for run in of(store, name)] for name in NAMES}
    ends = {name: [exponents(run)[-1] for run in of(store, name)] for name in NAMES}
    peaks = [growth_fit(top(run)["variance"]) for run in plain]
    first = [growth_fit(run["samples"][0]["variance"]) for run in scaled]
    pairs = zip(plain, scaled, strict=True)
    ratio = [a["samples"][-1]["variance"][-1] / b["samples"][-1]["variance"][-1] for a, b in pairs]
    return [
        said("Pre-norm starts linear", all(abs(x - 1) < 0.25 for x in starts["fixed"]), listed(starts["fixed"])),
        said(
            "Pre-norm goes towards 2 in training",
            all(1.7 < x < 2.3 for x in tops["fixed"]),
            f"highest {listed(tops['fixed'])}; back at {listed(ends['fixed'])} in the end",
        ),
        said("Pre-norm stays at or below 2", all(x <= 2 for x in tops["fixed"]), listed(tops["fixed"])),
        said(
            "Where its exponent is highest, the growth is a power and no exponential",
            all(fit.quadratic > fit.exponential for fit in peaks),
            "R² of l² against e^l: " + "; ".join(f"{fit.quadratic:.3f}, {fit.exponential:.3f}" for fit in peaks),
        ),
        said(
            "LayerNorm Scaling starts logarithmic",
            all(fit.best == "logarithmic" for fit in first),
            "R² of ln l against l: " + "; ".join(f"{fit.logarithmic:.3f}, {fit.linear:.3f}" for fit in first),
        ),
        said(
            "LayerNorm Scaling stays at or below 1",
            all(x <= 1 for x in tops["lns"]),
            f"start {listed(starts['lns'])}, highest {listed(tops['lns'])}, end {listed(ends['lns'])}",
        ),
        said(
            "LayerNorm Scaling keeps the stream smaller",
            all(x > 1 for x in ratio),
            f"variance behind layer 32 at the end {listed(ratio)} times smaller",
        ),
    ]


def said(claim: str, holds: bool, numbers: str) -> str:
    return f"- {claim}: **{'seen' if holds else 'not seen'}** ({numbers})."


def listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def page(store: Mapping[str, Any]) -> str:
    """docs/depth-growth.md."""
    s = store["settings"]
    return TEXT.format(
        **s,
        fresh="\n".join(fresh_lines(store)),
        runs="\n".join(run_lines(store)),
        tops="\n".join(top_lines(store)),
        seen="\n".join(seen(store)),
        n_bytes=f"{s['steps'] * s['batch'] * s['tokens']:,}",
        minutes=sum(run["seconds"] for run in store["runs"]) / 60,
        machine=store["machine"],
        torch=store["torch"],
    )


TEXT = """# Growth of the stream with depth, before and in training

Written by `python -m benchmarks.depth_growth` from `docs/depth-growth.json`: do not edit.

What theory says ([depth.md](theory/depth.md)): the variance of a pre-norm stream grows like layer^1 while branches are
uncorrelated with the stream, as fresh ones are, and like layer^2 where like branches all point along it; with
LayerNorm Scaling like ln(layer), and like layer^1. What the paper says (Sun et al. 2025): exponentially.

The exponent is the slope of ln(variance) against ln(layer) over the deeper three quarters (`growth_exponent` of
`signalprop.theory.bounds`). Variance: over the features of a token, mean over tokens, of the stream behind a layer. R²
are those of straight lines, of the variance against ln(layer) and against the layer, of its root and of its logarithm
against the layer; the best is bold.

## Before training

Llama layers, width {width}, {heads} heads, feed-forward {feed_forward}, weights of standard deviation {std} (as much
per feature as 0.02 at width 768), embeddings {embedding_std}; {windows} windows of {tokens} bytes of the embedded text.

{fresh}

A pre-norm exponent a little above 1 is no alignment, as the prediction shows, which knows of none: tokens grow alike
with depth, so attention averages less away, and later branches are larger than earlier ones. A logarithm has no
exponent of its own; over a finite range it looks like a small power, smaller the deeper the stack.

## In training

{layers} layers, {steps} steps of {batch} x {tokens} bytes of the embedded text ({n_bytes} bytes), AdamW without decay,
learning rate {rate:g}, {warm_up} steps of warm-up, a cosine to {last_rate} of it, no clipping. Alignment: cosine
between what a layer adds and the stream that it meets, mean over tokens and layers.

{runs}

![Exponent over steps, and variance over layers](pictures/depth-growth.png)

What is seen, seed by seed:

{seen}

At the step of the highest exponent (last two columns: layers 9 to 16, and 25 to 32):

{tops}

2 and 1 are what *like* layers reach at most, fully aligned, in the limit of depth. Trained layers are not alike: the
pre-norm ones add more the deeper they are and are more aligned, too, which is how a curve over a finite range gets
steeper than its law. An exponential fits worse than a power or a line in every run.

## What this does not show

Networks of 1.6 million parameters and a few hundred steps: exponents and ratios of variance are claims about mechanism
and show at this size. Whether LayerNorm Scaling lowers the loss of a large model does not: at one learning rate for
both it also makes smaller effective steps in deep layers, and the loss column above says nothing about that.

{minutes:.0f} minutes of one core; {machine}, PyTorch {torch}.
"""


def picture(store: Mapping[str, Any]) -> bytes:
    """Left: exponent over steps. Right: variance over layers at the start, at its highest exponent, and at the end."""
    from matplotlib.figure import Figure

    from signalprop.report.plots import COLOURS

    canvas = Figure(figsize=(11, 4.4), dpi=100, layout="constrained")
    left, right = canvas.subplots(1, 2)
    for name, colour in zip(NAMES, COLOURS, strict=False):
        for k, run in enumerate(of(store, name)):
            steps = [sample["step"] for sample in run["samples"]]
            left.plot(steps, exponents(run), color=colour, label=NAMES[name] if k == 0 else None)
        run = of(store, name)[0]
        top = int(np.argmax(exponents(run)))
        for index, style in ((0, ":"), (top, "-"), (-1, "--")):
            sample = run["samples"][index]
            values = sample["variance"]
            right.plot(
                np.arange(1, len(values) + 1),
                values,
                style,
                color=colour,
                label=f"{NAMES[name]}, step {sample['step']}",
            )
    for value in (0, 1, 2):
        left.axhline(value, color="0.5", linewidth=0.8, linestyle=":")
    left.set_xlabel("step")
    left.set_ylabel("exponent of the stream's variance")
    right.set_xlabel("layer")
    right.set_ylabel("variance of the stream (first seed)")
    right.set_xscale("log")
    right.set_yscale("log")
    for panel in (left, right):
        panel.grid(alpha=0.3, linewidth=0.6)
        panel.legend(fontsize=8)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png")
    return buffer.getvalue()


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--page", action="store_true", help="only write the page from docs/depth-growth.json")
    arguments = parser.parse_args()
    if not arguments.page:
        if not train_missing(arguments.minutes):
            return
        write_json(STORE, collect())
    store = read_json(STORE)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(PICTURE, picture(store))
    write_text(PAGE, page(store))
    print(f"wrote {PAGE}: {len(store['runs'])} runs", file=sys.stderr)


if __name__ == "__main__":
    main()
