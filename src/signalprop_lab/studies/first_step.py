"""How far the first step of an optimizer moves the function of a fresh network, per unit of learning rate.

`records/first-steps.md` derives it. Every number is a derivative of a branch's moments with respect to the variance of
one role's weights, so that a kind of sublayer needs nothing beyond its moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import ROLE
from signalprop.network.layout import role_mask
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import PLACEMENTS, Parametrization
from signalprop.network.residual import NORM_AFTER, NORM_ON_BRANCH
from signalprop.results.profile import Profile
from signalprop.theory.branches import branch_outputs, branches_of, forward_state_of, placed

StepOptimizer = Literal["adam", "sgd", "muon"]
# measured over `change` of Xavier before norms, 6 and 24 layers (Muon: 6) of width 64, two seeds: what a real step is
CONSTANTS = {"adam": 1.37, "sgd": 1.72, "muon": 2.13}
TESTED = {  # how constants times `change` did in records/first-steps.md
    "adam": "Adam's first step is within 1.5 of this in 93 % of 30 networks, at most 1.6 off",
    "sgd": "SGD failed: within 1.5 of this in 60 % of 30 networks, up to 7 times off",
    "muon": "Muon failed: within 1.5 of this in 57 % of 30 networks, up to 2.6 times off",
}
_STEP = 1e-4  # of a weight's variance, in units of 1 / fan_in, by which derivatives are taken


@dataclass(frozen=True)
class FirstStep:
    """The change of the last stream that one step makes, relative to it, per unit of learning rate.

    Attributes:
        change: root mean square over tokens and features.
        aligned: what each sublayer's weights add along the gradient, (sublayers,); these add up.
        scattered: what else each adds, (sublayers,); of these the squares add up.
        roles: the change if one role's weights alone took the step.
    """

    change: float
    aligned: FloatArray
    scattered: FloatArray
    roles: Mapping[str, float]


@dataclass(frozen=True)
class _Moves:
    """Variance of a branch's change, per unit of squared size of one role's update, (sublayers,) each."""

    role: str
    variance: FloatArray
    covariance: FloatArray
    fan_in: int
    fan_out: int
    rate: FloatArray
    matrix: bool


@typed
def step_of(
    p: Parametrization, inputs: InputStatistics, profile: Profile, optimizer: StepOptimizer, tokens: int
) -> FirstStep:
    """The first step of the sublayers' parameters, embeddings and head held.

    Args:
        p: the table, not a sweep. inputs: of the data. profile: predicted of that table, with gradients.
        optimizer: `adam` (epsilon 0), `sgd` without momentum, or `muon` (vectors by Adam, PyTorch's adjustment
            `original`). tokens: in a batch.

    Raises:
        InputError: an unknown optimizer, a sweep, no gradient, or factors on learning rates, which are Adam's, with
            another optimizer.
    """
    _refuse(p, profile, optimizer)
    assert profile.gradient is not None
    d, last = p.architecture.d_model, profile.forward["stream_out"]
    size = float(last.variance[-1] + last.mean[-1] ** 2)
    onto_last, to_sum = _onto_last(p, profile) / size, p.branch**2 * _on_branch(p, profile)
    shared = profile.gradient["branch"].token_correlation
    scale = _top(p, size) * size / tokens**2 if optimizer == "sgd" else 1.0  # absolute gradient per token at the sum
    aligned, scattered = np.zeros(p.n_sublayers), np.zeros(p.n_sublayers)
    roles: dict[str, float] = {}
    for move in _moves(p, profile):
        common = np.divide(
            move.covariance, move.variance, out=np.zeros_like(move.variance), where=move.variance > 0
        ).clip(0, 1)
        pairs = tokens * common * np.clip(shared, 0, 1)
        along = np.minimum(1, (1 + tokens * common**2 * (1 + tokens * shared.clip(0, 1))) / (tokens * (1 + pairs)))
        rate2 = move.rate**2
        if optimizer == "sgd":
            at_branch = onto_last * scale * to_sum
            rate2 = rate2 * d / (move.fan_in * move.fan_out) * at_branch * tokens * move.variance * (1 + pairs)
        if optimizer == "muon" and move.matrix:
            kept = common + (1 - common) * min(1, move.fan_out / move.fan_in)
            rate2 = rate2 * max(1, move.fan_out / move.fan_in) / move.fan_out
            share = move.fan_in * along / (1 + move.fan_in * along)
            one, rest = kept * share, kept * (1 - share)
        else:
            sign = 1.0 if optimizer == "sgd" else 2 / np.pi
            one, rest = move.fan_in * sign * along, np.ones_like(along)
        reached = onto_last * to_sum * rate2 * move.variance
        moved = to_sum > 0  # weights behind a multiplier of 0 have gradient 0
        adds, adds_squares = np.where(moved, np.sqrt(reached * one), 0.0), np.where(moved, reached * rest, 0.0)
        if move.matrix:
            roles[move.role] = float(np.sqrt(adds.sum() ** 2 + adds_squares.sum()))
        aligned += adds
        scattered += adds_squares
    scattered += _scalars(p, profile, onto_last, optimizer, scale, tokens)
    total = aligned.sum() ** 2 + scattered.sum()
    return FirstStep(float(np.sqrt(total)), aligned, np.sqrt(scattered), roles)


def _refuse(p: Parametrization, profile: Profile, optimizer: str) -> None:
    if optimizer not in get_args(StepOptimizer):
        raise InputError(f"unknown optimizer {optimizer!r}; choose {', '.join(get_args(StepOptimizer))}")
    if p.skip.ndim != 1 or profile.gradient is None:
        raise InputError("a first step needs one table, not a sweep, and its profile with gradients")
    if optimizer != "adam" and any((rate != 1).any() for rate in p.learning_rates.values()):
        raise InputError(f"scheme {p.scheme!r} has factors on Adam's learning rates; expected optimizer adam")


def _moves(p: Parametrization, profile: Profile) -> list[_Moves]:
    """Every role's weights, and its biases where it has them."""
    a = p.architecture
    met, _ = forward_state_of(p, branches_of(p), profile)
    out = []
    before = branch_outputs(p, met)
    for role in p.weights:
        where = role_mask(a, role)
        if not where.any():
            continue
        fan_in, fan_out = ROLE[role].fan(a)
        columns = [("weight", p.weights[role], fan_in)]
        if ROLE[role].biased(a):
            columns.append(("bias", p.biases[role], 1))
        for group, column, fan in columns:
            step = _STEP / fan
            moved = p.with_columns(**{f"{group}__{role}": np.sqrt(column**2 + step)})
            change = [
                np.where(where, (x - y) / step, 0.0).clip(0)
                for x, y in zip(branch_outputs(moved, met), before, strict=True)
            ]
            rate = p.learning_rates[role if group == "weight" else "vectors"]
            out.append(_Moves(role, change[0], change[1], fan, fan_out, rate, group == "weight"))
    return out


