"""What small trained models show of three results of Transformers Get Stable: figures 5-6 and 9-10, and table 12.

    python -m benchmarks.trained [--runs DIR] [--out docs/results] [--steps N]

Decoders of 48 layers and width 64 are trained with the recipe `bytes-decoder` where DIR does not hold them yet (a
minute each, at the best learning rates of the sweep tgs-tab11), then read back from their final checkpoints. Written:
tgs-fig5-6, tgs-fig9-10 and tgs-tab12, each as a page (.md) and as the numbers behind it (.json). `--pages` writes the
pages anew from the numbers.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from signalprop.attachment.families import mapping_for
from signalprop.attachment.parametrization_of import read_parametrization
from signalprop.data.batches import Batch
from signalprop.diagnosis.casts import casts
from signalprop.diagnosis.stream import loss
from signalprop.files.storage import read_json, write_json, write_text
from signalprop.measurement.measuring import measure
from signalprop.network.layout import layer_starts, layout
from signalprop.network.moments import FloatArray
from signalprop.prediction import predict
from signalprop.repair import load
from signalprop.results.comparison import relative_errors
from signalprop.results.profile import Profile
from signalprop.watching.recording import evaluating
from signalprop_lab.training.examples import Ordered, Prepared, as_batch, collate
from signalprop_lab.training.networks import network_of
from signalprop_lab.training.recipe import Recipe, load_recipe
from signalprop_lab.training.run import environment, train
from signalprop_lab.training.tables import CONFIRMED, CONTRADICTED, INVISIBLE, NONE, STALLED, markdown_table, wrapped
from signalprop_lab.training.tasks import prepare

SCHEMA = "signalprop/trained/1"
SEEDS = (0, 1)
LAYERS = 48
SEQUENCES, PER_BATCH = 128, 16  # of validation data
FORMATS = {"float8_e5m2": "E5M2", "float8_e4m3fn": "E4M3"}
CLOSE = 0.25  # a median relative error up to here counts as "still fits"
CONSERVED = 3.0  # a gradient that changes by no more than this factor through the network counts as conserved
VANISHED = 0.1  # and one that falls to this share or below as vanished


@dataclass(frozen=True)
class Cell:
    """A network, and its learning rate: the best one of the sweep tgs-tab11 for its method, or DeepScaleLM's."""

    rate: float
    settings: tuple[str, ...]


_POST, _PRE = "model.architecture.norm_placement=post", "model.architecture.norm_placement=pre"
CELLS = {
    "post-ln": Cell(3e-4, ("model.scheme=xavier", _POST)),
    "pre-ln": Cell(1e-2, ("model.scheme=xavier", _PRE)),
    "pre-ln-slow": Cell(3e-4, ("model.scheme=xavier", _PRE)),
    "deepscalelm": Cell(3e-4, ("model.scheme=deepscalelm", _POST)),
    "deepscalelm-k4.8": Cell(3e-4, ("model.scheme=deepscalelm", _POST, "model.options={k: 4.8}")),
    "deepscalelm-k1": Cell(3e-4, ("model.scheme=deepscalelm", _POST, "model.options={k: 1.0}")),
}
WORDS = {
    "post-ln": "Post-LN, Xavier",
    "pre-ln": "Pre-LN, Xavier",
    "pre-ln-slow": "Pre-LN, Xavier, at the rate of DeepScaleLM",
    "deepscalelm": "DeepScaleLM, Post-LN, β² = 2/N",
    "deepscalelm-k4.8": "DeepScaleLM, Post-LN, λ² = 0.9, β² = 0.1",
    "deepscalelm-k1": "DeepScaleLM, Post-LN, β² = 1/N",
}


# --- training ---------------------------------------------------------------------------------------------------------


def recipe_of(name: str, seed: int, steps: int | None) -> Recipe:
    """What is trained for a cell."""
    cell = CELLS[name]
    settings = [*cell.settings, f"optimizer.learning_rate={cell.rate:g}", f"seed={seed}", f"name={name}"]
    return load_recipe("bytes-decoder", [*settings, *([] if steps is None else [f"budget.steps={steps}"])])


