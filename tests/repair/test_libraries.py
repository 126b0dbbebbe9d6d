"""Applied models in the hands of transformers, peft and accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from applied import VOCABULARY, trained, vanilla
from choice import some
from signalprop.errors import InputError
from signalprop.repair import apply, fold, initialize, parameter_groups
from tiny import CACHE

SCHEMES = ("deepscalelm", "normalised-skip", "layerscale", "lns")
IDS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
LONG = {"gpt2": {"n_positions": 40}, "llama": {"max_position_embeddings": 40}, "bert": {}}
generating = pytest.mark.parametrize(
    ("family", "scheme"),
    some(
        [*(("gpt2", s) for s in SCHEMES), ("llama", "stable-resnet"), ("llama", "lns")],
        (("gpt2", "deepscalelm"), ("llama", "lns")),
    ),
)


def applied_model(family: str, scheme: str, **changes: Any) -> nn.Module:
    """In evaluation mode, with trainable multipliers away from their start."""
    model = vanilla(family, 3, **LONG[family] | changes).eval()  # of 2 layers DeepScaleLM has a skip of 0
    apply(model, scheme, seed=3)
    return trained(model)


def logits_of(model: nn.Module, ids: Tensor = IDS, **more: Any) -> Tensor:
    out: Tensor = model(input_ids=ids, **more).logits
    return out


class TestGenerate:
    @generating
    def test_token_by_token(self, family: str, scheme: str) -> None:
        model = applied_model(family, scheme)
        cache, pieces = None, []
        with torch.no_grad():
            for token in IDS.split(1, 1):
                out = model(input_ids=token, use_cache=True, **{CACHE: cache})
                cache = getattr(out, CACHE)
                pieces.append(out.logits)
            whole = logits_of(model)
        assert (torch.cat(pieces, 1) - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_resizing_the_embeddings_is_refused_until_folded() -> None:
    """transformers makes a new head, without the old one's multiplier."""
    model = applied_model("gpt2", "deepscalelm")
    before = logits_of(model).detach()
    with pytest.raises(InputError, match=r"resize the embeddings before apply, or after signalprop.fold"):
        model.resize_token_embeddings(VOCABULARY + 7)
    assert torch.equal(logits_of(model), before)
    fold(model).resize_token_embeddings(VOCABULARY + 7, mean_resizing=False)
    found = logits_of(model)
    assert found.shape[-1] == VOCABULARY + 7
    torch.testing.assert_close(found[..., :VOCABULARY], before, rtol=1e-4, atol=1e-5)


def trainable(model: nn.Module) -> int:
    return sum(q.requires_grad for q in model.parameters())


ADAPTED = {"gpt2": ["c_fc"], "llama": ["q_proj", "up_proj"], "bert": ["query", "value", "intermediate.dense"]}
CARRIERS = {"gpt2": ["mlp.c_proj"], "llama": ["o_proj"], "bert": ["attention.output.dense"]}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for what it will rename
class TestLora:
    """peft's low-rank adapters: beside maps without a multiplier they are right, beside a carrier they are refused."""

    @staticmethod
    def adapted(model: nn.Module, names: list[str]) -> Any:
        peft = pytest.importorskip("peft")
        conv = "GPT2" in type(model).__name__
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names, fan_in_fan_out=conv))

    @staticmethod
    def train(model: Any) -> Tensor:
        """Three steps; returns the last loss."""
        trained = [q for q in model.parameters() if q.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.02)
        for _ in range(3):
            optimizer.zero_grad()
            loss: Tensor = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
        return loss.detach()

    @pytest.mark.parametrize(
        ("family", "scheme"),
        some([("bert", "deepscalelm"), ("gpt2", "deepscalelm"), ("llama", "stable-resnet")], [("gpt2", "deepscalelm")]),
    )
    def test_beside_other_maps(self, family: str, scheme: str) -> None:
        plain = applied_model(family, scheme)
        expected = logits_of(plain)
        model = self.adapted(plain, ADAPTED[family])
        assert torch.equal(logits_of(model), expected)  # B starts at 0
        assert all("lora" in name for name, q in model.named_parameters() if q.requires_grad)
        self.train(model)
        unmerged = logits_of(model)
        assert not torch.allclose(unmerged, expected, rtol=1e-3)
        merged = model.merge_and_unload()
        assert torch.allclose(logits_of(merged), unmerged, rtol=1e-4, atol=1e-5 * expected.abs().max().item())

    @pytest.mark.parametrize(
        ("family", "scheme"), [("bert", "deepscalelm"), ("gpt2", "deepscalelm"), ("llama", "layerscale")]
    )
    def test_beside_a_carrier_is_refused(self, family: str, scheme: str) -> None:
        """Before anything could be trained or merged."""
        with pytest.raises(InputError, match=r"with a scheme's multiplier.*fold\(model\) before adapters"):
            self.adapted(applied_model(family, scheme), CARRIERS[family])

    def test_adapters_without_a_model_of_peft_around_are_refused(self) -> None:
        peft = pytest.importorskip("peft")  # which transformers' add_adapter calls so
        lora = peft.LoraConfig(r=4, target_modules=CARRIERS["llama"])
        with pytest.raises(InputError, match="with a scheme's multiplier"):
            peft.inject_adapter_in_model(lora, applied_model("llama", "layerscale"), "default")

    def test_beside_a_carrier_in_a_part_of_what_is_adapted(self) -> None:
        whole: Any = vanilla("gpt2", 3).eval()
        part = whole.transformer
        apply(part, "deepscalelm", seed=0)
        self.adapted(whole, CARRIERS["gpt2"])  # peft tells the whole, which knows of no scheme
        for door in (fold, initialize, lambda found: parameter_groups(found, lr=1.0)):
            with pytest.raises(InputError, match=r"with a scheme's multiplier.*fold\(model\) before adapters"):
                door(part)

    @pytest.mark.parametrize("family", some(["bert", "gpt2", "llama"], ("gpt2",)))
    def test_fold_first(self, family: str) -> None:
        plain = applied_model(family, "deepscalelm")
        expected = logits_of(plain)
        model = self.adapted(fold(plain), CARRIERS[family] + ADAPTED[family])
        largest = expected.abs().max().item()
        assert torch.allclose(logits_of(model), expected, atol=1e-5 * largest)
        self.train(model)
        unmerged = logits_of(model)
        assert not torch.allclose(unmerged, expected, rtol=1e-3)
        assert torch.allclose(logits_of(model.merge_and_unload()), unmerged, atol=1e-5 * largest)
