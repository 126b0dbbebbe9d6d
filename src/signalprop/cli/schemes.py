"""`signalprop schemes`."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from signalprop.cli import options as opt
from signalprop.cli import output, sources
from signalprop.errors import InputError

if TYPE_CHECKING:
    from signalprop.network.architecture import Architecture
    from signalprop.network.parametrization import Parametrization

SCHEMA = "signalprop/schemes/1"


@opt.of_a_network("layers", "d_model")
def schemes(
    changed: opt.Changes,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Describe this scheme.")] = None,
    architecture: Annotated[
        str | None, typer.Option("--architecture", metavar="ARCH", help="Say what comes out for this network.")
    ] = None,
    option: opt.SchemeOption = None,
    json_file: opt.Json = None,
) -> None:
    """List the initialisation schemes, or describe one.

    With a NAME: paper, equations, options. With --architecture what theory predicts that each does to that network; of
    a NAME also the table of its numbers.

    \b
    Example:
      signalprop schemes deepscalelm --architecture bert-base --layers 48
    """
    from signalprop.prediction import predict
    from signalprop.schemes import SCHEMES, scheme

    output.check_outputs(json_file)
    if architecture is None and (changed or option):
        raise InputError("--layers, --d-model, --set and --option need --architecture")
    if name is None:
        if option:
            raise InputError("--option needs the NAME of a scheme")
        everything = {key: _describe(cls) for key, cls in sorted(SCHEMES.items())}
        if architecture is not None:
            _predict_all(everything, sources.read_architecture(architecture, changed))
        listed = _listed if architecture is None else _compared
        output.deliver(
            json_file, lambda: {"schema": SCHEMA, "schemes": everything}, lambda: output.echo(listed(everything))
        )
        return
    cls = type(scheme(name))
    if architecture is not None:  # its table (as JSON a parametrization), and under the text what theory predicts
        table = sources.parametrization(architecture, changed, name, option)
        output.deliver(json_file, table.to_json, lambda: output.echo_profile(predict(table), lambda **_: str(table)))
        return
    item = _describe(cls)
    text = f"{name}\n\n{item['description']}\n\nsource   {item['paper']}\noptions  {_options(item)}"
    output.deliver(json_file, lambda: {"schema": SCHEMA, "schemes": {name: item}}, lambda: output.echo(text))


def _predict_all(everything: dict[str, dict[str, Any]], architecture: Architecture) -> None:
    """Add the prediction for an architecture to every scheme, or the reason why it refuses."""
    from signalprop.data.batches import default_statistics
    from signalprop.prediction import expected_cost, predict
    from signalprop.schemes import scheme

    inputs = default_statistics(architecture)
    tables: dict[str, Parametrization] = {}
    for name, item in everything.items():
        try:
            tables[name] = scheme(name)(architecture, inputs)
        except InputError as error:
            item["prediction"] = {"refused": str(error)}
    output.announce([expected_cost(table, inputs, "auto") for table in tables.values()])
    with output.progress("predicting") as step:
        for done, (name, table) in enumerate(tables.items(), start=1):
            item = everything[name]
            try:
                profile = predict(table, inputs)
            except InputError as error:
                item["prediction"] = {"refused": str(error)}
            else:
                stream, gradient = profile.forward["stream_out"], profile.gradient
                item["prediction"] = {
                    "fidelity": profile.fidelity,
                    "input_variance": profile.input["variance"],
                    "stream_variance": float(stream.variance[-1]),
                    "token_correlation": float(stream.token_correlation[-1]),
                    "gradient_ratio": None if gradient is None else float(gradient["stream_in"].variance[0]),
                    "sensitivity": profile.sensitivity()["mean"],
                }
            step(done, len(tables))


def _listed(everything: dict[str, dict[str, Any]]) -> str:
    from signalprop.results.text import text_table

    rows = [[key, item["summary"], _options(item), item["paper"]] for key, item in everything.items()]
    return text_table(["scheme", "what it does", "options", "source"], rows, left=4)


def _compared(everything: dict[str, dict[str, Any]]) -> str:
    from signalprop.results.text import number, text_table

    columns = ("input_variance", "stream_variance", "token_correlation", "gradient_ratio", "sensitivity")
    found = {name: item["prediction"] for name, item in everything.items()}
    rows = [[name, *(number(p.get(column)) for column in columns)] for name, p in found.items()]
    lines = [text_table(["scheme", "var in", "var out", "token corr", "grad ratio", "sensitivity"], rows), ""]
    lines += [f"refused  {name}: {p['refused']}" for name, p in found.items() if "refused" in p]
    lines.append(
        "variance of the stream; gradient's variance, first layer over last; branch over stream variance, added up"
    )
    return "\n".join(lines)


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
