"""Schemes on models that no family knows, of which only the stream, its branches and its norms were found."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import signalprop as sp

WIDTH = 16


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TwoStreams(nn.Module):
    """Gives the stream that it reads second first, as MMDiT does."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Feed(), Feed()

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.text(text), self.image(image)


class Layers(nn.Module):
    def __init__(self, layer: type[nn.Module], n_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(n_layers))

    def forward(self, x: Tensor) -> Tensor:
        image = self.embedding(x)
        text = self.other(x)
        for layer in self.layers:
            if isinstance(layer, TwoStreams):
                text, image = layer(image, text)
            else:
                image = layer(image)
        return image + 0 * text


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))}


def test_lns_on_a_found_stream_is_what_the_paper_writes_down(batch: dict[str, Tensor]) -> None:
    model = Layers(Feed, 3)
    parts: Any = model
    with torch.no_grad():
        x = parts.embedding(batch["x"])
        for i, layer in enumerate(parts.layers):
            x = x + layer.down(torch.tanh(layer.up(layer.norm(x) * (i + 1) ** -0.5)))
        sp.apply(model, "lns", initialize=False, data=batch)
        assert torch.allclose(model(**batch), x, atol=1e-6)
        sp.fold(model)
        assert torch.allclose(model(**batch), x, atol=1e-6)
    assert type(model) is Layers


class Shifted(nn.LayerNorm):
    """Its gain is 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:]) * (1 + self.weight) + self.bias


def test_norms_with_gains_of_two_sorts_are_not_folded(batch: dict[str, Tensor]) -> None:
    model = Layers(Feed, 3)
    parts: Any = model
    parts.layers[1].norm = Shifted(WIDTH)
    nn.init.normal_(parts.layers[1].norm.weight)
    sp.apply(model, "lns", initialize=False, change_function=True, data=batch)
    scaled = model(**batch)
    with pytest.raises(sp.InputError, match=r"some of the model's norms have the gain weight, and some 1 \+ weight"):
        sp.fold(model)
    assert torch.equal(model(**batch), scaled)


def test_what_needs_more_than_the_stream_is_refused_and_leaves_the_model(batch: dict[str, Tensor]) -> None:
    model = Layers(Feed, 3)
    before = model(**batch)
    with pytest.raises(sp.InputError, match="give a mapping"):
        sp.apply(model, "lns", data=batch)  # draws weights
    with pytest.raises(sp.InputError, match="'takase' changes the embeddings or the head"):
        sp.apply(model, "takase", initialize=False, data=batch)
    assert torch.equal(model(**batch), before) and type(model) is Layers


def test_of_two_streams_one_is_followed_through_all_layers(batch: dict[str, Tensor]) -> None:
    model = Layers(TwoStreams, 3)
    profile = sp.measure(model, batch, loss=lambda out: out.square().sum())
    parts: Any = model
    image = parts.embedding(batch["x"])
    for i, layer in enumerate(parts.layers):
        expected = float(image.detach().double().var(correction=0))
        assert profile.forward["stream_in"].variance[i] == pytest.approx(expected, rel=1e-6)
        image = layer.image(image)


@pytest.fixture
def fast() -> Iterator[None]:
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.usefixtures("fast")
def test_the_fast_path_of_pytorch_which_passes_over_multipliers_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    batch = {"src": torch.randn(2, 5, WIDTH)}
    with pytest.raises(sp.InputError, match="set_fastpath_enabled"):
        sp.apply(model, "lns", initialize=False, data=batch)
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        before = model(**batch)
        sp.apply(model, "lns", initialize=False, data=batch)
        after = model(**batch)
        sp.fold(model)
        torch.backends.mha.set_fastpath_enabled(True)
        assert torch.allclose(model(**batch), after, atol=1e-5)
    assert not torch.allclose(before, after, atol=1e-3)


def test_multipliers_per_channel_fit_the_stream_or_are_refused() -> None:
    """Swin's stream is wider from stage to stage."""
    from transformers import Swinv2Config, Swinv2Model

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "window_size": 4}
    model = Swinv2Model(Swinv2Config(**sizes, depths=[1, 1], num_heads=[2, 4])).eval()
    images = {"pixel_values": torch.randn(1, 3, 16, 16)}
    before = model(**images).last_hidden_state
    with pytest.raises(sp.InputError, match="gives 16 channels, and the scheme has a multiplier for each of 32"):
        sp.apply(model, "layerscale", initialize=False, data=images)
    assert torch.equal(model(**images).last_hidden_state, before)


