"""Invariants of predictions over all activations, norms, placements, schemes and kinds of network, by both recursions.

Warnings are errors here, as in the whole suite: an overflow or 0 / 0 on the way to finite numbers counts.
tests/README.md lists every invariant with the test that holds it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profile_checks import check_prediction
from signalprop.errors import InputError
from signalprop.kernels.trace import Trace, trace
from signalprop.kernels.transforms import dks, tat
from signalprop.network.activations import ACTIVATIONS
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics, from_tokens
from signalprop.network.layout import PLACEMENTS
from signalprop.network.parametrization import Parametrization
from signalprop.network.presets import PRESETS
from signalprop.prediction import predict
from signalprop.results.profile import Profile
from signalprop.schemes import SCHEMES, scheme
from signalprop_lab.training.recipe import load_recipe, parse
from signalprop_lab.training.recipe_files import shipped
from signalprop_lab.training.result import Result
from strategies import LARGEST_DROPOUT, architectures, schemes, statistics, table_or_none

# What a network can be besides its norms: every row has other branches of the code.
VARIANTS: dict[str, dict[str, Any]] = {
    "encoder": {},
    "class token": {"input": "patches", "class_token": True, "head": "classes"},
    "decoder": {"kind": "decoder"},
    "gated, grouped queries, rotary": {
        "kind": "decoder", "gated": True, "n_kv_heads": 1, "positions": "rotary", "qk_norm": True,
    },
    "encoder-decoder": {"kind": "encoder-decoder", "n_decoder_layers": 3, "positions": "relative"},
    "parallel, one norm": {"kind": "decoder", "parallel": True, "shared_norm": True},
    "ALiBi": {"kind": "decoder", "positions": "alibi"},
}  # fmt: skip
BOTH = ("moments", "kernel")


def check_trace(found: Trace) -> None:
    """The same of a trace; what it cannot know (a pair of one token, a rank that was not asked for) is NaN."""
    assert found.gradient is not None
    for series in (found.forward, found.gradient):
        assert not np.isnan(series.log_diagonal).any() and (series.diagonal_min >= 0).all()
        known = np.isfinite(series.min_cosine)
        assert known.all() or found.n_tokens == 1
        assert (series.distance[known] >= 0).all() and (series.distance[known] <= 2).all()
    for kernel in found.kernels.values():
        assert np.isfinite(kernel).all() and (np.diagonal(kernel) >= 0).all()


def covered(p: Parametrization, fidelity: str, inputs: InputStatistics | None = None) -> Profile | None:
    """A prediction; None where the fidelity says that it is not for this network."""
    try:
        return predict(p, inputs, fidelity=fidelity)  # type: ignore[arg-type]
    except InputError as error:
        if "fidelity" in str(error):
            return None
        raise


ACTIVATION_NAMES = [*sorted({item.name for item in ACTIVATIONS.values()}), dks("gelu", 36), tat(36)]
NORMS = list(itertools.product(("layernorm", "rmsnorm"), PLACEMENTS))


def check_network(activation: str, norm: Any, placement: Any, variant: str) -> None:
    """Both recursions on two layers of a network."""
    a = Architecture(**{
        "n_layers": 2, "d_model": 12, "n_heads": 2, "seq_len": 5, "vocab_size": 50, "dropout": 0.1,
        "activation": activation, "norm": norm, "norm_placement": placement, **VARIANTS[variant],
    })  # fmt: skip
    p = scheme("xavier")(a)
    found = [covered(p, fidelity) for fidelity in BOTH]
    assert [profile is None for profile in found] == [a.positions == "alibi", False]
    for profile in found:
        if profile is not None:
            check_prediction(profile)


def allowed(placement: Any, variant: str) -> bool:
    return placement in ("pre", "none") or not VARIANTS[variant].get("parallel")


@pytest.mark.parametrize("index", range(len(ACTIVATION_NAMES)), ids=ACTIVATION_NAMES)
def test_every_activation_with_every_norm_and_placement(index: int) -> None:
    """A third of them each, in another variant of the network each time; all activations together meet all of them."""
    names = list(VARIANTS)
    for k, (norm, placement) in list(enumerate(NORMS))[index % 3 :: 3]:
        variant = names[(index + k) % len(names)]
        check_network(ACTIVATION_NAMES[index], norm, placement, variant if allowed(placement, variant) else "decoder")


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_every_activation_norm_placement_and_variant(activation: str) -> None:
    for (norm, placement), variant in itertools.product(NORMS, VARIANTS):
        if allowed(placement, variant):
            check_network(activation, norm, placement, variant)


def check_scheme(name: str, presets: Sequence[str], enough: int = 100) -> None:
    """Both recursions and the table's JSON, on those presets that the scheme is for, `enough` of them at most."""
    seen = 0
    for preset in presets:
        if seen >= enough:
            break
        a = Architecture.preset(preset, n_layers=2, seq_len=6)
        try:
            p = scheme(name)(a)
        except InputError:  # the scheme is not for this family, and says so
            continue
        assert Parametrization.from_json(json.loads(json.dumps(p.to_json(), allow_nan=False))) == p
        for fidelity in BOTH:
            profile = covered(p, fidelity)
            if profile is not None:
                check_prediction(profile)
                seen += 1
    assert seen


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_every_scheme(name: str) -> None:
    """On another network from scheme to scheme."""
    presets = ("llama3-8b", "t5-small", "bert-base")
    first = sorted(SCHEMES).index(name) % 3
    check_scheme(name, presets[first:] + presets[:first], enough=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_every_scheme_on_every_preset(name: str) -> None:
    check_scheme(name, sorted(PRESETS))


@pytest.mark.parametrize("fidelity", BOTH)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_smallest_networks_and_the_largest_dropout(placement: Any, fidelity: Any) -> None:
    """One layer, one feature, one token, one word more than none; dropout of the largest double below 1."""
    for kind, dropout, norm_eps in itertools.product(("encoder", "decoder"), (0.0, LARGEST_DROPOUT), (0.0, 1e-5)):
        a = Architecture(
            kind=kind, n_layers=1, d_model=1, d_ff=1, seq_len=1, vocab_size=2, norm_placement=placement,
            dropout=dropout, norm_eps=norm_eps,
        )  # fmt: skip
        check_prediction(predict(scheme("xavier")(a), fidelity=fidelity))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_streams_without_any_signal(placement: Any) -> None:
    """Nothing to divide by under a norm without epsilon: the norm of nothing is nothing."""
    a = Architecture(n_layers=2, d_model=4, seq_len=3, norm_placement=placement, norm_eps=0.0, bias=False)
    nothing = InputStatistics(kind="stream", variance=0.0)
    profile = predict(scheme("xavier")(a), nothing, fidelity="kernel")
    check_prediction(profile)
    assert (profile.forward["stream_out"].variance == 0).all()


@given(st.data())
def test_kernels_of_any_network(data: st.DataObject) -> None:
    a = data.draw(architectures(deepest=3))
    if a.input == "tokens":
        a = a.replace(seq_len=data.draw(st.sampled_from([1, 2, 3, 7, 24])))
    if a.seq_len > 64 or a.kind == "encoder-decoder":
        return
    if a.input == "tokens" and data.draw(st.booleans()):
        ids = st.lists(st.integers(0, min(a.vocab_size - 1, 6)), min_size=a.seq_len, max_size=a.seq_len)
        inputs = from_tokens(data.draw(st.lists(ids, min_size=1, max_size=3)), causal=a.causal)
    else:
        inputs = data.draw(statistics(a))
    p = table_or_none(data.draw(schemes()), a, inputs)
    if p is None:
        return
    sizes = st.sampled_from([0.0, 1e-30, 1e-8, 0.3, 1.0, 20.0, 1e8])
    names = data.draw(st.sets(st.sampled_from(sorted(p.columns())), max_size=3))
    try:
        p = p.with_columns(**{name.replace(".", "__"): data.draw(sizes) for name in names})
    except InputError:  # numbers that a shaped attention cannot have
        return
    profile = covered(p, "kernel", inputs)
    if profile is not None:
        check_prediction(profile)
        check_trace(trace(p, inputs=inputs))


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_hundred_thousand_layers_of_every_placement(placement: Any, activation: str) -> None:
    a = Architecture(
        n_layers=100_000, d_model=64, seq_len=16, norm_placement=placement, activation=activation,
        gated=activation == "silu", dropout=0.1,
    )  # fmt: skip
    check_prediction(predict(scheme("xavier")(a), fidelity="moments"))


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_kernels_of_twenty_thousand_layers(placement: Any, kind: Any) -> None:
    a = Architecture(kind=kind, n_layers=20_000, d_model=64, seq_len=4, norm_placement=placement, dropout=0.1)
    check_prediction(predict(scheme("xavier")(a), fidelity="kernel"))


def test_recipes_and_results_come_back() -> None:
    """Recipe -> JSON -> Recipe, of all that are shipped, sweeps apart; and the result of a run likewise."""
    for name in (item for item in shipped() if not item.startswith("sweep-")):
        recipe = load_recipe(name)
        assert parse(json.loads(json.dumps(recipe.to_json()))) == recipe
    result = Result(
        "x", "diverged", "the loss was high", 12, 1 / 3, None, math.log(257), 1000, 10, 0.1, None, "tokens", {"a": 0.7}
    )
    assert Result.from_json(json.loads(json.dumps(result.to_json()))) == result
