"""Public complaints about initialisation, multipliers and parameter groups: the broken variant shows it, ours does not.

Every test names its thread.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from applied import VOCABULARY, vanilla
from signalprop.attachment.parametrization_of import read_parametrization
from signalprop.hooks import first_tensor
from signalprop.repair import apply, initialize, parameter_groups
from signalprop.repair.spliced_modules import Multiplied, Rewired

IDS = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
ARGUMENTS = {"input_ids": IDS, "labels": IDS}
transformers = pytest.importorskip("transformers")
before_5 = int(transformers.__version__.partition(".")[0]) < 5


def on_meta(family: str, scheme: str) -> nn.Module:
    """Made on the meta device, given a scheme, then memory that holds anything."""
    vanilla(family)  # older versions cannot be imported on the meta device
    with torch.device("meta"):
        model = vanilla(family, 3)
    apply(model, scheme)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)
    return model


class TestWeightsAreNotDrawnAgain:
    """huggingface/transformers #46620, PR #46632; #45591; #42418; #17370: weights silently re-initialised."""

    @pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
    def test_loaded_weights_stay(self, family: str, tmp_path: Path) -> None:
        saved = vanilla(family, 3)
        with torch.no_grad():
            for q in saved.parameters():
                q.add_(0.1)
        saved.save_pretrained(tmp_path)
        model = type(saved).from_pretrained(tmp_path)
        apply(model, "deepscalelm", initialize=False)
        assert all(torch.equal(q, model.get_parameter(name)) for name, q in saved.named_parameters())

    @pytest.mark.skipif(before_5, reason="transformers before 5 does not fill its buffers")
    @pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
    def test_drawn_weights_stay(self, family: str) -> None:
        model = on_meta(family, "deepscalelm")
        initialize(model, seed=3)
        drawn = {name: q.clone() for name, q in model.named_parameters()}
        model.init_weights()  # transformers' own: again in from_pretrained, in trainers, in scripts
        assert all(torch.equal(q, drawn[name]) for name, q in model.named_parameters())
        for place in (*model.modules(), *model.parameters()):  # the marks it goes by
            place._is_hf_initialized = False
        model.init_weights()
        assert not all(torch.equal(q, drawn[name]) for name, q in model.named_parameters())


class BufferedLinear(nn.Linear):
    """How it is mostly written: the factor of a layer in a buffer."""

    def __init__(self, features: int, scale: float) -> None:
        super().__init__(features, features)
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class TestMetaDevice:
    def test_multipliers_are_not_wiped(self) -> None:
        """allenai/OLMo-core PR #698: the LayerNorm-Scaling factor is a buffer, and `to_empty` wipes it."""
        with torch.device("meta"):
            broken = BufferedLinear(4, 0.5)
        broken.to_empty(device="cpu")
        broken.scale.fill_(7)  # as well as anything else
        broken.reset_parameters()
        assert broken.scale != 0.5  # nothing that initialises weights brings it back
        expected = vanilla("llama", 3)
        apply(expected, "lns", seed=0)
        model = on_meta("llama", "lns")
        scales = [m.branch_scale for m in model.modules() if isinstance(m, Multiplied)]
        assert scales == [m.branch_scale for m in expected.modules() if isinstance(m, Multiplied)]
        assert scales == pytest.approx([2**-0.5, 2**-0.5, 3**-0.5, 3**-0.5])
        assert not [name for name, _ in model.named_buffers() if "scale" in name]


class TestWidthAndDepth:
    """microsoft/mup #22, #23: "coord check looks good, transfer fails"; NVIDIA/Megatron-LM #2824: width only."""

    @staticmethod
    def change(scheme: str, n_layers: int, width: int = 32) -> float:
        """How far one step of Adam moves the output of the last layer, relative to its size."""
        seen: list[Tensor] = []
        model = vanilla("llama", n_layers, hidden_size=width, intermediate_size=2 * width)
        options = {"base_width": 32} | ({"base_depth": 4} if scheme == "depth-mup" else {})
        apply(model, scheme, seed=3, **options)
        model.model.layers[-1].register_forward_hook(lambda m, a, out: seen.append(first_tensor(out).detach()))
        stepper = torch.optim.AdamW(parameter_groups(model, lr=0.003))
        model(**ARGUMENTS).loss.backward()
        stepper.step()
        model(**ARGUMENTS)
        before, after = seen
        return float((after - before).norm() / before.norm())

    def test_the_width_does_not_tell_but_the_depth_does(self) -> None:
        wide = self.change("mup", 4, 128) / self.change("mup", 4)
        deep = self.change("mup", 32) / self.change("mup", 4)
        both = self.change("depth-mup", 32) / self.change("depth-mup", 4)
        assert 0.5 < wide < 1.5  # the check that looks good
        assert deep > 1.3 * both
        assert 0.5 < both < 1.5


class TestGroupsByName:
    """microsoft/mup #59, PR #72; #6; #55: what is written onto parameters is lost when they are replaced."""

    def test_attributes_are_lost(self) -> None:
        model = vanilla("llama", 3)
        apply(model, "mup", seed=0, base_width=8)
        for q in model.parameters():
            q.learning_rate = 0.25  # type: ignore[attr-defined]  # how it is done elsewhere
        copied = copy.deepcopy(model)
        assert not any(hasattr(q, "learning_rate") for q in copied.parameters())
        model.to_empty(device="meta")
        groups = [parameter_groups(m, lr=1.0) for m in (model, copied)]
        assert [g["names"] for g in groups[0]] == [g["names"] for g in groups[1]]
        assert sorted(g["lr"] for g in groups[1]) == [0.25, 1.0]
        # test_distributed.py has the same for FSDP


class TestGates:
    """majumderb/rezero #8, #16: NaN with the embeddings of BERT and GPT; which gates stay near 0?"""

    @pytest.mark.parametrize("family", ["bert", "gpt2"])
    def test_training_is_finite_and_trained_gates_are_told_by_layer(self, family: str) -> None:
        model = vanilla(family, 8)
        apply(model, "rezero", seed=0)
        stepper = torch.optim.AdamW(parameter_groups(model, lr=0.01, weight_decay=0.1))
        losses = []
        for _ in range(10):
            stepper.zero_grad()
            loss = model(**ARGUMENTS).loss
            loss.backward()
            stepper.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]
        gates = [m.multiplier.item() for m in model.modules() if isinstance(m, Rewired)]
        table = read_parametrization(model)
        assert table.branch.tolist() == pytest.approx(gates, rel=1e-6)
        assert all(gate != 0 for gate in gates)
        e = table.embedding  # the row that tells large embeddings from small ones
        assert e.token > 0 and e.position > 0
