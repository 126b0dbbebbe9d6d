"""Own models: the documented example, every norm placement, multipliers, and mappings that do not fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from signalprop.attachment import Mapping, SublayerMap
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.measurement import measure
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import tensor_moments


class Layer(nn.Module):
    """A layer of any placement, with multipliers; the branches are linear maps, so the truth is easy to write down."""

    def __init__(self, d: int, placement: str, skip: float, beta: float, parallel: bool) -> None:
        super().__init__()
        self.placement, self.skip, self.beta, self.parallel = placement, skip, beta, parallel
        for name in ("a", "f"):
            self.add_module(f"norm_{name}", nn.LayerNorm(d))
            self.add_module(f"second_{name}", nn.LayerNorm(d))
            self.add_module(f"branch_{name}", nn.Linear(d, d))
            self.add_module(f"outer_{name}", nn.Identity())

    def branch(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = getattr(self, f"outer_{name}")(x)
        if self.placement in ("pre", "sandwich"):
            y = getattr(self, f"norm_{name}")(y)
        y = getattr(self, f"branch_{name}")(y)
        return getattr(self, f"second_{name}")(y) if self.placement == "sandwich" else y

    def forward(self, x: torch.Tensor, trace: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        def keep(**tensors: torch.Tensor) -> None:
            for tensor in tensors.values():
                if tensor.requires_grad:
                    tensor.retain_grad()
            trace.append(tensors)

        entry = x
        for name in ("a", "f"):
            reads = entry if self.parallel else x
            added = self.branch(name, reads)
            first = name == "a" or not self.parallel
            out = (self.skip * x if first else x) + self.beta * added
            if self.placement == "post":
                out = getattr(self, f"norm_{name}")(out)
            keep(stream_in=reads, branch=added, stream_out=out)
            x = out
        return x


class Own(nn.Module):
    """Two layers; the mapping is the model's own method."""

    def __init__(
        self, placement: str, skip: float = 1.0, beta: float = 1.0, parallel: bool = False, final: bool = True
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Layer(16, placement, skip, beta, parallel) for _ in range(2))
        self.final = nn.LayerNorm(16) if final else None
        self.head = nn.Linear(16, 50)
        self.trace: list[dict[str, torch.Tensor]] = []
        self.architecture = Architecture(
            kind="encoder", n_layers=2, d_model=16, n_heads=2, d_ff=16, vocab_size=50, seq_len=9,
            norm_placement=placement, parallel=parallel, final_norm=final, positions="none", tied_embeddings=False,
        )  # fmt: skip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.trace = []
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x, self.trace)
        logits: torch.Tensor = self.head(x if self.final is None else self.final(x))
        return logits

    def signalprop_mapping(self) -> Mapping:
        placement = self.architecture.norm_placement
        sublayers = []
        for i, layer in enumerate(self.layers):
            for name in ("a", "f"):
                place = f"layers.{i}"
                sublayers.append(
                    SublayerMap(
                        branch=f"{place}.second_{name}"
                        if placement == "sandwich"
                        else getattr(layer, f"branch_{name}"),
                        norm=None if placement == "none" else f"{place}.norm_{name}",
                        post_norm=f"{place}.second_{name}" if placement == "sandwich" else None,
                        reads=f"{place}.outer_{name}"
                        if placement == "none" or (placement == "post" and i == 0)
                        else None,
                        writes=layer if i == 1 and name == "f" else None,
                        skip=layer.skip,
                        multiplier=layer.beta,
                    )
                )
        return Mapping(
            architecture=self.architecture,
            sublayers=sublayers,
            final_norm=None if self.final is None else "final",
            arguments=lambda batch: {"ids": torch.as_tensor(batch.tokens)},
        )


