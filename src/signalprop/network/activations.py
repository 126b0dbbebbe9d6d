"""Activations by name: the functions, their slopes, and their dual activations in closed form if there is one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.closed_forms import (
    ClosedForm,
    erf_closed,
    gelu_closed,
    identity_closed,
    leaky_closed,
    relu2_closed,
    transformed_closed,
)
from signalprop.network.moments import FloatArray

__all__ = ["Activation", "register"]

Function = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True, slots=True)
class Activation:
    """An element-wise activation.

    Attributes:
        name: the name it is registered under.
        function: f, vectorised over float arrays.
        derivative: f', vectorised over float arrays.
        closed_form: (s, r) -> the fields of CentralDual, or None for the Hermite expansion.
    """

    name: str
    function: Function
    derivative: Function
    closed_form: ClosedForm | None = None


def activation(name: str) -> Activation:
    """The activation of that name or Hugging Face alias; InputError listing the names if there is none.

    Two names take numbers: `leaky_relu(slope)`, and `transformed(name, a, b, c, d)`, which is d (f(a x + b) + c), as
    `signalprop.kernels.transforms` makes them. For an f with a kink b has to be 0. Where only the stream of a model is
    known, its activation is `unknown` and counts as a GELU: multipliers need none, and weights are not drawn.
    """
    try:
        name = "gelu" if name == UNKNOWN_ACTIVATION else name
        return _with_numbers(name) if isinstance(name, str) and "(" in name else ACTIVATIONS[name]
    except (KeyError, TypeError):
        known = ", ".join(sorted(ACTIVATIONS))
        raise InputError(
            f"unknown activation {name!r:.80}; expected one of: {known}; add others with "
            "signalprop.network.activations.register"
        ) from None


# Numbers after a name in brackets, and what they may be. Beyond these the expansion no longer resolves the function,
# or its moments leave the doubles.
UNKNOWN_ACTIVATION = "unknown"  # of a model of which only the stream is known
_NUMBERS: dict[str, tuple[tuple[str, float, float], ...]] = {
    "leaky_relu": (("slope", 0.0, 1e6),),
    "transformed": (
        ("input scale", 1e-6, 100.0),
        ("input shift", 0.0, 100.0),
        ("output shift", 0.0, 1e6),
        ("output scale", 1e-6, 1e6),
    ),
}
_LONGEST = 400


def numbers_of(name: str) -> tuple[str, tuple[float, ...]]:
    """(activation inside, its numbers) of `transformed(...)`, (`leaky_relu`, slope) of `leaky_relu(...)`; else the name
    and nothing.
    """
    if "(" not in name:
        return name, ()
    kind, _, rest = name.strip().partition("(")
    kind = kind.strip()
    parts = [part.strip() for part in rest.removesuffix(")").split(",")]
    wanted = _NUMBERS.get(kind, ())
    n = len(wanted)
    # numbers hold no commas, so all that comes before them is the activation inside
    right = len(parts) == n if kind == "leaky_relu" else len(parts) > n
    if not wanted or not right or not rest.endswith(")") or len(name) > _LONGEST:
        raise InputError(
            f"unknown activation {name!r:.80}; expected leaky_relu(slope) or transformed(name, input scale, input "
            "shift, output shift, output scale)"
        )
    numbers = []
    for (what, least, most), part in zip(wanted, parts[-n:], strict=True):
        try:
            number = float(part)
        except ValueError:
            number = math.nan
        if not least <= abs(number) <= most:
            raise InputError(
                f"activation {name!r:.80}: {what} is {part!r:.40}; expected a number of size {least:g} to {most:g}"
            )
        numbers.append(number)
    return kind if kind == "leaky_relu" else ",".join(parts[:-n]), tuple(numbers)


def kinked(name: str) -> bool:
    """Whether an activation, or the one inside it, has a kink at 0: a derivative, first or second, that jumps there."""
    inside, numbers = numbers_of(name)
    return kinked(inside) if len(numbers) > 1 else inside in _KINKED or ACTIVATIONS[inside].name in _KINKED


@lru_cache(maxsize=256)
def _with_numbers(name: str) -> Activation:
    inside, numbers = numbers_of(name)
    if len(numbers) == 1:
        slope = numbers[0]
        return Activation(
            name,
            lambda x: np.where(x > 0, x, slope * x),
            lambda x: np.where(x > 0, 1.0, slope),
            leaky_closed(slope),
        )
    act = activation(inside)
    scale, shift, lift, gain = numbers
    if shift != 0 and kinked(inside):
        raise InputError(f"activation {name!r:.80} moves a kink away from 0: no dual is known; give input shift 0")
    closed = None if act.closed_form is None or shift != 0 else transformed_closed(act.closed_form, scale, lift, gain)
    return Activation(
        name,
        lambda x: gain * (act.function(scale * x + shift) + lift),
        lambda x: gain * scale * act.derivative(scale * x + shift),
        closed,
    )


@typed
def register(name: str, function: Function, derivative: Function) -> Activation:
    """Add an activation under `name` (replacing one of that name) and return it.

    Args:
        name: how `dual` and every model description will call it.
        function: f, vectorised over float arrays, smooth except for a kink at 0, growing at most like a
            polynomial.
        derivative: f', vectorised likewise.

    Raises:
        InputError: `derivative` is not the derivative of `function`, or one of them is not finite.
    """
    points = np.array([-7.3, -2.9, -1.1, -0.31, 0.23, 0.87, 1.9, 5.7])
    h = 1e-5
    with np.errstate(all="ignore"):
        difference = (function(points + h) - function(points - h)) / (2 * h)
        slope = derivative(points)
        agree = np.abs(slope - difference) <= 1e-5 * (1 + np.abs(slope) + np.abs(function(points)))
    if not np.all(agree):  # also catches NaN
        at = float(points[int(np.argmin(agree))])
        raise InputError(
            f"activation {name!r}: derivative does not match function at x = {at}; "
            "expected finite values with derivative(x) = d function(x) / dx; correct one of the two"
        )
    ACTIVATIONS[name] = Activation(name, function, derivative)
    return ACTIVATIONS[name]


# --- the registry ---------------------------------------------------------------------------------


def _erf(x: FloatArray) -> FloatArray:
    return np.fromiter(map(math.erf, np.ravel(x).tolist()), float, np.size(x)).reshape(np.shape(x))


def _sigmoid(x: FloatArray) -> FloatArray:
    return np.asarray(0.5 * (1 + np.tanh(x / 2)))


def _normal_density(x: FloatArray) -> FloatArray:
    return np.asarray(np.exp(-x * x / 2) / math.sqrt(2 * math.pi))


def _softplus(x: FloatArray) -> FloatArray:
    return np.asarray(np.logaddexp(0.0, x))


def _gelu_tanh_inner(x: FloatArray) -> FloatArray:
    return np.asarray(np.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)))


def _gelu_tanh_slope(x: FloatArray) -> FloatArray:
    t = _gelu_tanh_inner(x)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)


def _swish_slope(x: FloatArray) -> FloatArray:
    y = _sigmoid(x)
    return y * (1 + x * (1 - y))


def _mish_slope(x: FloatArray) -> FloatArray:
    t = np.tanh(_softplus(x))
    return np.asarray(t + x * (1 - t * t) * _sigmoid(x))


def _elu(x: FloatArray) -> FloatArray:
    return np.asarray(np.where(x > 0, x, np.expm1(np.minimum(x, 0))))


_BUILT_IN = (
    Activation("relu", lambda x: np.maximum(x, 0), lambda x: np.heaviside(x, 0.5), leaky_closed(0.0)),
    Activation(
        "leaky_relu",
        lambda x: np.where(x > 0, x, 0.01 * x),
        lambda x: np.where(x > 0, 1.0, 0.01),
        leaky_closed(0.01),
    ),
    Activation("relu2", lambda x: np.maximum(x, 0) ** 2, lambda x: 2 * np.maximum(x, 0), relu2_closed),
    Activation(
        "gelu",
        lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
        lambda x: 0.5 * (1 + _erf(x / math.sqrt(2))) + x * _normal_density(x),
        gelu_closed,
    ),
    Activation("erf", _erf, lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x), erf_closed),
    Activation("identity", lambda x: x, np.ones_like, identity_closed),
    Activation("gelu_tanh", lambda x: 0.5 * x * (1 + _gelu_tanh_inner(x)), _gelu_tanh_slope),
    Activation("quick_gelu", lambda x: x * _sigmoid(1.702 * x), lambda x: _swish_slope(1.702 * x)),
    Activation("silu", lambda x: x * _sigmoid(x), _swish_slope),
    Activation("tanh", np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    Activation("sigmoid", _sigmoid, lambda x: 0.25 * (1 - np.tanh(x / 2) ** 2)),
    Activation("mish", lambda x: x * np.tanh(_softplus(x)), _mish_slope),
    Activation("softplus", _softplus, _sigmoid),
    Activation("elu", _elu, lambda x: np.exp(np.minimum(x, 0))),
)
_ALIASES = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "swish": "silu",
    "relu_squared": "relu2",
    "linear": "identity",
}
_KINKED = ("relu", "leaky_relu", "relu2", "elu")
ACTIVATIONS: dict[str, Activation] = {a.name: a for a in _BUILT_IN}
ACTIVATIONS.update({alias: ACTIVATIONS[name] for alias, name in _ALIASES.items()})
