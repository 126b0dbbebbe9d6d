"""`signalprop predict`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from signalprop.cli import options as opt
from signalprop.cli import output, sources
from signalprop.errors import InputError, require

if TYPE_CHECKING:
    from signalprop.network.architecture import Architecture
    from signalprop.network.inputs import InputStatistics
    from signalprop.network.parametrization import Parametrization
    from signalprop.results.profile import Profile

_SEQUENCES = 4  # of a text, and of a step whose cost is counted
_NETWORKS = 8  # that fidelity simulate averages; `measure` takes others


def predict(
    arch: opt.Arch,
    seq_len: opt.SeqLen = None,
    norm: opt.Norm = None,
    assignments: opt.Set = None,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="N[,N...]", help="Number of layers; several give one table.")
    ] = None,
    scheme: opt.SchemeNames = None,
    qk_scale: opt.QkScale = 1.0,
    data: opt.Text = None,
    fidelity: Annotated[str, typer.Option("--fidelity", help="auto, moments, kernel or simulate.")] = "auto",
    cost: Annotated[bool, typer.Option("--cost", help="Count parameters and a step's FLOPs instead.")] = False,
    all_rows: opt.All = False,
    fail_on: opt.FailOn = None,
    json_file: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Predict every layer's signal, without PyTorch.

    Tokens follow Zipf's law, or the words of --data. Several schemes and depths, with commas between, give one table
    and one picture.

    \b
    Example: signalprop predict tgs --layers 192 --scheme deepscalelm --norm post
             signalprop predict gpt2 --scheme xavier,deepscalelm --layers 12,48
    """
    from signalprop.data.batches import default_batch, default_statistics
    from signalprop.prediction import check_fidelity, cost_of_runs, expected_cost, least_cost
    from signalprop.prediction import predict as predicted
    from signalprop.results.cost import cost_table, step_cost

    output.check_outputs(json_file, plot=plot)
    output.check_severity(fail_on)
    chosen = check_fidelity(fidelity)
    schemes = opt.several_schemes(scheme)
    depths: Sequence[int | None] = opt.several_numbers(
        layers, "--layers", "a number of layers", "12, or 12,48,192"
    ) or [None]

    def changed(depth: int | None) -> dict[str, Any]:
        return opt.changes(assignments, seq_len=seq_len, norm_placement=norm, n_layers=depth)

    if cost:
        a = sources.read_architecture(arch, changed(depths[0]))
        found = step_cost(a, _SEQUENCES)
        output.deliver(json_file, lambda: found, lambda: output.echo(cost_table(found)))
        return
    many = len(schemes) * len(depths) > 1
    if many and all_rows:
        raise InputError("--all prints every layer of one network; leave it out, or give one scheme and one depth")
    if layers is not None and chosen == "auto":  # before the tables alone take gigabytes
        output.refuse_hours([least_cost(sources.read_architecture(arch, changed(n))) for n in depths])
    pairs = [(name, n) for name in schemes for n in depths]
    tables = [  # all of them first: what is refused is refused before the long work
        sources.parametrization(arch, changed(n), name, qk_scale) for name, n in pairs
    ]

    def read_by(a: Architecture) -> InputStatistics:
        if data is None:
            return default_statistics(a)
        return default_batch(a, text=data, batch_size=_SEQUENCES).statistics(a)

    if chosen == "simulate":
        require("torch", "models")
    costs = [expected_cost(p, read_by(p.architecture), chosen) for p in tables]
    if chosen == "simulate":
        costs = [cost_of_runs(p, _SEQUENCES, _NETWORKS) for p in tables]
    output.announce(costs, chosen=chosen != "auto")

    def one(p: Parametrization) -> Profile:
        inputs = read_by(p.architecture)
        if chosen == "simulate":
            from signalprop.measurement.simulation import simulate

            with output.progress("simulating") as step:
                profile = simulate(p, inputs, n_seeds=_NETWORKS, batch_size=_SEQUENCES, progress=step)
            return replace(profile, reads=inputs.source)
        return predicted(p, inputs, fidelity=chosen, progress=told)

    told: Callable[[int, int], None] | None = None
    if not many:
        with output.progress("predicting") if costs[0].seconds > output.LONG else nullcontext() as told:
            profile = one(tables[0])
        output.deliver_profile(profile, json_file, plot, all_rows=all_rows)
        output.fail_on(profile.findings, fail_on)
        return
    profiles = []
    with nullcontext() if chosen == "simulate" else output.progress("predicting") as step:  # simulations show theirs
        for (name, _), p in zip(pairs, tables, strict=True):
            profiles.append(replace(one(p), scheme=name or p.scheme))  # the name with its options
            if step is not None:
                step(len(profiles), len(tables))
    _deliver_several(profiles, json_file, plot)
    for profile in profiles:
        output.fail_on(profile.findings, fail_on)


def _deliver_several(profiles: Sequence[Profile], json_file: str | None, plot: Path | None) -> None:
    from signalprop.report import findings
    from signalprop.report.plots import figure
    from signalprop.results.profile import SEVERAL

    key = "stream var: input -> after the last layer; grad ratio: variance, first layer over last"
    output.deliver(
        json_file,
        lambda: {"schema": SEVERAL, "profiles": [p.to_json() for p in profiles]},
        lambda: output.echo("\n".join([*findings.headline(*profiles), "", findings.overview(profiles), "", key])),
        output.picture(
            plot,
            lambda: figure(profiles),
            lambda: [(f"{p.scheme}, {p.architecture.n_layers} layers", p) for p in profiles],
        ),
    )