def own_batch() -> Batch:
    rng = np.random.default_rng(0)
    return Batch(tokens=rng.integers(0, 50, (3, 9)), targets=rng.integers(0, 50, (3, 9)))


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize(
    ("placement", "parallel"),
    [("pre", False), ("post", False), ("sandwich", False), ("none", False), ("pre", True), ("none", True)],
)
def test_every_placement_with_multipliers(placement: str, parallel: bool, final: bool) -> None:
    torch.manual_seed(0)
    model = Own(placement, skip=0.8, beta=0.6, parallel=parallel, final=final)
    profile = measure(model, own_batch())
    model.zero_grad()
    logits = model(torch.as_tensor(own_batch().tokens))
    nn.functional.cross_entropy(logits.flatten(0, 1), torch.as_tensor(own_batch().targets).flatten()).backward()
    assert len(model.trace) == 4
    for row, tensors in enumerate(model.trace):
        for point, tensor in tensors.items():
            expected = tensor_moments(tensor.detach().numpy())
            got = profile.forward[point].at(row)
            assert got["variance"] == pytest.approx(expected.variance, rel=1e-5), (row, point)
            assert got["token_correlation"] == pytest.approx(expected.token_correlation, abs=1e-5)
            expected = tensor_moments(tensor.grad.numpy())
            got = profile.gradient[point].at(row)
            assert got["variance"] * profile.gradient_scale == pytest.approx(expected.variance, rel=1e-5), (row, point)
    np.testing.assert_allclose(profile.statistics["branch_gain"], (0.6 / 0.8) ** 2)


class TestMappingsThatDoNotFit:
    def test_wrong_number_of_sublayers(self) -> None:
        model = Own("pre")
        mapping = model.signalprop_mapping()
        with pytest.raises(InputError, match="the mapping has 3 sublayers, its architecture 4"):
            measure(model, own_batch(), mapping=replace(mapping, sublayers=mapping.sublayers[:3]))

    def test_a_module_that_is_not_there(self) -> None:
        model = Own("pre")
        mapping = model.signalprop_mapping()
        items = [replace(mapping.sublayers[0], norm="layers.0.ln"), *mapping.sublayers[1:]]
        with pytest.raises(
            InputError, match=r"layer 0 attention: Own has no 'layers.0.ln'; layers.0 has no 'ln' \(it has: norm_a"
        ):
            measure(model, own_batch(), mapping=replace(mapping, sublayers=items))

    @pytest.mark.parametrize(
        ("placement", "final", "field", "message"),
        [
            ("pre", True, "norm", "layer 1 feed-forward: the mapping names no 'norm'; placement pre needs it"),
            ("post", False, "norm", "layer 1 feed-forward: the mapping names no 'norm'; placement post needs it"),
            (
                "none",
                True,
                "reads",
                "layer 1 feed-forward: the mapping names no 'reads'; placement none needs a module",
            ),
            ("pre", False, "writes", "layer 1 feed-forward: the mapping names no 'writes'; without a final norm"),
        ],
    )
    def test_something_is_missing(self, placement: str, final: bool, field: str, message: str) -> None:
        model = Own(placement, final=final)
        mapping = model.signalprop_mapping()
        items = [*mapping.sublayers[:3], replace(mapping.sublayers[3], **{field: None})]
        with pytest.raises(InputError, match=message):
            measure(model, own_batch(), mapping=replace(mapping, sublayers=items))

    def test_two_sublayers_that_share_a_branch(self) -> None:
        model = Own("pre")
        mapping = model.signalprop_mapping()
        items = [*mapping.sublayers[:3], replace(mapping.sublayers[3], branch=mapping.sublayers[2].branch)]
        with pytest.raises(InputError, match="layer 1 feed-forward: its branch is the module of another point"):
            measure(model, own_batch(), mapping=replace(mapping, sublayers=items))

    def test_a_tensor_of_another_shape(self) -> None:
        model = Own("pre")
        with pytest.raises(
            InputError, match=r"layer 0 attention, stream_in: expected a tensor \(batch, tokens, features\)"
        ):
            measure(model, {"ids": torch.arange(16).view(2, 2, 2, 2)}, loss=lambda out: out.sum())

    def test_no_arguments_for_a_batch(self) -> None:
        model = Own("pre")
        with pytest.raises(InputError, match="no `arguments` to make the model's inputs from a Batch"):
            measure(model, own_batch(), mapping=replace(model.signalprop_mapping(), arguments=None))
