"""`signalprop diagnose`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from signalprop.cli import options as opt
from signalprop.cli import output
from signalprop.errors import as_line

if TYPE_CHECKING:
    from torch import nn

    from signalprop.attachment.mapping import Mapping
    from signalprop.data.batches import Batch
    from signalprop.diagnosis.kept import Kept
    from signalprop.diagnosis.loading import Loaded
    from signalprop.diagnosis.result import Diagnosis, Estimate

REPORT = "signalprop-diagnosis.html"
# Where removals and casts stay meanwhile, if no --json FILE gives the name.
PARTIAL = "signalprop-diagnosis.partial"
# What several checkpoints with --weights-only take beside --json.
_OF_SEVERAL = ("--plot", "--report", "--no-report")


def diagnose(
    context: typer.Context,
    model: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face directory, a .gguf file, the name of a model on the hub, or the JSON "
            "of an earlier diagnosis. With --weights-only also several checkpoints of one training, in order.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "--text",
            metavar="FILE|DATASET",
            help="Text, JSON lines or Parquet (also .gz, .xz), or the name of a data "
            "set (default: 249 State of the Union addresses).",
        ),
    ] = None,
    audio: opt.Audio = None,
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
        typer.Option(
            "--cast",
            metavar="FORMAT",
            help="float8_e4m3fn, float8_e5m2, bfloat16, int8, nvfp4, mxfp4, mxfp8, int8_channel, int8_block, "
            "int4_channel, int4_block or all (repeatable).",
        ),
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
    weights_only: Annotated[
        bool,
        typer.Option(
            "--weights-only",
            help="Statistics of the weights in the files, of any size; nothing is run. Of several MODELs what grew.",
        ),
    ] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or auto.")] = "float32",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the checkpoint brings.")
    ] = False,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    inside: opt.Inside = None,
    mapping: opt.MappingFile = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the removals, casts and --weights-only that an interrupted call has done."
        ),
    ] = False,
    json_file: opt.Json = None,
    plot: opt.Plot = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help=f"Interactive report (default: {REPORT}).")
    ] = None,
    no_report: opt.NoReport = False,
) -> None:
    """Say what a trained model's layers do, and what is wrong.

    Per layer: variance, token correlation, rank, attention, gradient, outliers, nearness to the identity; with --remove
    what it is worth, with --cast what few bits do to it; and verdicts in words.

    \b
    Example:
      signalprop diagnose ./checkpoint --data book.txt --remove --cast float8_e4m3fn --plot layers.png
    """
    from signalprop.errors import InputError

    if weights_only:
        read = {"--weights-only", "--json", *(_OF_SEVERAL if len(model) > 1 else ["--against", "--resume"])}
        if unread := [name for name in opt.given(context) if name not in read]:
            what = "reads weights alone" if len(model) > 1 else "runs nothing and has no picture or page"
            raise InputError(f"--weights-only {what}; leave out {', '.join(unread)}")
        if len(model) > 1:
            _series(model, json_file, plot, output.report_file(report, no_report, json_file, REPORT))
        else:
            _weights(model[0], against, json_file, resume)
        return
    from signalprop.diagnosis.result import Diagnosis
    from signalprop.report import diagnosis_tables

    if len(model) > 1:
        raise InputError("diagnose runs one MODEL (several: --weights-only); --against sets another beside it")
    (source,) = model

    output.check_outputs(json_file, plot)
    page = output.report_file(report, no_report, json_file, REPORT)
    if save is not None and not (prune or greedy):
        raise InputError("--save writes a model without layers; say which with --prune 12-15, or let --greedy N choose")
    if prune and save is None:
        raise InputError("--prune says which layers --save DIR leaves out; give --save")
    if is_stored(source) and (remove or greedy or cast or task or save or resume or audio):
        raise InputError(
            f"{source} is a stored diagnosis; --remove, --greedy, --cast, --task, --save, --resume and --audio need "
            "the model"
        )
    if expect not in (None, "lns"):
        raise InputError(
            f"--expect {expect!r:.40}: trained weights tell of lns alone; signalprop check holds fresh ones "
            "against any scheme"
        )
    stored, other = (Diagnosis.load(name) if name and is_stored(name) else None for name in (source, against))
    asked = _Asked(
        data=data,
        field=field,
        tokens=tokens,
        seq_len=seq_len,
        batch_size=batch_size,
        seed=seed,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        skip_first=skip_first,
        expect=expect or "",
        device=device,
        audio=audio,
        inside=inside,
        mapping=mapping,
    )
    removals = greedy if greedy or remove else None
    more = _More(remove=removals, cast=_formats(cast), task=task, prune=prune, save=save)
    kept, finish = None, None
    if against is not None and other is None:
        if stored is None:
            _ready(source, asked, more)  # what is wrong with it is told before the work on the other one
        other = _diagnosed(_ready(against, asked._replace(inside=None, mapping=None)), asked)
    if stored is None:
        kept = _kept(json_file, source, task, resume) if more.remove is not None or cast or task else None
        subject = _ready(source, asked, more)
        with _told_where(kept):
            found = _diagnosed(subject, asked, more.remove, more.cast, subject.accuracy, kept)
        finish = subject.finish
    else:
        found = stored
    results = [found] if other is None else [found, other]

    def show() -> None:
        output.echo(diagnosis_tables.diagnosis_text(found, output.room()))
        if other is not None:
            output.echo("\n" + diagnosis_tables.compared(found, other))

    output.deliver(
        json_file,
        lambda: found.to_json() if other is None else _pair(found, other),
        show,
        output.File("saved", save, lambda: None if finish is None else finish(found)),
        output.File("plot", plot, lambda: _draw(plot, results)),
        page=page,
        items=lambda: [(item.model, item) for item in results],
    )
    if kept is not None:
        kept.discard()


def _weights(model: str, against: str | None, json_file: str | None, resume: bool) -> None:
    """`--weights-only`."""
    from signalprop.diagnosis.kept import Kept
    from signalprop.diagnosis.stored_weights import read_weights
    from signalprop.report.weight_tables import weights_text

    output.check_outputs(json_file)
    kept = Kept(_partial(json_file), resume=resume, settings={"weights": model, "against": against})
    with _told_where(kept), output.progress("weights (MB)") as step:
        found = read_weights(model, against, step, kept)
    output.deliver(json_file, found.to_json, lambda: output.echo(weights_text(found)))
    kept.discard()


def _series(models: list[str], json_file: str | None, plot: Path | None, page: output.ReportFile | None) -> None:
    """`--weights-only` of several checkpoints."""
    from signalprop.diagnosis.weight_series import read_series
    from signalprop.report.plots import save_figure
    from signalprop.report.weight_series import series_figure, series_text

    output.check_outputs(json_file, plot)
    with output.sections() as step:
        found = read_series(models, step)

    def draw() -> None:
        assert plot is not None
        save_figure(plot, lambda: series_figure(found))

    output.deliver(
        json_file,
        found.to_json,
        lambda: output.echo(series_text(found)),
        output.File("plot", plot, draw),
        page=page,
        items=lambda: [("checkpoints", found)],
    )


class _Asked(NamedTuple):
    """How models are read, and what they read."""

    data: str | None
    field: str
    tokens: int
    seq_len: int | None
    batch_size: int
    seed: int
    dtype: str
    trust_remote_code: bool
    skip_first: int
    expect: str
    device: str
    audio: Path | None
    inside: str | None
    mapping: Path | None


class _More(NamedTuple):
    """What is asked of the first model alone."""

    remove: int | None = None
    cast: Sequence[str] = ()
    task: str | None = None
    prune: str | None = None
    save: Path | None = None


_NOTHING_MORE = _More()


class _Subject(NamedTuple):
    """A model that is ready to be diagnosed: all that is read has been."""

    loaded: Loaded
    mapping: Mapping
    batches: list[Batch]
    accuracy: Callable[[nn.Module], Estimate] | None
    finish: Callable[[Diagnosis], None] | None


def _ready(source: str, asked: _Asked, more: _More = _NOTHING_MORE) -> _Subject:
    """Read a model and its data, and find all that could be wrong with what is asked of them."""
    place = opt.usable(asked.device)
    from signalprop.attachment.families import mapping_for
    from signalprop.cli.loading import check_one_input, mapping_of_file
    from signalprop.cli.loading import inside as model_inside
    from signalprop.data.audio import check_reads_audio, with_audio
    from signalprop.diagnosis.loading import load
    from signalprop.diagnosis.run import check

    loaded = load(source, dtype=asked.dtype, trust_remote_code=asked.trust_remote_code)  # type: ignore[arg-type]
    loaded.model.to(place)
    loaded = replace(loaded, model=model_inside(loaded.model, asked.inside))
    mapping = mapping_for(loaded.model, mapping_of_file(loaded.model, asked.mapping))
    check_one_input(loaded.model, mapping)
    finish = None if more.save is None else _saver(loaded, mapping, more.prune, more.save)
    accuracy = None if more.task is None else _accuracy(more.task, loaded)
    if asked.audio is not None:
        check_reads_audio(mapping.architecture)
    batches = list(_batches(loaded, mapping, asked))
    if asked.audio is not None:
        size = asked.batch_size
        batches = [with_audio(b, mapping.architecture, asked.audio, k * size) for k, b in enumerate(batches)]
    check(loaded.model, batches, mapping, more.remove, more.cast)
    return _Subject(loaded, mapping, batches, accuracy, finish)


def _diagnosed(
    subject: _Subject,
    asked: _Asked,
    remove: int | None = None,
    cast: Sequence[str] = (),
    accuracy: Callable[[nn.Module], Estimate] | None = None,
    kept: Kept | None = None,
) -> Diagnosis:
    from signalprop.diagnosis.run import diagnose as diagnosed

    with output.sections() as step:
        found = diagnosed(
            subject.loaded.model,
            subject.batches,
            name=subject.loaded.name,
            mapping=subject.mapping,
            skip_first=asked.skip_first,
            remove=remove,
            cast=cast,
            accuracy=accuracy,
            expected=asked.expect,
            kept=kept,
            progress=step,
        )
    return found.model_copy(update={"notes": (*subject.loaded.notes, *found.notes)})


def _kept(json_file: str | None, model: str, task: str | None, resume: bool) -> Kept:
    """Where removals and casts stay until the diagnosis is written."""
    from signalprop.errors import require

    require("torch", "models")
    from signalprop.diagnosis.kept import Kept

    return Kept(_partial(json_file), resume=resume, settings={"source": model, "task": task})


def _partial(json_file: str | None) -> str:
    """Where what was done stays meanwhile."""
    return PARTIAL if json_file in (None, "-") else f"{json_file}.partial"


@contextmanager
def _told_where(kept: Kept | None) -> Iterator[None]:
    """Whatever ends the work: say that what was done is not lost."""
    try:
        yield
    except BaseException:
        if kept:
            said = f"{len(kept)} result{'s' * (len(kept) > 1)} kept in {kept.path}; --resume goes on from there"
            print(f"signalprop: {as_line(said)}", file=sys.stderr)
        raise


def _draw(path: Path | None, results: list[Diagnosis]) -> None:
    from signalprop.report.diagnosis_plots import diagnosis_figure
    from signalprop.report.plots import save_figure

    assert path is not None
    save_figure(path, lambda: diagnosis_figure(results))


def is_stored(source: str) -> bool:
    """Whether a MODEL is the JSON file of an earlier diagnosis."""
    path = Path(source)
    return path.suffix == ".json" and path.name != "config.json" and path.is_file()


def _pair(found: Diagnosis, other: Diagnosis) -> dict[str, Any]:
    return {"schema": "signalprop/diagnoses/1", "diagnosis": found.to_json(), "against": other.to_json()}


def _batches(loaded: Loaded, mapping: Mapping, asked: _Asked) -> Iterator[Batch]:
    from signalprop.diagnosis.stream import DEFAULT_LENGTH, token_batches

    a = mapping.architecture
    length = asked.seq_len or min(DEFAULT_LENGTH, a.target_len or a.seq_len)
    start = getattr(loaded.model.config, "decoder_start_token_id", None)
    return token_batches(
        asked.data,
        loaded.tokenizer,
        asked.seq_len,
        asked.batch_size,
        max(1, -(-asked.tokens // length)),
        architecture=a,
        field=asked.field,
        seed=asked.seed,
        decoder_start=start if isinstance(start, int) else None,
    )


def _formats(names: list[str] | None) -> list[str]:
    from signalprop.diagnosis.number_formats import FORMATS

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
