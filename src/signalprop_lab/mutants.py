"""How many small errors in the theory its fast tests catch: `python -m signalprop_lab.mutants`, or `make mutants`.

A mutant is one file of the theory with one constant, sign, operation or term changed. Tests run on it in a process of
its own, those of the file first, up to the first failure; nothing is written. Survivors are printed: either a test is
missing, or the term is (it stays if a fast test fails without it).
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

ROOMS = ("theory", "kernels", "sublayers")
TESTS = ("tests/theory", "tests/kernels", "tests/models", "tests/schemes", "tests/test_invariants.py")
_SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip
_LIMIT = 900.0  # seconds for the tests of a mutant; one that takes longer is caught: it hangs


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


def mutants(source: Path) -> list[Mutant]:
    """All of the theory in `source`, the folder of the package."""
    files = [file for room in ROOMS for file in sorted((source / room).rglob("*.py")) if file.name not in _BESIDE]
    return [
        Mutant(file, at, line, what)
        for file in files
        for at, (line, what) in enumerate(changes_of(ast.parse(file.read_text(encoding="utf-8"))))
    ]


_BESIDE = ("cost.py", "__init__.py")  # operations are counted, not theory


def mutated(mutant: Mutant) -> ast.Module:
    """The file's tree with that change."""
    tree = ast.parse(mutant.file.read_text(encoding="utf-8"))
    for at, _ in enumerate(changes_of(tree)):
        if at == mutant.at:
            return copy.deepcopy(tree)
    raise IndexError(f"{mutant.file} has no change {mutant.at}")


def tests_of(mutant: Mutant, tests: list[str]) -> list[str]:
    """Those of the file or its folder by name first, then all."""
    names = {f"test_{mutant.file.stem}.py", f"test_{mutant.file.parent.name}.py"}
    first = [str(file) for file in sorted(Path("tests").rglob("test_*.py")) if file.name in names]
    return list(dict.fromkeys([*first, *tests]))


def is_caught(mutant: Mutant, tests: list[str]) -> bool:
    """Whether a test fails on it, or none ends in time."""
    child = os.fork()
    if child == 0:
        os._exit(_tested(mutant, tests))
    end = time.monotonic() + _LIMIT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) != 0
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


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
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests_of(mutant, tests)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="only of these files; default: all of the theory")
    parser.add_argument("--number", type=int, default=100, help="how many, by chance (100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="what runs, beside tests of the file's name")
    given = parser.parse_args()
    import torch  # noqa: F401  # once for all processes; of signalprop nothing is imported before a mutant is

    every = mutants(Path("src/signalprop"))
    if given.files:
        every = [one for one in every if one.file in given.files]
    chosen = random.Random(given.seed).sample(every, min(given.number, len(every)))
    caught = 0
    for done, one in enumerate(chosen, 1):
        found = is_caught(one, given.tests)
        caught += found
        print(f"{'caught  ' if found else 'SURVIVED'} {one.file}:{one.line}  {one.what}", flush=True)
        if done == len(chosen) or not found:
            print(f"{caught} of {done} mutants are caught", flush=True)
    sys.exit(caught < 0.9 * len(chosen))


if __name__ == "__main__":
    main()
