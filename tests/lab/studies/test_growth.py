"""Fixed points, growth orders and relative strength against independent closed forms and the recursion itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.schemes import scheme
from signalprop.theory.network import predict_moments
from signalprop_lab.studies.growth import Growth, fixed_point, growth_fit, growth_orders

LONG = 100_000  # tokens: the closed forms below are for many


def tgs(**changes: object) -> Architecture:
    return Architecture.preset("tgs", **{"n_layers": 2, "d_model": 1024, "seq_len": LONG, **changes})


def relu_map(r: float) -> float:
    """Q(r)/Q(1) of ReLU."""
    return r + (math.sqrt(1 - r * r) - r * math.acos(r)) / math.pi


def slope_map(r: float) -> float:
    return 0.5 + math.asin(r) / math.pi


@pytest.mark.parametrize("p", [0.05, 0.1, 0.2])
def test_pre_norm_fixed_point_solves_the_two_equations(p: float) -> None:
    """r* = (a r + C2 (1-p) f(r)) / (C1 r + C2) and kappa r_g = 1 - C2/a (1 - (1-p) phi(r)), Xavier: a = 1, F = 0.32."""
    found = fixed_point(scheme("xavier")(tgs(dropout=p)))
    c1, c2 = 1 / (1 - p), 0.32 / (1 - p)
    r = found.token_correlation
    assert r == pytest.approx((r + c2 * (1 - p) * relu_map(r)) / (c1 * r + c2), abs=1e-3)
    c = r * (1 - r)
    kappa = math.exp(c) * (1 + c)
    r_g = (1 - c2 * (1 - (1 - p) * slope_map(r))) / kappa
    assert found.gradient_correlation == pytest.approx(r_g, rel=5e-3)
    assert found.variance_per_layer == pytest.approx(c1 * r + c2, rel=2e-3)
    assert found.gradient_exponent == pytest.approx((kappa * r_g + c2) / (c1 * r + c2), rel=5e-3)


@pytest.mark.parametrize(("p", "rate"), [(0.0, 1.0), (0.05, 0.9718), (0.1, 0.9583), (0.2, 0.9350), (0.3, 0.9109)])
def test_post_norm_rate_is_a_dropout_effect(p: float, rate: float) -> None:
    found = fixed_point(scheme("xavier")(tgs(dropout=p, norm_placement="post")))
    assert found.gradient_rate == pytest.approx(rate, abs=2e-4)
    if p == 0:
        assert found.token_correlation == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("placement", [pytest.param("pre", marks=pytest.mark.slow), "post"])
def test_fixed_points_know_the_size_of_a_norms_output(placement: str) -> None:
    """Gains and fixed scales other than 1, another one in attention than in the feed-forward, and a value skip."""
    a = tgs(n_layers=6000 if placement == "pre" else 1500, norm_placement=placement, seq_len=512, dropout=0.1)
    p = scheme("xavier")(a)
    attends = p.kind == 0
    p = p.with_columns(
        norm_gain=np.where(attends, 0.8, 1.3), norm_scale=np.where(attends, 1.5, 0.7), value_skip=0.3 * attends
    )
    found = fixed_point(p)
    # a gradient that starts at the dominant eigenvector does not have to find it first
    inputs = InputStatistics(kind="stream", token_correlation=0.2, target_correlation=found.gradient_correlation)
    profile = predict_moments(p, inputs)
    end = profile.forward["stream_out"]
    assert end.token_correlation[-1] == pytest.approx(found.token_correlation, abs=2e-3)
    logs = profile.gradient["stream_in"].log_variance
    if placement == "pre":
        assert found.variance_per_layer is not None and found.gradient_exponent is not None
        assert end.variance[-1] - end.variance[-3] == pytest.approx(found.variance_per_layer, rel=5e-3)
        slope = (logs[4000] - logs[8000]) / math.log(2)  # the correlation arrives as a power of depth
        assert slope == pytest.approx(found.gradient_exponent, abs=5e-3)
    else:
        assert found.gradient_rate is not None
        assert logs[1000] - logs[1002] == pytest.approx(math.log(found.gradient_rate), abs=1e-7)


def test_the_recursion_arrives_at_the_fixed_point() -> None:
    a = tgs(n_layers=300, norm_placement="post", seq_len=512)
    p = scheme("xavier")(a)
    profile = predict_moments(p, InputStatistics(kind="stream", token_correlation=0.2, target_correlation=0.3))
    found = fixed_point(p)
    assert profile.forward["stream_out"].token_correlation[-1] == pytest.approx(found.token_correlation, abs=1e-9)
    logs = profile.gradient["stream_in"].log_variance
    assert found.gradient_rate is not None
    assert logs[100] - logs[102] == pytest.approx(math.log(found.gradient_rate), abs=1e-7)
    assert profile.gradient["stream_in"].token_correlation[200] == pytest.approx(found.gradient_correlation, abs=1e-5)


def test_fixed_points_are_refused_where_they_do_not_exist() -> None:
    with pytest.raises(InputError, match="bidirectional"):
        fixed_point(scheme("gpt2")(Architecture.preset("gpt2")))
    with pytest.raises(InputError, match="skip 1"):
        fixed_point(scheme("deepscalelm")(tgs()))


DEPTHS = np.array([32, 128, 512, 2048])
DEEP = (400, 2000, 10_000)


@pytest.mark.parametrize(
    ("name", "placement", "expected"),
    [
        (
            "xavier",
            "pre",
            {"forward": "power", "gradient": "power", "sensitivity_mean": "log", "sensitivity_median": "constant"},
        ),
        ("xavier", "post", {"forward": "constant", "gradient": "exp", "sensitivity_mean": "power"}),
        (
            "deepscalelm",
            "pre",
            dict.fromkeys(["forward", "gradient", "sensitivity_mean", "sensitivity_median"], "constant"),
        ),
        pytest.param(
            "deepscalelm",
            "post",
            dict.fromkeys(["forward", "gradient", "sensitivity_mean"], "constant"),
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(name, placement, {"gradient": "constant", **expected}, marks=pytest.mark.slow)
            for name, placement, expected in (
                ("ds-init", "pre", {"forward": "constant", "sensitivity_median": "power"}),
                ("layerscale", "pre", {"forward": "constant", "sensitivity_mean": "power"}),
                ("ds-init", "post", {"sensitivity_median": "power"}),
                ("deepnorm", "post", {"sensitivity_mean": "power"}),
            )
        ),
    ],
)
def test_growth_orders_of_tgs_table_3(name: str, placement: str, expected: dict[str, str]) -> None:
    inputs = InputStatistics(kind="stream", token_correlation=0.227, target_correlation=0.3)
    profiles = {
        int(n): predict_moments(
            scheme(name)(tgs(n_layers=int(n), seq_len=512, norm_placement=placement), inputs), inputs
        )
        for n in DEPTHS
    }
    found = growth_orders(profiles)
    assert {key: found[key].order for key in expected} == expected
    exponents = {
        ("xavier", "pre"): ("forward", 1.0),
        ("xavier", "post"): ("sensitivity_mean", 1.0),
        ("ds-init", "pre"): ("sensitivity_median", -1.0),
        ("ds-init", "post"): ("sensitivity_median", -1.0),
        ("deepnorm", "post"): ("sensitivity_mean", -0.5),
        ("layerscale", "pre"): ("sensitivity_mean", 1.0),
    }
    if (name, placement) in exponents:
        quantity, exponent = exponents[name, placement]
        assert found[quantity].exponent == pytest.approx(exponent, abs=0.02)


@pytest.mark.slow
def test_exponents_at_ten_thousand_layers() -> None:
    """What depth tends to, against the fixed points: vanilla models and DeepScaleLM."""
    inputs = InputStatistics(kind="stream", token_correlation=0.227, target_correlation=0.3)

    def growth(name: str, placement: str) -> dict[str, Growth]:
        tables = {n: scheme(name)(tgs(n_layers=n, seq_len=512, norm_placement=placement), inputs) for n in DEEP}
        return growth_orders({n: predict_moments(p, inputs) for n, p in tables.items()})

    pre, post = growth("xavier", "pre"), growth("xavier", "post")
    ends = {placement: fixed_point(scheme("xavier")(tgs(seq_len=512, norm_placement=placement))) for placement in
            ("pre", "post")}  # fmt: skip
    assert pre["forward"].exponent == pytest.approx(1.0, abs=0.005)
    eta, rate = ends["pre"].gradient_exponent, ends["post"].gradient_rate
    assert eta is not None and rate is not None
    assert pre["gradient"].exponent == pytest.approx(eta, abs=0.01)
    assert post["gradient"] == Growth("exp", pytest.approx(math.log(rate), rel=1e-3))
    assert post["sensitivity_mean"].exponent == pytest.approx(1.0, abs=0.005)
    stable = growth("deepscalelm", "pre")
    assert all(law.order == "constant" and abs(law.exponent) < 1e-3 for law in stable.values()), stable


def test_growth_fits_know_their_own_laws() -> None:
    x = np.arange(1.0, 30)
    laws = {
        "linear": 3 + 2 * x,
        "logarithmic": 1 + np.log(x),
        "exponential": np.exp(0.3 * x),
    }
    for name, y in laws.items():
        fits = growth_fit(y)
        assert max(fits, key=lambda law: fits[law]) == name and fits[name] == pytest.approx(1)
