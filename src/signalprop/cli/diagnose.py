"""`signalprop diagnose`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from signalprop.cli import options as opt
from signalprop.cli import output

if TYPE_CHECKING:
    from torch import nn

    from signalprop.attachment.mapping import Mapping
    from signalprop.data.batches import Batch
    from signalprop.diagnosis.loading import Loaded
    from signalprop.diagnosis.result import Diagnosis, Estimate


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
        str | None,
        typer.Option(
            "--task",
            metavar="FILE|NAME",
            help="Accuracy beside the loss: JSON lines of prompt, choices and answer, or NAME,NAME of "
            "lm-evaluation-harness.",
        ),
    ] = None,
    expect: Annotated[
        str | None, typer.Option("--expect", metavar="SCHEME", help="Scheme that the model is meant to carry: lns.")
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
    report: opt.Report = None,
    no_report: opt.NoReport = False,
) -> None:
    """Say what a trained model's layers do, and what is wrong.

    Per layer: variance, token correlation, rank, attention, gradient, outliers, nearness to the identity; with --remove
    what it is worth, with --cast what few bits do to it; and verdicts in words.

    \b
    Example:
      signalprop diagnose ./checkpoint --data book.txt --remove --cast float8_e4m3fn --plot layers.png
    """
    from signalprop.diagnosis.result import Diagnosis
    from signalprop.errors import InputError, require
    from signalprop.report import diagnosis_tables

    output.check_outputs(json_file, plot)
    page = output.report_file(report, no_report, json_file)
    if save is not None and not (prune or greedy):
        raise InputError("--save writes a model without layers; say which with --prune 12-15, or let --greedy N choose")
    if prune and save is None:
        raise InputError("--prune says which layers --save DIR leaves out; give --save")
    if is_stored(model) and (remove or greedy or cast or task or save):
        raise InputError(f"{model} is a stored diagnosis; --remove, --greedy, --cast, --task and --save need the model")
    if expect not in (None, "lns"):
        raise InputError(
            f"--expect {expect!r:.40}: trained weights tell of lns alone; signalprop check holds fresh ones "
            "against any scheme"
        )

    def of(source: str, *, main: bool) -> Diagnosis:
        """A stored diagnosis, or that of a model; --against has the sections that cost little."""
        if is_stored(source):
            return Diagnosis.load(source)
        require("torch", "models")
        from signalprop.attachment.families import mapping_for
        from signalprop.diagnosis.loading import load
        from signalprop.diagnosis.run import diagnose as diagnosed

        loaded = load(source, dtype=dtype, trust_remote_code=trust_remote_code)  # type: ignore[arg-type]
        mapping = mapping_for(loaded.model, None)
        finish = _saver(loaded, mapping, prune, save) if main and save is not None else None
        batches = _batches(loaded, mapping, data, field, tokens, seq_len, batch_size, seed)
        with output.sections() as step:
            found = diagnosed(
                loaded.model,
                batches,
                name=loaded.name,
                mapping=mapping,
                skip_first=skip_first,
                remove=greedy if main and (greedy or remove) else None,
                cast=_formats(cast) if main else (),
                accuracy=_accuracy(task, loaded) if main and task is not None else None,
                expected=expect or "",
                progress=step,
            )
        if finish is not None:
            finish(found)
        return found.model_copy(update={"notes": (*loaded.notes, *found.notes)})

    found = of(model, main=True)
    other = of(against, main=False) if against is not None else None
    if plot is not None:
        from signalprop.report.diagnosis_plots import diagnosis_figure
        from signalprop.report.plots import save_figure

        save_figure(plot, lambda: diagnosis_figure([found] if other is None else [found, other]))
    value = found.to_json() if other is None else _pair(found, other)
    if output.write_result(json_file, value):
        output.echo(diagnosis_tables.diagnosis_text(found))
        if other is not None:
            output.echo("\n" + diagnosis_tables.compared(found, other))
        for name, path in (("json", json_file), ("plot", plot), ("saved", save)):
            if path is not None:
                output.echo(f"{name:<8}{path}")
    output.write_report(page, [(d.model, d) for d in (found, other) if d is not None])


def is_stored(source: str) -> bool:
    """Whether a MODEL is the JSON file of an earlier diagnosis."""
    path = Path(source)
    return path.suffix == ".json" and path.name != "config.json" and path.is_file()


def _pair(found: Diagnosis, other: Diagnosis) -> dict[str, Any]:
    return {"schema": "signalprop/diagnoses/1", "diagnosis": found.to_json(), "against": other.to_json()}


def _batches(
    loaded: Loaded,
    mapping: Mapping,
    data: str | None,
    field: str,
    tokens: int,
    seq_len: int | None,
    batch_size: int,
    seed: int,
) -> Iterator[Batch]:
    from signalprop.diagnosis.stream import DEFAULT_LENGTH, token_batches

    a = mapping.architecture
    length = seq_len or min(DEFAULT_LENGTH, a.target_len or a.seq_len)
    start = getattr(loaded.model.config, "decoder_start_token_id", None)
    return token_batches(
        data,
        loaded.tokenizer,
        seq_len,
        batch_size,
        max(1, -(-tokens // length)),
        architecture=a,
        field=field,
        seed=seed,
        decoder_start=start if isinstance(start, int) else None,
    )


def _formats(names: list[str] | None) -> list[str]:
    from signalprop.diagnosis.casts import FORMATS

    return list(FORMATS) if names and "all" in names else list(names or [])


def _accuracy(task: str, loaded: Loaded) -> Callable[[nn.Module], Estimate]:
    from signalprop.diagnosis.tasks import harness, is_task_file, multiple_choice, read_task
    from signalprop.errors import InputError

    if loaded.tokenizer is None:
        raise InputError("--task needs the model's tokenizer, and the checkpoint brings none")
    if not is_task_file(task) and (Path(task).exists() or Path(task).suffix):
        questions = read_task(task)
        return lambda model: multiple_choice(model, loaded.tokenizer, questions)
    return harness(task.split(","), loaded.tokenizer)


def _saver(loaded: Loaded, mapping: Mapping, prune: str | None, target: Path) -> Callable[[Diagnosis], None]:
    """What writes the pruned model once the diagnosis is there; all that could be wrong with it is found now."""
    from signalprop.diagnosis.removal import check_save, save_pruned

    layers = layers_of(prune, len(mapping.layers)) if prune else ()
    check_save(loaded.model, mapping, layers, target)

    def finish(found: Diagnosis) -> None:
        from signalprop.errors import InputError

        chosen = layers
        if not chosen and found.removal is not None and found.removal.greedy:
            chosen = found.removal.greedy[-1].layers
        if not chosen:
            raise InputError("no layers were chosen to be left out; name them with --prune")
        save_pruned(loaded.model, mapping, chosen, target, loaded.tokenizer)

    return finish


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
