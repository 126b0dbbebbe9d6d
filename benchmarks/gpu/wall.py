"""What depth costs on the clock at equal parameters: deep and thin BERTs against shallow and wide ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import signalprop as sp
from benchmarks.gpu.timed import wait, whole
from benchmarks.timing import take_turns
from signalprop_lab.training.tables import markdown_table as table

SHAPES = ((12, 1024), (48, 512), (192, 256), (24, 1024), (96, 512), (384, 256))  # layers, width; three and three
MODES = ("eager", "compiled", "graph")
TITLE = "Wall clock of deep and thin models"
ABOUT = """
`python -m benchmarks.gpu wall`: a training step (forward, cross-entropy, backward, fused AdamW; bfloat16 autocast) of
DeepScaleLM BERTs, Post-LN, heads of width 64, 256 tokens, dropout 0.1, vocabulary 30,522. N d² is the same for the
first three shapes, and for the last three; *over* is against the shallowest of the three at the same batch and mode.
*compiled*: each sublayer (inductor). *graph*: the eager step, captured once as a CUDA graph. The paper (Transformers
Get Stable v1, K.2) has +9.8 % for 48 × 512 and +14.9 % for 96 × 512. Medians on the clock.
"""
Case = dict[str, Any]


def cases(small: bool) -> list[Case]:
    """Shapes by batch and mode; the paper's micro-batch of 2, and two that fill a device."""
    sizes = ((2, 64), (8, 32)) if small else SHAPES
    modes = MODES if not small or torch.cuda.is_available() else MODES[:-1]
    return [
        {"layers": n, "width": d, "batch": batch, "tokens": 8 if small else 256, "mode": mode, "small": small}
        for mode in modes
        for batch in ((2,) if small else (2, 16, 64))
        for n, d in sizes
    ]


def model_of(case: Case) -> nn.Module:
    """A BERT of signalprop's own."""
    a = sp.Architecture.preset(
        "bert-base",
        n_layers=case["layers"],
        d_model=case["width"],
        n_heads=max(1, case["width"] // 64),
        seq_len=case["tokens"],
        norm_placement="post",
    )
    return sp.build(sp.scheme("deepscalelm")(a), seed=0).train()


def step_of(case: Case, device: torch.device) -> Callable[[], None]:
    """One training step."""
    model = model_of(case).to(device)
    graph = case["mode"] == "graph"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=graph)
    ids = torch.randint(0, 30_522, (case["batch"], case["tokens"]), device=device)
    if case["mode"] == "compiled":
        for sublayer in model.encoder.sublayers:
            sublayer.compile(backend="aot_eager" if case["small"] else "inductor")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=not graph):
            logits = model(ids).logits
        F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()).backward()
        optimizer.step()

    return captured(step) if graph else step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measured(case: Case, device: torch.device) -> dict[str, Any]:
    """Seconds of a step, what the first one took (compiling, capturing), and the most memory."""
    began = time.perf_counter()
    step = step_of(case, device)
    step()
    wait(device)
    first = time.perf_counter() - began
    seconds = take_turns({"step": whole(step, device)}, 30, clock=time.perf_counter, warm_up=10)["step"]
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"seconds": median, "low": low, "high": high, "first": first, "memory": memory}


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row by mode, batch and shape, with its time over that of the shallowest of its size."""
    base: dict[tuple[Any, ...], float] = {}
    cells = []
    for row in rows:
        c = row["case"]
        shape = f"{c['layers']} × {c['width']}"
        if "error" in row:
            cells.append([c["mode"], str(c["batch"]), shape, "", "", row["error"], ""])
            continue
        key = c["mode"], c["batch"], c["layers"] * c["width"] ** 2
        over = row["seconds"] / base.setdefault(key, row["seconds"]) - 1
        memory = "" if row["memory"] is None else f"{row['memory'] / 2**30:.1f} GiB"
        speed = f"{c['batch'] * c['tokens'] / row['seconds']:,.0f}"
        shown = "" if not over else f"{100 * over:+.1f} %"
        cells.append([c["mode"], str(c["batch"]), shape, f"{1000 * row['seconds']:.2f} ms", speed, shown, memory])
    return table(["mode", "batch", "shape", "step", "tokens/s", "over", "memory"], cells)
