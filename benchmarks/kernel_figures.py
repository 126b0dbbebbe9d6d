"""Token kernels as the SPA paper draws them: docs/kernels.md and its pictures.

python -m benchmarks.kernel_figures    # about two minutes on an idle core
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from signalprop.files.storage import read_json, write_bytes, write_text
from signalprop.kernels.gallery import e_spa, figure_6, figure_7, u_spa, uncorrected
from signalprop.kernels.shaping import uniform_kernel
from signalprop.kernels.trace import Trace, trace
from signalprop.network.architecture import Architecture
from signalprop.report.kernel_plots import curves, diagonal_bands, heat_maps, kernel_row
from signalprop.schemes import scheme
from signalprop_lab.reproductions.kernels import DEPTHS, LENGTH, REPEATS, sampled_kernel, sequences

PAGE, PICTURES = Path("docs/kernels.md"), Path("docs/pictures")
# What an independent simulation gives, to as many digits as it was noted with; the tests read it too.
REFERENCE = Path("docs/kernels.json")
SAMPLES = 32


# --- the page ---------------------------------------------------------------------------------------------------------


def average_lines(reference: dict[str, Any]) -> list[str]:
    lines = [
        "| configuration | block 1 | 10 | 30 | 100 | collapse: rank, cosines |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, p in (figure_7() | uncorrected()).items():
        found = trace(p, uniform_kernel(REPEATS, LENGTH), at=DEPTHS, backward=False, matrices="none")
        cells = [
            f"{cosine(float(found.forward.distance[depth]))} ({cosine(1 - theirs)})"
            for depth, theirs in zip(DEPTHS, reference["configurations"][name]["average"], strict=True)
        ]
        where = [str(depth) for depth in (found.rank_collapse_depth, found.collapse_depth) if depth is not None]
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(where) or 'none'} |")
    return lines


def cosine(distance: float) -> str:
    """Four digits of a cosine, or of what it lacks to 1."""
    if distance >= 1e-4:
        return f"{1 - distance:.4f}"
    return "1" if distance < 1e-15 else f"1 − {distance:.1e}".replace("e-0", "e-")


def sampled_lines(reference: dict[str, Any]) -> list[str]:
    lines = [
        "| configuration | mean cosine (sd) | lag 1 / 50 | smallest | effective rank | diagonal [min, max] |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, p in (figure_7() | uncorrected()).items():
        print(f"{SAMPLES} sequences: {name}", flush=True)
        found = trace(p, inputs=sequences(REPEATS, SAMPLES), at=[100], backward=False, matrices="none")
        assert found.forward_sd is not None
        ours = {key: float(column[-1]) for key, column in found.forward.columns().items()}
        ours["mean_cosine_sd"] = float(found.forward_sd["mean_cosine"][-1])
        lines.append(f"| {name} | {' | '.join(sampled_cells(ours))} |")
        lines.append(f"| | {' | '.join(f'({cell})' for cell in sampled_cells(reference['configurations'][name]))} |")
    return lines


def sampled_cells(found: dict[str, float]) -> list[str]:
    mean, low, high = (f"{found[f'diagonal_{which}']:.3g}" for which in ("mean", "min", "max"))
    return [
        f"{found['mean_cosine']:.3f} ({found['mean_cosine_sd']:.3f})",
        f"{found['lag_1']:.3f} / {found['lag_50']:.3f}",
        f"{found['min_cosine']:.3f}",
        f"{found['effective_rank']:.2f}",
        f"{mean} [{low}, {high}]",
    ]


def diagonal_lines(reference: dict[str, Any]) -> list[str]:
    depths, n = reference["figure_6"]["depths"], reference["figure_6"]["sequences"]
    lines = [f"| E-SPA, {n} sequences | block {' | '.join(map(str, depths))} |", "| --- |" + " --- |" * len(depths)]
    for name, p in figure_6().items():
        f = trace(p, inputs=sequences(0.05, n), backward=False, rank=False, matrices="none").forward
        theirs = reference["figure_6"][name]
        ours = [f"{f.diagonal_mean[depth]:.2f} ({f.diagonal_sd[depth]:.2f})" for depth in depths]
        said = [f"{mean:.2f} ({sd:.2f})" for mean, sd in zip(theirs["mean"], theirs["sd"], strict=True)]
        lines += [f"| {name} | {' | '.join(ours)} |", f"| independent simulation | {' | '.join(said)} |"]
    return lines


def speed_lines() -> list[str]:
    lines = ["| 100 blocks, T = 1,024 | forward | with the gradient |", "| --- | --- | --- |"]
    whole = scheme("e-spa")(Architecture.preset("gpt2", n_layers=100, seq_len=1024, dropout=0.0))
    networks = {
        "E-SPA, attention only": e_spa(100, 1024, REPEATS),
        "U-SPA, attention only": u_spa(100, 1024, REPEATS),
        "E-SPA, GPT-2 with its feed-forwards": whole,
    }
    for name, p in networks.items():
        cells = []
        for backward in (False, True):
            begun = time.process_time()
            trace(p, uniform_kernel(REPEATS, 1024), backward=backward, rank=False, matrices="none")
            cells.append(f"{time.process_time() - begun:.1f} s")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


# --- pictures ---------------------------------------------------------------------------------------------------------


def save(name: str, draw: Callable[[], Any]) -> None:
    """A PNG of few colours: a third of the size, and the eye sees no difference."""
    from PIL import Image

    buffer, small = io.BytesIO(), io.BytesIO()
    draw().savefig(buffer, format="png")
    buffer.seek(0)
    Image.open(buffer).convert("RGB").quantize(160, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    PICTURES.mkdir(exist_ok=True)
    write_bytes(PICTURES / name, small.getvalue())


def pictures() -> None:
    """Figures 1 and 7 in one, their numbers over depth, figures 5 and 6."""
    one = sequences(REPEATS, 1)
    traces: dict[str, Trace] = {name: trace(p, inputs=one, at=DEPTHS) for name, p in figure_7().items()}
    title = "Attention only, one sampled sequence, r = 0.02; above each panel its mean cosine"
    save("kernels-figure-7.png", lambda: heat_maps(traces, at=DEPTHS, title=title))
    save("kernels-curves.png", lambda: curves(traces, title="The same networks: numbers over depth"))
    inputs = {f"r = {r:g}": sampled_kernel(r) for r in (0.01, 0.02, 0.05, 0.1, 0.2)}
    save("kernels-figure-5.png", lambda: kernel_row(inputs, title="Kernels of sampled inputs, T = 100"))
    once = sequences(0.05, 1)
    bands = {name: trace(p, inputs=once, backward=False) for name, p in figure_6().items()}
    save(
        "kernels-figure-6.png",
        lambda: diagonal_bands(bands, title="E-SPA, one sampled sequence, r = 0.05, last gamma = 0.02"),
    )


TEXT = """# Kernel traces