def trained(name: str, seed: int, runs: Path, steps: int | None) -> dict[str, Any]:
    """The result of a run, which is trained where it is missing."""
    folder = runs / f"{name}-seed{seed}"
    result = train(recipe_of(name, seed, steps), folder, resume=True, progress=False)
    print(f"{name}, seed {seed}: {result.status}, validation loss {result.eval_loss}", flush=True)
    return result.to_json() | {"folder": str(folder), "rate": CELLS[name].rate, "seed": seed}


# --- reading ----------------------------------------------------------------------------------------------------------


def validation(prepared: Prepared) -> list[Batch]:
    """Batches of validation data."""
    examples = Ordered(prepared.validation, min(SEQUENCES, len(prepared.validation)), 0, shuffle=False)
    rows = [examples[i] for i in range(len(examples))]
    return [
        as_batch(collate(rows[i : i + PER_BATCH], prepared.pads), prepared.source)
        for i in range(0, len(rows), PER_BATCH)
    ]


def chance(prepared: Prepared, batches: Sequence[Batch]) -> float:
    """Loss of the best guess that reads no input, on these batches."""
    asked = np.concatenate([batch.targets.ravel() for batch in batches])
    return prepared.chance(asked[asked >= 0])


def fit(model: nn.Module, batches: Sequence[Batch]) -> dict[str, Any]:
    """Prediction from the weights that a model has now, beside a measurement on the same data.

    The gradient is taken relative to the one at the last sublayer: its size is that of the loss, which no table of
    weights knows. Errors are relative, over the sublayers.
    """
    whole = _joined(batches)
    with evaluating(model):
        measured = measure(model, whole)
    table = read_parametrization(model)
    predicted = predict(table, whole.statistics(table.architecture))
    forward = relative_errors(predicted.forward["stream_out"], measured.forward["stream_out"])[0]
    ours, seen = gradient(predicted), gradient(measured)
    return {
        "forward_error": float(np.median(forward)),
        "forward_error_95": float(np.percentile(forward, 95)),
        "gradient_error": float(np.median(np.abs(np.expm1(ours - seen)))),
        "gradient_error_95": float(np.percentile(np.abs(np.expm1(ours - seen)), 95)),
        "forward": {"predicted": _layers(predicted), "measured": _layers(measured)},
        "gradient": {"predicted": np.exp(ours[_starts(predicted)]), "measured": np.exp(seen[_starts(measured)])},
    }


def gradient(profile: Profile) -> FloatArray:
    """ln of the gradient's variance at the input of every sublayer, less that at the last one."""
    assert profile.gradient is not None
    series = profile.gradient["stream_in"].log_variance
    return np.asarray(series - series[-1])


def eight_bits(model: nn.Module, batches: Sequence[Batch]) -> dict[str, Any]:
    """Validation loss of a model, and what casting weights and activations of its maps to FP8 adds, in nats."""
    mapping = mapping_for(model, None)
    whole = loss(model, batches, mapping=mapping)
    found = casts(model, batches, mapping, formats=tuple(FORMATS), scaled=(False,), whole=whole)
    return {"loss": whole.mean} | {f"{FORMATS[item.format]} {item.of}": item.increase.value for item in found}


def _joined(batches: Sequence[Batch]) -> Batch:
    tokens, targets = (np.concatenate([getattr(b, name) for b in batches]) for name in ("tokens", "targets"))
    return Batch(tokens=tokens, targets=targets, source=batches[0].source)


def _starts(profile: Profile) -> list[int]:
    return [int(i) for i in layer_starts(layout(profile.architecture))]


def _layers(profile: Profile) -> FloatArray:
    return profile.forward["stream_out"].variance[1::2]


