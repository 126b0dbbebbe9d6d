"""`signalprop compute`."""

from __future__ import annotations

from typing import Annotated

import typer

from signalprop.cli import options as opt
from signalprop.cli import output, sources

SCHEMA = "signalprop/compute/1"


@opt.of_a_network("layers", "d_model", "heads", "seq_len", "vocab_size")
def compute(
    arch: opt.Arch,
    changed: opt.Changes,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Sequences per step.")] = 256,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimiser steps.")] = 100_000,
    output_fraction: Annotated[
        float | None, typer.Option("--output-fraction", help="Share of positions that go through the head.")
    ] = None,
    json_file: opt.Json = None,
) -> None:
    """Count parameters and training FLOPs.

    Parameters are exact; FLOPs are counted as in ELECTRA and in the papers' Table 24.

    \b
    Example:
      signalprop compute bert-large --layers 48 --d-model 512 --steps 50000
    """
    from signalprop.results.cost import active_parameters, count_parameters, train_flops
    from signalprop.results.text import text_table

    output.check_outputs(json_file)
    architecture = sources.read_architecture(arch, changed)
    parameters = count_parameters(architecture)
    active = active_parameters(architecture)
    flops = train_flops(architecture, batch_size, steps, output_fraction)
    result = {
        "schema": SCHEMA,
        "architecture": architecture.model_dump(mode="json", exclude_defaults=True),
        "parameters": parameters,
        "active_parameters": active,
        "train_flops": flops,
        "batch_size": batch_size,
        "steps": steps,
    }
    rows = [[part, f"{count:,}", f"{flops[part]:.3e}" if part in flops else "-"] for part, count in parameters.items()]
    if active < parameters["total"]:
        rows.append(["of which a token meets", f"{active:,}", "-"])
    header = ["part", "parameters", f"FLOPs of {steps:,} steps"]
    output.deliver(json_file, lambda: result, lambda: output.echo(text_table(header, rows)))
