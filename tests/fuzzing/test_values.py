"""Values on the command line: read, or refused in one line; what cannot fit into memory is not even tried."""

from __future__ import annotations

import gzip
import io
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from commandline import Result
from damage import check_command, commanded, examine
from signalprop.files.limits import check_fits, memory_limit

FEW, MANY = 6, 200
GIGABYTE = 1 << 30
VALUES = (
    "-1", "0", "1", "2", "1e99", "NaN", "inf", "", "  ", "x", "9" * 30, "9" * 5000, "0x10", "1_000", "-0", "1.5",
    "\ud800",
    "\x00", "\x1b[31m", "../../etc/passwd", "-", "x" * 5000, "true", "null", "[]", "{}", "[1,2]", "[" * 2000, '{"a":1}',
    "%s", "a=b", "=", "1e-400", "\u0663", "../" * 2000,
)  # fmt: skip
OPTIONS = ("--layers", "--d-model", "--heads", "--seq-len", "--dropout", "--activation", "--norm", "--norm-kind",
           "--vocab-size", "--qk-scale", "--scheme", "--fidelity", "--text", "--json", "--plot")  # fmt: skip
FIELDS = ("n_layers", "d_head", "gated", "norm_placement", "norm_eps", "positions", "kind", "input", "qk_norm",
    "family",
          "conv_kernels", "", "x")  # fmt: skip
SMALL = ["--layers", "2", "--d-model", "16", "--seq-len", "8", "--vocab-size", "50"]


def some(*options: str) -> st.SearchStrategy[list[str]]:
    return st.tuples(st.sampled_from(options), st.sampled_from(VALUES)).map(list)


def assigned(option: str, *keys: str) -> st.SearchStrategy[list[str]]:
    return st.tuples(st.sampled_from(keys), st.sampled_from(VALUES)).map(lambda pair: [option, "=".join(pair)])


def several(*kinds: st.SearchStrategy[list[str]]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.one_of(*kinds), min_size=1, max_size=3).map(
        lambda found: [word for part in found for word in part]
    )


NETWORK = several(some(*OPTIONS), assigned("--set", *FIELDS), assigned("--option", "k", "alpha", "std", "x", ""))
BUDGET = assigned("--set", "budget.steps", "data.source", "model.options", "model.scheme", "name", "seed",
    "optimizer.betas",
                  "", "a.b.c", "data.cache", "schema", "model.architecture.n_layers")  # fmt: skip