def test_schemes_apply_to_models_with_multipliers_of_their_own(tmp_path: Path) -> None:
    """Granite: LNS keeps its factor on branches, a table says another one, and both are kept by files and weights."""
    from transformers import GraniteConfig, GraniteForCausalLM

    def granite() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
        return GraniteForCausalLM(GraniteConfig(**sizes, **heads, residual_multiplier=0.3)).eval()

    ids = torch.arange(3, 11)[None]
    model, by_hand = granite(), granite()
    table = sp.apply(model, "lns", initialize=False)
    assert set(table.branch) == {0.3}
    for layer, block in enumerate(by_hand.model.layers):
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.register_forward_hook(lambda _, __, out, factor=(layer + 1) ** -0.5: out * factor)
    torch.testing.assert_close(model(ids).logits, by_hand(ids).logits, rtol=1e-5, atol=1e-7)
    model, by_hand = granite(), granite()
    asked = sp.read_parametrization(model)
    sp.apply(model, replace(asked, branch=2 * asked.branch), initialize=False)
    for block in by_hand.model.layers:
        block.residual_multiplier = 0.6
    torch.testing.assert_close(model(ids).logits, by_hand(ids).logits, rtol=1e-5, atol=1e-7)
    sp.save(model, tmp_path)
    torch.testing.assert_close(sp.load(tmp_path).eval()(ids).logits, model(ids).logits)
    sp.fold(model)
    torch.testing.assert_close(model(ids).logits, by_hand(ids).logits, rtol=1e-4, atol=1e-6)


class Factors(Feed):
    skip, factor = 0.5, 0.3

    def forward(self, x: Tensor) -> Tensor:
        return self.skip * x + self.factor * self.down(torch.tanh(self.up(self.norm(x))))


class Normed(Layers):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__(layer, 3)
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)  # type: ignore[no-any-return]


def test_a_model_with_a_skip_of_its_own_computes_what_one_without_does(batch: dict[str, Tensor]) -> None:
    models = [Normed(Factors), Normed(Feed)]
    for model in models:
        for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm)):
            norm.eps = 1e-12
    own = sp.apply(Normed(Factors), "lns", initialize=False, data=batch)
    assert (set(own.skip), set(own.branch)) == ({0.5}, {0.3})
    asked = replace(own, skip=0 * own.skip + 0.8, branch=0 * own.branch + 2)
    for model in models:
        sp.apply(model, asked, initialize=False, data=batch)
    torch.testing.assert_close(models[0](**batch), models[1](**batch), rtol=1e-4, atol=1e-5)


_TINY = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 60,
    "intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "head_dim": 8,
}  # fmt: skip
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_d_ssm": 32, "mamba_n_groups": 1}
_ALPHAS = {"full_attn_alpha_factor": 2.0, "full_attn_beta_factor": 0.5, "mlp_alpha_factor": 1.5, "mlp_beta_factor": 0.7}
# Settings; modules that give what is added; factors of the model on the stream and on each of them.
OWN: dict[str, tuple[dict[str, Any], str, list[float], list[float]]] = {
    "minicpm3": ({**_LATENT, "num_key_value_heads": 4, "scale_depth": 0.5}, "self_attn mlp", [1, 1], [8**-0.5] * 2),
    "hyperclovax": ({"residual_multiplier": 0.3}, "post_norm1 post_norm2", [1, 1], [0.3, 0.3]),
    "minimax": ({**_ALPHAS, "num_local_experts": 4, "layer_types": ["full_attention"] * 2}, "self_attn mlp",
                [2, 1.5], [0.5, 0.7]),
    "gemma4_text": ({"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 8},
                    "post_attention_layernorm post_feedforward_layernorm", [1, 0.5], [1, 0.5]),
    "falcon_h1": ({**_MAMBA, "attention_out_multiplier": 0.5, "ssm_out_multiplier": 0.25},
                  "mamba self_attn feed_forward", [1, 1, 1], [0.25, 0.5, 1]),
}  # fmt: skip


@pytest.mark.parametrize("family", OWN)
def test_own_multipliers_of_named_families_are_skips_and_branches(family: str) -> None:
    import transformers

    settings, names, skips, branches = OWN[family]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**_TINY, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, tensor in model.named_buffers():
        if name.endswith("layer_scalar"):
            tensor.fill_(0.5)
    by_hand, ids = copy.deepcopy(model), torch.arange(3, 11)[None]
    table = sp.apply(model, "layerscale", initialize=False)  # 0.1, in every channel
    assert table.skip == pytest.approx(2 * skips) and table.branch == pytest.approx([0.1 * b for b in 2 * branches])
    for layer in by_hand.model.layers:
        for name in names.split():
            layer.get_submodule(name).register_forward_hook(
                lambda _, __, out: (0.1 * out[0], *out[1:]) if isinstance(out, tuple) else 0.1 * out
            )
    torch.testing.assert_close(model(ids).logits, by_hand(ids).logits, rtol=1e-4, atol=1e-6)
    if family != "falcon_h1":  # a factor of its own stands between its feed-forward's last map and the sum
        sp.fold(model)
        torch.testing.assert_close(model(ids).logits, by_hand(ids).logits, rtol=1e-4, atol=1e-6)
