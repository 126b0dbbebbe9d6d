"""The reference transformer's ends: what reads frames and patches, its variance, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from choice import some
from signalprop import read_parametrization
from signalprop.data.batches import default_batch, default_statistics
from signalprop.errors import InputError
from signalprop.kernels.embedding_and_loss import input_kernel
from signalprop.measurement import measure
from signalprop.measurement.simulation import simulate
from signalprop.models import build
from signalprop.models.ends import Embeddings, FrontEnd
from signalprop.models.transformer import batch_tensors
from signalprop.network.architecture import Architecture
from signalprop.network.embedding_and_head import Embedding
from signalprop.network.inputs import InputStatistics, from_frames, tensor_moments
from signalprop.network.parametrization import Parametrization
from signalprop.schemes import scheme
from signalprop.theory.embedding import embed, front_end

WHISPER: dict[str, Any] = {
    "kind": "encoder-decoder", "n_layers": 2, "d_model": 256, "n_heads": 4, "positions": "sinusoidal",
    "decoder_positions": "learned", "input": "frames", "vocab_size": 500, "seq_len": 100, "target_len": 20,
    "family": "whisper",
}  # fmt: skip
SPEECH: dict[str, Any] = WHISPER | {
    "decoder_positions": "sinusoidal", "conv_kernels": (5, 5), "conv_strides": (2, 2), "conv_channels": 320,
    "conv_activation": "glu", "embedding_scale": 16.0, "family": "speech_to_text",
}  # fmt: skip
KINDS = {"whisper": WHISPER, "speech": SPEECH}


def front(a: Architecture, name: str = "xavier", seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    made = build(scheme(name)(a), seed=seed, dtype=dtype).encoder
    assert made is not None and isinstance(made.embedding.front, FrontEnd)
    return made.embedding.front.requires_grad_(False)


def white(a: Architecture, batch: int = 4) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((batch, a.n_frames, a.frame_dim))


class TestFrontEnd:
    def test_whispers(self) -> None:
        a = Architecture(**WHISPER)
        module, x = front(a), torch.as_tensor(white(a))
        first, second = module.convolutions
        hidden = F.gelu(F.conv1d(x.mT, first.weight, first.bias, stride=1, padding=1))
        expected = F.gelu(F.conv1d(hidden, second.weight, second.bias, stride=2, padding=1)).mT
        torch.testing.assert_close(module(x), expected)
        assert module(x).shape == (4, 100, 256)

    @pytest.mark.parametrize(("kernels", "strides"), [((1,), (1,)), ((3, 5, 7), (2, 1, 3)), ((9, 3), (4, 2))])
    def test_frames_become_as_many_tokens_as_the_architecture_says(self, kernels: Any, strides: Any) -> None:
        a = Architecture(**WHISPER | {"conv_kernels": kernels, "conv_strides": strides, "seq_len": 7})
        assert front(a)(torch.zeros(1, a.n_frames, a.frame_dim, dtype=torch.float64)).shape == (1, 7, 256)

    def test_other_shapes_are_refused(self) -> None:
        model = build(scheme("xavier")(Architecture(**WHISPER)), seed=0)
        ids = torch.zeros(1, 5, dtype=torch.long)
        for bad in (torch.zeros(1, 200), torch.zeros(1, 200, 79), torch.zeros(1, 80, 200)):
            with pytest.raises(InputError, match=r"expected frames \(batch, frames, 80\)"):
                model(bad, decoder_tokens=ids)
        table = scheme("xavier")(Architecture(**WHISPER))
        short = replace(table, embedding=table.embedding.model_copy(update={"convolutions": (0.1,)}))
        with pytest.raises(InputError, match=r"has 1 convolutions .* the architecture has 2"):
            build(short)


@pytest.mark.parametrize(
    ("kind", "name"),
    some([("whisper", "xavier"), ("speech", "huggingface"), ("speech", "pytorch")], [("whisper", "xavier")]),
)
def test_moments_behind_the_front_end(kind: str, name: str) -> None:
    """Against 8 networks on white frames. Borders (kernel // 2 of 100 tokens) and overlaps are not in the theory."""
    a = Architecture(**KINDS[kind])
    x = white(a)
    table = scheme(name)(a)
    with torch.no_grad():
        outs = [front(a, name, seed)(torch.as_tensor(x)).numpy() for seed in range(8)]
    found = [tensor_moments(out) for out in outs]
    mean, variance, covariance = front_end(a, table.embedding, from_frames(x))
    measured = np.array([[m.mean, m.variance, m.covariance] for m in found])
    error = measured.std(0) / np.sqrt(8)
    assert abs(measured[:, 0].mean() - mean) < 4 * error[0] + 0.01 * np.sqrt(variance)
    assert measured[:, 1].mean() == pytest.approx(variance, rel=0.03)
    assert abs(measured[:, 2].mean() - covariance) < 4 * error[2] + 0.01 * variance


def test_a_convolution_of_biased_maps_by_hand() -> None:
    """It sums kernel * channels products of second moments; one draw of a bias serves all frames."""
    a = Architecture(**WHISPER | {"conv_kernels": (3,), "conv_strides": (1,), "conv_activation": "identity"})
    width, std, bias, (m, v, r) = 3 * a.convolution(0)[0], 0.2, 0.7, (0.5, 2.0, 0.3)
    embedding = Embedding(token=1.0, convolutions=(std,), convolution_biases=(bias,))
    found = front_end(a, embedding, InputStatistics(kind="frames", mean=m, variance=v, token_correlation=r))
    expected = [0.0, *(width * std**2 * (second + m**2) + bias**2 for second in (v, r * v))]
    assert found == pytest.approx(expected)


class TestStacks:
    def test_each_has_its_own_positions(self) -> None:
        a = Architecture(**WHISPER)
        model = build(scheme("huggingface")(a), seed=0)
        assert model.encoder.embedding.position is None and model.encoder.embedding.token is None
        table = model.decoder.embedding.position
        assert table is not None and table.weight.shape == (20, 256)
        assert float(table.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
        assert model.head is not None and model.head.weight is model.decoder.embedding.token.weight
        assert model.encoder.embedding.position_rms == pytest.approx(0.5**0.5)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_table_and_the_model_that_it_makes_are_the_same(self, kind: str) -> None:
        p = scheme("huggingface")(Architecture(**KINDS[kind]))
        assert Parametrization.from_json(p.to_json()) == p
        found = read_parametrization(build(p, seed=0)).embedding
        wanted = p.embedding
        assert found.convolutions == pytest.approx(wanted.convolutions, rel=0.02)
        assert found.position == pytest.approx(wanted.position) and found.scale == wanted.scale
        assert found.position_of(decoder=True) == pytest.approx(wanted.position_of(decoder=True), rel=0.05)

    def test_measured_and_simulated_profiles_agree(self) -> None:
        """Hooks on the whole network, and one sublayer at a time: the same batch and seed, without dropout."""
        a = Architecture(**SPEECH)
        p = scheme("xavier")(a)
        batch = default_batch(a, batch_size=2)
        found = measure(build(p, seed=3).eval(), batch)
        alone = simulate(p, batch=batch, n_seeds=1, seed=3, train_mode=False)
        for point in ("stream_in", "branch", "stream_out"):
            np.testing.assert_allclose(found.forward[point].variance, alone.forward[point].variance, rtol=1e-4)
            np.testing.assert_allclose(found.gradient[point].variance, alone.gradient[point].variance, rtol=1e-3)

    def test_a_class_is_read_from_frames(self) -> None:
        fields = WHISPER | {"kind": "encoder", "head": "classes", "n_classes": 7, "d_model": 32, "seq_len": 24}
        a = Architecture(**{k: v for k, v in fields.items() if k not in ("decoder_positions", "target_len")})
        assert simulate(scheme("xavier")(a), default_statistics(a), n_seeds=1, batch_size=2).gradient is not None
        batch = default_batch(a, batch_size=2)
        assert build(scheme("xavier")(a), seed=0)(**batch_tensors(batch)).logits.shape == (2, 7)


# Every field of an embedding counts in one of them.
ENTERING: dict[str, dict[str, Any]] = {
    "segments": {"n_segments": 2},
    "sinusoids": {"kind": "decoder", "positions": "sinusoidal"},
    "norm": {"n_segments": 2, "embedding_norm": True, "norm_eps": 0.5},
    "patches": {"input": "patches", "class_token": True, "head": "classes", "seq_len": 5, "patch_dim": 12},
    "decoder": {"kind": "encoder-decoder", "positions": "learned", "target_len": 6},
}


@pytest.mark.parametrize("name", ENTERING)
def test_the_kernel_that_enters_against_draws(name: str) -> None:
    """Entry by entry, to a 40th of the largest one; and the averages are those over its positions and pairs."""
    a = Architecture(**{"n_layers": 1, "d_model": 2048, "n_heads": 2, "seq_len": 6, "vocab_size": 40, **ENTERING[name]})
    sizes = {
        "token": 0.5, "position": 0.7, "segment": 0.8 * (a.n_segments > 1), "patch_bias": 0.6, "scale": 1.5,
        "norm_gain": 1.3, "decoder_position": 1.1,
    }  # fmt: skip
    p = scheme("xavier")(a)
    p = replace(p, embedding=p.embedding.model_copy(update=sizes))
    stack = "encoder" if a.kind == "encoder" else "decoder"
    ids, segments = np.array([[3, 7, 3, 3, 9, 7]]), np.array([[0, 0, 0, 1, 1, 1]])
    images = torch.randn(8, 4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.4
    read: tuple[torch.Tensor, ...] = (images,) if a.input == "patches" else (torch.tensor(ids), torch.tensor(segments))
    drawn = []
    for seed in range(8):
        x = Embeddings(p, stack, seed, torch.float64)(*read).detach().numpy()
        x -= x.mean(-1, keepdims=True)
        drawn.append(np.einsum("btd,bud->tu", x, x) / x.shape[-1] / len(x))
    if a.input == "patches":
        moments = torch.einsum("btd,bud->tu", images, images).numpy() / 96
        square, product = np.diagonal(moments).mean(), _between(moments)
        mean = float(images.mean())
        inputs = InputStatistics(
            kind="patches", mean=mean, variance=square - mean**2, second_moments=moments,
            token_correlation=(product - mean**2) / (square - mean**2),
        )  # fmt: skip
    else:
        equal = (_between(x[0][:, None] == x[0]) for x in (ids, segments))
        inputs = InputStatistics(
            tokens=ids, segments=segments, token_correlation=next(equal), segment_correlation=next(equal)
        )
    kernel = input_kernel(p, inputs, decoder=a.kind == "encoder-decoder")
    np.testing.assert_allclose(kernel, np.mean(drawn, 0), rtol=0, atol=kernel.max() / 40)
    averages = embed(a, p.embedding, inputs, decoder=a.kind == "encoder-decoder")
    if a.input == "patches":  # of averages alone the kernel is that of the mean patches
        without = input_kernel(p, replace(inputs, second_moments=None))
        for of in (np.diagonal, _between):
            assert np.mean(of(without)) == pytest.approx(np.mean(of(kernel)))
        assert np.ptp(np.diagonal(without)[1:]) == pytest.approx(0, abs=1e-12)
    close = 5e-3 if name == "sinusoids" else 1e-9  # whose rows' means differ a little
    assert averages.variance == pytest.approx(np.diagonal(kernel).mean(), rel=close)
    assert averages.covariance == pytest.approx(_between(kernel), rel=close)


def _between(kernel: np.ndarray) -> float:
    """The mean over pairs of different positions."""
    return float((kernel.sum() - np.trace(kernel)) / (kernel.size - len(kernel)))
