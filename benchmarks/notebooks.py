"""The notebooks of examples/: run from top to bottom, with what their cells print and draw.

`python -m benchmarks.notebooks [NAME ...]` runs all, or those named, in an empty directory, and stores the output in
them. Jupyter is not needed.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from signalprop.files.storage import write_text

FOLDER = Path(__file__).parent.parent / "examples"


def names() -> list[str]:
    """The notebooks."""
    return [path.stem for path in sorted(FOLDER.glob("*.ipynb"))]


def stored(name: str) -> dict[str, Any]:
    """A notebook as it is."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return found


def executed(name: str) -> dict[str, Any]:
    """A notebook after a run from top to bottom in the current directory, with its outputs.

    Raises:
        Exception: whatever a cell raises.
    """
    notebook, module = stored(name), ModuleType(f"notebook_{name.replace('-', '_')}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for count, cell in enumerate(cells, start=1):
            cell |= {"execution_count": count, "outputs": _run("".join(cell["source"]), module, count)}
    finally:
        del sys.modules[module.__name__]
    return notebook


def _run(source: str, module: ModuleType, count: int) -> list[dict[str, Any]]:
    """What a cell prints, and the value of its last line, as a notebook keeps them."""
    body, printed, value = ast.parse(source).body, io.StringIO(), None
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), module.__name__, "exec"), vars(module))
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), module.__name__, "eval"), vars(module))
    streams = [{"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)}]
    found: list[dict[str, Any]] = streams if printed.getvalue() else []
    if value is not None:
        found.append({"data": _shown(value), "execution_count": count, "metadata": {}, "output_type": "execute_result"})
    return found


def _shown(value: Any) -> dict[str, Any]:
    if not hasattr(value, "savefig"):
        own = getattr(value, "_repr_html_", lambda: None)()
        page = {} if own is None else {"text/html": own.splitlines(keepends=True)}
        return page | {"text/plain": repr(value).splitlines(keepends=True)}
    return {"image/png": base64.b64encode(value._repr_png_()).decode(), "text/plain": ["<Figure>"]}


def main(chosen: list[str]) -> None:
    """Run notebooks and store them with their output."""
    for name in chosen or names():
        with tempfile.TemporaryDirectory() as folder:
            before = Path.cwd()
            os.chdir(folder)
            try:
                notebook = executed(name)
            finally:
                os.chdir(before)
        write_text(FOLDER / f"{name}.ipynb", json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(f"examples/{name}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
