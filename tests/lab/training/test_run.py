"""What a recipe may ask of a run beside its network and data: more steps, less memory, loggers, units of its loss."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import trained
from signalprop.cli import run as run_command
from signalprop.errors import InputError
from signalprop_lab.report.runs import read_run
from signalprop_lab.training import environment
from signalprop_lab.training.devices import compile_layers
from signalprop_lab.training.examples import Shuffled
from signalprop_lab.training.networks import network_of
from signalprop_lab.training.optimizers import make_optimizer, rate_factor
from signalprop_lab.training.recipe import Recipe, Schedule, load_recipe, parse
from signalprop_lab.training.result import Result
from signalprop_lab.training.run import train
from signalprop_lab.training.tasks import prepare

SMALL = ("model.architecture.n_layers=1", "schedule.kind=constant", "schedule.final=0", "schedule.warmup=1",
         "cadence.signal=0", "cadence.save=2", "cadence.validation_examples=8")  # fmt: skip
LLAMA = (
    "{model_type: llama, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2, "
    "num_key_value_heads: 2}"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Fewer words than the recipe's, which take seconds."""
    return f"data.source={trained.write_text(tmp_path_factory.mktemp('text'))}"


def run(folder: Path, *settings: str, resume: bool = False) -> Result:
    return train("bytes-decoder", folder, settings=(*SMALL, *settings), resume=resume, progress=False, final=False)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, text: str) -> Result:
    return run(tmp_path_factory.mktemp("runs") / "four", "budget.steps=4", text)


def test_a_finished_run_can_be_given_more_steps(tmp_path: Path, four: Result, text: str) -> None:
    assert run(tmp_path / "run", "budget.steps=2", text).steps == 2
    longer = run(tmp_path / "run", "budget.steps=4", text, resume=True)
    assert (longer.steps, longer.eval_loss) == (4, four.eval_loss)
    with pytest.raises(InputError, match="budget"):
        run(tmp_path / "run", "budget.steps=3", text, resume=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(InputError, match=r"no checkpoint from which to continue to 5 steps; only runs with a cad"):
        run(tmp_path / "run", "budget.steps=5", text, resume=True)


def test_muon_takes_the_layers_matrices_and_adamw_the_rest() -> None:
    recipe = load_recipe(
        "bytes-decoder", ["optimizer.name=muon", "optimizer.rest_rate=1e-3", "optimizer.weight_decay=0.1"]
    )
    torch.manual_seed(0)
    both = [nn.Parameter(torch.randn(shape)) for shape in ((4, 6), (6, 4), (5, 4), (4,))]
    apart = [nn.Parameter(p.detach().clone()) for p in both]
    numbers = {"lr": 0.01, "weight_decay": 0.1}
    one = make_optimizer([{"params": both[i : i + 2], "use_muon": i == 0} | numbers for i in (0, 2)], recipe)
    two = [
        torch.optim.Muon(apart[:2], **numbers),
        torch.optim.AdamW(apart[2:], betas=recipe.optimizer.betas, fused=True, **numbers),
    ]
    for _ in range(3):
        for optimizer, parameters in ((one, both), *((other, apart) for other in two)):
            optimizer.zero_grad()
            sum((p**3).sum() for p in parameters).backward()  # type: ignore[union-attr]
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(both, apart, strict=True))


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param((), marks=pytest.mark.slow),
        ("model.architecture=null", "model.scheme=null", "model.ends=null", f"model.huggingface={LLAMA}"),
    ],
)
@pytest.mark.slow
def test_a_run_by_muon_goes_on_where_it_was(tmp_path: Path, scheme: tuple[str, ...]) -> None:
    muon = ("optimizer.name=muon", "optimizer.learning_rate=0.02", "optimizer.rest_rate=1e-3", *scheme)
    whole = run(tmp_path / "whole", "budget.steps=4", *muon)
    run(tmp_path / "run", "budget.steps=2", *muon)
    assert run(tmp_path / "run", "budget.steps=4", *muon, resume=True).eval_loss == whole.eval_loss


