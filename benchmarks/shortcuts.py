"""Training 36 layers without skips and norms: writes docs/shortcuts.md, docs/shortcuts.json and a picture.

    python -m benchmarks.shortcuts                # train what is missing (an hour or two on one core)
    python -m benchmarks.shortcuts --minutes 30   # start no run after that time; the next call goes on
    python -m benchmarks.shortcuts --page         # only write the page from docs/shortcuts.json

Small decoders read the embedded text byte by byte. All see the same batches; for each method the learning rate is
searched on the grid 1, 3 x 10^n until the best one has neighbours on both sides, then refined on 1, 2, 3, 5 x 10^n.
Every finished run is kept in out/shortcuts, so that a call that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import io
import math
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from signalprop.data.batches import Batch, load_text, windows
from signalprop.files.storage import read_json, write_bytes, write_json, write_text
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics, IntArray
from signalprop.network.parametrization import Parametrization, role_mask
from signalprop.schemes import scheme

PAGE, STORE, PICTURE = Path("docs/shortcuts.md"), Path("docs/shortcuts.json"), Path("docs/pictures/shortcuts.png")
RUNS = Path("out/shortcuts")
SCHEMA = "signalprop/shortcuts/1"

# What every run has in common; a stored run with other numbers is not used.
SETTINGS: dict[str, Any] = {
    "layers": 36, "width": 64, "heads": 2, "tokens": 64, "vocabulary": 256,
    "steps": 200, "warm_up": 20, "batch": 4, "clip": 0.1, "embedding_rate": 1e-3, "smoothing": 0.03,
    "stretches": 200, "validation_every": 10, "validation_windows": 128,
}  # fmt: skip
SEEDS = (0, 1)
CURVE_EVERY = 10  # steps between two points of a stored curve
GRID = tuple(float(f"{m}e{n}") for n in range(-7, 1) for m in (1, 2, 3, 5))
COARSE = tuple(rate for rate in GRID if f"{rate:e}"[0] in "13")

Make = Callable[[Architecture, InputStatistics], Parametrization]
Run = Mapping[str, Any]


# --- what is trained --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """One kind of network.

    Attributes:
        name: key in the stores. what: its row on the page. make: its numbers. starts: the first learning rates.
        group: `main`, the comparison of methods; `question`, the open question; `longer`, the plateau after more steps;
            `default`, other targets of the kernel.
        longer: how many times the steps of the others.
    """

    name: str
    what: str
    make: Make
    starts: tuple[float, ...] = (3e-4, 1e-3, 1e-4)
    group: str = "main"
    longer: int = 1


def architecture() -> Architecture:
    """The decoder of all runs, before a scheme chooses norms and activation."""
    return Architecture(
        kind="decoder",
        n_layers=SETTINGS["layers"],
        d_model=SETTINGS["width"],
        n_heads=SETTINGS["heads"],
        vocab_size=SETTINGS["vocabulary"],
        seq_len=SETTINGS["tokens"],
        positions="rotary",
        norm="rmsnorm",
        bias=False,
    )


def ordinary(*, norm: bool, skips: bool = False, activation: str = "auto") -> Make:
    """Ordinary attention, with weights, embeddings and activation as the shaped schemes have them."""

    def make(a: Architecture, inputs: InputStatistics) -> Parametrization:
        table = scheme("value-skipinit", norm=norm, activation=activation)(a, inputs)
        one = np.ones(len(table.skip))
        attention = role_mask(table.architecture, "query")
        table = table.with_columns(
            value_skip=0 * one,
            attention_gain=one,
            skip=float(skips) * one,
            branch=one,
            weight__query=np.where(attention, table.weights["key"], 0.0),
        )
        return replace(table, scheme="ordinary", options={}, attention_trainable=False)

    return make


def shaped(name: str, **options: Any) -> Make:
    """A registered scheme with options."""
    return lambda a, inputs: scheme(name, **options)(a, inputs)


METHODS = (
    Method("e-spa", "E-SPA, γ_L = 0.2", shaped("e-spa", gamma=0.2)),
    Method("value-skipinit", "Value-SkipInit", shaped("value-skipinit")),
    Method("pre-ln", "Pre-LN: skips, norms, GeLU", ordinary(norm=True, skips=True, activation="keep")),
    Method("u-spa", "U-SPA, ρ_L = 0.6", shaped("u-spa", rho=0.6)),
    Method("plain", "plain: no skips, no norms", ordinary(norm=False)),
    Method("plain-norm", "plain with norms, no skips", ordinary(norm=True)),
    Method("gelu", "rows as they are", shaped("e-spa", gamma=0.2, activation="keep"), group="question"),
    Method(
        "gelu-calibrated",
        "rows calibrated",
        shaped("e-spa", gamma=0.2, activation="keep", calibrated=True),
        group="question",
    ),
    Method("plain-longer", "without norms", ordinary(norm=False), (1e-4,), group="longer", longer=5),
    Method("plain-norm-longer", "with norms", ordinary(norm=True), (3e-4,), group="longer", longer=5),
    Method("e-spa-0.005", "E-SPA, γ_L = 0.005", shaped("e-spa"), group="default"),
    Method("u-spa-0.8", "U-SPA, ρ_L = 0.8", shaped("u-spa"), group="default"),
)


# --- the text ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def text() -> tuple[IntArray, IntArray]:
    """Bytes for training and for validation: every tenth of 200 equal stretches of the embedded text is the latter."""
    data = np.frombuffer(load_text().encode(), np.uint8).astype(np.int64)
    stretches = np.array_split(data, SETTINGS["stretches"])
    every = SETTINGS["validation_every"]
    held_out = [part for i, part in enumerate(stretches) if i % every == 0]
    return np.concatenate([part for i, part in enumerate(stretches) if i % every]), np.concatenate(held_out)


def references() -> dict[str, float]:
    """Losses of counting, in nats per byte of the validation text: bytes alone, and given the byte before.

    Counts are those of the training text, plus one half.
    """
    train, held_out = text()
    n = SETTINGS["vocabulary"]
    single = np.bincount(train, minlength=n) + 0.5
    pairs = np.full((n, n), 0.5)
    np.add.at(pairs, (train[:-1], train[1:]), 1.0)
    single, pairs = np.log(single / single.sum()), np.log(pairs / pairs.sum(1, keepdims=True))
    return {
        "unigram": -float(single[held_out].mean()),
        "bigram": -float(pairs[held_out[:-1], held_out[1:]].mean()),
        "repeats": float(
            (np.bincount(train, minlength=n) / len(train)) @ (np.bincount(train, minlength=n) / len(train))
        ),
    }


def batch(step: int, seed: int) -> IntArray:
    """Windows of the training text, one byte longer than the model reads."""
    return windows(text()[0], SETTINGS["tokens"] + 1, SETTINGS["batch"], 100_000 * (seed + 1) + step)


def parametrization(method: Method) -> Parametrization:
    """The numbers of a method, for the statistics of the training text."""
    rows = windows(text()[0], SETTINGS["tokens"] + 1, 64, 0)
    a = architecture()
    return method.make(a, Batch(tokens=rows[:, :-1], targets=rows[:, 1:], source="sotu").statistics(a))


# --- training ---------------------------------------------------------------------------------------------------------


def schedule(step: int, steps: int, warm_up: int) -> float:
    """Factor on learning rates: linear warm-up, then a cosine to 0 (SPA appendix H.1)."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def train(method: Method, rate: float, seed: int) -> dict[str, Any]:
    """One run: the smoothed training loss over steps and the validation loss at the end.

    A run has diverged if its loss is not finite, or ends above that of guessing all bytes alike.
    """
    import torch

    from signalprop.models import build

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    started = time.perf_counter()
    model = build(parametrization(method), seed=seed)
    assert model.decoder is not None and model.decoder.embedding.token is not None
    embedding = model.decoder.embedding.token.weight  # the head's, too
    weights = [x for x in model.parameters() if x is not embedding]
    rates = (rate, SETTINGS["embedding_rate"])
    optimizer = torch.optim.Adam([{"params": weights}, {"params": [embedding]}], betas=(0.9, 0.999), fused=True)

    def loss_of(rows: IntArray) -> torch.Tensor:
        ids = torch.from_numpy(rows)
        loss: torch.Tensor = model(ids[:, :-1], targets=ids[:, 1:]).loss
        return loss

    smoothed, curve, finite = 0.0, [], True
    steps, warm_up = method.longer * SETTINGS["steps"], method.longer * SETTINGS["warm_up"]
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = peak * schedule(step, steps, warm_up)
        loss = loss_of(batch(step, seed))
        finite = bool(torch.isfinite(loss))
        if not finite:
            break
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["clip"])
        optimizer.step()
        smoothed += SETTINGS["smoothing"] * (float(loss.detach()) - smoothed)
        if (step + 1) % CURVE_EVERY == 0:
            curve.append(round(smoothed / (1 - (1 - SETTINGS["smoothing"]) ** (step + 1)), 4))
            if (step + 1) % 100 == 0:
                spent = time.perf_counter() - started
                print(
                    f"{name_of(method, rate, seed)}: step {step + 1}, {curve[-1]:.3f}, {spent:.0f} s", file=sys.stderr
                )
    return {
        "settings": SETTINGS,
        "method": method.name,
        "rate": rate,
        "seed": seed,
        "train": curve[-1] if finite else None,
        "validation": validation(loss_of) if finite else None,
        "diverged": not finite or curve[-1] > math.log(SETTINGS["vocabulary"]),
        "curve": curve,
        "seconds": round(time.perf_counter() - started, 1),
        "torch": torch.__version__,
    }