def _onto_last(p: Parametrization, profile: Profile) -> FloatArray:
    """Variance at the last stream of a small change of variance 1 at the sum of a sublayer, (sublayers,)."""
    assert profile.gradient is not None
    return profile.gradient["stream_out"].variance * _after(p, profile)


def _after(p: Parametrization, profile: Profile) -> FloatArray:
    """Gradient at the sum over the gradient after the norm on it."""
    branch = p.branch**2 * profile.forward["branch"].variance
    total = p.skip**2 * profile.forward["stream_in"].variance + branch + p.architecture.norm_eps
    return np.asarray(np.where(placed(p, NORM_AFTER), p.norm_output**2 / total, 1.0))


def _on_branch(p: Parametrization, profile: Profile) -> FloatArray:
    """What a norm on the branch's output multiplies variances by."""
    _, (raw, _) = forward_state_of(p, branches_of(p), profile)
    sandwich = p.placement == PLACEMENTS.index("sandwich")
    gain = np.where(sandwich, p.post_norm_gain, p.norm_output) ** 2
    return np.asarray(np.where(placed(p, NORM_ON_BRANCH), gain / (np.exp(raw) + p.architecture.norm_eps), 1.0))


def _top(p: Parametrization, size: float) -> float:
    """Variance of the gradient of one token's loss at the last stream, entry by entry."""
    h = p.head
    normed = h.final_norm_gain**2 / size if p.architecture.has_final_norm else 1.0
    return float((h.weight * h.scale) ** 2 * normed)


def _scalars(
    p: Parametrization, profile: Profile, onto_last: FloatArray, optimizer: str, scale: float, tokens: int
) -> FloatArray:
    """Trainable multipliers of branches and skips: each adds its own branch, in no direction that another has."""
    assert profile.gradient is not None
    out = np.zeros(p.n_sublayers)
    features = p.architecture.d_model
    for kind, point in ((p.branch_trainable, "branch"), (p.skip_trainable, "stream_in")):
        if kind == "fixed":
            continue
        series = profile.forward[point]
        rate2 = p.learning_rates["vectors"] ** 2
        if optimizer == "sgd":
            shared = profile.gradient["stream_out"].token_correlation * series.token_correlation
            entries = features if kind == "scalar" else 1
            rate2 = rate2 * onto_last * scale * series.variance * entries * tokens * (1 + tokens * shared.clip(0, 1))
        out += onto_last * rate2 * series.variance
    return out
