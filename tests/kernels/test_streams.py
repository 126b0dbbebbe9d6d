"""Several residual streams: against one stream, numbers worked out by hand, random networks, and transformers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import signalprop as sp
from signalprop.cli.options import changes
from signalprop.errors import InputError
from signalprop.kernels.streams.connections import Gated, connections_of
from signalprop.kernels.streams.gates import _mixed, doubly_stochastic, gates_of
from signalprop.models.connections import Gates, left_back
from signalprop.models.transformer import surroundings
from signalprop.network.residual_streams import Streams
from signalprop.report.tables import profile_table
from signalprop.results.between_streams import alike
from signalprop.results.cost import count_parameters, train_flops
from signalprop.theory.log_arithmetic import NO_SIGNAL

WORDS = 100
INPUTS = sp.InputStatistics(token_correlation=1 / WORDS, target_correlation=1 / WORDS)


def network(streams: Any, **changes: Any) -> sp.Architecture:
    fields = {"kind": "decoder", "n_layers": 3, "d_model": 128, "n_heads": 2, "seq_len": 32, "vocab_size": WORDS}
    return sp.Architecture(**{**fields, "tied_embeddings": False, "streams": streams, **changes})


@pytest.mark.parametrize("fidelity", ["moments", "kernel"])
@pytest.mark.parametrize("streams", [{"gate_scale": 0.0}, {"mixing": "hyper", "n": 3}])
def test_streams_that_nothing_tells_apart_are_one(streams: dict[str, Any], fidelity: Any) -> None:
    one, many = (sp.predict(network(s), INPUTS, scheme="xavier", fidelity=fidelity) for s in (None, streams))
    for point in ("stream_in", "branch", "stream_out"):
        assert many.forward[point].variance == pytest.approx(one.forward[point].variance, rel=1e-9)
        assert many.forward[point].token_correlation == pytest.approx(one.forward[point].token_correlation, abs=1e-9)
    assert many.gradient["branch"].variance == pytest.approx(one.gradient["branch"].variance * (
        many.gradient["branch"].variance[-1] / one.gradient["branch"].variance[-1]), rel=1e-9)  # fmt: skip


@pytest.mark.parametrize(
    "streams",
    [pytest.param({"gate_scale": 2.0}, marks=pytest.mark.slow), {"gate_scale": 2.0, "mix_bias": 3.0},
     pytest.param({"mixing": "independent", "gate_scale": 2.0}, marks=pytest.mark.slow), {"mixing": "hyper"},
     {"mixing": "siamese"}],
    ids=["mhc", "mhc near the identity", "independent", "hyper", "siamese"],
)  # fmt: skip
def test_against_random_networks(streams: dict[str, Any]) -> None:
    table = sp.scheme("xavier")(network(streams, d_model=256))
    predicted, measured = sp.predict(table, INPUTS), sp.simulate(table, INPUTS, n_seeds=6, batch_size=2)
    for point, at_most in (("stream_out", 0.03), ("branch", 0.08)):
        difference = predicted.forward[point].log_variance - measured.forward[point].log_variance
        assert np.abs(difference[1:]).max() < at_most
    back = predicted.gradient["stream_in"].log_variance - measured.gradient["stream_in"].log_variance
    assert np.abs(back).max() < 0.1
    r = predicted.forward["stream_out"].token_correlation - measured.forward["stream_out"].token_correlation
    assert np.abs(r).max() < 0.03
    mine, theirs = predicted.stream_covariance, measured.stream_covariance
    assert mine is not None and theirs is not None
    assert np.abs(mine - theirs).max() < 0.08  # of one stream's variance, which differs between six networks
    assert np.abs(alike(mine) - alike(theirs)).max() < 0.012
    averaged = sp.predict(table, INPUTS, fidelity="moments", backward=False).stream_covariance
    assert averaged is not None and np.abs(alike(averaged) - alike(mine)).max() < 0.01


@pytest.mark.parametrize("fidelity", ["moments", "kernel"])
def test_what_streams_share_by_hand(fidelity: Any) -> None:
    table = sp.scheme("xavier")(network({"mixing": "siamese"}, norm_eps=0.0)).with_columns(
        branch=0, skip=[2.0, 1, 1, 1, 1, 1]
    )
    profile = sp.predict(table, INPUTS, fidelity=fidelity)
    found = profile.stream_covariance
    assert found is not None
    for row, size in zip(found, [1.0, 0.5, 0.5, 0.5, 0.5, 0.5], strict=True):  # x over y: x is normed at every sublayer
        mean = (size**2 + 1) / 2
        assert row == pytest.approx(np.array([[size**2, size], [size, 1.0]]) / mean, rel=1e-9)
    assert alike(found) == pytest.approx(np.ones(6), rel=1e-9)
    assert sp.Profile.from_json(profile.to_json()) == profile
    assert "streams corr" in profile_table(profile) and "0.40-1.60" in profile_table(profile)
    assert profile.to_dataframe()["stream_out_between_streams"].to_numpy() == pytest.approx(np.ones(6), rel=1e-9)
    panel = profile.plot().subfigs[0].axes[-1]
    assert panel.get_title() == "Correlation between streams"
    assert panel.lines[0].get_ydata() == pytest.approx(np.ones(6))
    broken = profile.to_json()
    broken["statistics"]["stream_covariance"] = [[1.0]]
    with pytest.raises(InputError, match="shape \\(6, 2, 2\\)"):
        sp.Profile.from_json(broken)


@pytest.mark.parametrize("fidelity", ["moments", "kernel"])
def test_the_epsilon_of_norms_between_siamese_streams(fidelity: Any) -> None:
    """Streams are as small as it is: x / sqrt(x^2 + epsilon) at every sublayer, y as it enters."""
    table = sp.scheme("xavier")(network({"mixing": "siamese"}, norm_eps=0.5)).with_columns(branch=0)
    profile = sp.predict(table, INPUTS, fidelity=fidelity, backward=False)
    x2 = y2 = profile.forward["stream_in"].variance[0]
    assert profile.stream_covariance is not None
    for found in profile.stream_covariance:
        x2 /= x2 + 0.5
        assert found[0, 0] / found[1, 1] == pytest.approx(x2 / y2, rel=1e-9)


def test_siamese_streams_of_some_tokens() -> None:
    """Kernels of what is read, the sum of both after their norms, and of what is kept, of which one has its norm."""
    connections = connections_of(sp.scheme("xavier")(network({"mixing": "siamese"}, norm_eps=0.3)).with_columns(skip=2))
    streams = np.random.default_rng(0).normal(size=(2, 3, 8))
    parts = np.stack([one @ other.T / 8 for one in streams for other in streams])
    connections.norm_streams(0, parts / 5, np.log(5))
    normed = [one / np.sqrt((one**2).mean(1, keepdims=True) + 0.3) for one in streams]
    both = normed[0] + normed[1]
    np.testing.assert_allclose(connections.read(0, parts, parts[0]), both @ both.T / 8)
    skipped = 2 * normed[0], 2 * streams[1]
    expected = [one @ other.T / 8 for one in skipped for other in skipped]
    np.testing.assert_allclose(connections.mixed(0, parts, parts[0]), expected)


def test_siamese_streams_are_those_of_the_paper() -> None:
    """Its formula, written out with the branches of a built network."""
    a = network({"mixing": "siamese"}, norm="rmsnorm", n_layers=2, d_model=32)
    model = sp.build(sp.scheme("xavier")(a), seed=0, dtype=torch.float64).eval()
    assert model.decoder is not None and model.head is not None
    ids = torch.arange(32)[None]

    def normed(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (32,), eps=a.norm_eps)

    x = y = model.decoder.embedding(ids, None)
    around = surroundings(a, x, "decoder")
    for i, sublayer in enumerate(model.sublayers()):
        x = normed(x)
        z = sublayer.branch(normed(x + normed(y)), around)
        x, y = x + z / (2 * (i // 2 + 1)) ** 0.5, y + z
    torch.testing.assert_close(model(ids).logits, model.head(normed(normed(x) + normed(y))), rtol=1e-10, atol=1e-10)
    assert count_parameters(a)["total"] == sum(p.numel() for p in model.parameters())
    with pytest.raises(InputError, match="ids"):
        left_back(a, x)


def test_gates_are_those_of_deepseek() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(hidden_size=128, hc_mult=4, rms_norm_eps=1e-5, hc_eps=0.0)
    theirs = modeling.DeepseekV4HyperConnection(config)
    mine = Gates(sp.scheme("xavier")(network({"gate_scale": 3.0})), 0, 0, torch.float32)
    with torch.no_grad():
        theirs.fn.copy_(mine.weight)
        theirs.base.copy_(mine.base)
        theirs.scale.copy_(mine.scale)
        stream = torch.randn(2, 5, 4, 128, generator=torch.Generator().manual_seed(0))
        read, write, mix = mine(stream.flatten(-2))
        post, comb, collapsed = theirs(stream)
    assert mix is not None
    torch.testing.assert_close(write, post)
    torch.testing.assert_close(mix, comb.transpose(-1, -2))
    torch.testing.assert_close((read.unsqueeze(-1) * stream).sum(-2), collapsed)


@pytest.mark.parametrize("streams", [4, {"mixing": "independent"}, {"mixing": "hyper"}, {"mixing": "hyper", "n": 2}])
def test_built_measured_and_counted(streams: Any) -> None:
    table = sp.scheme("xavier")(network(streams))
    assert sp.Parametrization.from_json(table.to_json()) == table
    model = sp.build(table, seed=0)
    counted = count_parameters(table)
    assert counted["total"] == sum(x.numel() for x in model.parameters())
    assert counted["streams"] > 0 and train_flops(table, 1, 1)["streams"] > 0
    ids = torch.randint(0, WORDS, (4, 32), generator=torch.Generator().manual_seed(0))
    measured = sp.measure(model, {"inputs": ids, "targets": ids.roll(-1, 1)})
    predicted = sp.predict(table, INPUTS)
    assert (
        np.abs(predicted.forward["stream_out"].log_variance - measured.forward["stream_out"].log_variance).max() < 0.2
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"streams": 1}, "greater than or equal to 2"),
        ({"streams": 4, "norm_placement": "post"}, "norms before them"),
        ({"streams": 4, "norm_placement": "none"}, "'pre' or 'sandwich'"),
        ({"streams": {"mixing": "siamese"}, "tied_embeddings": True}, "not tied_embeddings"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        network(**{"streams": None, **fields})


def test_on_the_command_line() -> None:
    changed = changes(["streams=3", "streams.mixing=hyper", "experts.top_k=1"])
    assert changed == {"streams": {"n": 3, "mixing": "hyper"}, "settings": {"experts": {"top_k": 1}}}
    assert changes(["streams=no", "streams.n=2"]) == {"streams": {"n": 2}}
    assert sp.Architecture.preset("tgs", streams=changed["streams"]).streams == Streams(n=3, mixing="hyper")


@pytest.mark.parametrize("size", [1.0, 1e-30, 0.0])
def test_what_the_head_reads_of_a_stream_that_entered(size: float) -> None:
    """Of 6 sublayers the product of their skips, and the factors of what layers read."""
    skips = size * np.array([-0.5, 2.0, 3.0, 1.0, 0.5, 0.25])
    for streams in ({"mixing": "hyper", "n": 3}, "mhc", None):
        factors = [{-1: 2.0}, {1: 0.7}, {2: 0.6, -1: 0.0}] if streams is None else None
        fields = {"streams": {"mixing": streams} if streams == "mhc" else streams, "layer_inputs": factors}
        table = sp.scheme("xavier")(network(**fields)).with_columns(skip=skips)
        read = np.log(0.7 * 0.6 * 2.0) if streams is None else 0.0
        found = connections_of(table).log_carried2()
        assert found == pytest.approx(2 * (np.log(np.abs(skips)).sum() + read)) if size else found <= NO_SIGNAL


def test_what_passes_gates_and_comes_back_through_them() -> None:
    """Against gates that are drawn. Back, streams are read less their mean: a norm takes away what that adds."""
    n, tokens, d, draws = 4, 32, 256, 40
    table = sp.scheme("xavier")(network({"gate_scale": 2.0, "mix_bias": 3.0}, d_model=d)).with_columns(skip=0.8)
    connections, generator = connections_of(table), torch.Generator().manual_seed(0)
    assert isinstance(connections, Gated)

    def drawn(mean: float, apart: float = 0.0, streams: int = n) -> torch.Tensor:
        """Streams of those second moments of their mean and of deviations from it."""
        each = torch.randn(tokens, streams, d, generator=generator)
        apart_from_mean = (each - each.mean(1, keepdim=True)) * (apart * n / (n - 1)) ** 0.5
        return apart_from_mean + mean**0.5 * torch.randn(tokens, 1, d, generator=generator)

    def sizes(streams: torch.Tensor) -> list[float]:
        streams, mean = streams.detach(), streams.detach().mean(1, keepdim=True)
        return [float(mean.square().mean()), float((streams - mean).square().mean())]

    samples = []
    for seed in range(draws):
        stream = drawn(0.2, 0.8).requires_grad_()
        read, write, mix = Gates(table, 0, seed, torch.float32)(stream.flatten(-2))
        assert mix is not None
        fixed, share = stream.detach(), (read / read.sum(-1, keepdim=True).detach()).unsqueeze(-1)
        skipped, written = mix @ (0.8 * fixed), write.unsqueeze(-1) * drawn(0.2, streams=1)
        apart = (share * (fixed - fixed.mean(1, keepdim=True))).sum(1, keepdim=True)
        (((skipped + written) * drawn(0.2, 1.2)).sum() + (apart * drawn(4.0, streams=1)).sum()).backward()
        assert stream.grad is not None
        moments = [float(x.square().mean()) for x in (stream.grad, (share.detach() * fixed).sum(1))]
        samples.append(moments + sizes(skipped) + sizes(written))
    back, streams, branch, at_read = (np.reshape(x, (-1, 1, 1)) for x in ([0.2, 1.2], [0.2, 0.8], [0.2], [4.0]))
    alike = np.ones((1, 1))
    parts = connections.through_gates(0, back, streams, branch[0], at_read[0], alike)
    returned = connections.between(parts.ravel())  # streams get gradients of one size that share nothing
    np.testing.assert_allclose(returned, np.eye(n) * returned[0, 0], atol=1e-12)
    ahead = (connections.read(0, streams, alike), connections.mixed(0, streams, alike),
             connections.written(0, branch[0], alike))  # fmt: skip
    expected = np.concatenate([returned[0, :1], *map(np.ravel, ahead)])
    error = np.std(samples, axis=0, ddof=1) / draws**0.5
    assert (error < 0.02 * expected).all()
    assert (np.abs(np.mean(samples, axis=0) - expected) < 4 * error).all()


@pytest.mark.parametrize("mixing", ["hyper", "mhc"])
def test_gradients_pass_connections_as_their_transposes(mixing: str) -> None:
    n, skips = 4, [0.5, 1, 1, 1, 1, 1]
    connections = connections_of(sp.scheme("xavier")(network({"mixing": mixing, "n": n})).with_columns(skip=skips))
    # of products of the parts of a gradient and of streams
    weights = np.array([n**2, n**2 / (n - 1)])[:, None, None] if mixing == "mhc" else 1.0
    rng = np.random.default_rng(0)
    streams, back = rng.random((2, len(connections.start), 3, 3))
    rho, output, at_read = rng.random((3, 3, 3))
    for sent, ahead, arrived, entered in (
        (back, connections.written(0, output, rho), connections.arriving(0, back, rho), output),
        (connections.sent(0, at_read, rho), streams, at_read, connections.read(0, streams, rho)),
        (connections.head_sent(at_read), streams, at_read, connections.head(streams)),
    ):
        assert (weights * sent * ahead).sum() == pytest.approx((arrived * entered).sum())
    mixed, mixed_back = connections.mixed(0, streams, rho), connections.mixed_back(0, back, rho)
    assert (weights * back * mixed).sum() == pytest.approx((weights * mixed_back * streams).sum())


def test_strong_gates_carry_a_note() -> None:
    notes = [sp.predict(network({"gate_scale": scale}), INPUTS, backward=False).notes for scale in (1.0, 10.0)]
    assert [any("standard deviation 4.53" in note for note in of) for of in notes] == [False, True]


def test_mixing_moves_by_its_derivative() -> None:
    """Against the mixing matrices themselves, at a step a hundred times as large."""
    streams = Streams(n=3, mixing="mhc")
    z, direction = np.random.default_rng(0).standard_normal((2, 5, 3, 3)) / 2
    up, down = (_mixed(streams, z + step * direction, direction)[0] for step in (1e-2, -1e-2))
    np.testing.assert_allclose(_mixed(streams, z, direction)[1], (up - down) / 2e-2, atol=1e-4)


def test_slopes_of_gates_against_draws() -> None:
    streams = Streams(n=3, gate_std=0.1, read_bias=0.5, write_bias=-0.3)
    found, rng = gates_of(streams, 64), np.random.default_rng(1)
    z = streams.logit_std(64) * rng.standard_normal((200_000, 3))
    read, write = (1 / (1 + np.exp(-(z + bias))) for bias in (0.5, -0.3))
    one = np.ones(())
    expected = np.square(read * (1 - read) / read.sum(1, keepdims=True)).mean()
    assert float(found.of("read_slope", one)) == pytest.approx(expected, rel=0.03)
    expected = np.square(streams.write_gain * write * (1 - write)).mean()
    assert float(found.of("write_slope", one)) == pytest.approx(expected, rel=0.03)


def test_the_head_sends_every_stream_the_same() -> None:
    """It reads the streams' mean, so that each gets 1/n of the gradient."""
    connections = connections_of(sp.scheme("xavier")(network({})))
    sent = connections.between(connections.head_sent(np.ones(())))
    np.testing.assert_allclose(sent, np.full((4, 4), 1 / 16))


def test_gradients_through_gates_share_nothing_between_streams() -> None:
    connections = connections_of(sp.scheme("xavier")(network({"gate_scale": 2.0})))
    parts = connections.through_gates(0, *np.ones((2, 2, 1, 1)), *np.ones((3, 1, 1)))
    returned = connections.between(parts.ravel())
    np.testing.assert_allclose(returned, np.eye(4) * returned[0, 0], atol=1e-12)
    assert returned[0, 0] > 0


def test_rows_and_columns_of_mixing_matrices_sum_to_1() -> None:
    """Columns exactly, which are divided last; rows as passes go on."""
    z = np.random.default_rng(0).standard_normal((5, 3, 3))
    once, often = doubly_stochastic(z, 1), doubly_stochastic(z, 40)
    np.testing.assert_allclose(once.sum(1), 1)
    np.testing.assert_allclose(often.sum(2), 1, atol=1e-9)
    rows = np.exp(z) / np.exp(z).sum(2, keepdims=True)
    np.testing.assert_allclose(once, rows / rows.sum(1, keepdims=True))
