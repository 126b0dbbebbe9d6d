"""Layers that read earlier streams (x0, U-Net skips): numbers worked out by hand, random networks, built networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import signalprop as sp
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.network.layer_inputs import matrices
from signalprop.results.cost import count_parameters, train_flops

WORDS = 100
INPUTS = sp.InputStatistics(token_correlation=1 / WORDS, target_correlation=1 / WORDS)
FIRST = ({0: 1.0}, {1: 0.9, 0: 0.4}, {2: 0.9, 0: 0.4}, {3: 0.9, 0: 0.4})  # nanochat, modded-nanogpt
SCALED = ({-1: 1.3}, {1: 0.9, -1: 0.4}, {2: 0.9, -1: 0.4}, {3: 0.9, -1: 0.4})  # the first layer multiplies it
UNET = ({0: 1.0}, {1: 1.0}, {2: 1.0, 1: 0.8}, {3: 1.0, 0: 0.7})
DENSE = ({0: 1.0}, {1: 0.8, 0: 0.3}, {2: 0.8, 1: 0.3, 0: -0.3}, {3: 0.8, 2: 0.3, 1: 0.3, 0: 0.3})  # DenseFormer
READ = pytest.mark.parametrize("inputs", [FIRST, SCALED, UNET, DENSE], ids=["x0", "x0 apart", "U-Net", "DenseFormer"])


def network(inputs: Any = None, **changes: Any) -> sp.Architecture:
    fields = {"kind": "decoder", "n_layers": 4, "d_model": 64, "n_heads": 2, "seq_len": 32, "vocab_size": WORDS}
    return sp.Architecture(**{**fields, "tied_embeddings": False, "layer_inputs": inputs, **changes})


@pytest.mark.parametrize("fidelity", ["moments", "kernel"])
def test_by_hand(fidelity: Any) -> None:
    """Without branches a stream is a multiple of the model's input; a skip multiplies the stream alone."""
    table = sp.scheme("xavier")(network(DENSE)).with_columns(branch=0, skip=[1.0, 1, 1, 1, 1, 0.5, 1, 1])
    profile = sp.predict(table, INPUTS, fidelity=fidelity, backward=False)
    entering = np.array([1.0, 1.1, 0.8 * 1.1 + 0.3 - 0.3, 0.8 * 0.44 + 0.3 * 1.1 + 0.3 + 0.3])
    left = entering * [1.0, 1.0, 0.5, 1.0]
    assert profile.forward["stream_in"].variance[::2] == pytest.approx(entering**2, rel=1e-9)
    assert profile.forward["stream_out"].variance[1::2] == pytest.approx(left**2, rel=1e-9)
    assert sp.Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [
        pytest.param(SCALED, "decoder", id="x0 apart"),
        pytest.param(DENSE, "decoder", id="DenseFormer"),
        *(pytest.param(FIRST, kind, marks=pytest.mark.slow) for kind in ("decoder", "encoder")),
        *(pytest.param(UNET, kind, marks=pytest.mark.slow) for kind in ("decoder", "encoder")),
    ],
)
def test_against_random_networks(inputs: Any, kind: str) -> None:
    """Six networks of width 256; with six layers the largest differences of logarithms were .036 (streams), .08
    (branches) and .04 (gradients)."""
    table = sp.scheme("xavier")(network(inputs, d_model=256, kind=kind))
    predicted, measured = sp.predict(table, INPUTS), sp.simulate(table, INPUTS, n_seeds=6, batch_size=2)
    assert predicted.gradient is not None and measured.gradient is not None
    for points, mine, theirs, at_most in (
        (("stream_in", "stream_out"), predicted.forward, measured.forward, 0.045),
        (("branch",), predicted.forward, measured.forward, 0.1),
        (("stream_in", "stream_out", "branch"), predicted.gradient, measured.gradient, 0.07),
    ):
        for point in points:
            assert np.abs(mine[point].log_variance - theirs[point].log_variance).max() < at_most, point
    r = predicted.forward["stream_out"].token_correlation - measured.forward["stream_out"].token_correlation
    assert np.abs(r).max() < 0.04
    without = sp.predict(sp.scheme("xavier")(network(None, d_model=256, kind=kind)), INPUTS)
    gap = np.log(predicted.forward["stream_out"].variance[-1] / without.forward["stream_out"].variance[-1])
    assert abs(gap) > 0.1  # what would have been predicted as if nothing were read


