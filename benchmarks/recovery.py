"""What networks do above the early edge: their signal while they train at rates that collapse it in the first steps.

python -m benchmarks.recovery    # run what has no row yet; `python -m benchmarks.first_steps --page` writes the section
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

import signalprop as sp
from benchmarks.first_steps import FOLDER, VOCABULARY, batch_of, network, text
from benchmarks.timing import table
from signalprop.files.storage import read_json, write_json
from signalprop.models.transformer import batch_tensors

ROWS, EDGES = FOLDER / "recovery-rows.json", FOLDER / "edge-rows.json"
NETWORKS = (("xavier", "pre"), ("xavier", "post"), ("deepscalelm", "post"), ("lns", "pre"))
LAYERS, WIDTH = 12, 64
TIMES = (4, 32, 256)  # the measured edge
SEEDS = (0, 1)
STEPS, WARMUP, EVERY, ENDS_RATE = 150, 8, 5, 5e-3
LEARNT = 0.1  # nats below the plateau


def edge_of(name: str, norm: str) -> float:
    """The measured early edge, geometric mean over seeds."""
    cell, keys = (name, norm, LAYERS, WIDTH), ("scheme", "norm", "layers", "width")
    rates = [r["edge"] for r in read_json(EDGES)["rows"] if r["edge"] and tuple(r[k] for k in keys) == cell]
    return float(np.exp(np.mean(np.log(rates))))


def unlike(hidden: torch.Tensor) -> float:
    """1 - the correlation of two tokens of a sequence, mean over pairs: (sequences, tokens, features)."""
    x = hidden.double()
    n, own, both = x.shape[1], (x**2).sum((1, 2)), (x.sum(1) ** 2).sum(1)
    return float(1 - ((both - own) / (n - 1)).sum() / own.sum())


def tensors_of(a: sp.Architecture, seed: int) -> dict[str, Any]:
    """A batch of the embedded text."""
    return {k: v for k, v in batch_tensors(batch_of(a, seed)).items() if v is not None}


def one_run(name: str, norm: str, times: float, seed: int) -> dict[str, Any]:
    """A training of 150 steps, 8 of warm-up; embeddings and head at a rate of their own.

    Every 5 steps, on text that is not trained on: 1 - token correlation of the last stream, and the gradient of the
    first sublayer's output over that of the last one's (root mean squares).
    """
    a, rate = network(LAYERS, WIDTH, norm), times * edge_of(name, norm)
    model = sp.build(sp.scheme(name)(a, batch_of(a, 99, 64).statistics(a)), seed=seed)
    inside = {id(x) for sublayer in model.sublayers() for x in sublayer.parameters()}
    groups = [
        {"params": [p for p in model.parameters() if (id(p) in inside) == mine], "lr": value}
        for mine, value in ((True, rate), (False, ENDS_RATE))
    ]
    rule = torch.optim.Adam(groups, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(rule, lambda k: min((k + 1) / WARMUP, 1.0))
    shown, signal, gradients, losses = tensors_of(a, 10**6 + seed), [], [], []
    for k in range(STEPS + 1):
        if k % EVERY == 0:
            apart, ratio = state(model, shown)
            signal.append(apart)
            gradients.append(ratio)
        if k < STEPS:
            loss = model(**tensors_of(a, 1000 * (seed + 1) + k)).loss
            rule.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            rule.step()
            schedule.step()
            losses.append(loss.item())
    return {"scheme": name, "norm": norm, "times": times, "seed": seed, "rate": rate, "signal": signal,
            "gradient": gradients, "loss": sum(losses[-20:]) / 20}  # fmt: skip


def state(model: Any, shown: dict[str, Any]) -> tuple[float, float]:
    """1 - token correlation of the last stream; gradient at the first sublayer's output over that at the last one's."""
    kept: list[Any] = []
    sublayers = model.sublayers()
    handles = [s.register_forward_hook(lambda _m, _g, out: kept.append(out)) for s in (sublayers[0], sublayers[-1])]
    out = model(**shown)
    for handle in handles:
        handle.remove()
    first, last = (g.double().pow(2).mean().sqrt() for g in torch.autograd.grad(out.loss, kept))
    return unlike(out.hidden.detach()), float(first / last)


def run_all() -> None:
    """Run what has no row yet; each row is written when it ends."""
    rows = read_json(ROWS)["rows"] if ROWS.is_file() else []
    done = {(r["scheme"], r["norm"], r["times"], r["seed"]) for r in rows}
    for seed in SEEDS:
        for name, norm in NETWORKS:
            for times in TIMES:
                if (name, norm, times, seed) not in done:
                    rows.append(one_run(name, norm, times, seed))
                    write_json(ROWS, {"schema": "signalprop/recovery-rows/1", "rows": rows})


SECTION = """\
## Above the edge

