"""The explorer: a local page whose controls redraw the predicted signal at every change.

What the controls say (`settings`), what the page shows of it (`curves`), the web application (`app`, Starlette) and the
server that carries it (`server`, uvicorn, on the loopback interface only) are apart; the drawing is the report's.
"""

from signalprop_lab.explorer.settings import Settings

__all__ = ["Settings"]
