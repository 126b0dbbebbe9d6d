"""The explorer's web application: what it answers, and whom it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("plotly")
pytest.importorskip("starlette")
testclient = pytest.importorskip("starlette.testclient")

from signalprop_lab.explorer import app as module  # noqa: E402
from signalprop_lab.explorer.curves import predicted  # noqa: E402
from signalprop_lab.explorer.settings import Settings  # noqa: E402

HERE = "http://127.0.0.1:8000"
SMALL = Settings(n_layers=4, d_model=64, seq_len=16)


@pytest.fixture(scope="module")
def client() -> Any:
    return testclient.TestClient(module.application(), base_url=HERE, raise_server_exceptions=False)


def question(current: Any = None, pinned: Any = (), draft: bool = False) -> dict[str, Any]:
    return {"current": SMALL.model_dump() if current is None else current, "pinned": list(pinned), "draft": draft}


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

    def test_what_takes_long_is_drafted_first(self, client: Any) -> None:
        slow = Settings(kind="decoder", n_layers=24, d_model=64, seq_len=48, fidelity="auto")
        draft = client.post("/curves", json=question(slow.model_dump(), draft=True)).json()
        assert draft["pending"] and "rough guide" in " ".join(draft["notes"])
        assert [item["name"] for item in draft["section"]["sources"]] == ["predicted (moments)"]
        final = client.post("/curves", json=question(slow.model_dump())).json()
        assert not final["pending"]
        gradient = predicted(slow).profile.gradient
        y = final["section"]["blocks"][1]["series"][0]["y"]
        assert y == pytest.approx(gradient["stream_in"].variance, rel=1e-7)
        assert y != pytest.approx(draft["section"]["blocks"][1]["series"][0]["y"], rel=1e-3)


class TestRefusals:
    @pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "0.0.0.0"])
    def test_other_hosts(self, client: Any, host: str) -> None:
        for method, path in (("GET", "/"), ("GET", "/assets/explore.js"), ("POST", "/curves")):
            assert client.request(method, path, headers={"Host": host}, json=question()).status_code == 400

    @pytest.mark.parametrize("path", ["/curves", "/report"])
    def test_questions_are_taken_from_its_own_page_alone(self, client: Any, path: str) -> None:
        for origin in ("http://evil.example", "null", "", "http://127.0.0.1:8001", "https://127.0.0.1:8000",
                       "http://127.0.0.1:8000.evil.example", "file://"):  # fmt: skip
            answer = client.post(path, json=question(), headers={"Origin": origin})
            assert answer.status_code == 403
            assert answer.json() == {"error": "questions are taken from this page alone"}
        for own in ({}, {"Origin": HERE}, {"Host": "localhost:9", "Origin": "http://localhost:9"}):
            assert client.post(path, json=question(), headers=own).status_code == 200

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

    @pytest.mark.parametrize(
        "body",
        [
            b"", b"{", b"[]", b"null", b"\xff", b"[" * 60_000, b'{"current": {}}',
            b'{"current": {"n_layers": ' + b"9" * 6000 + b'}, "pinned": [], "draft": false}',
            b'{"current": {}, "pinned": {}, "draft": false}', b'{"current": {}, "pinned": [], "draft": 1}',
            b'{"current": {}, "pinned": [], "draft": false, "x": 1}',
        ],
    )  # fmt: skip
    def test_no_question_is_one_line(self, client: Any, body: bytes) -> None:
        for path in ("/curves", "/report"):
            answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert_one_line(answer, "refused" if answer.status_code == 200 else "error")

    @pytest.mark.parametrize(
        ("current", "pinned"),
        [
            ("3", "[]"), ("{}", "[1]"), ('{"n_layers": 1e999}', "[]"), ('{"dropout": NaN}', "[]"),
            ('{"n_heads": 7}', "[]"), ('{"scheme": "<script>"}', "[]"), ('{"preset": "nonsense"}', "[]"),
            ("{}", json.dumps([{"n_layers": n} for n in range(1, 9)])),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("draft", ["true", "false"])
    def test_refused_settings_are_one_line_and_no_failed_request(
        self, client: Any, current: str, pinned: str, draft: str
    ) -> None:
        body = f'{{"current": {current}, "pinned": {pinned}, "draft": {draft}}}'
        for path in ("/curves", "/report"):
            answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 200
            assert_one_line(answer, "refused")

    def test_too_long_a_body(self, client: Any) -> None:
        answer = client.post("/curves", content=b" " * 70_000, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        chunks = (b"{}" for _ in range(1))
        answer = client.post("/curves", content=chunks, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413


def assert_one_line(answer: Any, word: str) -> None:
    """The answer is this one word with one line."""
    ((key, line),) = answer.json().items()
    assert key == word
    assert line and "\n" not in line and "Traceback" not in line
