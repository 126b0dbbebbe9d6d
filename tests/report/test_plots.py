"""Pictures: what is drawn, on which axes, and that equal input gives equal bytes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from signalprop.diagnosis.result import Diagnosis
from signalprop.errors import InputError, MissingExtra
from signalprop.network.architecture import Architecture
from signalprop.prediction import predict
from signalprop.report.diagnoses import diagnosis_sections
from signalprop.report.plotly_figures import chart_figure
from signalprop.report.plots import figure, save_plot, sections_figure
from signalprop.report.sections import COLOURS, Chart, Curve, Section
from signalprop.results.comparison import compare
from signalprop.results.profile import Profile
from signalprop.results.series import Series
from signalprop.schemes import scheme


def predicted(preset: str = "tgs", name: str = "xavier", n_layers: int = 6, **changes: Any) -> Profile:
    return predict(scheme(name)(Architecture.preset(preset, n_layers=n_layers, seq_len=32, **changes)))


def measured(p: Profile) -> Profile:
    """The same numbers with error bars of 5 %, as if measured."""

    def with_errors(series: Series) -> Series:
        shape = series.variance.shape
        return replace(series, variance_se=np.full(shape, 0.05), token_correlation_se=np.full(shape, 0.01))

    forward = {point: with_errors(series) for point, series in p.forward.items()}
    gradient = {point: with_errors(series) for point, series in (p.gradient or {}).items()}
    return replace(p, source="measured", fidelity="model", n_seeds=3, forward=forward, gradient=gradient or None)


def panels(canvas: Any) -> list[Any]:
    return [axis for part in canvas.subfigs for axis in part.axes]


def legend(canvas: Any) -> list[str]:
    return [text.get_text() for part in canvas.subfigs for text in part.legends[0].get_texts()]


def test_a_comparison_draws_a_line_and_points_with_error_bars() -> None:
    p = predicted()
    canvas = figure(compare(p, measured(p)))
    assert canvas.get_size_inches()[0] == 12
    assert legend(canvas) == ["predicted", "measured"]
    stream, gradient, correlation, sensitivity = panels(canvas)
    x, y = stream.lines[0].get_data()
    np.testing.assert_allclose(x, np.arange(1, 13) / 2)
    np.testing.assert_allclose(y, p.forward["stream_out"].variance, rtol=1e-7)
    np.testing.assert_allclose(gradient.lines[0].get_ydata(), p.gradient["stream_in"].variance, rtol=1e-7)
    np.testing.assert_allclose(correlation.lines[0].get_ydata(), p.forward["stream_out"].token_correlation, rtol=1e-7)
    np.testing.assert_allclose(sensitivity.lines[0].get_ydata(), p.layer_sensitivities, rtol=1e-7)
    (bars,) = stream.containers
    low, high = bars[2][0].get_segments()[3][:, 1]
    assert (low, high) == pytest.approx((y[3] / 1.1, 1.1 * y[3]), rel=1e-6)  # two standard errors of 5 %
    assert bars[0].get_color() != stream.lines[0].get_color()
    assert canvas.get_suptitle() == "encoder, 6 layers, d_model 256, pre-norm, relu: xavier, measured in 3 networks"


def test_several_schemes_have_a_colour_each() -> None:
    names = ["xavier", "deepscalelm", "fixed"]
    canvas = figure([predicted(name=name) for name in names])
    assert legend(canvas) == names
    assert [line.get_color() for line in panels(canvas)[0].lines] == list(COLOURS[:3])


def test_several_depths_share_an_axis() -> None:
    canvas = figure([predicted(n_layers=2), predicted(n_layers=6)])
    assert legend(canvas) == ["xavier, 2 layers", "xavier, 6 layers"]
    short, long = panels(canvas)[0].lines
    assert short.get_xdata()[-1] == long.get_xdata()[-1] == 1
    assert short.get_linestyle() != long.get_linestyle() and short.get_color() == long.get_color()


def test_several_schemes_at_several_depths_have_heat_maps() -> None:
    """In the order of the curves; a pair that is missing is empty."""
    pairs = [("xavier", 6), ("xavier", 2), ("noci", 2)]
    made = {pair: predicted(name=pair[0], n_layers=pair[1]) for pair in pairs}
    ratio, correlation = panels(figure(list(made.values())))[-2:]
    assert [label.get_text() for label in ratio.get_yticklabels()] == ["xavier", "noci"]
    assert [label.get_text() for label in ratio.get_xticklabels()] == ["2 layers", "6 layers"]
    texts = [text.get_text() for text in ratio.texts]
    assert texts[3] == "" and float(texts[1]) == pytest.approx(made["xavier", 6].gradient_ratio, rel=1e-3)
    shade = correlation.images[0].get_array()
    assert shade[1, 0] == pytest.approx(made["noci", 2].forward["stream_out"].token_correlation[-1])
    assert len(panels(figure(list(made.values())[:2]))) == 4


def test_an_encoder_decoder_draws_its_stacks_apart() -> None:
    stream = panels(figure(predicted("t5-small", n_layers=3)))[0]
    (line,) = (line for line in stream.lines if len(line.get_xdata()) > 2)
    both = np.concatenate([np.arange(1, 7) / 2, [np.nan], 3 + np.arange(1, 10) / 3])
    np.testing.assert_allclose(line.get_xdata(), both, rtol=1e-7)
    assert [text.get_text() for text in stream.texts] == ["decoder →"]


@pytest.mark.parametrize("suffix", ["svg", *(pytest.param(s, marks=pytest.mark.slow) for s in ("png", "pdf"))])
def test_equal_input_gives_equal_files(tmp_path: Path, suffix: str) -> None:
    p = predicted(n_layers=1)
    for name in ("a", "b"):
        save_plot(tmp_path / f"{name}.{suffix}", p, title="one layer")
    data = (tmp_path / f"a.{suffix}").read_bytes()
    assert data.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix])
    assert data == (tmp_path / f"b.{suffix}").read_bytes()


def test_nothing_to_draw() -> None:
    with pytest.raises(InputError, match="nothing to draw"):
        figure([])


def test_a_notebook_shows_a_figure_without_pyplot() -> None:
    """IPython shows what `_repr_png_` returns; matplotlib's Figure has none, and was shown as text."""
    shown = figure(predicted(n_layers=1))
    assert shown._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(("end", "scale"), [(1.9, "linear"), (2.1, "log")])
