"""The interactive report up to its HTML: it holds what the files hold, and nothing in a file breaks the page."""

from __future__ import annotations

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reported import HOSTILE, as_measured, predicted, table_of, write_run
from signalprop.data.batches import default_statistics
from signalprop.diagnosis.result import Diagnosis
from signalprop.errors import InputError
from signalprop.files.storage import write_json
from signalprop.kernels.state import normalised
from signalprop.kernels.trace import trace
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.report import findings
from signalprop.report.html import blocks, document, read, render
from signalprop.report.html.page import embedded
from signalprop.results.comparison import compare
from signalprop.results.profile import Profile
from signalprop.schemes import scheme
from signalprop_lab.report.runs import read_run
from signalprop_lab.report.training import MAX_POINTS, thinned

pytest.importorskip("plotly")
SOURCES = Path(__file__).parents[2] / "src" / "signalprop" / "report" / "html" / "assets"


def section_of(content: dict[str, Any], key: str) -> dict[str, Any]:
    (found,) = [item for item in content["sections"] if item["id"] == key]
    return found


def block_of(content: dict[str, Any], key: str) -> dict[str, Any]:
    (found,) = [b for s in content["sections"] for b in s["blocks"] if b.get("id") == key]
    return found


def table_titled(content: dict[str, Any], title: str) -> dict[str, Any]:
    (found,) = [b for s in content["sections"] for b in s["blocks"] if b["type"] == "table" and b["title"] == title]
    return found


