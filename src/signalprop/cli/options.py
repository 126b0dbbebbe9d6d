"""Options that commands share, and what they mean: a network from a name or a file, a scheme, data."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from signalprop.architecture import Architecture
from signalprop.errors import InputError
from signalprop.parametrization import SCHEMA, Parametrization
from signalprop.schemes import scheme
from signalprop.storage import read_json, write_json

Arch = Annotated[
    str,
    typer.Argument(
        metavar="ARCH",
        help="A preset (tgs, bert-base, gpt2, llama-130m, ...), a JSON file with an architecture or a parametrization, "
        "or a Hugging Face directory.",
    ),
]
Layers = Annotated[int | None, typer.Option("--layers", help="Number of layers.")]
DModel = Annotated[int | None, typer.Option("--d-model", help="Width of the residual stream.")]
Heads = Annotated[int | None, typer.Option("--heads", help="Attention heads.")]
SeqLen = Annotated[int | None, typer.Option("--seq-len", help="Tokens per sequence.")]
Dropout = Annotated[float | None, typer.Option("--dropout", help="Dropout probability, from 0 up to but not 1.")]
Activation = Annotated[str | None, typer.Option("--activation", help="relu, gelu, silu, tanh, ...")]
Norm = Annotated[str | None, typer.Option("--norm", help="Norm placement: pre, post, sandwich or none.")]
NormKind = Annotated[str | None, typer.Option("--norm-kind", help="layernorm or rmsnorm.")]
VocabSize = Annotated[int | None, typer.Option("--vocab-size", help="Rows of the token table.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Any other field of the architecture (repeatable), e.g. gated=true."),
]
SchemeName = Annotated[str | None, typer.Option("--scheme", help="Initialisation scheme; `signalprop schemes` lists them.")]
SchemeOption = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="Option of the scheme (repeatable), e.g. k=2."),
]
QkScale = Annotated[
    float, typer.Option("--qk-scale", help="Multiply the standard deviation of query and key weights, e.g. 2.")
]
Text = Annotated[Path | None, typer.Option("--text", help="UTF-8 text to read; see the command for its default.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Sequences per batch.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of weights and data.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is standard output.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the result (.png, .svg or .pdf).")]
All = Annotated[bool, typer.Option("--all", help="Print every sublayer instead of a selection.")]
NoGradient = Annotated[bool, typer.Option("--no-gradient", help="Forward pass only.")]

DEFAULT_SCHEME = "xavier"


def changes(
    layers: int | None,
    d_model: int | None,
    heads: int | None,
    seq_len: int | None,
    dropout: float | None,
    activation: str | None,
    norm: str | None,
    norm_kind: str | None,
    vocab_size: int | None,
    assignments: list[str] | None,
) -> dict[str, Any]:
    """Fields of the architecture that the options change."""
    named = {
        "n_layers": layers,
        "d_model": d_model,
        "n_heads": heads,
        "seq_len": seq_len,
        "dropout": dropout,
        "activation": activation,
        "norm_placement": norm,
        "norm": norm_kind,
        "vocab_size": vocab_size,
    }
    return {key: value for key, value in named.items() if value is not None} | _assignments(assignments, "--set")


def _assignments(items: list[str] | None, option: str) -> dict[str, Any]:
    """`key=value` pairs; values are JSON, or plain words."""
    out: dict[str, Any] = {}
    for item in items or []:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise InputError(f"{option} {item!r} is not KEY=VALUE")
        try:
            out[key] = json.loads(text)
        except json.JSONDecodeError:
            out[key] = text
    return out


def is_directory(source: str) -> bool:
    """Whether an ARCH names a Hugging Face directory (or its config.json)."""
    path = Path(source)
    return path.is_dir() or path.name == "config.json"


def parametrization(
    source: str,
    changed: dict[str, Any],
    scheme_name: str | None,
    scheme_options: list[str] | None,
    qk_scale: float = 1.0,
) -> Parametrization:
    """The table of numbers that ARCH, the changes and the scheme name.

    Raises:
        InputError: nothing of that name, a bad value, or changes to a finished parametrization.
    """
    options = _assignments(scheme_options, "--option")
    path = Path(source)
    if not is_directory(source) and (path.suffix == ".json" or path.is_file()):
        data = read_json(path)
        if isinstance(data, dict) and data.get("schema") == SCHEMA:
            if changed or scheme_name or options:
                raise InputError(f"{source} is a finished parametrization; it takes no changes and no --scheme")
            return _scaled(Parametrization.from_json(data), qk_scale)
    architecture = read_architecture(source, changed)
    from signalprop.data import default_statistics

    made = scheme(scheme_name or DEFAULT_SCHEME, **options)
    return _scaled(made(architecture, default_statistics(architecture)), qk_scale)


def read_architecture(source: str, changed: dict[str, Any]) -> Architecture:
    """The architecture that ARCH names, changed."""
    unknown = set(changed) - set(Architecture.model_fields)
    if unknown:
        raise InputError(f"an architecture has no field {', '.join(sorted(unknown))}")
    path = Path(source)
    if is_directory(source):
        return Architecture.from_hf(path, **changed)
    if path.suffix == ".json" or path.is_file():
        data = read_json(path)
        if not isinstance(data, dict):
            raise InputError(f"{source} holds a {type(data).__name__}; expected an object with the architecture's fields")
        if "schema" in data:
            raise InputError(f"{source} has schema {data['schema']!r}; expected {SCHEMA!r} or an architecture's fields")
        if "model_type" in data:
            return Architecture.from_hf(data, **changed)
        return Architecture(**{**data, **changed})
    if path.suffix or "/" in source:
        raise InputError(f"there is no file or directory {source}")
    return Architecture.preset(source, **changed)


def _scaled(p: Parametrization, qk_scale: float) -> Parametrization:
    if qk_scale == 1:
        return p
    if not 0 < qk_scale < 1e6:
        raise InputError(f"--qk-scale is {qk_scale}; expected a positive number")
    scaled = {f"weight__{role}": p.weights[role] * qk_scale for role in ("query", "key")}
    return p.with_columns(**scaled)


def check_plot(path: Path | None) -> None:
    """Refuse a picture that could not be drawn before the long work starts."""
    if path is not None:
        from signalprop.errors import require
        from signalprop.report.plots import check_format

        check_format(path)
        require("matplotlib", "report")


def check_json(path: str | None) -> None:
    """Refuse a JSON file that could not be written before the long work starts."""
    if path not in (None, "-"):
        parent = Path(str(path)).resolve().parent
        if not parent.is_dir():
            raise InputError(f"cannot write {path}: there is no directory {parent}")


def write_result(path: str | None, value: Any) -> bool:
    """Write the JSON result if asked for; whether standard output is taken by it."""
    if path is not None:
        write_json(path, value)
    return path == "-"


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, on a terminal only; yields a function (done, total) -> None."""
    if not sys.stderr.isatty():
        yield lambda done, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done, of: bar.update(task, completed=done, total=of)