def test_less_than_a_doubling_is_drawn_from_zero(end: float, scale: str) -> None:
    chart = Chart("title", [Curve("a", np.arange(2.0), np.array([0.0213, 0.0213 * end]))], y="y", x="layer", log=True)
    (axis,) = sections_figure([Section("", [chart])], "title").subfigs[0].axes
    assert axis.get_yscale() == scale and (scale == "log" or axis.get_ylim()[0] == 0)
    on_a_page = chart_figure(chart)["layout"]["yaxis"]
    assert on_a_page["type"] == scale and on_a_page["rangemode"] == "tozero"


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"signalprop\[report\]"):
        figure(predicted(n_layers=1))


def test_a_diagnosis_is_drawn_with_the_charts_and_numbers_of_its_page() -> None:
    variances, angular = (1.0, 30.0, None), ((0.1, 0.25, 0.3), (0.2, 0.4, None))
    cast = {"format": "int8", "of": "both", "scaled": True, "signal_to_noise": (30.0, None, 20.0)}
    none = {"loss": {"value": 1.0}, "increase": {"value": 0.0, "standard_error": 0.01}}
    d = Diagnosis(
        schema="signalprop/diagnosis/1", model="m", family="f", n_parameters=1,
        data={"source": "s", "sequences": 1, "tokens": 2, "length": 2, "skip_first": 0},
        signal=tuple({"layer": k, "stack": "decoder", "variance": v} for k, v in enumerate(variances)),
        identity={"cosine": (0.9, 0.8, 0.7), "angular": angular}, casts=(cast | none,),
        removal={"single": tuple({"layers": (k,), **none} for k in range(3))},
    )  # fmt: skip
    canvas = sections_figure(diagnosis_sections({"m": d}), "title")
    axes = [axis for part in canvas.subfigs for axis in part.axes if axis.get_label() != "<colorbar>"]
    variance, cosine, removal, angles, casts = axes
    np.testing.assert_array_equal(variance.lines[0].get_ydata(), [1.0, 30.0, np.nan])
    assert (variance.get_yscale(), cosine.get_ylim()[0], removal.get_yscale()) == ("log", 0, "linear")
    (band,) = removal.collections
    assert np.ptp(band.get_paths()[0].vertices[:, 1]) == pytest.approx(0.04)  # two standard errors to either side
    shown = np.ma.filled(angles.images[0].get_array(), np.nan)
    np.testing.assert_allclose(shown, np.array(angular, np.float64), atol=1e-5)
    assert list(angles.images[0].get_extent()) == [-0.5, 2.5, 0.5, 2.5]
    np.testing.assert_array_equal(casts.lines[0].get_ydata(), [30.0, np.nan, 20.0])
