"""What watching the signal costs: training steps with a monitor over the bare step.

    python -m benchmarks.probe_overhead [--rounds 16 12] [--json FILE]

Runs itself in an environment that has the two other packages (`benchmarks.environments`).
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.environments import ROOT, environment
from benchmarks.memory import peak
from benchmarks.models import Block, Decoder
from benchmarks.monitors import Steps
from benchmarks.page import table
from benchmarks.timing import command_line, one_thread, ratios, shown, summary, take_turns, write_rows

PEERS = {"torch-module-monitor": "0.1.0", "unit-scaling": "0.3.5"}
NAMES = {
    "bare again": "bare again (control)",
    "probe": "signalprop's Probe",
    "by hand": "hooks by hand",
    "read once": "read once (floor)",
    "torch-module-monitor": "torch-module-monitor",
    "unit-scaling": "unit-scaling `track_scales`",
}
# layers, width, heads, batch, tokens
MODELS = ((12, 256, 4, 4, 128), (48, 512, 8, 1, 128))
# layers, width, batch, tokens of silent networks: one of them varies
BASE = (12, 256, 4, 128)
SILENT = (
    BASE,
    *((n, *BASE[1:]) for n in (3, 48)),
    *((12, width, 4, 128) for width in (64, 1024)),
    *((12, 256, 4, tokens) for tokens in (16, 1024)),
)

TITLE = "Watching a training step"
RECORDED = {
    "signalprop's Probe": "mean, variance and token correlation of all 2L + 1 streams and 2L branches, and of the "
    "gradients there (a pre-norm branch has the gradient of the stream behind it, which is read once)",
    "hooks by hand": "the same numbers, written for this one model: no padding, no checks, no float64 where float32 is "
    "not enough; two kernels a tensor, and the arithmetic for all of them at the end",
    "read once": "a sum of each of these tensors: what hooks and reading them cost at least",
    "torch-module-monitor 0.1.0": "the same three numbers of 3L tensors, forward only: it sees outputs of modules, and "
    "gradients of weights only. All other modules excluded, one function for the three numbers",
    "unit-scaling 0.3.5": "mean, mean absolute value, deviation and extremes of every tensor of the graph, weights "
    "too, and of its gradient; no token correlation. It cannot be told to record less, and has no steps in between",
}
ABOUT = f"""
`python -m benchmarks.probe_overhead`: a step is forward, cross-entropy, backward and fused AdamW of a decoder written
as people write theirs (`benchmarks.models.Decoder`: pre-norm, fused query, key and value, GELU, vocabulary 1000, no
dropout), float32, one thread, CPU time. All monitors watch the same weights in the same process, and take turns. That
hooks by hand and the probe find the same numbers is checked first.

{table(["monitor", "records on a watched step of L layers"], [[name, what] for name, what in RECORDED.items()])}

