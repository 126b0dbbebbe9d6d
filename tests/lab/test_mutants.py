"""Mutants: which changes there are, that each is one, and that a test which checks the term catches it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from signalprop_lab.mutants import Mutant, changes_of, is_caught, mutants, mutated

SOURCE = Path(__file__).parents[2] / "src" / "signalprop"


def test_constants_signs_operations_and_terms_change_one_at_a_time() -> None:
    tree = ast.parse("def f(x: 'T', i=3):\n    y = x[1] + 2.0 * -x\n    raise ValueError(1 + 1)")
    plain = ast.unparse(tree)
    found = [(line, ast.unparse(tree).splitlines()[1].strip()) for line, _ in changes_of(tree)]
    assert [text for _, text in found] == [
        "y = x[1] - 2.0 * -x", "y = x[1] + 0", "y = x[1] + 2.0 / -x", "y = x[1] + 2.2 * -x", "y = x[1] + 2.0 * +x",
    ]  # fmt: skip
    assert ast.unparse(tree) == plain and {line for line, _ in found} == {2}


@pytest.mark.slow
def test_the_theory_has_many_and_all_can_be_made() -> None:
    every = mutants(SOURCE)
    assert len(every) > 1000 and {"theory", "kernels", "attention"} <= {one.file.parent.name for one in every}
    for one in every[::200]:
        assert ast.dump(mutated(one)) != ast.dump(ast.parse(one.file.read_text(encoding="utf-8")))


@pytest.mark.parametrize(("change", "caught"), [("dropped", True), ("unused", False)])
@pytest.mark.slow
def test_a_tested_term_is_caught(tmp_path: Path, change: str, caught: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "halves.py"
    file.write_text("def half(x):\n    return x / 2\n\n\ndef unused(x):\n    return x + 1\n")
    (tmp_path / "test_halves.py").write_text(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom halves import half\n\n\n"
        "def test_half():\n    assert half(4) == 2\n"
    )
    monkeypatch.chdir(tmp_path)
    at = 0 if change == "dropped" else 2
    assert is_caught(Mutant(file, at, 2, change), ["test_halves.py"]) is caught
    assert not is_caught(Mutant(file, at, 2, change), ["test_halves.py::test_gone"])  # a record of other files
