"""`signalprop predict`."""

from __future__ import annotations

from typing import Annotated

import typer

from signalprop.cli import options as opt


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
    fidelity: Annotated[str, typer.Option(help="auto, moments, kernel or simulate.")] = "auto",
    no_gradient: opt.NoGradient = False,
    batch_size: opt.BatchSize = 4,
    seed: opt.Seed = 0,
    all_rows: opt.All = False,
    json_file: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Predict every layer's signal from a description, without PyTorch.

    Token statistics follow Zipf's law unless --text names a file, whose exact statistics are then used.

    Example: signalprop predict tgs --layers 192 --scheme deepscalelm --norm post --plot signal.png
    """
    from signalprop.data import default_batch
    from signalprop.prediction import check_fidelity
    from signalprop.prediction import predict as predicted
    from signalprop.report import findings, tables

    opt.check_plot(plot)
    opt.check_json(json_file)
    chosen = check_fidelity(fidelity)
    changed = opt.changes(
        layers, d_model, heads, seq_len, dropout, activation, norm, norm_kind, vocab_size, assignments
    )
    p = opt.parametrization(arch, changed, scheme, option, qk_scale)
    inputs = None
    if text is not None:
        inputs = default_batch(p.architecture, text=text, batch_size=batch_size, seed=seed).statistics(p.architecture)
    profile = predicted(p, inputs, fidelity=chosen, backward=not no_gradient)
    if plot is not None:
        from signalprop.report.plots import save_plot

        save_plot(plot, profile)
    if opt.write_result(json_file, profile.to_json() if json_file else None):
        return
    typer.echo(tables.profile_table(profile, max_rows=None if all_rows else tables.MAX_ROWS))
    typer.echo()
    for line in findings.summary(profile):
        typer.echo(line)
    for line in findings.warnings(profile):
        typer.echo(f"warning             {line}")
