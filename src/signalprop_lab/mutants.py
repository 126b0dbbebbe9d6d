"""How many small errors in some rooms their fast tests catch: `python -m signalprop_lab.mutants`, or `make mutants`.

A mutant is the code with one constant, sign, operation or term changed in memory. Tests are collected once. A forked
process runs those of a file on the plain code and notes which of them reach a changed statement. Then one for each
mutant runs the tests that reach it, the shortest first, then the others of their files (which may find remembered what
a test before them computed), until one fails or time is up. A survivor means that a test is missing or that the term is
not needed (it stays if a fast test fails without it).

Left out is what changes nothing for any input: the size of a negative argument of NumPy's `reshape`, which takes every
negative number as "whatever is left"; and a tenth of a number below 1e-6, which stands where something would else be
divided by 0 or says what counts as equal (that it is added at all is still changed).
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
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice, pairwise
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol

import pytest

# Folders of src/, and what in tests/ is about them.
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "theory": (
        ("signalprop/theory", "signalprop/kernels", "signalprop/sublayers"),
        ("theory", "kernels", "models", "test_invariants.py"),
    ),
    "measuring": (
        ("signalprop/measurement", "signalprop/watching", "signalprop/attachment", "signalprop/streams"),
        ("measurement", "attachment", "streams"),
    ),
    "repair": (("signalprop/repair",), ("repair",)),
    "diagnosis": (("signalprop/diagnosis", "signalprop/monitoring"), ("diagnosis", "monitoring")),
    "training": (("signalprop_lab/training",), ("lab",)),
}
_SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip
_TINY = 1e-6
_LIMIT = 25  # seconds of processor time for the tests of a mutant; one that no test caught by then survives
_LONGEST = 2.0  # of a test: longer ones are not run


class Change(Protocol):
    """A change of one file of the source."""

    @property
    def file(self) -> Path:
        """Of the source."""

    @property
    def line(self) -> int:
        """Where it is."""

    @property
    def what(self) -> str:
        """In words."""

    def tree(self) -> ast.Module:
        """The file's tree with the change."""


class Mutant(NamedTuple):
    """A small change by chance: number `at` of those of its file, in order."""

    file: Path
    at: int
    line: int
    what: str

    def tree(self) -> ast.Module:
        tree = parsed(self.file)
        next(islice(changes_of(tree), self.at, None))
        return tree