def validation(loss_of: Callable[[IntArray], Any]) -> float:
    """Mean loss over fixed windows of the validation text."""
    import torch

    rows = windows(text()[1], SETTINGS["tokens"] + 1, SETTINGS["validation_windows"], 0)
    with torch.no_grad():
        return float(np.mean([float(loss_of(part)) for part in np.split(rows, 8)]))


# --- which runs -------------------------------------------------------------------------------------------------------


def name_of(method: Method, rate: float, seed: int) -> str:
    return f"{method.name}_{rate:.0e}_{seed}"


def stored(method: Method, seed: int) -> dict[float, Run]:
    """Finished runs of a method by learning rate."""
    found = {}
    for rate in GRID:
        path = RUNS / f"{name_of(method, rate, seed)}.json"
        if path.exists():
            run = read_json(path)
            if run["settings"] == SETTINGS:
                found[rate] = run
    return found


def score(run: Run) -> float:
    """What is tuned: the smoothed training loss at the end; infinite where a run diverged."""
    return math.inf if run["diverged"] else float(run["train"])


def best_rate(runs: Mapping[float, Run]) -> float:
    """The learning rate of the least training loss."""
    return min(runs, key=lambda rate: score(runs[rate]))


def neighbours(rate: float, grid: Sequence[float]) -> tuple[float, ...]:
    """The next rates of a grid below and above; the rate need not be on it."""
    below, above = [x for x in grid if x < rate], [x for x in grid if x > rate]
    return (*below[-1:], *above[:1])


