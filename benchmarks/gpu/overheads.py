"""What watching costs there: taps in a compiled step, the probe's hooks in an eager one, and a monitor."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import compiled_probes
from benchmarks.gpu.timed import whole
from benchmarks.models import hugging_face
from benchmarks.timing import compared, take_turns
from signalprop.measurement import Probe
from signalprop.monitoring import SignalMonitor

TITLE = "Watching on the device"
ABOUT = """
`python -m benchmarks.gpu overheads`: the comparisons of [watching a compiled step](#watching-a-compiled-step),
[monitoring a run](#monitoring-a-run), and a GPT-2 that is not compiled under a probe, with a model that fills the
device, on the clock. Here a monitored step is one that is sampled; a run's cost is that over `every`.
"""
GRAPHS = "compiled, CUDA graphs"
WATCHED = ("probe", "monitor", "compiled", "compiled, checkpointing", GRAPHS)  # the quick ones first
Case = dict[str, Any]


def cases(small: bool) -> list[Case]:
    """Each comparison in float32 and in bfloat16."""
    size = {"layers": 2, "width": 32, "heads": 2, "batch": 2, "tokens": 16}
    large = {"layers": 12, "width": 768, "heads": 12, "batch": 16, "tokens": 1024}
    precisions = ("float32",) if small else ("bfloat16", "float32")
    return [{"what": what, "precision": precision, "small": small} | (size if small else large)
            for what in WATCHED for precision in precisions]  # fmt: skip


def _size(case: Case) -> dict[str, int]:
    return {name: case[name] for name in ("layers", "width", "heads", "batch", "tokens")}


def _compiled(case: Case, device: torch.device) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    backend = "aot_eager" if case["small"] else "inductor"
    mode = "reduce-overhead" if case["what"] == GRAPHS and not case["small"] else None
    checkpointing = case["what"] == "compiled, checkpointing"
    return compiled_probes.variants(checkpointing, device=device, backend=backend, mode=mode, **_size(case))


def _model(case: Case, device: torch.device) -> tuple[Any, torch.Tensor]:
    """A GPT-2, and ids for a batch."""
    size = {name: case[name] for name in ("width", "heads", "tokens")}
    model = hugging_face("gpt2", case["layers"], dropout=0.1, **size).to(device).train()
    return model, torch.randint(0, 1000, (case["batch"], case["tokens"]), device=device)


def _monitor(case: Case, folder: Path, device: torch.device) -> dict[str, Callable[[], None]]:
    """A training step of every variant."""
    torch.manual_seed(0)
    model, ids = _model(case, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def bare() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def watched(monitor: SignalMonitor) -> Callable[[], None]:
        def step() -> None:
            with monitor:
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                numbers = monitor.step()
            if numbers is None or "signal/outside" not in numbers or len(numbers) <= 4 * case["layers"]:
                raise ValueError("the monitor did not sample this step")
            optimizer.step()
            optimizer.zero_grad()

        return step

    streams = SignalMonitor(model, every=1, jsonl=folder / "streams.jsonl", scores=False)
    sampled = SignalMonitor(model, every=1, jsonl=folder / "signal.jsonl")
    monitors = {"streams": streams, "sampled": sampled}
    return {"bare": bare, "bare again": bare} | {name: watched(monitor) for name, monitor in monitors.items()}


def _probe(case: Case, device: torch.device) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    model, ids = _model(case, device)
    probe = Probe(model)

    def bare() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    def probed() -> None:
        with probe:
            bare()
            probe.profile()

    return {"bare": bare, "bare again": bare, "probe": probed}, {}


def measured(case: Case, device: torch.device) -> dict[str, Any]:
    """Seconds of every variant in every round, and what was checked."""
    with (
        tempfile.TemporaryDirectory() as folder,
        torch.autocast(device.type, torch.bfloat16, enabled=case["precision"] == "bfloat16"),
    ):
        if case["what"] == "monitor":
            actions, checked = _monitor(case, Path(folder), device), {}
        else:
            actions, checked = (_probe if case["what"] == "probe" else _compiled)(case, device)
        turns = {name: whole(action, device) for name, action in actions.items()}
        return checked | {"seconds": take_turns(turns, 15, clock=time.perf_counter, warm_up=3)}


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table for every comparison."""
    parts = []
    for row in rows:
        c = row["case"]
        title = f"### {c['what']}, {c['precision']}, {c['layers']} × {c['width']}, {c['batch']} × {c['tokens']} tokens"
        if "error" in row:
            parts.append(f"{title}\n\n{row['error']}")
            continue
        parts.append(compared(title, row["seconds"], "bare"))
        if "apart" in row:
            same = {True: "the same, bit for bit", False: "not the same to the last bit"}
            parts.append(
                f"Losses are {same[row['same_loss']]}, gradients {same[row['same_gradients']]}; numbers of hooks on "
                f"the uncompiled model differ by at most {row['apart']:.1e}."
            )
    return "\n\n".join(parts)