def read(name: str, result: Mapping[str, Any], steps: int | None) -> dict[str, Any]:
    """All numbers of a run."""
    recipe = recipe_of(name, result["seed"], steps)
    prepared = prepare(recipe)
    batches = validation(prepared)
    start, end = network_of(recipe, prepared).base, load(Path(result["folder"]) / "final")
    keys = ("status", "steps", "train_loss", "eval_loss", "rate", "seed")
    return {key: result[key] for key in keys} | {
        "cell": name,
        "chance": chance(prepared, batches),
        "start": fit(start, batches),
        "end": fit(end, batches),
        "fp8": eight_bits(end, batches),
    }


def collect(runs: Path, steps: int | None) -> dict[str, Any]:
    """Train what is missing, and read it."""
    rows = [read(name, trained(name, seed, runs, steps), steps) for name in CELLS for seed in SEEDS]
    example = load_recipe("bytes-decoder", [] if steps is None else [f"budget.steps={steps}"])
    return {
        "schema": SCHEMA,
        "environment": {key: environment()[key] for key in ("versions", "machine", "device", "git")},
        "recipe": example.to_json(),
        "rows": rows,
    }


# --- pages ------------------------------------------------------------------------------------------------------------


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean over seeds and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def shown(values: Sequence[float], digits: int = 3) -> str:
    """A mean with its standard error."""
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}g} ± {error:.2g}"


def of(store: Mapping[str, Any], cell: str, value: Callable[[Mapping[str, Any]], float]) -> list[float]:
    """A number of every run of a cell."""
    return [value(row) for row in store["rows"] if row["cell"] == cell]


def learnt(store: Mapping[str, Any], cell: str) -> bool:
    """Whether every run of a cell ends below chance."""
    return all(row["fp8"]["loss"] < row["chance"] - STALLED for row in store["rows"] if row["cell"] == cell)


def losses(store: Mapping[str, Any], cells: Sequence[str]) -> str:
    """How well the runs have trained."""
    lines = []
    for cell in cells:
        rows = [row for row in store["rows"] if row["cell"] == cell]
        lines.append(
            [
                WORDS[cell],
                f"{rows[0]['rate']:g}",
                shown([row["fp8"]["loss"] for row in rows], 4),
                f"{rows[0]['chance']:.4g}",
                "yes" if learnt(store, cell) else "no: at chance or above",
            ]
        )
    return markdown_table(["network", "learning rate", "validation loss", "chance", "has learnt"], lines)


def figures_5_6(store: Mapping[str, Any]) -> tuple[str, str, str, list[str]]:
    """(title, claim, verdict, body) of the page."""
    cells = ("pre-ln", "pre-ln-slow", "post-ln", "deepscalelm")
    lines, told = [], []
    for cell in cells:
        for what in ("forward", "gradient"):
            at = [of(store, cell, lambda row, t=t, w=what: row[t][f"{w}_error"]) for t in ("start", "end")]
            worst = of(store, cell, lambda row, w=what: row["end"][f"{w}_error_95"])
            lines.append([WORDS[cell], what, *(shown(x) for x in at), shown(worst)])
            if cell in ("pre-ln", "pre-ln-slow") or what == "gradient":  # a norm behind every layer fixes the variance
                good = statistics.fmean(at[1]) <= CLOSE
                told.append(f"- {WORDS[cell]}, {what}: **{CONFIRMED if good else CONTRADICTED}**")
    header = ["network", "signal", "median error at the start", "after training", "95th percentile after training"]
    profiles = [["network", "signal", "layer 1", "layer 12", "layer 24", "layer 36", "layer 48"]]
    for cell in cells:
        for what in ("forward", "gradient"):
            for kind in ("predicted", "measured"):
                series = np.mean([row["end"][what][kind] for row in store["rows"] if row["cell"] == cell], axis=0)
                chosen = [f"{series[i]:.3g}" for i in (0, 11, 23, 35, 47)]
                profiles.append([WORDS[cell], f"{what}, {kind}", *chosen])
    verdict = "\n".join(told)
    return (
        "Predictions from the weights of trained models",
        "Transformers Get Stable, figures 5 and 6 (section 2.5): after 150 000 steps (64 layers, 30B parameters) the "
        "gradient, and after 100 000 steps (48 layers of width 1024) the forward variance of a Pre-LN model still "
        "follow the theory.",
        verdict,
        [
            f"Criterion: the median relative error over the sublayers is at most {CLOSE:.0%} after training, on "
            f"average over the seeds; for the variance of the stream behind every sublayer, and for that of the "
            "gradient relative to the gradient at the last sublayer. The variance behind a Post-LN layer decides "
            "nothing, since a norm sets it.",
            markdown_table(header, lines),
            "Variance of the stream behind layers, and of the gradient at their input, after training; means over "
            "the seeds:",
            markdown_table(profiles[0], profiles[1:]),
            "What a prediction knows of trained weights is the root mean square of every matrix, bias and gain "
            "(`read_parametrization`), and that of fresh weights with these sizes: directions that training has given "
            "them, so that branches add up, are not in it.",
            losses(store, cells),
        ],
    )