@READ
@pytest.mark.parametrize("parallel", [False, True])
def test_a_built_network_is_the_simulated_one(inputs: Any, parallel: bool) -> None:
    table = sp.scheme("xavier")(network(inputs, parallel=parallel))
    assert sp.Parametrization.from_json(table.to_json()) == table
    model = sp.build(table, seed=3, dtype=torch.float64).eval()
    assert count_parameters(table)["total"] == sum(x.numel() for x in model.parameters())
    assert count_parameters(table)["streams"] == sum(len(x) for layer, x in enumerate(inputs) if x != {layer: 1.0})
    assert train_flops(table, 1, 1)["streams"] > 0
    ids = torch.randint(0, WORDS, (2, 32), generator=torch.Generator().manual_seed(0))
    targets = ids.roll(-1, 1)
    batch = Batch(ids.numpy(), targets.numpy())
    one = sp.measure(model, {"inputs": ids, "targets": targets})
    other = sp.simulate(table, batch=batch, n_seeds=1, seed=3, dtype=torch.float64, train_mode=False)
    assert one.gradient is not None and other.gradient is not None
    for mine, theirs in ((one.forward, other.forward), (one.gradient, other.gradient)):
        for point in mine:
            assert mine[point].log_variance == pytest.approx(theirs[point].log_variance, abs=1e-9), point


def test_the_layer_itself_is_what_it_says() -> None:
    model = sp.build(sp.scheme("xavier")(network(UNET)), seed=0, dtype=torch.float64).eval()
    assert model.decoder is not None and model.decoder.layer_inputs is not None and model.head is not None
    seen: list[torch.Tensor] = []
    for sublayer in model.sublayers():
        sublayer.register_forward_hook(lambda _, args, out: seen.extend((args[0], out)))
    model(torch.arange(32)[None])
    entered, left = seen[0::4], seen[3::4]
    torch.testing.assert_close(entered[1], left[0])
    torch.testing.assert_close(entered[2], left[1] + 0.8 * left[0])
    torch.testing.assert_close(entered[3], left[2] + 0.7 * entered[0])


@given(st.data())
def test_matrices_are_the_sums(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    factor = st.floats(-2, 2).map(lambda x: round(x, 3))
    inputs: list[dict[int, float]] = [{0: 1.0}]
    inputs += [data.draw(st.dictionaries(st.integers(0, layer), factor, min_size=1)) for layer in range(1, n)]
    rng = np.random.default_rng(0)
    sources = [rng.standard_normal()]
    between = matrices(inputs)
    state = np.full(between.shape[-1], sources[0])
    for layer, row in enumerate(inputs):
        state = between[layer] @ state
        assert state[0] == pytest.approx(sum(x * sources[source] for source, x in row.items()), abs=1e-9)
        state[0] = rng.standard_normal()  # what a layer adds
        sources.append(state[0])


def test_the_usual_inputs_are_none() -> None:
    assert network(({0: 1.0}, {1: 1.0}, {2: 1.0}, {3: 1.0})) == network(None)
    assert sp.Architecture(**network(UNET).model_dump(mode="json")) == network(UNET)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_inputs": ({0: 1.0}, {1: 0.5})}, "names 2 layers, the model has 4"),
        ({"layer_inputs": ({0: 2.0}, {1: 0.5}, {2: 1.0}, {3: 1.0})}, "layer 0: {0: 2.0}; expected"),
        ({"layer_inputs": ({0: 1.0}, {2: 0.5}, {2: 1.0}, {3: 1.0})}, "layer 1: {2: 0.5}; expected factors by sources"),
        ({"layer_inputs": ({-1: 2.0}, {1: 1.0, 0: 0.5}, {2: 1.0}, {3: 1.0})}, "expected factors by sources -1"),
        ({"layer_inputs": FIRST, "norm_placement": "post"}, "norms before branches or on them"),
        ({"layer_inputs": FIRST, "streams": 4}, "one stream"),
        ({"n_layers": 20, "layer_inputs": tuple(dict.fromkeys(range(i + 1), 1.0) for i in range(20))}, "20 streams"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        network(**fields)
