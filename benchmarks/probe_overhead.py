"""What watching the signal costs: training steps with a monitor over the bare step.

It runs in an environment that has the two other packages.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.monitors import Steps
from benchmarks.timing import compared, shown, summary, table, take_turns

PEERS = {"torch-module-monitor": "0.1.0", "unit-scaling": "0.3.5"}
ENVIRONMENT: tuple[str, list[str], dict[str, str]] = (
    "monitors",
    ["--editable", ".[models]", "threadpoolctl", *(f"{name}=={version}" for name, version in PEERS.items())],
    {},
)
# layers, width, heads, batch, tokens; and rounds
MODELS = (((12, 256, 4, 4, 128), 16), ((48, 512, 8, 1, 128), 12))

TITLE = "Watching a training step"
RECORDED = {
    "signalprop's Probe": "mean, variance and token correlation of all 2L + 1 streams and 2L branches, and of the "
    "gradients there (a pre-norm branch has the gradient of the stream after it, which is read once)",
    "hooks by hand": "the same numbers, written for this one model: no padding, no checks, no float64 where float32 is "
    "not enough; two kernels a tensor, and the arithmetic for all of them at the end",
    "read once": "a sum of each of these tensors: what hooks and reading them cost at least",
    "torch-module-monitor 0.1.0": "the same three numbers of 3L tensors, forward only: it sees outputs of modules, and "
    "gradients of weights only. All other modules excluded, one function for the three numbers",
    "unit-scaling 0.3.5": "mean, mean absolute value, deviation and extremes of every tensor of the graph, weights "
    "too, and of its gradient; no token correlation. It cannot be told to record less, and has no steps in between",
}
ABOUT = f"""
`python -m benchmarks probe_overhead`: a step is forward, cross-entropy, backward and fused AdamW of a decoder written
as people write theirs (`benchmarks.models.Decoder`: pre-norm, fused query, key and value, GELU, vocabulary 1000, no
dropout), float32, one thread, CPU time. All monitors watch the same weights in the same process, and take turns. That
hooks by hand and the probe find the same numbers is checked first.

{table(["monitor", "records on a watched step of L layers"], [[name, what] for name, what in RECORDED.items()])}

Every 10th step: one watched step and nine with the monitor asleep (unit-scaling, and hooks by hand: nine bare ones).
"""
READING = """\
Per tensor a probe makes two passes, a norm per token and a sum per sequence (the second reads from cache where the
tensor fits), and decides whether float32 was enough; all that is left is done for all tensors together when the step
ends. What separates it from reading once is code that is cold, since between two tensors a step runs through all
caches, and the Profile. A gradient is not kept until the next one: what is held cannot be added to in place, nor can
its memory be used again."""


def steps_of(size: Sequence[int], rounds: int) -> str:
    """Steps of all monitors over the bare step, every one watched, and every tenth."""
    steps = Steps(*size)
    check_same_numbers(steps)
    module_monitor, scale_tracking = steps.module_monitor(), steps.scale_tracking()
    scale_tracking()  # compiles
    actions: dict[str, Callable[[], Any]] = {
        "bare": steps.bare,
        "bare again": steps.bare,
        "probe": lambda: steps.probed(0),
        "probe asleep": lambda: steps.probed(1),
        "by hand": steps.by_hand,
        "read once (floor)": steps.read_once,
        "torch-module-monitor": lambda: module_monitor(0),
        "torch-module-monitor asleep": lambda: module_monitor(1),
        "unit-scaling": scale_tracking,
    }
    gc.collect()
    gc.freeze()  # or whoever meets the collector pays for all that unit-scaling's compiler has left in memory
    seconds = take_turns(actions, rounds)
    gc.unfreeze()
    tenth = {}
    for name in actions.keys() - {"bare"}:
        parts = zip(seconds[name], seconds.get(f"{name} asleep", seconds["bare"]), seconds["bare"], strict=True)
        tenth[name] = shown(summary([(own + 9 * asleep) / (10 * bare) for own, asleep, bare in parts]))
    title = f"### {size[0]} × {size[1]}, {size[-2]} × {size[-1]} tokens"
    return compared(title, seconds, "bare", **{"every 10th step": tenth})


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


def measured() -> Iterator[str]:
    """The section of the page."""
    for size, rounds in MODELS:
        yield steps_of(size, rounds)
