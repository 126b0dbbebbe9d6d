"""Damaged files for the fuzzing tests: valid documents, changed in ways that no writer of them would."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from commandline import Result
from signalprop.cli import run
from signalprop.errors import InputError, MissingExtra

EXAMPLES = int(os.environ.get("EXAMPLES", "0"))  # of `make fuzz`: so many, other ones each time
LONGEST_LINE = 1500  # characters of a message: a 10-MB string in a file is not repeated in full
_MARK = "\ue000"  # around a literal that json.dumps would not write


def literal(text: str) -> str:
    """A value that stands in the file as it is, without quotation marks."""
    return f"{_MARK}{text}{_MARK}"


LITERALS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400, "-" + "9" * 400, "9" * 5000, "1" + "0" * 308,
            "18446744073709551616", "-0.0", "1e-320", "0" + "7" * 3, "[" * 3000 + "]" * 3000,
            '{"a":' * 2000 + "1" + "}" * 2000)  # fmt: skip
STRINGS = ("", " ", "\x00", "\x1b[2J\x1b]0;gone\x07", "\ud800", "../../etc/passwd", "/etc/passwd", "\u202e\u2028",
    "x" * 100_000,
           "</script><script>alert(1)</script>", "$\\frac{$", "$(id)", "NaN", "1e5", "__class__", "a\nb\r\nc",
           "{0.x}", "%s%n",
           "con", "~", ".", "..", "\U0001f600")  # fmt: skip
LEAVES: SearchStrategy[Any] = st.one_of(
    st.sampled_from([literal(text) for text in LITERALS]),
    st.sampled_from(STRINGS),
    st.sampled_from(
        [None, True, False, 0, -1, 1, 2, 1.5, -1e-9, 1e30, 1e308, 2**31, 2**63, [], {}, [[]], [None], {"": 0}]
    ).map(copy.deepcopy),
    st.integers(-(10**6), 10**6),
    st.floats(allow_nan=False, allow_infinity=False),
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in a document; of a list of many equal things those of the first three and the last."""
    found = [path]
    if isinstance(value, dict):
        for key, item in value.items():
            found += _places(item, (*path, key))
    elif isinstance(value, list):
        for i in sorted({*range(min(3, len(value))), len(value) - 1} - {-1}):
            found += _places(value[i], (*path, i))
    return found


def _get(document: Any, path: Sequence[Any]) -> Any:
    for key in path:
        document = document[key]
    return document


@st.composite
def damaged(draw: Any, document: Any, most: int = 3) -> Any:
    """The document with one to `most` changes: a value of another type or size, dropped, renamed, doubled, swapped."""
    out = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, most))):
        places = _places(out)
        path = draw(st.sampled_from(places))
        change = draw(st.sampled_from(["value", "value", "value", "drop", "rename", "add", "swap", "wrap", "repeat"]))
        if not path:
            if change == "value" and draw(st.integers(0, 9)) == 0:
                return draw(LEAVES)
            continue
        place, key = _get(out, path[:-1]), path[-1]
        if change == "value":
            place[key] = draw(LEAVES)
        elif change == "drop":
            del place[key]
        elif change == "rename" and isinstance(place, dict):
            place[draw(st.sampled_from(STRINGS) | st.text(max_size=8))] = place.pop(key)
        elif change == "add" and isinstance(place, dict):
            place[draw(st.sampled_from([*STRINGS, "schema", "base", "__proto__"]))] = draw(LEAVES)
        elif change == "swap":
            place[key] = copy.deepcopy(_get(out, draw(st.sampled_from(places))))
        elif change == "wrap":
            place[key] = draw(st.sampled_from([[place[key]], {"a": place[key]}, [place[key], place[key]]]))
        elif change == "repeat" and isinstance(place[key], list):
            place[key] = place[key] * draw(st.sampled_from([0, 2, 3]))
    return out


def as_json(value: Any) -> str:
    """JSON, and what literals say in its place."""
    text = json.dumps(value, ensure_ascii=True)
    mark = json.dumps(_MARK)[1:-1]
    return re.sub(f'"{re.escape(mark)}(.*?){re.escape(mark)}"', lambda found: found[1].replace('\\"', '"'), text)


