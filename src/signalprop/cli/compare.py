"""`signalprop compare`: the main job."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from signalprop.cli import options as opt
from signalprop.cli import output, sources
from signalprop.data.batches import LONGEST

if TYPE_CHECKING:
    from signalprop.attachment.anatomy import Anatomy
    from signalprop.network.parametrization import Parametrization

_SEQUENCES = 2  # per batch


def compare(
    arch: opt.Arch,
    layers: opt.Layers = None,
    seq_len: opt.Shortened = None,
    norm: opt.Norm = None,
    assignments: opt.Set = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            "--scheme",
            metavar=opt.SCHEME,
            help="Initialisation (default: as predict); of a directory also as-is (its default).",
        ),
    ] = None,
    data: opt.Data = None,
    fidelity: Annotated[str, typer.Option("--fidelity", help="How to predict: auto, moments or kernel.")] = "auto",
    no_gradient: opt.NoGradient = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Networks (as-is: batches) to average over.")] = 8,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    inside: opt.Inside = None,
    all_rows: opt.All = False,
    fail_on: opt.FailOn = None,
    json_file: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Predict and measure a model's signal, and say how they agree.

    A preset is built with fresh weights for every seed. A Hugging Face directory is measured as it is, and predicted
    from its weights.

    \b
    Example: signalprop compare tgs --layers 48 --scheme deepscalelm --seeds 8
    """
    from signalprop.cli.loading import announce_model, arrays_in, live_model
    from signalprop.data.batches import default_statistics
    from signalprop.data.model_batches import model_batch
    from signalprop.errors import InputError
    from signalprop.prediction import check_fidelity, cost_of_runs, expected_cost
    from signalprop.report import tables
    from signalprop.studies import study

    output.check_outputs(json_file, plot=plot)
    output.check_severity(fail_on)
    changed = opt.changes(assignments, n_layers=layers, seq_len=seq_len, norm_placement=norm)
    chosen = check_fidelity(fidelity)
    if chosen == "simulate":
        raise InputError("compare measures networks itself; choose fidelity auto, moments or kernel")
    built: list[tuple[str, Parametrization]] = []  # by its name on the page, where networks are built from it
    subject: Parametrization | Anatomy
    arguments: dict[str, Any] | None = None
    arrays = arrays_in(data, changed.get("seq_len"))
    if sources.is_model(arch) and scheme in (None, "as-is"):
        sources.check_as_it_is(changed)
        place = opt.usable(device)
        tokens = seeds * _SEQUENCES * changed.get("seq_len", LONGEST)
        announce_model(arch, tokens, less="fewer seeds (--seeds) or tokens (--seq-len)")
        subject, a, arguments = live_model(arch, arrays, inside, place, changed)
        found = [] if a is None else [model_batch(a, Path(arch), data, _SEQUENCES, seed + k) for k in range(seeds)]
    elif scheme == "as-is":
        raise InputError("scheme as-is needs a Hugging Face directory")
    else:
        sources.check_built(inside=inside, data=arrays)
        subject = sources.parametrization(arch, changed, scheme, longest=LONGEST)
        place = opt.usable(device)
        built.append((subject.scheme, subject))
        costs = expected_cost(subject, default_statistics(subject.architecture), chosen)
        output.announce([costs, cost_of_runs(subject, _SEQUENCES, seeds)], chosen=chosen != "auto")
        found = [model_batch(subject.architecture, None, data, _SEQUENCES, seed)]
    with output.progress("measuring") as step:
        result = study(
            subject, batches=[batch for batch, _ in found] or None, inputs=arguments, seeds=seeds, seed=seed,
            fidelity=chosen, backward=not no_gradient, device=place, progress=step,
        )  # fmt: skip

    def show() -> None:
        table, agreed = partial(tables.comparison_table, result), tables.agreement_table(result)
        table = table if all_rows else partial(table, max_rows=4)
        output.echo_profile(
            result.predicted, table, agreed, all_rows=all_rows, judged=result.measured, numbers=all_rows
        )
        measured = f"{found[0][1]}, {seeds} seed{'s' * (seeds > 1)}" if found else str(data)
        notes = [note for note in result.measured.notes if note not in result.predicted.notes]
        n = len(notes) + len(result.predicted.notes)
        if all_rows:
            output.facts(*(("note", note) for note in notes), ("measured", measured))
        else:
            output.facts(("measured", measured + f"; --all prints {n} note{'s' * (n > 1)} and more" * (n > 0)))

    output.deliver(
        json_file,
        result.to_json,
        show,
        output.picture(plot, result.plot, lambda: [(result.predicted.scheme, result), *built]),
    )
    output.fail_on(result.findings, fail_on)
