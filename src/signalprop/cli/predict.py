"""`signalprop predict`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from signalprop.cli import options as opt
from signalprop.cli import output, sources
from signalprop.errors import InputError

_LONG = 3  # seconds from which a prediction says beforehand how long it takes

if TYPE_CHECKING:
    from signalprop.network.inputs import InputStatistics
    from signalprop.network.parametrization import Parametrization
    from signalprop.results.profile import Profile


@opt.of_a_network(layers=None)
def predict(
    arch: opt.Arch,
    changed: opt.Changes,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="N[,N...]", help="Number of layers; several give one table.")
    ] = None,
    scheme: opt.SchemeNames = None,
    option: opt.SchemeOption = None,
    qk_scale: opt.QkScale = 1.0,
    text: opt.Text = None,
    fidelity: Annotated[str, typer.Option("--fidelity", help="auto, moments, kernel or simulate.")] = "auto",
    no_gradient: opt.NoGradient = False,
    batch_size: opt.BatchSize = 4,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Networks that fidelity simulate averages.")] = 8,
    seed: opt.Seed = 0,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="Where fidelity simulate runs.")] = "cpu",
    all_rows: opt.All = False,
    json_file: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Predict every layer's signal, without PyTorch.

    Token statistics follow Zipf's law unless --text names a file, whose exact statistics are then used. Several schemes
    and depths, with commas between, give one table with a row for each pair, and one picture.

    \b
    Example:
      signalprop predict tgs --layers 192 --scheme deepscalelm --norm post --plot signal.png
      signalprop predict gpt2 --scheme xavier,deepscalelm --layers 12,48,192 --plot depths.png
    """
    from signalprop.data.batches import default_batch, default_statistics
    from signalprop.prediction import check_fidelity, expected_seconds
    from signalprop.prediction import predict as predicted

    output.check_outputs(json_file, plot)
    chosen = check_fidelity(fidelity)
    schemes: Sequence[str | None] = opt.several(scheme, "--scheme") or [None]
    depths: Sequence[int | None] = opt.several_numbers(
        layers, "--layers", "a number of layers", "12, or 12,48,192"
    ) or [None]
    many = len(schemes) * len(depths) > 1
    if many and all_rows:
        raise InputError("--all prints every layer of one network; leave it out, or give one scheme and one depth")
    if len(schemes) > 1 and option:
        raise InputError(f"--option is for one scheme; leave it out, or give one of {', '.join(map(str, schemes))}")
    tables = [  # all of them first: what is refused is refused before the long work
        sources.parametrization(arch, changed | opt.changes(None, layers=n), name, option, qk_scale)
        for name in schemes
        for n in depths
    ]

    def one(p: Parametrization) -> Profile:
        a, inputs = p.architecture, None
        if text is not None:
            inputs = default_batch(a, text=text, batch_size=batch_size, seed=seed).statistics(a)
        if chosen != "simulate":
            seconds = expected_seconds(p, inputs or default_statistics(a), chosen)
            if seconds > _LONG:
                output.note(
                    f"following every pair of {a.seq_len:,} tokens takes about {seconds:.0f} s; fewer tokens "
                    "(--seq-len) take less, and --fidelity moments, which averages over positions, milliseconds"
                )
            return predicted(p, inputs, fidelity=chosen, backward=not no_gradient)
        given = inputs or default_statistics(a)
        profile = _simulated(p, given, seeds, seed, batch_size, not no_gradient, opt.usable(device))
        return replace(profile, reads=given.source)

    if many:
        _deliver_several(_each(one, tables, chosen), json_file, plot)
    else:
        _deliver_one(one(tables[0]), all_rows, json_file, plot)


def _deliver_one(profile: Profile, all_rows: bool, json_file: str | None, plot: Path | None) -> None:
    from signalprop.report import tables

    def show() -> None:
        output.echo_profile(profile, partial(tables.profile_table, profile), all_rows=all_rows)

    output.deliver(json_file, profile.to_json, show, output.picture(plot, profile))


def _each(one: Callable[[Parametrization], Profile], tables: Sequence[Parametrization], fidelity: str) -> list[Profile]:
    """A prediction of every table; simulations show their own progress."""
    if fidelity == "simulate":
        return [one(p) for p in tables]
    found = []
    with output.progress("predicting") as step:
        for done, p in enumerate(tables, start=1):
            found.append(one(p))
            step(done, len(tables))
    return found


def _deliver_several(profiles: Sequence[Profile], json_file: str | None, plot: Path | None) -> None:
    from signalprop.report import findings
    from signalprop.results.profile import SEVERAL

    def show() -> None:
        output.echo("\n".join(findings.headline(*profiles)))
        output.echo()
        output.echo(findings.overview(profiles))
        output.echo()
        output.echo("stream var: input -> after the last layer; grad ratio: variance, first layer over last")

    def value() -> dict[str, object]:
        return {"schema": SEVERAL, "profiles": [p.to_json() for p in profiles]}

    output.deliver(json_file, value, show, output.picture(plot, profiles))


def _simulated(
    p: Parametrization,
    inputs: InputStatistics,
    seeds: int,
    seed: int,
    batch_size: int,
    backward: bool,
    device: str,
) -> Profile:
    """As `signalprop.prediction.predict` at fidelity simulate, with all that simulations have to choose."""
    from signalprop.measurement.simulation import simulate

    with output.progress("simulating") as step:
        return simulate(
            p, inputs, n_seeds=seeds, seed=seed, backward=backward, batch_size=batch_size, device=device, progress=step,
        )  # fmt: skip
