"""`python -m benchmarks.advice`: the first change that `advise` names, built, measured and trained, for sick networks.

Sick ones are the starts known to fail (`known_networks.BAD`) at width 64, as deep as they are up to 48 layers. Each is
drawn with and without the change (three networks), and what the rules find in the measurement is printed. `--train N`
also trains N of them, both ways, for 100 steps at two rates; the loss is the best rate's, over the last 20 steps.
Half an hour of one core with ten trained; `--json FILE` writes the rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.known_networks import BAD, Known
from signalprop.advice import advise, made_by
from signalprop.data.batches import default_batch
from signalprop.errors import InputError
from signalprop.files.storage import write_json
from signalprop.measurement.simulation import simulate
from signalprop.models.transformer import build
from signalprop.network.parametrization import Parametrization
from signalprop.results.text import text_table

WIDTH, LENGTH, WORDS, DEEPEST, NETWORKS = 64, 32, 500, 48, 3
RATES, STEPS, LAST = (1e-3, 3e-3), 100, 20


class Row(NamedTuple):
    """One sick network. Findings are measured; losses None where it was not trained."""

    name: str
    change: str | None
    before: list[str]
    after: list[str]
    loss_before: float | None = None
    loss_after: float | None = None


def small(known: Known) -> Parametrization:
    """What is wrong with it, at a width that is trained in seconds; weights of a given size grow as wide ones' do."""
    fields = known.fields
    width = fields["d_model"]
    less = {"d_model": WIDTH, "n_heads": 2, "vocab_size": WORDS, "seq_len": LENGTH, "dropout": 0.0}
    less |= {"n_layers": min(fields["n_layers"], DEEPEST)}
    less |= {"d_ff": round(fields["d_ff"] * WIDTH / width)} if "d_ff" in fields else {}
    less |= {"n_kv_heads": 2} if fields.get("n_kv_heads") else {}
    options = dict(known.options)
    if "std" in options:
        options["std"] *= (width / WIDTH) ** 0.5
    return known._replace(fields=fields | less, options=options).table()


def sick() -> Iterator[tuple[Known, Parametrization]]:
    """Those that are as sick at this size, by the prediction."""
    for known in BAD:
        if known.preset is None and known.fields["n_layers"] <= 2 * DEEPEST:
            table = small(known)
            if advise(table, most=1).findings:
                yield known, table


def measured(table: Parametrization) -> list[str]:
    """What the rules find in networks that are drawn and run."""
    batch = default_batch(table.architecture, batch_size=4)
    try:
        return [item.name for item in simulate(table, batch=batch, n_seeds=NETWORKS).findings]
    except InputError as error:  # what is not finite
        return [str(error).split(" at ")[0]]


def trained(table: Parametrization) -> float:
    """Loss in nats, at the best of the rates."""
    return min(_loss(table, rate) for rate in RATES)


def _loss(table: Parametrization, rate: float) -> float:
    model = build(table, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    losses = list[float]()
    for step in range(STEPS):
        batch = default_batch(table.architecture, batch_size=8, seed=step)
        loss = model(torch.as_tensor(batch.tokens), targets=torch.as_tensor(batch.targets)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 15, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    mean = sum(losses[-LAST:]) / LAST
    return mean if mean == mean else float("inf")


def row_of(known: Known, table: Parametrization, *, train: bool) -> Row:
    """Everything about one of them."""
    options = advise(table).options
    change = options[0].name if options else None
    before = measured(table)
    if change is None:
        return Row(known.name, None, before, before)
    cured = made_by(table, change)
    row = Row(known.name, change, before, measured(cured))
    return row._replace(loss_before=trained(table), loss_after=trained(cured)) if train else row


def main() -> None:
    """Prints the table, row by row as they come, and the two counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=20)
    parser.add_argument("--train", type=int, default=0, help="how many of them are trained")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = list[Row]()
    every = max(asked.networks // max(asked.train, 1), 1)
    for k, (known, table) in enumerate(sick()):
        if k == asked.networks:
            break
        rows.append(row_of(known, table, train=asked.train > 0 and k % every == 0))
        print(f"{k + 1:3}  {rows[-1].name}: {rows[-1].change}", flush=True)
    print(text_table(["network", "first change", "measured before", "measured after", "loss", "then"], _lines(rows)))
    tried = [row for row in rows if row.loss_after is not None]
    print(f"healthy with the first change: {sum(not row.after for row in rows)} of {len(rows)}")
    print(f"lower loss with it: {sum((r.loss_after or 0) < (r.loss_before or 0) for r in tried)} of {len(tried)}")
    if asked.json:
        write_json(asked.json, [row._asdict() for row in rows])


def _lines(rows: list[Row]) -> list[list[Any]]:
    def loss(x: float | None) -> str:
        return "" if x is None else f"{x:.3f}"

    return [
        [row.name, row.change or "-", ", ".join(row.before) or "-", ", ".join(row.after) or "-", loss(row.loss_before),
         loss(row.loss_after)] for row in rows
    ]  # fmt: skip


if __name__ == "__main__":
    main()
