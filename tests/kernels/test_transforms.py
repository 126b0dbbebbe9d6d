"""DKS and TAT against the authors' package, independent quadrature and published constants."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special

from commandline import refusal_of
from signalprop.kernels.transforms import dks, tat
from signalprop.network.activations import ACTIVATIONS, activation, kinked, numbers_of, register
from signalprop.network.duals import dual
from signalprop.network.moments import FloatArray

SMOOTH = sorted({a.name for a in ACTIVATIONS.values() if not kinked(a.name)} - {"identity"})
# our name -> that of the package
PACKAGE = {"gelu": "gelu_exact", "tanh": "tanh", "sigmoid": "sigmoid"}


def four(name: str) -> tuple[float, ...]:
    return numbers_of(name)[1]


def refused(*args: Any, call: Any = dks) -> str:
    return refusal_of(lambda: call(*args))


def gaussian(f: Any) -> float:
    """E f(z) by SciPy's adaptive quadrature."""
    value, _ = integrate.quad(
        lambda z: float(f(z)) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi),
        -12, 12, epsabs=1e-13, epsrel=1e-12, limit=400, points=[0.0],
    )  # fmt: skip
    return value


def functions(name: str) -> tuple[Any, Any]:
    """(f, f') of scalars, from SciPy's special functions and our derivative."""
    inside, (a, b, c, d) = numbers_of(name)
    plain: dict[str, Any] = {
        "gelu": lambda x: x * special.ndtr(x),
        "silu": lambda x: x * special.expit(x),
        "tanh": np.tanh,
        "sigmoid": special.expit,
        "softplus": lambda x: np.logaddexp(0, x),
    }
    f, act = plain[inside], activation(inside)
    return (
        lambda z: d * (f(a * z + b) + c),
        lambda z: d * a * float(act.derivative(np.array([a * z + b]))[0]),
    )


@pytest.mark.parametrize(
    ("n_layers", "published"),
    [
        (32, (0.31901, 0.24204, -0.18075, 4.54091)),
        (36, (0.29854, 0.24432, -0.17792, 4.84174)),
        (72, (0.20509, 0.25283, -0.16708, 6.98895)),
        (108, (0.16590, 0.25545, -0.16363, 8.61687)),
    ],
)
def test_constants_of_gelu_at_the_depths_of_the_paper(n_layers: int, published: tuple[float, ...]) -> None:
    assert four(dks("gelu", n_layers)) == pytest.approx(published, abs=5.1e-6)


