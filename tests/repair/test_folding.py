"""Folding: the same function from vanilla modules, or one line that names what no weight can hold."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import signalprop as sp
from applied import FIXED, MODELS, WAYS, difference, double_norms, outputs, vanilla
from choice import some
from own_model import OwnGPT, own_ids, own_model
from repair.test_equal_to_built import refused
from signalprop.errors import InputError
from signalprop.repair.record import record_of
from signalprop.repair.splices import Splice

FAMILIES = tuple(MODELS)
# Every way on one family, one scheme on every family, skips of a post-norm one; the rest with the slow tests.
FAST = {("lns", "llama"), ("lns", "gemma"), ("admin", "bert"), *((s, "gpt2") for s in WAYS)}
CASES = [
    pytest.param(s, f, marks=() if (s, f) in FAST or s == "deepscalelm" else pytest.mark.slow)
    for s in sorted(sp.SCHEMES)
    for f in FAMILIES
    if not refused(s, f) and (s, f) != ("deepscalelm", "vit")  # which has no tokens that are alike
]


def applied(family: str, scheme: str, dtype: torch.dtype, n_layers: int = 4, **options: Any) -> nn.Module:
    model = vanilla(family, n_layers).to(dtype).eval()
    sp.apply(model, scheme, seed=3, **FIXED.get(scheme, {}) | options)
    return model


def trained(model: nn.Module, seed: int = 1) -> nn.Module:
    """Biases, gains and multipliers moved away from where they start, each entry by itself."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