def wanted(method: Method, stage: str) -> list[tuple[float, int]]:
    """Runs (learning rate, seed) that a stage of the search lacks: `start`, `bracket`, `seeds` or `refine`."""
    first = stored(method, SEEDS[0])
    if not first or stage == "start":
        return [(rate, SEEDS[0]) for rate in method.starts if rate not in first]
    best = best_rate(first)
    if stage == "seeds":
        return [(best, seed) for seed in SEEDS[1:] if best not in stored(method, seed)]
    grid = COARSE if stage == "bracket" else GRID
    return [(rate, SEEDS[0]) for rate in neighbours(best, grid) if rate not in first]


# Tuned for all, then the second seed for all; then the finer grid, and the second seed where the best rate moved.
PLAN = (
    *((group, stage) for group in ("main", "question") for stage in ("start", "bracket", "seeds")),
    *((group, stage) for group in ("main", "question") for stage in ("refine", "seeds")),
    ("longer", "start"),
    *(("default", stage) for stage in ("start", "bracket", "seeds", "refine", "seeds")),
)


def missing() -> Iterator[tuple[Method, float, int]]:
    """The runs that lack, one after the other; each is to be stored before the next one is asked for."""
    for group, stage in PLAN:
        chosen = [method for method in METHODS if method.group == group]
        while open_runs := [(method, *run) for method in chosen for run in wanted(method, stage)]:
            yield open_runs[0]


