"""How many small errors in the theory its fast tests catch: `python -m signalprop_lab.mutants`, or `make mutants`.

A mutant is the theory with one constant, sign, operation or term changed in memory. Tests are collected once. Then, by
file of tests, one forked process runs them on the plain theory and notes which of them reach a changed statement, and
one more for each mutant runs those until one fails. Survivors are printed at the end: either a test is missing, or the
term is not needed (it stays if a fast test fails without it).

Left out is what changes nothing for any input: the size of a negative argument of NumPy's `reshape`, which takes every
negative number as "whatever is left".
"""

from __future__ import annotations

import argparse
import ast
import builtins
import gc
import importlib
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby, islice, pairwise
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

ROOMS = ("theory", "kernels", "sublayers")
TESTED = ("theory", "kernels", "network", "models", "schemes", "test_invariants.py")  # of tests/
_SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip
_LIMIT = 60.0  # seconds of processor time for the tests of a mutant; one that no test caught by then survives


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
                if not (_is_reshape(node) and isinstance(child, ast.UnaryOp)):
                    yield from _computed(child)


def _is_reshape(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "reshape"


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
    return tree


class Hunt:
    """Plugin of pytest that runs tests on mutants in place of running them once."""

    def __init__(self, chosen: list[Mutant]) -> None:
        self._chosen = chosen
        self.left = dict.fromkeys(range(len(chosen)), _LIMIT)  # not caught yet: seconds that their tests may still take

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        theory = _Loaded({one.file for one in self._chosen})
        for file, group in groupby(session.items, key=lambda item: item.path):
            tests = list(group)
            for number, reaching in self._tests_that_reach(theory, session, tests).items():
                look = partial(self._is_caught, theory, session, number, reaching)
                found, seconds = _forked(look, self.left[number])
                self.left[number] -= seconds
                if found:
                    del self.left[number]
                    print(f"caught    {_said(self._chosen[number])}  by {file.name}, {seconds:.0f} s", flush=True)
        return True

    def _tests_that_reach(
        self, theory: _Loaded, session: pytest.Session, tests: list[pytest.Item]
    ) -> dict[int, list[pytest.Item]]:
        """By mutants that are left: the tests that execute its statement and pass without it, the shortest first."""
        notes, _ = _forked(partial(self._notes, theory, session, tests), None)
        of_tests = sorted(zip(notes, tests, strict=True), key=lambda one: one[0]["seconds"])
        by_mutant = {
            k: [test for note, test in of_tests if k in note["reached"]] for k, left in self.left.items() if left > 0
        }
        return {number: reaching for number, reaching in by_mutant.items() if reaching}

    def _notes(self, theory: _Loaded, session: pytest.Session, tests: list[pytest.Item]) -> list[dict[str, Any]]:
        """Of each test: which mutants' statements it executes, and the seconds that it takes."""
        reached: set[int] = set()
        vars(builtins)["__reached__"] = reached.add
        for file in {self._chosen[number].file for number in self.left}:
            numbers = [number for number in self.left if self._chosen[number].file == file]
            theory.install(file, _probed(file, {number: self._chosen[number].line for number in numbers}))
        notes = []
        for test, following in pairwise([*tests, None]):
            reached.clear()
            start, failures = time.perf_counter(), session.testsfailed
            session.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            passed = session.testsfailed == failures
            notes.append({"reached": sorted(reached) * passed, "seconds": time.perf_counter() - start})
        return notes

    def _is_caught(self, theory: _Loaded, session: pytest.Session, number: int, tests: list[pytest.Item]) -> bool:
        theory.install(self._chosen[number].file, mutated(self._chosen[number]))
        for test, following in pairwise([*tests, None]):
            session.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            if session.testsfailed:
                return True
        return False


def _said(mutant: Mutant) -> str:
    return f"{mutant.file}:{mutant.line}  {mutant.what}"


def _forked(act: Callable[[], Any], limit: float | None) -> tuple[Any, float]:
    """What a function answers in a silent process of its own, None if it is cut short; and its processor time."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, int(limit) + 5))
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            os.write(writing, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    used = os.wait4(child, 0)[2]
    return json.loads(answer) if answer else None, used.ru_utime + used.ru_stime


_Key = tuple[str, int, int | None]


class _Loaded:
    """Functions of some files as they are loaded, whose code can be exchanged."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._modules = {file: importlib.import_module(".".join(file.with_suffix("").parts[1:])) for file in files}
        self._functions = [one for one in gc.get_objects() if type(one) is FunctionType]
        gc.freeze()

    def install(self, file: Path, tree: ast.Module) -> None:
        """Change functions in place; if none differs, what the module computes as it is imported."""
        name = str(file.resolve())
        code = compile(tree, name, "exec")
        plain, changed = (dict(_codes(one)) for one in (compile(parsed(file), name, "exec"), code))
        different = {key for key in changed if plain.get(key) != changed[key]}
        for one in self._functions:
            key = _key(one.__code__)
            if one.__code__.co_filename == name and key in different:
                one.__code__ = changed[key]
        if not different:
            _compute_anew(self._modules[file], code)


def _codes(code: CodeType) -> Iterator[tuple[_Key, CodeType]]:
    """Every function in a code."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield _key(one), one
            yield from _codes(one)


def _key(code: CodeType) -> _Key:
    """Name and line; of a lambda, the column of its expression too, as several may stand in one line."""
    return code.co_qualname, code.co_firstlineno, [*code.co_positions()][-1][2] if code.co_name == "<lambda>" else None


def _compute_anew(module: ModuleType, code: CodeType) -> None:
    """Exchange constants of a module, in each module that imported them."""
    namespace = {**vars(module)}
    exec(code, namespace)
    values = {id(old): namespace[name] for name, old in vars(module).items() if not callable(old) and name[:2] != "__"}
    for other in [one for one in sys.modules.values() if isinstance(one, ModuleType)]:
        for name, value in list(vars(other).items()):
            if id(value) in values:
                setattr(other, name, values[id(value)])


def _probed(file: Path, lines: dict[int, int]) -> ast.Module:
    """A file's tree that notes which statements are executed.

    Args:
        lines: by number, a line of the statement. One outside of functions counts with every function of the file.
    """
    tree = parsed(file)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    inside = {one for function in functions for one in ast.walk(function) if one is not function}
    statements = [one for one in ast.walk(tree) if isinstance(one, ast.stmt)]
    probes: dict[ast.AST, list[int]] = {}
    for number, line in lines.items():
        of_line = [one for one in statements if line in range(one.lineno, (one.end_lineno or one.lineno) + 1)]
        smallest = min(of_line, key=lambda one: (one.end_lineno or one.lineno) - one.lineno)
        first = [one.body[0] if isinstance(one, ast.FunctionDef) else one for one in functions]
        for one in [smallest] if smallest in inside else first:
            probes.setdefault(one, []).append(number)
    for node in list(ast.walk(tree)):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list):
                block[:] = [x for one in block for x in (*(ast.Expr(_probe(n)) for n in probes.get(one, ())), one)]
        if isinstance(node, ast.Lambda) and node in probes:
            node.body = ast.copy_location(ast.BoolOp(ast.Or(), [*map(_probe, probes[node]), node.body]), node.body)
    return ast.fix_missing_locations(tree)


def _probe(number: int) -> ast.expr:
    """A call that notes a number and is false."""
    return ast.parse(f"__reached__({number})", mode="eval").body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", metavar="FILE[:LINE]", help="only here; default: all of the theory")
    parser.add_argument("--number", type=int, default=100, help="how many, by chance (100)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    every = mutants(Path("src/signalprop"))
    if given.places:
        every = [one for one in every if {str(one.file), f"{one.file}:{one.line}"} & set(given.places)]
    chosen = random.Random(given.seed).sample(every, min(given.number, len(every)))
    sys.exit(hunt(chosen, [f"tests/{name}" for name in TESTED]) > 0.1 * len(chosen))


def hunt(chosen: list[Mutant], tests: list[str]) -> int:
    """Run tests on mutants, print each as it is caught and the survivors; returns the number of these."""
    plugin = Hunt(chosen)
    status = pytest.main(["-q", "-s", "-p", "no:cacheprovider", *tests], plugins=[plugin])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit(f"pytest ended before the tests ran: {status!r}")
    for number in plugin.left:
        print(f"SURVIVED  {_said(chosen[number])}")
    print(f"{len(chosen) - len(plugin.left)} of {len(chosen)} mutants are caught")
    return len(plugin.left)


if __name__ == "__main__":
    main()
