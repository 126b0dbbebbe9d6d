"""Networks with shaped attention: built, described, predicted, and wide ones against the recursion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import signalprop as sp
from signalprop.errors import InputError
from signalprop.kernels.stack import attention_shapes
from signalprop.models import Transformer, build
from signalprop.network.architecture import Architecture
from signalprop.network.kinds import kind_named
from signalprop.network.parametrization import Parametrization
from signalprop.schemes import SCHEMES

SMALL: dict[str, Any] = {
    "kind": "decoder",
    "n_layers": 3,
    "d_model": 32,
    "n_heads": 4,
    "vocab_size": 60,
    "seq_len": 12,
    "positions": "none",
}
TABLES: dict[str, Callable[[], Parametrization]] = {
    "e-spa": lambda: table("e-spa", gamma=0.1, repeats=0.0),
    "e-spa repeats": lambda: table("e-spa", gamma=0.1, repeats=0.05),
    "u-spa": lambda: table("u-spa"),
    "u-spa grouped": lambda: table("u-spa", n_kv_heads=2, positions="rotary", norm=True),
    "alibi": lambda: sp.scheme("xavier")(Architecture(**{**SMALL, "positions": "alibi"})),
}
every_table = pytest.mark.parametrize("name", TABLES)


def table(name: str, **changes: Any) -> Parametrization:
    options = {key: changes.pop(key) for key in list(changes) if key in SCHEMES[name].__dataclass_fields__}
    return sp.scheme(name, **options)(Architecture(**{**SMALL, **changes}))


def scored(p: Parametrization) -> Parametrization:
    """The table with queries, so that scores are not zero; with a gain, and a value skip."""
    skip = 0.4
    return p.with_columns(weight__query=0.3, weight__key=0.3, value_skip=skip, attention_gain=0.8)


def ids(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, 60, shape, generator=torch.Generator().manual_seed(seed))


@every_table
def test_a_built_attention_mixes_values_by_the_matrix(name: str) -> None:
    """With W_Q = 0; grouped key heads, rotary positions and biases change nothing."""
    p = TABLES[name]().with_columns(weight__query=0.0, bias__query=0.0)
    model = build(p, seed=0, dtype=torch.float64)
    shapes = attention_shapes(p)
    reads: dict[int, Tensor] = {}
    for i in range(0, 6, 2):
        function = model.sublayers()[i].branch.function
        function.value.register_forward_hook(lambda m, _, out, i=i: reads.update({i: out.detach()}))
        function.output.register_forward_pre_hook(lambda m, x, i=i: reads.update({-i - 1: x[0].detach()}))
    model(ids(0, 2, 12))
    for i in range(0, 6, 2):
        v = reads[i].unflatten(-1, (-1, 8)).transpose(1, 2)
        v = v.repeat_interleave(4 // v.shape[1], 1)
        a = torch.stack([torch.from_numpy(np.array(shape.matrix(12))) for shape in shapes[i]])
        out = reads[-i - 1].unflatten(-1, (4, 8)).transpose(1, 2)
        torch.testing.assert_close(out, a @ v, rtol=1e-11, atol=1e-12)


@every_table
def test_padded_batches_give_what_single_sequences_give(name: str) -> None:
    p = scored(TABLES[name]())
    if p.architecture.positions == "learned":
        p = replace(p, embedding=p.embedding.model_copy(update={"position": 0.0}))  # they count padding
    tolerance = {"rtol": 1e-9, "atol": 1e-11}
    if p.architecture.positions == "rotary":  # angles are made in float32, and padding moves them
        tolerance = {"rtol": 1e-4, "atol": 1e-6}
    model = build(p, seed=0, dtype=torch.float64)
    tokens, keep = ids(1, 3, 12), torch.ones(3, 12, dtype=torch.bool)
    keep[0, 7:], keep[1, :4], keep[2, :2], keep[2, 9:] = False, False, False, False
    hidden = model(tokens, keep=keep).hidden
    for b in range(3):
        single = model(tokens[b : b + 1, keep[b]]).hidden[0]
        torch.testing.assert_close(hidden[b, keep[b]], single, **tolerance)


class Graphs:
    """A backend that counts graphs."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: Any, _: Any) -> Any:
        self.count += 1
        return module.forward


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
@pytest.mark.parametrize(
    ("name", "padded"),
    [pytest.param(name, padded, marks=pytest.mark.slow) for name in TABLES for padded in (False, True)],
)
def test_a_model_compiles_to_one_graph_and_its_layers_to_one_per_kind(name: str, padded: bool) -> None:
    p = scored(TABLES[name]())
    model = build(p, seed=0)
    tokens, keep = ids(5, 2, 12), None
    if padded:
        keep = torch.ones(2, 12, dtype=torch.bool)
        keep[0, :5] = False
    expected = model(tokens, keep=keep).hidden
    torch._dynamo.reset()
    whole = Graphs()
    found = torch.compile(model, backend=whole)(tokens, keep=keep).hidden
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert whole.count == 1
    torch._dynamo.reset()
    layers = Graphs()
    for sublayer in model.sublayers():
        sublayer.compile(backend=layers)
    for _ in range(2):
        torch.testing.assert_close(model(tokens, keep=keep).hidden, expected, rtol=1e-5, atol=1e-6)
    kinds = {type(getattr(layer.branch.function, "shape", "none")) for layer in model.sublayers()}
    assert layers.count == len(kinds)
    torch._dynamo.reset()


