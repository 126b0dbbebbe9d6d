"""`signalprop explore`."""

from __future__ import annotations

from typing import Annotated

import typer


def explore(
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="Port of the page; 0 takes a free one.")] = 0,
) -> None:
    """Serve a page whose controls redraw the predicted signal.

    The page is served to this machine only, until Ctrl-C; the command prints its address.

    \b
    Example: signalprop explore --port 8000
    """
    from signalprop.errors import require

    for module in ("dash", "plotly"):
        require(module, "explore")
    from signalprop_lab.explorer.app import serve

    serve(port, say=lambda address: typer.echo(f"{'explorer':<20}{address} (Ctrl-C ends it)"))
    typer.echo(f"{'explorer':<20}ended")
