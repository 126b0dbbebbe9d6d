"""`signalprop diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from signalprop.cli import options as opt
from signalprop.cli import output

if TYPE_CHECKING:
    from signalprop.diagnose.result import Diagnosis


def diagnose(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face directory, a .gguf file, the name of a model on the hub, or the JSON "
            "of an earlier diagnosis.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="FILE|DATASET",
            help="Text, JSON lines or Parquet (also .gz, .xz), or the name of a data "
            "set (default: 249 State of the Union addresses).",
        ),
    ] = None,
    field: Annotated[str, typer.Option("--field", help="Field of a row that holds the text.")] = "text",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to read, about.")] = 8192,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", min=2, help="Tokens of a sequence (default: 512).")
    ] = None,
    batch_size: opt.BatchSize = 4,
    skip_first: Annotated[
        int, typer.Option("--skip-first", min=0, help="Positions of every sequence that layer statistics leave out.")
    ] = 4,
    remove: Annotated[bool, typer.Option("--remove", help="The loss without every single layer.")] = False,
    greedy: Annotated[
        int, typer.Option("--greedy", min=0, help="Also remove so many layers together, the cheapest first.")
    ] = 0,
    cast: Annotated[
        list[str] | None,
        typer.Option("--cast", help="float8_e4m3fn, float8_e5m2, bfloat16, int8 or all (repeatable)."),
    ] = None,
    task: Annotated[
        Path | None,
        typer.Option(
            "--task",
            metavar="FILE",
            help="Multiple choice, JSON lines of prompt, choices and answer: accuracy without layers.",
        ),
    ] = None,
    expect: Annotated[
        str | None, typer.Option("--expect", metavar="SCHEME", help="Scheme that the model is meant to carry.")
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option(
            "--prune",
            metavar="LAYERS",
            help="Layers to take out for --save, e.g. 12-15,20 (default: those that --greedy chose).",
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="DIR", help="Write the model without those layers.")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="MODEL", help="Another model, or diagnosis, to stand beside.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or auto.")] = "float32",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the checkpoint brings.")
    ] = False,
    seed: opt.Seed = 0,
    json_file: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Say what the layers of a trained model do on real data, and what is wrong with them.

    Per layer: variance, token correlation, rank, attention, gradient, outliers, nearness to the identity; with --remove
    what it is worth, with --cast what few bits do to it; and verdicts in words.

    \b
    Example:
      signalprop diagnose ./checkpoint --data book.txt --remove --cast float8_e4m3fn --plot layers.png
    """
    from signalprop.errors import InputError, require
    from signalprop.report import diagnosis_tables

    output.check_outputs(json_file, plot)
    if save is not None and not (prune or greedy):
        raise InputError("--save writes a model without layers; say which with --prune 12-15, or let --greedy N choose")
    if prune and save is None:
        raise InputError("--prune says which layers --save DIR leaves out; give --save")
    require("torch", "models")
    from signalprop.diagnose.casts import FORMATS

    formats = list(FORMATS) if cast == ["all"] else list(cast or [])

    def made(source: str, *, main: bool) -> Diagnosis:
        return _diagnosis(
            source, data, field, tokens, seq_len, batch_size, skip_first, (greedy if greedy or remove else None) if main
            else None, formats if main else [], task if main else None, expect or "", dtype, trust_remote_code, seed,
            prune if main else None, save if main else None,
        )  # fmt: skip

    found = made(model, main=True)
    other = made(against, main=False) if against is not None else None
    if plot is not None:
        from signalprop.report.diagnosis_plots import diagnosis_figure
        from signalprop.report.plots import save_figure

        save_figure(plot, lambda: diagnosis_figure([found] if other is None else [found, other]))
    value = found.to_json() if other is None else {"diagnosis": found.to_json(), "against": other.to_json()}
    if output.write_result(json_file, value):
        typer.echo(diagnosis_tables.diagnosis_text(found))
        if other is not None:
            typer.echo("\n" + diagnosis_tables.compared(found, other))
        for name, path in (("json", json_file), ("plot", plot), ("saved", save)):
            if path is not None:
                typer.echo(f"{name:<8}{path}")


def _diagnosis(
    source: str, data: str | None, field: str, tokens: int, seq_len: int | None, batch_size: int, skip_first: int,
    remove: int | None, formats: list[str], task: Path | None, expected: str, dtype: str, trust_remote_code: bool,
    seed: int, prune: str | None, save: Path | None,
) -> Diagnosis:  # fmt: skip
    """Of a model that is loaded, or as it stands in a JSON file."""
    from signalprop.diagnose.loading import load
    from signalprop.diagnose.removal import save_pruned
    from signalprop.diagnose.result import Diagnosis
    from signalprop.diagnose.run import diagnose as diagnosed
    from signalprop.diagnose.stream import DEFAULT_LENGTH, token_batches
    from signalprop.diagnose.tasks import multiple_choice, read_task
    from signalprop.errors import InputError
    from signalprop.probes.families import mapping_for

    if source.endswith(".json") and Path(source).is_file() and Path(source).name != "config.json":
        return Diagnosis.load(source)
    loaded = load(source, dtype=dtype, trust_remote_code=trust_remote_code)  # type: ignore[arg-type]
    mapping = mapping_for(loaded.model, None)
    a = mapping.architecture
    length = seq_len or min(DEFAULT_LENGTH, a.seq_len)
    wanted = layers_of(prune, len(mapping.layers)) if prune else ()
    batches = token_batches(
        data, loaded.tokenizer, seq_len, batch_size, max(1, -(-tokens // length)), architecture=a, field=field,
        seed=seed,
    )  # fmt: skip
    accuracy = None
    if task is not None:
        if loaded.tokenizer is None:
            raise InputError("--task needs the model's tokenizer, and the checkpoint brings none")
        questions = read_task(task)
        accuracy = lambda m: multiple_choice(m, loaded.tokenizer, questions)  # noqa: E731
    with output.sections() as step:
        found = diagnosed(
            loaded.model, batches, name=loaded.name, mapping=mapping, skip_first=skip_first, remove=remove,
            cast=formats, accuracy=accuracy, expected=expected, progress=step,
        )  # fmt: skip
    found = found.model_copy(update={"notes": (*loaded.notes, *found.notes)})
    if save is not None:
        chosen = wanted or (found.removal.greedy[-1].layers if found.removal and found.removal.greedy else ())
        if not chosen:
            raise InputError("no layers were chosen to be left out; name them with --prune")
        save_pruned(loaded.model, mapping, chosen, save, loaded.tokenizer)
    return found


def layers_of(text: str, n: int) -> tuple[int, ...]:
    """Layer numbers of `12-15,20`, ranges inclusive.

    Raises:
        InputError: not of that form, or no such layer.
    """
    from signalprop.errors import InputError

    out: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InputError(f"--prune {text!r:.60} is not of the form 12-15,20 (layers count from 0)")
        out |= set(range(int(first), int(last or first) + 1)) if int(last or first) < n else {n}
    if not out or max(out) >= n:
        raise InputError(f"--prune {text!r:.60}: this model has layers 0 to {n - 1}")
    return tuple(sorted(out))