@pytest.mark.slow
def test_a_stream_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["data.streaming=true", "data.validation=0.2", f"data.source={tmp_path / 'a.txt'}"]
    (tmp_path / "a.txt").mkdir()
    for name in "abcdefghijklmnop":
        (tmp_path / "a.txt" / f"{name}.txt").write_text(f"{name} was here before. " * 60)
    whole = run(tmp_path / "whole", "budget.steps=4", *settings)
    run(tmp_path / "run", "budget.steps=2", *settings)
    begun: list[int] = []
    items = Shuffled.items
    monkeypatch.setattr(Shuffled, "items", lambda self, seed, at: begun.append(at.given) or items(self, seed, at))
    assert run(tmp_path / "run", "budget.steps=4", *settings, resume=True).eval_loss == whole.eval_loss
    assert begun == [16]  # from after two steps of eight examples


def test_layers_that_are_computed_again_learn_the_same(tmp_path: Path, four: Result, text: str) -> None:
    again = run(tmp_path / "run", "budget.steps=4", "gradient_checkpointing=true", text)
    assert again.eval_loss == four.eval_loss


def test_an_interrupt_leaves_no_git_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the time limit of a lent accelerator is one, or Ctrl-C."""
    environment.environment()  # what is imported once
    (tmp_path / "git").write_text(f"#!/bin/sh\necho $$ >> '{tmp_path}/ran'\nexec sleep 0.5\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            environment.environment()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    gc.collect()  # a child that still ran would be warned of here
    for process in (tmp_path / "ran").read_text().split():
        with pytest.raises(ChildProcessError):
            os.waitpid(int(process), os.WNOHANG)


def test_warm_up_stable_decay() -> None:
    schedule = Schedule(kind="wsd", warmup=10, decay=0.25, final=0.1)
    assert [rate_factor(step, 100, schedule) for step in (0, 9, 10, 75)] == [0.1, 1.0, 1.0, 1.0]
    assert rate_factor(99, 100, schedule) == pytest.approx(0.1 + 0.9 / 25)


def test_the_list_says_what_a_recipe_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train"]) == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) <= 24 and max(map(len, said.splitlines())) <= 80
    assert re.search(r"llama-1b +[\d.]+ days GPU", said) and re.search(r"bytes-decoder +[\d.]+ min\s", said)
    assert run_command(["train", "--json", "-"]) == 0
    rows = {
        name: (row["reads"], row["network"], row["gpu"]) for name, row in json.loads(capsys.readouterr().out).items()
    }
    assert rows["vit-small"] == ("digits", False, False) and rows["llama-130m"] == ("allenai/c4", True, True)


def test_factors_on_the_rates_of_roles(text: str) -> None:
    """`model.rates` multiplies the learning rates of one role's weights; an unknown role is named."""
    recipe = load_recipe("bytes-decoder", ["model.architecture.n_layers=1", "model.rates={down: 0.5}", text])
    prepared = prepare(recipe)
    groups = network_of(recipe, prepared).groups(recipe)
    rates = {p.shape: group["lr"] / recipe.optimizer.learning_rate for group in groups for p in group["params"]}
    assert rates[torch.Size([64, 256])] == 0.5 and rates[torch.Size([64, 64])] == 1.0
    with pytest.raises(InputError, match=r"unknown role of model.rates 'dwon'; did you mean down\?"):
        network_of(load_recipe("bytes-decoder", ["model.rates={dwon: 0.5}"]), prepared)


@pytest.mark.parametrize(
    ("placement", "layers", "status", "found"),
    [
        pytest.param("post", 48, "finished", "rank collapse", marks=pytest.mark.slow),
        ("none", 80, "diverged", "not finite"),
    ],
)
def test_a_dead_run_says_what_died(
    tmp_path: Path, placement: str, layers: int, status: str, found: str, text: str
) -> None:
    sick = (f"model.architecture.norm_placement={placement}", f"model.architecture.n_layers={layers}",
            "model.scheme=xavier", "model.ends=null", "budget.steps=1", "cadence.signal=1", "cadence.save=0",
            "model.architecture.d_model=32", "budget.batch_size=2", text)  # fmt: skip
    result = train("bytes-decoder", tmp_path / "run", settings=(*SMALL, *sick), progress=False, final=False)
    assert result.status == status and (found, 0) in {(item.name, item.step) for item in result.findings}
    shown = read_run(tmp_path / "run")
    assert shown.result is not None and shown.result["findings"] == result.findings.to_json()
    assert [step for step, _ in shown.signal] == ([0, 1] if status == "finished" else [])


# --- `compile: true` of a recipe: layers that are the same share a graph, and losses are those of an uncompiled run


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