class Reader(HTMLParser):
    """Elements of a page by tag, and the text of its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


def parsed(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


class TestNumbers:
    def test_curves_are_the_profile(self) -> None:
        p = as_measured(predicted("deepscalelm"))
        content = document({"a": p})
        stream, gradient = p.forward["stream_out"], p.gradient
        for key, values, errors in (
            ("forward-variance", stream.variance, stream.variance * stream.variance_se),
            ("token-correlation", stream.token_correlation, stream.token_correlation_se),
            ("gradient-variance", gradient["stream_in"].variance, None),
        ):
            (series,) = block_of(content, key)["series"]
            assert series["y"] == pytest.approx(values, rel=1e-7)
            if errors is not None:
                assert series["error"] == pytest.approx(errors, rel=1e-7)
        (sensitivity,) = block_of(content, "sensitivity")["series"]
        assert sum(sensitivity["y"]) == pytest.approx(p.sensitivity()["mean"], rel=1e-6)

    def test_agreement_is_the_comparison(self) -> None:
        p = predicted("xavier", norm_placement="post")
        comparison = compare(p, as_measured(p))
        rows = table_titled(document({"c": comparison}), "Agreement of prediction and measurement")["rows"]
        assert [row[1] for row in rows] == [item.quantity for item in comparison.agreements]
        assert [float(row[3].split()[0]) for row in rows] == pytest.approx(
            [100 * item.median for item in comparison.agreements], abs=0.005
        )

    def test_overflow_is_an_exponent_and_zero_stays_zero(self) -> None:
        p = predicted("xavier", n_layers=60, norm_placement="none")
        (series,) = block_of(document({"p": p}), "gradient-variance")["series"]
        gradient = p.gradient
        assert gradient is not None and gradient["stream_in"].log_variance.max() > 800
        assert series["log10"] == pytest.approx(gradient["stream_in"].log_variance / math.log(10), rel=1e-7)
        beyond = [i for i, y in enumerate(series["y"]) if y is None]
        assert beyond and all(abs(series["log10"][i]) > 280 for i in beyond)
        assert blocks.log_series(0, 0, 0, [-math.inf, 0.0, math.nan])["y"] == [0, 1, None]

    def test_stacks_of_an_encoder_decoder_are_apart(self) -> None:
        a = Architecture.preset("t5-small")
        p = predict(scheme("xavier")(a, default_statistics(a)))
        content = document({"t5": p})
        (series,) = block_of(content, "forward-variance")["series"]
        (gap,) = [i for i, y in enumerate(series["y"]) if y is None]
        place = section_of(content, "signal")["places"][series["place"]]
        assert place["x"][gap] is None and gap == 2 * a.n_layers
        assert place["names"][gap - 1].startswith("encoder") and place["names"][gap + 1].startswith("decoder")
        assert [y for y in series["y"] if y is not None] == pytest.approx(p.forward["stream_out"].variance, rel=1e-7)

    @given(st.integers(1, 5000), st.integers(0, 2**32 - 1))
    def test_thinned_curves_keep_spikes_and_ends(self, n: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        values = rng.random(n).tolist()
        values[rng.integers(n)] = 7.0
        steps, kept = thinned(list(range(n)), values)
        assert max(kept) == 7.0 and min(kept) == min(values)
        assert (steps[0], steps[-1]) == (0, n - 1)
        assert len(steps) <= MAX_POINTS and [values[k] for k in steps] == kept


class TestKernels:
    def test_matrices_are_the_cosines(self) -> None:
        found = trace(table_of("xavier"), at=[0, 3, 6])
        content = document({"net": found})
        block = block_of(content, "kernel-map-0-forward")
        low, high = block["limits"]
        for depth in (0, 3, 6):
            levels = np.frombuffer(base64.b64decode(block["frames"][str(depth)]), "<i2").reshape(32, 32)
            cosines = low + (levels + 32767.0) / 65534 * (high - low)
            assert np.abs(cosines - normalised(found.kernels[depth])).max() < 2e-5
        (curve,) = block_of(content, "kernel-cosine")["series"]
        assert curve["y"] == pytest.approx(found.forward.mean_cosine, rel=1e-7)


class TestSummary:
    def test_a_sick_network_gets_its_warnings_and_a_cure(self) -> None:
        p = predicted("xavier", n_layers=96, norm_placement="post")
        warnings = findings.warnings(p)
        assert warnings
        (card,) = document({"p": p})["findings"]
        assert card["severity"] == "warning"
        assert card["texts"] == [f"{line} (predicted)" for line in warnings]
        assert "deepscalelm" in card["cure"]
        cured = predicted("deepscalelm", n_layers=96, norm_placement="post")
        assert findings.warnings(cured) == []
        assert document({"p": cured})["findings"][0]["severity"] == "good"

    def test_verdicts_come_first_and_whole(self) -> None:
        verdict = {"severity": "fault", "kind": "dead heads", "layers": (1,), "text": "t", "cause": "c", "advice": "a"}
        d = Diagnosis(
            schema="signalprop/diagnosis/1", model="m", family="f", n_parameters=1,
            data={"source": "s", "sequences": 1, "tokens": 2, "length": 2, "skip_first": 0}, verdicts=(verdict,),
        )  # fmt: skip
        first, second = document({"p": predicted("deepscalelm"), "d": d})["findings"]
        assert (first["severity"], first["title"], first["texts"]) == ("fault", "dead heads", ["t", "likely cause: c"])
        assert first["cure"] == "a"
        assert second["severity"] == "good"

    def test_a_diagnosis_names_the_one_layer_to_look_at(self) -> None:
        layers = tuple({"layer": k, "stack": "decoder", "variance": 1.0} for k in range(3))
        kinds = (("note", "flat", 0), ("warning", "loud", 1), ("fault", "scaled weights", 2))
        verdicts = tuple({"severity": s, "kind": k, "layers": (n,), "text": "t"} for s, k, n in kinds)
        d = Diagnosis(
            schema="signalprop/diagnosis/1", model="m", family="f", n_parameters=1, verdicts=verdicts, signal=layers,
            data={"source": "s", "sequences": 1, "tokens": 2, "length": 2, "skip_first": 0},
        )  # fmt: skip
        content = document({"d": d})
        assert content["subtitle"] == "Look first at layer 2: scaled weights"
        assert block_of(content, "layer-variance")["marks"] == [{"x": 2, "label": "layer 2: scaled weights"}]


class TestRuns:
    def test_curves_and_frames(self, tmp_path: Path) -> None:
        run = read_run(write_run(tmp_path / "r", status="finished"))
        content = document({"r": run})
        (loss,) = block_of(content, "run-loss")["series"]
        assert loss["y"] == pytest.approx([10.0 / step for step in range(1, 41)], rel=1e-7)
        section = section_of(content, "through-time")
        assert section["slider"]["values"] == ["0", "10", "20", "30", "40"]
        frames = {s["step"]: s for s in block_of(content, "time-forward-variance")["series"] if "step" in s}
        for step, profile in run.signal:
            assert frames[step]["y"] == pytest.approx(profile.forward["stream_out"].variance, rel=1e-7)

    def test_a_run_in_progress_is_read(self, tmp_path: Path) -> None:
        root = write_run(tmp_path / "r")
        whole = read_run(root)
        for name in ("metrics.jsonl", "signal.jsonl"):
            with (root / name).open("a") as file:
                file.write('{"step": 50, "lo')
        (root / "environment.json").unlink()
        assert read_run(root).metrics == whole.metrics
        (row,) = table_titled(document({"r": read_run(root)}), "Runs")["rows"]
        assert row[:2] == ["r", "running"] and row[3] == "40"


class TestPage:
    @given(st.recursive(st.text() | st.integers() | st.floats() | st.none(), lambda s: st.lists(s), max_leaves=8))
    def test_embedded_json_is_the_value_and_cannot_end_the_script(self, value: Any) -> None:
        text = embedded(value)
        assert text.isascii() and not set("<>&") & set(text)
        assert embedded(json.loads(text)) == text

    def test_hostile_strings_stay_texts(self, tmp_path: Path) -> None:
        p = Profile.from_json({**predicted("xavier").to_json(), "scheme": HOSTILE[0], "notes": list(HOSTILE)})
        items = [(name, p) for name in HOSTILE] + [("r", read_run(write_run(tmp_path / "r", recipe=HOSTILE[0])))]
        page = render(document(items, title=HOSTILE[1]))
        plain = parsed(render(document({"a": predicted("xavier")})))
        hostile = parsed(page)
        assert [tag for tag, _ in hostile.tags].count("script") == 3
        assert not any(tag in ("img", "b") and "src" in attributes for tag, attributes in hostile.tags)
        assert hostile.scripts[1:] == plain.scripts[1:]
        data = json.loads(hostile.scripts[0])
        assert any(HOSTILE[0] in group for group in data["sections"][0]["groups"])

    def test_it_is_one_file_without_addresses(self) -> None:
        page = render(document({"a": predicted("xavier")}))
        reader = parsed(page)
        for tag, attributes in reader.tags:
            assert not (attributes.keys() & {"src", "srcset", "action", "onclick", "onload"}), tag
            assert tag not in ("link", "iframe", "object", "base", "form")
            if tag == "a":
                assert str(attributes["href"]).startswith("#")
        (policy,) = [a["content"] for tag, a in reader.tags if tag == "meta" and "http-equiv" in a]
        assert policy is not None and "default-src 'none'" in policy and "connect-src" not in policy
        for source in SOURCES.iterdir():
            addresses = re.findall(r"https?://\S+", source.read_text(encoding="utf-8"))
            assert all(address.startswith("http://www.w3.org/") for address in addresses), source


class TestReading:
    def test_every_kind_comes_back(self, tmp_path: Path) -> None:
        p, table = predicted("xavier"), table_of("xavier")
        comparison = compare(p, as_measured(p))
        p.save(tmp_path / "p.json")
        table.save(tmp_path / "t.json")
        write_json(tmp_path / "c.json", comparison.to_json())
        assert read(tmp_path / "p.json") == {"p": p}
        found = read(tmp_path / "t.json")["t"]
        assert isinstance(found, Parametrization) and found == table
        assert read(tmp_path / "c.json")["c"].to_json() == comparison.to_json()  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ('{"schema": "signalprop/profile/2"}', "newer than this version reads; update with: pip install"),
            ('{"schema": "signalprop/check/1"}', "cannot show schema 'signalprop/check/1'"),
            ('{"schema": 5}', "an object without a schema"),
            ("[1]", "it holds a list"),
            ('{"schema": "signalprop/profile/1", "source": "theory"}', "architecture"),
            ('{"schema": "signalprop/comparison/1"}', "not a profile"),
            ('{"schema": "signalprop/kernel/1"}', "no list of configurations"),
            ('{"schema": "signalprop/kernel/1", "configurations": [{"n_layers": 1, "n_tokens": 2, '
             '"forward": {"distance": [1]}}]}', "expected 2, one per depth"),
            ("{", "is not JSON"),
            ("", "is empty"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_read_is_one_line_with_the_file(self, tmp_path: Path, text: str, expected: str) -> None:
        file = tmp_path / "a.json"
        file.write_text(text)
        with pytest.raises(InputError, match=re.escape(expected)) as caught:
            read(file)
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)

    def test_damage_in_the_middle_of_a_run_is_named(self, tmp_path: Path) -> None:
        root = write_run(tmp_path / "r")
        file = root / "metrics.jsonl"
        lines = file.read_text().split("\n")
        file.write_text("\n".join([*lines[:2], "{broken", *lines[2:]]))
        with pytest.raises(InputError, match=re.escape(f"{file}: line 3 is not JSON")):
            read(root)
        (tmp_path / "empty").mkdir()
        with pytest.raises(InputError, match="is not the directory of a training run"):
            read(tmp_path / "empty")
