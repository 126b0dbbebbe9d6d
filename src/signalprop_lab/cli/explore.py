"""`signalprop explore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explore(
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="Port of the page; 0 takes a free one.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, open nothing.")] = False,
    static: Annotated[
        Path | None,
        typer.Option("--static", metavar="FILE.html", help="Write a page that needs no server, and end."),
    ] = None,
) -> None:
    """Open a page whose controls redraw the predicted signal at every change.

    Depth, width, heads, norms, scheme and its options, dropout, activation, length, Q/K scale. The page is served on
    127.0.0.1, to this machine only, until Ctrl-C. `--static` writes one file for any web host, or for a mail: it
    predicts in the browser, averages over positions alone, to 1e-9 of the same numbers.

    \b
    Examples:
      signalprop explore --port 8000 --no-browser
      signalprop explore --static explorer.html
    """
    from signalprop.errors import require

    if static is not None:
        from signalprop_lab.explorer.static import write_static

        write_static(static)
        typer.echo(f"{'explorer':<20}{static} (one file, which needs no server)")
        return
    for module in ("starlette", "uvicorn", "plotly"):
        require(module, "explore")
    from signalprop_lab.explorer.server import serve

    serve(port, browser=not no_browser, say=lambda address: typer.echo(f"{'explorer':<20}{address} (Ctrl-C ends it)"))
    typer.echo(f"{'explorer':<20}ended")
