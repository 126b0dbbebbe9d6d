"""What `diagnose --weights-only` costs a weight, over reading the file and over one bare count, and its peak memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.timing import ratios, shown, summary, table, take_turns
from signalprop.diagnosis.number_counts import QUANTILES, Statistics, statistics, values_of
from signalprop.errors import InputError
from signalprop.files.tensor_files import PIECE, StoredTensor, stored_tensors

GIGABYTES, ROUNDS = 10, 12
WIDTH, HIDDEN, HEADS = 4096, 14336, 1024  # of a layer of Llama 3 8B

TITLE = "Weights alone"
ABOUT = f"""
`python -m benchmarks stored_weights`: a bfloat16 checkpoint of {GIGABYTES} GB, layers as in Llama 3 8B, normal numbers,
in one file that the system has in memory. Statistics, quantiles, casts, zeros and numbers that are not finite of every
tensor, on one thread; CPU time, of the program and of the system for it. The second table is of one tensor of
58.7 million weights, in turns: *read* brings it to the program piece by piece, *counted* is `np.bincount` of the same
pieces and nothing else. Moments, quantiles, extremes and zeros of that tensor are those of NumPy on all of it at once.
"""
READING = """
Nearly all is the count: one addition to one of 65,536 counters for each weight. Reading costs an eighth of it.
"""
_CHILD = """
import re, sys, time
from pathlib import Path
from signalprop.diagnosis.stored_weights import read_weights
began = time.process_time()
found = read_weights(sys.argv[1])
print(found.n, time.process_time() - began)
print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def measured() -> Iterator[str]:
    """The section of the page."""
    with tempfile.TemporaryDirectory() as folder:
        need = (GIGABYTES + 1) * 10**9
        if shutil.disk_usage(folder).free < need:
            raise InputError(f"{folder} has no room for {GIGABYTES} GB; set TMPDIR to a disk that has")
        file = Path(folder) / "model.safetensors"
        _write(file)
        runs = [_whole(file) for _ in range(3)]
        tensor = max(stored_tensors(file), key=lambda one: one.n)
        _require_equal(tensor)
        seconds = take_turns(
            {
                "read": lambda: [None for _ in tensor.pieces()],
                "counted": lambda: _counted(tensor),
                "statistics": lambda: statistics(tensor),
            },
            ROUNDS,
        )
    n = runs[0][0]
    own = summary([1e9 * spent / n for _, spent, _ in runs])
    rows = [[f"{n / 1e9:.2f} billion", f"{file_size(n)} GB", shown(own, 2), f"{max(one[2] for one in runs):.0f} MB"]]
    yield table(["weights", "file", "CPU time a weight, ns (3 runs)", "peak memory"], rows)
    over = ratios(seconds, "counted")
    lines = [
        [
            name,
            shown(summary([1e9 * one / tensor.n for one in values]), 2),
            shown(over[name], 2) if name in over else "",
        ]
        for name, values in seconds.items()
    ]
    yield table(["variant", "ns a weight", "over *counted*"], lines)


def file_size(n: int) -> str:
    """In gigabytes."""
    return f"{2 * n / 1e9:.1f}"


def _write(file: Path) -> None:
    """Layers until the file is full."""
    shapes = {
        "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (HEADS, WIDTH), "self_attn.v_proj": (HEADS, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (HIDDEN, WIDTH), "mlp.up_proj": (HIDDEN, WIDTH),
        "mlp.down_proj": (WIDTH, HIDDEN), "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
    }  # fmt: skip
    header, end = {}, 0
    for layer in range(GIGABYTES * 10**9 // (2 * sum(int(np.prod(shape)) for shape in shapes.values())) + 1):
        for name, shape in shapes.items():
            start, end = end, end + 2 * int(np.prod(shape))
            offsets = {"data_offsets": [start, end]}
            header[f"model.layers.{layer}.{name}.weight"] = {"dtype": "BF16", "shape": list(shape), **offsets}
    rng = np.random.default_rng(0)
    words = (rng.normal(0.0, 0.02, 1 << 24).astype("<f4").view("<u4") >> 16).astype("<u2")
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        while end:
            piece = np.roll(words, int(rng.integers(len(words)))).tobytes()[:end]
            out.write(piece)
            end -= len(piece)


def _whole(file: Path) -> tuple[int, float, float]:
    """(weights, seconds of CPU time, peak memory in MB) of the whole file, in a process of its own."""
    run = subprocess.run([sys.executable, "-c", _CHILD, str(file)], check=True, capture_output=True, text=True)
    n, spent, kilobytes = run.stdout.split()
    return int(n), float(spent), int(kilobytes) / 1000


def _counted(tensor: StoredTensor) -> None:
    counts = np.zeros(1 << 16, np.int64)
    for piece in tensor.pieces(PIECE):
        counts += np.bincount(piece, minlength=1 << 16)


def _require_equal(tensor: StoredTensor) -> None:
    """Raise where the streamed statistics are not those of the whole tensor."""
    found: Statistics = statistics(tensor)
    x = np.concatenate([values_of(piece, tensor.dtype) for piece in tensor.pieces()]).astype(np.float64)
    size = np.sort(np.abs(x))
    moments = [(found.mean, x.mean()), (found.std, x.std()), (found.rms, np.sqrt(np.mean(x**2)))]
    exact = [(found.least, x.min()), (found.most, x.max()), (found.zeros, np.sum(x == 0))]
    exact += [(one, size[int(np.ceil(q * len(x))) - 1]) for one, q in zip(found.quantiles, QUANTILES, strict=True)]
    if any(abs(a - b) > 1e-9 * max(abs(b), 1e-3) for a, b in moments) or any(a != b for a, b in exact):
        raise ValueError("the streamed statistics are not those of the whole tensor")
