"""What shaped attention costs: beside plain attention, and its kernel recursion beside dense products.

    python -m benchmarks.attention [--rounds 16] [--json FILE]

On a GPU in bfloat16, where there is one; else on one thread, CPU time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import signalprop as sp
from benchmarks.page import table
from benchmarks.timing import command_line, one_thread, ratios, shown, take_turns, write_rows
from signalprop.kernels import schedules
from signalprop.kernels.shaping import ESPA, USPA, AttentionShape, kernel_step, uniform_kernel
from signalprop.models.shaping import Positions, shaped_attention, torch_shape
from signalprop.network.parametrization import Shaping

HEADS, WIDTH, TOKENS = 8, 64, 2048
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32

TITLE = "Shaped attention"
ABOUT = f"""
`python -m benchmarks.attention`: causal attention with B and D (E-SPA, U-SPA; made anew in every pass), over plain
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


def compared(steps: dict[str, Callable[[], Any]], rounds: int, base: str) -> dict[str, dict[str, float]]:
    """The time of every step over that of `base`, and the `seconds` of that one."""
    seconds = take_turns(steps, rounds, clock=clock)
    return {base: {"seconds": statistics.median(seconds[base])}, **ratios(seconds, base)}


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


def kernel_rows(rounds: int) -> list[dict[str, Any]]:
    """Steps of a kernel at T = 2048, and 100 blocks at T = 1024."""
    rows: list[dict[str, Any]] = []
    for name in ("e-spa", "u-spa"):
        shape, k = middle(name), uniform_kernel(0.02, 2048)
        a = shape.matrix(2048)
        steps = {"dense": lambda a=a, k=k: a @ k @ a.T, "step": lambda shape=shape, k=k: kernel_step(shape, k)}
        found = compared(steps, rounds, "dense")
        rows.append({"what": "kernel step", "name": name, "length": 2048, **found["dense"], **found["step"]})
        began, k = time.process_time(), np.eye(1024)
        for block in stack(name, 100):
            k = kernel_step(block, k)
        rows.append({"what": "100 blocks", "name": name, "length": 1024, "seconds": time.process_time() - began})
    return rows


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """The tables of the page."""
    cells = []
    for row in rows:
        seconds = f"{1000 * row['seconds']:.1f} ms" if "seconds" in row else ""
        cells.append([row["what"], str(row["length"]), row["name"], shown(row) if "median" in row else "", seconds])
    columns = ["what", "tokens", "how", "time over plain (kernel step: over dense)", "plain, dense, all blocks"]
    return "\n\n".join([table(columns, cells), READING])


def main() -> None:
    """Command line of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    arguments = parser.parse_args()
    one_thread()
    rows: list[dict[str, Any]] = []
    few = max(5, arguments.rounds // 2)
    measured = [("attention", n, attention_steps(n), arguments.rounds) for n in (512, 2048)]
    measured.append(("model", 256, model_steps(), few))
    for what, length, steps, rounds in measured:
        for name, found in compared(steps, rounds, "plain").items():
            rows.append({"what": what, "length": length, "device": DEVICE.type, "name": name, **found})
    rows += kernel_rows(few)
    print(section(rows))
    write_rows(arguments.json, rows)


if __name__ == "__main__":
    main()