SUBJECTS: dict[str, tuple[list[str], st.SearchStrategy[list[str]]]] = {
    "predict": (["predict", "tgs", *SMALL], NETWORK),
    "schemes": (["schemes", "deepscalelm", "--architecture", "tgs", *SMALL], NETWORK),
    "compute": (["compute", "tgs"], some("--steps", "--batch-size", "--output-fraction", "--layers", "--set")),
    "kernel": (
        ["kernel", "tgs xavier", "--layers", "2", "--d-model", "16", "--seq-len", "6"],
        some("--at", "--repeats", "--seed", "--input", "--text", "--scheme", "--layers", "--matrices"),
    ),
    "configurations": (["kernel", "--seq-len", "6", "--layers", "2"],
    st.sampled_from(VALUES).map(lambda v: [f"tgs {v}"])),
    "recipes": (["train", "gpt-small", "--show"], BUDGET),
    "sources": (
        [], st.tuples(
            st.sampled_from([["predict"], ["train", "--show"], ["sweep", "--table-only"], ["report", "--out", "r.html"],
                             ["report", "none.json", "--out"], ["compute"]]), st.sampled_from(VALUES),
        ).map(lambda found: [*found[0], found[1]]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize(
    ("examples", "fixed"), [(FEW, True), pytest.param(MANY, False, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_values(subject: str, examples: int, fixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, values = SUBJECTS[subject]
    examine(values, lambda found: check_command(commanded(*arguments, *found)), examples, fixed=fixed)


class TestMemory:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (
                ["predict", "gpt2", "--fidelity", "kernel", "--seq-len", "1000000"],
                "a token kernel of 1,000,000 tokens needs at least 280,000.0 GB",
            ),
            (["kernel", "gpt2 xavier", "--seq-len", "1000000"], "fewer tokens"),
            (["measure", "tgs", "--d-model", "1000000", "--layers", "4"], "parameters needs at least"),
            (
                ["predict", "tgs", "--layers", "100000", "--fidelity", "kernel", "--seq-len", "100000"],
                "needs at least",
            ),
        ],
    )
    def test_the_memory_needed_is_stated(self, arguments: list[str], says: str, tmp_path: Path) -> None:
        begun = time.process_time()
        result = commanded(*arguments, *(["--no-report"] if arguments[0] == "compare" else []))
        check_command(result)
        assert result.status == 2 and says in result.err and "GB of memory; there are" in result.err
        assert time.process_time() - begun < 20

    def test_what_fits_is_left_alone(self) -> None:
        limit = memory_limit()
        assert limit is not None and limit > 10 * 1024**2
        check_fits(limit, "this", "do that")


def limited(arguments: list[str], memory: int, cwd: Path | None = None) -> Result:
    """Python with so much memory at most, 120 s at most, and a disk that takes 64 MB."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 26, 1 << 26))

    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1",
           "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "200"}  # fmt: skip
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False,
                          preexec_fn=limit, env=env, cwd=cwd)  # fmt: skip
    return Result(done.returncode, done.stdout, done.stderr)


def signalprop(*arguments: str, memory: int = GIGABYTE, cwd: Path | None = None) -> Result:
    """The command as a process with a limit."""
    return limited(["-m", "signalprop", *arguments], memory, cwd)


class TestProcesses:
    """Small files that stand for much, read by a process that may take a gigabyte."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("laughs.yaml", "a: &a [x,x,x,x,x,x,x,x]\n" + "".join(
                f"{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a}]\n" for a, b in zip("abcdefghi", "bcdefghij",
                strict=True))),
            ("deep.yaml", "a: " + "[" * 90_000),
            ("pairs.yaml", "a: " + "{" * 90_000),
            ("quotes.yaml", "a: " + '"' * 90_000),
            ("anchors.yaml", "".join(f"a{i}: &a{i} x\n" for i in range(7_000))),
            ("sixties.yaml", "seed: 1" + ":59" * 30_000),
            ("tags.yaml", "a: " + "!x " * 30_000),
        ],
    )  # fmt: skip
    def test_recipes(self, tmp_path: Path, name: str, content: str) -> None:
        (tmp_path / name).write_text(content)
        result = signalprop("train", name, "--show", cwd=tmp_path)
        check_command(result)
        assert result.status == 2

    @pytest.mark.slow
    def test_packed_lines_of_gigabytes(self, tmp_path: Path) -> None:
        with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
            for _ in range(3000):
                file.write(b" " * (1 << 20))
        code = (
            "from damage import outcome\nfrom signalprop_lab.training.sources import documents\n"
            "from signalprop_lab.training.recipe import Data\n"
            "from signalprop_lab.training.sources import training_place\n"
            "data = Data(source='a.jsonl.gz')\n"
            "print(outcome(lambda: list(documents(data, training_place(data)))))"
        )
        assert limited(["-c", code], 6 * GIGABYTE, tmp_path).out == "refused\n"

    @pytest.mark.slow
    def test_arrays_that_unpack_to_gigabytes(self, tmp_path: Path) -> None:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **{"x/forward/0": np.zeros((16_000, 16_000))})
        (tmp_path / "k.npz").write_bytes(buffer.getvalue())
        assert len(buffer.getvalue()) < 4_000_000
        result = signalprop("report", "k.npz", cwd=tmp_path)
        check_command(result)
        assert result.status == 2