def train_missing(minutes: float) -> None:
    """Train what lacks; start no run after so many minutes."""
    RUNS.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * minutes
    for method, rate, seed in missing():
        if time.monotonic() > until:
            print("time is up: call again to go on", file=sys.stderr)
            return
        run = train(method, rate, seed)
        write_json(RUNS / f"{name_of(method, rate, seed)}.json", run)
        print(
            f"{name_of(method, rate, seed)}: train {run['train']}, validation {run['validation']}, "
            f"{run['seconds']:.0f} s",
            file=sys.stderr,
        )


# --- the page ---------------------------------------------------------------------------------------------------------

PAPER = {  # training loss after 100K steps on WikiText-103: SPA Table 1, DKS-GeLU without norms; Pre-LN: appendix G
    "pre-ln": "1.76",
    "e-spa": "2.79 ± 0.02",
    "u-spa": "2.99 ± 0.01",
    "value-skipinit": "3.26 ± 0.02",
    "plain": "about 7.5",
    "plain-norm": "about 7.5",
}
PLATEAU, CLEAR = 0.05, 0.2  # nats around the unigram loss that count as staying there; below it, as having left


def collect() -> dict[str, Any]:
    """What docs/shortcuts.json holds: all finished runs, with curves where the learning rate is the method's best."""
    import torch

    runs = []
    for method in METHODS:
        first = stored(method, SEEDS[0])
        best = best_rate(first) if first else None
        for seed in SEEDS:
            for rate, run in stored(method, seed).items():
                kept = {key: value for key, value in run.items() if key not in ("settings", "torch")}
                runs.append(kept if rate == best else {**kept, "curve": []})
    return {
        "schema": SCHEMA,
        "settings": SETTINGS,
        "references": references(),
        "untrained": {method.name: untrained(method) for method in METHODS},
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, one thread",
        "torch": torch.__version__,
        "runs": runs,
    }


def untrained(method: Method) -> dict[str, float]:
    """Mean square and mean cosine of two positions behind the last layer, before training, mean of the seeds' networks.

    The cosine is 1 where all positions of a sequence say the same: rank collapse.
    """
    import torch

    from signalprop.models import build

    torch.set_num_threads(1)
    rows = torch.from_numpy(windows(text()[1], SETTINGS["tokens"], SETTINGS["validation_windows"], 1))
    squares, cosines = [], []
    for seed in SEEDS:
        with torch.no_grad():
            hidden = build(parametrization(method), seed=seed)(rows).hidden
        squares.append(float(hidden.square().mean()))
        unit = hidden / hidden.norm(dim=-1, keepdim=True)
        n = hidden.shape[1]
        cosines.append(float((unit.sum(1).square().sum(-1) - n).mean() / (n * (n - 1))))
    return {"mean_square": float(np.mean(squares)), "cosine": float(np.mean(cosines))}


@dataclass(frozen=True)
class Summary:
    """A method at its best learning rate.

    Attributes:
        runs: one per seed that is there. tried: all learning rates with the training loss of the first seed.
    """

    method: Method
    rate: float
    runs: tuple[Run, ...]
    tried: dict[float, float]

    @property
    def flag(self) -> str:
        """How far the search for the rate came, where it did not end."""
        if not set(neighbours(self.rate, COARSE)) <= set(self.tried):
            return " (edge)"
        return "" if set(neighbours(self.rate, GRID)) <= set(self.tried) else " (coarse)"

    @property
    def diverged(self) -> bool:
        """Whether a seed did."""
        return any(run["diverged"] for run in self.runs)

    def mean(self, key: str) -> float:
        """Mean of `train` or `validation` over the seeds."""
        return math.inf if self.diverged else float(np.mean([run[key] for run in self.runs]))

    def spread(self, key: str) -> float:
        """Half the distance between the least and the greatest of the seeds."""
        values = [run[key] for run in self.runs]
        return (max(values) - min(values)) / 2

    def number(self, key: str) -> str:
        """Mean and spread, or one seed's number."""
        if self.diverged:
            return "diverged"
        return f"{self.mean(key):.3f} ± {self.spread(key):.3f}" if len(self.runs) > 1 else f"{self.mean(key):.3f}"


def summaries(store: Mapping[str, Any], *groups: str) -> list[Summary]:
    """Methods of some groups that were run, the least training loss first."""
    out = []
    for method in METHODS:
        runs = [run for run in store["runs"] if run["method"] == method.name]
        first = {run["rate"]: run for run in runs if run["seed"] == SEEDS[0]}
        if method.group in groups and first:
            best = best_rate(first)
            chosen = tuple(run for run in runs if run["rate"] == best)
            out.append(Summary(method, best, chosen, {rate: score(run) for rate, run in sorted(first.items())}))
    return sorted(out, key=lambda item: item.mean("train"))