Written by `python -m benchmarks.kernel_figures`.

The kernel of a stream is the T × T matrix $\\Sigma_{{ij}} = x_i\\cdot x_j/d$: its diagonal is the variance at each
position, and what stands off it says which positions have become alike. A *trace* follows it from the input through
every layer, and the kernel of the gradient back. [`predict`](cli.md#predict) gives averages of these matrices; the
trace gives the matrices, and numbers that averages hide: near and far positions, single positions, rank. It is exact
for infinite width where attention is shaped or has no scores, and as good as the [`kernel`
fidelity](theory/kernels.md) where scores are random.

```sh
signalprop kernel gallery --layers 20 --seq-len 40 --at 1,5,20 --plot kernels.png --plot-curves curves.png
signalprop kernel "gpt2 xavier" "gpt2 xavier norm=none" --layers 12 --seq-len 64 --attention-only --input text
```

`gallery` stands for the seven networks below; any others are written `'ARCH SCHEME KEY=VALUE ...'` ([all
options](cli.md#kernel)). In Python:

```python
import signalprop as sp

architecture = sp.Architecture.preset("gpt2", n_layers=12, seq_len=64)
network = sp.attention_only(sp.scheme("xavier")(architecture))
trace = sp.trace(network, inputs=sp.InputStatistics(token_correlation=0.02), at=[1, 6, 12])

print(trace.forward.mean_cosine[[1, 6, 12]])  # off the diagonal, behind layers 1, 6 and 12
print(trace.forward.lags[1][12], trace.forward.lags[50][12])  # cosine of neighbours, and of positions 50 apart
print(trace.forward.effective_rank[12], trace.collapse_depth)
print(trace.cosines(12).shape, trace.gradients[1].shape)  # the matrices
```

A kernel may also be given: `sp.trace(network, kernel)` with any positive semi-definite matrix, such as
`signalprop.probes.input_kernels(model, batch)` of a live model.

## How to read it

| number | meaning |
| --- | --- |
| mean cosine | of two different positions; 1: all say the same. `distance` is 1 minus it, exact down to 1e-16 |
| lag k | mean cosine of positions k apart; lag 1 above lag 50 is a recency bias |
| effective rank | e to the entropy of the eigenvalues of the normalised kernel / T: from 1 (one direction) to T |
| diagonal | raw variance of the stream: mean, standard deviation, smallest and largest over positions |
| gradient | the same of the gradient kernel, relative to its mean diagonal at the top |
| rank collapse | first depth with 1 − mean cosine below 1e-6, and first with effective rank below 1.01 |

Effective ranks take O(T³): they come at all depths up to 128 tokens, at the depths asked for up to 1,024, and with
`rank=True` everywhere.

Inputs: the average over sequences of which a share r of the pairs of positions holds equal tokens, (1 − r) I + r 1 1ᵀ
(`--repeats 0`: the identity); sampled sequences of this kind, with means and standard deviations; windows of real
text; a matrix from a file.

## Figures 1 and 7 of SPA

*Deep Transformers without Shortcuts* (He et al., 2023) draws the normalised kernels of attention-only networks with
100 tokens and r = 0.02 (8 heads with ALiBi where attention is not shaped; rho_L = 0.8, gamma_L = 0.005). How its
input was sampled is not said; ours draws every token uniformly from 50.

![Normalised kernels of seven attention-only networks at four depths](pictures/kernels-figure-7.png)

| the paper says | the tables below |
| --- | --- |
| figure 1: vanilla attention quickly collapses, all entries go to 1 | so within some 20 blocks |
| figure 1: U-SPA and E-SPA keep the signal controlled | no collapse in 100 blocks, diagonals 1 on average |
| figure 1: E-SPA has a recency bias | lag 1 far above lag 50; U-SPA has none |
| figure 7: skipless with RMSNorm collapses too | as fast as without |
| figure 7: so does Post-LN, more slowly | in twice as many blocks and more |

![Distance, effective rank, diagonal and gradient over depth](pictures/kernels-curves.png)

Mean cosine off the diagonal, on the average kernel; in brackets an independent simulation of the same networks, with
dense matrices and other code. The last column: first block with effective rank below 1.01, and with 1 − mean cosine
below 1e-6.

{average}

{samples} sampled sequences after 100 blocks; in brackets the independent simulation, whose sequences were others:

{sampled}

The correction for repeated tokens rescales rows: E-SPA has the same cosines with and without it.

## Figure 5: inputs

A share r of the pairs of positions holds equal tokens, wherever they stand.

![Kernels of sampled inputs](pictures/kernels-figure-5.png)

## Figure 6: repeated tokens and the diagonal

E-SPA that takes its input for independent tokens lets the variance grow with depth where tokens repeat; its
correction (SPA appendix B) keeps it at 1 on average. The paper's figure: without, the average diagonal "diverges at
deeper blocks"; with, it stays "around 1 with controlled standard deviations". r = 0.05, 36 blocks, gamma_L = 0.02:

![Mean and standard deviation of the diagonal over 36 blocks](pictures/kernels-figure-6.png)

The diagonal's mean (standard deviation over positions), averaged over sequences:

{diagonal}

## Time

E-SPA, U-SPA and ALiBi apply in O(T) per column, so a block costs O(T²). Processor time of one core, without effective
ranks:

{speed}
"""


def page() -> str:
    """docs/kernels.md."""
    reference = read_json(REFERENCE)
    return TEXT.format(
        average="\n".join(average_lines(reference)),
        samples=SAMPLES,
        sampled="\n".join(sampled_lines(reference)),
        diagonal="\n".join(diagonal_lines(reference)),
        speed="\n".join(speed_lines()),
    )


def main() -> None:
    pictures()
    write_text(PAGE, page())


if __name__ == "__main__":
    main()
