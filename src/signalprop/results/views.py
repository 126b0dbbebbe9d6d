"""What results show of themselves to a reader: words and a picture."""

from __future__ import annotations

import base64
import html
import io
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from signalprop.errors import InputError, MissingExtra
from signalprop.files.validation import typed


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
        plots = report_module("plots")
        if path is not None:
            plots.save_plot(path, self, title=title)
        return plots.figure(self, title=title)

    def summary(self) -> str:
        """The result in a few lines: the network, its numbers, and warnings. Not for sweeps."""
        return cast("str", report_module("findings").described(self))

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


def report_module(name: str) -> ModuleType:
    """A module of the room above, which puts results into words and pictures; loaded when it is asked for."""
    return import_module(f"signalprop.report.{name}")
