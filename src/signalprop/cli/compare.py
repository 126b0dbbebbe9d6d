"""`signalprop compare`: the main job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from signalprop.cli import options as opt

if TYPE_CHECKING:
    from signalprop.parametrization import Parametrization
    from signalprop.profile import Profile

# Above this many weights in one network, networks are drawn layer by layer instead of built whole (4 bytes each).
LARGE = 1_000_000_000


def compare(
    arch: opt.Arch,
    layers: opt.Layers = None,
    d_model: opt.DModel = None,
    heads: opt.Heads = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", help="Tokens per sequence (default: at most 128).")] = None,
    dropout: opt.Dropout = None,
    activation: opt.Activation = None,
    norm: opt.Norm = None,
    norm_kind: opt.NormKind = None,
    vocab_size: opt.VocabSize = None,
    assignments: opt.Set = None,
    scheme: Annotated[
        str | None, typer.Option("--scheme", help="Scheme; of a directory also `as-is` (its default): the weights it has.")
    ] = None,
    option: opt.SchemeOption = None,
    qk_scale: opt.QkScale = 1.0,
    text: opt.Text = None,
    fidelity: Annotated[str, typer.Option(help="Of the prediction: auto, moments or kernel.")] = "auto",
    no_gradient: opt.NoGradient = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Networks (batches, for as-is) to average.")] = 8,
    batch_size: opt.BatchSize = 2,
    seed: opt.Seed = 0,
    all_rows: opt.All = False,
    json_file: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Predict and measure the signal of a model on real text, layer by layer, and say how well they agree.

    The model is built from the architecture and the scheme, with fresh weights for every seed; it reads the embedded text unless --text
    names a file. A Hugging Face directory is by default measured as it is, and predicted from its live weights.

    Example: signalprop compare tgs --layers 48 --scheme deepscalelm --seeds 8 --plot signal.png
    """
    from signalprop.comparison import compare as compared
    from signalprop.errors import InputError, require
    from signalprop.prediction import check_fidelity
    from signalprop.report import findings, tables

    opt.check_plot(plot)
    opt.check_json(json_file)
    chosen = check_fidelity(fidelity)
    if chosen == "simulate":
        raise InputError("compare measures networks already; choose fidelity auto, moments or kernel")
    require("torch", "models")
    changed = opt.changes(
        layers, d_model, heads, seq_len, dropout, activation, norm, norm_kind, vocab_size, assignments
    )
    as_is = opt.is_directory(arch) and scheme in (None, "as-is")
    if as_is and (set(changed) - {"seq_len"} or option or qk_scale != 1):
        raise InputError("as-is takes the directory's model as it is; of the architecture only --seq-len can change")
    if not as_is and scheme == "as-is":
        raise InputError("scheme as-is needs a Hugging Face directory")
    run = _as_is if as_is else _built
    arguments = (changed, scheme, option, qk_scale, text, seeds, batch_size, seed, not no_gradient, chosen)
    predicted, measured, read = run(arch, *arguments)
    result = compared(predicted, measured)
    if plot is not None:
        from signalprop.report.plots import save_plot

        save_plot(plot, result)
    if opt.write_result(json_file, result.to_json() if json_file else None):
        return
    typer.echo(tables.comparison_table(result, max_rows=None if all_rows else tables.MAX_ROWS))
    typer.echo()
    typer.echo(tables.agreement_table(result))
    typer.echo()
    for line in [*findings.summary(predicted), f"measured            {read}, {measured.n_seeds} seeds"]:
        typer.echo(line)
    for line in findings.warnings(measured):
        typer.echo(f"warning             {line}")
    for name, path in (("json", json_file), ("plot", plot)):
        if path is not None:
            typer.echo(f"{name:<20}{path}")


def _shorter(p_or_length: int) -> int:
    return min(p_or_length, 128)


def _built(
    arch: str, changed: dict[str, Any], scheme: str | None, option: list[str] | None, qk_scale: float,
    text: Path | None, seeds: int, batch_size: int, seed: int, backward: bool, fidelity: Any,
) -> tuple[Profile, Profile, str]:  # fmt: skip
    """Predict and measure networks built with a scheme."""
    from signalprop.cli.loading import model_batch
    from signalprop.compute import count_parameters
    from signalprop.models import build
    from signalprop.prediction import predict
    from signalprop.probes import measure
    from signalprop.profile import average
    from signalprop.simulation import simulate

    p = opt.parametrization(arch, changed, scheme, option, qk_scale)
    if "seq_len" not in changed and p.architecture.input == "tokens" and p.architecture.seq_len > 128:
        p = opt.parametrization(arch, changed | _short(p), scheme, option, qk_scale) if not _finished(arch) else p
    a = p.architecture
    batch, read = model_batch(a, None, text, batch_size, seed)
    predicted = predict(p, batch.statistics(a), fidelity=fidelity, backward=backward)
    large = count_parameters(a)["total"] > LARGE
    profiles = []
    with opt.progress("measuring", seeds) as step:
        for k in range(seeds):
            if large:
                profiles.append(simulate(p, batch=batch, n_seeds=1, seed=seed + k, backward=backward))
            else:
                profiles.append(measure(build(p, seed=seed + k), batch, backward=backward, scheme=p.scheme))
            step(k + 1, seeds)
            if not sys.stderr.isatty():
                print(f"network {k + 1} of {seeds} measured", file=sys.stderr)
    return predicted, average(profiles), read


def _finished(arch: str) -> bool:
    """Whether ARCH is a parametrization file, whose shape is final."""
    from signalprop.parametrization import SCHEMA
    from signalprop.storage import read_json

    return arch.endswith(".json") and not opt.is_directory(arch) and read_json(arch).get("schema") == SCHEMA


def _short(p: Parametrization) -> dict[str, Any]:
    """Sequences of at most 128 tokens, so that a default run takes about a minute."""
    short: dict[str, Any] = {"seq_len": _shorter(p.architecture.seq_len)}
    if p.architecture.target_len:
        short["target_len"] = _shorter(p.architecture.target_len)
    return short


def _as_is(
    arch: str, changed: dict[str, Any], scheme: str | None, option: list[str] | None, qk_scale: float,
    text: Path | None, seeds: int, batch_size: int, seed: int, backward: bool, fidelity: Any,
) -> tuple[Profile, Profile, str]:  # fmt: skip
    """Measure a directory's own model on several batches, and predict from its live weights."""
    from signalprop.cli.loading import load_model, model_batch
    from signalprop.prediction import predict
    from signalprop.probes import measure
    from signalprop.probes.families import mapping_of
    from signalprop.probes.reading import read_parametrization
    from signalprop.profile import average

    directory = Path(arch)
    model = load_model(directory, random_init=False, seed=seed).eval()
    a = mapping_of(model).architecture
    length = changed.get("seq_len") or (_shorter(a.seq_len) if a.input == "tokens" else a.seq_len)
    # dropout is off in a checkpoint that is measured, so it is off in the prediction
    a = a.replace(seq_len=length, target_len=_shorter(a.target_len) if a.target_len else None, dropout=0.0,
                  attention_dropout=0.0, embedding_dropout=0.0)  # fmt: skip
    p = read_parametrization(model, architecture=a)
    profiles = []
    with opt.progress("measuring", seeds) as step:
        for k in range(seeds):
            batch, read = model_batch(a, directory, text, batch_size, seed + k)
            if k == 0:
                predicted = predict(p, batch.statistics(a), fidelity=fidelity, backward=backward)
            profiles.append(measure(model, batch, backward=backward, scheme="as is"))
            step(k + 1, seeds)
    return predicted, average(profiles), read
