"""Small models that are not from transformers: PyTorch's own, GPTs of one file, x-transformers, diffusers, timm."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.single_file_gpts import GPT, FunctionalBlock, NanoBlock, ParallelBlock

WIDTH, HEADS, LAYERS, BATCH, LENGTH, VOCABULARY = 64, 4, 3, 2, 12, 99
Made = tuple[nn.Module, dict[str, Any]]


def _ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH))


def _stream(*shape: int) -> torch.Tensor:
    return torch.randn(BATCH, *(shape or (LENGTH, WIDTH)))


def _torch_encoder(**options: Any) -> Made:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False), {"src": _stream()}


def _torch_decoder(**options: Any) -> Made:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, **options)
    return nn.TransformerDecoder(layer, LAYERS), {"tgt": _stream(), "memory": _stream(9, WIDTH)}


def _torch_both() -> Made:
    model = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    return model, {"src": _stream(9, WIDTH), "tgt": _stream()}


def _gpt(block: type[nn.Module]) -> Made:
    return GPT(block), {"idx": _ids()}


def _x_transformers(**options: Any) -> Made:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=WIDTH, depth=LAYERS, heads=HEADS, attn_dim_head=WIDTH // HEADS, **options)
    return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=32, attn_layers=layers), {"x": _ids()}


def _diffusers(name: str, inputs: dict[str, Any], **options: Any) -> Made:
    """A model of diffusers on latents; of its other inputs a tuple is the shape of a stream."""
    import diffusers

    heads = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH // HEADS, "in_channels": 4}
    model = getattr(diffusers, name)(**heads | options)
    drawn = {"hidden_states": LATENTS} | inputs
    return model, {
        key: _stream(*value) if isinstance(value, tuple) else value() if callable(value) else value
        for key, value in drawn.items()
    }


LATENTS, TEXT, TIMES = (4, 8, 8), {"encoder_hidden_states": ()}, {"timestep": torch.tensor([3, 7])}
RANDOM_TIMES = {"timestep": lambda: torch.rand(BATCH)}
DEEP, PATCHED, PIXELS = {"num_layers": LAYERS}, {"patch_size": 2}, {"sample_size": 8}
CROSS = {"cross_attention_dim": WIDTH, "caption_channels": WIDTH}
JOINT = {"joint_attention_dim": WIDTH}
MIXED = {"caption_projection_dim": WIDTH, "out_channels": 4}
OF_DIFFUSERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "DiT": (
        "DiTTransformer2DModel",
        {**TIMES, "class_labels": torch.tensor([1, 2])},
        {**DEEP, **PATCHED, **PIXELS, "norm_num_groups": 4},
    ),
    "PixArt": (
        "PixArtTransformer2DModel",
        {**TEXT, **TIMES, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
        {**DEEP, **PIXELS, **CROSS, "norm_num_groups": 4, "use_additional_conditions": False},
    ),
    "SD3 (MMDiT)": (
        "SD3Transformer2DModel",
        {**TEXT, "pooled_projections": (WIDTH,), **TIMES},
        {**DEEP, **PATCHED, **PIXELS, **JOINT, **MIXED, "pooled_projection_dim": WIDTH, "pos_embed_max_size": 8},
    ),
    "Flux": (
        "FluxTransformer2DModel",
        {"hidden_states": (16, 4), **TEXT, "pooled_projections": (WIDTH,), **RANDOM_TIMES,
         "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(LENGTH, 3)},
        {**DEEP, **JOINT, "num_single_layers": LAYERS + 1, "patch_size": 1,
         "pooled_projection_dim": WIDTH, "axes_dims_rope": (4, 4, 8)},
    ),
    "AuraFlow": (
        "AuraFlowTransformer2DModel",
        {**TEXT, **RANDOM_TIMES},
        {**PATCHED, **PIXELS, **JOINT, **MIXED, "num_mmdit_layers": LAYERS, "num_single_dit_layers": LAYERS + 1,
         "pos_embed_max_size": 64},
    ),
    "Sana": (
        "SanaTransformer2DModel",
        {**TEXT, **TIMES},
        {**DEEP, **PIXELS, **CROSS, "out_channels": 4, "num_cross_attention_heads": HEADS,
         "cross_attention_head_dim": WIDTH // HEADS},
    ),
    "CogVideoX": (
        "CogVideoXTransformer3DModel",
        {"hidden_states": (2, *LATENTS), **TEXT, **TIMES},
        {**DEEP, "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": WIDTH, "sample_width": 8,
         "sample_height": 8, "sample_frames": 5, "max_text_seq_length": LENGTH},
    ),
    "Wan": (
        "WanTransformer3DModel",
        {"hidden_states": (4, 2, 8, 8), **TEXT, **TIMES},
        {**DEEP, "out_channels": 4, "text_dim": WIDTH, "freq_dim": 16, "ffn_dim": 2 * WIDTH, "rope_max_seq_len": 32},
    ),
}  # fmt: skip


def declare_operators() -> None:
    """Names that torchvision looks for on import; one built for another PyTorch lacks them, and no model here calls."""
    from torch.library import define

    with suppress(RuntimeError):
        for name in ("nms", "qnms"):
            define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float most) -> Tensor")


def _timm(name: str, side: int = 32) -> Made:
    import timm

    sizes = {"img_size": side, "patch_size": side // 4, "embed_dim": WIDTH, "depth": LAYERS, "num_heads": HEADS}
    model = timm.create_model(name, pretrained=False, num_classes=10, **sizes)
    return model, {"x": _stream(3, side, side)}


OTHERS: dict[str, tuple[str, Callable[[], Made]]] = {
    "torch: TransformerEncoder, post-norm": ("", _torch_encoder),
    "torch: TransformerEncoder, pre-norm": ("", lambda: _torch_encoder(norm_first=True)),
    "torch: TransformerDecoder, post-norm": ("", _torch_decoder),
    "torch: TransformerDecoder, pre-norm": ("", lambda: _torch_decoder(norm_first=True)),
    "torch: Transformer": ("", _torch_both),
    "one file: nanoGPT": ("", lambda: _gpt(NanoBlock)),
    "one file: functional norms, additions in place": ("", lambda: _gpt(FunctionalBlock)),
    "one file: parallel": ("", lambda: _gpt(ParallelBlock)),
    "x-transformers: pre-norm": ("x-transformers", _x_transformers),
    "x-transformers: post-norm": ("x-transformers", lambda: _x_transformers(pre_norm=False)),
    "x-transformers: sandwich": ("x-transformers", lambda: _x_transformers(sandwich_norm=True)),
    "x-transformers: RMSNorm, SwiGLU, rotary": (
        "x-transformers",
        lambda: _x_transformers(use_rmsnorm=True, ff_glu=True, ff_swish=True, rotary_pos_emb=True),
    ),
    "x-transformers: scaled residuals": ("x-transformers", lambda: _x_transformers(scale_residual=True)),
    "x-transformers: gated residuals": ("x-transformers", lambda: _x_transformers(gate_residual=True)),
    **{
        f"diffusers: {name}": ("diffusers", partial(_diffusers, cls, inputs, **options))
        for name, (cls, inputs, options) in OF_DIFFUSERS.items()
    },
    "timm: ViT": ("timm", lambda: _timm("vit_tiny_patch16_224")),
    "timm: DeiT III": ("timm", lambda: _timm("deit3_small_patch16_224")),
    "timm: EVA-02": ("timm", lambda: _timm("eva02_tiny_patch14_224", 28)),
    "timm: BEiT": ("timm", lambda: _timm("beit_base_patch16_224")),
    "timm: CaiT": ("timm", lambda: _timm("cait_xxs24_224")),
}


def other_model(name: str) -> Made:
    """A model and inputs that it takes.

    Raises:
        LookupError: its package is not installed.
    """
    package, make = OTHERS[name]
    torch.manual_seed(0)
    try:
        model, inputs = make()
    except ImportError as error:
        raise LookupError(f"it needs pip install {package}") from error
    for parameter in model.parameters():  # gates that start at 0 would hide a branch
        if parameter.ndim and not parameter.detach().any():
            nn.init.normal_(parameter, std=0.02)
    return model.eval(), inputs
