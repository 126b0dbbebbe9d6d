"""Pictures: profiles and comparisons over depth. Needs the `report` extra (matplotlib), imported inside."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from signalprop.errors import InputError, printable, require
from signalprop.files.storage import write_bytes
from signalprop.network.inputs import IntArray
from signalprop.network.kinds import KINDS, kind_named, kinds_in
from signalprop.network.layout import layer_starts
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import STACKS, layout
from signalprop.report.overview_plots import draw_map, heat_maps
from signalprop.results.between_streams import alike
from signalprop.results.comparison import Comparison
from signalprop.results.profile import Profile
from signalprop.results.series import Series
from signalprop.results.text import depth_in_words, network_in_words, spread

FORMATS = ("png", "svg", "pdf")
# Okabe and Ito's palette: told apart by every common kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LOG_RANGE = 10.0  # a variance that spans more than this gets a logarithmic axis
LIGHTEST = 0.35  # share of its colour that the shallowest of several depths keeps; the rest is white
MAX_POINTS = 64  # measured points per curve; more would merge into a band
_DECADE = float(np.log(10.0))


def check_format(path: str | Path) -> str:
    """The picture format that a file name asks for.

    Raises:
        InputError: none of .png, .svg, .pdf.
    """
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise InputError(f"cannot draw {path}: expected a name that ends in .png, .svg or .pdf")
    return suffix


def save_plot(path: str | Path, items: Profile | Comparison | Sequence[Profile], *, title: str | None = None) -> None:
    """Draw `figure(items)` and write it, whole or not at all, in the format of the file's name (png, svg, pdf)."""
    save_figure(path, lambda: figure(items, title=title))


def save_figure(path: str | Path, draw: Callable[[], Any]) -> None:
    """Write a matplotlib Figure that `draw` makes, whole or not at all, in the format of the file's name."""
    kind = check_format(path)
    buffer = io.BytesIO()
    require("matplotlib", "report")
    from matplotlib import rc_context

    # no date in the file, and a fixed salt of its names, so that equal input gives equal bytes
    metadata = {"png": None, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with rc_context({"svg.hashsalt": "signalprop"}):
        picture = draw()
        _plain(picture)
        picture.savefig(buffer, format=kind, metadata=metadata)
    write_bytes(path, buffer.getvalue())


def _plain(picture: Any) -> None:
    """Show names as they are: matplotlib would read what stands between two $ as a formula, and end where it is none.

    The numbers of its axes, which are formulas, are written later, as it draws.
    """
    from matplotlib.text import Text

    for text in picture.findobj(Text):
        if text.get_text():
            text.set_text(printable(text.get_text()))
            text.set_parse_math(False)


def figure(items: Profile | Comparison | Sequence[Profile], *, title: str | None = None) -> Any:
    """A matplotlib Figure of 1200 x 800 pixels with four panels over depth.

    Stream variance, gradient variance, token correlation, and what each sublayer adds relative to the stream it meets.
    Theory is drawn as lines, measurements and simulations as points with error bars of one standard error.
    An encoder-decoder shows the decoder to the right of the encoder. Networks of several depths share an axis, from
    their first layer to their last; the deeper, the darker. Several schemes at several depths have heat maps under the
    panels (`signalprop.report.overview_plots`), with the schemes in the same order and colours.

    Raises:
        InputError: nothing to draw. MissingExtra: matplotlib is not installed.
    """
    require("matplotlib", "report")
    from matplotlib.figure import Figure

    profiles = _as_profiles(items)
    maps = heat_maps(profiles)
    low = 0.6 + 0.35 * len(maps[0].rows) if maps else 0.0  # inches
    canvas = Figure(figsize=(12, 8 + low), dpi=100, layout="constrained")
    canvas.suptitle(_title(profiles) if title is None else title, fontsize=12)
    panels = canvas.subplots(3 if maps else 2, 2, height_ratios=[4, 4, low] if maps else [1, 1])
    for panel, found in zip(panels[2] if maps else (), maps, strict=True):
        draw_map(panel, found, COLOURS)
    panels = panels[:2]
    labels = _labels(profiles)
    _variance_panel(panels[0, 0], profiles, labels, "forward", "Variance of the residual stream")
    _variance_panel(panels[0, 1], profiles, labels, "gradient", "Variance of the gradient (last sublayer = 1)")
    _correlation_panel(panels[1, 0], profiles, labels)
    _ratio_panel(panels[1, 1], profiles, labels)
    for panel in panels.flat:
        panel.set_xlabel("layer" if len(_all_depths(profiles)) == 1 else "layer, as a share of the depth")
        panel.grid(alpha=0.3, linewidth=0.6)
        _mark_stacks(panel, profiles)
    handles, names = panels[1, 0].get_legend_handles_labels()  # the panel that always has every profile
    wide = len({p.scheme for p in profiles}) if len(_all_depths(profiles)) > 1 else len(names)  # a column per scheme
    canvas.legend(handles, names, fontsize=9, ncols=min(3, wide), loc="outside lower center")
    return canvas


def _as_profiles(items: Profile | Comparison | Sequence[Profile]) -> list[Profile]:
    if isinstance(items, Comparison):
        return [items.predicted, items.measured]
    profiles = [items] if isinstance(items, Profile) else list(items)
    if not profiles:
        raise InputError("there is nothing to draw; give at least one profile")
    return profiles


def _title(profiles: Sequence[Profile]) -> str:
    schemes = ", ".join(dict.fromkeys(p.scheme for p in profiles))
    source = profiles[-1].statistics.get("source") or profiles[0].statistics.get("source")
    read = f", reading {source}" if source else ""
    return f"{network_in_words(*(p.architecture for p in profiles))}: {schemes}{read}"


def _labels(profiles: Sequence[Profile]) -> list[str]:
    several = len({p.scheme for p in profiles}) > 1
    words = {"theory": "predicted", "measured": "measured", "simulated": "simulated"}
    labels = []
    for p in profiles:
        label = words[p.source] + (f" {p.scheme}" if several else "")
        label += f", {depth_in_words([p.architecture])}" if len(_all_depths(profiles)) > 1 else ""
        detail = p.fidelity if p.source == "theory" else f"{p.n_seeds} seed{'s' if p.n_seeds != 1 else ''}"
        labels.append(f"{label} ({detail})" if p.source == "theory" or p.n_seeds else label)

    # twins get a number, so that every curve has its own line in the legend
    def numbered(i: int, name: str) -> str:
        return f"{name} #{labels[: i + 1].count(name)}" if labels.count(name) > 1 else name

    return [numbered(i, name) for i, name in enumerate(labels)]


def _depth(profile: Profile) -> int:
    return profile.architecture.n_layers + (profile.architecture.n_decoder_layers or 0)


def _all_depths(profiles: Sequence[Profile]) -> list[int]:
    return sorted({_depth(p) for p in profiles})


def _colour(profiles: Sequence[Profile], index: int) -> str:
    """One colour per scheme where several schemes or depths are drawn, else one per profile; shades by depth."""
    from matplotlib.colors import to_hex, to_rgb

    schemes, deep = list(dict.fromkeys(p.scheme for p in profiles)), _all_depths(profiles)
    position = schemes.index(profiles[index].scheme) if len(schemes) > 1 or len(deep) > 1 else index
    colour = COLOURS[position % len(COLOURS)]
    if len(deep) == 1:
        return colour
    share = LIGHTEST + (1 - LIGHTEST) * deep.index(_depth(profiles[index])) / (len(deep) - 1)
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(colour))
    return to_hex((red, green, blue))


