"""The explorer's web application: what it answers, and whom it refuses."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

pytest.importorskip("plotly")
pytest.importorskip("starlette")
testclient = pytest.importorskip("starlette.testclient")

from signalprop.explore import app as module  # noqa: E402
from signalprop.explore.curves import predicted  # noqa: E402
from signalprop.explore.settings import Settings  # noqa: E402
from signalprop.schemes import SCHEMES  # noqa: E402

HERE = "http://127.0.0.1:8000"
SMALL = Settings(n_layers=4, d_model=64, seq_len=16)


@pytest.fixture(scope="module")
def client() -> Any:
    return testclient.TestClient(module.application(), base_url=HERE, raise_server_exceptions=False)


def question(current: Any = None, pinned: Any = ()) -> dict[str, Any]:
    return {"current": SMALL.model_dump() if current is None else current, "pinned": list(pinned)}


class TestAnswers:
    def test_curves(self, client: Any) -> None:
        answer = client.post("/curves", json=question(pinned=[{**SMALL.model_dump(), "n_layers": 6}]))
        assert answer.status_code == 200
        found = answer.json()
        forward = found["section"]["blocks"][0]["series"]
        assert forward[0]["y"] == pytest.approx(predicted(SMALL).profile.forward["stream_out"].variance, rel=1e-7)
        assert len(forward[1]["y"]) == 12
        assert found["milliseconds"] > 0
        assert found["command"] == SMALL.command() and found["python"] == SMALL.python()

    def test_overflow_is_still_json(self, client: Any) -> None:
        deep = {**SMALL.model_dump(), "n_layers": 2000, "norm_placement": "none"}
        answer = client.post("/curves", json=question(deep))
        assert answer.status_code == 200
        gradient = json.loads(answer.text, parse_constant=pytest.fail)["section"]["blocks"][1]["series"][0]
        assert min(value for value in gradient["log10"]) < -290 or max(value for value in gradient["log10"]) > 290

    def test_the_report_is_the_page_that_the_command_makes(self, client: Any) -> None:
        answer = client.post("/report", json=question())
        assert answer.status_code == 200
        assert answer.text.startswith("<!doctype html>") and "xavier" in answer.text

    def test_the_page_offers_every_scheme_and_has_no_script_of_its_own(self, client: Any) -> None:
        text = client.get("/").text
        for name in SCHEMES:
            assert f'<option value="{name}">' in text
        assert "$" not in re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S)
        parser = _Scripts()
        parser.feed(text)
        assert parser.sources and all(source.startswith("/assets/") for source in parser.sources)
        for source in parser.sources:
            assert client.get(source).status_code == 200

    def test_only_known_files_are_served(self, client: Any) -> None:
        for name in ("app.py", "..%2fapp.py", "../app.py", "explore.html", ""):
            assert client.get(f"/assets/{name}").status_code == 404


class TestRefusals:
    @pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "0.0.0.0"])
    def test_other_hosts(self, client: Any, host: str) -> None:
        for method, path in (("GET", "/"), ("GET", "/assets/explore.js"), ("POST", "/curves")):
            assert client.request(method, path, headers={"Host": host}, json=question()).status_code == 400

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:9", "localhost:8000"])
    def test_our_own_names(self, client: Any, host: str) -> None:
        assert client.get("/", headers={"Host": host}).status_code == 200

    def test_no_other_origin_is_let_in(self, client: Any) -> None:
        origin = {"Origin": "http://evil.example"}
        asked = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        preflight = client.options("/curves", headers=asked)
        assert preflight.status_code == 405
        answer = client.post("/curves", json=question(), headers=origin)
        for found in (preflight, answer, client.get("/", headers=origin)):
            assert not [name for name in found.headers if name.lower().startswith("access-control")]

    @pytest.mark.parametrize(
        "kind", ["text/plain", "application/x-www-form-urlencoded", "", "text/plain; application/json"]
    )
    def test_what_a_foreign_page_could_send_without_leave_is_not_read(self, client: Any, kind: str) -> None:
        answer = client.post("/curves", content=json.dumps(question()), headers={"Content-Type": kind})
        assert answer.status_code == 415

    def test_every_answer_has_the_policy(self, client: Any) -> None:
        answers = [
            client.get("/"), client.get("/assets/plotly.min.js"), client.get("/nothing"),
            client.post("/curves", json=question()), client.post("/curves", json=[]),
            client.get("/", headers={"Host": "evil.example"}),
        ]  # fmt: skip
        for answer in answers:
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self';" in policy and "connect-src 'self'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"

    @pytest.mark.parametrize(
        "body",
        [
            b"", b"{", b"[]", b"null", b"\xff", b"[" * 60_000, b'{"current": {}}', b'{"current": 3, "pinned": []}',
            b'{"current": {}, "pinned": {}}', b'{"current": {}, "pinned": [1]}',
            b'{"current": {}, "pinned": [], "x": 1}',
            b'{"current": {"n_layers": 1e999}, "pinned": []}', b'{"current": {"dropout": NaN}, "pinned": []}',
            b'{"current": {"n_layers": ' + b"9" * 6000 + b'}, "pinned": []}',
            b'{"current": {"n_heads": 7}, "pinned": []}', b'{"current": {"scheme": "<script>"}, "pinned": []}',
            json.dumps({"current": {}, "pinned": [{}] * 8}).encode(),
        ],
    )  # fmt: skip
    def test_bad_input_is_one_line(self, client: Any, body: bytes) -> None:
        answer = client.post("/curves", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422
        (line,) = answer.json().values()
        assert line and "\n" not in line and "Traceback" not in line

    def test_too_long_a_body(self, client: Any) -> None:
        answer = client.post("/curves", content=b" " * 70_000, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        chunks = (b"{}" for _ in range(1))
        answer = client.post("/curves", content=chunks, headers={"Content-Type": "application/json"})
        assert answer.status_code == 411

    def test_a_mistake_of_ours_is_one_line_too(self, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any) -> None:
            raise RuntimeError("one\ntwo")

        monkeypatch.setattr(module, "shown", broken)
        answer = client.post("/curves", json=question())
        assert answer.status_code == 500 and answer.json() == {"error": "RuntimeError: one two"}


class _Scripts(HTMLParser):
    """Sources of the scripts of a page; an inline script that runs is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert not [name for name in found if name.startswith("on")]
        if tag == "script" and found.get("type") != "application/json":
            assert found.get("src")
            self.sources.append(found["src"] or "")
