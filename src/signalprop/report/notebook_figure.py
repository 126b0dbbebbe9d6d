"""A Figure that notebooks show as a picture. They do that for matplotlib's only after `import matplotlib.pyplot`."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """matplotlib's Figure, with the bytes of its picture for notebooks."""

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.savefig(data, format="png", dpi=70, metadata={"Software": None})
        return data.getvalue()
