"""The explorer's process: its address, its port, its end, and senders that are too long, too slow or of two minds."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

pytest.importorskip("plotly")
pytest.importorskip("uvicorn")

from exploring import Explorer, explorer
from signalprop.errors import InputError
from signalprop_lab.explorer.server import serve
from signalprop_lab.explorer.settings import Settings

PATIENT = """
import signalprop_lab.explorer.app
from signalprop_lab.explorer.server import serve
signalprop_lab.explorer.app.PATIENCE = 1.5
serve(0, browser=False, say=lambda address: print("at", address, flush=True))
"""
QUESTION = json.dumps({"current": Settings(n_layers=2).model_dump(), "pinned": [], "draft": False}).encode()


def test_it_answers_at_the_address_it_prints_and_ends_cleanly() -> None:
    with explorer() as running:
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/", running.address)
        assert found
        with urllib.request.urlopen(running.address, timeout=120) as answer:
            assert b"<title>signalprop explorer</title>" in answer.read()
        strange = urllib.request.Request(running.address, headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            urllib.request.urlopen(strange, timeout=120)
        refused.value.close()
        for other in others():
            with pytest.raises(OSError), socket.create_connection((other, int(found[1])), timeout=2):
                pass
        status, out, err = running.interrupt()
    assert (status, out.split(), err) == (0, ["explorer", "ended"], "")


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


@pytest.fixture(scope="module")
def running() -> Iterator[Explorer]:
    with explorer(command=[sys.executable, "-c", PATIENT]) as running:
        yield running


class TestSenders:
    """What arrives from sockets, byte by byte, at a server that waits 1.5 seconds."""

    def test_a_length_told_in_two_ways_is_refused(self, running: Explorer) -> None:
        chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(QUESTION), QUESTION)
        for lengths in (
            b"Content-Length: 2\r\nTransfer-Encoding: chunked",
            b"Transfer-Encoding: chunked\r\nContent-Length: 2",
        ):
            with connected(running) as sender:
                sender.sendall(head(lengths) + chunk)
                answer = answered(sender)
            assert answer.startswith(b"HTTP/1.1 400 ") and b"found both" in answer

    @pytest.mark.parametrize(
        "lengths", [b"Content-Length: 2\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked"]
    )
    @pytest.mark.parametrize("path", [b"POST /curves", b"POST /report", b"GET /", b"GET /nothing"])
    def test_an_endless_body_is_not_taken(self, running: Explorer, path: bytes, lengths: bytes) -> None:
        chunk = b"10000\r\n%s\r\n" % (b" " * 65_536)
        with connected(running) as sender:
            sender.sendall(head(lengths, path))
            with pytest.raises(ConnectionError):
                sent(sender, chunk, times=1_000)  # 64 MB
            answer = answered(sender)
        assert answer.startswith(b"HTTP/1.1 ") and b"milliseconds" not in answer

    def test_a_sender_that_stops_is_not_waited_for(self, running: Explorer) -> None:
        begun = time.monotonic()
        beginnings = {
            b"": b"",
            b"POST /curves HTTP/1.1\r\nHost: 127.0.0.1\r\n": b"",
            head(b"Content-Length: 20") + b"{": b"HTTP/1.1 408 ",
        }
        with ExitStack() as several:
            senders = [(several.enter_context(connected(running)), *item) for item in beginnings.items()]
            for sender, start, _ in senders:
                sender.sendall(start)
            for sender, _, expected in senders:
                answer = answered(sender)
                assert answer.startswith(expected) and bool(answer) == bool(expected)
        assert 1 < time.monotonic() - begun < 20

    def test_after_all_that_it_answers(self, running: Explorer) -> None:
        with connected(running) as sender:
            sender.sendall(head(b"Content-Length: %d" % len(QUESTION)) + QUESTION)
            answer = answered(sender)
        assert answer.startswith(b"HTTP/1.1 200 ") and b"milliseconds" in answer


def connected(running: Explorer) -> socket.socket:
    """A socket connected to the explorer, which waits half a minute for what it reads."""
    found = re.search(r":(\d+)/", running.address)
    assert found
    return socket.create_connection(("127.0.0.1", int(found[1])), timeout=30)


def head(lengths: bytes, path: bytes = b"POST /curves") -> bytes:
    """The head of a request for JSON, with the headers that say how long its body is."""
    return path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" + lengths + b"\r\n\r\n"


def sent(sender: socket.socket, data: bytes, *, times: int, pause: float = 0) -> None:
    """Send the data again and again, with a pause of so many seconds after each."""
    for _ in range(times):
        sender.sendall(data)
        time.sleep(pause)


def answered(sender: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    with suppress(ConnectionError):
        while part := sender.recv(65_536):
            found += part
    return found
