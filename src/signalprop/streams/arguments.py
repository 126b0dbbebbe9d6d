"""A tiny input for a model: what it was called with last, or a random one."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.streams.calls import UnknownCall, remembered
from signalprop.streams.live_model import device_of

TOKENS = 7  # a number that few dimensions of a model have


def tiny_arguments(model: nn.Module) -> dict[str, Any]:
    """Arguments of a model's forward: what it was called with last, else a few random tokens, an image or frames.

    Raises:
        UnknownCall: the arguments are unknown, and random ones do not fit.
    """
    if (said := remembered(model)) is not None:
        return {k: v.to(device_of(model)) if isinstance(v, Tensor) else v for k, v in said.items()}
    config = getattr(model, "config", None)
    names = list(signature(model.forward).parameters)
    found = _of_config(model, config, names) if hasattr(config, "to_dict") else _of_modules(model, names)
    if not found:
        raise UnknownCall(f"what {type(model).__name__} needs could not be inferred from it")
    device = device_of(model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {
        name: value.to(device, dtype if value.is_floating_point() else None) if isinstance(value, Tensor) else value
        for name, value in found.items()
    }


def text_config(model: nn.Module) -> Any:
    """The configuration of a model's part that reads text; None if it has none."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _ids(size: int, special: set[int]) -> Tensor:
    """Random ids that are not special tokens."""
    free = [
        i for i in torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()[:200] if i not in special
    ]
    return torch.tensor([(free * TOKENS)[:TOKENS]])


def _of_config(model: nn.Module, config: Any, names: list[str]) -> dict[str, Any]:
    plain = config.to_dict()
    text = text_config(model)
    vision = getattr(config, "vision_config", None) or config
    special = {
        v
        for c in (plain, text.to_dict())
        for k, v in c.items()
        if k.endswith(("token_id", "token_index")) and isinstance(v, int)
    }
    special |= {v % _rows(model, text) for v in special if v < 0}
    main = str(getattr(model, "main_input_name", "input_ids"))
    out: dict[str, Any] = {}
    if main in ("pixel_values", "images") or (
        "pixel_values" in names and "logit_scale" in dict(model.named_parameters())
    ):
        size = _first(vision, "image_size", "img_size") or 224
        height, width = (size if isinstance(size, (tuple, list)) else (size, size))[:2]
        channels = _first(vision, "num_channels", "in_channels", "in_chans") or 3
        shape = [1, channels, height, width]
        frames = _first(vision, "num_frames")
        out["pixel_values" if main != "images" else main] = _random(*([1, frames] if frames else [1]), *shape[1:])
    if main == "input_features":
        frames = 2 * (_first(config, "max_source_positions") or 50)
        bins = _first(config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim") or 80
        first = "Conv1d" in {type(m).__name__ for m in model.modules()} and _first(config, "num_mel_bins")
        out[main] = _random(1, bins, frames) if first else _random(1, min(frames, 64), bins)
    if main in ("input_values", "input_audio"):
        out[main] = _random(1, 4000)
    if "input_ids" in names and (
        main == "input_ids" or ("pixel_values" in out and "logit_scale" in dict(model.named_parameters()))
    ):
        out["input_ids"] = _ids(_rows(model, text), special)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        out["decoder_input_ids"] = _ids(_rows(model, text), special)
    if out and "use_cache" in names:
        out["use_cache"] = False
    return out


def _rows(model: nn.Module, text: Any) -> int:
    try:
        rows = getattr(model.get_input_embeddings(), "num_embeddings", None)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        rows = None
    return int(rows or getattr(text, "vocab_size", None) or 100)


def _first(config: Any, *names: str) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def _of_modules(model: nn.Module, names: list[str]) -> dict[str, Any]:
    """By the first module with weights: a table of tokens, a convolution over images, or a linear map.

    An encoder-decoder needs two rows of ids; an argument `targets` is given too, as nanoGPT has logits of all positions
    only then.
    """
    if not names:
        return {}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            ids = _ids(module.num_embeddings, {module.padding_idx or 0})
            needed = [
                n
                for n, p in signature(model.forward).parameters.items()
                if p.default is p.empty and p.kind != p.VAR_KEYWORD
            ]
            return {name: ids.roll(-names.index(name), 1) for name in names if name in (names[0], *needed, "targets")}
        if isinstance(module, nn.Conv2d):
            size = getattr(getattr(model, "patch_embed", None), "img_size", None) or (64, 64)
            return {names[0]: _random(1, module.in_channels, *size)}
        if isinstance(module, nn.Linear):
            return {names[0]: _random(1, TOKENS, module.in_features)}
    return {}
