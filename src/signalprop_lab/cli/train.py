"""`signalprop train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from signalprop.cli import options as opt
from signalprop.cli import output

if TYPE_CHECKING:
    from signalprop_lab.training.recipe import Recipe
    from signalprop_lab.training.result import Result

Device = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="Where to train (default: a GPU if there is one).")
]


def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a recipe; none: list them.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Directory of the run (default: runs/NAME).")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Field of the recipe, e.g. optimizer.learning_rate=1e-3 (repeatable)."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last whole checkpoint.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the recipe, and train nothing.")] = False,
    device: Device = None,
    fail_on: opt.FailOn = None,
    json_file: opt.Json = None,
) -> None:
    """Train a model as a recipe says.

    The directory gets the recipe, metrics, the signal of every sublayer, checkpoints and report.html. Under torchrun
    the processes share the batch.

    \b
    Example: signalprop train gpt-small --set budget.steps=200 --out runs/first
             signalprop train gpt-small --out runs/first --resume
    """
    import os

    from signalprop.errors import require

    require("yaml", "training")
    from signalprop_lab.training.recipe import load_recipe

    output.check_outputs(json_file)
    output.check_severity(fail_on)
    if recipe is None:
        _list(json_file)
        return
    chosen = load_recipe(recipe, settings or ())
    if show:
        short = output.room() is not None
        more = "# every other field has its default; --show > FILE writes them all\n"
        text = chosen.to_yaml(short=short) + more * short
        output.deliver(json_file, chosen.to_json, lambda: output.echo(text, nl=False))
        return
    require("torch", "models")
    require("accelerate", "training")
    from signalprop.diagnosis.loading import quiet
    from signalprop_lab.training import run
    from signalprop_lab.training.processes import see_only

    if device is not None:
        see_only(opt.usable(device))

    quiet()
    folder = out or Path("runs") / chosen.name
    result = run.train(chosen, folder, resume=resume)
    if os.environ.get("RANK", "0") != "0":
        return
    from signalprop_lab.report.runs import read_run

    output.deliver(
        json_file,
        result.to_json,
        lambda: _print(result, folder),
        page=folder / "report.html",
        items=lambda: [(chosen.name, read_run(folder))],
    )
    if result.status != "finished":
        raise typer.Exit(1)
    output.fail_on(result.findings, fail_on)


def _list(json_file: str | None) -> None:
    """What comes with the package: where it reads, whether it is of a size for GPUs, how long, and what it is for."""
    from signalprop.results.text import columns
    from signalprop_lab.training.recipe import SCHEMA, load_recipe
    from signalprop_lab.training.recipe_files import read_yaml, shipped
    from signalprop_lab.training.sources import needs_network

    recipes = {name: load_recipe(name) for name in shipped() if read_yaml(name).get("schema", SCHEMA) == SCHEMA}
    rows: dict[str, dict[str, Any]] = {
        name: {
            "reads": recipe.data.source,
            "network": needs_network(recipe.data),
            "gpu": recipe.precision != "fp32",
            "seconds": _seconds(recipe),
            "examples": recipe.budget.steps * recipe.budget.batch_size,
            "description": " ".join(recipe.description.split()),
        }
        for name, recipe in recipes.items()
    }
    lines = columns([f"{name:<21}{_time(row['seconds'])}{' GPU' * row['gpu']}" for name, row in rows.items()])
    note = (
        "Times are rough: 1e14 FLOP/s of one GPU, or 4e10 of two CPU cores.\n"
        "`signalprop train NAME --show` prints a recipe, --json what each is for."
    )
    output.deliver(json_file, lambda: rows, lambda: output.echo(f"{lines}\n\n{note}"))


def _seconds(recipe: Recipe) -> float | None:
    """How long a run takes, within a factor of some three: its FLOPs at 1e14 a second of one GPU, or 4e10 of two CPU
    cores (what recipes in fp32 are for); None: the network is not built by signalprop."""
    from signalprop.results.cost import train_flops
    from signalprop_lab.training.recipe import architecture_of

    if recipe.model.architecture is None:
        return None
    data, of_classes = recipe.data, {"head": "classes", "n_classes": 2}
    facts: dict[str, Any] = {"vocab_size": data.tokenizer.vocab_size, "seq_len": data.seq_len}
    if recipe.task.endswith("classification"):
        facts = of_classes | ({} if recipe.task.startswith("image") else facts)
    architecture = architecture_of(recipe, {k: v for k, v in facts.items() if k not in recipe.model.architecture})
    flops = train_flops(architecture, recipe.budget.batch_size, recipe.budget.steps)["total"]
    return flops / (4e10 if recipe.precision == "fp32" else 1e14)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    size, unit = next(((n, unit) for n, unit in ((86400, "days"), (3600, "h")) if seconds > 2 * n), (60, "min"))
    return f"{seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"


def _print(result: Result, folder: Path) -> None:
    at_the_end = dict.fromkeys(item.name for item in result.findings if item.step == result.steps)
    status = ", but with ".join(filter(None, (result.status, " and ".join(at_the_end))))
    told = {
        "status": status if result.reason is None else f"{result.status}: {result.reason}",
        "steps": f"{result.steps}",
        "training loss": _nats(result.train_loss, result.status),
        "validation loss": f"{_nats(result.eval_loss, result.status)} (best guess without input: {result.chance:.4f})",
        **{name.replace("_", " "): f"{x:.5g}" for name, x in result.scores.items() if x is not None},
        "parameters": f"{result.parameters:,}"
        + ("" if result.trained_parameters == result.parameters else f", {result.trained_parameters:,} trained"),
        **({} if result.throughput is None else {"throughput": f"{result.throughput:,.0f} {result.unit}/s"}),
        "seconds": f"{result.seconds:.0f}",
        "folded": f"{folder / 'folded'}" if not result.folded else f"no: {result.folded}",
        "run": f"{folder}",
    }
    wrong = [("wrong", f"{item.name} at step {item.step}: {item.text}") for item in result.findings]
    output.facts(*told.items(), *wrong)


def _nats(loss: float | None, status: str) -> str:
    if loss is not None:
        return f"{loss:.4f}"
    return "not finite" if status == "diverged" else "not evaluated"
