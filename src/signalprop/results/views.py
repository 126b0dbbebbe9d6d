"""What a Profile and a Comparison show of themselves: words and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network import shown
from signalprop.network.shown import report_module


class Shown(shown.Shown):
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
        """The result in a few lines: the network, warnings, and its numbers. Not for sweeps."""
        return cast("str", report_module("findings").described(self))

    def __str__(self) -> str:
        try:
            return shown.wrapped(self.summary())
        except InputError:  # a sweep
            return repr(self)

    def _figure(self) -> Any:
        return self.plot()