def contents(model: nn.Module) -> dict[str, Any]:
    """What folding must leave, or bring back, besides the function."""
    return {
        "keys": list(model.state_dict()),
        "classes": [type(module) for module in model.modules()],
        "dropout": [module.p for module in model.modules() if isinstance(module, nn.Dropout)],
        "trains": [q.requires_grad for q in model.parameters()],
        "scaling": [m.scaling for m in model.modules() if hasattr(m, "scaling")],
        "eps": [getattr(m, "eps", getattr(m, "variance_epsilon", None)) for m in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }


@pytest.mark.parametrize(("scheme", "family"), CASES)
def test_every_scheme_and_family(scheme: str, family: str) -> None:
    start = contents(vanilla(family, 3))
    with double_norms():
        model = applied(family, scheme, torch.float64, n_layers=3)
        before = outputs(trained(model))
        assert sp.fold(model) is model
        assert difference(outputs(model), before) < 1e-12
    assert record_of(model) is None
    model.float()
    assert contents(model) == start


@pytest.mark.parametrize(
    ("scheme", "family"),
    [("mup", "llama"), ("normalised-skip", "t5"), ("normalised-skip", "gemma")]
    + [
        pytest.param("normalised-skip", name, marks=pytest.mark.slow)
        for name in ("bert", "gpt2", "llama", "vit", "gpt_neox", "qwen3")
    ],
)
def test_single_precision_and_reload_by_transformers_alone(scheme: str, family: str, tmp_path: Any) -> None:
    model = trained(applied(family, scheme, torch.float32, n_layers=2))
    before = outputs(model)
    folded = outputs(sp.fold(model))
    assert difference(folded, before) < 1e-5
    model.save_pretrained(tmp_path)
    again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(outputs(again.eval()), folded)
    assert "signalprop" not in (tmp_path / "config.json").read_text()
    assert not list(tmp_path.glob("signalprop*"))


@pytest.mark.parametrize(("family", "kind"), [("gpt2", "channel"), ("t5", "channel"), ("llama", "scalar")])
def test_trained_multipliers(family: str, kind: str) -> None:
    model = vanilla(family, 3).double().eval()
    keys = list(model.state_dict())
    sp.apply(model, "deepscalelm", trainable=kind, k=0.8, seed=0)
    names = [name for name, _ in model.named_parameters() if name.endswith("multiplier")]
    assert len(names) == {"t5": 15}.get(family, 6)
    with double_norms():
        start = outputs(trained(model))
        with torch.no_grad():
            for name in names:
                model.get_parameter(name).mul_(-1.7)
        before = outputs(model)
        assert difference(before, start) > 0.1  # they matter
        sp.fold(model)
        assert difference(outputs(model), before) < 1e-12
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("family", some(FAMILIES, ("gpt2", "t5", "gpt_neox", "qwen3")))
def test_factors_on_scores(family: str) -> None:
    """muP's 1/d_head, in maps, fused maps, columns and query norms."""
    model = vanilla(family, 2).double().eval()
    scaling = contents(model)["scaling"]
    sp.apply(model, "mup", base_d_head=4, base_width=16, seed=0)
    with double_norms():
        before = outputs(trained(model))
        assert contents(model)["scaling"] != scaling
        sp.fold(model)
        assert difference(outputs(model), before) < 1e-12
    assert contents(model)["scaling"] == scaling


class TestTiedHeads:
    def test_the_norm_before_the_head_takes_the_factor(self) -> None:
        model = applied("gpt2", "xavier", torch.float64)
        embedding = model.transformer.wte.weight.clone()
        with torch.no_grad():
            hidden = model.transformer(input_ids=torch.arange(8)[None]).last_hidden_state
            sp.fold(model)
            after = model.transformer(input_ids=torch.arange(8)[None]).last_hidden_state
        assert model.lm_head.weight is model.transformer.wte.weight
        assert torch.equal(model.transformer.wte.weight, embedding)
        torch.testing.assert_close(after, hidden / math.sqrt(32))
        torch.testing.assert_close(model.transformer.ln_f.weight, torch.full((32,), 32**-0.5).double())

    def test_embeddings_and_head_with_a_factor_each(self) -> None:
        model = own_model(tied=True).double()
        table = sp.scheme("xavier")(model.signalprop_mapping().architecture)
        head = table.head.model_copy(update={"scale": 0.3})
        embedding = table.embedding.model_copy(update={"scale": 2.5})
        sp.apply(model, replace(table, head=head, embedding=embedding), seed=0)
        with torch.no_grad():
            before, was = trained(model)(own_ids()), model.wte.weight.clone()
            assert difference(sp.fold(model)(own_ids()), before) < 1e-12
        torch.testing.assert_close(model.wte.weight, 2.5 * was)
        assert model.head.weight is model.wte.weight

    def test_a_second_reader_of_that_norm(self) -> None:
        class Twice(OwnGPT):
            def forward(self, ids: Tensor) -> Tensor:
                x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
                for block in self.blocks:
                    x = block(x)
                x = self.ln_f(x)
                self.value(x)
                return self.head(x)

        torch.manual_seed(0)
        model = Twice(2, tied=True)
        model.value = nn.Linear(32, 1)
        sp.apply(model.eval(), "xavier", seed=0)
        with pytest.raises(InputError, match="the head cannot be folded"):
            sp.fold(model)


class TestOwnModels:
    def test_norms_without_weights_fold_into_their_readers(self) -> None:
        model = own_model(affine=False).double()
        sp.apply(model, "lns", seed=0)
        with torch.no_grad():
            before = trained(model)(own_ids())
            assert difference(sp.fold(model)(own_ids()), before) < 1e-12
        assert type(model) is OwnGPT
        assert not any(isinstance(module, Splice) for module in model.modules())

    def test_one_weight_of_two_layers(self) -> None:
        model = own_model(2)
        model.blocks[1].down.weight = model.blocks[0].down.weight
        sp.apply(model, "normalised-skip", alpha_feed_forward=0.9, initialize=False)
        before = model(own_ids())
        with pytest.raises(InputError, match=r"layer \d feed-forward cannot .* shares a weight with another module"):
            sp.fold(model)
        assert torch.equal(model(own_ids()), before)

    def test_weights_that_would_overflow(self) -> None:
        model = own_model(2)
        sp.apply(model, "stable-resnet", seed=0)
        model.half()
        with torch.no_grad():
            model.blocks[1].down.weight[0, 0] = 6e4
        model.blocks[1].down.branch_scale = 2.0
        with pytest.raises(InputError, match=r"layer 1 feed-forward cannot .* would reach 1.2e"):
            sp.fold(model)

    def test_a_carrier_without_a_weight(self) -> None:
        model = own_model(2)
        mapping = model.signalprop_mapping()
        rows = [replace(row, carrier=row.branch) for row in mapping.sublayers]
        sp.apply(model, "normalised-skip", mapping=replace(mapping, sublayers=rows), seed=0)
        with pytest.raises(InputError, match=r"layer 0 attention cannot .* Attention has no `?weight"):
            sp.fold(model)


def test_matched_epsilons_cannot_be_kept() -> None:
    model = vanilla("gpt2", 4, layer_norm_epsilon=1e-3).double().eval()
    eps = contents(model)["eps"]
    sp.apply(model, "deepscalelm", k=1, match_eps=True, seed=0)
    assert contents(model)["eps"] != eps
    before = outputs(model)
    with pytest.warns(UserWarning, match="change by up to") as caught:
        sp.fold(model)
    bound = float(re.findall(r"up to (\S+) \(relative", str(caught[0].message))[0])
    assert contents(model)["eps"] == eps
    assert 1e-6 < difference(outputs(model), before) < 10 * bound < 0.1


def test_dropout_is_given_back() -> None:
    model = vanilla("gpt2", 2, resid_pdrop=0.25).eval()
    sp.apply(model, "deepscalelm", k=0.5, trainable="scalar", seed=0)
    assert 0.25 not in contents(model)["dropout"]
    assert contents(sp.fold(model))["dropout"].count(0.25) == 4


class TestWhatIsNotThere:
    def test_meta_and_undrawn_weights(self) -> None:
        with torch.device("meta"):
            model = OwnGPT(2)
        sp.apply(model, "xavier")
        with pytest.raises(InputError, match="on the meta device"):
            sp.fold(model)
        model.to_empty(device="cpu")
        with pytest.raises(InputError, match="have not been drawn"):
            sp.fold(model)
        sp.initialize(model, seed=0)
        assert type(sp.fold(model)) is OwnGPT

    def test_no_scheme(self) -> None:
        with pytest.raises(InputError, match="carries no scheme"):
            sp.fold(own_model())


@pytest.mark.filterwarnings("ignore::FutureWarning")
class TestAdapters:
    """Adapters may stand beside maps that carry no multiplier; a factor that folds into such a map would miss them."""

    def test_beside_queries_whose_scores_have_a_factor(self) -> None:
        peft = pytest.importorskip("peft")
        model = vanilla("llama", 2).eval()
        sp.apply(model, "mup", base_d_head=4, base_width=16, seed=0)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
        with pytest.raises(InputError, match="layer 0 attention: a map with a multiplier has an adapter"):
            sp.fold(model)
