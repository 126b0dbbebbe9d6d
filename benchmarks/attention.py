"""What shaped attention costs: beside plain attention, and its kernel recursion beside dense products.

    python -m benchmarks.attention [--rounds N] [--json FILE]

Attention: forward and backward of 8 heads of width 64 over 2048 tokens (4 sequences of 512, or one of 2048), B and D
made anew in every pass, over plain causal `scaled_dot_product_attention`; beside it the same call with a causal mask
as a tensor, which is what a bias costs at least. Models: a step of a built decoder (12 layers, width 256, 4 heads) with
shaped attention over the same without. On a GPU in bfloat16, where there is one; else on one thread, CPU time.

Kernels: a step A K A^T for T = 2048 over the dense product of three matrices (CPU time), and 100 attention-only blocks
at T = 1024 (seconds).

Everything is interleaved, so that a busy machine slows all alike; ratios are medians over rounds with their standard
errors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import signalprop as sp
from benchmarks.timing import summary, write_rows
from signalprop.kernels import schedules
from signalprop.kernels.shaping import ESPA, USPA, AttentionShape, kernel_step, uniform_kernel
from signalprop.models.shaping import Positions, shaped_attention, torch_shape
from signalprop.parametrization import Shaping

HEADS, WIDTH, TOKENS = 8, 64, 2048
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


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


def ratios(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """The time of every step over that of the first, and `seconds` of the first."""
    times = np.zeros((rounds, len(steps)))
    for run in steps.values():
        run()
    runs = list(steps.values())
    for i in range(rounds):
        for j in np.random.default_rng(i).permutation(len(runs)):
            began = clock()
            runs[j]()
            times[i, j] = clock() - began
    found = (times / times[:, :1]).T.tolist()
    out = {name: summary(column) for name, column in zip(steps, found, strict=True)}
    out[next(iter(steps))]["seconds"] = float(np.median(times[:, 0]))
    return out


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


def model_steps(length: int) -> dict[str, Callable[[], None]]:
    """Training steps, without the optimizer, of built decoders."""
    ids = torch.randint(0, 1000, (TOKENS // length, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    steps = {}
    for name in ("plain", "e-spa", "u-spa"):
        architecture = sp.Architecture(
            kind="decoder", n_layers=12, d_model=256, n_heads=4, seq_len=length, vocab_size=1000, positions="none",
            norm_placement="none", final_norm=False,
        )  # fmt: skip
        table = sp.scheme("u-spa" if name == "plain" else name, activation="keep", repeats=0.0)(architecture)
        if name == "plain":
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
        found = ratios(steps, rounds)["step"]
        print(f"kernel step T 2048  {name:14} dense / step {1 / found['median']:6.1f}   ({line(found)} of dense)")
        rows.append({"what": "kernel step", "shape": name, "length": 2048, **found})
        seconds = []
        for _ in range(3):
            began, k = time.perf_counter(), np.eye(1024)
            for block in stack(name, 100):
                k = kernel_step(block, k)
            seconds.append(time.perf_counter() - began)
        print(f"100 blocks  T 1024  {name:14} {sorted(seconds)[1]:.2f} s")
        rows.append({"what": "100 blocks", "shape": name, "length": 1024, "seconds": sorted(seconds)[1]})
    return rows


def line(found: dict[str, float]) -> str:
    return f"{found['median']:.3f} +- {found['standard_error']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for what, make, lengths, rounds in (
        ("attention", attention_steps, (512, 2048), arguments.rounds),
        ("model", model_steps, (128, 512), max(5, arguments.rounds // 4)),
    ):
        for length in lengths:
            for name, found in ratios(make(length), rounds).items():
                extra = f"   {found['seconds'] * 1000:.1f} ms" if "seconds" in found else ""
                print(f"{what:9} T {length:4}  {DEVICE.type}  {name:24} {line(found)}{extra}", flush=True)
                rows.append({"what": what, "length": length, "device": DEVICE.type, "name": name, **found})
    rows += kernel_rows(max(5, arguments.rounds // 4))
    write_rows(arguments.json, rows)


if __name__ == "__main__":
    main()
