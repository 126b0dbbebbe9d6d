"""Headless Chromium driven over its own pipe (the DevTools protocol), with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_READ, _WRITE = 3, 4  # the descriptors on which --remote-debugging-pipe listens and answers
_PATIENCE = 180.0  # seconds, which a machine with much else to do may need


def executable() -> str | None:
    """Where Chromium is; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab: what it logged, and ways to drive it."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._count, self._rest, self._session = 0, b"", ""
        self.messages: list[str] = []  # errors and warnings of the console, and uncaught exceptions
        self.requests: list[str] = []  # addresses that the page asked for
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its result."""
        self._count += 1
        request: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._send, json.dumps(request).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        """The next message; events are noted on the way."""
        while b"\0" not in self._rest:
            if not select.select([self._receive], [], [], _PATIENCE)[0]:
                raise TimeoutError(f"no answer from Chromium in {_PATIENCE:g} s")
            part = os.read(self._receive, 1 << 20)
            if not part:
                raise RuntimeError("Chromium has ended")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.messages.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.messages.append(" ".join(str(item.get("value", "")) for item in parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.messages.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def open(
        self, path: Path | str, *, width: int = 1400, height: int = 1000, dark: bool = False,
        ready: str = "document.readyState === 'complete'",
    ) -> float:  # fmt: skip
        """Open a file, or an address of this machine, at a size of the window; seconds until the page is ready."""
        self.call("Page.navigate", url="about:blank")  # so that nothing of an earlier page is taken for this one's
        self.messages.clear()
        self.requests.clear()
        self.size(width, height)
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        begun = time.perf_counter()
        self.call("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        self.wait(f"location.href !== 'about:blank' && ({ready})")
        return time.perf_counter() - begun

    def size(self, width: int, height: int) -> None:
        """Resize the window; below 600 pixels it is a phone."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression (of what it resolves to, if it is a promise)."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", script))
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _PATIENCE
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition} did not come true in {_PATIENCE:g} s; console: {self.messages}")
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Click in the middle of an element, as a mouse does."""
        found = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            " e.scrollIntoView({block: 'center', behavior: 'instant'}); const r = e.getBoundingClientRect();"
            " return {x: r.x + r.width / 2, y: r.y + r.height / 2}; })()"
        )
        if found is None:
            raise LookupError(f"there is no {selector}")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **found)

    def move(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def key(self, name: str, text: str = "") -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        common = {"key": name, "code": "Space" if name == " " else name, "windowsVirtualKeyCode": codes.get(name, 0)}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def faint(self, least: float = 4.5) -> list[str]:
        """Texts in sight whose contrast with what is behind them (WCAG 2.2) is below the least, with both colours.

        Of the page and of drawings; not of controls that are switched off, which may be faint.
        """
        found = self.run(_TEXTS)
        if len(found) < 30:
            raise LookupError(f"there are only {len(found)} texts on the page; has it loaded?")
        return [f"{where}: {ink} on {back}" for ink, back, where in found if contrast(ink, back) < least]

    def pdf(self, path: Path) -> None:
        """The page as it is printed."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))


# Every element with text of its own that is in sight: its ink, what is behind it, where it is.
_TEXTS = """[...document.querySelectorAll('body *')]
  .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && e.getClientRects().length
          && !e.closest('script, style, noscript, option, :disabled, .skip, .modebar'))
  .map((e) => {
    const back = (x) => getComputedStyle(x).backgroundColor;
    let b = e.closest('svg')?.parentElement ?? e;
    while (back(b) === 'rgba(0, 0, 0, 0)' && b.parentElement) b = b.parentElement;
    return [e.closest('svg') ? getComputedStyle(e).fill : getComputedStyle(e).color, back(b),
            `${e.tagName}.${e.getAttribute('class')} ${e.textContent.trim().slice(0, 30)}`];
  }).concat([...document.querySelectorAll('input[placeholder]:enabled')].map((e) => [
    getComputedStyle(e, '::placeholder').color, getComputedStyle(e).backgroundColor, `placeholder of ${e.name}`]))"""


def contrast(ink: str, back: str) -> float:
    """The ratio of WCAG 2.2 between two opaque CSS colours."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[4:-1].split(",")[:3]]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((luminance(ink), luminance(back)))
    return (high + 0.05) / (low + 0.05)


@contextmanager
def browser() -> Iterator[Page]:
    """A tab of a headless Chromium without access to any network but 127.0.0.1.

    Raises:
        LookupError: there is no Chromium.
    """
    found = executable()
    if found is None:
        raise LookupError(f"none of {', '.join(NAMES)} is installed")
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = [
            found, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-extensions", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--remote-debugging-pipe", "--disable-background-networking", "--hide-scrollbars",
            f"--user-data-dir={home}",
        ]  # fmt: skip
        shell = f'exec "$@" {_READ}<&{theirs_in} {_WRITE}>&{theirs_out}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(ours_out, ours_in)
        finally:
            os.close(ours_out)  # without its pipe Chromium ends by itself
            os.close(ours_in)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
