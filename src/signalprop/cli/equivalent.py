"""`signalprop equivalent`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from signalprop.cli import options as opt
from signalprop.cli import output, sources
from signalprop.errors import InputError

if TYPE_CHECKING:
    from signalprop.network.parametrization import Parametrization
    from signalprop.schemes.equivalence import Equivalence


@opt.of_a_network("layers", "d_model", "norm")
def equivalent(
    arch: opt.Arch,
    changed: opt.Changes,
    other: Annotated[str | None, typer.Argument(metavar="OTHER", help="The other network (default: ARCH).")] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            "--scheme",
            metavar="NAME[,NAME]",
            autocompletion=opt.schemes_that_begin,
            help="Initialisation of both networks, or of the one and the other.",
        ),
    ] = None,
    json_file: opt.Json = None,
) -> None:
    """Say whether two networks are the same function of their weights, in other units.

    Where they are: the unit of the one's stream over the other's after every sublayer, and the factors on weights.
    Where not: the first sublayer that differs, and in what (exit status 1). Presets, files and directories as for
    `predict`; options are for both.

    \b
    Example:
      signalprop equivalent gpt2 --scheme running-mean,peri-ln
    """
    from signalprop.schemes.equivalence import equivalent as compared

    output.check_outputs(json_file)
    schemes = opt.several_schemes(scheme)
    if len(schemes) > 2 or (other is None and len(schemes) < 2):
        raise InputError(
            "equivalent takes two networks: give OTHER, or two schemes as in --scheme running-mean,peri-ln"
        )
    one, two = (
        sources.parametrization(source, changed, name, None)
        for source, name in ((arch, schemes[0]), (other or arch, schemes[-1]))
    )
    found = compared(one, two)
    output.deliver(
        json_file,
        found.to_json,
        lambda: output.echo(_shown(found, one)),
        failure=None if found.same else found.summary(),
    )


def _shown(found: Equivalence, p: Parametrization) -> str:
    """The answer, the gauge layer by layer, and what it does not say."""
    from signalprop.results.text import text_table
    from signalprop.schemes.equivalence import layer_table

    if not found.same:
        return found.summary()
    header, rows = layer_table(found, p)
    kept = rows if len(rows) <= 12 else [*rows[:6], ["..."] + [""] * (len(header) - 1), *rows[-5:]]
    return "\n".join([found.summary(), "", text_table(header, kept), *(f"note: {note}" for note in found.notes)])
