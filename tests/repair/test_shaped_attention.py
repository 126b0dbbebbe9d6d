"""Shaped attention and transformed activations in models of transformers: e-spa, u-spa, value-skipinit with DKS."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import signalprop as sp
from applied import (
    IDS,
    built_logits,
    close,
    distance,
    double_norms,
    logits_of,
    loss_of,
    pair,
    role_gradients,
    shaped,
    skip_without_interface,
    vanilla,
)
from signalprop.errors import InputError
from signalprop.repair.shaped_models import NAME
from signalprop.repair.spliced_modules import Passed
from tiny import CACHE

transformers = pytest.importorskip("transformers")
skip_without_interface("e-spa", whole_module=True)
from transformers import DynamicCache, StaticCache  # noqa: E402

# --- the function ----------------------------------------------------------------------------------------

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt2", "e-spa", {}),
    ("gpt2", "e-spa", {"attention_skip": 0.3, "activation": "keep"}),
    ("gpt2", "e-spa", {"attention_skip": 0.3, "skip_rule": "exact", "feed_forward_skip": 0.5}),
    ("gpt2", "e-spa", {"norm": True, "repeats": 0.2}),
    ("gpt2", "u-spa", {"zero": "small", "orthogonal": False}),
    ("gpt2", "value-skipinit", {"activation": "dks"}),
    ("llama", "e-spa", {}),
    ("llama", "u-spa", {"norm": True}),
    ("llama", "e-spa", {"attention_skip": 0.3, "feed_forward_skip": 0.9, "zero": "key"}),
    ("gemma", "e-spa", {"norm": True}),
    ("bert", "e-spa", {}),
    ("bert", "u-spa", {"norm": False, "attention_skip": 0.3}),
    ("bert", "value-skipinit", {}),
    ("vit", "e-spa", {"activation": "keep"}),
    ("vit", "u-spa", {"norm": True}),
]


@pytest.mark.parametrize(("name", "scheme", "options"), CASES)
def test_equals_the_built_model(name: str, scheme: str, options: dict[str, Any]) -> None:
    with double_norms():
        made = pair(name, scheme, 4, torch.float64, **options)
        mine, theirs = logits_of(made.applied, made.batch), built_logits(made)
        loss_of(mine).backward()
        loss_of(theirs).backward()
    bound = 1e-6 if name == "gemma" else 1e-10  # it scales embeddings in single precision
    close(mine.detach(), theirs.detach(), bound)
    mine_by_role = role_gradients(made.applied, made.table)
    assert distance(mine_by_role, role_gradients(made.built, made.table)) <= bound
    assert len(mine_by_role) > 20


def test_moved_scores_equal_the_built_model() -> None:
    with double_norms():
        made = pair("llama", "e-spa", 3, torch.float64)
        for i in range(3):
            query = made.applied.model.layers[i].self_attn.q_proj.weight
            with torch.no_grad():
                query.copy_(torch.randn_like(query))
                made.built.sublayers()[2 * i].branch.function.query.weight.copy_(query)
        close(logits_of(made.applied, made.batch), built_logits(made), 1e-10)


# --- caches, padding, packing ----------------------------------------------------------------------------


def caches(model: nn.Module) -> Iterator[Any]:
    config: Any = model.config
    yield DynamicCache(config=config)
    yield StaticCache(config=config, max_cache_len=20)


@pytest.mark.parametrize("options", [{}, {"attention_skip": 0.3}, {"repeats": 0.3}], ids=str)
@pytest.mark.parametrize("pieces", [[1] * 12, [5, 4, 1, 2], [12]], ids=str)
@torch.no_grad()
def test_generation_with_a_cache_is_the_full_forward(options: dict[str, Any], pieces: list[int]) -> None:
    """Token by token, in chunks, and in one go, for grouped queries, with a cache that grows and one that does not."""
    model = shaped("llama", **options)
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    whole = model(input_ids=IDS, use_cache=False).logits
    for cache in caches(model):
        parts = [model(input_ids=part, **{CACHE: cache}).logits for part in IDS.split(pieces, 1)]
        close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("scheme", ["e-spa", "u-spa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@torch.no_grad()
def test_padding_changes_nothing(name: str, scheme: str) -> None:
    """A short sequence in a batch, padded left (decoders) or right, against the same one alone."""
    model = shaped(name, scheme)
    alone = model(input_ids=IDS[:1, :7]).logits
    assert float((alone - model(input_ids=IDS[:1]).logits[:, :7]).abs().max()) > 1e-4 or name != "bert"
    for left in (False, True):
        if left and name == "bert":
            continue  # its positions are absolute
        ids, keep = IDS.clone(), torch.ones_like(IDS)
        real = slice(5, 12) if left else slice(0, 7)
        ids[0, real] = IDS[0, :7]
        keep[0] = 0
        keep[0, real] = 1
        extra = {"position_ids": (keep.cumsum(1) - 1).clamp(min=0)} if left else {}
        both = model(input_ids=ids, attention_mask=keep, **extra).logits
        close(both[:1, real], alone)
        close(both[1:], model(input_ids=IDS[1:]).logits)
        assert both.isfinite().all()


@torch.no_grad()
def test_packed_sequences_do_not_see_each_other() -> None:
    model = shaped()
    lengths = [5, 4, 3]
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(input_ids=IDS[:1], position_ids=places, use_cache=False).logits
    alone = [model(input_ids=part, use_cache=False).logits for part in IDS[:1].split(lengths, 1)]
    close(packed, torch.cat(alone, 1))


@torch.no_grad()
def test_masks_of_numbers() -> None:
    """A mask that a user makes, (batch, 1, queries, keys), of 0 and the least number, or -inf; what else it holds is
    added to the scores."""
    model = shaped()
    whole = model(input_ids=IDS, use_cache=False).logits
    seen = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    for low in (-torch.inf, torch.finfo(torch.float32).min):
        numbers = torch.zeros(1, 1, 12, 12).masked_fill(~seen, low)
        close(model(input_ids=IDS, attention_mask=numbers, use_cache=False).logits, whole)
        other = model(input_ids=IDS, attention_mask=numbers - torch.arange(12.0), use_cache=False).logits
        assert other.isfinite().all()
        assert float((other - whole).abs().max()) > 1e-3 * float(whole.abs().max())
    heads = seen.expand(2, 4, 12, 12)
    with pytest.raises(InputError, match="reads positions off the mask"):
        model(input_ids=IDS, attention_mask=heads, use_cache=False)


# --- what else happens to models -------------------------------------------------------------------------


def test_models_do_not_share_numbers() -> None:
    """Two schemes and a vanilla model in one process, the three made from one configuration."""
    config = vanilla("llama").config
    make = type(vanilla("llama"))
    torch.manual_seed(0)
    models = [make(config).eval() for _ in range(3)]
    alone = [copy.deepcopy(model) for model in models]  # with a configuration each
    expected = []
    for i, options in enumerate([{"gamma": 0.2}, {"gamma": 0.5}]):
        sp.apply(alone[i], "e-spa", seed=0, **options)
        expected.append(alone[i](input_ids=IDS).logits)
    plain = alone[2](input_ids=IDS).logits
    assert alone[2].config._attn_implementation == "sdpa"
    for i, options in enumerate([{"gamma": 0.2}, {"gamma": 0.5}]):
        sp.apply(models[i], "e-spa", seed=0, **options)
    assert not torch.allclose(expected[0], expected[1], rtol=1e-2)
    assert torch.equal(models[0](input_ids=IDS).logits, expected[0])
    assert torch.equal(models[1](input_ids=IDS).logits, expected[1])
    assert torch.equal(models[2](input_ids=IDS).logits, plain)
    keep = torch.ones_like(IDS)
    keep[0, :4] = 0
    assert torch.equal(
        models[2](input_ids=IDS, attention_mask=keep).logits, alone[2](input_ids=IDS, attention_mask=keep).logits
    )


def test_another_implementation_is_not_silently_another_function() -> None:
    model = shaped()
    expected = model(input_ids=IDS).logits
    model.set_attn_implementation("eager")
    with pytest.raises(InputError, match=r"set to 'eager', which would leave that out; call model\.set_attn_impl"):
        model(input_ids=IDS)
    model.set_attn_implementation(NAME)
    assert torch.equal(model(input_ids=IDS).logits, expected)


# --- compiled --------------------------------------------------------------------------------------------


def compiled(model: nn.Module, *, whole: bool) -> tuple[int, int, Tensor]:
    """(graphs, graph breaks, logits) of a model that was compiled as a whole or layer by layer."""
    from torch._dynamo.testing import CompileCounter
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounter()
    options = {} if model.config.model_type == "bert" else {"use_cache": False}
    if whole:
        out = torch.compile(model, backend=counter)(input_ids=IDS, **options).logits
    else:
        for layer in next(m for m in model.modules() if isinstance(m, nn.ModuleList)):
            layer.compile(backend=counter)
        out = model(input_ids=IDS, **options).logits
    return counter.frame_count, sum(counters["graph_break"].values()), out


def compiles_as_the_vanilla_model(name: str, scheme: str, **options: Any) -> None:
    for whole in (True, False):
        plain = compiled(vanilla(name, 6).eval(), whole=whole)
        model = shaped(name, scheme, 6, **options)
        expected = model(input_ids=IDS).logits
        graphs, breaks, out = compiled(model, whole=whole)
        assert breaks == plain[1]
        assert graphs <= plain[0] + (0 if whole else 1)  # first the numbers as they are, then as inputs
        close(out, expected, 1e-4)


COMPILED = [("gpt2", "u-spa", {}), ("llama", "e-spa", {"repeats": 0.2, "norm": True}), ("bert", "u-spa", {}),
            ("gpt2", "value-skipinit", {})]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch.compile reads the gradients of tensors that have none
class TestCompiled:
    """No more graphs or breaks than the vanilla model, whatever differs between layers."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "scheme", "options"), COMPILED)
    def test_others(self, name: str, scheme: str, options: dict[str, Any]) -> None:
        compiles_as_the_vanilla_model(name, scheme, **options)


def test_a_graph_may_break_while_a_stream_is_on_its_way() -> None:
    passed = Passed()

    def step(x: Tensor) -> Tensor:
        passed.put(x)
        doubled = 2 * x
        torch._dynamo.graph_break()
        return doubled + passed.take()

    torch._dynamo.reset()
    for backend in ("eager", "aot_eager"):
        assert torch.equal(torch.compile(step, backend=backend)(torch.ones(2)), torch.full((2,), 3.0))
    with pytest.raises(AssertionError, match="did not run"):
        passed.take()
