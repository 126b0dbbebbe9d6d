"""A small random model of any config type of the installed transformers, and inputs that it takes.

Nothing is downloaded, and no code from a hub runs.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.small_configs import BATCH, LENGTH, VOCABULARY, WIDTH

LARGEST = 16_000_000  # parameters


def model_classes(config_type: str, config: Any) -> list[Any]:
    """Classes to try, in order: by the auto mappings, else what the type's own module has."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    heads = (
        "SEQ_TO_SEQ_CAUSAL_LM",
        "SPEECH_SEQ_2_SEQ",
        "MASKED_LM",
        "CAUSAL_LM",
        "IMAGE_TEXT_TO_TEXT",
        "IMAGE_CLASSIFICATION",
        "CTC",
        "AUDIO_CLASSIFICATION",
        "VIDEO_CLASSIFICATION",
        "MULTIMODAL_LM",
    )
    mappings = [getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in heads] + [auto.MODEL_MAPPING_NAMES]
    names: list[str] = []
    for mapping in mappings:
        held = mapping.get(config_type, ())
        names += [held] if isinstance(held, str) else list(held)
    classes = [getattr(transformers, name) for name in dict.fromkeys(names) if hasattr(transformers, name)]
    return classes or list(_by_module(config))


def _by_module(config: Any) -> Iterator[Any]:
    """Models of the modelling module beside a configuration's that are made from it."""
    from transformers import PreTrainedModel

    name = type(config).__module__.replace("configuration_", "modeling_")
    try:
        module = importlib.import_module(name)
    except ImportError:
        return
    for _, cls in sorted(vars(module).items()):
        made = inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.__module__ == name
        if made and cls.config_class is type(config) and "forward" in vars(cls):
            yield cls


class TooLarge(ValueError):
    """The rules left the model too large."""


def small_model(cls: Any, config: Any, seed: int = 0) -> nn.Module:
    """The model with random weights, in evaluation mode; its size is counted before anything is allocated."""
    with torch.device("meta"):
        try:
            size = sum(p.numel() for p in cls(config).parameters())
        except (NotImplementedError, RuntimeError):
            size = 0  # the constructor computes with numbers; the memory limit guards it
    if size > LARGEST:
        raise TooLarge(f"{cls.__name__} has {size / 1e6:.0f}M parameters with the small configuration")
    torch.manual_seed(seed)
    model = cls(config).eval()
    for parameter in model.parameters():  # what transformers leaves at 0 (gates, last maps) would hide a branch
        if parameter.is_floating_point() and parameter.ndim and not parameter.detach().any():
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def candidate_inputs(model: nn.Module, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Inputs to try, in order of how much they are: tokens alone, pixels, sound, then pairs of these."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    known = set(inspect.signature(model.forward).parameters)
    text = _part(config, "text_config", "decoder", "language_config") or config
    top = int(getattr(text, "vocab_size", None) or VOCABULARY)
    ids = torch.randint(3, max(5, min(top, VOCABULARY - 20)), (BATCH, LENGTH), generator=generator)
    vision = _part(config, "vision_config", "encoder", "backbone_config") or config
    channels = int(_number(vision, "num_channels", "in_channels", "in_chans", "channels", default=3))
    high, wide = _pair(_number(vision, "image_size", "img_size", default=32))
    images = torch.randn(BATCH, channels, high, wide, generator=generator)
    sound = torch.randn(BATCH, 4000, generator=generator)
    audio = _part(config, "audio_config", "encoder_config") or config
    mel = int(
        _number(audio, "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "input_dim", default=16)
    )
    frames = 2 * int(_number(audio, "max_source_positions", default=32))
    decoder = {"decoder_input_ids": ids} if "decoder_input_ids" in known else {}
    if "input_ids" in known:
        yield {"input_ids": ids, **decoder}
        if "bbox" in known:
            yield {"input_ids": ids, "bbox": torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)}
    if "pixel_values" in known:
        for pixels in (
            images,
            torch.randn(BATCH, channels, 64, 64, generator=generator),
            torch.randn(
                BATCH, int(_number(vision, "num_frames", default=2)), channels, high, wide, generator=generator
            ),
        ):
            yield {"pixel_values": pixels, **decoder}
            if "input_ids" in known:
                yield {"pixel_values": pixels, "input_ids": ids}
    if "pixel_values_videos" in known:
        frames_of = int(_number(vision, "frames_per_clip", "num_frames", default=2))
        yield {"pixel_values_videos": torch.randn(BATCH, frames_of, channels, high, wide, generator=generator)}
    for name in ("input_values", "input_features", "audio_values"):
        if name in known:
            for values in (
                torch.randn(BATCH, mel, frames, generator=generator),
                torch.randn(BATCH, frames, mel, generator=generator),
                sound,
                sound[:, None],
                torch.randn(BATCH, 1, frames, mel, generator=generator),
            ):
                mask = {"input_features_mask": torch.ones(values.shape[:2], dtype=torch.bool)}
                yield {name: values, **decoder, **(mask if "input_features_mask" in known else {})}
    if "inputs" in known:
        yield {"inputs": ids}
        yield {"inputs": images}
    if "past_values" in known:
        yield from _series(config, known, generator)
    grid = next((name for name in ("grid_thw", "image_grid_thw") if name in known), None)
    if grid and "input_ids" not in known:
        size = (
            channels
            * int(_number(config, "temporal_patch_size", default=1))
            * int(_number(config, "patch_size", default=8)) ** 2
        )
        patches = torch.randn(32, size, generator=generator)
        for name in ("hidden_states", "pixel_values"):
            if name in known:
                yield {name: patches, grid: torch.tensor([[1, 4, 4], [1, 4, 4]])}
    if "hidden_states" in known or "inputs_embeds" in known:
        name = "inputs_embeds" if "inputs_embeds" in known else "hidden_states"
        states = torch.randn(
            BATCH, LENGTH, int(_number(config, "hidden_size", "d_model", default=WIDTH)), generator=generator
        )
        yield {name: states}


def _series(config: Any, known: set[str], generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Past values of a time series."""
    length = int(_number(config, "context_length", default=32))
    lags = max(getattr(config, "lags_sequence", None) or [0])
    values = torch.randn(BATCH, length + lags, generator=generator)
    extra = {
        "past_time_features": torch.randn(
            BATCH, length + lags, int(_number(config, "num_time_features", default=0)), generator=generator
        ),
        "past_observed_mask": torch.ones(BATCH, length + lags),
    }
    yield {
        "past_values": torch.randn(
            BATCH, length, int(_number(config, "num_input_channels", default=1)), generator=generator
        )
    }
    yield {"past_values": values, **{k: v for k, v in extra.items() if k in known}}


def _part(config: Any, *names: str) -> Any:
    """The first nested configuration of these names."""
    return next((held for name in names if hasattr(held := getattr(config, name, None), "to_dict")), None)


def _number(config: Any, *names: str, default: int) -> Any:
    """The first value of these names that is set."""
    return next((held for name in names if (held := getattr(config, name, None)) is not None), default)


def _pair(size: Any) -> tuple[int, int]:
    """Height and width."""
    return (int(size[0]), int(size[1])) if isinstance(size, (list, tuple)) else (int(size), int(size))