def changes_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every change that can be made in place to a tree: when the next one is asked for, the last one is undone.

    Yields:
        (line, what it is). Messages, annotations, indices and defaults of settings are left alone.
    """
    for node in _computed(tree):
        old: Any = node.value if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.Constant) and type(old) in (int, float) and not 0 < old < _TINY:
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


def mutants(source: Path, room: str = "theory") -> list[Mutant]:
    """All of a room in `source`, the folder of the packages."""
    folders = [source / folder for folder in ROOMS[room][0]]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py")) if file.name not in _BESIDE]
    return [Mutant(file, at, *change) for file in files for at, change in enumerate(changes_of(parsed(file)))]


_BESIDE = ("cost.py", "__init__.py")  # of counts of operations, and without code


class Hunt:
    """Plugin of pytest that runs tests on mutants in place of running them once."""

    def __init__(self, chosen: Sequence[Change]) -> None:
        self._chosen, self.caught = chosen, 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        code = Loaded({one.file for one in self._chosen})
        probes = [pair for file in {one.file for one in self._chosen} for pair in self._probes(code, file)]
        assert probes or not self._chosen, "no function with a mutant is found in memory"
        gc.freeze()
        notes: list[tuple[list[int], float, pytest.Item]] = []  # numbers of the mutants that a test reaches; seconds
        for _, group in groupby(session.items, key=lambda item: item.path):
            tests = list(group)
            found = _forked(partial(_notes, session, tests, probes), None) or []
            notes += [(*note, test) for note, test in zip(found, tests, strict=False)]
        notes.sort(key=lambda note: note[1])
        for number, one in enumerate(self._chosen):
            reaching = [test for reached, _, test in notes if number in reached]
            files = {test.path for test in reaching}  # what is remembered is computed by the first test of a file alone
            reaching += [test for reached, _, test in notes if test.path in files and number not in reached]
            failed = _forked(partial(_failing, code, session, one, reaching), _LIMIT)
            self.caught += bool(failed)
            verdict = f"caught    {_said(one)}  by {failed}" if failed else f"SURVIVED  {_said(one)}"
            print(f"{verdict}  ({len(reaching)} tests)", flush=True)
        return True

    def _probes(self, code: Loaded, file: Path) -> list[tuple[FunctionType, CodeType]]:
        lines = {number: one.line for number, one in enumerate(self._chosen) if one.file == file}
        return code.exchanged(file, _probed(file, lines))


def _failing(code: Loaded, session: pytest.Session, mutant: Change, tests: list[pytest.Item]) -> str:
    """The id of the first test that fails on a mutant."""
    code.install(mutant.file, mutant.tree())
    for test in tests:
        session.config.hook.pytest_runtest_protocol(item=test, nextitem=None)
        if session.testsfailed:
            return str(test.nodeid)
    return ""


def _notes(
    session: pytest.Session, tests: list[pytest.Item], probes: list[tuple[FunctionType, CodeType]]
) -> list[tuple[list[int], float]]:
    """Of each test: the mutants whose statements it executes, if it passes without them in time; and its seconds."""
    reached: set[int] = set()
    vars(builtins)["__reached__"] = reached.add
    for one, code in probes:
        one.__code__ = code
    signal.signal(signal.SIGPROF, _too_long)
    notes = []
    for test, following in pairwise([*tests, None]):
        reached.clear()
        start, failures = time.process_time(), session.testsfailed
        signal.setitimer(signal.ITIMER_PROF, _LONGEST)
        session.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        signal.setitimer(signal.ITIMER_PROF, 0)
        passed = session.testsfailed == failures
        notes.append((sorted(reached) * passed, time.process_time() - start))
    return notes


def _too_long(*_: Any) -> None:
    raise TimeoutError


def _said(mutant: Change) -> str:
    return f"{mutant.file}:{mutant.line}  {mutant.what}"


def _forked(act: Callable[[], Any], limit: int | None) -> Any:
    """What a function returns in a silent process; None if it is stopped after so many seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            os.write(writing, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else None


_Key = tuple[str, int, int | None]


class Loaded:
    """Functions of some files as they are loaded, whose code can be exchanged."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._modules = {str(file.resolve()): importlib.import_module(_module_of(file)) for file in files}
        self._functions: dict[str, list[FunctionType]] = {name: [] for name in self._modules}
        gc.unfreeze()  # get_objects leaves out what is frozen
        for one in gc.get_objects():
            if type(one) is FunctionType and one.__code__.co_filename in self._functions:
                self._functions[one.__code__.co_filename].append(one)

    def exchanged(self, file: Path, tree: ast.Module) -> list[tuple[FunctionType, CodeType]]:
        """The functions that differ in this tree of a file, and their code there."""
        name = str(file.resolve())
        plain, changed = (dict(_codes(compile(one, name, "exec"))) for one in (parsed(file), tree))
        keys = [(one, _key(one.__code__)) for one in self._functions[name]]
        return [(one, changed[key]) for one, key in keys if key in changed and plain.get(key) != changed[key]]

    def install(self, file: Path, tree: ast.Module) -> None:
        """Change functions in place; if none differs, what the module computes as it is imported."""
        exchanged = self.exchanged(file, tree)
        for one, code in exchanged:
            one.__code__ = code
        if not exchanged:
            name = str(file.resolve())
            _compute_anew(self._modules[name], compile(tree, name, "exec"))


def _module_of(file: Path) -> str:
    return ".".join(file.with_suffix("").parts[1:])


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
    parser.add_argument("places", nargs="*", metavar="FILE[:LINE]", help="only here; default: all of the room")
    parser.add_argument("--room", choices=ROOMS, default="theory", help="which one (theory)")
    parser.add_argument("--number", type=int, default=100, help="how many, by chance (100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", help="files of tests; default: those of the room")
    given = parser.parse_args()
    every = mutants(Path("src"), given.room)
    if given.places:
        every = [one for one in every if {str(one.file), f"{one.file}:{one.line}"} & set(given.places)]
        if not every:
            parser.error(f"nothing to change there in {', '.join(ROOMS[given.room][0])} (--room names another room)")
    chosen = random.Random(given.seed).sample(every, min(given.number, len(every)))
    tests = given.tests or [f"tests/{name}" for name in ROOMS[given.room][1]]
    sys.exit(hunt(chosen, tests) < 0.9 * len(chosen))


def hunt(chosen: Sequence[Change], tests: list[str]) -> int:
    """Run tests on mutants, print what becomes of each; returns the number of those that are caught."""
    plugin = Hunt(chosen)
    status = pytest.main(["-q", "-s", "-p", "no:cacheprovider", *tests], plugins=[plugin])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit(f"pytest ended before the tests ran: {status!r}")
    print(f"{plugin.caught} of {len(chosen)} mutants are caught")
    return plugin.caught


if __name__ == "__main__":
    main()
