"""`signalprop kernel`."""

from __future__ import annotations

import io
import os
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer

from signalprop.cli import options as opt
from signalprop.cli import output, sources
from signalprop.data.batches import LONGEST, default_statistics
from signalprop.errors import InputError
from signalprop.files.storage import write_bytes

if TYPE_CHECKING:
    from signalprop.kernels.trace import Matrices, Trace
    from signalprop.network.inputs import InputStatistics
    from signalprop.network.parametrization import Parametrization

SCHEMA = "signalprop/kernel/1"
GALLERY = "gallery"
_GALLERY_REPEATS = 0.02
_SAMPLES = 8


class _Input(NamedTuple):
    """What the networks read."""

    kind: str  # average, sampled, text, or the name of a file
    repeats: float | None
    samples: int
    text: Path | None
    seed: int


@opt.of_a_network(seq_len=opt.SHORTENED)
def kernel(
    configs: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG",
            help="Networks, each in quotes: ARCH [SCHEME] [KEY=VALUE ...] with options of the scheme or fields of the "
            "architecture, e.g. 'gpt2 xavier norm=post'; a parametrization (.json); or `gallery`, the seven "
            "attention-only networks of the SPA paper's figures 1 and 7.",
        ),
    ],
    changed: opt.Changes,
    scheme: Annotated[
        list[str] | None,
        typer.Option("--scheme", help="For every CONFIG without one: 'NAME [KEY=VALUE ...]' (repeatable)."),
    ] = None,
    attention_only: Annotated[
        bool, typer.Option("--attention-only", help="Leave the feed-forwards out; much faster.")
    ] = False,
    source: Annotated[
        str,
        typer.Option(
            "--input",
            metavar="KIND",
            help="average (of sequences with repeated tokens), sampled (such sequences), text, or a file with a kernel "
            "X X^T / d of the first sublayer's input (.npy or .json).",
        ),
    ] = "average",
    repeats: Annotated[
        float | None,
        typer.Option("--repeats", help="Share of pairs of positions with equal tokens (default: Zipf's law)."),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Sequences that are sampled or read.")] = _SAMPLES,
    text: Annotated[
        Path | None, typer.Option("--text", "--data", metavar="FILE", help="UTF-8 text to read; implies --input text.")
    ] = None,
    at: Annotated[
        str | None, typer.Option("--at", metavar="DEPTHS", help="Depths to show, e.g. 1,10,100 (default: a dozen).")
    ] = None,
    no_gradient: opt.NoGradient = False,
    seed: opt.Seed = 0,
    json_file: opt.Json = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw heat maps (.png, .svg or .pdf).")
    ] = None,
    plot_curves: Annotated[
        Path | None, typer.Option("--plot-curves", metavar="FILE", help="Draw the numbers over depth.")
    ] = None,
    matrices: Annotated[
        Path | None, typer.Option("--matrices", metavar="FILE", help="Write the kernels as NumPy arrays (.npz).")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write an interactive page (.html).")
    ] = None,
) -> None:
    """Follow token kernels through every layer: who becomes alike, how far apart, and where the rank collapses.

    \b
    Example:
      signalprop kernel "gpt2 xavier" "gpt2 xavier norm=none" --layers 24 --attention-only --plot kernels.png
    """
    from signalprop.kernels.covered import check_covered
    from signalprop.kernels.inputs import load_kernel
    from signalprop.kernels.trace import depths_of, trace
    from signalprop.prediction import expected_cost
    from signalprop.report import kernel_tables
    from signalprop.report.kernels import cosine_maps, kernel_section, of_trace
    from signalprop.report.plots import sections_figure
    from signalprop.report.sections import Section

    for picture in (plot, plot_curves):
        output.check_outputs(json_file, matrices, plot=picture)
    page = output.report_file(report, report is None, json_file)
    if matrices is not None and matrices.suffix != ".npz":
        raise InputError(f"cannot write {matrices}: expected a name that ends in .npz")
    read = _Input("text" if text is not None else source, repeats, samples, text, seed)
    if GALLERY in configs and repeats is None:
        read = read._replace(repeats=_GALLERY_REPEATS)
    if read.kind not in ("average", "sampled", "text") and Path(read.kind).suffix not in (".npy", ".json"):
        raise InputError(f"--input is {read.kind!r:.80}; expected average, sampled, text, or a file (.npy or .json)")
    given = None if Path(read.kind).suffix == "" else load_kernel(read.kind)
    if given is not None and changed.get("seq_len") not in (None, len(given)):
        raise InputError(
            f"{read.kind} is a kernel of {len(given)} tokens, --seq-len is {changed['seq_len']}; leave that out"
        )
    networks = _networks(configs, scheme, changed, read, attention_only)
    depths = None if at is None else _depths(at)
    keep: Matrices = "both" if matrices is not None or report is not None else "none" if plot is None else "forward"
    inputs = {name: None if given is not None else _statistics(p, read) for name, p in networks.items()}
    for p in networks.values():
        check_covered(p)
        depths_of(p, depths)
    output.announce([expected_cost(p, default_statistics(p.architecture), "kernel") for p in networks.values()])
    traces: dict[str, Trace] = {}
    with output.progress("tracing") as step:
        for number, (name, p) in enumerate(networks.items()):
            found = trace(p, given, inputs=inputs[name], at=depths, backward=not no_gradient, matrices=keep)
            traces[name] = found if given is None else replace(found, source=read.kind)
            step(number + 1, len(networks))

    def maps() -> Any:
        made = cosine_maps(traces)
        columns = len(made) // len(traces)
        return sections_figure([Section("", made)], "Normalised kernels", columns=columns, size=(2.4, 2.2))

    def curves() -> Any:
        section = kernel_section(
            {name: replace(of_trace(item), forward={}, gradient={}) for name, item in traces.items()}
        )
        return sections_figure([section], section.title)

    output.deliver(
        json_file,
        lambda: kernel_tables.to_json(traces, SCHEMA),
        lambda: output.echo("\n".join([kernel_tables.table(traces), "", *kernel_tables.summary(traces)])),
        output.File("matrices", matrices, lambda path: _write_matrices(path, traces)),
        output.picture(plot, maps),
        output.picture(plot_curves, curves, "curves"),
        page=page,
        items=lambda: list(traces.items()),
    )


