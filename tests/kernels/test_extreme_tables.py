"""Every column of a table at 0, at 1e-30 and at 1e30, for every kind of sublayer: a profile, or one line."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from tests.kernels.test_drawn import SETTINGS

import signalprop as sp
from damage import check_line
from signalprop.errors import InputError
from signalprop.network.kinds import KINDS, kind_named

NAMES = [name for name in KINDS if kind_named(name).roles]
VALUES = (0.0, 1e-30, 1e30)
LONG = ("compressed_sparse_attention", "heavily_compressed_attention")  # variants of shared_kv_attention, drawn


def table(name: str) -> sp.Parametrization:
    """One such sublayer, small."""
    memory = kind_named(name).reads_memory
    fields: dict[str, Any] = {
        "kind": "encoder-decoder" if memory else "decoder", "n_layers": 1, "d_model": 32, "n_heads": 4, "d_head": 16,
        "d_ff": 24, "vocab_size": 30, "seq_len": 6, "norm": "rmsnorm", "norm_bias": False, "qkv_bias": True,
    }  # fmt: skip
    if memory:
        fields |= {"n_decoder_layers": 1, "target_len": 5}
    else:
        narrow = {"d_rotary": 8} if name == "latent_attention" else {}
        fields |= {"branches": (name,), "settings": {name: SETTINGS[name] | narrow} if name in SETTINGS else {}}
    return sp.scheme("xavier")(sp.Architecture(**fields))


def columns(p: sp.Parametrization, name: str) -> list[str]:
    """What a table says of the weights of such a sublayer; beside a feed-forward all numbers that it holds."""
    every = [column for column, values in p.columns().items() if values.dtype.kind == "f"]
    roles = {role.name for role in kind_named(name).roles if role.exists(p.architecture)}
    others = {"weight", "bias"} if name == "feed_forward" else set()
    return [c for c in every if c.partition(".")[2] in roles or (others and c.partition(".")[0] not in others)]


CASES = [
    (name, fidelity, 1)
    for name in NAMES
    for fidelity in (("moments", "kernel") if kind_named(name).closed else ("kernel",))
]
# A part of every table takes a second at most (a feed-forward has all columns, open kinds are drawn).
DEAR = {(name, fidelity) for name, fidelity, _ in CASES if name == "feed_forward" or not kind_named(name).closed}
CASES += [(name, fidelity, 31 if (name, fidelity) in DEAR else 5) for name, fidelity, _ in CASES if name not in LONG]


@pytest.mark.parametrize(
    ("name", "fidelity", "step"), [pytest.param(*case, marks=[pytest.mark.slow] * (case[2] == 1)) for case in CASES]
)
def test_a_profile_or_one_line(name: str, fidelity: str, step: int) -> None:
    p = table(name)
    raw = []
    for column, value in [*product(columns(p, name), VALUES)][::step]:
        try:
            found = sp.predict(p.with_columns(**{column.replace(".", "__"): value}), fidelity=fidelity)
            str(found), found.to_json()
        except InputError as error:
            check_line(str(error))
        except Exception as error:
            raw.append(f"{column} = {value}: {type(error).__name__}: {error}")
    assert raw == []


@pytest.mark.parametrize("placement", ["sandwich", "res-post"])
def test_a_norm_on_a_branch_divides_gradients_by_its_size(placement: Any) -> None:
    """Weights 1e10 times as large leave the network as it is, but for the norm's epsilon."""
    a = sp.Architecture(n_layers=2, d_model=32, n_heads=2, d_ff=64, seq_len=8, norm_placement=placement, dropout=0.0)
    p = sp.scheme("xavier")(a)
    large = {f"weight__{role}": 1e10 * p.weights[role] for role in ("output", "down")}
    found, expected = (sp.predict(x, fidelity="kernel").gradient for x in (p.with_columns(**large), p))
    assert found is not None and expected is not None
    np.testing.assert_allclose(found["stream_in"].variance, expected["stream_in"].variance, rtol=1e-4)
