"""What the device can do at most: products of matrices, copies, and how fast it takes up small work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.gpu.timed import whole
from benchmarks.timing import take_turns
from signalprop_lab.training.tables import markdown_table as table

TITLE = "Ceilings of the device"
ABOUT = """
`python -m benchmarks.gpu ceilings`: square products (2 n³ operations), a copy (bytes read and written), and additions
of one number after another, whose time is that of starting a kernel. Medians on the clock.
"""
UNITS = {"product": "TFLOP/s", "copy": "GB/s", "launch": "µs"}
Case = dict[str, Any]


def cases(small: bool) -> list[Case]:
    """Products of each precision, copies, launches."""
    n = 64 if small else 8192
    products = [{"what": "product", "of": name, "n": n} for name in ("float32", "tf32", "bfloat16", "float16")]
    return [*products, {"what": "copy", "of": "float32", "n": n * n * 4}, {"what": "launch", "of": "float32", "n": 1}]


def measured(case: Case, device: torch.device) -> dict[str, Any]:
    """Rate, in the unit of what is measured."""
    n, name = case["n"], case["of"]
    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    square = case["what"] == "product"
    x = torch.ones((n, n) if square else (n,), dtype=dtype, device=device)
    y = torch.empty_like(x)
    actions = {"product": lambda: torch.mm(x, x, out=y), "copy": lambda: y.copy_(x), "launch": lambda: x.add_(1)}
    times = 10 if square or case["what"] == "copy" else 1000
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        found = take_turns({"it": whole(actions[case["what"]], device, times)}, 7, clock=time.perf_counter)["it"]
    finally:
        torch.set_float32_matmul_precision(before)
    seconds = statistics.median(found) / times
    rates = {"product": 2e-12 * n**3 / seconds, "copy": 2e-9 * x.nbytes / seconds, "launch": 1e6 * seconds}
    return {"rate": rates[case["what"]]}


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """One table."""
    cells = [
        [c["what"], c["of"], f"{c['n']:,}", f"{row['rate']:.4g} {UNITS[c['what']]}" if "rate" in row else row["error"]]
        for row in rows
        for c in [row["case"]]
    ]
    return table(["what", "numbers", "n", "rate"], cells)