class _Config(NamedTuple):
    """One CONFIG in words."""

    arch: str
    scheme: str | None
    pairs: list[str]

    @property
    def name(self) -> str:
        return " ".join(word for word in (self.arch, self.scheme, *self.pairs) if word)


def _networks(
    configs: list[str], schemes: list[str] | None, changed: dict[str, Any], read: _Input, attention_only: bool
) -> dict[str, Parametrization]:
    """The networks by name."""
    from signalprop.kernels import trace

    found: list[tuple[str, Parametrization]] = []
    for config in configs:
        if config.strip() == GALLERY:
            found += _gallery(changed, read).items()
        else:
            found += [(item.name, _network(item, changed)) for item in _with_schemes(_config(config), schemes)]
    made = [trace.attention_only(p) if attention_only else p for _, p in found]
    return dict(zip(_distinct([name for name, _ in found]), made, strict=True))


def _config(text: str) -> _Config:
    """`ARCH [SCHEME] [KEY=VALUE ...]`."""
    try:
        words = [text] if os.path.exists(text) else shlex.split(text)  # a path may have spaces
    except ValueError:  # a quotation mark without its other half
        words = []
    plain = [word for word in words if "=" not in word]
    if not plain or plain[0] != words[0] or len(plain) > 2:
        raise InputError(f"{text!r:.80} is not a configuration; expected 'ARCH [SCHEME] [KEY=VALUE ...]' in quotes")
    return _Config(plain[0], plain[1] if len(plain) == 2 else None, [word for word in words if "=" in word])


def _with_schemes(config: _Config, schemes: list[str] | None) -> list[_Config]:
    """The configuration with each of the schemes of --scheme, unless it has one of its own or is finished."""
    if not schemes or config.scheme or config.arch.endswith(".json"):
        return [config]
    out = []
    for text in schemes:
        item = _config(text)
        if item.scheme is not None:
            raise InputError(f"--scheme {text!r:.80} has two names; expected 'NAME [KEY=VALUE ...]' in quotes")
        out.append(_Config(config.arch, item.arch, [*config.pairs, *item.pairs]))
    return out


def _network(config: _Config, changed: dict[str, Any]) -> Parametrization:
    """Pairs whose key the scheme knows are its options, all others change the architecture."""
    from signalprop.schemes import SCHEMES

    known = {item.name for item in fields(SCHEMES[config.scheme])} if config.scheme in SCHEMES else set()
    options = [pair for pair in config.pairs if pair.partition("=")[0] in known]
    own = opt.changes_in_words(opt.pairs([pair for pair in config.pairs if pair not in options], "CONFIG"))
    return sources.parametrization(config.arch, changed | own, config.scheme, options, longest=LONGEST)


def _gallery(changed: dict[str, Any], read: _Input) -> dict[str, Parametrization]:
    from signalprop.kernels.gallery import figure_7

    others = changed.keys() - {"n_layers", "seq_len"}
    if others:
        raise InputError(f"the gallery's networks have only --layers and --seq-len to change, not {sorted(others)[0]}")
    repeats = _GALLERY_REPEATS if read.repeats is None else read.repeats
    return figure_7(changed.get("n_layers", 100), changed.get("seq_len", 100), repeats)


def _distinct(names: list[str]) -> list[str]:
    """Names without the first word that all share, and with numbers where two are equal."""
    rest = [name.partition(" ")[2] for name in names]
    if len(names) > 1 and all(rest) and len({name.partition(" ")[0] for name in names}) == 1:
        names = rest
    return [f"{name} #{names[: i + 1].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _statistics(p: Parametrization, read: _Input) -> InputStatistics:
    """What a network reads."""
    from signalprop.data.batches import default_batch
    from signalprop.kernels.inputs import sampled_tokens
    from signalprop.network.inputs import from_tokens

    a = p.architecture
    usual = default_statistics(a)
    if read.kind == "average" and read.repeats is None:
        return usual
    if a.input != "tokens":
        raise InputError(
            f"this architecture reads {a.input}; it has no repeated tokens: leave --input and --repeats out"
        )
    if read.kind == "text":
        return default_batch(a, text=read.text, batch_size=read.samples, seed=read.seed).statistics(a)
    repeats = usual.token_correlation if read.repeats is None else read.repeats
    if not 0 <= repeats < 1:
        raise InputError(f"--repeats is {repeats}; expected a share of equal pairs from 0 up to, but not, 1")
    if read.kind == "average":
        return replace(usual, token_correlation=repeats, source=f"average over sequences, {repeats:.4g} of pairs equal")
    ids = sampled_tokens(a.seq_len, repeats, read.samples, read.seed)
    return from_tokens(ids, causal=a.causal, source=f"sampled sequences, {repeats:.4g} of pairs equal")


def _depths(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise InputError(f"--at is {text!r:.80}; expected depths with commas between, e.g. 1,10,100") from None


def _write_matrices(path: Path, traces: dict[str, Trace]) -> None:
    arrays = {f"{name}/forward/{depth}": k for name, found in traces.items() for depth, k in found.kernels.items()}
    arrays |= {f"{name}/gradient/{depth}": k for name, found in traces.items() for depth, k in found.gradients.items()}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_bytes(path, buffer.getvalue())
