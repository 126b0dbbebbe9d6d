"""What results show of themselves to a reader: words, a picture, a data frame."""

from __future__ import annotations

import base64
import html
import io
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from signalprop.errors import InputError, MissingExtra, require
from signalprop.files.validation import typed
from signalprop.network.layout import KINDS, STACKS, layout
from signalprop.results.between_streams import alike

if TYPE_CHECKING:
    from pandas import DataFrame

    from signalprop.diagnosis.result import Diagnosis
    from signalprop.results.comparison import Comparison
    from signalprop.results.profile import Profile


class Shown:
    """What a Profile and a Comparison have for their readers."""

    @typed
    def plot(self, path: str | Path | None = None, *, title: str | None = None) -> Any:
        """A matplotlib Figure: variance, gradient, token correlation and branches over depth. Not for sweeps.

        Args:
            path: also written there (.png, .svg or .pdf). title: default: the network in words.

        Raises:
            InputError: a file that cannot be written. MissingExtra: matplotlib is not installed.
        """
        plots, result = _report("plots"), cast("Profile | Comparison", self)
        if path is not None:
            plots.save_plot(path, result, title=title)
        return plots.figure(result, title=title)

    def summary(self) -> str:
        """The result in a few lines: the network, its numbers, and warnings. Not for sweeps."""
        return cast("str", _report("findings").described(self))

    def _repr_html_(self) -> str | None:
        """For notebooks: the summary, and the picture where matplotlib is installed; None (plain repr) of a sweep."""
        try:
            text = f"<pre>{html.escape(self.summary())}</pre>"
        except InputError:
            return None
        try:
            picture = self.plot()
        except MissingExtra:
            return text
        data = io.BytesIO()
        picture.savefig(data, format="png", dpi=70)
        encoded = base64.b64encode(data.getvalue()).decode()
        return f'{text}<img alt="the signal over depth" src="data:image/png;base64,{encoded}">'


def diagnosis_words(diagnosis: Diagnosis) -> str:
    """A diagnosis as `signalprop diagnose` prints it."""
    return cast("str", _report("diagnosis_tables").diagnosis_text(diagnosis))


def _report(name: str) -> ModuleType:
    """A module of the room above, which draws results; loaded when it is asked for."""
    return import_module(f"signalprop.report.{name}")


def data_frame(profile: Profile, prefix: str = "") -> DataFrame:
    """The series of a profile, one row per sublayer; see `Profile.to_dataframe`.

    Args:
        prefix: of the columns that hold a quantity.
    """
    rows = layout(profile.architecture)
    columns: dict[str, Any] = {
        "stack": [STACKS[k] for k in rows.stack], "layer": rows.layer, "kind": [KINDS[k] for k in rows.kind],
    }  # fmt: skip
    for direction, points in (("", profile.forward), ("gradient_", profile.gradient or {})):
        for point, series in points.items():
            found = {item.name: getattr(series, item.name) for item in fields(series)}
            columns |= {f"{prefix}{direction}{point}_{k}": v for k, v in found.items() if v is not None}
    if profile.stream_covariance is not None:
        columns[f"{prefix}stream_out_between_streams"] = alike(profile.stream_covariance)
    if np.ndim(profile.forward["stream_out"].variance) != 1:
        raise InputError("a data frame needs a single profile, this is a sweep; select one of its members")
    return cast("DataFrame", require("pandas", "pandas").DataFrame(columns))
