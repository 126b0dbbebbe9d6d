"""Options that commands share, and the network that they describe."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from signalprop.cli import output
from signalprop.data.batches import LONGEST
from signalprop.errors import InputError, first_line, require, unknown
from signalprop.network.architecture import Architecture
from signalprop.network.presets import PRESETS
from signalprop.schemes import SCHEMES

Command = Callable[..., None]


def _presets(typed: str) -> list[str]:
    """For the shell's completion."""
    return [name for name in PRESETS if name.startswith(typed)]


def schemes_that_begin(typed: str) -> list[str]:
    """For the shell's completion."""
    return [name for name in SCHEMES if name.startswith(typed)]


Arch = Annotated[
    str,
    typer.Argument(
        metavar="ARCH",
        autocompletion=_presets,
        help="A preset (gpt2, tgs, ...), a JSON file of a network, or a Hugging Face directory.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="A field of the architecture, as activation=silu; repeatable.",
    ),
]
SCHEME = "SCHEME"
_INITIALISATION = (
    "Initialisation, see `signalprop schemes`; with options: deepscalelm:k=2 (default: what the model's family draws; "
    "xavier for tgs)"
)
SchemeName = Annotated[
    str | None, typer.Option("--scheme", metavar=SCHEME, autocompletion=schemes_that_begin, help=f"{_INITIALISATION}.")
]
SchemeNames = Annotated[
    str | None,
    typer.Option(
        "--scheme",
        metavar="SCHEMES",
        autocompletion=schemes_that_begin,
        help=f"{_INITIALISATION}; several give one table.",
    ),
]
WANTED = "See `signalprop schemes`; with options: deepscalelm:k=2; or the JSON of a table"
WantedScheme = Annotated[str, typer.Option("--scheme", metavar=SCHEME, help=f"{WANTED}.")]
QkScale = Annotated[float, typer.Option("--qk-scale", help="Factor on the query and key weights.")]
Text = Annotated[Path | None, typer.Option("--data", metavar="FILE", help="UTF-8 text to read.")]
_ARRAYS = ".safetensors or .npz, an array per argument of the model"
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="FILE",
        help=f"What the model reads: UTF-8 text; WAV or FLAC; {_ARRAYS}.",
    ),
]
Arguments = Annotated[
    Path | None, typer.Option("--data", metavar="FILE", help=f"What the model is called with: {_ARRAYS}.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of weights and data.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - prints it.")]
FailOn = Annotated[
    str | None,
    typer.Option(
        "--fail-on",
        metavar="SEVERITY",
        help="Exit with status 3 for a note, warning or fault, and above.",
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw it: .png, .svg, .pdf or .html."),
]
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="Where it runs: cpu, cuda, mps, ...")]
Inside = Annotated[
    str | None,
    typer.Option(
        "--inside",
        metavar="PATH",
        help="A model inside the directory's, as vision_model.",
    ),
]
All = Annotated[bool, typer.Option("--all", help="Print every layer.")]
NoGradient = Annotated[bool, typer.Option("--no-gradient", help="Forward pass only.")]

Layers = Annotated[int | None, typer.Option("--layers", help="Number of layers.")]
SeqLen = Annotated[int | None, typer.Option("--seq-len", help="Tokens per sequence.")]
Shortened = Annotated[int | None, typer.Option("--seq-len", help=f"Tokens per sequence (default: at most {LONGEST}).")]
Norm = Annotated[str | None, typer.Option("--norm", help="pre, post, sandwich, res-post or none.")]


_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]


def with_overwrite(command: Command) -> Command:
    """The command, with --overwrite where one of its options names a file that it writes."""
    own = list(signature(command, eval_str=True).parameters.values())
    shown = {item.name: getattr(item.annotation, "__metadata__", ()) for item in own if item.name in FILES}
    if not any(getattr(option, "metavar", None) == "FILE" for options in shown.values() for option in options):
        return command

    @wraps(command)
    def run(overwrite: bool, **given: Any) -> None:
        output.OVERWRITE.set(overwrite)
        command(**given)

    own.append(Parameter("overwrite", Parameter.KEYWORD_ONLY, default=False, annotation=_Overwrite))
    run.__signature__ = Signature(own)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in own}
    return run