def results_table(items: Sequence[Summary], store: Mapping[str, Any], *, paper: bool = False) -> list[str]:
    """One line per method."""
    heads = ["network", "learning rate", "training loss", "validation loss", "seeds", "cosine before training"]
    lines = ["| " + " | ".join(heads + ["paper"] * paper) + " |", "| --- " * (len(heads) + paper) + "|"]
    for item in items:
        cells = [item.method.what, f"{item.rate:g}{item.flag}", item.number("train"), item.number("validation")]
        cells += [str(len(item.runs)), f"{store['untrained'][item.method.name]['cosine']:.3f}"]
        lines.append("| " + " | ".join(cells + [PAPER.get(item.method.name, "")] * paper) + " |")
    return lines


def rates_table(items: Sequence[Summary]) -> list[str]:
    """Training loss of the first seed for every learning rate tried."""
    rates = sorted({rate for item in items for rate in item.tried})
    lines = ["| network | " + " | ".join(f"{rate:g}" for rate in rates) + " |", "| --- " * (len(rates) + 1) + "|"]
    for item in items:
        cells = [""] * len(rates)
        for rate, loss in item.tried.items():
            cells[rates.index(rate)] = f"{loss:.3f}" if math.isfinite(loss) else "diverged"
        lines.append(f"| {item.method.what} | " + " | ".join(cells) + " |")
    return lines


def less(one: Summary, other: Summary) -> str:
    """Whether a method ends below another: confirmed, contradicted, or closer than the seeds tell apart."""
    gap = other.mean("train") - one.mean("train")
    if abs(gap) <= one.spread("train") + other.spread("train"):
        return "**not told apart here**"
    return "**confirmed**" if gap > 0 else "**contradicted here**"


def verdicts(items: Sequence[Summary], unigram: float) -> list[str]:
    """The paper's claims, each with what the table says to it."""
    by_name = {item.method.name: item for item in items}
    shaped_names, plain_names = ("e-spa", "u-spa", "value-skipinit"), ("plain", "plain-norm")
    if not {*shaped_names, *plain_names, "pre-ln"} <= set(by_name):
        return ["Runs are missing: no verdict."]
    e_spa, u_spa, skipinit = (by_name[name] for name in shaped_names)
    stuck = [name for name in plain_names if by_name[name].mean("train") > unigram - PLATEAU]
    left = [name for name in shaped_names if by_name[name].mean("train") < unigram - CLEAR]
    yes, no = "**confirmed**", "**contradicted here**"
    return [
        f"- Without skips and with ordinary attention the loss stays at its plateau, norms or not: "
        f"{yes if len(stuck) == 2 else no} ({len(stuck)} of 2 end within {PLATEAU:g} of the unigram loss, or above).",
        f"- E-SPA, U-SPA and Value-SkipInit train: {yes if len(left) == 3 else no} ({len(left)} of 3 end more than "
        f"{CLEAR:g} below it).",
        f"- E-SPA ends below U-SPA: {less(e_spa, u_spa)}; below Value-SkipInit: {less(e_spa, skipinit)}.",
        f"- U-SPA ends below Value-SkipInit: {less(u_spa, skipinit)}.",
        f"- Pre-LN ends below E-SPA: {less(by_name['pre-ln'], e_spa)}.",
    ]


def other_targets(items: Sequence[Summary], store: Mapping[str, Any]) -> str:
    """The paper's other kernel targets: a table, and which of them are still at the plateau."""
    stuck = [item.method.what for item in items if item.mean("train") > store["references"]["unigram"] - PLATEAU]
    still = f"Still at the plateau after these steps: {'; '.join(stuck) or 'none'}."
    note = "The paper trains on 512 and 2,048 tokens: the same decay keeps 64 tokens far more alike."
    table = "\n".join(results_table(items, store))
    return f"The other targets of the paper's grids:\n\n{table}\n\n{still} {note}"


