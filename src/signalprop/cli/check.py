"""`signalprop check`."""

from __future__ import annotations

from textwrap import fill
from typing import Annotated

import typer

from signalprop.cli import options as opt
from signalprop.cli import output, sources
from signalprop.network.shown import COLUMNS


def check(
    model: Annotated[str, typer.Argument(metavar="DIR", help="A Hugging Face directory, or a name on the hub.")],
    scheme: Annotated[
        str | None,
        typer.Option(
            "--scheme",
            metavar=opt.SCHEME,
            help=f"{opt.WANTED} (default: what the checkpoint carries, as `apply` left it).",
        ),
    ] = None,
    data: opt.Arguments = None,
    json_file: opt.Json = None,
) -> None:
    """Check that a model starts with the weights of a scheme.

    Compares every weight's standard deviation with the scheme's: a right model fails once in 10,000 times. Exit status
    1 if anything is off, for the start-up of a training job.

    \b
    Example: signalprop check ./my-checkpoint --scheme gpt2
    """
    from signalprop.cli.loading import announce_model, called_with, load_model

    output.check_outputs(json_file)
    wanted = None if scheme is None else sources.scheme_or_table(scheme)
    from signalprop.repair.checks import check as checked

    announce_model(model)
    live = load_model(model, dtype="auto")  # statistics of weights are as exact, in a third of the memory of bfloat16's
    called_with(live, data)
    found = checked(live, wanted)

    good, failure = ([fill(found.summary(), COLUMNS), ""], None) if found.ok else ([], found.summary())

    def show() -> None:
        output.echo("\n".join([*good, found.table(), *found.notes]))

    output.deliver(json_file, found.to_json, show, failure=failure)
