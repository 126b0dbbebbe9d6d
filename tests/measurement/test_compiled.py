"""Probes inside a compiled graph: the same losses and weights, one graph, the numbers of hooks on plain code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import watched_processes
from applied import MODELS, arguments_of, batch_of, vanilla
from own_model import OwnGPT
from processes import run_ranks
from signalprop.errors import InputError
from signalprop.measurement import Probe, measure
from signalprop.results.profile import Profile

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning")]
IDS = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Backend:
    """aot_eager, and how many graphs it was given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


class Checkpointed(OwnGPT):
    """The small GPT with every layer run again in the backward pass."""

    def __init__(self, n_layers: int) -> None:
        super().__init__(n_layers)
        for block in self.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def own(kind: type[OwnGPT] = OwnGPT, n_layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return kind(n_layers).train()


def loss_of(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    return F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


def step(model: nn.Module, ids: Tensor = IDS, parts: int = 1) -> Tensor:
    """The loss of a step whose gradients are the model's."""
    model.zero_grad()
    losses = [loss_of(model, part) / parts for part in ids.chunk(parts)]
    sum(losses).backward()  # type: ignore[union-attr]
    return torch.stack([loss.detach() for loss in losses]).sum()


def same_numbers(found: Profile | None, expected: Profile | None, rel: float = 2e-6) -> None:
    for table, other in ((found.forward, expected.forward), (found.gradient, expected.gradient)):
        for point, series in other.items():
            np.testing.assert_allclose(table[point].variance, series.variance, rtol=rel)
            np.testing.assert_allclose(table[point].token_correlation, series.token_correlation, atol=rel)
    assert found.gradient_scale == pytest.approx(expected.gradient_scale, rel=rel)
    assert found.architecture == expected.architecture


def profiled(model: nn.Module, called: nn.Module | None = None, parts: int = 1, **options: Any) -> Profile:
    with Probe(model, **options) as probe:
        step(model if called is None else called, parts=parts)
        profile = probe.profile()
    assert profile is not None
    return profile


@pytest.mark.slow
def test_checkpointed_layers_are_computed_again_from_their_own_inputs_and_no_more_of_them() -> None:
    """The streams between layers are kept, and no product of matrices is made again that the bare pass does not."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    kept: list[int] = []
    products: list[int] = []

    def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        (outputs,) = graph.graph.output_node().args
        kept.append(sum(node.meta["val"].shape == (*IDS.shape, 32) for node in outputs if node.op != "placeholder"))
        return make_boxed_func(graph.forward)

    def backward(graph: torch.fx.GraphModule, _: Any) -> Any:
        ops = [str(node.target) for node in graph.graph.nodes]
        products.append(sum(op in ("aten.mm.default", "aten.addmm.default", "aten.bmm.default") for op in ops))
        return make_boxed_func(graph.forward)

    def partition(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        return min_cut_rematerialization_partition(joint_graph_passes(joint), inputs, **options)  # as inductor does

    def run(model: nn.Module) -> None:
        backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=partition)
        torch.compile(model, backend=backend, fullgraph=True)(input_ids=IDS, use_cache=False).logits.sum().backward()

    model = vanilla("gpt2", attn_implementation="eager").train()
    for block in model.transformer.h:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    with Probe(model, compiled=True):
        run(model)
    torch.compiler.reset()
    run(model)
    assert kept[1] <= kept[0] <= kept[1] + 1  # at most the embedding beside the streams between layers
    assert products[0] <= products[1]


def test_a_compiled_step_is_one_graph_with_the_loss_and_the_numbers_of_hooks() -> None:
    plain, backend = own(n_layers=1), Backend()
    compiled = torch.compile(own(n_layers=1), backend=backend, fullgraph=True)
    with Probe(compiled) as probe:
        loss = step(compiled)
        profile = probe.profile()
    assert backend.graphs == 1
    same_numbers(profile, profiled(plain))
    torch.testing.assert_close(loss, step(plain))
    assert all(
        torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6)
        for p, q in zip(compiled.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OwnGPT, Checkpointed])
def test_one_graph_the_same_training_and_the_numbers_of_hooks(kind: type[OwnGPT]) -> None:
    watched, bare = own(kind, 1), own(kind, 1)
    expected = profiled(own(kind, 1))
    backend = Backend()
    compiled = torch.compile(watched, backend=backend, fullgraph=True)
    twin = torch.compile(bare, backend=backend, fullgraph=True)
    loss = step(twin, parts=2)
    assert backend.graphs == 1  # it ran compiled before the probe came
    with Probe(compiled, every=2) as probe:
        for k in range(3):
            assert torch.equal(step(compiled, parts=2), loss)
            assert all(
                torch.equal(p.grad, q.grad) for p, q in zip(watched.parameters(), bare.parameters(), strict=True)
            )
            with torch.no_grad():
                watched(IDS)  # is not part of the step
            assert torch.equal(step(twin, parts=2), loss)  # another model of its class
            profile = probe.profile()
            assert (profile is None) == (k % 2 == 1)
            if profile is not None:
                same_numbers(profile, expected)  # of both halves together
                assert any("2 times" in note and "all passes" in note for note in profile.notes)
        assert backend.graphs == 4  # one with taps, one for the steps in between; the other's own, again
    assert not [name for module in watched.modules() for name in vars(module) if name.startswith("_signalprop")]


@pytest.mark.slow
def test_layers_compiled_one_by_one_share_graphs_and_lengths_may_change() -> None:
    plain, watched = (own(n_layers=7) for _ in range(2))
    backend = Backend()
    for block in watched.blocks:
        block.compile(backend=backend, fullgraph=True)
    with Probe(watched) as probe:
        step(watched)
        found = probe.profile()
        graphs = backend.graphs
        step(watched, IDS[:, :9])
        shorter = probe.profile()
    assert 0 < graphs < 6 and graphs < backend.graphs  # not one for each layer
    same_numbers(found, profiled(plain))
    with Probe(plain) as probe:
        step(plain, IDS[:, :9])
        same_numbers(shorter, probe.profile())


@pytest.mark.slow
def test_a_watched_step_can_be_a_cuda_graph() -> None:
    """Nothing in it waits for the device, leaves it or writes in place, and its sums arrive where they did before."""
    seen: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    model = own(n_layers=1)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with Probe(compiled) as probe:
        places = []
        for _ in range(2):
            step(compiled)
            leaves = [
                v for m in model.modules() for n, v in vars(m).items() if n in ("_signalprop_in", "_signalprop_out")
            ]
            places.append([leaf.grad.data_ptr() for leaf in leaves])
            assert probe.profile() is not None
    assert len(places[0]) == 5 and places[0] == places[1] and len(seen) == 2  # forward and backward
    for graph in seen:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        names = {str(node.target) for node in nodes}
        assert not names & {"aten._local_scalar_dense.default", "aten.item.default", "aten.nonzero.default"}
        assert not {name for name in names if name.startswith("aten") and name.split(".")[1].endswith("_")}
        assert not [n for n in nodes if str(n.target) == "aten._to_copy.default" and n.kwargs.get("device") is not None]
        (outputs,) = graph.graph.output_node().args
        sums = [node for node in outputs if isinstance(node, torch.fx.Node) and node.meta["val"].shape == (2, 9)]
        assert all(node.op == "call_function" for node in sums)
    assert len(sums) == 5  # the backward graph's


@pytest.mark.parametrize("family", MODELS)
def test_every_family_without_a_compiler(family: str) -> None:
    """The same taps on plain code: padding included, and where no tap can be, a line says so."""
    model = vanilla(family).eval()
    arguments = arguments_of(model, batch_of(model))
    if "input_ids" in arguments:
        arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
        arguments["attention_mask"][1, -4:] = 0

    def loss(output: Any) -> Tensor:
        return output.logits.float().square().mean()  # type: ignore[no-any-return]

    expected = measure(model, arguments, loss=loss, skip_first=0)
    with Probe(model, compiled=True) as probe:
        value = loss(model(**arguments))
        value.backward()
        found = probe.profile()
    assert found is not None
    same_numbers(found, expected)


def test_what_cannot_be_inside_the_graph_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = vanilla("gpt_neox")
    with Probe(torch.compile(model, backend=Backend())):
        assert "runs uncompiled: no module forms the sum of layer 0 attention" in caplog.text
    with pytest.raises(InputError, match=r"no module forms the sum.*leave the groups out"):
        Probe(model, data_group=object())
    assert "compiled code ran uncompiled" in measure(torch.compile(own()), {"ids": IDS}, loss=torch.Tensor.sum).notes


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes found, by the way that they train together."""
    folder = tmp_path_factory.mktemp("processes")
    run_ranks(watched_processes.__file__, folder)
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("route", ["ddp", "fsdp", "tp", "tokens"])
def test_processes_together_find_what_one_finds(processes: dict[str, Any], route: str) -> None:
    model = watched_processes.own(watched_processes.Tokenwise if route == "tokens" else OwnGPT)
    expected = watched_processes.profiled(model, model, watched_processes.IDS)
    same_numbers(Profile.from_json(processes[route]), Profile.from_json(expected), rel=5e-6)


def same_logs(found: dict[str, Any], expected: dict[str, Any], rel: float = 2e-5) -> None:
    """What two monitors logged."""
    assert found["said"] == expected["said"]
    assert found["numbers"] == {name: pytest.approx(v, rel=rel, abs=1e-6) for name, v in expected["numbers"].items()}


@pytest.mark.slow
@pytest.mark.parametrize("route", ["fsdp", "tp", "tokens"])
def test_monitors_of_several_processes_log_what_one_logs(processes: dict[str, Any], route: str) -> None:
    """Scores, updates and the ring among it, where parameters are sharded."""
    model = watched_processes.own(watched_processes.Tokenwise if route == "tokens" else OwnGPT)
    options: dict[str, Any] = {"skip_first": 0}
    if route != "tokens":
        options = {"steps": 3, "batch": watched_processes.whole_batch()}
    mapping = dataclasses.replace(model.signalprop_mapping(), layers=("blocks.0", "blocks.1"))
    expected = watched_processes.monitored(model, watched_processes.IDS, mapping=mapping, **options)
    found = processes[f"monitored {route}"]
    same_logs(found, expected)
    if route == "tokens":
        return
    assert {"signal/layer_0/lowest_entropy", "signal/layer_1/update", "signal/outside"} <= found["numbers"].keys()
    for table, other in zip(found["table"], expected["table"], strict=True):
        np.testing.assert_allclose(table, other, rtol=1e-4)


@pytest.mark.slow
def test_heads_that_processes_share_are_known_by_their_number(processes: dict[str, Any]) -> None:
    expected = watched_processes.monitored_llama(watched_processes.llama())
    found = processes["monitored heads"]
    same_logs(found, expected)
    assert found["numbers"]["signal/layer_1/lowest_entropy_head"] == 2


@pytest.mark.slow
def test_a_process_without_a_monitor_is_named_within_seconds(processes: dict[str, Any]) -> None:
    assert processes["monitor alone"].startswith("no SignalMonitor in process 1 of 2 after 5 s; make one in every")


@pytest.mark.slow
def test_every_stage_of_a_pipeline_logs_its_own_layer(processes: dict[str, Any]) -> None:
    model = watched_processes.own()
    whole = watched_processes.monitored(model, watched_processes.IDS)["numbers"]
    for rank, logged in enumerate(processes["monitored stages"]):
        numbers = logged["numbers"]
        assert logged["said"] == [] and numbers["signal/outside"] == 0
        for quantity in ("variance", "token_correlation", "branch_share"):
            expected = whole[f"signal/layer_{rank}/{quantity}"]
            assert numbers[f"signal/layer_0/{quantity}"] == pytest.approx(expected, rel=2e-5)


@pytest.mark.slow
def test_every_stage_of_a_pipeline_finds_its_own_layer(processes: dict[str, Any]) -> None:
    model = watched_processes.own()
    whole = Profile.from_json(watched_processes.profiled(model, model, watched_processes.IDS))
    for rank, data in enumerate(processes["stages"]):
        stage, rows = Profile.from_json(data), slice(2 * rank, 2 * rank + 2)
        for point in ("stream_in", "branch", "stream_out"):
            np.testing.assert_allclose(stage.forward[point].variance, whole.forward[point].variance[rows], rtol=5e-6)
            own, other = stage.gradient[point].variance, whole.gradient[point].variance[rows]
            np.testing.assert_allclose(own * stage.gradient_scale, other * whole.gradient_scale, rtol=5e-6)