def depths(profile: Profile) -> FloatArray:
    """Position of every sublayer's output, in layers; the decoder's layers follow the encoder's."""
    rows, a = layout(profile.architecture), profile.architecture
    in_decoder = (rows.stack == STACKS.index("decoder")) & (a.kind == "encoder-decoder")
    starts = layer_starts(rows)
    sizes = np.diff(starts, append=len(rows.layer))
    rank = np.arange(len(rows.layer)) - np.repeat(starts, sizes)
    return np.asarray(rows.layer + in_decoder * a.n_layers + (rank + 1) / np.repeat(sizes, sizes), np.float64)


def _lines(profile: Profile, by_kind: bool) -> list[tuple[IntArray, str]]:
    """Sublayers that make one line, and its style: each stack is a stream of its own, each kind of branch if asked."""
    rows = layout(profile.architecture)
    groups = rows.stack * len(KINDS) + rows.kind if by_kind else rows.stack
    return [
        (np.flatnonzero(groups == group), kind_named(KINDS[group % len(KINDS)]).line if by_kind else "-")
        for group in np.unique(groups)
    ]


def _draw(
    panel: Any, profiles: Sequence[Profile], index: int, label: str, y: FloatArray, error: FloatArray | None,
    by_kind: bool = False,
) -> None:  # fmt: skip
    profile, colour = profiles[index], _colour(profiles, index)
    x = depths(profile) / (_depth(profile) if len(_all_depths(profiles)) > 1 else 1)
    if profile.source == "theory":
        for number, (members, style) in enumerate(_lines(profile, by_kind)):
            if error is not None:
                low, high = ((y + sign * error)[members] for sign in (-1, 1))
                panel.fill_between(x[members], low, high, color=colour, alpha=0.15, linewidth=0, zorder=1)
            panel.plot(
                x[members], y[members], style, color=colour, linewidth=1.8, marker="o" if len(members) < 3 else None,
                zorder=3, label=None if number else label,
            )  # fmt: skip
        return
    keep = spread(range(len(x)), MAX_POINTS)
    bars = None if error is None else error[keep]
    panel.errorbar(
        x[keep], y[keep], yerr=bars, color=colour, fmt="o", markersize=4, elinewidth=1, capsize=2, alpha=0.85,
        label=label, zorder=2, markerfacecolor="none",
    )  # fmt: skip


