"""`signalprop diagnose`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from signalprop.cli import options as opt
from signalprop.cli import output
from signalprop.errors import InputError, require

if TYPE_CHECKING:
    from torch import nn

    from signalprop.diagnosis.kept import Kept
    from signalprop.diagnosis.result import Diagnosis, Estimate
from signalprop.cli.diagnose_input import Asked, More, Subject, check_options, formats_of, is_stored, ready

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
            help="fp8 (float8_e4m3fn), fp8-e5m2, bf16, int8, nvfp4, mxfp4, mxfp8, int8_channel, int8_block, "
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
    asked = Asked(**{name: context.params[name] for name in Asked._fields})
    removals = greedy if greedy or remove else None
    more = More(remove=removals, cast=formats_of(cast), task=task, prune=prune, save=save)
    check_options(source, asked, more, resume=resume)
    stored, other = (Diagnosis.load(name) if name and is_stored(name) else None for name in (source, against))
    kept, finish = None, None
    if against is not None and other is None:
        if stored is None:
            ready(source, asked, more)  # what is wrong with it is told before the work on the other one
        other = _diagnosed(ready(against, asked._replace(inside=None, mapping=None)), asked)
    if stored is None:
        kept = _kept(json_file, source, task, resume) if more.remove is not None or cast or task else None
        subject = ready(source, asked, more)
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
        output.File("saved", save, lambda _: None if finish is None else finish(found)),
        output.picture(plot, lambda: _figure(results)),
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
    from signalprop.report.html.weight_series import series_section
    from signalprop.report.section_plots import sections_figure
    from signalprop.report.weight_series import series_text

    output.check_outputs(json_file, plot)
    with output.sections() as step:
        found = read_series(models, step)
    section = series_section(found, "checkpoints", "series")
    output.deliver(
        json_file,
        found.to_json,
        lambda: output.echo(series_text(found)),
        output.picture(plot, lambda: sections_figure([section], section["title"])),
        page=page,
        items=lambda: [("checkpoints", found)],
    )


def _diagnosed(
    subject: Subject,
    asked: Asked,
    remove: int | None = None,
    cast: Sequence[str] = (),
    accuracy: Callable[[nn.Module], Estimate] | None = None,
    kept: Kept | None = None,
) -> Diagnosis:
    from signalprop.diagnosis.run import diagnose as diagnosed

    with output.sections() as step:
        found = diagnosed(
            subject.loaded.model, subject.batches, name=subject.loaded.name, mapping=subject.mapping,
            skip_first=asked.skip_first, remove=remove, cast=cast, accuracy=accuracy, expected=asked.expect or "",
            kept=kept, progress=step,
        )  # fmt: skip
    return found.model_copy(update={"notes": (*subject.loaded.notes, *found.notes)})


def _kept(json_file: str | None, model: str, task: str | None, resume: bool) -> Kept:
    """Where removals and casts stay until the diagnosis is written."""
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
            n = len(kept)
            output.note(f"{n} result{'s' * (n > 1)} kept in {kept.path}; --resume goes on from there")
        raise


def _figure(results: list[Diagnosis]) -> Any:
    """The sections of the page as a picture."""
    from signalprop.report.html.diagnoses import diagnosis_sections, names_of
    from signalprop.report.html.parts import numbered
    from signalprop.report.section_plots import sections_figure

    named = numbered([(item.model, item) for item in results])
    return sections_figure(diagnosis_sections(named), " against ".join(names_of(named)))


def _pair(found: Diagnosis, other: Diagnosis) -> dict[str, Any]:
    return {"schema": "signalprop/diagnoses/1", "diagnosis": found.to_json(), "against": other.to_json()}
