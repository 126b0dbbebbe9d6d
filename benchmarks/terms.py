"""What every finer term of the theory is worth: stored measurements predicted with it and without, and its fast test.

    python -m benchmarks.terms                              # every term: the cells that move
    python -m benchmarks.terms --tests                      # the fast test that fails without each
    python -m benchmarks.terms --only "one key moves two queries" --sets fresh --every 8

A term stays if a fast test fails without it and a cell of a published page moves by more than its standard error. It
prints, of every term: the cells that move by more than their standard error without it, how many of them come nearer
to the measurement with it, and the cell that moves most. records/terms.md has the table.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.battery import collected
from signalprop_lab.mutants import Loaded, hunt

SOURCE = Path("src/signalprop")


class Term(NamedTuple):
    """A term, as the source has it and as it is without.

    Attributes:
        what: in words. where: file in src/signalprop. source: what stands there, once. without: instead.
        size: lines that go with it, of all files.
    """

    what: str
    where: str
    source: str
    without: str
    size: int

    @property
    def file(self) -> Path:
        return SOURCE / self.where

    @property
    def line(self) -> int:
        """The line where it stands."""
        return self.file.read_text(encoding="utf-8").partition(self.source)[0].count("\n") + 1

    def tree(self) -> ast.Module:
        """The file's tree without it."""
        return ast.parse(self.file.read_text(encoding="utf-8").replace(self.source, self.without))


TERMS = [
    Term("keys that are similar to one another", "kernels/bidirectional_attention.py",
         "return similar_keys(self._turned, self.qk * float((self._asks_per_token + self.query_bias).mean()))",
         "return similar_keys(np.eye(len(self.kernel)), 1.0)", 200),
    Term("keys in a crowd get less than their share", "kernels/causal_attention.py",
         "return self._per_row(1 + np.clip(found, -1.0, 0.0))", "return self._per_row(1 + 0 * found)", 17),
    Term("causal keys that are similar on purpose", "kernels/causal_attention.py",
         "return np.asarray(self.qk * structural * (1 - self._rows.second) ** 2)", "return 0 * self._row_length", 17),
    Term("one key moves two queries", "kernels/causal_attention.py",
         "return both if self._turn is None else both * self._turn", "return 0 * both", 7),
    Term("chance overlap of keys", "kernels/causal_attention.py",
         "return np.asarray(self.qk * coherent / self.d_model * self._spread * self._of_values.spread)",
         "return 0 * self._spread * self._of_values.spread", 12),
    Term("keys popular with two queries", "kernels/causal_attention.py",
         "return self._of_pair(popular), self._of_pair(overlap), self._of_pair(c)",
         "return self._of_pair(0 * popular), self._of_pair(overlap), self._of_pair(c)", 212),
    Term("the tied head along the stream", "kernels/passes.py",
         "ahead.along = along_of(stack, inputs, last, log_share)", "ahead.along = None", 150),
    Term("chance overlap of gates", "sublayers/feed_forward/signal.py",
         "hidden.shared + self._by_chance(row, x, gate)", "hidden.shared", 6),
    Term("bands: tokens' sizes in post-norms", "theory/scatter/response.py",
         "return np.asarray(sizes - unseen)", "return 0 * sizes", 15),
    Term("bands: what kernels know of overlaps", "theory/scatter/response.py",
         "        if known is None:", "        if True:", 25),
    Term("bands: the mean of narrow networks", "theory/scatter/bands.py",
         ", x.means(), x.profile", ", {k: 0 * v for k, v in x.means().items()}, x.profile", 40),
]  # fmt: skip


@contextmanager
def without(term: Term) -> Iterator[None]:
    """Predictions within this lack the term."""
    exchanged = Loaded([term.file]).exchanged(term.file, term.tree())
    with_it = [(one, one.__code__) for one, _ in exchanged]
    for one, code in exchanged:
        one.__code__ = code
    try:
        yield
    finally:
        for one, code in with_it:
            one.__code__ = code


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
    parser.add_argument("--only", nargs="+", default=[term.what for term in TERMS], metavar="TERM")
    parser.add_argument("--sets", nargs="+", default=["accuracy", "applied", "fresh"])
    parser.add_argument("--closed", action="store_true", help="of fresh families only those that are not drawn")
    parser.add_argument("--every", type=int, default=1, help="every so many cells of a set (1: all)")
    parser.add_argument("--tests", action="store_true", help="instead: the fast test that fails without each term")
    given = parser.parse_args()
    terms = [term for term in TERMS if term.what in given.only]
    if given.tests:
        hunt(terms, ["tests/theory", "tests/kernels", "tests/models"])
        return
    how: dict[str, Any] = {"closed": given.closed, "every": given.every}
    whole = collected(given.sets, 0, **how)
    for term in terms:
        with without(term):
            print(f"{term.what}: {worth(whole, collected(given.sets, 0, **how))}", flush=True)


if __name__ == "__main__":
    main()
