"""What shaped attention costs: beside plain attention, and its kernel recursion beside dense products.

On a GPU in bfloat16, where there is one; else on one thread, CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import signalprop as sp
from benchmarks.timing import compared, take_turns
from signalprop.kernels import schedules
from signalprop.kernels.shaping import ESPA, USPA, AttentionShape, kernel_step, uniform_kernel
from signalprop.models.shaping import shaped_attention, torch_shape
from signalprop.models.token_positions import Positions
from signalprop.network.parametrization import Shaping

HEADS, WIDTH, TOKENS = 8, 64, 2048
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32

TITLE = "Shaped attention"
ABOUT = f"""
`python -m benchmarks attention`: causal attention with B and D (E-SPA, U-SPA; made anew in every pass), over plain
causal `scaled_dot_product_attention`: forward and backward of {HEADS} heads of width {WIDTH} over {TOKENS} tokens
(several sequences of 512, or one of 2048). Beside it the same call with its causal mask as a tensor, which is what a
bias costs at least. Models: forward and backward of a built decoder (12 layers, width 256, 4 heads) over two sequences
of 256 tokens.

Kernels (float64): a step A K Aᵀ over the dense product of the three matrices.
"""
READING = """\
The floor is the call with its mask as a tensor: PyTorch's CPU kernel does not skip hidden keys where there is a bias.
Whole causal sequences beyond 256 tokens therefore go through it in blocks of 256 queries, which is why shaped
attention can cost less than that call, and for short sequences less than the plain one. On a GPU, compiled, with
padding or with a cache it is one call.

A dense product of three T × T matrices is 4 T³ operations; the matrices of E-SPA and U-SPA have rank one and two
besides a triangle, so that a step needs a few passes over T² numbers."""


def stack(name: str, n_layers: int) -> list[AttentionShape]:
    """The matrices of a stack with the papers' last kernels."""
    if name == "u-spa":
        return [USPA(float(a), float(b)) for a, b in pairwise(schedules.rho_schedule(n_layers, 0.8))]
    repeats = 0.02 if name == "e-spa repeats" else 0.0
    return [ESPA(float(a), float(b), repeats=repeats) for a, b in pairwise(schedules.decay_schedule(n_layers, 0.005))]


def middle(name: str) -> AttentionShape:
    """The matrix in the middle of 36 layers."""
    return stack(name, 36)[18]


def clock() -> float:
    """CPU time of this process; with a GPU, wall time once it is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def attention_steps(length: int) -> dict[str, Callable[[], None]]:
    """Forward and backward passes of one attention."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (
        torch.randn(TOKENS // length, HEADS, length, WIDTH, generator=generator).to(DEVICE, DTYPE) for _ in range(4)
    )
    for x in (q, k, v):
        x.requires_grad_()
    at = Positions.of_length(length, DEVICE)
    mask = torch.full((length, length), -1e30, device=DEVICE, dtype=DTYPE).triu(1)[None, None]

    def step(forward: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            forward().backward(g)
            q.grad = k.grad = v.grad = None

        return run

    steps = {
        "plain": step(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        "plain again": step(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        "causal mask as a tensor": step(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)),
    }
    for name in ("e-spa", "u-spa", "e-spa repeats"):
        made = torch_shape([middle(name)], length)
        assert made is not None
        steps[name] = step(lambda made=made: shaped_attention(made, q, k, v, at))
    return steps


def model_steps() -> dict[str, Callable[[], None]]:
    """Forward and backward passes of built decoders."""
    length = 256
    ids = torch.randint(0, 1000, (512 // length, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    steps = {}
    for name in ("plain", "plain again", "e-spa", "u-spa"):
        plain = name.startswith("plain")
        architecture = sp.Architecture(
            kind="decoder", n_layers=12, d_model=256, n_heads=4, seq_len=length, vocab_size=1000, positions="none",
            norm_placement="none", final_norm=False,
        )  # fmt: skip
        table = sp.scheme("u-spa" if plain else name, activation="keep", repeats=0.0)(architecture)
        if plain:
            table = replace(table, shaping=Shaping())
        model = sp.build(table, seed=0).to(DEVICE, DTYPE)

        def run(model: Any = model) -> None:
            model(ids, targets=ids).loss.backward()
            model.zero_grad()

        steps[name] = run
    return steps


def kernel_steps() -> str:
    """Steps of a kernel at T = 2048, over the dense product."""
    k = uniform_kernel(0.02, 2048)
    shapes = {name: middle(name) for name in ("e-spa", "u-spa")}
    a = shapes["e-spa"].matrix(2048)
    steps: dict[str, Callable[[], Any]] = {"dense": lambda: a @ k @ a.T}
    steps |= {name: lambda shape=shape: kernel_step(shape, k) for name, shape in shapes.items()}
    return compared("A step of a kernel of 2048 tokens.", take_turns(steps, 8), "dense")


def measured() -> Iterator[str]:
    """The section of the page."""
    for length in (512, 2048):
        seconds = take_turns(attention_steps(length), 16, clock=clock)
        yield compared(f"Attention over {length} tokens ({DEVICE.type}).", seconds, "plain")
    yield compared("A decoder of 12 layers, 256 tokens.", take_turns(model_steps(), 8, clock=clock), "plain")
    yield kernel_steps()
