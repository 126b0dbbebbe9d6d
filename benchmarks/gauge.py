"""How exact the gauge is, how far it reaches, and what absorbed mode costs: the tables of docs/theory/gauge.md.

    python -m benchmarks.gauge [exactness] [ranges] [training]

Tiny GPT-2, Llama and BERT (width 32), since none of these errors depends on the width. Some minutes on one core.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import signalprop as sp
from benchmarks.models import hugging_face
from signalprop.repair import plan as planning

VOCABULARY, TOKENS = 61, 13


def vanilla(family: str, n_layers: int, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A tiny model without dropout; `changes`: of its configuration."""
    own: dict[str, Any] = {"gpt2": {}, "llama": {"intermediate_size": 64}}.get(
        family, {"intermediate_size": 64, "pad_token_id": None}
    )
    torch.manual_seed(0)
    model = hugging_face(family, n_layers, width=32, vocab_size=VOCABULARY, tokens=16, **own, **changes)
    return model.to(dtype).eval()


def tokens() -> Tensor:
    """Two sequences."""
    return torch.arange(2 * TOKENS).reshape(2, TOKENS) * 7 % (VOCABULARY - 3) + 3


def outputs(model: nn.Module) -> Tensor:
    """Logits in float64."""
    given = {"inputs": tokens()} if type(model).__name__ == "Transformer" else {"input_ids": tokens()}
    if type(model).__name__ == "Transformer" and model.parametrization.architecture.n_segments:  # type: ignore[union-attr]
        given["segments"] = torch.zeros_like(tokens())
    logits: Tensor = model(**given).logits
    return logits.double()


def gradient(model: nn.Module, logits: Tensor) -> Tensor:
    """The norm of all gradients of a cross-entropy, one by one, sorted: layouts of parameters differ."""
    model.zero_grad()
    F.cross_entropy(logits.flatten(0, 1), tokens().flatten()).backward()
    grads = [q.grad.double() for q in model.parameters() if q.grad is not None]
    return torch.stack([g.square().sum() for g in grads]).sum().sqrt()


def error(one: Tensor, other: Tensor) -> float:
    """Largest difference over largest value."""
    return float((one - other).detach().abs().max() / other.detach().abs().max())


def exactness() -> None:
    """Applied against built, on the same weights."""
    print("| model (epsilon) | scheme | layers | fp64, epsilon as it is | fp64, matched | fp32, matched | bound |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for family, scheme in (
        ("gpt2", "deepscalelm"),
        ("llama", "deepscalelm"),
        ("bert", "deepscalelm"),
        ("bert", "deepnorm"),
    ):
        for n_layers in (4, 48, 192):
            cells, bound, eps = [], 0.0, 0.0
            for dtype, match in ((torch.float64, False), (torch.float64, True), (torch.float32, True)):
                model = vanilla(family, n_layers, dtype)
                table = sp.apply(model, scheme, seed=3, match_eps=match)
                built = sp.build(table, seed=3, dtype=torch.float64)
                mine, theirs = outputs(model), outputs(built)
                a, b = gradient(model, mine), gradient(built, theirs)
                cells.append(f"{error(mine, theirs):.0e} / {float((a - b).abs() / b):.0e}")
                bound, eps = max(bound, model.signalprop_record.eps_error), table.architecture.norm_eps
            name = {"gpt2": "GPT-2", "llama": "Llama", "bert": "BERT"}[family]
            print(f"| {name} ({eps:g}) | {scheme} | {n_layers} | {' | '.join(cells)} | {bound:.0e} |", flush=True)


def ranges() -> None:
    """A constant skip of 0.8 by the gauge and by rewiring, in every type, against the built model in float64."""
    print("| layers | largest multiplier | fp32 gauge | rewired | bf16 gauge | rewired | fp16 gauge | rewired |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for n_layers in (4, 10, 24, 48, 96):
        cells, largest = [], 0.0
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for limit in (1e300, 1.0):  # every multiplier is allowed; none is
                with mock.patch.multiple(planning, _LARGEST=limit, LARGEST_MULTIPLIER={}):
                    model = vanilla("gpt2", n_layers, torch.float32)
                    base = sp.scheme("fixed", std=32**-0.5)(sp.Architecture.from_hf(model))
                    table = base.with_columns(skip=0.8, branch=0.6)
                    sp.apply(model, table, seed=3, match_eps=limit > 1)
                built = sp.build(table, seed=3, dtype=torch.float64)
                if limit > 1:
                    largest = max(row.scale for row in model.signalprop_record.plan.rows)
                with torch.no_grad():
                    cells.append(f"{error(outputs(model.to(dtype)), outputs(built)):.0e}")
        print(f"| {n_layers} | {largest:.0e} | {' | '.join(cells)} |", flush=True)


def training() -> None:
    """Thirty steps of an absorbed model against those of the model with multipliers, in float64."""
    print("| optimizer | groups of `parameter_groups` | one group for all | groups, gradients clipped |")
    print("| --- | --- | --- | --- |")
    settings = {
        "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}, {}),
        "sgd": (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.1}, {"momentum": 0.9}),
    }
    for name, (make, options, more) in settings.items():
        cells = []
        for grouped, clip in ((True, 0.0), (False, 0.0), (True, 0.1)):
            found = []
            for mode in ("gauge", "absorbed"):
                model = vanilla("gpt2", 4, tie_word_embeddings=False)
                sp.apply(model, "stable-resnet", mode=mode, initialize=False, beta_attention=0.3, beta_feed_forward=0.3)
                absorbed_plainly = mode == "absorbed" and not grouped
                groups: Any = sp.parameter_groups(model, optimizer=name, **options)  # type: ignore[arg-type]
                if absorbed_plainly:
                    reference = vanilla("gpt2", 4, tie_word_embeddings=False)
                    sp.apply(reference, "fixed", initialize=False)
                    plain = sp.parameter_groups(reference, optimizer=name, **options)  # type: ignore[arg-type]
                    rates = {n: g for g in plain for n in g["names"]}
                    groups = [{**rates[n], "params": [q], "names": [n]} for n, q in model.named_parameters()]
                optimizer = make([{k: v for k, v in g.items() if k != "names"} for g in groups], **more)
                for _ in range(30):
                    optimizer.zero_grad()
                    F.cross_entropy(outputs(model).flatten(0, 1), tokens().flatten()).backward()
                    if clip:
                        nn.utils.clip_grad_norm_(model.parameters(), clip)
                    optimizer.step()
                with torch.no_grad():
                    found.append(outputs(model))
            cells.append(f"{error(found[1], found[0]):.0e}")
        print(f"| {make.__name__} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in sys.argv[1:] or ("exactness", "ranges", "training"):
        {"exactness": exactness, "ranges": ranges, "training": training}[part]()
        print()
