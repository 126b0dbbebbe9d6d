"""`signalprop frontier`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from signalprop.cli import options as opt
from signalprop.cli import output, sources


@opt.of_a_network("seq_len", "norm", "vocab_size")
def frontier(
    arch: opt.Arch,
    changed: opt.Changes,
    scheme: opt.SchemeNames = None,
    layers: Annotated[str, typer.Option("--layers", metavar="N[,N...]", help="Numbers of layers.")] = "6,12,24,48,96",
    widths: Annotated[
        str | None, typer.Option("--widths", metavar="N[,N...]", help="Widths of the residual stream.")
    ] = None,
    option: opt.SchemeOption = None,
    text: opt.Text = None,
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="adam (adamw: the same but for its decay), sgd or muon.")
    ] = "adam",
    change: Annotated[
        float, typer.Option("--change", help="Change of the last stream, relative to it, that one step may make.")
    ] = 0.1,
    batch_size: opt.BatchSize = 8,
    seed: opt.Seed = 0,
    json_file: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Predict how far the first step of training moves each network, and the learning rate that this allows.

    For every scheme, depth and width: the change of the last stream by one step, per unit of learning rate, and the
    rate at which the step changes it by --change; then how that rate goes with depth and width, which is how a learning
    rate has to be carried over. In closed form, without PyTorch. The last lines say how far it can be off.

    \b
    Example:
      signalprop frontier tgs --scheme xavier,deepscalelm --layers 6,12,24,48 --plot frontier.png
      signalprop frontier gpt2 --scheme xavier,mup --layers 12 --widths 256,768,2048
    """
    from signalprop.data.batches import default_batch
    from signalprop.frontier import frontier as predicted
    from signalprop.report.frontier_plots import figure

    output.check_outputs(json_file, plot)
    schemes = opt.several_schemes(scheme, option)
    depths = opt.several_numbers(layers, "--layers", "a number of layers", "12, or 12,48") or []
    wide: Sequence[int | None] = opt.several_numbers(widths, "--widths", "a width", "256, or 256,1024") or [None]
    tables = [
        sources.parametrization(arch, changed | opt.changes(None, layers=n, d_model=d), name, option)
        for name in schemes
        for d in wide
        for n in depths
    ]
    known: Any = "adam" if optimizer == "adamw" else optimizer
    a = tables[0].architecture
    inputs = None if text is None else default_batch(a, text=text, batch_size=batch_size, seed=seed).statistics(a)
    with output.progress("predicting") as step:
        found = predicted(tables, known, change, batch_size, inputs, step)

    def show() -> None:
        output.echo(found.table() + "\n")
        output.facts(*(("note", note) for note in found.notes))

    output.deliver(json_file, found.to_json, show, output.picture(plot, lambda: figure(found)))
