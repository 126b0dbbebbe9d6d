"""How single networks scatter: predicted over measured standard deviations, as in records/scatter.md.

`python -m benchmarks.scatter` prints a row for every network, over 60 networks of width 128 that read one sequence of
64 tokens: some minutes for each row of 12 layers. `--networks 10` takes fewer, and names of rows choose among them.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from signalprop.data.batches import default_batch
from signalprop.measurement.simulation import simulate
from signalprop.network.architecture import Architecture
from signalprop.prediction import predict
from signalprop.results.series import Series
from signalprop.schemes import scheme

SIZE: dict[str, Any] = {"d_model": 128, "n_heads": 8, "d_ff": 512, "seq_len": 64, "dropout": 0.0}
# name: preset, layers, scheme, norm placement
ROWS = {
    "gpt2": ("gpt2", 12, "xavier", "pre"),
    "gpt2-48": ("gpt2", 48, "xavier", "pre"),
    "gpt2-huggingface": ("gpt2", 12, "huggingface", "pre"),
    "llama": ("llama-130m", 12, "xavier", "pre"),
    "encoder-pre": ("tgs", 12, "deepscalelm", "pre"),
    "encoder-post": ("tgs", 12, "deepscalelm", "post"),
    "bert": ("bert-base", 12, "xavier", "post"),
}


def row(name: str, networks: int) -> str:
    """Predicted / measured standard deviations of one network of `ROWS`, a line of the table."""
    preset, n_layers, method, placement = ROWS[name]
    a = Architecture.preset(preset, **SIZE, n_layers=n_layers, norm_placement=placement)
    p = scheme(method)(a)
    batch = default_batch(a, batch_size=1)
    found = predict(p, batch.statistics(a))
    drawn = [simulate(p, n_seeds=1, seed=seed, batch=batch) for seed in range(networks)]
    assert found.gradient is not None
    gradients = [d.gradient["stream_in"] for d in drawn if d.gradient is not None]
    streams, n = [d.forward["stream_out"] for d in drawn], p.n_sublayers
    cells = [_variance(found.gradient["stream_in"], gradients, at) for at in (0, n // 4, n // 2)]
    cells.append(_variance(found.forward["stream_out"], streams, n - 1))
    spread = np.std([s.token_correlation[n // 2] for s in streams], ddof=1)
    sd = found.forward["stream_out"].token_correlation_sd
    cells.append(f"{0 if sd is None else sd[n // 2]:.3f} / {spread:.3f}")
    return f"| {name} | {' | '.join(cells)} |"


def _variance(series: Series, measured: list[Series], at: int) -> str:
    sd = 0.0 if series.variance_sd is None else series.variance_sd[at]
    return f"{sd:.3f} / {np.std([m.log_variance[at] for m in measured], ddof=1):.3f}"


def main() -> None:
    """The table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", choices=[[], *ROWS], metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--networks", type=int, default=60)
    given = parser.parse_args()
    print("| network | ln gradient, first | a quarter up | half | ln variance, last | token correlation, half |")
    print("| --- " * 6 + "|")
    for name in given.names or ROWS:
        print(row(name, given.networks), flush=True)


if __name__ == "__main__":
    main()