def figures_9_10(store: Mapping[str, Any]) -> tuple[str, str, str, list[str]]:
    """As above."""
    cells = ("deepscalelm-k4.8", "deepscalelm", "deepscalelm-k1")
    lines = []
    first: dict[str, list[float]] = {}
    for cell in cells:
        at = {t: of(store, cell, lambda row, t=t: row[t]["gradient"]["measured"][0]) for t in ("start", "end")}
        first[cell] = at["end"]
        middle = of(store, cell, lambda row: row["end"]["gradient"]["measured"][LAYERS // 2])
        lines.append([WORDS[cell], shown(at["start"]), shown(at["end"]), shown(middle)])
    vanishes = max(first["deepscalelm-k4.8"]) <= VANISHED
    kept = [all(1 / CONSERVED <= x <= CONSERVED for x in first[cell]) for cell in cells[1:]]
    lower = max(first["deepscalelm-k4.8"]) < min(first["deepscalelm-k1"])
    parts = [
        ("vanishes with λ² = 0.9, β² = 0.1", vanishes, "" if vanishes or not lower else INVISIBLE),
        ("is conserved with β² = 2/N", kept[0], ""),
        ("is conserved with β² = 1/N", kept[1], ""),
    ]
    words = [f"- {text}: **{CONFIRMED if good else other or CONTRADICTED}**" for text, good, other in parts]
    return (
        "Gradient after training under three residual weights",
        "Transformers Get Stable, figures 9 and 10 (v1 appendix H.2): after 50 000 steps the gradient vanishes "
        "exponentially with depth with fixed λ² = 0.9, β² = 0.1, and is conserved with λ² = 1 - 1/N, β² = 1/N. Both "
        "conserve it at initialisation.",
        "\n".join(words),
        [
            f"Criterion, after training and for every seed: vanished is a gradient at the input of layer 1 of at most "
            f"{VANISHED:g} of that at the last sublayer (variances); conserved is one within a factor of "
            f"{CONSERVED:g}. Where β² = 0.1 has not vanished, but is below β² = 1/N for every seed: not visible at "
            "this scale.",
            "Variance of the gradient relative to that at the last sublayer, on validation data:",
            markdown_table(["network", "layer 1, at the start", "layer 1, trained", "layer 25, trained"], lines),
            losses(store, cells),
        ],
    )


def table_12(store: Mapping[str, Any]) -> tuple[str, str, str, list[str]]:
    """As above."""
    cells = ("post-ln", "pre-ln", "pre-ln-slow", "deepscalelm")
    keys = [f"{form} {part}" for form in FORMATS.values() for part in ("both", "weights")]
    found = {cell: {key: of(store, cell, lambda row, k=key: row["fp8"][k]) for key in keys} for cell in cells}
    lines = [
        [WORDS[cell], shown(of(store, cell, lambda row: row["fp8"]["loss"]), 4), *(shown(found[cell][k]) for k in keys)]
        for cell in cells
    ]
    parts = []
    for form in FORMATS.values():
        for cell in cells[:-1]:
            if not learnt(store, cell):
                parts.append(f"- {form}, DeepScaleLM loses less than {WORDS[cell]}: **{NONE}**: that has not learnt")
                continue
            (a, ea), (b, eb) = (mean_and_error(found[name][f"{form} both"]) for name in (cell, "deepscalelm"))
            error = math.hypot(ea, eb)
            kind = CONFIRMED if a - b > 2 * error else CONTRADICTED if b - a > 2 * error else INVISIBLE
            parts.append(
                f"- {form}, DeepScaleLM loses less than {WORDS[cell]}: **{kind}** ({b:.4f} against {a:.4f} nats, "
                f"standard error of the difference {error:.4f})"
            )
    return (
        "Direct cast to FP8",
        "Transformers Get Stable, table 12 (BERT, 48 layers of width 512, Post-LN): cast to E5M2 the baseline's "
        "perplexity goes from 14.8 to 42.5 (1.05 nats) and that of DeepScaleLM from 13.1 to 21.4 (0.49 nats); to E4M3 "
        "to 16.5 (0.11) and 13.9 (0.06).",
        "\n".join(parts),
        [
            "Criterion: the loss that the cast adds, in nats per token, is smaller by more than two standard errors "
            "of the difference (over the seeds). Cast are the weights of all linear maps of the layers and what these "
            "maps read, without a scale; the paper does not say what it casts, so the weights alone stand beside it. "
            "The paper's baseline is Post-LN; where that does not train, Pre-LN is all there is to compare with.",
            markdown_table(
                ["network", "loss", *(f"added: {key.replace('both', 'weights and activations')}" for key in keys)],
                lines,
            ),
            losses(store, cells),
        ],
    )


PAGES = {"tgs-fig5-6": figures_5_6, "tgs-fig9-10": figures_9_10, "tgs-tab12": table_12}


def page(store: Mapping[str, Any], name: str) -> str:
    """Markdown: the claim, what was run, the verdict, the numbers."""
    title, claim, verdict, body = PAGES[name](store)
    recipe, versions = store["recipe"], store["environment"]["versions"]
    shape, data = recipe["model"]["architecture"], recipe["data"]
    budget = recipe["budget"]
    run = (
        f"Causal decoders of {shape['n_layers']} layers, width {shape['d_model']} and {shape['n_heads']} heads read "
        f"the State of the Union addresses byte by byte: {budget['steps']} steps of {budget['batch_size']} sequences "
        f"of {data['seq_len']} bytes (recipe `bytes-decoder`), seeds {', '.join(map(str, SEEDS))}, the same "
        "embeddings and head for all. Learning rates are the best ones of the methods in the sweep tgs-tab11; the "
        "other networks have DeepScaleLM's. "
        f"Measured on {SEQUENCES} sequences of validation data. PyTorch {versions.get('torch')}, "
        f"{store['environment']['machine']}. ±: standard error over the seeds."
    )
    parts = [
        f"# {title}",
        f"Written by `python -m benchmarks.trained` from `{name}.json`: do not edit.",
        "## The claim",
        claim,
        "## What was run",
        run,
        "## Verdict",
        verdict,
        "## Numbers",
        *body,
    ]
    return "\n\n".join(wrapped(part) for part in parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/trained"), help="where the runs are, or go")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="where the pages go")
    parser.add_argument("--steps", type=int, help="of every run (default: the recipe's)")
    parser.add_argument("--pages", action="store_true", help="only write the pages anew")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # vanishing gradients would make every step slow
    store = None if options.pages else collect(options.runs, options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        file = options.out / f"{name}.json"
        if store is not None:
            write_json(file, reduced(store, name))
        write_text(options.out / f"{name}.md", page(read_json(file), name))


def reduced(store: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a page is made of."""
    left_out = ("start", "end") if name == "tgs-tab12" else ()
    rows = [{key: _plain(value) for key, value in row.items() if key not in left_out} for row in store["rows"]]
    return {**store, "rows": rows}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return [float(f"{x:.5g}") for x in value.tolist()]
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
