"""The numerical check of a mapping, and the anatomy beside it: on every family, and on mappings that are wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import signalprop as sp
from choice import some
from measurement.conftest import fresh as family
from measurement.conftest import models
from own_model import Block, OwnGPT, own_model
from signalprop.attachment.anatomy import attach
from signalprop.attachment.families import mapping_of
from signalprop.attachment.mapping import Mapping, find
from signalprop.errors import InputError
from signalprop.models import build
from signalprop.network.architecture import Architecture
from signalprop.network.layout import PLACEMENTS
from signalprop.network.parametrization import layout
from signalprop.repair.sites import carriers_of, confirm
from signalprop.repair.tiny_pass import arguments_for
from signalprop.schemes import scheme
from signalprop.streams.parts import Branch


def found_in(model: nn.Module, mapping: Mapping) -> list[Branch]:
    found = sp.anatomy(model, arguments_for(attach(model, mapping), None))
    stacks = sorted(found.stacks[:2], key=lambda stack: "decoder" in stack.path)
    return [branch for stack in stacks for branch in stack.branches]


# Of families that the table describes a third; models/test_families.py runs every path of all of them.
THIRD = [
    p if i % 3 == 0 else pytest.param(*getattr(p, "values", [p]), marks=pytest.mark.slow)
    for i, p in enumerate(models())
]


class TestEveryFamily:
    @pytest.mark.parametrize("name", THIRD)
    def test_confirm_holds(self, name: str) -> None:
        model = family(name)
        assert confirm(attach(model, mapping_of(model))) is True

    @pytest.mark.parametrize("name", THIRD)
    def test_the_anatomy_is_the_family_table(self, name: str) -> None:
        model = family(name)
        mapping = mapping_of(model)
        rows, found = layout(mapping.architecture), found_in(model, mapping)
        assert [find(model, each.modules[0]) for each in found] == carriers_of(attach(model, mapping))
        pairs = zip(rows.placement, mapping.sublayers, strict=True)
        said = [PLACEMENTS[p] if item.norm or PLACEMENTS[p] != "pre" else "none" for p, item in pairs]
        assert [each.placement for each in found] == said
        norms = [each.post_norm if each.placement == "res-post" else each.norm for each in found]
        assert [norm and find(model, norm) for norm in norms] == [
            item.norm and find(model, item.norm) for item in mapping.sublayers
        ]
        assert [each.parallel for each in found] == rows.parallel.tolist()
        assert {each.multiplier.value for each in found} == {mapping.architecture.branch_scale}


@pytest.mark.parametrize(
    ("kind", "placement"),
    some(
        product(["encoder", "decoder", "encoder-decoder"], ["pre", "post", "sandwich", "res-post", "none"]),
        (("encoder", "post"), ("decoder", "none"), ("encoder", "res-post"), ("encoder-decoder", "sandwich")),
    ),
)
def test_reference_models_with_multipliers(placement: str, kind: str) -> None:
    a = Architecture(
        kind=kind, n_layers=2, d_model=32, n_heads=2, vocab_size=50, seq_len=9, norm_placement=placement,
        dropout=0.1, tied_embeddings=False,
    )  # fmt: skip
    p = scheme("xavier")(a).with_columns(skip=0.8, branch=0.6, norm_scale=0.7)
    model = build(p, seed=0)
    assert confirm(attach(model, model.signalprop_mapping())) is True
    doubled = model.signalprop_mapping()
    items = [replace(item, multiplier=2 * item.multiplier) for item in doubled.sublayers]
    with pytest.raises(InputError, match="layer 0 attention: the stream after it is not skip"):
        confirm(attach(model, replace(doubled, sublayers=items)))
    if kind != "encoder-decoder":
        plain = build(scheme("xavier")(a), seed=0)
        found = found_in(plain, plain.signalprop_mapping())
        assert [each.placement for each in found] == [placement] * 4


class Faulty(Block):
    """The small GPT's layer, wrong in one of several ways."""

    def __init__(self, fault: str) -> None:
        super().__init__(affine=True)
        self.fault, self.spare = fault, nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        y = x if self.fault == "norm unused" else self.ln_2(x)
        y = x if self.fault == "norm dropped" else y
        y = self.down(nn.functional.gelu(self.up(y)))
        if self.fault == "scaled":
            y = 0.3 * y
        return x + y + (self.spare(x) if self.fault == "third branch" else 0)


