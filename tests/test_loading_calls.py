"""Whatever loads a checkpoint goes through one module, as the calls in the source tree say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOOR = "src/signalprop/files/checkpoint_loading.py"
# Calls that can run what a file brings, or fetch what it names. `load` of these modules; the others of anything.
LOADS = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "marshal", "shelve", "torch", "yaml", "jit", "hub"}
CALLS = {
    "from_pretrained", "from_config", "_from_config", "for_model", "load_dataset", "load_from_disk",
    "snapshot_download", "hf_hub_download", "get_class_from_dynamic_module", "load_checkpoint", "load_adapter",
    "unsafe_load", "full_load", "load_state_dict_from_url", "Unpickler", "eval", "exec", "__import__", "run_module",
    "run_path", "pipeline",
}  # fmt: skip
# What else there is, each looked at.
LOOKED_AT = {
    ("src/signalprop_lab/training/recipe_files.py", "yaml.load"): 1,  # with a loader that is a SafeLoader
    ("src/signalprop/diagnosis/loading.py", "getattr(transformers, ...)"): 1,  # four names that stand there
    ("src/signalprop_lab/training/networks.py", "getattr(transformers, ...)"): 1,  # a table that stands there
    ("benchmarks/small_models.py", "getattr(transformers, ...)"): 1,  # names in transformers' own tables
    ("benchmarks/fresh_families.py", "for_model"): 1,  # a configuration by its type, of a table that stands there
    ("benchmarks/notebooks.py", "exec"): 1,  # the project's own examples
    ("benchmarks/notebooks.py", "eval"): 1,
}


def calls_in(source: str) -> list[str]:
    """Calls of a module that load, and looks into transformers by names that are not written there."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Attribute):
            owner = function.value
            last = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if function.attr in CALLS - {"eval"}:
                found.append(function.attr)
            elif function.attr in ("load", "loads", "load_all") and last in LOADS:
                found.append(f"{last}.{function.attr}")
            elif function.attr == "load" and last in ("np", "numpy"):
                wanted = [k for k in node.keywords if k.arg in ("allow_pickle", None)]  # by default it is not
                found += [] if all(getattr(k.value, "value", True) is False for k in wanted) else ["np.load"]
        elif isinstance(function, ast.Name):
            if function.id in CALLS:
                found.append(function.id)
            elif function.id == "getattr" and isinstance(node.args[0], ast.Name) and node.args[0].id == "transformers":
                found += [] if isinstance(node.args[1], ast.Constant) else ["getattr(transformers, ...)"]
        found += [f"{k.arg}=True" for k in node.keywords if k.arg == "trust_remote_code" and _true(k.value)]
    return found


def _true(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def files() -> list[Path]:
    found = (path for top in ("src", "benchmarks") for path in (ROOT / top).rglob("*.py"))
    return sorted(path for path in found if path.relative_to(ROOT).as_posix() != DOOR)


def test_every_load_goes_through_one_module() -> None:
    found: dict[tuple[str, str], int] = {}
    for path in files():
        for call in calls_in(path.read_text("utf-8")):
            key = (path.relative_to(ROOT).as_posix(), call)
            found[key] = found.get(key, 0) + 1
    assert found == LOOKED_AT
    assert {"from_pretrained", "load_dataset"} <= set(calls_in((ROOT / DOOR).read_text("utf-8")))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("transformers.AutoModel.from_pretrained(x)", ["from_pretrained"]),
        ("getattr(transformers, name)(x)", ["getattr(transformers, ...)"]),
        ("getattr(transformers, 'GPT2Model')", []),
        ("torch.load(x)", ["torch.load"]),
        ("torch.hub.load(x)", ["hub.load"]),
        ("np.load(x, allow_pickle=flag)", ["np.load"]),
        ("np.load(x, **options)", ["np.load"]),
        ("np.load(x)", []),
        ("np.load(x, allow_pickle=False)", []),
        ("json.load(x); model.eval()", []),
        ("load(x, trust_remote_code=True)", ["trust_remote_code=True"]),
        ("eval(x)", ["eval"]),
    ],
)
def test_what_it_finds(source: str, found: list[str]) -> None:
    assert calls_in(source) == found