def plateau(store: Mapping[str, Any]) -> str:
    """Where the plain networks are after more steps."""
    found = [
        f"{item.method.what} {item.number('train')} (training) and {item.number('validation')} (validation)"
        for item in summaries(store, "longer")
    ]
    many = max((method.longer for method in METHODS), default=1)
    text = (
        f"- After {many} times the steps, at the best learning rate, one seed, the plain networks: {'; '.join(found)}."
    )
    return text if found else "- Longer runs of the plain networks are missing."


def question(store: Mapping[str, Any]) -> str:
    """Calibrated rows against rows as they are: differences seed by seed, at each one's best learning rate."""
    by_name = {item.method.name: item for item in summaries(store, "question")}
    if len(by_name) < 2:
        return "Runs are missing: no verdict."
    plain, calibrated = by_name["gelu"], by_name["gelu-calibrated"]
    if plain.diverged or calibrated.diverged:
        return "A run diverged: no verdict."
    text = []
    for key, what in (("train", "training"), ("validation", "validation")):
        before, after = ({run["seed"]: run[key] for run in item.runs} for item in (plain, calibrated))
        by_seed = [after[seed] - before[seed] for seed in SEEDS if seed in before and seed in after]
        numbers = ", ".join(f"{x:+.3f}" for x in by_seed)
        text.append(f"{what} loss {np.mean(by_seed):+.3f} (seed by seed {numbers})")
    word = {"**confirmed**": "trains better", "**contradicted here**": "trains worse"}
    found = word.get(less(calibrated, plain), "makes no difference beyond the spread of the seeds")
    rates = [rate for rate in plain.tried if rate in calibrated.tried]
    lower = sum(calibrated.tried[rate] < plain.tried[rate] for rate in rates)
    before, after = (store["untrained"][name]["mean_square"] for name in ("gelu", "gelu-calibrated"))
    return (
        f"The mean square behind the last layer, before training: {before:.1f} as they are, {after:.1f} calibrated. "
        f"Calibrated less as they are: {'; '.join(text)}. Verdict: calibration **{found}** here. "
        f"Rate by rate, the calibrated network ended lower at {lower} of {len(rates)} learning rates (last table)."
    )


def page(store: Mapping[str, Any]) -> str:
    """docs/shortcuts.md."""
    main_rows, others, asked = (summaries(store, group) for group in ("main", "default", "question"))
    seconds = [run["seconds"] for run in store["runs"]]
    settings = store["settings"]
    text = TEXT.format(
        **settings,
        **store["references"],
        n_bytes=settings["steps"] * settings["batch"] * settings["tokens"],
        main="\n".join(results_table(main_rows, store, paper=True)),
        verdicts="\n".join([*verdicts(main_rows, store["references"]["unigram"]), plateau(store)]),
        others=other_targets(others, store) if others else "",
        asked="\n".join(results_table(asked, store)),
        question=question(store),
        rates="\n".join(rates_table([*main_rows, *others, *asked])),
        machine=store["machine"],
        torch=store["torch"],
        n_runs=len(seconds),
        minutes=sum(seconds) / 60,
        least=min(seconds),
        most=max(seconds),
    )
    return "\n\n".join(wrapped(paragraph) for paragraph in text.split("\n\n") if paragraph.strip()) + "\n"


def wrapped(paragraph: str) -> str:
    """Plain paragraphs to lines of 120 columns; tables, lists, headings and pictures as they are."""
    if paragraph.lstrip().startswith(("|", "-", "#", "![")):
        return paragraph.strip("\n")
    return "\n".join(textwrap.wrap(paragraph, 120, break_long_words=False, break_on_hyphens=False))


