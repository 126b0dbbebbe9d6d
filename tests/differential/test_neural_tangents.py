"""Token kernels against neural-tangents (Novak et al. 2020), whose closed forms and recursion are another team's.

The package needs an old JAX, so it runs in a Python of its own: the one that SIGNALPROP_NEURAL_TANGENTS names, where
`pip install neural-tangents==0.6.5 jax==0.4.38 jaxlib==0.4.38 "numpy>=2"` was. Without it the tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from signalprop.kernels.trace import trace
from signalprop.network.activations import numbers_of
from signalprop.network.architecture import Architecture
from signalprop.network.kinds import kind_named
from signalprop.network.parametrization import Parametrization
from signalprop.schemes import scheme

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("through_neural_tangents.py")
VARIABLE = "SIGNALPROP_NEURAL_TANGENTS"
T, D = 9, 24


def theirs(tasks: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    """What neural-tangents finds, in float64."""
    python = os.environ.get(VARIABLE, "")
    if not Path(python).is_file():
        pytest.skip(f"no Python with neural-tangents: set {VARIABLE}")
    run = subprocess.run([python, str(SCRIPT)], input=json.dumps(tasks), capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    return [{name: np.array(values) for name, values in item.items()} for item in json.loads(run.stdout)]


def features(seed: int, spread: float) -> np.ndarray:
    """T vectors whose kernel x x^T / D has a diagonal of about 1, of many sizes where spread is not 0."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(T, D)) + 0.7 * rng.normal(size=D)
    x *= np.sqrt(D) / np.linalg.norm(x, axis=1, keepdims=True)
    x[3] = x[1]  # equal tokens
    return np.asarray(x * np.exp(spread * rng.normal(size=(T, 1))))


def named(activation: str) -> dict[str, Any]:
    inside, numbers = numbers_of(activation)
    return {"activation": inside if numbers else activation, "numbers": list(numbers)}


STACKS: dict[str, dict[str, Any]] = {
    "no norm": {"placement": "none", "activation": "relu", "layers": 32, "skip": 0.8},
    "no norm, GELU": {"placement": "none", "activation": "gelu", "layers": 12, "bias": 0.3},
    "pre-norm": {"placement": "pre", "activation": "relu", "layers": 32},
    "pre-norm, GELU, attention": {"placement": "pre", "activation": "gelu", "layers": 12, "attention": True},
    "pre-norm, a large epsilon": {"placement": "pre", "activation": "gelu", "layers": 12, "eps": 1e-5},
    "pre-norm, erf, attention, biases": {
        "placement": "pre", "activation": "erf", "layers": 32, "attention": True, "bias": 0.5,
    },
    "post-norm, attention": {"placement": "post", "activation": "relu", "layers": 12, "attention": True},
    "sandwich, leaky ReLU": {"placement": "sandwich", "activation": "leaky_relu(0.2)", "layers": 12},
    "norm on the branch, attention": {
        "placement": "res-post", "activation": "gelu", "layers": 12, "attention": True,
    },
}  # fmt: skip


def table(task: dict[str, Any]) -> Parametrization:
    """The same network as a table: a layer of neural-tangents draws its weights from N(0, W_std^2 / fan_in)."""
    a = Architecture(
        n_layers=task["layers"], d_model=32, d_ff=64, n_heads=1, seq_len=T, norm_placement=task["placement"],
        norm_eps=task["eps"], activation=task["full"], positions="none", bias=task["bias"] > 0, head="none",
    )  # fmt: skip
    p = scheme("xavier")(a)
    feeds = kind_named("feed_forward").of(p)
    columns = {
        "weight__query": np.zeros(p.n_sublayers),
        "weight__value": np.where(feeds, 0.0, task["value"] / 32**0.5),
        "weight__output": np.where(feeds, 0.0, task["output"] / 32**0.5 if task["attention"] else 0.0),
        "weight__up": np.where(feeds, task["up"] / 32**0.5, 0.0),
        "weight__down": np.where(feeds, task["down"] / 64**0.5, 0.0),
        "branch": np.where(feeds | task["attention"], 1.0, 0.0),
        "skip": np.where(feeds | task["attention"], task["skip"], 1.0),
    }
    if task["bias"]:
        columns["bias__up"] = np.where(feeds, task["bias"], 0.0)
    if task["placement"] == "post" and not task["attention"]:
        raise AssertionError("a norm behind a branch that is not there is still a norm")
    return p.with_columns(**columns)


def test_whole_stacks() -> None:
    """The kernel behind the last layer: all pairs of tokens, their variances among them.

    Measured: within 2e-13 of the diagonal. With an epsilon of 1e-5 normed variances differ by less than that, for which
    all of them count as one (`dual_of`): 5e-7.
    """
    defaults = {
        "attention": False, "bias": 0.0, "skip": 1.0, "eps": 1e-12, "value": 1.1, "output": 0.9,
        "up": 1.3, "down": 1.2,
    }  # fmt: skip
    tasks = [
        {**defaults, **fields, **named(fields["activation"]), "full": fields["activation"],
         "x": features(k, 0.3).tolist()}
        for k, fields in enumerate(STACKS.values())
    ]  # fmt: skip
    for (name, fields), task, item in zip(STACKS.items(), tasks, theirs(tasks), strict=True):
        x = np.array(task["x"])
        found = trace(table(task), x @ x.T / D, at=[fields["layers"]], backward=False).kernels[fields["layers"]]
        scale = np.sqrt(np.outer(np.diagonal(item["value"]), np.diagonal(item["value"])))
        assert np.isfinite(scale).all() and scale.min() > 0
        tolerance = 1e-6 if task["eps"] > 1e-9 else 1e-12
        np.testing.assert_allclose(found / scale, item["value"] / scale, rtol=0, atol=tolerance, err_msg=name)
