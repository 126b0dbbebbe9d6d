"""Mutants: which changes there are, that each is one, and that a test which checks the term catches it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from signalprop_lab.mutants import ROOMS, changes_of, mutants

SOURCE = Path(__file__).parents[2] / "src"


def test_constants_signs_operations_and_terms_change_one_at_a_time() -> None:
    tree = ast.parse("def f(x: 'T', i=3):\n    y = x[1] + 2.0 * -x\n    raise ValueError(1 + 1)")
    plain = ast.unparse(tree)
    found = [(line, ast.unparse(tree).splitlines()[1].strip()) for line, _ in changes_of(tree)]
    assert [text for _, text in found] == [
        "y = x[1] - 2.0 * -x", "y = x[1] + 0", "y = x[1] + 2.0 / -x", "y = x[1] + 2.2 * -x", "y = x[1] + 2.0 * +x",
    ]  # fmt: skip
    assert ast.unparse(tree) == plain and {line for line, _ in found} == {2}


def test_the_size_of_what_is_left_for_reshape_to_find_is_no_change() -> None:
    tree = ast.parse("x.reshape(-1, 3), x.sum(-1)")
    assert [ast.unparse(tree) for _ in changes_of(tree)] == [
        "(x.reshape(+1, 3), x.sum(-1))", "(x.reshape(-1, 3), x.sum(+1))", "(x.reshape(-1, 3), x.sum(-2))",
    ]  # fmt: skip


def test_a_guard_is_there_or_not_whatever_its_size() -> None:
    tree = ast.parse("x / (y + 1e-12)")
    assert [ast.unparse(tree) for _ in changes_of(tree)] == ["x * (y + 1e-12)", "x / (y - 1e-12)", "x / (y + 0)"]


@pytest.mark.parametrize("room", ROOMS)
def test_folders_and_tests_of_a_room_are_there(room: str) -> None:
    folders, tests = ROOMS[room]
    assert all(any((SOURCE / folder).rglob("*.py")) for folder in folders)
    assert all((SOURCE.parent / "tests" / name).exists() for name in tests)


@pytest.mark.slow
def test_the_theory_has_many_and_all_can_be_made() -> None:
    every = mutants(SOURCE)
    assert len(every) > 1000 and {"theory", "kernels", "attention"} <= {one.file.parent.name for one in every}
    for one in every[::200]:
        assert ast.dump(one.tree()) != ast.dump(ast.parse(one.file.read_text(encoding="utf-8")))


@pytest.mark.slow
def test_a_tested_term_is_caught(tmp_path: Path) -> None:
    (tmp_path / "src" / "halves").mkdir(parents=True)
    file = Path("src/halves/parts.py")
    (tmp_path / file).write_text(
        "HALF = 1 / 2\n\n\ndef half(x):\n    return x * HALF\n\n\ndef unused(x):\n    return x + 1\n\n\n"
        "TWICE, SQUARE = lambda x: 2 * x, lambda x: x ** 2\n"
    )
    (tmp_path / "test_halves.py").write_text(
        "from halves.parts import SQUARE, TWICE, half\n\n\ndef test_half():\n    assert half(4) == 2\n\n\n"
        "def test_square():\n    assert SQUARE(1) == 1 and SQUARE(2) == 4 and TWICE\n"
    )
    hunting = (
        "import sys; sys.path.insert(0, 'src')\nfrom pathlib import Path\nfrom signalprop_lab import mutants\n"
        f"file = Path({str(file)!r})\nfound = enumerate(mutants.changes_of(mutants.parsed(file)))\n"
        "mutants.hunt([mutants.Mutant(file, at, *change) for at, change in found], ['test_halves.py'])"
    )
    done = subprocess.run([sys.executable, "-c", hunting], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if file.name in line]
    left = [line.split("parts.py:")[1].rpartition("  (")[0] for line in lines if line.startswith("SURVIVED")]
    assert left == ["9  x + 1 -> x - 1", "9  x + 1 -> x", "9  1 -> 2", "12  2 * x -> 2 / x", "12  2 -> 3"]
    assert len(lines) == 10
    assert done.stdout.endswith(f"{10 - len(left)} of 10 mutants are caught\n")
