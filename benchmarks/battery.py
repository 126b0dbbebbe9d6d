"""Predictions before and after a change of the theory: random networks, and every stored measurement predicted again.

    python -m benchmarks.battery before.json                     # in one worktree
    python -m benchmarks.battery after.json --against before.json    # in another: what moved, largest first
    python -m benchmarks.battery after.json --only random --networks 300 --against before.json

Random networks are predicted by both formulas (`moments`, `kernel`); the stored measurements are those of the accuracy
page, the applied page and the fresh families: the median error of every quantity, and the standard error of it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from signalprop.data.batches import default_batch
from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.results.profile import Profile
from signalprop.schemes import scheme

SETS = ("random", "accuracy", "applied", "fresh")
DRAWN = (
    "bamba", "deepseek_v4", "falcon_h1", "gemma4_text", "granitemoehybrid", "lfm2", "lfm2_moe", "mamba2", "nemotron_h",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
)  # fmt: skip
POINTS = 9  # sublayers of a profile that are compared, evenly spaced
SCHEMES = ("xavier", "xavier", "deepscalelm", "gpt2", "fixed", "pytorch", "ds-init", "rezero", "takase")


def random_network(seed: int) -> Parametrization:
    """A network from what an Architecture and the schemes can be."""
    rng = np.random.default_rng(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    while True:
        kind, gated, heads = pick("encoder", "decoder", "decoder", "encoder-decoder"), pick(False, True), pick(2, 4)
        length, layers = pick(4, 16, 32, 48), pick(1, 2, 6, 12)
        fields: dict[str, Any] = {
            "kind": kind, "n_layers": layers, "d_model": pick(64, 128), "n_heads": heads, "gated": gated,
            "d_ff": pick(128, 256, 512), "vocab_size": pick(300, 2000), "seq_len": length,
            "activation": pick("silu", "gelu") if gated else pick("relu", "gelu", "silu", "tanh", "identity"),
            "norm": pick("layernorm", "rmsnorm"), "dropout": pick(0.0, 0.1, 0.3), "qk_norm": pick(False, False, True),
            "norm_placement": pick("pre", "pre", "post", "sandwich", "none", "res-post"),
            "positions": pick("none", "learned", "rotary"), "tied_embeddings": pick(False, True),
            "n_kv_heads": pick(None, 1), "embedding_norm": pick(False, False, True),
            "parallel": pick(False, False, True),
        }  # fmt: skip
        if kind == "encoder-decoder":
            fields |= {"n_decoder_layers": layers, "target_len": length, "positions": "none", "parallel": False}
        try:
            p = scheme(pick(*SCHEMES))(Architecture(**fields))
            return p.with_columns(score_scale=p.score_scale * pick(1.0, 1.0, 2.0, 4.0))
        except InputError:
            continue


def numbers_of(profile: Profile) -> dict[str, list[float]]:
    """What is compared of a prediction: ln of variances, and token correlations."""
    at = np.unique(np.linspace(0, profile.n_sublayers - 1, POINTS).round().astype(int))
    sides = {"stream": profile.forward["stream_out"], "branch": profile.forward["branch"]}
    if profile.gradient is not None:
        sides["gradient"] = profile.gradient["stream_in"]
    found = {}
    for name, series in sides.items():
        found[name] = [round(float(x), 6) for x in series.log_variance[at]]
        found[f"{name} correlation"] = [round(float(x), 6) for x in series.token_correlation[at]]
        for column in ("variance_sd", "variance_excess"):
            of = getattr(series, column)
            if of is not None:
                found[f"{name} {column}"] = [round(float(x), 6) for x in of[at]]
    return found


def of_random(networks: int) -> Iterator[tuple[str, Any]]:
    """Both formulas of random networks, on text where a network reads one."""
    for seed in range(networks):
        p = random_network(seed)
        inputs = default_batch(p.architecture, batch_size=2).statistics(p.architecture) if seed % 2 else None
        for fidelity in ("moments", "kernel"):
            try:
                yield f"{seed} {fidelity}", numbers_of(predict(p, inputs, fidelity=fidelity))
            except InputError as refusal:
                yield f"{seed} {fidelity}", str(refusal)


def of_accuracy(every: int = 1) -> Iterator[tuple[str, Any]]:
    from benchmarks.accuracy import STORE
    from benchmarks.accuracy_grid import Cell
    from benchmarks.accuracy_rows import row_of
    from benchmarks.measured import read_store

    for cell, measured in list(read_store(STORE, Cell).items())[::every]:
        row = row_of(cell, measured)
        yield cell.name, _errors(row.errors) | {"first": [round(row.first, 6), None]}


def of_applied(every: int = 1) -> Iterator[tuple[str, Any]]:
    from benchmarks.accuracy_rows import errors_of
    from benchmarks.applied_accuracy import STORE, Cell, carrying
    from benchmarks.measured import read_store

    for cell, measured in list(read_store(STORE, Cell).items())[::every]:
        if (found := carrying(cell)) is not None:
            errors = errors_of(predict(found[1], found[2]), measured)
            yield f"{cell.family} {cell.scheme} {cell.n_layers}", _errors(errors)


def of_fresh(closed: bool = False, every: int = 1) -> Iterator[tuple[str, Any]]:
    """Fresh families; `closed`: without those that are drawn, which take most of the time."""
    from benchmarks.accuracy_rows import errors_of
    from benchmarks.fresh_families import STORE, Cell, prepared
    from benchmarks.measured import read_store

    stored = [x for x in read_store(STORE, Cell).items() if not (closed and x[0].family in DRAWN)]
    for cell, measured in stored[::every]:
        try:
            yield f"{cell.family} {cell.n_layers}", _errors(errors_of(prepared(cell)[3], measured))
        except InputError as refusal:
            yield f"{cell.family} {cell.n_layers}", str(refusal)


def _errors(errors: dict[str, Any]) -> dict[str, list[float | None]]:
    """By quantity: median error and the standard error of the measurement, in percent."""
    return {name: [round(100 * e.median, 3), round(100 * e.se, 3)] for name, e in errors.items()}


def collected(sets: list[str], networks: int, closed: bool = False, every: int = 1) -> dict[str, dict[str, Any]]:
    """All of it, or every so many-th measurement, by set; processor time of each on the way."""
    of = {
        "random": lambda: of_random(networks),
        "accuracy": lambda: of_accuracy(every),
        "applied": lambda: of_applied(every),
        "fresh": lambda: of_fresh(closed, every),
    }
    found = {}
    for name in sets:
        began = time.process_time()
        found[name] = dict(of[name]())
        print(f"{name}: {len(found[name])} in {time.process_time() - began:.0f} s", flush=True)
    return found


def moved(before: Any, after: Any) -> float:
    """The largest difference of two entries: infinity where one is refused, or has what the other has not."""
    if isinstance(before, str) or isinstance(after, str) or before.keys() != after.keys():
        return 0.0 if before == after else np.inf
    pairs = [(np.array(before[k], float), np.array(after[k], float)) for k in before]
    return max(float(np.nanmax(np.abs(a - b), initial=0.0)) for a, b in pairs)


def report(before: dict[str, Any], after: dict[str, Any], shown: int) -> None:
    """What moved, largest first, and of measurements also by how many standard errors."""
    for name in after:
        rows = before.get(name, {})
        both = {key: moved(rows[key], after[name][key]) for key in after[name] if key in rows}
        order = sorted(both, key=lambda key: -both[key])
        still = sum(x < 1e-5 for x in both.values())
        print(f"{name}: {len(both)} compared, {still} the same; of the others the largest differences:")
        for key in order[:shown]:
            if both[key] >= 1e-5:
                print(f"  {both[key]:10.4g}  {key}: {_words(rows[key], after[name][key])}")
        if name != "random":
            _medians(rows, after[name])


def _words(before: Any, after: Any) -> str:
    if isinstance(before, str) or isinstance(after, str):
        return f"{before if isinstance(before, str) else '...'} -> {after if isinstance(after, str) else '...'}"[:160]
    found = []
    for key in after:
        if key not in before:
            found.append(f"{key} is new")
            continue
        a, b = np.array(before[key], float), np.array(after[key], float)
        if np.nanmax(np.abs(a - b), initial=0.0) >= 1e-5:
            at = int(np.nanargmax(np.abs(a - b)))
            se = f" (se {b[1]:.2f})" if ("variance" in key and len(b) == 2) or key == "token correlation" else ""
            found.append(f"{key} {a[at]:.4g} -> {b[at]:.4g}{se}")
    return "; ".join([*found, *(f"{key} is gone" for key in before if key not in after)])


def _medians(before: dict[str, Any], after: dict[str, Any]) -> None:
    for quantity in ("forward variance", "token correlation", "gradient variance"):
        sides = [
            [row[quantity][0] for key, row in x.items() if quantity in row and key in before and key in after]
            for x in (before, after)
        ]
        print(f"  median of {quantity}: {np.median(sides[0]):.3f} -> {np.median(sides[1]):.3f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON that is written; read instead where it is there")
    parser.add_argument("--against", type=Path, help="JSON of the other worktree")
    parser.add_argument("--only", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--networks", type=int, default=300)
    parser.add_argument("--shown", type=int, default=12, help="rows of each set (12)")
    given = parser.parse_args()
    if not given.out.exists():
        found = collected(given.only, given.networks)
        given.out.write_text(json.dumps(found), encoding="utf-8")
    if given.against is not None:
        before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (given.against, given.out))
        report(before, after, given.shown)


if __name__ == "__main__":
    main()
