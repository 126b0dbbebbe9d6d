"""`signalprop predict`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from signalprop.cli import options as opt
from signalprop.cli import output

if TYPE_CHECKING:
    from signalprop.network.inputs import InputStatistics
    from signalprop.network.parametrization import Parametrization
    from signalprop.results.profile import Profile


def predict(
    arch: opt.Arch,
    layers: opt.Layers = None,
    d_model: opt.DModel = None,
    heads: opt.Heads = None,
    seq_len: opt.SeqLen = None,
    dropout: opt.Dropout = None,
    activation: opt.Activation = None,
    norm: opt.Norm = None,
    norm_kind: opt.NormKind = None,
    vocab_size: opt.VocabSize = None,
    assignments: opt.Set = None,
    scheme: opt.SchemeName = None,
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

    Token statistics follow Zipf's law unless --text names a file, whose exact statistics are then used.

    \b
    Example:
      signalprop predict tgs --layers 192 --scheme deepscalelm --norm post --plot signal.png
    """
    from signalprop.data.batches import default_batch, default_statistics
    from signalprop.prediction import check_fidelity
    from signalprop.prediction import predict as predicted
    from signalprop.report import findings, tables

    output.check_outputs(json_file, plot)
    chosen = check_fidelity(fidelity)
    changed = opt.changes(
        assignments, layers=layers, d_model=d_model, heads=heads, seq_len=seq_len, dropout=dropout,
        activation=activation, norm=norm, norm_kind=norm_kind, vocab_size=vocab_size,
    )  # fmt: skip
    p = opt.parametrization(arch, changed, scheme, option, qk_scale)
    inputs = None
    if text is not None:
        inputs = default_batch(p.architecture, text=text, batch_size=batch_size, seed=seed).statistics(p.architecture)
    if chosen == "simulate":
        given = inputs or default_statistics(p.architecture)
        profile = _simulated(p, given, seeds, seed, batch_size, not no_gradient, opt.usable(device))
        profile = replace(profile, reads=given.source)
    else:
        profile = predicted(p, inputs, fidelity=chosen, backward=not no_gradient)

    def show() -> None:
        output.echo_verdict(findings.headline(profile), findings.warnings(profile))
        output.echo_table(partial(tables.profile_table, profile), all_rows=all_rows)
        output.echo("\n".join(findings.summary(profile)))

    output.deliver(json_file, profile.to_json, show, output.picture(plot, profile))


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
