"""`signalprop schemes`."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Annotated, Any

import typer

from signalprop.cli import options as opt
from signalprop.cli import output

SCHEMA = "signalprop/schemes/1"


def schemes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Describe this scheme.")] = None,
    architecture: Annotated[
        str | None, typer.Option("--architecture", metavar="ARCH", help="Print the scheme's table for this network.")
    ] = None,
    layers: opt.Layers = None,
    d_model: opt.DModel = None,
    option: opt.SchemeOption = None,
    assignments: opt.Set = None,
    json_file: opt.Json = None,
) -> None:
    """List the initialisation schemes, or describe one.

    With a NAME: paper, equations, options; with --architecture its numbers for that network.

    \b
    Example:
      signalprop schemes deepscalelm --architecture bert-base --layers 48
    """
    from signalprop.errors import InputError
    from signalprop.report.tables import text_table
    from signalprop.schemes import SCHEMES, scheme

    output.check_outputs(json_file)
    changed = opt.changes(assignments, layers=layers, d_model=d_model)
    if architecture is None and (changed or option):
        raise InputError("--layers, --d-model, --set and --option need --architecture")
    if name is None:
        if architecture is not None:
            raise InputError("--architecture needs the NAME of a scheme")
        everything = {key: _describe(cls) for key, cls in sorted(SCHEMES.items())}
        if output.write_result(json_file, {"schema": SCHEMA, "schemes": everything}):
            rows = [[key, item["summary"], _options(item), item["paper"]] for key, item in everything.items()]
            typer.echo(text_table(["scheme", "what it does", "options", "source"], rows, left=4))
        return
    cls = type(scheme(name))
    if architecture is not None:
        table = opt.parametrization(architecture, changed, name, option)
        if output.write_result(json_file, table.to_json()):
            typer.echo(str(table))
        return
    item = _describe(cls)
    if output.write_result(json_file, {"schema": SCHEMA, "schemes": {name: item}}):
        typer.echo(f"{name}\n\n{item['description']}\n\nsource   {item['paper']}\noptions  {_options(item)}")


def _describe(cls: Any) -> dict[str, Any]:
    defaults = {item.name: item.default for item in fields(cls)}
    return {
        "summary": cls.summary,
        "paper": cls.paper,
        "options": defaults,
        "description": inspect.cleandoc(cls.__doc__ or ""),
    }


def _options(item: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in item["options"].items()) or "-"