TEXT = """# Training without shortcuts

Written by `python -m benchmarks.shortcuts` from `docs/shortcuts.json`: do not edit.

## The claim

*Deep Transformers without Shortcuts* (He et al., 2023; SPA): without skips, a transformer of 36 blocks does not
train, with norms or without, with a DKS-transformed GeLU or without: on WikiText-103 its loss stays at about 7.5
(section 4, Fig. 2). With attention shaped by E-SPA or U-SPA, or with Value-SkipInit, it trains without skips and
norms, E-SPA best (Table 1); with skips and norms (Pre-LN) it still trains faster. The paper's training losses are
in the last column below: width 1024, 100,000 steps, another text and vocabulary, so only the order compares.

## What was run

Decoders of {layers} layers, width {width}, {heads} heads, feed-forward 4 x {width}, RoPE, tied embeddings, no
biases, orthogonal weights. The skipless ones have a DKS-transformed GeLU; "plain" differs from Value-SkipInit only
in its attention, which is the ordinary one. They read the embedded text (package `sotu`) as bytes ({vocabulary}
symbols); every {validation_every}th of {stretches} stretches is held out, {validation_windows} windows of it are
the validation text.

{steps} steps of {batch} x {tokens} bytes ({n_bytes:,} bytes) for everyone, the same ones for every method. As in
SPA appendix H.1: Adam (0.9, 0.999), global clip {clip:g}, linear warm-up ({warm_up} steps), then a cosine to 0, no
weight decay, no dropout, a learning rate of its own for the embedding ({embedding_rate:g}, for all methods). The
other rate is tuned for each method on the training loss of the first seed: 1, 3 x 10^n until the best has
neighbours on both sides (else marked "edge"), then 1, 2, 3, 5 x 10^n around it (else "coarse"). gamma_L and rho_L
are from the paper's grids, {{0.005, 0.2}} and {{0.6, 0.8}}; 0.2 was taken since in trials of 300 steps at four rates
0.005 did not leave the plateau.

Training loss: average with smoothing factor {smoothing:g}. ±: half the distance between two seeds (of weights and
of batches). Cosine before training: of two positions behind the last layer, mean; 1 is rank collapse. Losses are in
nats per byte. Counting bytes reaches {unigram:.3f} on the validation text (unigram, the plateau), counting pairs of
bytes {bigram:.3f} (bigram: all that the byte before tells). Two bytes of the text are equal with probability
{repeats:.3f}.

## Result

{main}

![Training curves, and training losses by learning rate](pictures/shortcuts.png)

{verdicts}
{others}

## An open question: calibrated rows

With an untransformed GeLU the diagonal of the kernel does not stay at 1 under E-SPA; `calibrated=True` rescales
rows so that the average kernel's would ([shaping](theory/shaping.md)). The paper trains without. Does it train
better with? E-SPA, gamma_L = 0.2, untransformed GeLU, no skips, no norms:

{asked}

{question}

## Learning rates

Training loss of the first seed:

{rates}

{n_runs} runs, {minutes:.0f} minutes together ({least:.0f} to {most:.0f} s each, on a machine that other work
shared); {machine}, PyTorch {torch}.
"""


def picture(store: Mapping[str, Any]) -> bytes:
    """Left: training loss over steps at each method's best rate, mean of the seeds. Right: final loss over rates."""
    from matplotlib.figure import Figure

    from signalprop.report.plots import COLOURS

    canvas = Figure(figsize=(11, 4.4), dpi=100, layout="constrained")
    left, right = canvas.subplots(1, 2)
    lowest = store["references"]["bigram"]
    for item, colour in zip(summaries(store, "main"), COLOURS, strict=False):
        curves = [run["curve"] for run in item.runs if not run["diverged"]]
        if curves:
            steps = CURVE_EVERY * (1 + np.arange(len(curves[0])))
            left.plot(steps, np.mean(curves, 0), color=colour, label=item.method.what)
        right.plot(list(item.tried), list(item.tried.values()), "o-", color=colour, markersize=4)
        lowest = min(lowest, *item.tried.values())
    for panel in (left, right):
        for name in ("unigram", "bigram"):
            loss = store["references"][name]
            panel.axhline(loss, color="0.5", linewidth=0.8, linestyle=":")
            panel.annotate(name, (0.01, loss), xycoords=("axes fraction", "data"), va="top", fontsize=8)
        panel.set_ylim(lowest - 0.1, 3.6)
        panel.grid(alpha=0.3, linewidth=0.6)
        panel.set_ylabel("training loss, nats per byte")
    left.set_xlabel("step")
    right.set_xlabel("learning rate")
    right.set_xscale("log")
    left.legend(fontsize=8)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png")
    return buffer.getvalue()


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--page", action="store_true", help="only write the page from docs/shortcuts.json")
    arguments = parser.parse_args()
    if not arguments.page:
        train_missing(arguments.minutes)
        write_json(STORE, collect())
    store = read_json(STORE)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(PICTURE, picture(store))
    write_text(PAGE, page(store))
    print(f"wrote {PAGE}: {len(store['runs'])} runs", file=sys.stderr)


if __name__ == "__main__":
    main()