def _curves(
    panel: Any, profiles: Sequence[Profile], labels: Sequence[str], logs: Sequence[FloatArray | None],
    errors: Sequence[FloatArray | None], name: str, by_kind: bool = False,
) -> None:  # fmt: skip
    """Draw exp(logs): on a logarithmic axis if they span enough, as exponents of ten where floats end.

    Errors are relative.
    """
    finite = [values[np.isfinite(values)] for values in logs if values is not None]
    everything = np.concatenate(finite) if finite else np.zeros(0)
    if not everything.size:
        panel.set_title(name + ": not computed", fontsize=11)
        return
    low, high = float(everything.min()), float(everything.max())
    as_exponents = max(-low, high) > 300 * _DECADE
    top = 0.0
    for i, (values, relative) in enumerate(zip(logs, errors, strict=True)):
        if values is None:
            continue
        if as_exponents:
            bars = None if relative is None else relative / _DECADE
            _draw(panel, profiles, i, labels[i], values / _DECADE, bars, by_kind)
            continue
        y = np.exp(values)
        size = np.zeros_like(y) if relative is None else relative * y
        top = max(top, float((y + size).max()))
        _draw(panel, profiles, i, labels[i], y, None if relative is None else size, by_kind)
    panel.set_title(name + ", power of ten" * as_exponents, fontsize=11)
    if as_exponents:
        return
    if high - low > np.log(LOG_RANGE):
        logarithmic(panel, (high - low) / _DECADE)
    else:
        panel.set_ylim(0, 1.05 * top)


def logarithmic(panel: Any, decades: float) -> None:
    """A logarithmic axis with few, plain labels: 1, 2, 5, 10 where it is short, powers of ten where it is long."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_yscale("log", nonpositive="clip")
    panel.yaxis.set_minor_formatter(NullFormatter())
    if decades < 3:
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _variance_panel(panel: Any, profiles: Sequence[Profile], labels: Sequence[str], direction: str, name: str) -> None:
    series: list[Series | None] = [
        p.forward["stream_out"] if direction == "forward" else None if p.gradient is None else p.gradient["stream_in"]
        for p in profiles
    ]
    _curves(
        panel, profiles, labels,
        [None if s is None else s.log_variance for s in series],
        [None if s is None else s.variance_sd if s.variance_se is None else s.variance_se for s in series],
        name,
    )  # fmt: skip


def _correlation_panel(panel: Any, profiles: Sequence[Profile], labels: Sequence[str]) -> None:
    lowest = 0.0
    for i, profile in enumerate(profiles):
        series = profile.forward["stream_out"]
        lowest = min(lowest, float(series.token_correlation.min()))
        bars = series.token_correlation_sd if series.token_correlation_se is None else series.token_correlation_se
        _draw(panel, profiles, i, labels[i], series.token_correlation, bars)
        if profile.stream_covariance is not None:
            x = depths(profile) / (_depth(profile) if len(_all_depths(profiles)) > 1 else 1)
            style = ":" if profile.source == "theory" else "x"
            panel.plot(x, alike(profile.stream_covariance), style, color=_colour(profiles, i), markersize=4)
            lowest = min(lowest, float(alike(profile.stream_covariance).min()))
    several = any(profile.stream_covariance is not None for profile in profiles)
    name = (
        "Token correlation; dotted, crosses: between streams" if several else "Token correlation of the residual stream"
    )
    panel.set_title(name, fontsize=11)
    panel.set_ylim(1.05 * lowest, 1.03)


def _ratio_panel(panel: Any, profiles: Sequence[Profile], labels: Sequence[str]) -> None:
    with np.errstate(divide="ignore"):
        logs = [np.log(p.sensitivity_ratios) for p in profiles]
    errors = []
    for p in profiles:
        branch, stream = p.forward["branch"].variance_se, p.forward["stream_in"].variance_se
        errors.append(None if branch is None or stream is None else np.hypot(branch, stream))
    _curves(panel, profiles, labels, logs, errors, "Variance added by the branch, over the stream's", by_kind=True)
    if any(p.source == "theory" for p in profiles):
        from matplotlib.lines import Line2D

        found = {kind.name: kind for p in profiles for kind in kinds_in(layout(p.architecture))}
        lines = [
            Line2D([], [], color="#555555", linestyle=found[name].line, label=found[name].words)
            for name in sorted(found, key=KINDS.index)
        ]
        panel.legend(handles=lines, fontsize=8)


def _mark_stacks(panel: Any, profiles: Sequence[Profile]) -> None:
    profile = profiles[0]
    if not profile.architecture.n_decoder_layers or len(_all_depths(profiles)) > 1:  # which have no border in common
        return
    border = profile.architecture.n_layers + 1 / 6
    panel.axvline(border, color="#555555", linestyle="--", linewidth=1)
    for x, align, text in ((border - 0.1, "right", "encoder"), (border + 0.1, "left", "decoder")):
        panel.annotate(text, (x, 0.02), xycoords=("data", "axes fraction"), ha=align, fontsize=9, color="#555555")