FILES = ("json_file", "plot", "out")  # parameters that name what a command writes


def usable(device: str) -> str:
    """The device of --device, after a look whether this machine has it."""
    torch = require("torch", "models")
    try:
        torch.ones(1, device=device).item()
    except Exception as error:  # of many kinds: a name that is not known, a backend that is not built or not there
        meta = device.partition(":")[0] == "meta"
        reason = "it holds no numbers" if meta else first_line(error).rstrip(".")
        there = [name for name in ("cuda", "mps", "xpu") if getattr(torch, name).is_available()]
        raise InputError(f"--device {device:.40}: {reason}; usable here: {', '.join(['cpu', *there])}") from None
    return device


def changes(assignments: list[str] | None, **fields: Any) -> dict[str, Any]:
    """Fields of the architecture that --set and other options change; one that is None changes nothing."""
    return _known({name: value for name, value in fields.items() if value is not None} | pairs(assignments, "--set"))


def _known(changed: dict[str, Any]) -> dict[str, Any]:
    if isinstance(changed.get("streams"), int):  # their number; others of their fields may follow
        changed["streams"] = {"n": changed["streams"]}
    for field in [key for key in changed if "." in key]:  # of the streams, or of a kind's settings: experts.top_k
        kind, _, setting = field.partition(".")
        place = changed if kind == "streams" else changed.setdefault("settings", {})
        before = place.get(kind)
        place[kind] = (before if isinstance(before, dict) else {}) | {setting: changed.pop(field)}
    for field in changed:
        if field not in Architecture.model_fields:
            raise unknown("architecture field", field, Architecture.model_fields)
    return changed


def pairs(items: list[str] | None, option: str) -> dict[str, Any]:
    """`key=value` pairs; values are JSON, or plain words."""
    out: dict[str, Any] = {}
    for item in items or []:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise InputError(f"{option} {item!r} is not KEY=VALUE")
        try:
            out[key] = json.loads(text)
        except (ValueError, RecursionError):
            out[key] = text
    return out


def several(text: str | None, option: str) -> list[str] | None:
    """The members of an option that takes several, with commas between; None where it is not given."""
    if text is None:
        return None
    members = [member.strip() for member in re.split(r",(?![^\[]*\])", text)]  # a value may be a list
    if "" in members:
        raise InputError(f"{option} {text!r:.80} has an empty member; expected names or numbers with commas between")
    for member in members:
        if members.count(member) > 1:
            raise InputError(f"{option} {text!r:.80} has {member!r:.40} {members.count(member)} times; give it once")
    return members


def several_schemes(text: str | None) -> Sequence[str | None]:
    """The members of --scheme, [None] where it is not given."""
    return several(text, "--scheme") or [None]


def name_and_options(scheme: str | None) -> tuple[str | None, dict[str, Any]]:
    """The two parts of --scheme NAME:KEY=VALUE:KEY=VALUE."""
    name, *options = (scheme or "").split(":")
    return name or None, pairs(options, "--scheme")


FORMATS = {"fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn", "fp8-e5m2": "float8_e5m2"}


def long_format(name: str) -> str:
    """A number format as PyTorch spells it, of either spelling; names that have one alone stay."""
    return FORMATS.get(name, name)


def several_numbers(text: str | None, option: str, what: str, example: str) -> list[int] | None:
    """The whole numbers that an option names with commas between, None where it is not given.

    Args:
        what: such a number is, in words. example: two good values.
    """
    members = several(text, option)
    for member in members or []:
        if not member.removeprefix("-").isdecimal() or len(member) > 9:
            raise InputError(f"{option} {member!r:.40} is not {what}; expected e.g. {example}")
    return None if members is None else [int(member) for member in members]


def given(context: typer.Context) -> list[str]:
    """The options that were typed in the running command, by their first names, in the order of its help."""
    sources = ((parameter, context.get_parameter_source(str(parameter.name))) for parameter in context.command.params)
    return [
        parameter.opts[0]
        for parameter, source in sources
        if parameter.opts[0].startswith("-") and source is not None and source.name == "COMMANDLINE"
    ]
