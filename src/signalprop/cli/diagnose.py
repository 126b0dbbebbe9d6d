"""`signalprop diagnose`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from signalprop.cli import options as opt
from signalprop.cli import output
from signalprop.errors import InputError

if TYPE_CHECKING:
    from signalprop.diagnosis.result import Diagnosis
from signalprop.cli.diagnose_input import Asked, check_options, formats_of, is_stored, ready


def diagnose(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face directory, .gguf file, model of the hub, or JSON of a diagnosis.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="FILE|DATASET",
            help="Text, JSON lines, Parquet, a data set of the hub, WAV, FLAC; .safetensors or .npz, an array per "
            "argument of the model.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to read, about.")] = 8192,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", min=2, help="Tokens of a sequence (default: 512).")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="The loss without each layer.")] = False,
    cast: Annotated[
        list[str] | None,
        typer.Option(
            "--cast",
            metavar="FORMAT",
            help="The loss in a format: fp16, bf16, fp8, fp8-e5m2, int8, nvfp4, mxfp4, mxfp8, int8_channel, "
            "int8_block, int4_channel, int4_block, all; repeatable.",
        ),
    ] = None,
    loss_scale: Annotated[
        float | None,
        typer.Option(
            "--loss-scale",
            metavar="SCALE",
            help="What float16 loses of gradients at it; PyTorch: 65536.",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            metavar="NAME|FILE",
            help="Accuracy in tasks of lm-evaluation-harness, by name or .yaml file.",
        ),
    ] = None,
    trials: Annotated[bool, typer.Option("--trials/--no-trials", help="Try other conventions of the weights.")] = True,
    against: Annotated[
        str | None, typer.Option("--against", metavar="MODEL", help="A model or diagnosis to compare.")
    ] = None,
    weights_only: Annotated[
        bool,
        typer.Option(
            "--weights-only",
            help="Only read the weights; nothing is run.",
        ),
    ] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or auto.")] = "float32",
    device: opt.Device = "cpu",
    inside: opt.Inside = None,
    fail_on: opt.FailOn = None,
    json_file: opt.Json = None,
    plot: opt.Plot = None,
    everything: Annotated[bool, typer.Option("--all", help="Print every layer and number.")] = False,
) -> None:
    """Say what a trained model's layers do, and what is wrong.

    \b
    Example: signalprop diagnose ./checkpoint --data book.txt --remove --cast fp8
    """
    if weights_only:
        if unread := [
            name for name in opt.given(context) if name not in ("--weights-only", "--json", "--overwrite", "--against")
        ]:
            raise InputError(f"--weights-only runs nothing and has no picture or page; leave out {', '.join(unread)}")
        _weights(model, against, json_file)
        return
    from signalprop.diagnosis.result import Diagnosis
    from signalprop.report import diagnosis_tables
    from signalprop.report.diagnoses import figure

    output.check_outputs(json_file, plot=plot)
    output.check_severity(fail_on)
    given = context.params | {"cast": formats_of(cast)}
    asked = Asked(**{name: given[name] for name in Asked._fields})
    check_options(model, asked)
    stored, other = (Diagnosis.load(name) if name and is_stored(name) else None for name in (model, against))
    if against is not None and other is None:
        if stored is None:
            ready(model, asked)  # what is wrong with it is reported before the work on the other one
        other = _diagnosed(against, asked.of_the_other())
    found = _diagnosed(model, asked) if stored is None else stored
    results = [found] if other is None else [found, other]

    def show() -> None:
        if everything:
            output.echo(diagnosis_tables.diagnosis_text(found, output.room()))
        elif other is None:
            output.echo(diagnosis_tables.screen(found))
        if other is not None:
            output.echo("\n" * everything + diagnosis_tables.compared(found, other, everything=everything))

    output.deliver(
        json_file,
        lambda: found.to_json() if other is None else _pair(found, other),
        show,
        output.picture(plot, lambda: figure(results), lambda: [(item.model, item) for item in results]),
    )
    output.fail_on(found.findings, fail_on)


def _weights(model: str, against: str | None, json_file: str | None) -> None:
    """`--weights-only`."""
    from signalprop.diagnosis.stored_weights import read_weights
    from signalprop.report.weight_tables import weights_text

    output.check_outputs(json_file)
    with output.progress("weights (MB)") as step:
        found = read_weights(model, against, step)
    output.deliver(json_file, found.to_json, lambda: output.echo(weights_text(found)))


def _diagnosed(source: str, asked: Asked) -> Diagnosis:
    subject = ready(source, asked)
    from signalprop.diagnosis.run import diagnose as diagnosed

    with output.sections() as step:
        found = diagnosed(
            subject.attached, subject.batches, name=subject.loaded.name, remove=asked.remove, cast=asked.cast,
            loss_scale=asked.loss_scale, accuracy=subject.accuracy, trials=asked.trials, progress=step,
        )  # fmt: skip
    return found.model_copy(update={"notes": (*subject.loaded.notes, *found.notes)})


def _pair(found: Diagnosis, other: Diagnosis) -> dict[str, Any]:
    return {"schema": "signalprop/diagnoses/1", "diagnosis": found.to_json(), "against": other.to_json()}
