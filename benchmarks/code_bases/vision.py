"""Vision transformers as timm, DINOv2, DiT, U-ViT, Swin and the MLP-Mixer are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.code_bases.parts import LAYERS, Attention, Block, Case, D, FeedForward, normal
from benchmarks.code_bases.variations import LayerScaleModule


class DropPath(nn.Module):
    """Stochastic depth by sample."""

    def forward(self, x: Tensor) -> Tensor:
        keep = (torch.rand(len(x), 1, 1) > 0.1).to(x) / 0.9
        return x * keep if self.training else x


class DropPathBlock(Block):
    def __init__(self) -> None:
        super().__init__(causal=False)
        self.drop_path1, self.drop_path2, self.ls1, self.ls2 = DropPath(), DropPath(), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class ViT(nn.Module):
    """timm's: patches by a convolution, a class token, positions as a parameter."""

    def __init__(self, block: Callable[[], nn.Module] = DropPathBlock, how: str = "classes") -> None:
        super().__init__()
        self.patch_embed, self.how = nn.Conv2d(3, D, 8, 8), how
        self.cls_token, self.pos_embed = (
            nn.Parameter(torch.randn(1, 1, D) * 0.02),
            nn.Parameter(torch.randn(1, 17, D) * 0.02),
        )
        self.blocks = nn.Sequential(*(block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.patch_embed(x).flatten(2).mT
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.pos_embed
        x = self.norm(self.blocks(x))
        if self.how == "classes":
            return self.head(x[:, 0])
        return {"x_norm_clstoken": x[:, 0], "x_norm_patchtokens": x[:, 1:], "masks": None}


class DiTBlock(nn.Module):
    """Shift, scale and gate of both branches from the timestep."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(D, elementwise_affine=False) for _ in range(2))
        self.attn, self.mlp = Attention(causal=False), FeedForward()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        s1, c1, g1, s2, c2, g2 = self.adaLN_modulation(c)[:, None].chunk(6, -1)
        x = x + g1 * self.attn(self.norm1(x) * (1 + c1) + s1)
        return x + g2 * self.mlp(self.norm2(x) * (1 + c2) + s2)


class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x_embedder, self.t_embedder, self.y_embedder = nn.Conv2d(4, D, 2, 2), nn.Linear(1, D), nn.Embedding(11, D)
        self.blocks, self.final_layer = nn.ModuleList(DiTBlock() for _ in range(LAYERS)), nn.Linear(D, 16)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        c = self.t_embedder(t[:, None]) + self.y_embedder(y)
        x = self.x_embedder(x).flatten(2).mT
        for block in self.blocks:
            x = block(x, c)
        return self.final_layer(x)


class UViT(ViT):
    """Long skips: two streams side by side, through a map."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(causal=False))
        self.skips = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(LAYERS // 2))

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.patch_embed(x).flatten(2).mT + self.pos_embed[:, 1:], []
        for i, block in enumerate(self.blocks):
            x = self.skips[i - LAYERS // 2](torch.cat((x, kept.pop()), -1)) if i >= LAYERS // 2 else x
            x = block(x)
            if i < LAYERS // 2:
                kept.append(x)
        return self.head(self.norm(x))


class SwinBlock(Block):
    """(batch, height, width, features), attention in windows of 2 x 2, every second block shifted."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__(causal=False)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, d = x.shape
        y = self.norm1(x).roll((-self.shift, -self.shift), (1, 2))
        y = y.view(b, h // 2, 2, w // 2, 2, d).transpose(2, 3).reshape(-1, 4, d)
        y = self.attn(y).view(b, h // 2, w // 2, 2, 2, d).transpose(2, 3).reshape(b, h, w, d)
        x = x + y.roll((self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


class Swin(ViT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(SwinBlock(i % 2) for i in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patch_embed(x).permute(0, 2, 3, 1))
        return self.head(self.norm(x).mean((1, 2)))


class Mixer(Block):
    """A map over tokens in the place of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x).mT).mT
        return x + self.mlp(self.norm2(x))


class MixerModel(ViT):
    def __init__(self) -> None:
        super().__init__(Mixer)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patch_embed(x).flatten(2).mT)).mean(1))


def images() -> Tensor:
    """Three images."""
    return normal(3, 3, 32, 32)


CASES = {
    "timm ViT, stochastic depth": Case(ViT, images),
    "DINOv2": Case(
        lambda: ViT(lambda: LayerScaleModule(causal=False), "features"),
        images,
        loss=lambda out: (out["x_norm_patchtokens"] * normal(3, 16, D)).sum(),
    ),
    "DiT": Case(DiT, lambda: (normal(3, 4, 8, 8), torch.tensor([0.1, 0.5, 0.9]), torch.tensor([1, 4, 10]))),
    "U-ViT": Case(UViT, images),
    "Swin": Case(Swin, images, stream=lambda out: out.flatten(1, 2)),
    "MLP-Mixer": Case(MixerModel, images),
}