@st.composite
def damaged_bytes(draw: Any, content: bytes) -> bytes:
    """The bytes of a file, cut, with some changed, doubled, in another encoding, or with something before or behind."""
    kind = draw(
        st.sampled_from(["cut", "flip", "insert", "before", "behind", "utf-16", "latin-1", "double", "empty", "middle"])
    )
    at = draw(st.integers(0, len(content)))
    if kind == "cut":
        return content[:at]
    if kind == "flip":
        width = draw(st.integers(1, 8))
        new = draw(st.binary(min_size=width, max_size=width))
        return content[:at] + new + content[at + width :]
    if kind == "insert":
        new = draw(st.sampled_from([b"\x00", b"\xff", b"\xed\xa0\x80", b"\x1b[2J", b"\n", b'"', b"{", b"\xef\xbb\xbf"]))
        return content[:at] + new + content[at:]
    if kind == "before":
        return (
            draw(st.sampled_from([b"\xef\xbb\xbf", b"\xff\xfe", b"\x00" * 9, b"PK\x03\x04", b"\x1f\x8b", b"\n" * 99]))
            + content
        )
    if kind == "behind":
        return content + draw(st.sampled_from([b"\x00", b"}", b"\n{}", b"\xff" * 9, b" " * 999]))
    if kind == "middle":
        return content[: at // 2] + content[at:]
    if kind == "double":
        return content * 2
    if kind == "empty":
        return b""
    return content.decode("utf-8", "replace").encode(kind, "replace")


def files_of(document: Any, most: int = 3) -> SearchStrategy[bytes]:
    """Damaged JSON files: mostly JSON of a damaged document, now and then damaged as bytes."""
    changed = damaged(document, most).map(lambda value: as_json(value).encode())
    broken = damaged_bytes(json.dumps(document).encode())
    return st.one_of(changed, changed, changed, changed, broken)


def examine(file: Path, content: SearchStrategy[bytes], read: Callable[[], Any]) -> None:
    """Write a few damaged contents to a file, the same ones every time: each is read, or refused in one line."""

    @settings(
        max_examples=EXAMPLES or 4, derandomize=not EXAMPLES, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(content)
    def run(found: bytes) -> None:
        file.write_bytes(found)
        outcome(read)

    run()


def outcome(read: Callable[[], Any]) -> str:
    """`read` or `refused`: bad input is one short line, and nothing else is raised.

    Raises:
        Whatever `read` raises that is no InputError.
    """
    try:
        read()
    except (InputError, MissingExtra) as error:
        check_line(str(error))
        return "refused"
    return "read"


def check_line(line: str) -> None:
    """A message is one line, not empty, of a length that can be read."""
    assert line.strip(), "an empty message"
    assert "\n" not in line and "\r" not in line, line[:200]
    assert len(line) <= LONGEST_LINE, f"{len(line)} characters: {line[:200]}"


def commanded(*arguments: Any) -> Result:
    """The command in this process, with streams that encode as a terminal's do."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with mock.patch.object(sys, "stdout", out), mock.patch.object(sys, "stderr", err):
        status = run([str(argument) for argument in arguments])
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return Result(status, *texts)


def check_command(result: Result) -> None:
    """It ended with 0, or with 2 and one printable line on stderr."""
    status, out, err = result
    assert status in (0, 2), (status, err)
    assert "Traceback" not in err
    for text in (out, err):
        strange = {c for c in text if not c.isprintable() and c != "\n"}
        assert not strange, (strange, text[:300])
    if status == 2:
        assert out == "", out[:300]
        lines = [line for line in err.splitlines() if line.startswith("signalprop: ") and "warning" not in line[:22]]
        assert len(lines) == 1 and err.endswith(lines[0] + "\n"), err
        check_line(lines[0])


class Bomb:
    """What runs when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def problem_of(result: Result) -> str | None:
    """What is raw about the end of a command."""
    status, out, err = result
    lines = [line for line in err.splitlines() if line.startswith("signalprop: ") and "warning" not in line[:22]]
    try:
        assert status in (0, 1, 2), f"status {status}"
        assert "Traceback" not in err and "SIGNALPROP_DEBUG" not in err, "an error from the inside"
        assert all(c.isprintable() or c == "\n" for c in err), "characters that steer a terminal"
        if status == 2:
            assert len(lines) == 1 and out == "", f"{len(lines)} lines on stderr, {len(out)} characters on stdout"
            check_line(lines[0])
    except AssertionError as error:
        return f"{error}: {err[-400:]!r}"
    return None


# --- command lines ----------------------------------------------------------------------------------------------------
