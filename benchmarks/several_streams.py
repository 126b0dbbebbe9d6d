"""Mixing matrices over depth, and what gate scales do to signal and gradient: docs/several-streams.md.

python -m benchmarks.several_streams
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import signalprop as sp
from signalprop.data.batches import default_batch
from signalprop.files.storage import write_text
from signalprop.kernels.ends import input_kernel
from signalprop.kernels.several import Kernels, stack_of
from signalprop.kernels.state import State
from signalprop.network.several import Streams
from signalprop.schemes.vanilla import unit_embedding
from signalprop.theory.gates import gates_of

PAGE = Path("docs/several-streams.md")
N, NETWORKS, TOKENS, DEPTHS = 4, 8, 64, (1, 2, 4, 8, 16)
LAYERS, WIDTH, SEEDS, DEEP, WIDE = 8, 256, 4, 32, 4096
INTRODUCTION = f"""# Several streams over depth

Written by `python -m benchmarks.several_streams`: do not edit. [How it is
derived](theory/network.md#several-streams).

## Products of mixing matrices

`DeepseekV4HyperConnection` of transformers at its own initialisation (weights 0.02, biases 0, scale 1; GLM-5.3's is
the same), and with other scales and a bias on the matrix's diagonal: {N} streams, {NETWORKS} networks, {TOKENS}
tokens. The product of the matrices of that many sublayers: what is left of differences between streams (root mean
square, of 1; predicted as κ^(k/2)), the median second singular value, and how far sums of its rows and columns are
from 1 at most. Sinkhorn ends with one of the two, and with 20 passes the other is off where logits are large.
"""
MATRICES = (
    "| width, scale, bias | std of logits | sublayers | left of differences | predicted | second singular value "
    "| sums off by |"
)
SIGNAL = f"""
## Signal and gradient

Decoders of {LAYERS} layers, width {WIDTH}, Xavier's weights, unit embeddings, on {TOKENS} tokens of real text, 2
sequences; {SEEDS} networks with gates equal to DeepSeek-V4's (tested) and, of mixing `independent`, to Hy4's:
variance of the last streams, share of it that is differences between streams, gradient at the first over the last
stream; predicted / measured, of one stream predicted. Below, {DEEP} layers, and predictions alone of width {WIDE}.
transformers starts gate scales at 1 in DeepSeek-V4 and GLM-5.3, at 0.01 in Hy4.
"""
HEADINGS = "| streams | last variance | of it differences | gradient, first over last | gradient of one stream |"
READING = """
## What it says

- **Scale 0.01 is one stream.** The softmax of equal logits is the average: the first matrix makes all streams equal,
  gates are ½ and 1, and what remains is a pre-norm network, to three digits. Four streams begin to differ only as
  gates are trained.
- **Scale 1 is not, and the less the wider.** Logits have the standard deviation 0.02 √(4 d): 0.64 at width 256, 2.6
  at 4096. Still mixing takes differences between streams away within two sublayers at the one, within ten at the
  other: the four streams hold what the last branches wrote, once more. A bias on the diagonal keeps them apart only
  beside a small scale: 98 % are left of 16 sublayers at bias 8 and scale 0.01, 2 % at bias 4 and scale 1.
- **It matters for the gradient, and little for the signal.** Gates send a gradient of their own: at the logits of width
  4096 the first gradient of 32 layers is twice that of one stream, measured and predicted, and grows with width and
  depth; the variance of the streams is 7 % larger (a third without a matrix, where differences add up). At scale 0.01
  both are those of one stream. So a model that transformers initialises with 1 starts with another gradient than one
  with 0.01, by a factor that its width sets.
"""


def mixing(width: int, scale: float, bias: float) -> list[str]:
    """Rows of the first table for one initialisation."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Config, DeepseekV4HyperConnection

    generator = torch.Generator().manual_seed(0)
    config = DeepseekV4Config(hidden_size=width, hc_mult=N)
    products = torch.eye(N, dtype=torch.float64).expand(NETWORKS, TOKENS, N, N)
    s = Streams(n=N, gate_scale=scale, mix_bias=bias)
    kept, rows = float(gates_of(s, width).mix[-1]), []
    with torch.no_grad():
        for depth in range(1, DEPTHS[-1] + 1):
            drawn = []
            for _ in range(NETWORKS):
                module = DeepseekV4HyperConnection(config)
                module.fn.normal_(0, 0.02, generator=generator)
                module.base.zero_()[2 * N :].view(N, N).fill_diagonal_(bias)
                module.scale.fill_(scale)
                stream = torch.randn(1, TOKENS, N, width, generator=generator)
                drawn.append(module(stream)[1][0].double().transpose(-1, -2))
            products = torch.stack(drawn) @ products
            if depth in DEPTHS:
                rest = products - products.mean(-1, keepdim=True)
                rest = rest - rest.mean(-2, keepdim=True)
                left = float((rest**2).sum((-1, -2)).mean() / (N - 1)) ** 0.5
                second = float(torch.linalg.svdvals(products)[..., 1].median())
                off = max(float((products.sum(k) - 1).abs().max()) for k in (-1, -2))
                name = f"{width}, {scale:g}, {bias:g}" if depth == 1 else ""
                std = f"{s.logit_std(width):.3g}" if depth == 1 else ""
                cells = (name, std, depth, f"{left:.2g}", f"{kept ** (depth / 2):.2g}", f"{second:.2g}", f"{off:.1g}")
                rows.append("| " + " | ".join(map(str, cells)) + " |")
    return rows


def table(streams: object, layers: int, width: int) -> sp.Parametrization:
    """The decoder with these streams."""
    a = sp.Architecture(
        kind="decoder", n_layers=layers, d_model=width, n_heads=width // 64, seq_len=TOKENS, vocab_size=2000,
        norm="rmsnorm", norm_bias=False, bias=False, positions="rotary", tied_embeddings=False, streams=streams,
    )  # fmt: skip
    return replace(sp.scheme("xavier")(a), embedding=unit_embedding(a))


def differences(p: sp.Parametrization, inputs: sp.InputStatistics) -> float:
    """Share of the last streams' variance that is differences between streams, predicted."""
    stack = stack_of(p)
    last = stack.run(stack.enter(State(input_kernel(p, inputs)).rescaled()), range(stack.n))
    assert isinstance(last, Kernels)
    common, whole = (np.trace(x) for x in (stack.connections.head(last.parts), last.kernel))  # type: ignore[attr-defined]
    return float(1 - common / whole)


def measured_differences(p: sp.Parametrization, batch: sp.Batch) -> float:
    """The same of networks."""
    shares = []
    for seed in range(SEEDS):
        model = sp.build(p, seed=seed)
        seen: list[torch.Tensor] = []
        model.sublayers()[-1].register_forward_hook(lambda _, __, out, seen=seen: seen.append(out))
        with torch.no_grad():
            model(torch.as_tensor(batch.inputs))
        each = seen[0].unflatten(-1, (N, -1))
        shares.append(float(each.sub(each.mean(-2, keepdim=True)).square().mean() / each.square().mean()))
    return float(np.mean(shares))


def main() -> None:
    lines = [INTRODUCTION, MATRICES, "| --- | --- | --- | --- | --- | --- | --- |"]
    for width, scale, bias in ((256, 1, 0), (4096, 1, 0), (4096, 0.01, 0), (4096, 1, 4), (4096, 0.01, 8)):
        lines += mixing(width, scale, bias)
    lines += [SIGNAL, HEADINGS, "| --- | --- | --- | --- | --- |"]
    kinds: dict[str, dict[str, object]] = {
        "`mhc`, scale 1": {}, "`mhc`, scale 1, bias 4": {"mix_bias": 4.0}, "`mhc`, scale 4": {"gate_scale": 4.0},
        "`mhc`, scale 0.01": {"gate_scale": 0.01}, "`independent`, scale 1": {"mixing": "independent"},
        "`independent`, scale 0.01": {"mixing": "independent", "gate_scale": 0.01},
    }  # fmt: skip
    one = table(None, LAYERS, WIDTH)
    batch = default_batch(one.architecture, batch_size=2)
    inputs = batch.statistics(one.architecture)
    alone = sp.predict(one, inputs).gradient_ratio
    for name, fields in kinds.items():
        p = table(fields, LAYERS, WIDTH)
        seen = sp.average([sp.measure(sp.build(p, seed=seed), batch) for seed in range(SEEDS)])
        profile = sp.predict(p, inputs)
        pair = [x.forward["stream_out"].variance[-1] for x in (profile, seen)]
        share = differences(p, inputs), measured_differences(p, batch)
        lines.append(
            f"| {name} | {pair[0]:.2f} / {pair[1]:.2f} | {share[0]:.3f} / {share[1]:.3f} | "
            f"{profile.gradient_ratio:.2f} / {seen.gradient_ratio:.2f} | {alone:.2f} |"
        )
    lines += deep(inputs, batch, kinds)
    write_text(PAGE, "\n".join([*lines, READING]))


def deep(inputs: sp.InputStatistics, batch: sp.Batch, kinds: dict[str, dict[str, object]]) -> list[str]:
    """Rows of deep networks: measured at the small width with logits of the large one, and predicted at that."""
    strong = {"mixing": "mhc", "gate_scale": (WIDE / WIDTH) ** 0.5}
    p = table(strong, DEEP, WIDTH)
    profile, seen = sp.predict(p, inputs), sp.average([sp.measure(sp.build(p, seed=k), batch) for k in range(SEEDS)])
    pair = [x.forward["stream_out"].variance[-1] for x in (profile, seen)]
    share = differences(p, inputs), measured_differences(p, batch)
    lines = [
        f"| `mhc`, scale {strong['gate_scale']:g}; {DEEP} layers | {pair[0]:.2f} / {pair[1]:.2f} | {share[0]:.3f} / "
        f"{share[1]:.3f} | {profile.gradient_ratio:.0f} / {seen.gradient_ratio:.0f} | "
        f"{sp.predict(table(None, DEEP, WIDTH), inputs).gradient_ratio:.0f} |"
    ]
    deep_alone = sp.predict(table(None, DEEP, WIDE), inputs).gradient_ratio
    for name, fields in kinds.items():
        if fields.get("gate_scale", 0) == 4.0:
            continue
        p = table(fields, DEEP, WIDE)
        profile = sp.predict(p, inputs)
        lines.append(
            f"| {name}; {DEEP} layers, width {WIDE} | {profile.forward['stream_out'].variance[-1]:.2f} | "
            f"{differences(p, inputs):.3f} | {profile.gradient_ratio:.0f} | {deep_alone:.0f} |"
        )
    return lines


if __name__ == "__main__":
    main()
