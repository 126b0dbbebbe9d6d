"""What a result shows of itself: its text on paper and in notebooks, and its rows as a table."""

from __future__ import annotations

import base64
import html
import importlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from signalprop.errors import InputError, MissingExtra, require

if TYPE_CHECKING:
    from pandas import DataFrame

LABEL = 20  # columns of the word that begins a line of a result
COLUMNS = 80


def wrapped(text: str, columns: int = COLUMNS) -> str:
    """The text with its sentences folded; a label's lines stay beside it, and tables stay as wide as they are.

    Args:
        columns: of a line.
    """
    return "\n".join(_folded(line, columns) for line in text.split("\n"))


def _folded(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    labelled = line[LABEL - 2 : LABEL] == "  " and line[LABEL] != " " and "  " not in line[:LABEL].strip()
    if "  " in line[LABEL if labelled else 0 :].strip():
        return line  # a row of a table
    indent = " " * (LABEL if labelled else len(line) - len(line.lstrip()))
    return textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


class Shown:
    """What results have for their readers."""

    _columns: ClassVar[tuple[str, ...] | None] = None  # of rows that there may be none of

    def summary(self) -> str:
        """The result in words."""
        return str(self)

    def to_dataframe(self) -> DataFrame:
        """A pandas DataFrame: one row for each part of the result.

        Raises:
            MissingExtra: pandas is not installed.
        """
        return cast("DataFrame", require("pandas", "pandas").DataFrame(self._rows(), columns=self._columns))

    def _rows(self) -> Sequence[Mapping[str, Any]]:
        raise NotImplementedError

    def _in_notebook(self) -> str:
        """The text of the page that a notebook shows."""
        return self.summary()

    def _figure(self) -> Any:
        """A matplotlib Figure; None: there is none."""
        return None

    def _repr_html_(self) -> str | None:
        """For notebooks: the summary, and a chart where matplotlib is installed; None (plain repr) of a sweep."""
        try:
            text = wrapped(self._in_notebook())
        except InputError:
            return None
        page = f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'
        try:
            figure = self._figure()
        except MissingExtra:
            return page
        if figure is None:
            return page
        encoded = base64.b64encode(figure._repr_png_()).decode()
        return f'{page}<img alt="the signal over depth" style="max-width: 100%" src="data:image/png;base64,{encoded}">'


def report_module(name: str) -> Any:
    """A module of the room that puts results into words and pictures; loaded when it is asked for."""
    return importlib.import_module(f"signalprop.report.{name}")
