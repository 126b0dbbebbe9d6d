"""How many small errors in the theory its fast tests catch: `python -m signalprop_lab.mutants`, or `make mutants`.

A mutant is one file of the theory with one constant, sign, operation or term changed. Tests that execute its statement
run on it in a separate process, those that execute least first, until one fails or time is up; nothing is written.
Survivors are printed: either a test is missing, or the term is (it stays if a fast test fails without it). First,
`make mutants` runs the tests once under pytest-cov, which records what each of them executes.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

ROOMS = ("theory", "kernels", "sublayers")
RECORD = Path("out/mutants.coverage")  # of pytest-cov with --cov-context=test
_SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip
_LIMIT = 60  # seconds of processor time for the tests of a mutant; one that no test caught by then survives


class Mutant(NamedTuple):
    """One change. file: of the source. at: which of its changes, in order. line: where. what: in words."""

    file: Path
    at: int
    line: int
    what: str


def changes_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every change that can be made in place to a tree: when the next one is asked for, the last one is undone.

    Yields:
        (line, what it is). Messages, annotations, indices and defaults of settings are left alone.
    """
    for node in _computed(tree):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            old: Any = node.value
            node.value = old + 1 if isinstance(old, int) else old * 1.1 + (old == 0)
            yield node.lineno, f"{old!r} -> {node.value!r}"
            node.value = old
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node.op = ast.UAdd()
            yield node.lineno, f"-({ast.unparse(node.operand)}) without its sign"
            node.op = ast.USub()
        elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
            whole, op, right = ast.unparse(node), node.op, node.right
            node.op = _SWAPPED[type(op)]()
            yield node.lineno, f"{whole} -> {ast.unparse(node)}"
            node.op = op
            if isinstance(op, (ast.Add, ast.Sub)):
                node.right = ast.copy_location(ast.Constant(0), right)
                yield node.lineno, f"{whole} -> {ast.unparse(node.left)}"
                node.right = right


def _computed(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes of arithmetic: constants only where they stand in one."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "slice", "decorator_list") or isinstance(node, (ast.Raise, ast.Assert)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                if not isinstance(child, ast.Constant) or isinstance(node, (ast.BinOp, ast.UnaryOp)):
                    yield child
                yield from _computed(child)


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def mutants(source: Path) -> list[Mutant]:
    """All of the theory in `source`, the folder of the package."""
    files = [file for room in ROOMS for file in sorted((source / room).rglob("*.py")) if file.name not in _BESIDE]
    return [Mutant(file, at, *change) for file in files for at, change in enumerate(changes_of(parsed(file)))]


_BESIDE = ("cost.py", "__init__.py")  # operations are counted, not theory


def mutated(mutant: Mutant) -> ast.Module:
    """The file's tree with that change."""
    tree = parsed(mutant.file)
    next(islice(changes_of(tree), mutant.at, None))
    return copy.deepcopy(tree)


class Record:
    """What each test executed, as pytest-cov recorded it in a file."""

    def __init__(self, file: Path) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(file))
        self._data.read()
        lines = (self._data.contexts_by_lineno(one).values() for one in self._data.measured_files())
        self._size = Counter(name for of_file in lines for names in of_file for name in names)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Ids of tests that execute a mutant's statement (its file, if none does), those that execute least first."""
        spans = [_lines(node) for node in ast.walk(parsed(mutant.file)) if isinstance(node, ast.stmt)]
        statement = min((span for span in spans if mutant.line in span), key=len)
        at = self._data.contexts_by_lineno(str(mutant.file.resolve()))
        names = {name for line in statement for name in at.get(line, ())} - {""}
        names = names or {name for line in at.values() for name in line} - {""}
        return list(dict.fromkeys(name.split("|")[0] for name in sorted(names, key=self._size.__getitem__)))


def _lines(statement: ast.stmt) -> range:
    return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


def is_caught(mutant: Mutant, tests: list[str]) -> bool:
    """Whether a test fails on it in time."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (_LIMIT, _LIMIT + 5))
        os._exit(_tested(mutant, tests))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status in (1, 2)  # pytest's: a test failed, or the file of one could not be imported


def _tested(mutant: Mutant, tests: list[str]) -> int:
    """The exit status of the tests on a mutant, in this process."""
    import pytest

    loaders: Any = SourceFileLoader
    plain, code = loaders.get_code, compile(mutated(mutant), str(mutant.file), "exec")

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        there = Path(loader.get_filename(name)).resolve()
        return code if there == mutant.file.resolve() else plain(loader, name)

    loaders.get_code = get_code
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="only of these files; default: all of the theory")
    parser.add_argument("--number", type=int, default=100, help="how many, by chance (100)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if not RECORD.exists():
        sys.exit(f"{RECORD} is missing, the record of what each test executes; `make mutants` makes it")
    import torch  # noqa: F401  # once for all processes; of signalprop nothing is imported before a mutant is

    every, record = mutants(Path("src/signalprop")), Record(RECORD)
    if given.files:
        every = [one for one in every if one.file in given.files]
    chosen = random.Random(given.seed).sample(every, min(given.number, len(every)))
    caught = 0
    for done, one in enumerate(chosen, 1):
        tests = record.tests_of(one)
        found = is_caught(one, tests)
        caught += found
        verdict = "caught  " if found else "SURVIVED"
        print(f"{verdict} {one.file}:{one.line}  {one.what}  ({len(tests)} tests)", flush=True)
        if done == len(chosen) or not found:
            print(f"{caught} of {done} mutants are caught", flush=True)
    sys.exit(caught < 0.9 * len(chosen))


if __name__ == "__main__":
    main()
