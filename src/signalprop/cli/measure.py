"""`signalprop measure`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from signalprop.cli import options as opt


def measure(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A Hugging Face directory; or an ARCH, built with --scheme.")
    ],
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
    random_init: Annotated[
        bool, typer.Option("--random-init", help="Initialise the directory's model freshly instead of loading weights.")
    ] = False,
    text: opt.Text = None,
    no_gradient: opt.NoGradient = False,
    train_mode: Annotated[bool, typer.Option("--train-mode", help="Dropout active (directories: default off).")] = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Networks (or batches, of a directory's weights).")] = 1,
    batch_size: opt.BatchSize = 4,
    seed: opt.Seed = 0,
    all_rows: opt.All = False,
    json_file: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Measure every layer's signal with hooks, in one forward and backward pass over real text.

    A directory is measured with its saved weights (or --random-init), in its own tokens where it has a tokenizer.json. Any other
    ARCH is built with --scheme. The default text is the embedded one.

    Example: signalprop measure ./my-checkpoint --text book.txt --plot signal.png
    """
    from signalprop.cli.loading import load_model, model_batch
    from signalprop.errors import InputError, require
    from signalprop.profile import average
    from signalprop.report import findings, tables

    require("torch", "models")
    from signalprop.models import build
    from signalprop.probes import measure as measured
    from signalprop.probes.families import mapping_of

    opt.check_plot(plot)
    opt.check_json(json_file)
    changed = opt.changes(
        layers, d_model, heads, seq_len, dropout, activation, norm, norm_kind, vocab_size, assignments
    )
    profiles = []
    if opt.is_directory(model):
        if set(changed) - {"seq_len"} or scheme or option or qk_scale != 1:
            raise InputError("a directory's model is measured as it is; of the architecture only --seq-len can change")
        directory = Path(model)
        with opt.progress("measuring", seeds) as step:
            for k in range(seeds):
                if k == 0 or random_init:
                    live = load_model(directory, random_init=random_init, seed=seed + k).train(train_mode)
                a = mapping_of(live).architecture
                batch, read = model_batch(a.replace(**changed), directory, text, batch_size, seed + k)
                label = "random init" if random_init else "as is"
                profiles.append(measured(live, batch, backward=not no_gradient, scheme=label))
                step(k + 1, seeds)
    else:
        if random_init:
            raise InputError("--random-init belongs to a directory; an ARCH is always built with --scheme")
        p = opt.parametrization(model, changed, scheme, option, qk_scale)
        with opt.progress("measuring", seeds) as step:
            for k in range(seeds):
                batch, read = model_batch(p.architecture, None, text, batch_size, seed + k)
                live = build(p, seed=seed + k)
                profiles.append(measured(live, batch, backward=not no_gradient, scheme=p.scheme))
                step(k + 1, seeds)
    profile = average(profiles)
    if plot is not None:
        from signalprop.report.plots import save_plot

        save_plot(plot, profile)
    if opt.write_result(json_file, profile.to_json() if json_file else None):
        return
    typer.echo(tables.profile_table(profile, max_rows=None if all_rows else tables.MAX_ROWS))
    typer.echo()
    for line in [*findings.summary(profile), f"read                {read}"]:
        typer.echo(line)
    for line in findings.warnings(profile):
        typer.echo(f"warning             {line}")