What trains at rates that collapse the signal in the first steps, and what does not: networks of {layers} layers and
width {width}, the layers' rate at multiples of the measured early edge, {warmup} steps of warm-up and then the same
rate to step {steps}, embeddings and head at {ends:g}; seeds of each: {seeds}; geometric means. An observation: nothing
was predicted. *Least* and *last*: 1 - token correlation of the last stream on other text than is trained on, relative
to the fresh network; *gradient*: at the first sublayer over that at the last one, when least (1e-12: that or less).
*Learns*: the mean loss of the last 20 steps is .1 nats below counting words ({plateau:.2f})."""


def plateau() -> float:
    """Entropy of the words of the text, nats."""
    shares = np.bincount(text(), minlength=VOCABULARY) / len(text())
    return float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())


def found() -> list[tuple[tuple[str, str, float], list[dict[str, Any]]]]:
    """The runs of every network and multiple, in order."""
    rows = read_json(ROWS)["rows"] if ROWS.is_file() else []
    keys = [(*network, times) for network in NETWORKS for times in TIMES]
    by_key = {key: [r for r in rows if (r["scheme"], r["norm"], r["times"]) == key] for key in keys}
    return [(key, runs) for key, runs in by_key.items() if runs]


def section() -> str:
    """The part of docs/first-steps.md about it; empty before anything has been run."""
    groups, chance = found(), plateau()
    if not groups:
        return ""
    rows = []
    for (name, norm, times), runs in groups:
        least = [int(np.nanargmin(r["signal"])) for r in runs]
        told = [
            _mean([r["signal"][k] / r["signal"][0] for r, k in zip(runs, least, strict=True)]),
            _mean([r["signal"][-1] / r["signal"][0] for r in runs]),
            _mean([r["gradient"][k] for r, k in zip(runs, least, strict=True)]),
        ]
        steps = ", ".join(str(k * EVERY) for k in least)
        learnt = sum(r["loss"] < chance - LEARNT for r in runs)
        loss = f"{np.mean([r['loss'] for r in runs]):.2f}"
        rate = f"{np.mean([r['rate'] for r in runs]):.1e}"
        rows.append([f"`{name}`", norm, f"{times:g}", rate, f"{told[0]:.1e}", steps, f"{told[1]:.1e}",
                     f"{told[2]:.1e}", loss, f"{learnt} of {len(runs)}"])  # fmt: skip
    seeds = " or ".join(str(n) for n in sorted({len(runs) for _, runs in groups}))
    lead = SECTION.format(layers=LAYERS, width=WIDTH, warmup=WARMUP, steps=STEPS, ends=ENDS_RATE, seeds=seeds,
                          plateau=chance)  # fmt: skip
    header = ["scheme", "norm", "times the edge", "rate", "least", "at step", "last", "gradient", "loss", "learns"]
    by_kind = {kind: [r for key, runs in groups if key[:2] == kind for r in runs] for kind in NETWORKS}
    back = "; ".join(_back(kind, runs) for kind, runs in by_kind.items() if runs)
    lead += f"\n\nThe signal comes back to a tenth of the fresh network's or more: {back}."
    shown = "![1 - token correlation over the steps](first-steps/recovery.svg)"
    return "\n\n".join([lead, shown, table(header, rows)])


def _back(kind: tuple[str, str], runs: list[dict[str, Any]]) -> str:
    back = sum(r["signal"][-1] > 0.1 * r["signal"][0] for r in runs)
    return f"`{kind[0]}`, {kind[1]}: {back} of {len(runs)}"


def _mean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(np.maximum(values, 1e-12)))))


def picture() -> None:
    """first-steps/recovery.svg: 1 - token correlation over the steps, a panel per network."""
    groups = found()
    if not groups:
        return
    plt.rcParams["svg.hashsalt"] = "recovery"
    figure, panels = plt.subplots(1, len(NETWORKS), figsize=(10, 3), layout="constrained", sharey=True)
    for axes, kind in zip(panels, NETWORKS, strict=True):
        for (name, norm, times), runs in groups:
            if (name, norm) == kind:
                lines = np.array([r["signal"] for r in runs]).T
                colour = f"C{TIMES.index(times)}"
                axes.plot(np.arange(len(lines)) * EVERY, np.maximum(lines, 1e-8), color=colour, linewidth=0.9)
                axes.plot([], [], color=colour, label=f"{times:g} times the edge")
        axes.set(yscale="log", title=", ".join(kind), xlabel="step")
    panels[0].set_ylabel("1 - token correlation")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(TIMES))
    figure.savefig(FOLDER / "recovery.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all()
