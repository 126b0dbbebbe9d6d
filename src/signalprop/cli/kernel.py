"""`signalprop kernel`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from signalprop.cli import options as opt
from signalprop.cli import output, sources
from signalprop.data.batches import LONGEST, default_statistics
from signalprop.errors import InputError

if TYPE_CHECKING:
    from signalprop.kernels.trace import Matrices, Trace
    from signalprop.network.inputs import InputStatistics
    from signalprop.network.parametrization import Parametrization

SCHEMA = "signalprop/kernel/1"
GALLERY = "gallery"
_REPEATS = 0.02  # share of pairs of positions with equal tokens, in the gallery


def kernel(
    arch: Annotated[
        str,
        typer.Argument(
            metavar="ARCH",
            help="As for predict; or `gallery`, the seven attention-only networks of the SPA paper's figures 1 and 7.",
        ),
    ],
    layers: opt.Layers = None,
    seq_len: opt.Shortened = None,
    norm: opt.Norm = None,
    assignments: opt.Set = None,
    scheme: opt.SchemeNames = None,
    data: opt.Text = None,
    everything: Annotated[bool, typer.Option("--all", help="Print every depth instead of a selection.")] = False,
    json_file: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Follow token kernels: where all tokens become one.

    Several schemes, with commas between, are shown side by side.

    \b
    Example: signalprop kernel gpt2 --scheme xavier,deepscalelm --layers 24
    """
    from signalprop.kernels.memory_limits import check_covered
    from signalprop.kernels.trace import trace
    from signalprop.prediction import expected_cost
    from signalprop.report import kernel_tables
    from signalprop.report.kernels import cosine_maps
    from signalprop.report.plots import sections_figure
    from signalprop.report.sections import Section

    output.check_outputs(json_file, plot=plot)
    changed = opt.changes(assignments, n_layers=layers, seq_len=seq_len, norm_placement=norm)
    if arch == GALLERY:
        if scheme or data:
            raise InputError("the gallery fixes its schemes and input; leave out --scheme and --data")
        networks = _gallery(changed)
    else:
        tables = {
            name: sources.parametrization(arch, changed, name, longest=LONGEST) for name in opt.several_schemes(scheme)
        }
        networks = {name or p.scheme: p for name, p in tables.items()}
    keep: Matrices = "none" if plot is None else "both" if output.is_page(plot) else "forward"
    inputs = {name: _statistics(p, arch == GALLERY, data) for name, p in networks.items()}
    for p in networks.values():
        check_covered(p)
    output.announce([expected_cost(p, inputs[name], "kernel") for name, p in networks.items()])
    traces: dict[str, Trace] = {}
    with output.progress("tracing") as step:
        for number, (name, p) in enumerate(networks.items()):
            traces[name] = trace(p, inputs=inputs[name], matrices=keep)
            step(number + 1, len(networks))

    rows = None if everything else 14

    def maps() -> Any:
        made = cosine_maps(traces)
        columns = len(made) // len(traces)
        return sections_figure([Section("", made)], "Normalised kernels", columns=columns, size=(2.4, 2.2))

    output.deliver(
        json_file,
        lambda: kernel_tables.to_json(traces, SCHEMA),
        lambda: output.echo("\n".join([kernel_tables.table(traces, rows=rows), "", *kernel_tables.summary(traces)])),
        output.picture(plot, maps, lambda: list(traces.items())),
    )


def _gallery(changed: dict[str, Any]) -> dict[str, Parametrization]:
    from signalprop.kernels.gallery import figure_7

    others = changed.keys() - {"n_layers", "seq_len"}
    if others:
        raise InputError(f"only --layers and --seq-len of the gallery's networks can change, not {sorted(others)[0]}")
    return figure_7(changed.get("n_layers", 100), changed.get("seq_len", 100), _REPEATS)


def _statistics(p: Parametrization, gallery: bool, text: Path | None) -> InputStatistics:
    """What a network reads."""
    from signalprop.data.batches import default_batch

    usual = default_statistics(p.architecture)
    if text is not None:
        return default_batch(p.architecture, text=text, batch_size=4).statistics(p.architecture)
    if not gallery:
        return usual
    return replace(usual, token_correlation=_REPEATS, source=f"average over sequences, {_REPEATS:.4g} of pairs equal")
