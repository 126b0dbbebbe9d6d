"""A family of transformers is one file: it says everything, or what is missing is told when it is imported."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import signalprop
from signalprop import families
from signalprop.errors import InputError
from signalprop.families import bart, base, gemma3_text, llama, t5, vit
from signalprop.families.base import Family, Initialisation, ModelPaths


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in llama.FAMILY.defaults.items() if name != key}


def stack_of(family: Family, **changes: Any) -> tuple[ModelPaths, ...]:
    """The family's paths with something else in the first sublayer."""
    (paths,) = family.paths
    (stack,) = paths.stacks
    first, second = stack.sublayers
    return (replace(paths, stacks=(replace(stack, sublayers=(replace(first, **changes), second)),)),)


def said_twice() -> tuple[ModelPaths, ...]:
    (paths,) = llama.FAMILY.paths
    return (replace(paths, stacks=paths.stacks * 2),)


INCOMPLETE: dict[str, tuple[Family, dict[str, Any], str]] = {
    "a default": (llama.FAMILY, {"defaults": without("rms_norm_eps")}, "reads 'rms_norm_eps', which `defaults` lacks"),
    "a field": (
        llama.FAMILY,
        {"fields": lambda c: {"kind": "decoder"}},
        "its defaults cannot be read: InputError .*n_l",
    ),
    "paths": (llama.FAMILY, {"paths": ()}, "it lacks paths"),
    "a weight": (
        llama.FAMILY,
        {"paths": stack_of(llama.FAMILY, weights={"query": "q"})},
        r"weights\['key'\].*stack 'l",
    ),
    "a stack": (llama.FAMILY, {"paths": said_twice()}, r"paths.stacks of 1 \(decoder\)"),
    "a second norm": (gemma3_text.FAMILY, {"paths": stack_of(gemma3_text.FAMILY, post_norm="")}, "lacks post_norm in"),
    "a norm of queries": (gemma3_text.FAMILY, {"paths": stack_of(gemma3_text.FAMILY, query_norm="")}, "lacks query_no"),
    "a table": (bart.FAMILY, {"paths": (replace(bart.PATHS, decoder_position=None),)}, "lacks paths.decoder_position"),
    "class tokens": (vit.FAMILY, {"paths": vit.paths()}, "lacks paths.class_tokens"),
    "a role": (t5.FAMILY, {"initialisation": Initialisation(lambda a: {"query": 1.0})}, "standard deviation of 'key'"),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_an_incomplete_family_says_what_is_missing(case: str) -> None:
    family, changes, message = INCOMPLETE[case]
    with pytest.raises(InputError, match=message) as caught:
        replace(family, **changes)
    assert str(caught.value).startswith(f"the family {family.model_type!r} is incomplete: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FAMILY = replace(llama.FAMILY, model_type='halfway', paths=())", "'halfway' is incomplete: it lacks paths"),
        ("FAMILY = replace(llama.FAMILY, model_type='other')", "holds the family 'other'; expected the file's name"),
        ("FAMILIE = llama.FAMILY", "holds no family: AttributeError"),
        (
            "FAMILY = base.Family(model_type='halfway', defaults={})",
            "missing 3 required .*'fields', 'paths', and 'init",
        ),
    ],
)
def test_an_incomplete_file_is_one_line(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ("from dataclasses import replace", "from signalprop.families import base, llama", text, "")
    (tmp_path / "halfway.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    families._modules.cache_clear()
    importlib.invalidate_caches()
    try:
        with pytest.raises(InputError, match=message) as caught:
            signalprop.Architecture.from_hf({"model_type": "halfway"})
        assert "\n" not in str(caught.value)
    finally:
        sys.modules.pop("signalprop.families.halfway", None)
        families._modules.cache_clear()


def test_only_a_family_is_found() -> None:
    found = families.find("llama")
    assert found is llama.FAMILY and isinstance(found, base.Family)
    no_families = ("base", "reading", "__init__", "os", "../llama", "llama.py", "gemma3-text")
    for name in (*no_families, None, 3, ["llama"]):
        assert families.find(name) is None


def test_a_family_is_imported_when_it_is_read() -> None:
    code = (
        "import sys, signalprop; a = signalprop.Architecture.from_hf({'model_type': 'mistral'}); "
        "print(sorted(m.rpartition('.')[2] for m in sys.modules if m.startswith('signalprop.families.'))); "
        "signalprop.predict(signalprop.scheme('huggingface')(a.replace(n_layers=2, seq_len=64))); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['base', 'llama', 'mistral', 'reading']", "False"]
