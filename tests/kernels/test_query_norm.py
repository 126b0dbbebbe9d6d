"""QK-norm on tokens of different sizes, against drawn attention."""

from __future__ import annotations

import numpy as np
import torch

import signalprop as sp
from signalprop.kernels.stack import Stack

SIZES = np.geomspace(2.0, 0.05, 16)
ALIKE = 0.4  # correlation of tokens
WIDTH, HEADS, EPS = 128, 2, 1e-2


def network() -> sp.Parametrization:
    a = sp.Architecture(
        kind="decoder", n_layers=1, d_model=WIDTH, n_heads=HEADS, seq_len=len(SIZES), vocab_size=50,
        norm="rmsnorm", norm_placement="res-post", qk_norm=True, norm_eps=EPS, dropout=0.0,
    )  # fmt: skip
    return sp.scheme("xavier")(a)


def drawn(p: sp.Parametrization, kernel: np.ndarray, gradient: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Mean kernel and its standard error, of the branch and of the gradient at its input."""
    torch.manual_seed(0)
    n, t, head = 400, len(SIZES), WIDTH // HEADS
    root, root_back = (torch.linalg.cholesky(torch.tensor(k)).float() for k in (kernel, gradient))
    x = (root @ torch.randn(n, t, WIDTH)).requires_grad_()
    std = {role: float(p.weights[role][0]) for role in ("query", "key", "value", "output")}

    def through(role: str, read: torch.Tensor) -> torch.Tensor:
        return read @ (std[role] * torch.randn(n, WIDTH, WIDTH))

    def heads(read: torch.Tensor) -> torch.Tensor:
        return read.view(n, t, HEADS, head).transpose(1, 2)

    def normed(read: torch.Tensor) -> torch.Tensor:
        return heads(read) * (heads(read).square().mean(-1, keepdim=True) + EPS).rsqrt()

    query, key, value = normed(through("query", x)), normed(through("key", x)), heads(through("value", x))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    branch = through("output", out.transpose(1, 2).reshape(n, t, WIDTH))
    (branch * (root_back @ torch.randn(n, t, WIDTH))).sum().backward()
    kernels = [(signal.double() @ signal.double().mT / WIDTH).numpy() for signal in (branch.detach(), x.grad)]
    return [(k.mean(0), k.std(0) / n**0.5) for k in kernels]


def test_every_token_is_divided_by_its_own_size() -> None:
    p, root = network(), np.sqrt(SIZES)
    pairs = ALIKE + (1 - ALIKE) * np.eye(len(SIZES))
    kernel, gradient = pairs * np.outer(root, root), np.eye(len(SIZES)) + 0.2
    (branch, error), (back, error_back) = drawn(p, kernel, gradient)
    made = Stack(p).branches[0]
    scale = np.sqrt(np.outer(branch.diagonal(), branch.diagonal()))
    assert (np.abs(made.forward(0, kernel) - branch) < 0.03 * scale + 4 * error).all()
    found, expected = made.backward(0, kernel, gradient).diagonal(), back.diagonal()
    assert (np.abs(np.log(found / expected)) < 0.1 + 4 * error_back.diagonal() / expected).all()
