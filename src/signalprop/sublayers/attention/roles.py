"""Self-attention: what it is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from signalprop.network.kinds import Kind, KindSettings, Role

if TYPE_CHECKING:
    from signalprop.network.architecture_fields import ArchitectureFields
    from signalprop.network.parametrization import Parametrization

T = TypeVar("T")
_Window = Annotated[int, Field(ge=0, le=10_000_000)]
_Base = Annotated[float, Field(ge=1, le=1e30)]
_Cap = Annotated[float, Field(ge=1e-3, le=1e30)]
_Logit = Annotated[float, Field(ge=-1e3, le=1e3)]


class Settings(KindSettings):
    """What layers differ in: one value for all of a stack, or a tuple that its layers go through, again and again.

    Attributes:
        window: keys that a token sees at most, the last ones and itself; without a mask those up to window // 2 away;
            0: all. rotates: whether rotary positions turn its queries and keys. rotary_base: of its frequencies
            (default: the architecture's).
        score_cap: scores are score_cap tanh(score / score_cap). sink: logit, one per head, that takes part in the
            softmax and has no value, where it starts. value_norm: values are RMS-normalised per head, without gains.
        gate: what the heads give is multiplied by a sigmoid of a map of the input, for every feature or every head.
    """

    kind = "attention"
    window: _Window | tuple[_Window, ...] = 0
    rotates: bool | tuple[bool, ...] = True
    rotary_base: _Base | tuple[_Base, ...] | None = None
    score_cap: _Cap | None = None
    sink: _Logit | None = None
    value_norm: bool = False
    gate: Literal["none", "features", "heads"] = "none"


class Sight(NamedTuple):
    """What one layer's attention sees: `window` as in Settings, 0 where it holds all tokens; base: of its rotations,
    0 where nothing rotates."""

    window: int = 0
    base: float = 0.0


class Sights(NamedTuple):
    """What the attention of a stack sees: a run of layers, which begins anew at its end; layer: of every sublayer."""

    run: tuple[Sight, ...]
    layer: NDArray[np.int32]

    def at(self, i: int) -> Sight:
        """Of sublayer i."""
        return self.run[int(self.layer[i]) % len(self.run)]


def sights(a: ArchitectureFields, layer: NDArray[np.int32], length: float = math.inf) -> Sights:
    """Of a stack that reads so many tokens; layer: of its sublayers."""
    s = Settings.of(a)
    given = (len(x) for x in (s.window, s.rotates, s.rotary_base) if isinstance(x, tuple))
    return Sights(tuple(_sight(a, s, k, length) for k in range(math.lcm(*given))), layer)


def has_window(a: ArchitectureFields) -> bool:
    """Whether some layer sees less than all tokens (than what came before)."""
    return any(sight.window for sight in sights(a, np.zeros(0, np.int32), a.seq_len).run)


def _sight(a: ArchitectureFields, s: Settings, layer: int, length: float) -> Sight:
    window = _of_layer(s.window, layer)
    reach = window if a.causal else window // 2 + 1
    turns = a.positions == "rotary" and _of_layer(s.rotates, layer)
    base = a.rotary_base if s.rotary_base is None else _of_layer(s.rotary_base, layer)
    return Sight(window if window and reach < length else 0, base if turns else 0.0)


def _of_layer(value: T | tuple[T, ...], layer: int) -> T:
    return value[layer % len(value)] if isinstance(value, tuple) else value


def _heads(a: ArchitectureFields) -> tuple[int, int]:
    return a.d_model, a.n_heads * a.d_head


def _shared_heads(a: ArchitectureFields) -> tuple[int, int]:
    return a.d_model, a.n_kv_heads * a.d_head


def _biased(a: ArchitectureFields) -> bool:
    return bool(a.qkv_bias)


def _gates(a: ArchitectureFields) -> tuple[int, int]:
    return a.d_model, a.n_heads * (a.d_head if Settings.of(a).gate == "features" else 1)


def has_gate(a: ArchitectureFields) -> bool:
    """Whether what the heads give is gated."""
    return Settings.of(a).gate != "none"


def score_variances(p: Parametrization) -> NDArray[np.float64]:
    """Variance of the scores of every sublayer on an input of second moment 1, (..., sublayers)."""
    a, scale = p.architecture, p.score_scale**2
    if a.qk_norm:  # unit vectors times gains, which are part of score_scale
        return a.d_head * scale
    return a.d_model**2 * p.weights["query"] ** 2 * p.weights["key"] ** 2 * a.d_head * scale


HARD = 16.0  # score variance from which a row of weights is nearly one key, and which one two rows choose is drawn
_LONGEST = 256  # tokens up to which it is


def _hard(p: Parametrization) -> NDArray[np.bool_]:
    """Where QK-norm makes scores so large: docs/theory/attention.md, "Hard attention"."""
    a = p.architecture
    plain = a.qk_norm is True and p.shaping.kind == "none" and a.positions not in ("alibi", "relative")
    short = max(a.seq_len, a.target_len or 0) <= _LONGEST and not a.attention_dropout
    return np.asarray((score_variances(p) >= HARD) & (p.attention_gain != 0) & (plain and short))


ROLES = (
    Role("query", _heads, biased=_biased, reads=True),
    Role("key", _shared_heads, biased=_biased, reads=True),
    Role("value", _shared_heads, biased=_biased, reads=True),
    Role("output", lambda a: (a.n_heads * a.d_head, a.d_model), writes=True),
)
GATE = Role("attention_gate", _gates, exists=has_gate, biased=_biased, reads=True)
KIND = Kind(
    name="attention",
    roles=(*ROLES, GATE),
    words="attention",
    short="attn",
    attends=True,
    settings=Settings,
    hard=_hard,
)