Every 10th step: one watched step and nine with the monitor asleep (unit-scaling, and hooks by hand: nine bare ones).
"""
PROFILE = """\
Per tensor a probe makes two passes, a norm per token and a sum per sequence (the second reads from cache where the
tensor fits), and decides whether float32 was enough; all that is left is done for all tensors together when the step
ends. What separates it from reading once is code that is cold, since between two tensors a step runs through all
caches, and the Profile. A gradient is not kept until the next one: what is held cannot be added to in place, nor can
its memory be used again."""
SCALING = """\
Networks whose norms and branches are taken out, so that a step is little more than the probe: milliseconds that it
adds. The floor is the number of tensors times one sum of such a tensor that is in the cache, in the same run; its
bandwidth is in the last column. Cost is proportional to depth; per tensor it is a constant for the smallest ones, and
then the bytes."""
MEMORY = """\
Peak resident memory of a process that takes three steps, medians of three. A probe keeps a norm per token and a sum
per sequence and tensor, 1/width + 1/tokens of its size."""


def steps_row(size: Sequence[int], rounds: int) -> dict[str, Any]:
    """Ratios to the bare step of every monitor, on every step and on every tenth."""
    steps = Steps(*size)
    check_same_numbers(steps)
    module_monitor, scale_tracking = steps.module_monitor(), steps.scale_tracking()
    actions: dict[str, Callable[[], Any]] = {
        "bare": steps.bare,
        "bare again": steps.bare,
        "probe": lambda: steps.probed(0),
        "probe asleep": lambda: steps.probed(1),
        "by hand": steps.by_hand,
        "read once": steps.read_once,
        "torch-module-monitor": lambda: module_monitor(0),
        "torch-module-monitor asleep": lambda: module_monitor(1),
        "unit-scaling": scale_tracking,
    }
    scale_tracking()  # compiles
    graph = scale_tracking()
    tensors = {
        **dict.fromkeys(("probe", "by hand", "read once"), len(steps.read_once())),
        "torch-module-monitor": len(module_monitor(0)) // 3,
        "unit-scaling": sum(1 + (m.bwd is not None) for n in graph.nodes if (m := n.meta.get("metrics")) is not None),
    }
    gc.collect()
    gc.freeze()  # or whoever meets the collector pays for all that unit-scaling's compiler has left in memory
    seconds = take_turns(actions, rounds)
    gc.unfreeze()
    every = ratios(seconds, "bare")
    tenth = {}
    for name in NAMES:
        asleep = seconds.get(f"{name} asleep", seconds["bare"])
        parts = zip(seconds[name], asleep, seconds["bare"], strict=True)
        tenth[name] = summary([(watched + 9 * other) / (10 * bare) for watched, other, bare in parts])
    return {
        "what": "step",
        "size": list(size),
        "bare_seconds": statistics.median(seconds["bare"]),
        "tensors": tensors,
        "every step": {name: every[name] for name in NAMES},
        "every 10th step": tenth,
    }


def check_same_numbers(steps: Steps) -> None:
    """Raise ValueError unless hooks by hand and the probe find the same variances and token correlations."""
    weights = copy.deepcopy(steps.model.state_dict())
    profile = steps.probed(0)
    steps.model.load_state_dict(weights)
    found = np.array(steps.by_hand())
    assert profile is not None and profile.gradient is not None and profile.gradient_scale is not None
    n = len(profile.forward["branch"].variance)
    streams, branches, gradients = found[0 : 2 * n : 2], found[1 : 2 * n : 2], found[2 * n + 1 :][:0:-1]
    for own, other, unit in (
        (streams, profile.forward["stream_in"], 1.0),
        (branches, profile.forward["branch"], 1.0),
        (gradients, profile.gradient["stream_in"], profile.gradient_scale),
    ):
        ratio, difference = own[:, 1] / (other.variance * unit) - 1, own[:, 2] - other.token_correlation
        if max(np.abs(ratio).max(), np.abs(difference).max()) > 1e-4:
            raise ValueError("hooks by hand and the probe do not find the same numbers")


class Scale(nn.Module):
    """A branch that costs next to nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """A tenth of it."""
        return 0.1 * x