# --- description and prediction ---------------------------------------------------------------------------------------


def test_attention_without_a_mask_is_not_shaped() -> None:
    """Neither by a scheme nor by a table, of an encoder and of an encoder-decoder."""
    p = TABLES["e-spa"]()
    for fields in ({"kind": "encoder"}, {"kind": "encoder-decoder", "target_len": 15}):
        a = Architecture(**{**SMALL, **fields})
        with pytest.raises(InputError, match=r"causal attention|not for encoder-decoders"):
            sp.scheme("u-spa")(a)
        shaped = replace(sp.scheme("xavier")(a), shaping=p.shaping)
        for use in (sp.predict, build):
            with pytest.raises(InputError, match="choose a decoder"):
                use(shaped)


# --- wide networks ----------------------------------------------------------------------------------------------------


def attention_only(
    name: str, n_layers: int, d: int, length: int, *, orthogonal: bool, **options: Any
) -> Parametrization:
    """A stack of nothing but shaped attention: feed-forwards give 0 beside a skip of 1."""
    a = Architecture(
        kind="decoder", n_layers=n_layers, d_model=d, n_heads=8, d_ff=1, seq_len=length, vocab_size=2 * length,
        positions="none", bias=False, final_norm=False,
    )  # fmt: skip
    p = sp.scheme(name, activation="keep", repeats=0.0, orthogonal=orthogonal, **options)(a)
    rows = kind_named("feed_forward").of(p)
    return p.with_columns(skip=np.where(rows, 1.0, 0.0), branch=np.where(rows, 0.0, 1.0))


def orthogonalise(model: Transformer) -> None:
    """Weights are drawn in float32, orthogonal to 1e-6; a step of Newton's iteration to the polar factor squares it."""
    with torch.no_grad():
        for sublayer in model.sublayers()[::2]:
            for linear in (sublayer.branch.function.value, sublayer.branch.function.output):
                linear.weight.copy_(1.5 * linear.weight - 0.5 * linear.weight @ linear.weight.mT @ linear.weight)


def streams(model: Transformer, tokens: Tensor) -> list[Tensor]:
    """The stream that enters each layer, and the one after the last, (1, tokens, features), their graph kept."""
    seen: list[Tensor] = []
    hooks = [s.register_forward_pre_hook(lambda m, x: seen.append(x[0])) for s in model.sublayers()[::2]]
    seen.append(model(tokens).hidden)
    for hook in hooks:
        hook.remove()
    return seen


FAMILIES = [("e-spa", {"gamma": 0.005}), ("u-spa", {"rho": 0.8})]
SIZES = [(128, 64), pytest.param(512, 128, marks=pytest.mark.slow)]  # 15 s of CPU each


@pytest.mark.parametrize(("d", "length"), SIZES)
@pytest.mark.parametrize(("name", "options"), FAMILIES)
def test_attention_only_networks_follow_the_recursion_at_any_width(
    name: str, options: dict[str, float], d: int, length: int
) -> None:
    """40 blocks, orthogonal weights: kernels A K A^T and gradients A^T G A to 1e-10, from the network's own K and G
    (He et al. 2023, section 2)."""
    depth = 40
    p = attention_only(name, depth, d, length, orthogonal=True, **options)
    model = build(p, seed=0, dtype=torch.float64)
    orthogonalise(model)
    seen = streams(model, torch.randperm(2 * length, generator=torch.Generator().manual_seed(0))[None, :length])
    top = torch.randn(1, length, d, dtype=torch.float64, generator=torch.Generator().manual_seed(14))
    gradients = torch.autograd.grad(seen[-1], seen[:-1], top)
    shapes = [shape for (shape,) in attention_shapes(p)[::2]]

    def kernel(x: Tensor) -> np.ndarray:
        return (x[0] @ x[0].mT / d).detach().numpy()

    k = kernel(seen[0])
    for shape, stream in zip(shapes, seen[1:], strict=True):
        k = shape.step(k)
        np.testing.assert_allclose(kernel(stream), k, rtol=0, atol=1e-10)
    assert k[np.triu_indices(length, 1)].mean() > 0.5  # tokens have met
    g = kernel(top)
    for shape, gradient in zip(reversed(shapes), reversed(gradients), strict=True):
        g = shape.step_back(g)
        np.testing.assert_allclose(kernel(gradient), g, rtol=0, atol=1e-10 * np.abs(g).max())