@pytest.mark.parametrize("name", ["gelu", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sigmoid", "tanh"))])
def test_same_constants_as_the_authors_package(name: str) -> None:
    """Its 1e-8 in the local slope target limits the digits; odd activations have the mirrored solution as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = pytest.importorskip("dks.base.activation_transform")
        for n_layers, zeta in ((36, 5.0), (12, 1.5)) if name in ("gelu", "tanh") else ((36, 5.0),):
            theirs = base._get_activations_params(
                [PACKAGE[name]],
                "DKS",
                dks_params={"c_slope_1_target": zeta},
                max_slope_func=lambda slope, n=n_layers: slope**n,
            )[PACKAGE[name]]
            wanted = [theirs[key] for key in ("input_scale", "input_shift", "output_shift", "output_scale")]
            found = dks(name, n_layers, zeta)
            ours = list(four(found))
            if wanted[0] < 0:  # f(-a x + b) is the same to a Gaussian
                wanted[0] *= -1
            if wanted[3] < 0 or wanted[1] * ours[1] < 0:
                assert name in ("tanh", "sigmoid", "erf")
                mean_at_0 = 0.5 if name == "sigmoid" else 0.0
                wanted[1], wanted[2], wanted[3] = -wanted[1], -wanted[2] - 2 * mean_at_0, abs(wanted[3])
            assert ours == pytest.approx(wanted, rel=2e-6)


@pytest.mark.parametrize("n_layers", [13, 36, 108])
def test_tat_is_that_of_the_authors_package(n_layers: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = pytest.importorskip("dks.base.activation_transform")

        def through(c: float, layer: Any) -> float:
            for _ in range(n_layers):
                c = layer(c)
            return c

        theirs = base._get_activations_params(["leaky_relu"], "TAT", subnet_max_func=through)["leaky_relu"]
    inside, numbers = numbers_of(tat(n_layers))
    assert numbers_of(inside)[1][0] == pytest.approx(theirs["negative_slope"], abs=1e-6)
    assert numbers[3] == pytest.approx(theirs["output_scale"], abs=1e-6)


DEPTHS = ((6, 5.0), (36, 5.0), (1000, 1.5))
at_depths = pytest.mark.parametrize(
    ("name", "n_layers", "zeta"),
    [
        pytest.param(name, *depth, marks=[pytest.mark.slow] * (k != i % 3))  # one of each is fast
        for i, name in enumerate(("gelu", "silu", "tanh", "sigmoid", "softplus"))
        for k, depth in enumerate(DEPTHS)
    ],
)


@at_depths
def test_the_four_conditions_by_independent_quadrature(name: str, n_layers: int, zeta: float) -> None:
    f, slope = functions(dks(name, n_layers, zeta))
    assert gaussian(f) == pytest.approx(0.0, abs=1e-9)  # C(0) = (E f)^2 = 0
    assert gaussian(lambda z: f(z) ** 2) == pytest.approx(1.0, abs=1e-9)  # Q(1)
    assert gaussian(lambda z: f(z) * slope(z) * z) == pytest.approx(1.0, abs=1e-8)  # Q'(1)
    bend = gaussian(lambda z: slope(z) ** 2) - 1
    assert bend == pytest.approx(zeta ** (1 / n_layers) - 1, rel=1e-5, abs=1e-9)  # C'(1)


@at_depths
def test_the_conditions_of_a_gated_block(name: str, n_layers: int, zeta: float) -> None:
    """Of y = u f(g), both of variance q: Q(q) = q E f(sqrt(q) z)^2, C(c) = c E f f / E f^2, C'(1) = 1 + E f'^2."""
    f, slope = functions(dks(name, n_layers, zeta, True))
    assert gaussian(lambda z: f(z) ** 2) == pytest.approx(1.0, abs=1e-9)
    assert gaussian(lambda z: f(z) * slope(z) * z) == pytest.approx(0.0, abs=1e-8)  # Q'(1) = 1 + this
    h = 1e-4
    grown = [(1 + x) * gaussian(lambda z, x=x: f(math.sqrt(1 + x) * z) ** 2) for x in (-h, h)]
    assert (grown[1] - grown[0]) / (2 * h) == pytest.approx(1.0, abs=1e-6)
    assert gaussian(lambda z: slope(z) ** 2) == pytest.approx(zeta ** (1 / n_layers) - 1, rel=1e-6)


@given(
    name=st.sampled_from(SMOOTH),
    n_layers=st.one_of(st.integers(5, 200), st.sampled_from([1000, 10_000])),
    zeta=st.floats(1.01, 5.0),
    gated=st.booleans(),
)
def test_from_five_layers_on_every_smooth_activation_has_a_transformation(
    name: str, n_layers: int, zeta: float, gated: bool
) -> None:
    n_layers += name == "softplus"
    made = dks(name, n_layers, zeta, gated)
    scale, shift, _, gain = four(made)
    assert 0 < scale < 15 and abs(shift) < 15 and gain > 0
    at = dual(made, 1.0, np.array([0.0, 1.0]))
    both = np.array([0.0, 1.0]) if gated else 1.0
    c = np.asarray(at.covariance_moment) * both
    assert c == pytest.approx([0.0, 1.0], abs=1e-7)
    bend = float(np.asarray(at.slope_second_moment)[0]) + (1.0 if gated else 0.0) - 1
    assert bend == pytest.approx(zeta ** (1 / n_layers) - 1, rel=1e-4, abs=1e-8)


def test_a_shift_far_from_0_is_found() -> None:
    assert numbers_of(dks("tanh", 1))[1][1] > 8
    test_the_four_conditions_by_independent_quadrature("tanh", 1, 5.0)


@pytest.mark.parametrize(("n_layers", "eta"), [(13, 0.9), (36, 0.9), (36, 0.5), (108, 0.95)])
def test_tat_takes_uncorrelated_tokens_to_eta(n_layers: int, eta: float) -> None:
    name, c = tat(n_layers, eta), 0.0
    for _ in range(n_layers):
        c = float(dual(name, 1.0, c).covariance_moment)
    assert c == pytest.approx(eta, abs=1e-12)
    assert dual(name, 1.0, 0.3).second_moment == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("gelu", 36, 1.0), "expected a number above 1"),
        (("gelu", 36, math.nan), "expected a number above 1"),
        (("gelu", 36, math.inf), "expected a number above 1"),
        (("gelu", 0), "for 0 layers"),
        (("relu", 36), "smooth activation"),
        (("leaky_relu(0.3)", 36), "for leaky_relu there is TAT"),
        (("identity", 36), "smooth activation"),
        (("transformed(gelu, 1, 0, 0, 1)", 36), "smooth activation"),
        (("gelo", 36), "unknown activation 'gelo'"),
    ],
)
def test_what_dks_refuses(args: Any, part: str) -> None:
    assert part in refused(*args)


@pytest.mark.parametrize(("name", "gated"), [("gelu", False), ("silu", True)])
def test_the_advice_of_a_refusal_works(name: str, gated: bool) -> None:
    message = refused(name, 2, 400.0, gated)
    zeta, layers = message.partition("zeta up to ")[2].split(", or at least ")
    assert dks(name, 2, float(zeta), gated) and dks(name, int(layers.split()[0]), 400.0, gated)
    # and it is no more modest than it has to be
    assert refused(name, 2, 1.1 * float(zeta), gated)


def test_an_activation_that_no_shift_makes_stable() -> None:
    def cube(x: FloatArray) -> FloatArray:
        return np.asarray(x**3)

    try:
        register("cube_for_dks", cube, lambda x: np.asarray(3 * x**2))
        assert "keeps its variance stable" in refused("cube_for_dks", 36)
    finally:
        ACTIVATIONS.pop("cube_for_dks", None)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ((36, 0.0), "between 0 and 1"),
        ((36, 1.0), "between 0 and 1"),
        ((0, 0.9), "for 0 layers"),
        ((12, 0.9), "correlation 0 to 0.897 only"),
    ],
)
def test_what_tat_refuses(args: Any, part: str) -> None:
    assert part in refused(*args, call=tat)