def silenced(model: Decoder) -> None:
    """Leave the streams and branches of a decoder, and take all work out: what is left is a probe's own cost."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention, block.feed_forward = Scale(), Scale()  # type: ignore[assignment]
        block.norm_1, block.norm_2 = nn.Identity(), nn.Identity()  # type: ignore[assignment]
    model.norm = nn.Identity()  # type: ignore[assignment]


def silent_row(size: Sequence[int], rounds: int) -> dict[str, Any]:
    """Milliseconds that a probe adds to a step of a network that does nothing else, and what its tensors hold."""
    layers, width, batch, tokens = size
    steps = Steps(layers, width, 1, batch, tokens, vocab_size=16, prepare=silenced)
    x = torch.randn(batch, tokens, width)
    actions: dict[str, Callable[[], Any]] = {
        "bare": steps.bare,
        "probe": lambda: steps.probed(0),
        "by hand": steps.by_hand,
        "read once": steps.read_once,
        "sums": lambda: [x.sum() for _ in range(100)],
    }
    count = len(steps.read_once())
    seconds = take_turns(actions, rounds, warm_up=2)
    added = {
        name: summary([1000 * (own - bare) for own, bare in zip(seconds[name], seconds["bare"], strict=True)])
        for name in ("probe", "by hand", "read once")
    }
    one = statistics.median(seconds["sums"]) / 100
    return {
        "what": "silent",
        "size": list(size),
        "tensors": count,
        "bytes": x.nbytes,
        "bytes_per_second": x.nbytes / one,
        "floor_milliseconds": 1000 * count * one,
        "added_milliseconds": added,
    }


def memory_row(size: Sequence[int]) -> dict[str, Any]:
    """Peak memory of a process that takes three steps, with a probe over without, in bytes."""
    runs = {}
    for name in ("bare", "probe"):
        code = f"from benchmarks.probe_overhead import three_steps; three_steps({list(size)}, {name == 'probe'})"
        runs[name] = statistics.median(peak(["-c", code], cwd=ROOT)[0] for _ in range(3))
    _, width, _, batch, tokens = size
    return {"what": "memory", "size": list(size), "tensor_bytes": 4 * batch * tokens * width, **runs}


def three_steps(size: Sequence[int], probed: bool) -> None:
    """What `memory_row` runs in a process of its own."""
    one_thread()
    steps = Steps(*size)
    for _ in range(3):
        if probed:
            steps.probed(0)
        else:
            steps.bare()


def named(size: Sequence[int]) -> str:
    """Layers, width and tokens in words."""
    return f"{size[0]} × {size[1]}, {size[-2]} × {size[-1]} tokens"


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """The tables of the page."""
    steps = [row for row in rows if row["what"] == "step"]
    silent = [row for row in rows if row["what"] == "silent"]
    memory = [row for row in rows if row["what"] == "memory"]
    header = ["monitor", "tensors", "every step", "every 10th step", "added per watched step", "per tensor"]
    parts = []
    for row in steps:
        bare = row["bare_seconds"]
        cells = []
        for name, words in NAMES.items():
            found, count = row["every step"][name], row["tensors"].get(name)
            added = 1000 * bare * (found["median"] - 1)
            cells.append(
                [
                    words,
                    "" if count is None else str(count),
                    shown(found),
                    shown(row["every 10th step"][name]),
                    f"{added:.1f} ± {1000 * bare * found['standard_error']:.1f} ms",
                    "" if count is None else f"{1000 * added / count:.0f} µs",
                ]
            )
        parts += [f"### {named(row['size'])}: bare step {1000 * bare:.0f} ms", table(header, cells)]
    parts += [PROFILE, "### Cost against depth, width and tokens", SCALING]
    cells = [
        [
            named(row["size"]),
            str(row["tensors"]),
            f"{row['bytes'] / 2**20:.3g} MiB",
            *(
                f"{found['median']:.2f} ± {found['standard_error']:.2f}"
                for found in (row["added_milliseconds"][name] for name in ("probe", "by hand", "read once"))
            ),
            f"{row['floor_milliseconds']:.2f}",
            f"{row['added_milliseconds']['probe']['median'] / row['floor_milliseconds']:.1f}",
            f"{row['bytes_per_second'] / 1e9:.0f} GB/s",
        ]
        for row in silent
    ]
    header = ["network", "tensors", "each", "Probe, ms", "by hand, ms", "read once, ms", "floor, ms", "Probe / floor"]
    parts.append(table([*header, "bandwidth"], cells))
    cells = [
        [named(row["size"]), *(f"{row[name] / 2**20:.0f} MiB" for name in ("bare", "probe")),
         f"{(row['probe'] - row['bare']) / 2**20:+.1f} MiB", f"{row['tensor_bytes'] / 2**20:.2f} MiB"]
        for row in memory
    ]  # fmt: skip
    parts += [
        "### Memory",
        MEMORY,
        table(["network", "bare", "with a probe", "difference", "one stream tensor"], cells),
    ]
    return "\n\n".join(parts)


def lines(row: Mapping[str, Any]) -> list[str]:
    """A row in short, as it is found."""
    where = f"{row['what']:6} {named(row['size']):28}"
    if row["what"] == "step":
        return [f"{where} {name:28} {shown(row['every step'][name])}" for name in NAMES]
    if row["what"] == "silent":
        return [f"{where} {name:28} {shown(found, 2)} ms" for name, found in row["added_milliseconds"].items()]
    return [f"{where} {'probe - bare':28} {(row['probe'] - row['bare']) / 2**20:+.1f} MiB"]


def main() -> None:
    """Command line of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, nargs=2, default=[16, 12], help="of the small model, of the large one")
    options = parser.parse_args()
    if importlib.util.find_spec("torch_module_monitor") is None:
        pinned = [f"{name}=={version}" for name, version in PEERS.items()]
        python = environment("monitors", ["--editable", ".[models]", "threadpoolctl", *pinned])
        raise SystemExit(subprocess.run([python, "-m", "benchmarks.probe_overhead", *sys.argv[1:]]).returncode)
    one_thread()
    rows: list[dict[str, Any]] = []
    measured = chain(
        (memory_row(size) for size in MODELS[:1]),
        (silent_row(size, 15) for size in SILENT),
        (steps_row(size, rounds) for size, rounds in zip(MODELS, options.rounds, strict=True)),
    )
    for row in measured:
        print(*lines(row), sep="\n", flush=True)
        rows.append(row)
    write_rows(options.json, rows, {name: metadata.version(name) for name in PEERS})


if __name__ == "__main__":
    main()
