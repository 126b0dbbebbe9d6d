"""Shaped attention in PyTorch: the matrices of `signalprop.kernels.causal_shaping`, for any mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from signalprop.kernels.causal_shaping import ESPA, USPA, ALiBi, AttentionShape
from signalprop.models.shaping import Positions, TorchShape, shaped_attention, torch_shape
from signalprop.models.sublayers import torch_shapes
from signalprop.network.architecture import Architecture
from signalprop.schemes import scheme

N = 23
SHAPES: dict[str, AttentionShape] = {
    "first": ESPA(0.0, 0.6),
    "later": ESPA(0.6, 0.8),
    "slow": ESPA(0.9, 0.995),
    "beside a skip": ESPA(0.3, 0.7, gain=0.5),
    "negative zero": ESPA(-0.2, 0.7, gain=0.6),
    "identity": ESPA(0.6, 0.6),
    "diagonal": ESPA(0.0, 0.0, gain=0.7),
    "repeats": ESPA(0.0, 0.5, repeats=0.1),
    "repeats later": ESPA(0.5, 0.9, repeats=0.05),
    "uniform": USPA(0.0, 0.3),
    "uniform later": USPA(0.3, 0.8),
    "uniform identity": USPA(0.4, 0.4),
}
every_shape = pytest.mark.parametrize("name", SHAPES)


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attend(shape: TorchShape, v: Tensor, at: Positions | None = None) -> Tensor:
    """Shaped attention at zero scores."""
    return shaped_attention(shape, torch.zeros_like(v), torch.zeros_like(v), v, at)


def made(name: str, length: int = 2 * N) -> TorchShape:
    shape = torch_shape([SHAPES[name]], length)
    assert shape is not None
    return shape


def matrix(name: str, n: int = N) -> Tensor:
    return torch.from_numpy(np.array(SHAPES[name].matrix(n)))


@every_shape
@settings(max_examples=8)
@given(left=st.integers(0, 9), right=st.integers(0, 9), length=st.integers(1, N))
def test_padding_changes_nothing(name: str, left: int, right: int, length: int) -> None:
    v = values(3, 1, 1, length, 4)
    expected = matrix(name, length) @ v
    total = left + length + right
    keep = torch.zeros(2, total, dtype=torch.bool)
    keep[0, left : left + length] = True
    keep[1, :] = True
    padded = values(4, 2, 1, total, 4)
    padded[0, :, left : left + length] = v[0]
    out = attend(made(name), padded, Positions.of(keep))
    torch.testing.assert_close(out[:1, :, left : left + length], expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(out[1], matrix(name, total) @ padded[1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_long_sequences_go_in_blocks(name: str) -> None:
    n = 600
    shape = SHAPES[name]
    torched = torch_shape([shape], n)
    assert torched is not None
    q, k, v = (values(i, 1, 2, n, 4).requires_grad_() for i in (20, 21, 22))
    found = shaped_attention(torched, q, k, v)
    keep = torch.ones(1, n, dtype=torch.bool)
    whole = shaped_attention(torched, q, k, v, Positions.of(keep))
    torch.testing.assert_close(found, whole, rtol=1e-11, atol=1e-12)
    g = values(23, 1, 2, n, 4)
    for mine, other in zip(*(torch.autograd.grad(x, (q, k, v), g) for x in (found, whole)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", list(SHAPES))
def test_tables_grow_with_the_sequence(name: str) -> None:
    v = values(7, 1, 1, 3 * N, 4)
    shape = made(name, 5)
    for n in (4, N, N + 1, 3 * N):
        expected = matrix(name, n) @ v[:, :, :n]
        found = attend(shape, v[:, :, :n])
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
@every_shape
def test_scores_and_other_biases_stand_beside_b(name: str, padded: bool) -> None:
    """D softmax(scores + B + bias) V, written out, with the gradient of every input."""
    q, k, v = (values(i, 2, 3, N, 5).requires_grad_() for i in (8, 9, 10))
    bias = values(11, 1, 3, N, N).requires_grad_()
    keep = torch.ones(2, N, dtype=torch.bool)
    keep[1, 17:] = not padded
    at = Positions.of(keep) if padded else None
    found = shaped_attention(made(name), q, k, v, at, added=bias, scale=0.7)[keep[:, None].expand(2, 3, N)]

    total = []
    for b, n in enumerate(keep.sum(1).tolist()):
        a = matrix(name, n)
        scores = 0.7 * q[b, :, :n] @ k[b, :, :n].mT + bias[0, :, :n, :n] + a.log()
        total.append((a.sum(1, keepdim=True) * scores.softmax(-1) @ v[b, :, :n]).transpose(0, 1))
    expected = torch.cat(total).flatten(0, 1)
    found = torch.cat([found[: 3 * N].view(3, N, 5), found[3 * N :].view(3, -1, 5)], 1).transpose(0, 1).flatten(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    weights = values(12, *found.shape)
    ours = torch.autograd.grad((found * weights).sum(), (q, k, v, bias))
    theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v, bias))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


def test_alibi_has_one_slope_per_head() -> None:
    shapes = ALiBi.heads(8)
    shape = torch_shape(shapes, N)
    assert shape is not None
    v = values(13, 2, 8, N, 4)
    expected = torch.stack([torch.from_numpy(one.matrix(N)) for one in shapes]) @ v
    torch.testing.assert_close(attend(shape, v), expected, rtol=1e-12, atol=1e-12)
    lag = np.subtract.outer(np.arange(N), np.arange(N))
    for head in range(8):
        bias = shape.at(N, None, torch.zeros(1))[0][0, head].numpy()
        slopes = bias - np.diag(bias)[:, None]
        np.testing.assert_allclose(slopes[lag >= 0], -(2.0 ** -(head + 1) * lag)[lag >= 0], rtol=1e-5, atol=1e-6)


def test_sublayers_of_one_shape_share_their_tables() -> None:
    a = Architecture(kind="decoder", n_layers=3, d_model=16, n_heads=2, seq_len=8, vocab_size=9, positions="alibi")
    first, *others = [shape for shape in torch_shapes(scheme("xavier")(a)) if shape is not None]
    assert len(others) == 2 and all(other is first for other in others)
