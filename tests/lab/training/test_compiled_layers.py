"""`compile: true` of a recipe: layers that are the same share a graph, and losses are those of an uncompiled run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from signalprop_lab.training.devices import compile_layers
from signalprop_lab.training.networks import network_of
from signalprop_lab.training.recipe import Recipe, parse
from signalprop_lab.training.run import train
from signalprop_lab.training.tasks import prepare

# of PyTorch's compiler, which looks at the streams between compiled layers
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def _recipe(layers: int, scheme: str, **settings: object) -> Recipe:
    architecture = {"kind": "decoder", "n_layers": layers, "d_model": 16, "n_heads": 2, "positions": "rotary"}
    return parse(
        {
            "schema": "signalprop/recipe/1",
            "name": "layers",
            "task": "causal-lm",
            "model": {"architecture": architecture, "scheme": scheme},
            "data": {"tokenizer": {"kind": "bytes"}, "seq_len": 16},
            "budget": {"steps": 3, "batch_size": 4},
            "cadence": {"log": 1, "evaluate": 0, "save": 0, "validation_examples": 16},
        }
        | settings
    )


@pytest.mark.parametrize("scheme", ["deepscalelm", "lns"])
def test_depth_costs_no_graphs(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 layers have as many graphs as 3, with multipliers that change with depth (LayerNorm Scaling) too."""
    graphs: list[object] = []

    def backend(module: torch.fx.GraphModule, _: object) -> object:
        graphs.append(module)
        return module.forward

    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer: compiled(layer, backend=backend))
    counts = []
    for layers in (3, 12):
        recipe = _recipe(layers, scheme)
        network = network_of(recipe, prepare(recipe))
        torch.compiler.reset()
        graphs.clear()
        compile_layers(network)
        network.module(torch.randint(0, 256, (2, 16)))
        counts.append(len(graphs))
    assert 0 < counts[0] == counts[1] <= 4


def test_trains_the_same(tmp_path: Path) -> None:
    """Losses of a compiled run are those of the uncompiled one to 1e-5."""
    plain, compiled = (
        train(_recipe(2, "deepscalelm", compile=on), tmp_path / str(on), progress=False) for on in (False, True)
    )
    assert compiled.train_loss == pytest.approx(plain.train_loss, rel=1e-5)
    assert compiled.eval_loss == pytest.approx(plain.eval_loss, rel=1e-5)
