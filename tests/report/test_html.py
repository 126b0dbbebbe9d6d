"""The report up to its HTML: it holds what the files hold, and nothing in a file breaks the page."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reported import as_measured, figures_of, predicted, table_of, write_run
from signalprop.data.batches import default_statistics
from signalprop.diagnosis.result import Diagnosis
from signalprop.errors import InputError
from signalprop.files.storage import write_json
from signalprop.kernels.scaled_kernel import normalised
from signalprop.kernels.trace import trace
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.report.html import document, read, render
from signalprop.report.sections import Chart, Curve, Document, HeatMap, Section, Table, logarithmic, of_logs
from signalprop.results.comparison import compare
from signalprop.results.findings import Finding, Findings
from signalprop.results.verdicts import findings_of
from signalprop.schemes import scheme
from signalprop_lab.report.runs import read_run
from signalprop_lab.report.training import MAX_POINTS, thinned

pytest.importorskip("plotly")
LIMIT = 5_000_000  # bytes of a page


def block_of(content: Document, title: str) -> Any:
    return next(b for s in content.sections for b in s.blocks if b.title == title)


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
        (curve,) = block_of(content, "Variance of the residual stream").curves
        assert curve.y == pytest.approx(stream.variance)
        assert curve.high == pytest.approx(stream.variance * (1 + 2 * stream.variance_se))
        (curve,) = block_of(content, "Token correlation of the residual stream").curves
        assert curve.y == pytest.approx(stream.token_correlation)
        assert curve.low == pytest.approx(stream.token_correlation - 2 * stream.token_correlation_se)
        (curve,) = block_of(content, "Variance of the gradient").curves
        assert curve.y == pytest.approx(gradient["stream_in"].variance)
        (curve,) = block_of(content, "Sensitivity of the layers").curves
        assert sum(curve.y) == pytest.approx(p.sensitivity()["mean"])
        first = figures_of(render(content))[0]
        assert first[-1]["y"] == pytest.approx(stream.variance, rel=1e-5)

    def test_agreement_is_the_comparison(self) -> None:
        p = predicted("xavier", norm_placement="post")
        comparison = compare(p, as_measured(p))
        rows = block_of(document({"c": comparison}), "Agreement of prediction and measurement").rows
        assert [row[1] for row in rows] == [item.quantity for item in comparison.agreements]
        assert [float(row[3].split()[0]) for row in rows] == pytest.approx(
            [100 * item.median for item in comparison.agreements], abs=0.005
        )

    def test_overflow_is_an_exponent_and_zero_stays_zero(self) -> None:
        p = predicted("xavier", n_layers=60, norm_placement="none")
        chart = block_of(document({"p": p}), "Variance of the gradient")
        logs = p.gradient["stream_in"].log_variance
        assert logs.max() > 800 and chart.y.endswith("power of ten") and not chart.positive
        assert chart.curves[0].y == pytest.approx(logs / math.log(10))
        plain = logarithmic(Chart("t", [Curve("a", np.arange(3.0), np.array([-math.inf, 0, math.nan]))], "x", "y"))
        np.testing.assert_array_equal(plain.curves[0].y, [0, 1, math.nan])

    @given(st.floats(-50, 50), st.floats(0, 3))
    def test_a_band_of_logarithms_is_two_errors_and_stays_above_zero(self, log: float, error: float) -> None:
        curve = of_logs(Curve("a", np.zeros(1), np.array([log])), [error])
        low, high = np.exp(curve.low - log), np.exp(curve.high - log)
        assert (low, high) == (pytest.approx(1 / (1 + 2 * error)), pytest.approx(1 + 2 * error))

    def test_stacks_of_an_encoder_decoder_are_apart(self) -> None:
        a = Architecture.preset("t5-small")
        p = predict(scheme("xavier")(a, default_statistics(a)))
        (curve,) = block_of(document({"t5": p}), "Variance of the residual stream").curves
        (gap,) = np.flatnonzero(np.isnan(curve.y))
        assert np.isnan(curve.x[gap]) and gap == 2 * a.n_layers
        assert curve.names[gap - 1].startswith("encoder") and curve.names[gap + 1].startswith("decoder")
        assert np.delete(curve.y, gap) == pytest.approx(p.forward["stream_out"].variance)

    @given(st.integers(1, 5000), st.integers(0, 2**32 - 1))
    def test_thinned_curves_keep_spikes_and_ends(self, n: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        values = rng.random(n).tolist()
        values[rng.integers(n)] = 7.0
        steps, kept = thinned(list(range(n)), values)
        assert max(kept) == 7.0 and min(kept) == min(values)
        assert (steps[0], steps[-1]) == (0, n - 1)
        assert len(steps) <= MAX_POINTS and [values[k] for k in steps] == kept

    def test_kernels_are_the_cosines(self) -> None:
        found = trace(table_of("xavier"), at=[0, 3, 6])
        content = document({"net": found})
        for depth, matrix in block_of(content, "net").frames.items():
            np.testing.assert_array_equal(matrix, normalised(found.kernels[int(depth)]))
        (curve,) = block_of(content, "Mean cosine of two tokens").curves
        assert curve.y == pytest.approx(found.forward.mean_cosine)


class TestSummary:
    def test_a_sick_network_gets_its_warnings(self) -> None:
        p = predicted("xavier", n_layers=96, norm_placement="post")
        (card,) = document({"p": p}).cards
        assert card.severity == "warning" and card.texts
        (finding,) = findings_of(p)
        assert (card.texts, card.advice) == ([f"{finding.text} (predicted; {finding.confidence})"], finding.remedy)
        assert document({"p": predicted("deepscalelm", n_layers=96, norm_placement="post")}).cards[0].severity == "good"

    def test_verdicts_come_first_and_name_the_layer_to_look_at(self) -> None:
        layers = tuple({"layer": k, "stack": "decoder", "variance": 1.0} for k in range(3))
        kinds = (("note", "flat", 0), ("warning", "loud", 1), ("fault", "scaled weights", 2))
        more = {"cause": "c", "remedy": "a"}
        verdicts = Findings(
            Finding(**{"severity": s, "name": k, "layers": (n,), "text": "t", **more}) for s, k, n in kinds
        )
        d = Diagnosis(
            schema="signalprop/diagnosis/1", model="m", family="f", n_parameters=1, findings=verdicts, signal=layers,
            data={"source": "s", "sequences": 1, "tokens": 2, "length": 2, "skip_first": 0},
        )  # fmt: skip
        content = document({"p": predicted("deepscalelm"), "d": d})
        assert [card.severity for card in content.cards] == ["fault", "warning", "note", "good"]
        first = content.cards[0]
        assert (first.title, first.texts, first.advice) == ("scaled weights", ["t", "likely cause: c"], "a")
        assert document({"d": d}).subtitle == "Look first at layer 2: scaled weights"
        assert block_of(content, "Variance of the stream").marks == [(2.0, "layer 2: scaled weights")]


class TestRuns:
    def test_curves_and_frames(self, tmp_path: Path) -> None:
        run = read_run(write_run(tmp_path / "r", status="finished"))
        content = document({"r": run})
        assert block_of(content, "Loss").curves[0].y == pytest.approx([10.0 / step for step in range(1, 41)])
        chart = block_of(content, "Variance of the residual stream")
        assert chart.frames == ["0", "10", "20", "30", "40"]
        for step, profile in run.signal:
            moving = next(curve for curve in chart.at(str(step)) if curve.frame is not None)
            assert moving.y == pytest.approx(profile.forward["stream_out"].variance)

    def test_a_run_in_progress_is_read(self, tmp_path: Path) -> None:
        root = write_run(tmp_path / "r")
        whole = read_run(root)
        for name in ("metrics.jsonl", "signal.jsonl"):
            with (root / name).open("a") as file:
                file.write('{"step": 50, "lo')
        (root / "environment.json").unlink()
        assert read_run(root).metrics == whole.metrics
        (row,) = block_of(document({"r": read_run(root)}), "Runs").rows
        assert row[:2] == ["r", "running"] and row[3] == "40"


class TestPage:
    def test_it_is_one_file_without_addresses_whose_scripts_alone_may_run(self) -> None:
        reader = parsed(render(document({"a": predicted("xavier")})))
        for tag, attributes in reader.tags:
            assert not (attributes.keys() & {"src", "srcset", "action", "onclick", "onload"}), tag
            assert tag not in ("link", "iframe", "object", "base", "form")
            if tag == "a":
                assert str(attributes["href"]).startswith("#")
        (policy,) = [a["content"] for tag, a in reader.tags if tag == "meta" and "http-equiv" in a]
        assert policy is not None and "default-src 'none'" in policy and "connect-src" not in policy
        assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]

    def test_a_page_has_at_most_five_megabytes(self) -> None:
        items = {name: predicted("xavier", n_layers=768) for name in "abcd"}
        page = render(document(items))
        assert len(page.encode()) <= LIMIT
        matrix = np.random.default_rng(0).random((300, 300))
        maps = [HeatMap(f"map {k}", {str(j): matrix for j in range(8)}, "x", "y", (0, 1)) for k in range(4)]
        rows = [[str(value) for value in row] for row in matrix[:, :6]]
        assert len(render(Document("t", sections=[Section("s", [*maps, Table("n", list("abcdef"), rows)])]))) <= LIMIT

    def test_every_drawing_has_its_numbers_below(self) -> None:
        p = predicted("xavier")
        page = render(document({"p": p}))
        parts = re.findall(r"<figure.*?</figure>", page, re.S)
        assert len(parts) == 4 and all("<summary>Numbers" in part and "<table>" in part for part in parts)
        cells = re.findall(r"<td[^>]*>([^<]*)", parts[0])
        assert len(cells) == 24 and cells[0] == "layer 0, attention"
        assert [float(c) for c in cells[1::2]] == pytest.approx(p.forward["stream_out"].variance, rel=1e-3)


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
