"""Pictures of profiles and comparisons, and how every picture is written. Needs the `report` extra (matplotlib)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from signalprop.errors import InputError, printable, require
from signalprop.files.storage import write_bytes
from signalprop.report.html.curves import curves_of
from signalprop.report.html.parts import numbered
from signalprop.report.html.signal import signal_section
from signalprop.report.overview_plots import heat_maps
from signalprop.report.section_plots import sections_figure
from signalprop.results.comparison import Comparison
from signalprop.results.profile import Profile
from signalprop.results.text import network_in_words

FORMATS = ("png", "svg", "pdf")
WIDE = 2  # panels beside each other


def check_format(path: str | Path) -> str:
    """The picture format that a file name asks for."""
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
    """A matplotlib Figure with the charts of the page (`signalprop.report.html.signal`), two beside each other.

    Stream variance, gradient variance, token correlation, and what each layer adds relative to the stream it meets.
    Predictions are lines, measurements points; bands and bars are two standard errors, of a prediction two standard
    deviations of one network. Networks of several depths share an axis, from their first layer to their last. Several
    schemes at several depths have heat maps below (`signalprop.report.overview_plots`), in the same colours.
    """
    require("matplotlib", "report")
    given = [items] if isinstance(items, Profile | Comparison) else list(items)
    if not given:
        raise InputError("there is nothing to draw; give at least one profile")
    curves = curves_of(numbered([(_name(item), item) for item in given]))
    profiles = [curve.profile for curve in curves]
    section = signal_section(curves, by_scheme=True)
    if len({p.architecture.n_layers_total for p in profiles}) > 1:
        _share_the_axis(section)
    section["blocks"] += heat_maps(profiles)
    return sections_figure([section], _title(profiles) if title is None else title, columns=WIDE, size=(6.0, 3.7))


def _name(item: Profile | Comparison) -> str:
    return (item.predicted if isinstance(item, Comparison) else item).scheme


def _share_the_axis(section: dict[str, Any]) -> None:
    """Positions from 0 to 1 in every network; borders of decoders, which they do not share, are left out."""
    for place in section["places"]:
        deepest = max(x for x in place["x"] if x is not None)
        place["x"] = [None if x is None else x / deepest for x in place["x"]]
    for chart in section["blocks"]:
        chart |= {"x": "layer, as a share of the depth", "marks": []}


def _title(profiles: Sequence[Profile]) -> str:
    schemes = ", ".join(dict.fromkeys(p.scheme for p in profiles))
    source = profiles[-1].statistics.get("source") or profiles[0].statistics.get("source")
    found = [f", {p.source} in {p.n_seeds} network{'s' * (p.n_seeds != 1)}" for p in profiles if p.n_seeds]
    read = f", reading {source}" if source else ""
    return f"{network_in_words(*(p.architecture for p in profiles))}: {schemes}{read}{''.join(dict.fromkeys(found))}"
