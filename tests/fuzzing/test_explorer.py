"""Questions to the explorer that its own page would not ask."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("plotly")
pytest.importorskip("starlette")
testclient = pytest.importorskip("starlette.testclient")

from signalprop_lab.explorer.app import application  # noqa: E402
from signalprop_lab.explorer.settings import Settings  # noqa: E402

HERE = "http://127.0.0.1:8000"
SMALL = Settings(n_layers=2, d_model=16, seq_len=8).model_dump()
QUESTION = {"current": SMALL, "pinned": [{**SMALL, "n_layers": 3}], "draft": False}


@pytest.fixture(scope="module")
def client() -> Any:
    return testclient.TestClient(application(), base_url=HERE, raise_server_exceptions=False)


@pytest.mark.parametrize("path", ["/curves", "/report"])
class TestOrigins:
    @pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "http://127.0.0.1:8001",
        "https://127.0.0.1:8000",
                                        "http://127.0.0.1:8000.evil.example", "file://"])  # fmt: skip
    def test_other_pages_get_no_answer(self, client: Any, path: str, origin: str) -> None:
        answer = client.post(path, json=QUESTION, headers={"Origin": origin})
        assert answer.status_code == 403 and answer.json() == {"error": "questions are taken from this page alone"}

    @pytest.mark.parametrize("headers", [{}, {"Origin": HERE}, {"Host": "localhost:9", "Origin": "http://localhost:9"}])
    def test_its_own_page_does(self, client: Any, path: str, headers: dict[str, str]) -> None:
        assert client.post(path, json=QUESTION, headers=headers).status_code == 200
