"""What people do to models, done to applied ones: each time the function stays, and nothing is left behind."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import applied
from applied import VOCABULARY, trained
from choice import some
from signalprop.errors import InputError
from signalprop.hooks import first_tensor
from signalprop.models.transformer import Transformer
from signalprop.repair import apply, initialize
from signalprop.repair.record import the_record

# gauge, trainable channels, scaled norms; of BERT post-norms too
SCHEMES = ("deepscalelm", "layerscale", "lns")
FAST = [("gpt2", "deepscalelm"), ("gpt2", "layerscale"), ("bert", "deepnorm")]
CELLS = some([*(("gpt2", name) for name in SCHEMES), ("bert", "deepnorm"), ("llama", "lns")], FAST)
IDS = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
every_cell = pytest.mark.parametrize(("family", "scheme"), CELLS)
before_5 = int(pytest.importorskip("transformers").__version__.partition(".")[0]) < 5


def vanilla(family: str, n_layers: int = 3, **changes: Any) -> nn.Module:
    """Of 2 layers DeepScaleLM has a skip of 0, which is not what most of its users have."""
    return applied.vanilla(family, n_layers, **changes)


def applied_model(family: str, scheme: str, seed: int = 3, **changes: Any) -> nn.Module:
    """A model with a scheme whose trainable multipliers are away from their start, at which some branches are off."""
    model = vanilla(family, **changes)
    apply(model, scheme, seed=seed)
    return trained(model)


def loss(model: nn.Module) -> Tensor:
    caches = {} if model.config.model_type == "bert" else {"use_cache": False}
    out: Tensor = model(input_ids=IDS, labels=IDS, **caches).loss
    return out


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss(model).backward()
    return {name: q.grad for name, q in model.named_parameters() if q.grad is not None}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, those that are not saved and second names of tied ones included."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different
    return True


class TestMetaDevice:
    """The route of large trainings: no memory, then empty memory, then weights."""

    @staticmethod
    def emptied(make: Callable[[], nn.Module], scheme: str) -> nn.Module:
        make()  # older versions cannot be imported on the meta device
        with torch.device("meta"):
            model = make()
        apply(model, scheme)
        model.to_empty(device="cpu")
        with torch.no_grad():  # empty memory may by chance hold the right numbers
            for tensor in tensors(model).values():
                tensor.fill_(7)
        return model

    @pytest.mark.skipif(before_5, reason="transformers before 5 does not fill its buffers")
    @every_cell
    def test_gives_the_weights_of_the_cpu(self, family: str, scheme: str) -> None:
        expected = vanilla(family)
        apply(expected, scheme, seed=3)
        found = self.emptied(lambda: vanilla(family), scheme)
        initialize(found, seed=3)
        assert same(tensors(found), tensors(expected))
        trains = [{n for n, q in model.named_parameters() if q.requires_grad} for model in (found, expected)]
        assert trains[0] == trains[1]
        assert torch.equal(loss(trained(found)), loss(trained(expected)))

    @pytest.mark.skipif(before_5, reason="transformers before 5 does not fill its buffers")
    def test_drawn_weights_stay(self) -> None:
        """transformers #46620, #45591: `init_weights` runs again in from_pretrained, in trainers, in scripts."""
        model = self.emptied(lambda: vanilla("llama"), "deepscalelm")
        initialize(model, seed=3)
        drawn = {name: q.clone() for name, q in model.named_parameters()}
        model.init_weights()
        assert same(dict(model.named_parameters()), drawn)
        for place in (*model.modules(), *model.parameters()):  # the marks it goes by
            place._is_hf_initialized = False
        model.init_weights()
        assert not all(torch.equal(q, drawn[name]) for name, q in model.named_parameters())

    def test_refuses_what_it_cannot_fill(self) -> None:
        class Masked(Transformer):
            """A buffer that nobody but the constructor fills."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.register_buffer("mask", torch.ones(3), persistent=False)

        table = apply(vanilla("gpt2"), "deepscalelm", seed=0)
        plain = table.with_columns(skip=1.0, branch=1.0)
        model = self.emptied(lambda: Masked(plain, seed=0, dtype=torch.float32), "deepscalelm")
        with pytest.raises(InputError, match=r"does not fill mask, garbage after the meta device"):
            initialize(model, seed=0)


class TestSeeds:
    @pytest.mark.parametrize("family", some(["bert", "gpt2", "vit", "t5"], ("gpt2", "vit")))
    def test_one_seed_gives_the_same_weights_on_every_model(self, family: str) -> None:
        one, other, third = vanilla(family), vanilla(family), vanilla(family)
        with torch.no_grad():
            for q in other.parameters():
                q.add_(1.0)
        for model, seed in ((one, 3), (other, 3), (third, 4)):
            torch.manual_seed(seed + id(model) % 100)
            apply(model, "xavier", seed=seed, redraw=True)
        assert same(tensors(one), tensors(other))
        matrices = {n: q for n, q in one.named_parameters() if q.ndim > 1}
        assert all(not torch.equal(q, third.get_parameter(n)) for n, q in matrices.items())

    def test_the_users_random_numbers_go_on_as_they_were(self) -> None:
        model = vanilla("t5")
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        apply(model, "xavier", seed=3)
        assert torch.equal(torch.rand(3), expected)


class TestCopies:
    @every_cell
    def test_deepcopy(self, family: str, scheme: str) -> None:
        model = applied_model(family, scheme)
        loss(model).backward()  # a copy is mostly made in the middle of a training
        twin = copy.deepcopy(model)
        assert type(twin).__name__ == type(vanilla(family)).__name__
        assert torch.equal(loss(twin), loss(model))
        before = loss(model).detach()
        with torch.no_grad():
            for q in twin.parameters():
                q.mul_(1.1)
        twin.signalprop_record.parametrization = None
        assert torch.equal(loss(model), before)
        assert the_record(model).parametrization is not None

    @every_cell
    def test_state_dict(self, family: str, scheme: str) -> None:
        model, other = applied_model(family, scheme), applied_model(family, scheme, seed=9)
        added = model.state_dict().keys() - vanilla(family).state_dict().keys()
        assert all(name.rpartition(".")[2] == "multiplier" for name in added)
        state = pickle.loads(pickle.dumps(model.state_dict()))
        other.load_state_dict(state, strict=True)
        assert torch.equal(loss(other), loss(model))


class TestCheckpointing:
    @every_cell
    @pytest.mark.parametrize("reentrant", [True, pytest.param(False, marks=pytest.mark.slow)])
    def test_gradients_are_the_same(self, family: str, scheme: str, reentrant: bool) -> None:
        model = applied_model(family, scheme).train()
        expected = gradients(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it gets another name in transformers 6
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()  # a reentrant checkpoint gives nothing a gradient without
        assert same(gradients(model), expected)


class TestPrecision:
    """Types of the outputs are those of the vanilla model."""

    @staticmethod
    def types(model: nn.Module, amp: bool) -> tuple[dict[str, torch.dtype], Any]:
        seen: dict[str, torch.dtype] = {}

        def look(name: str, output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is not None:
                seen[name] = tensor.dtype

        handles = [
            module.register_forward_hook(lambda m, a, out, name=name: look(name, out))
            for name, module in model.named_modules()
        ]
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out = model(input_ids=IDS, labels=IDS)
        for handle in handles:
            handle.remove()
        return seen, out

    @pytest.mark.parametrize(
        ("family", "scheme", "kind"),
        [
            *((*cell, "autocast") for cell in FAST),
            *(("gpt2", s, ("bfloat16", "float16")[i % 2]) for i, s in enumerate(SCHEMES)),
        ],
    )
    def test_types_and_finite_numbers(self, family: str, scheme: str, kind: str) -> None:
        plain, model = vanilla(family), applied_model(family, scheme)
        exact = loss(model).item()
        if kind != "autocast":
            plain, model = plain.to(getattr(torch, kind)), model.to(getattr(torch, kind))
        wanted, _ = self.types(plain, kind == "autocast")
        got, out = self.types(model, kind == "autocast")
        assert got == {name: got[name] for name in got} | wanted
        assert torch.isfinite(out.logits).all()
        assert out.loss.item() == pytest.approx(exact, rel=0.05)
        out.loss.backward()
        assert all(torch.isfinite(q.grad).all() for q in model.parameters() if q.grad is not None)

    @pytest.mark.parametrize(
        "scheme", [pytest.param(s, marks=() if s in ("deepscalelm", "deepnorm") else pytest.mark.slow) for s in SCHEMES]
    )
    def test_a_half_precision_model_is_as_exact_as_the_built_one(self, scheme: str) -> None:
        from applied import built_logits, logits_of, pair

        exact = pair("llama", scheme, 4, torch.float64, match_eps=True)
        with torch.no_grad():
            wanted = built_logits(exact)
            errors = []
            made = pair("llama", scheme, 4, torch.float32, match_eps=True)
            made.applied.to(torch.bfloat16)
            made.built.to(torch.bfloat16)
            for logits in (logits_of(made.applied, made.batch), built_logits(made)):
                errors.append(((logits.double() - wanted).norm() / wanted.norm()).item())
        assert all(math.isfinite(error) for error in errors)
        assert errors[0] < 1.5 * errors[1]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch.compile reads the gradients of tensors that have none
@pytest.mark.slow
class TestCompile:
    """torch.compile: no more graphs or breaks than the vanilla model's, the same numbers."""

    @staticmethod
    def run(model: nn.Module, backend: str, whole: bool) -> tuple[tuple[int, int], Tensor]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        if whole:
            compiled: Any = torch.compile(model, backend=backend)
        else:
            compiled = model
            for layer in layers_of(model):
                layer.compile(backend=backend)
        out = loss(compiled)
        out.backward()
        counters = torch._dynamo.utils.counters
        return (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())), out

    @pytest.mark.parametrize("scheme", ["deepscalelm", "layerscale", "deepnorm"])
    def test_whole_model(self, scheme: str) -> None:
        model = applied_model("bert", scheme)
        twin = copy.deepcopy(model)
        found, out = self.run(twin, "eager", whole=True)
        assert found == (1, 0)  # what the vanilla model has; see the slow test
        assert torch.equal(out, loss(model))
        got = {n: q.grad for n, q in twin.named_parameters() if q.grad is not None}
        assert same(got, gradients(model))


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The layers of one of the three models."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))
