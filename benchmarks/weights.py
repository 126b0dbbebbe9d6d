"""What reading a checkpoint's weights costs: `diagnose --weights-only` beside a plain NumPy pass over safetensors."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from benchmarks.timing import compared, take_turns
from signalprop.diagnosis.stored_weights import read_weights

LAYERS, WIDTH, HIDDEN, ROUNDS = 4, 2048, 8192, 5

TITLE = "Weights of a checkpoint"
ABOUT = f"""
`python -m benchmarks weights`: a float32 checkpoint of {LAYERS} layers of width {WIDTH}, which the system has in
memory, on one thread; CPU time. *signalprop* is what `diagnose --weights-only` reads, digests of all bytes included;
*plain NumPy* takes of every tensor the root mean square, the largest size, and the numbers of zeros and of entries that
are not finite; *floor* adds all entries up.
"""


def write(folder: Path, layers: int, width: int, hidden: int) -> int:
    """A checkpoint of layers as in Llama; its number of weights."""
    rng = np.random.default_rng(0)
    shapes = {f"self_attn.{x}_proj": (width, width) for x in "qkvo"}
    shapes |= {"mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width), "mlp.down_proj": (width, hidden)}
    tensors = {
        f"model.layers.{i}.{name}.weight": 0.02 * rng.standard_normal(shape, np.float32)
        for i in range(layers)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": hidden}
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    return sum(x.size for x in tensors.values())


def plain(file: Path, look: Any) -> None:
    """One function of every tensor of a file."""
    with safe_open(file, "np") as stored:
        for name in stored.keys():  # noqa: SIM118  it is no mapping
            look(stored.get_tensor(name))


def looked(x: Any) -> tuple[float, ...]:
    flat = x.ravel()
    finite = np.isfinite(flat)
    return (
        float(np.sqrt(np.dot(flat, flat) / flat.size)), float(np.abs(flat).max()), int((flat == 0).sum()),
        int(flat.size - finite.sum()),
    )  # fmt: skip


def measured() -> Iterator[str]:
    """The section of the page."""
    with tempfile.TemporaryDirectory() as place:
        n, file = write(Path(place), LAYERS, WIDTH, HIDDEN), Path(place) / "model.safetensors"
        variants = {
            "signalprop": lambda: read_weights(place),
            "signalprop again": lambda: read_weights(place),
            "plain NumPy": lambda: plain(file, looked),
            "floor": lambda: plain(file, np.sum),
        }
        seconds = take_turns(variants, ROUNDS)
    each = {name: f"{1e9 * float(np.median(values)) / n:.2f}" for name, values in seconds.items()}
    yield compared(f"{n / 1e6:.0f} million weights.", seconds, "signalprop", **{"ns a weight": each})
