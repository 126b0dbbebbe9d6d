"""An applied model computes the function of the built one: logits and gradients, every scheme and family."""

from __future__ import annotations

import pytest
import torch

import signalprop as sp
from applied import (
    Pair,
    built_logits,
    distance,
    double_norms,
    logits_of,
    loss_of,
    pair,
    role_gradients,
    skip_without_interface,
)
from signalprop.errors import InputError

FAMILIES = ("bert", "gpt2", "llama", "vit", "t5")
# what cannot be: (scheme, family) -> words of the one line that says so
REFUSED = {
    ("bamboo", "bert"): "norm placement 'pre'",
    ("lns", "bert"): "norm placement 'pre'",
    ("mix-ln", "bert"): "norm placement 'pre'",
    **dict.fromkeys(
        ((s, "bert") for s in ("sandwich", "peri-ln", "running-mean", "normalised-gates", "depth-scaled-sandwich")),
        "norm placement 'sandwich'",
    ),
    ("e-spa", "t5"): "one stack",
    ("u-spa", "t5"): "one stack",
    ("value-skipinit", "t5"): "one stack",
}


def errors(made: Pair) -> tuple[float, float]:
    """(largest difference of logits over the largest logit, relative distance of the gradients)."""
    mine, theirs = logits_of(made.applied, made.batch), built_logits(made)
    if (
        not theirs.isfinite().all()
    ):  # Value-SkipInit's gated layers without norms square the stream's size again and again
        assert not mine.isfinite().all()
        return 0.0, 0.0
    loss_of(mine).backward()
    loss_of(theirs).backward()
    largest = theirs.detach().abs().max()
    error = float((mine - theirs).detach().abs().max() / largest) if largest > 0 else float(mine.detach().abs().max())
    return error, distance(role_gradients(made.applied, made.table), role_gradients(made.built, made.table))


def compare(family: str, scheme: str, n_layers: int, dtype: torch.dtype, bound: float) -> None:
    skip_without_interface(scheme)
    words = REFUSED.get((scheme, family))
    if words is not None:
        with pytest.raises(InputError, match=words):
            pair(family, scheme, n_layers, dtype)
        return
    logits, gradients = errors(pair(family, scheme, n_layers, dtype, match_eps=True))
    assert logits <= bound
    assert gradients <= bound


# One scheme of every way to change a model on an encoder-decoder, every scheme on a decoder; the others are slow tests.
ON_T5 = ("deepscalelm", "deepnorm", "layerscale", "t-fixup", "sandwich")


@pytest.mark.parametrize(
    ("scheme", "family"),
    [
        pytest.param(s, f, marks=() if f == "gpt2" or (f == "t5" and s in ON_T5) else pytest.mark.slow)
        for s in sorted(sp.SCHEMES)
        for f in FAMILIES
    ],
)
class TestEveryScheme:
    def test_in_double_precision(self, scheme: str, family: str) -> None:
        with double_norms():
            compare(family, scheme, 4, torch.float64, 1e-10)

    @pytest.mark.slow
    @pytest.mark.parametrize("n_layers", [48, 192])
    def test_deep(self, scheme: str, family: str, n_layers: int) -> None:
        with double_norms():
            compare(family, scheme, n_layers, torch.float64, 1e-10)
