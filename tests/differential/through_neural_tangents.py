"""Kernels of infinitely wide networks by neural-tangents, in a Python that has it: JSON on stdin, JSON on stdout.

No test, and no import of signalprop: tests/differential/test_neural_tangents.py runs it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from typing import Any

os.environ["JAX_ENABLE_X64"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if importlib.util.find_spec("tensorflow") is None:  # which only an interface that we do not use imports
    sys.modules["neural_tangents.experimental"] = types.ModuleType("neural_tangents.experimental")

import jax.numpy as jnp
import numpy as np
from neural_tangents import stax

WIDE = 8  # kernels are of infinite width, whatever number a layer is given


def activation(name: str, numbers: list[float]) -> Any:
    closed = {
        "relu": stax.Relu, "gelu": stax.Gelu, "erf": stax.Erf,
        "leaky_relu": lambda: stax.LeakyRelu(*(numbers or [0.01])), "identity": lambda: stax.Monomial(1),
    }  # fmt: skip
    return closed[name]()


def stack(task: dict[str, Any], x: Any) -> dict[str, Any]:
    """The stream behind every layer of a transformer whose queries are zero: attention is the mean over tokens."""
    layers = [stax.Dense(WIDE)]
    for _ in range(task["layers"]):
        if task["attention"]:
            mixed = stax.GlobalSelfAttention(
                WIDE, WIDE, WIDE, 1, W_key_std=0.0, W_query_std=0.0, W_value_std=task["value"], W_out_std=task["output"]
            )
            layers += sublayer(task, mixed)
        act = activation(task["activation"], task["numbers"])
        layers += sublayer(
            task, stax.Dense(WIDE, W_std=task["up"], b_std=task["bias"]), act, stax.Dense(WIDE, W_std=task["down"])
        )
    *_, kernel = stax.serial(*layers)
    found = kernel(x[None], None, "nngp")  # one sequence of tokens
    return {"value": np.asarray(found)[0, 0]}


def sublayer(task: dict[str, Any], *branch: Any) -> list[Any]:
    norm = [stax.LayerNorm(axis=-1, eps=task["eps"])]
    before = norm if task["placement"] in ("pre", "sandwich") else []
    behind = norm if task["placement"] in ("sandwich", "res-post") else []
    kept = stax.Identity() if task["skip"] == 1 else stax.Dense(WIDE, W_std=task["skip"])  # to a kernel, a factor
    sides = stax.parallel(kept, stax.serial(*before, *branch, *behind))
    out = [stax.FanOut(2), sides, stax.FanInSum()]
    return out + norm if task["placement"] == "post" else out


if __name__ == "__main__":
    read = json.load(sys.stdin)
    out = []
    for task in read:
        # a map with weights N(0, 1) / sqrt(features) leaves the kernel as it is: the first layer reads x itself
        found = stack(task, jnp.asarray(task["x"]))
        out.append({name: values.tolist() for name, values in found.items()})
    json.dump(out, sys.stdout)
