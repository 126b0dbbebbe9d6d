"""The server: uvicorn on the loopback interface."""

from __future__ import annotations

import socket
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress

import uvicorn

from signalprop.errors import InputError
from signalprop_lab.explorer.app import HEADERS, application
from signalprop_lab.explorer.curves import shown
from signalprop_lab.explorer.settings import Settings

ADDRESS = "127.0.0.1"


def serve(port: int, *, browser: bool, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C (or SIGTERM).

    Args:
        port: 0: one that is free. browser: open the page in the system's browser. say: told the address, which by then
            takes connections.
    """
    # What the first prediction imports and tabulates is there before the page asks for it.
    threading.Thread(target=shown, args=(Settings(), ()), daemon=True).start()
    page = application()
    with _listening(port) as listener:
        address = f"http://{ADDRESS}:{listener.getsockname()[1]}/"
        say(address)
        if browser:  # in a thread of its own: a browser in the terminal holds its caller
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        config = uvicorn.Config(
            page, http="h11", ws="none", log_level="critical", access_log=False, timeout_graceful_shutdown=1,
            headers=list(HEADERS.items()),
        )  # fmt: skip
        with suppress(KeyboardInterrupt):  # uvicorn passes it on when it has closed everything
            uvicorn.Server(config).run(sockets=[listener])


def _listening(port: int) -> socket.socket:
    """A socket that already takes connections, so that the address is good as soon as it is told."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ADDRESS, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise InputError(
            f"cannot listen on port {port}: {error.strerror}; choose another --port, or 0 for a free one"
        ) from None
    return listener
