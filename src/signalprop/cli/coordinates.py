"""`signalprop coordinates`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from signalprop.cli import options as opt
from signalprop.cli import output, sources


@opt.of_a_network("layers", "seq_len", "vocab_size")
def coordinates(
    arch: opt.Arch,
    changed: opt.Changes,
    widths: Annotated[
        str, typer.Option("--widths", metavar="N,N[,N...]", help="Widths of the residual stream.")
    ] = "64,128,256",
    scheme: opt.SchemeName = None,
    option: opt.SchemeOption = None,
    text: opt.Text = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="adamw, muon or sgd.")] = "adamw",
    lr: Annotated[
        float | None, typer.Option("--lr", help="Learning rate (default: 1e-3, for muon 0.02, for sgd 0.1).")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of training.")] = 4,
    tolerance: Annotated[float, typer.Option("--tolerance", help="How far from 0 a slope may be.")] = 0.25,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Networks of each width.")] = 2,
    batch_size: opt.BatchSize = 4,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    json_file: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Check that what a step of training does to the signal does not depend on the width.

    Networks of every width are trained for a few steps on one batch, with the learning rates that the scheme asks for.
    Shows how much each probe changed, with the slope over the width. Exit status 1 when a slope is further from 0
    than the tolerance and two standard errors.

    \b
    Example:
      signalprop coordinates gpt2 --layers 2 --widths 64,128,256 --scheme mup --option base_width=64
    """
    output.check_outputs(json_file, plot=plot)
    chosen = opt.several_numbers(widths, "--widths", "a width", "64,128,256") or []
    tables = [sources.parametrization(arch, changed | {"d_model": w}, scheme, option, longest=64) for w in chosen]
    place = opt.usable(device)
    from signalprop.data.batches import default_batch
    from signalprop.monitoring.coordinates import coordinates as checked
    from signalprop.report.against_width import coordinates_section
    from signalprop.report.plots import sections_figure

    batch = default_batch(tables[0].architecture, text=text, batch_size=batch_size, seed=seed)
    with output.progress("training") as step:
        found = checked(
            tables, optimizer=optimizer, lr=lr, steps=steps, seeds=seeds,  # type: ignore[arg-type]
            seed=seed, batch=batch, tolerance=tolerance, device=place, progress=step,
        )  # fmt: skip

    def picture() -> Any:
        return sections_figure([coordinates_section(found)], "Coordinate check", columns=1, size=(7.0, 4.8))

    good, failure = ([found.summary()], None) if found.ok else ([], found.summary())
    output.deliver(
        json_file,
        found.to_json,
        lambda: output.echo("\n".join([found.table(), *good])),
        output.picture(
            plot, lambda: sections_figure([coordinates_section(found)], "Coordinate check", columns=1, size=(7.0, 4.8))
        ),
        failure=failure,
    )
