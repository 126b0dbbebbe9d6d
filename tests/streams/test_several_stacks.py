"""Models with several stacks: what was measured is named, what was not too, and another can be taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SqueezeBertConfig,
    SqueezeBertModel,
)

import signalprop as sp
from commandline import Command

VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 90,
    "max_position_embeddings": 24, "eos_token_id": 89,
}  # fmt: skip


def llava() -> Any:
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config=LlamaConfig(**TEXT), vision_config=CLIPVisionConfig(**VISION), image_token_index=80
    )
    return LlavaForConditionalGeneration(config).eval()


def clip() -> Any:
    torch.manual_seed(0)
    return CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16)).eval()


def by_hooks(layers: nn.ModuleList, run: Callable[[], Any]) -> list[float]:
    seen: list[float] = []

    def keep(_: nn.Module, __: Any, out: Any) -> None:
        seen.append(float((out if isinstance(out, torch.Tensor) else out[0]).double().var(correction=0)))

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return seen


def test_a_tower_that_text_does_not_reach_is_named() -> None:
    model = llava()
    ids = torch.arange(3, 15)[None]
    profile = sp.measure(model, {"input_ids": ids, "labels": ids})
    said = next(note for note in profile.notes if note.startswith("measured: "))
    assert said.startswith("measured: model.language_model.layers; not measured: model.vision_tower.encoder.layers (")
    hooked = by_hooks(model.model.language_model.layers, lambda: model(input_ids=ids))
    np.testing.assert_allclose(profile.forward["stream_out"].variance[1::2], hooked, rtol=1e-6)
    assert profile.gradient is not None and profile.architecture.kind == "decoder"
    found = sp.anatomy(model)
    assert found.streams.not_run == ("model.vision_tower.encoder.layers",) and "not run  " in str(found)
    image = {"input_ids": torch.tensor([[5, *[80] * 4, 7]]), "pixel_values": torch.randn(1, 3, 8, 8)}
    assert sp.anatomy(model, image).streams.not_run == ()


@pytest.mark.parametrize("part", ["text_model", pytest.param("vision_model", marks=pytest.mark.slow)])
def test_one_of_two_towers_is_taken(command: Command, refused: Any, tmp_path: Path, part: str) -> None:
    clip().save_pretrained(tmp_path)
    if part == "text_model":
        error = refused("measure", str(tmp_path))
        assert "--inside PATH" in error and "text_model or vision_model" in error
    (tmp_path / "words").write_text(" ".join(f"word{i * i % 50}" for i in range(400)))
    text = ["--data", str(tmp_path / "words")] if part == "text_model" else []
    status, out, err = command("measure", str(tmp_path), "--inside", part, "--json", "-", *text)
    assert status == 0, err
    profile = sp.Profile.from_json(json.loads(out))
    assert len(profile.forward["stream_out"].variance) == {"text_model": 4, "vision_model": 6}[part]
    status, out, err = command("compare", str(tmp_path), "--inside", part, "--seeds", "1", "--json", "-", *text)
    assert status == 0, err
    both = [sp.Profile.from_json(json.loads(out)[side]) for side in ("predicted", "measured")]
    assert both[1].n_sublayers == profile.n_sublayers
    ratio = both[0].forward["stream_out"].log_variance - both[1].forward["stream_out"].log_variance
    assert abs(ratio).max() < 0.3


def test_both_towers_at_once_say_which() -> None:
    model = clip()
    given = {"input_ids": torch.arange(3, 15)[None], "pixel_values": torch.randn(1, 3, 8, 8)}
    profile = sp.measure(model, given, backward=False)
    assert any("measured: text_model.encoder.layers; not measured: vision_model" in note for note in profile.notes)
    alone = sp.measure(model.vision_model, {"pixel_values": given["pixel_values"]}, backward=False)
    hooked = by_hooks(model.vision_model.encoder.layers, lambda: model(**given))
    np.testing.assert_allclose(alone.forward["stream_out"].variance[1::2], hooked, rtol=1e-6)


def test_a_stream_that_ends_in_tokens_is_refused() -> None:
    """SqueezeBERT's convolutions take (batch, features, tokens): its moments over the last dimension say nothing."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    groups = dict.fromkeys(("q", "k", "v", "post_attention", "intermediate", "output"), 1)
    config = SqueezeBertConfig(
        vocab_size=99, embedding_size=32, **sizes, **{f"{name}_groups": n for name, n in groups.items()}
    )
    with pytest.raises(sp.InputError, match=r"writes 32 features.*its tokens come last"):
        sp.measure(SqueezeBertModel(config).eval(), {"input_ids": torch.arange(24).view(2, 12)}, backward=False)


class Turning(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.map(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ChannelsFirst(torch.nn.Module):
    """ConvNeXt's blocks: the stream is (batch, features, height, width), and linear maps write it turned."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 4, 4)
        self.blocks = torch.nn.ModuleList(Turning() for _ in range(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return x


def test_linear_maps_that_write_a_stream_turned_are_refused() -> None:
    with pytest.raises(sp.InputError, match=r"map writes 16 features.* ends in 8: its tokens come last"):
        sp.measure(ChannelsFirst(), torch.randn(2, 3, 32, 32), backward=False)


class Mixing(torch.nn.Module):
    """A linear map over the tokens, between two turns, and one over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.features = torch.nn.Linear(8, 8), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(x.mT).mT
        return x + self.features(x)


def test_a_mixer_is_measured_by_its_features() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*(Mixing() for _ in range(2))), torch.randn(3, 8, 16)
    profile = sp.measure(model, x, backward=False)
    hooked = by_hooks(list(model), lambda: model(x))
    np.testing.assert_allclose(profile.forward["stream_out"].variance[1::2], hooked, rtol=1e-6)