def own(fault: str = "") -> OwnGPT:
    model = own_model(2)
    model.blocks[1] = Faulty(fault)
    return model.eval()


class TestModelsThatAreNotWhatTheMappingSays:
    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("norm unused", r"layer 1 feed-forward: its norm \(LayerNorm\) never ran"),
            ("norm dropped", "layer 1 feed-forward: a map that begins the branch does not read its norm's output"),
            ("scaled", "layer 1 feed-forward: the stream .* the model multiplies the branch by 0.3 times"),
            ("third branch", "layer 1 feed-forward: the stream .*: a branch is missing or is added twice"),
        ],
    )
    def test_a_fault_is_named(self, fault: str, message: str) -> None:
        model = own(fault)
        if fault == "norm unused":  # nothing shows where the stream is, so the mapping says it
            items = list(model.signalprop_mapping().sublayers)
            items[3] = replace(items[3], reads="blocks.1.up")
            mapping = replace(model.signalprop_mapping(), sublayers=items)
        else:
            mapping = model.signalprop_mapping()
        with pytest.raises(InputError, match=message):
            confirm(attach(model, mapping))

    @pytest.mark.parametrize(
        ("row", "changes", "message"),
        [
            (1, {"carrier": "blocks.0.up"}, "layer 0 feed-forward: the branch is not what its carrier outputs"),
            (2, {"carrier": "blocks.0.attn.proj"}, "layer 1 attention: its carrier is also that of layer 0 attention"),
            (3, {"carrier": "blocks.1.spare"}, "layer 1 feed-forward: its carrier ran 0 times"),
            (2, {"weights": {}}, "layer 1 attention: the mapping names no carrier"),
            (3, {"norm": "blocks.1.ln_1"}, "layer 1 attention: the stream after it is not"),
            (1, {"reads": "blocks.1.ln_1"}, "layer 0 attention: the stream after it is not"),
        ],
    )
    def test_a_mapping_that_is_wrong(self, row: int, changes: dict[str, Any], message: str) -> None:
        model = own()
        items = list(model.signalprop_mapping().sublayers)
        items[row] = replace(items[row], **changes)
        with pytest.raises(InputError, match=message):
            confirm(attach(model, replace(model.signalprop_mapping(), sublayers=items)))

    def test_a_sublayer_that_the_mapping_leaves_out(self) -> None:
        model = family("gpt2")
        mapping = mapping_of(model)
        fewer = replace(mapping, architecture=mapping.architecture.replace(n_layers=2), sublayers=mapping.sublayers[:4])
        with pytest.raises(InputError, match="layer 1 feed-forward: the stream after it is not"):
            confirm(attach(model, fewer))


class TestTheModelIsLeftAsItWas:
    def test_mode_hooks_gradients_and_random_numbers(self) -> None:
        model = family("bert").train()
        model.bert.encoder.layer[1].eval()
        before = [module.training for module in model.modules()]
        state = torch.get_rng_state()
        confirm(attach(model, mapping_of(model)))
        assert torch.equal(torch.get_rng_state(), state)
        assert [module.training for module in model.modules()] == before
        assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
        assert all(p.grad is None for p in model.parameters())

    def test_after_an_error_too(self) -> None:
        model = own().train()
        with pytest.raises(InputError, match=r"does not run on a tiny batch \(TypeError: .*give the keyword arguments"):
            confirm(attach(model, model.signalprop_mapping()), {"words": torch.zeros(1, 3)})
        assert model.training
        assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())

    def test_the_meta_device_is_skipped(self) -> None:
        with torch.device("meta"):
            model = family("llama")
        assert confirm(attach(model, mapping_of(model))) is False
