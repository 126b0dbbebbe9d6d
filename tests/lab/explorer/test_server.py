"""The explorer's process: its address, its port, its end."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

pytest.importorskip("plotly")
pytest.importorskip("uvicorn")

from exploring import explorer
from signalprop.errors import InputError
from signalprop_lab.explorer.server import serve


def test_it_answers_at_the_address_it_prints_and_ends_cleanly() -> None:
    with explorer() as running:
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/", running.address)
        assert found
        with urllib.request.urlopen(running.address, timeout=120) as answer:
            assert b"<title>signalprop explorer</title>" in answer.read()
            guarded(answer.headers)
        strange = urllib.request.Request(running.address, headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            urllib.request.urlopen(strange, timeout=120)
        guarded(refused.value.headers)
        refused.value.close()
        for other in others():
            with pytest.raises(OSError), socket.create_connection((other, int(found[1])), timeout=2):
                pass
        status, out, err = running.interrupt()
    assert (status, out.split(), err) == (0, ["explorer", "ended"], "")


def guarded(headers: Any) -> None:
    """Every answer has the policy."""
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "connect-src 'self'" in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["connection"] == "close"


def others() -> list[str]:
    """Addresses of this machine on which nobody should listen: another loopback address, and that of the network."""
    found = ["127.0.0.2"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return found
        return [*found, probe.getsockname()[0]]


def test_a_taken_port_is_one_line() -> None:
    said: list[str] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen on port {port}: .*; choose another --port") as refused:
            serve(port, browser=False, say=said.append)
    assert "\n" not in str(refused.value) and not said


def test_predict_does_not_load_the_server() -> None:
    code = (
        "import sys; from signalprop.cli import run; run(['predict', 'tgs', '--layers', '2', '--json', '-']);"
        "print([name for name in ('starlette', 'uvicorn', 'anyio') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == "[]"
