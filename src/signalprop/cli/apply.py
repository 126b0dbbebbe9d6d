"""`signalprop apply`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from signalprop.cli import checkpoints, output, sources
from signalprop.cli import options as opt

SCHEMA = "signalprop/apply/1"

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face directory.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="The new directory; written whole or not at all.")]


def apply(
    directory: Directory,
    scheme: opt.WantedScheme,
    out: Out,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Draw new weights even if the directory's are trained.")
    ] = False,
    change_function: Annotated[
        bool, typer.Option("--change-function", help="Keep trained weights even if they then compute something else.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the weights.")] = 0,
    data: opt.Arguments = None,
    json_file: opt.Json = None,
) -> None:
    """Put a scheme into a Hugging Face model, in a new directory.

    Trained weights are kept, and a scheme that would change what they compute is refused without --redraw or
    --change-function. `signalprop fold` makes the result one for plain transformers.

    \b
    Example: signalprop apply ./my-checkpoint --scheme deepscalelm --out ./deep
    """
    from signalprop.cli.loading import announce_model, called_with, load_model

    output.check_outputs(json_file)
    checkpoints.check_out(out)
    wanted = sources.scheme_or_table(scheme)
    from signalprop import repair
    from signalprop.attachment.anatomy import attach
    from signalprop.repair.freshness import learnt
    from signalprop.repair.record import the_record
    from signalprop.repair.splices import trained_multipliers
    from signalprop.repair.undoing import thrown_away

    unread = redraw or not checkpoints.has_weights(directory)
    announce_model(directory)
    model = load_model(directory, random_init=unread, seed=seed, hint="--redraw draws new ones", dtype="auto")
    called_with(model, data)
    dtype = checkpoints.stored_type(model)
    attached = attach(model)
    draws = unread or not learnt(attached)
    half = next(model.parameters()).dtype.itemsize < 4
    if half and (attached.mapping.stream_only or not draws):  # what weights are, and compute, float32 shows
        attached = attach(model.float())
    thrown_away(model)
    repair.apply(attached, wanted, initialize=draws, redraw=draws, change_function=change_function, seed=seed)
    record = the_record(model)
    spliced = [name for name, module in model.named_modules() if name and hasattr(type(module), "_mixins")]
    with checkpoints.written_whole(out) as folder:
        repair.save(model.to(dtype), folder)
        checkpoints.copy_companions(directory, folder)
    result = {
        "schema": SCHEMA,
        "out": str(out),
        "class_name": type(model).__name__,
        "scheme": record.parametrization.scheme,
        "weights": "kept" if record.kept else "drawn",
        "seed": None if record.kept else seed,
        "function_changed": record.function_changed,
        "multiplied": spliced,
        "added": list(trained_multipliers(model)),
        "eps_error": record.eps_error,
    }
    output.deliver(json_file, lambda: result, lambda: output.facts(*_lines(result)))


def _lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    drawn = f"drawn with seed {result['seed']}" if result["weights"] == "drawn" else "kept"
    if result["function_changed"]:
        drawn += f"; what they compute has changed: {result['function_changed']}"
    lines = [
        ("scheme", result["scheme"]),
        ("model", f"{result['class_name']}, weights {drawn}"),
        ("multipliers", f"on {len(result['multiplied'])} modules; {len(result['added'])} parameters added"),
    ]
    if result["eps_error"] > 0:
        lines.append(("epsilon", f"outputs of norms change by at most {result['eps_error']:.1e}"))
    return [*lines, ("written", f"{result['out']}, for signalprop.load")]
