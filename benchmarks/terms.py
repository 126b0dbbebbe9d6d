"""What every finer term of the theory is worth: stored measurements predicted with it and without.

    python -m benchmarks.terms                              # every term, on all sets
    python -m benchmarks.terms --tests                      # the fast test that fails without each
    python -m benchmarks.terms --only "tied head: along the stream" --sets fresh --every 8

A term stays if a fast test fails without it and a cell of a published page moves by more than its standard error. It
prints, of every term: the cells that move by more than their standard error without it, how many of them come nearer
to the measurement with it, and the cell that moves most.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.battery import collected

Without = tuple[str, str, Any]  # module, name in it (or Class.name), what stands there without the term


def _zero(*_: Any, **__: Any) -> Any:
    return 0.0


_SCATTER = "signalprop.theory.scatter.response"
TERMS: dict[str, list[Without]] = {
    "keys that are alike": [("signalprop.kernels.bidirectional_attention", "similar_keys", "nothing alike")],
    "tied head: along the stream": [("signalprop.kernels.predicting", "along_of", lambda *_: None)],
    "tied head: logarithm of the others' sum": [("signalprop.theory.loss_gradient", "log_sum", "at its mean")],
    "gates: chance overlap": [("signalprop.sublayers.feed_forward.signal", "FeedForward._by_chance", _zero)],
    "scatter: tokens' sizes in post-norms": [(_SCATTER, "Response._by_own_sizes", lambda self, sent: 0 * sent)],
}  # fmt: skip


def _special(module: Any, name: str, what: str) -> Any:
    """What stands in a function's place where a plain value does not do."""
    if what == "at its mean":
        log_sum = module.log_sum
        return lambda s, n: (log_sum(s, n)[0], 0.0 * np.asarray(s, float))
    return lambda kernel, score: module.SimilarKeys(
        np.eye(len(kernel)), np.eye(len(kernel)), np.where(np.eye(len(kernel)) > 0, 0.0, -np.inf),
        np.ones(len(kernel)), 1.0, 0.0,
    )  # fmt: skip


_TESTS = {  # by the beginning of a term's name
    "keys that": ("kernels/test_bidirectional_attention.py", "theory/test_repeated_keys.py"),
    "tied head: along": ("kernels/test_tied_head.py",),
    "tied head": ("theory/test_loss_gradient.py",),
    "gates": ("theory/test_network.py", "kernels/test_predicting.py"),
    "scatter": ("theory/test_scatter.py",),
}


def failing_test(term: str) -> str:
    """The first fast test of its files that fails without a term; '' where none does."""
    files = next(files for name, files in _TESTS.items() if term.startswith(name))
    code = (
        "import sys, pytest\nfrom benchmarks.terms import without\n"
        f"with without({term!r}):\n    sys.exit(pytest.main(['-x', '-q', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *(f"tests/{name}" for name in files)], capture_output=True, text=True, check=False
    )
    return next((line.split()[1] for line in ran.stdout.splitlines() if line.startswith("FAILED")), "")


@contextmanager
def without(term: str) -> Iterator[None]:
    """Predictions within this lack the term."""
    patches = []
    for where, name, what in TERMS[term]:
        module = importlib.import_module(where)
        owner, _, attribute = name.rpartition(".")
        target = getattr(module, owner) if owner else module
        patches.append(patch.object(target, attribute, _special(module, name, what) if isinstance(what, str) else what))
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def worth(with_it: dict[str, Any], without_it: dict[str, Any]) -> dict[str, Any]:
    """Of all sets: cells that move beyond their standard error, how many are nearer with the term, the largest."""
    moved, better, most, cell, largest = 0, 0, 0.0, "", 0.0
    for name, rows in without_it.items():
        for key, row in rows.items():
            before = with_it[name].get(key)
            if isinstance(row, str) or isinstance(before, str) or before is None:
                continue
            for quantity in before.keys() & row.keys() - {"first"}:
                (a, se), (b, _) = before[quantity], row[quantity]
                largest = max(largest, abs(a - b))
                if abs(a - b) > se:
                    moved, better = moved + 1, better + (a < b)
                    if abs(a - b) > most:
                        most, cell = abs(a - b), f"{name}, {key}, {quantity}: {b:.2f} % without, {a:.2f} % with"
    return {"cells": moved, "nearer": better, "most": cell, "largest change of any": round(largest, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TERMS), default=list(TERMS), metavar="TERM")
    parser.add_argument("--sets", nargs="+", default=["accuracy", "applied", "fresh"])
    parser.add_argument("--closed", action="store_true", help="of fresh families only those that are not drawn")
    parser.add_argument("--every", type=int, default=1, help="every so many cells of a set (1: all)")
    parser.add_argument("--tests", action="store_true", help="instead: the fast test that fails without each term")
    given = parser.parse_args()
    if given.tests:
        for term in given.only:
            print(f"{term}: {failing_test(term) or 'no fast test fails'}", flush=True)
        return
    how: dict[str, Any] = {"closed": given.closed, "every": given.every}
    whole = collected(given.sets, 0, **how)
    for term in given.only:
        with without(term):
            print(f"{term}: {worth(whole, collected(given.sets, 0, **how))}", flush=True)


if __name__ == "__main__":
    main()
