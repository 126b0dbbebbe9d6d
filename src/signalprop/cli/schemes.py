"""`signalprop schemes`."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from signalprop.cli import options as opt
from signalprop.cli import output, sources
from signalprop.errors import InputError
from signalprop.network.shown import COLUMNS
from signalprop.results.text import listing

if TYPE_CHECKING:
    from signalprop.network.architecture import Architecture
    from signalprop.network.parametrization import Parametrization
    from signalprop.prediction import Cost
    from signalprop.results.profile import Profile

SCHEMA = "signalprop/schemes/1"
_BEST = 12  # of the schemes for a network
_KEY = (
    "gradient: variance, first layer over last; stream: variance at the top; tokens: their correlation there. Schemes "
    "without a warning come first, on top the most even gradient after the first layer (small embeddings raise the "
    "first layer's, as in models that train); their numbers are within 1 %"
)


def schemes(
    layers: opt.Layers = None,
    assignments: opt.Set = None,
    name: Annotated[
        str | None, typer.Argument(metavar=opt.SCHEME, help="Describe this scheme; with --for it may have options.")
    ] = None,
    architecture: Annotated[
        str | None, typer.Option("--for", metavar="ARCH", help="Predict this network under the scheme, or under each.")
    ] = None,
    json_file: opt.Json = None,
) -> None:
    """List the initialisation schemes, or describe one.

    With --for: what theory predicts for that network, at 128 tokens at most.

    \b
    Example: signalprop schemes --for tgs --layers 48
             signalprop schemes deepscalelm --for bert-base --layers 48
    """
    from signalprop.data.batches import default_statistics
    from signalprop.prediction import expected_cost, predict
    from signalprop.schemes import SCHEMES, scheme

    output.check_outputs(json_file)
    changed = opt.changes(assignments, n_layers=layers)
    if architecture is None and changed:
        raise InputError("--layers and --set need --for")
    if name is None:
        everything = {key: _describe(cls) for key, cls in sorted(SCHEMES.items())}
        if architecture is not None:
            everything = _predict_all(everything, sources.read_architecture(architecture, changed))
        listed = _listed if architecture is None else _compared
        output.deliver(
            json_file, lambda: {"schema": SCHEMA, "schemes": everything}, lambda: output.echo(listed(everything))
        )
        return
    if architecture is not None:  # its table (as JSON a parametrization), and under the text what theory predicts
        table = sources.parametrization(architecture, changed, name)
        output.announce([expected_cost(table, default_statistics(table.architecture), "auto")], chosen=False)
        profile = predict(table)

        def rows(*, max_rows: int = 6, **_: object) -> str:
            return table.table(2 * max_rows - 2)

        show = partial(output.echo_profile, profile, rows, whole="predict --all")
        output.deliver(json_file, table.to_json, show)
        return
    name, options = opt.name_and_options(name)
    item = _describe(type(scheme(str(name), **options)))
    about = [fill(part, COLUMNS, break_on_hyphens=False) for part in item["description"].split("\n\n")]
    facts = listing([("source", item["paper"]), ("options", _options(item))])
    text = "\n\n".join([str(name), *about, facts])
    output.deliver(json_file, lambda: {"schema": SCHEMA, "schemes": {name: item}}, lambda: output.echo(text))


def _predict_all(everything: dict[str, dict[str, Any]], architecture: Architecture) -> dict[str, dict[str, Any]]:
    """The schemes with the prediction for an architecture, the best first, or the reason why one refuses."""
    from signalprop.advice import rank_of
    from signalprop.data.batches import default_statistics, shortened
    from signalprop.ranking import expected_cost_of_ranking, predict_all_for_ranking
    from signalprop.schemes import scheme

    a = shortened(architecture)
    inputs, ranks = default_statistics(a), dict.fromkeys(everything, math.inf)
    tables: dict[str, Parametrization] = {}
    costs: list[Cost] = []
    for name, item in everything.items():
        try:
            tables[name] = scheme(name)(a, inputs)
        except InputError as error:
            item["prediction"] = {"refused": str(error)}
        else:
            costs.append(expected_cost_of_ranking(tables[name], inputs, together=True))
            output.refuse_hours(costs)  # before the tables alone take minutes
    output.announce(costs, chosen=False)
    alike: dict[Any, list[str]] = {}
    for name, table in tables.items():
        alike.setdefault(_signals(table), []).append(name)
    firsts, groups = [tables[names[0]] for names in alike.values()], list(alike.values())
    with output.progress("predicting") as step:
        for done, (place, profile) in enumerate(predict_all_for_ranking(firsts, inputs), start=1):
            for name in groups[place]:
                if isinstance(profile, InputError):
                    everything[name]["prediction"] = {"refused": str(profile)}
                else:
                    ranks[name] = rank_of(profile)
                    everything[name]["prediction"] = _in_json(profile)
            step(done, len(firsts))
    return {name: everything[name] for name in sorted(everything, key=lambda name: (ranks[name], name))}


def _signals(table: Parametrization) -> tuple[Any, ...]:
    """What signals depend on in a table, as a key: all but learning rates and the shape of draws."""
    import numpy as np

    from signalprop.network.kinds import drawn_rows

    columns = (x for name, x in table.columns().items() if not name.startswith("learning_rate"))
    drawn = tuple(table.distribution.items()) if drawn_rows(table).any() else ()
    models = (table.architecture, table.embedding, table.head, table.shaping)
    numbers = b"".join(np.ascontiguousarray(x).tobytes() for x in (table.placement, *columns))
    return numbers, drawn, *(model.model_dump_json() for model in models)


def _in_json(profile: Profile) -> dict[str, Any]:
    stream, gradient = profile.forward["stream_out"], profile.gradient
    return {
        "fidelity": profile.fidelity,
        "input_variance": profile.input["variance"],
        "stream_variance": float(stream.variance[-1]),
        "token_correlation": float(stream.token_correlation[-1]),
        "gradient_ratio": None if gradient is None else float(gradient["stream_in"].variance[0]),
        "sensitivity": profile.sensitivity()["mean"],
        "findings": profile.findings.to_json(),
    }


def _listed(everything: dict[str, dict[str, Any]]) -> str:
    """The names, by what the schemes set in a network."""
    groups: dict[str, list[str]] = {word: [] for word in _SETS}
    for name in everything:
        groups[_what_it_sets(name)].append(name)
    lines = listing([(word, ", ".join(names)) for word, names in groups.items()])
    return f"{lines}\n\n`signalprop schemes NAME`: paper, equations, options; --for ARCH: predictions"


_SETS = (
    "weights",
    "weights, multipliers",
    "pre-norm",
    "post-norm",
    "sandwich-norm",
    "mixed norms",
    "no norms",
    "other",
)


def _what_it_sets(name: str) -> str:
    """The placement of norms that a scheme asks for; of one that takes any, whether it sets multipliers."""
    from signalprop.network.architecture import Architecture
    from signalprop.schemes import scheme

    networks = [
        Architecture.preset("tgs", kind="decoder", n_layers=4, norm_placement=given) for given in ("pre", "post")
    ]
    try:
        pre, post = (scheme(name)(network) for network in networks)
    except InputError:
        return "other"
    placement = pre.architecture.norm_placement
    if placement != post.architecture.norm_placement:
        return "weights, multipliers" if (pre.skip != 1).any() or (pre.branch != 1).any() else "weights"
    if not isinstance(placement, str):
        return "mixed norms"
    return "no norms" if placement == "none" else f"{placement}-norm"


def _compared(everything: dict[str, dict[str, Any]]) -> str:
    """A ranked table of at most 80 columns, the best first; the others by their names."""
    from signalprop.results.text import number, text_table

    found = {name: item["prediction"] for name, item in everything.items() if "refused" not in item["prediction"]}
    refused = [name for name, item in everything.items() if "refused" in item["prediction"]]
    columns = ("gradient_ratio", "stream_variance", "token_correlation")
    rows = [[name, *(number(p[column]) for column in columns), _first(p["findings"])] for name, p in found.items()]
    lines = [text_table(["scheme", "gradient", "stream", "tokens", "warning"], rows[:_BEST])]
    more = [row[0] for row in rows[_BEST:]]
    lines += (
        [fill(f"then: {', '.join(more)} (--json has their numbers)", COLUMNS, break_on_hyphens=False)] if more else []
    )
    lines += [fill(f"do not apply: {', '.join(refused)} (see schemes NAME --for ARCH)", COLUMNS)] if refused else []
    return "\n".join([*lines, fill(_KEY, COLUMNS)])


def _first(findings: list[dict[str, Any]]) -> str:
    names = [item["name"] for item in findings]
    return "-" if not names else names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _describe(cls: Any) -> dict[str, Any]:
    defaults = {item.name: item.default for item in fields(cls)}
    return {
        "summary": cls.summary,
        "paper": cls.paper,
        "options": defaults,
        "description": inspect.cleandoc(cls.__doc__ or "").partition("\n\nRaises:")[0],
    }


def _options(item: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in item["options"].items()) or "-"
