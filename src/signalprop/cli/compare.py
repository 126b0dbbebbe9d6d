"""`signalprop compare`: the main job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from signalprop.cli import options as opt
from signalprop.cli import output

if TYPE_CHECKING:
    from signalprop.network.parametrization import Parametrization
    from signalprop.prediction import Fidelity
    from signalprop.results.profile import Profile

REPORT = "signalprop-comparison.html"
# Above this many weights in one network, networks are drawn layer by layer instead of built whole (4 bytes each).
LARGE = 1_000_000_000
# Tokens per sequence where nobody says how many, so that a default run takes about a minute.
LONGEST = 128


class _Run(NamedTuple):
    """How to measure, and at which fidelity to predict."""

    text: Path | None
    seeds: int
    batch_size: int
    seed: int
    backward: bool
    fidelity: Fidelity


class _Outcome(NamedTuple):
    predicted: Profile
    measured: Profile
    read: str
    table: tuple[tuple[str, Parametrization], ...] = ()  # by its name in the report, where networks were built from it


def compare(
    arch: opt.Arch,
    layers: opt.Layers = None,
    d_model: opt.DModel = None,
    heads: opt.Heads = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", help=f"Tokens per sequence (default: at most {LONGEST}).")
    ] = None,
    dropout: opt.Dropout = None,
    activation: opt.Activation = None,
    norm: opt.Norm = None,
    norm_kind: opt.NormKind = None,
    vocab_size: opt.VocabSize = None,
    assignments: opt.Set = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            "--scheme",
            help="Initialisation (default: xavier); of a directory also as-is (its default).",
        ),
    ] = None,
    option: opt.SchemeOption = None,
    qk_scale: opt.QkScale = 1.0,
    text: opt.Text = None,
    fidelity: Annotated[str, typer.Option("--fidelity", help="Of the prediction: auto, moments or kernel.")] = "auto",
    no_gradient: opt.NoGradient = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Networks (batches, for as-is) to average.")] = 8,
    batch_size: opt.BatchSize = 2,
    seed: opt.Seed = 0,
    all_rows: opt.All = False,
    json_file: opt.Json = None,
    plot: opt.Plot = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help=f"Interactive report (default: {REPORT}).")
    ] = None,
    no_report: opt.NoReport = False,
) -> None:
    """Predict and measure a model's signal, and say how they agree.

    The model is built from the architecture and the scheme, with fresh weights for every seed; it reads the
    embedded text unless --text names a file. A Hugging Face directory is by default measured as it is, and
    predicted from the statistics of its live weights.

    \b
    Example:
      signalprop compare tgs --layers 48 --scheme deepscalelm --seeds 8 --plot signal.png
    """
    from signalprop.errors import InputError, require
    from signalprop.prediction import check_fidelity
    from signalprop.report import findings, tables
    from signalprop.results.comparison import compare as compared

    output.check_outputs(json_file, plot)
    page = output.report_file(report, no_report, json_file, REPORT)
    chosen = check_fidelity(fidelity)
    if chosen == "simulate":
        raise InputError("compare measures networks already; choose fidelity auto, moments or kernel")
    changed = opt.changes(
        assignments, layers=layers, d_model=d_model, heads=heads, seq_len=seq_len, dropout=dropout,
        activation=activation, norm=norm, norm_kind=norm_kind, vocab_size=vocab_size,
    )  # fmt: skip
    run = _Run(text, seeds, batch_size, seed, not no_gradient, chosen)
    if opt.is_directory(arch) and scheme in (None, "as-is"):
        if changed.keys() - {"seq_len"} or option or qk_scale != 1:
            raise InputError("as-is takes the directory's model as it is; only --seq-len can change")
        require("torch", "models")
        outcome = _as_is(Path(arch), changed, run)
    elif scheme == "as-is":
        raise InputError("scheme as-is needs a Hugging Face directory")
    else:
        p = opt.parametrization(arch, changed, scheme, option, qk_scale, longest=LONGEST)
        require("torch", "models")
        outcome = _built(p, run)
    result = compared(outcome.predicted, outcome.measured)

    def show() -> None:
        output.echo(tables.comparison_table(result, max_rows=None if all_rows else tables.MAX_ROWS))
        output.echo()
        output.echo(tables.agreement_table(result))
        lines = [
            *findings.summary(outcome.predicted),
            f"{'measured':<20}{outcome.read}, {seeds} seed{'s' * (seeds > 1)}",
        ]
        output.echo_findings(lines, findings.warnings(outcome.measured))

    output.deliver(
        json_file,
        result.to_json,
        show,
        output.picture(plot, result),
        page=page,
        items=lambda: [(result.predicted.scheme, result), *outcome.table],
    )


def _built(p: Parametrization, run: _Run) -> _Outcome:
    """Predict, and measure networks with fresh weights on one batch."""
    import torch

    from signalprop.cli.loading import model_batch, with_gradient
    from signalprop.measurement import measure
    from signalprop.measurement.simulation import simulate
    from signalprop.models import build
    from signalprop.prediction import predict
    from signalprop.results.cost import count_parameters
    from signalprop.results.profile import average

    backward, notes = with_gradient(p.architecture, run.backward)
    batch, read = model_batch(p.architecture, None, run.text, run.batch_size, run.seed)
    predicted = predict(p, batch.statistics(p.architecture), fidelity=run.fidelity, backward=backward)
    predicted = replace(predicted, notes=(*predicted.notes, *notes))
    large = count_parameters(p.architecture)["total"] > LARGE
    profiles = []
    with output.progress("measuring networks") as step:
        for k in range(run.seeds):
            if large:
                profiles.append(simulate(p, batch=batch, n_seeds=1, seed=run.seed + k, backward=backward))
            else:
                model = build(p, seed=run.seed + k)
                torch.manual_seed(run.seed + k)  # of the dropout masks
                profiles.append(measure(model, batch, backward=backward, scheme=p.scheme))
            step(k + 1, run.seeds)
    return _Outcome(predicted, average(profiles), read, ((p.scheme, p),))


def _as_is(directory: Path, changed: dict[str, Any], run: _Run) -> _Outcome:
    """Measure a directory's own model on several batches, and predict from its live weights and all the batches."""
    from signalprop.attachment.parametrization_of import read_parametrization
    from signalprop.cli.loading import architecture_of, load_model, model_batch, pooled, with_gradient
    from signalprop.measurement import measure
    from signalprop.prediction import predict
    from signalprop.results.profile import average

    model = load_model(directory, random_init=False, seed=run.seed).eval()
    # dropout is off in a checkpoint that is measured, so it is off in the prediction
    a = architecture_of(model, changed, LONGEST).replace(dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
    backward, notes = with_gradient(a, run.backward)
    profiles, batches = [], []
    with output.progress("measuring batches") as step:
        for k in range(run.seeds):
            batch, read = model_batch(a, directory, run.text, run.batch_size, run.seed + k)
            batches.append(batch)
            profiles.append(measure(model, batch, backward=backward, scheme="as is", architecture=a))
            step(k + 1, run.seeds)
    p = read_parametrization(model, architecture=a)
    statistics = pooled(batches).statistics(a)
    predicted = predict(p, statistics, fidelity=run.fidelity, backward=backward)
    random = "the prediction takes the weights as random, with the standard deviations that they have"
    predicted = replace(predicted, notes=(*predicted.notes, random, *notes))
    return _Outcome(predicted, average(profiles), read)
