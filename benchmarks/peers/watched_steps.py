"""Steps of one GPT-2 that are watched, in turns: `python -m benchmarks.peers.watched_steps PEER ROUNDS`, as JSON.

Everything is imported where it is used: peers live in environments of their own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import hugging_face
from benchmarks.timing import one_thread, take_turns
from signalprop.measurement import Probe

LAYERS, WIDTH, HEADS, BATCH, TOKENS = 12, 256, 4, 4, 128
Step = Callable[[], Any]


def fresh() -> Any:
    """A GPT-2 of Hugging Face in training mode, without dropout; the same weights every time."""
    torch.manual_seed(0)
    model = hugging_face("gpt2", LAYERS, width=WIDTH, heads=HEADS, tokens=TOKENS).train()
    model.config.use_cache = False
    return model


IDS = torch.randint(0, 1000, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))


def step(model: Any) -> None:
    """Forward and backward pass."""
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()


def moments(x: Tensor) -> Tensor:
    """Variance and token correlation of (batch, tokens, features)."""
    (batch, tokens, features), total = x.shape, torch.dot(x.reshape(-1), x.reshape(-1))
    pairs = (x.sum(1).square().sum() - total) / (tokens - 1)
    return torch.stack([total / (batch * tokens * features), pairs / total])


def by_hand() -> Step:
    """Hooks for this one model: the same two numbers of every block, attention and feed-forward, and of gradients."""
    model, found = fresh(), []

    def seen(_: Any, __: Any, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        found.append(moments(x.detach()))
        x.register_hook(lambda g: found.append(moments(g)))

    for block in model.transformer.h:
        for module in (block, block.attn, block.mlp):
            module.register_forward_hook(seen)

    def run() -> list[Any]:
        found.clear()
        step(model)
        return torch.stack(found).tolist()  # type: ignore[no-any-return]

    return run


def ours() -> Step:
    """signalprop's Probe, of every step: streams, branches and their gradients, as a Profile."""
    model = fresh()
    probe = Probe(model)
    probe.__enter__()

    def run() -> Any:
        step(model)
        return probe.profile()

    return run


def torch_module_monitor() -> Step:
    """Forward only, which is all it has: the same function of the same modules."""
    from torch_module_monitor import ModuleMonitor  # type: ignore[import-not-found]

    model, watched, number = fresh(), r"transformer\.h\.\d+(\.attn|\.mlp)?$", iter(range(10**9))
    monitor = ModuleMonitor(lambda _: True, excluded_modules_regex=rf"^(?!{watched})")
    monitor.set_module(model)
    monitor.add_activation_metric(
        "signal", moments, watched, lambda x: dict(zip((".v", ".r"), x.tolist(), strict=True))
    )

    def run() -> Any:
        monitor.current_step = None
        monitor.begin_step(next(number))
        step(model)
        monitor.end_step()
        found = monitor.get_step_metrics()
        monitor.storage.clear()
        return found

    return run


def torchinstruments() -> Step:
    """Every step sampled, all else as it comes: statistics of every module, files and histograms."""
    from torchinstruments import inject_observer  # type: ignore[import-not-found]

    model = fresh()
    inject_observer(model, interval=timedelta(microseconds=1), output_dir=tempfile.mkdtemp())
    return lambda: step(model)


def unit_scaling() -> Step:
    """`track_scales`: statistics of every tensor of the graph and of its gradient."""
    from unit_scaling.transforms import track_scales  # type: ignore[import-not-found]

    model = track_scales(fresh())

    def run() -> Any:
        step(model)
        return model.scales_graph()

    return run


def nnsight() -> Step:
    """Outputs of the same modules cached in a trace, and the two numbers of each."""
    from nnsight import NNsight  # type: ignore[import-not-found]

    model = fresh()
    traced = NNsight(model)

    def run() -> Any:
        model.zero_grad()
        with traced.trace(input_ids=IDS, labels=IDS) as tracer:
            cache = tracer.cache(modules=[f"transformer.h.{i}" for i in range(LAYERS)])
            loss = traced.output.save()
        loss.loss.backward()
        outputs = [cache[name].output for name in cache.keys()]  # noqa: SIM118  it is no mapping
        return [moments((x[0] if isinstance(x, tuple) else x).detach()).tolist() for x in outputs]

    return run


def lens() -> Any:
    """TransformerLens's own model of this size."""
    from transformer_lens.model_bridge import TransformerBridge  # type: ignore[import-not-found]

    sizes = {"n_layers": LAYERS, "d_model": WIDTH, "n_ctx": TOKENS, "n_heads": HEADS, "d_head": WIDTH // HEADS}
    return TransformerBridge.boot_native({**sizes, "d_vocab": 1000, "act_fn": "gelu_new", "seed": 0})


def lens_bare() -> Step:
    """The same step of TransformerLens's own model."""
    model = lens()

    def run() -> None:
        model.zero_grad()
        model(IDS, return_type="loss").backward()

    return run


def transformer_lens() -> Step:
    """`run_with_cache` of streams and branches, and the two numbers of each."""
    model = lens()
    names = [f"blocks.{i}.hook_{name}" for i in range(LAYERS) for name in ("resid_post", "attn_out", "mlp_out")]

    def run() -> Any:
        model.zero_grad()
        loss, cache = model.run_with_cache(IDS, return_type="loss", names_filter=names)
        loss.backward()
        return torch.stack([moments(x.detach()) for x in cache.values()]).tolist()

    return run


def main(peer: str, rounds: int) -> None:
    one_thread()
    theirs: dict[str, Step] = {peer: globals()[peer.replace("-", "_")]()}
    if peer == "transformer-lens":
        theirs |= {"transformer-lens, its model unwatched": lens_bare()}
    models = {name: fresh() for name in ("bare", "bare again")}
    bare: dict[str, Step] = {name: (lambda model=model: step(model)) for name, model in models.items()}  # type: ignore[misc]
    print(json.dumps(take_turns({**bare, "hooks by hand": by_hand(), "signalprop": ours(), **theirs}, rounds)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
