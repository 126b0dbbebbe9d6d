"""PyTorch's own layers, and models of series, decisions, sets, sounds and packed tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.code_bases.parts import (
    HEADS,
    LAYERS,
    LENGTH,
    LM,
    WORDS,
    Attention,
    Block,
    Case,
    D,
    FeedForward,
    ids,
    in_list,
    normal,
)


class TorchEncoder(nn.Module):
    """An embedding, nn.TransformerEncoder, a head; ids are (batch, tokens) outside, whatever the layers want."""

    def __init__(self, batch_first: bool, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, HEADS, 4 * D, 0.0, batch_first=batch_first, norm_first=norm_first)
        self.embed, self.encoder = (
            nn.Embedding(WORDS, D),
            nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False),
        )
        for one in self.encoder.layers:
            one.apply(
                lambda m: (
                    m._reset_parameters()
                    if isinstance(m, nn.MultiheadAttention)
                    else m.reset_parameters()
                    if isinstance(m, nn.Linear)
                    else None
                )
            )
        self.head, self.batch_first = nn.Linear(D, WORDS), batch_first

    def forward(self, src: Tensor) -> Tensor:
        x = self.encoder(self.embed(src if self.batch_first else src.T))
        return self.head(x if self.batch_first else x.transpose(0, 1))


class TorchBoth(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embed, self.head, self.batch_first = nn.Embedding(WORDS, D), nn.Linear(D, WORDS), batch_first
        self.transformer = nn.Transformer(D, HEADS, 2, LAYERS, 4 * D, 0.0, batch_first=batch_first, norm_first=True)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        rows = [self.embed(x if self.batch_first else x.T) for x in (src, tgt)]
        return self.head(self.transformer(*rows))


class TokensFirst(Attention):
    """Reads and gives (tokens, batch, features)."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        tokens, n, d = x.shape
        q, k, v = (m(x).view(tokens, n * HEADS, d // HEADS).transpose(0, 1) for m in (self.wq, self.wk, self.wv))
        y = torch.bmm((q @ k.mT * (d // HEADS) ** -0.5).softmax(-1), v)
        return self.out(y.transpose(0, 1).reshape(tokens, n, d))


class FairseqLayer(Block):
    """fairseq: (tokens, batch, features), norms after the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = TokensFirst(fused=False)

    def forward(self, x: Tensor, encoder_padding_mask: Any = None) -> Tensor:
        residual = x
        x = self.norm1(residual + self.attn(x))
        return self.norm2(x + self.mlp(x))


class Fairseq(LM):
    def __init__(self) -> None:
        super().__init__(FairseqLayer, final=nn.Identity())

    def forward(self, src_tokens: Tensor, src_lengths: Tensor) -> Any:
        x = self.embedded(src_tokens).transpose(0, 1)
        for layer in self.blocks:
            x = layer(x, None)
        return {"encoder_out": [x], "logits": self.head(x).transpose(0, 1)}


class PackedBlock(Block):
    """ESM C, flash-attention code: sequences stand one after the other in (tokens, features)."""

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        y = self.norm1(x).split(lengths)
        x = x + torch.cat([self.attn(one[None])[0] for one in y])
        return x + self.mlp(self.norm2(x))


class Packed(LM):
    def __init__(self) -> None:
        super().__init__(lambda: PackedBlock(causal=False))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embedded(idx).flatten(0, 1)
        for block in self.blocks:
            x = block(x, [idx.shape[1]] * idx.shape[0])
        return self.head(self.final(x))


class PatchTST(nn.Module):
    """Every channel of a series is a sequence of patches of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.W_P, self.W_pos = nn.Linear(8, D), nn.Parameter(torch.randn(12, D) * 0.02)
        self.layers, self.head = nn.ModuleList(Block(causal=False) for _ in range(LAYERS)), nn.Linear(12 * D, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)
        n, channels = x.shape[:2]
        x = (self.W_P(x.unfold(-1, 8, 8)) + self.W_pos).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.view(n, channels, -1))


class Decisions(nn.Module):
    """Returns, states and actions by turns; three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_t, self.embed_r, self.embed_s, self.embed_a = (
            nn.Embedding(64, D),
            nn.Linear(1, D),
            nn.Linear(11, D),
            nn.Linear(3, D),
        )
        self.embed_ln, self.blocks = nn.LayerNorm(D), nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.predict_s, self.predict_a = nn.LayerNorm(D), nn.Linear(D, 11), nn.Linear(D, 3)

    def forward(self, states: Tensor, actions: Tensor, rewards: Any, returns_to_go: Tensor, timesteps: Tensor) -> Any:
        t = self.embed_t(timesteps)
        turns = (self.embed_r(returns_to_go) + t, self.embed_s(states) + t, self.embed_a(actions) + t)
        x = self.embed_ln(torch.stack(turns, 2).flatten(1, 2))
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x).unflatten(1, (-1, 3))
        return self.predict_s(x[:, :, 2]), self.predict_a(x[:, :, 1]), None


class SetBlock(nn.Module):
    """Set transformer: queries are added to what they attend to, then a rectified map; no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.fc_o = Attention(causal=False, fused=False), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + F.relu(self.fc_o(x))


class Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.blocks, self.dec = (
            nn.Linear(2, D),
            nn.Sequential(*(SetBlock() for _ in range(LAYERS))),
            nn.Linear(D, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.dec(self.blocks(self.enc(x)).mean(1))


class PerceiverBlock(Block):
    def __init__(self) -> None:
        super().__init__(causal=False, fused=False)
        self.norm3, self.cross = nn.LayerNorm(D), Attention(causal=False, fused=False)

    def forward(self, x: Tensor, data: Tensor | None = None) -> Tensor:
        x = x + self.cross(self.norm3(x), data)
        return super().forward(x)


class Perceiver(nn.Module):
    """Latents read the data in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.embed = nn.Parameter(torch.randn(6, D)), nn.Linear(5, D)
        self.blocks, self.head = nn.ModuleList(PerceiverBlock() for _ in range(LAYERS)), nn.Linear(D, 10)

    def forward(self, data: Tensor) -> Tensor:
        data = self.embed(data)
        x = self.latents.expand(len(data), -1, -1)
        for block in self.blocks:
            x = block(x, data)
        return self.head(x.mean(1))


class Conformer(Block):
    """Half a feed-forward, attention, a convolution, half a feed-forward, a norm."""

    def __init__(self) -> None:
        super().__init__(causal=False)
        self.norm3, self.norm4, self.norm5, self.mlp2 = (
            nn.LayerNorm(D),
            nn.LayerNorm(D),
            nn.LayerNorm(D),
            FeedForward(F.silu),
        )
        self.pointwise, self.depthwise, self.last = (
            nn.Linear(D, 2 * D),
            nn.Conv1d(D, D, 3, padding=1, groups=D),
            nn.Linear(D, D),
        )

    def convolved(self, x: Tensor) -> Tensor:
        return self.last(F.silu(self.depthwise(F.glu(self.pointwise(x), -1).mT).mT))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.mlp(self.norm2(x))
        x = x + self.attn(self.norm1(x))
        x = x + self.convolved(self.norm3(x))
        return self.norm5(x + 0.5 * self.mlp2(self.norm4(x)))


class Frames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Linear(20, D),
            nn.ModuleList(Conformer() for _ in range(LAYERS)),
            nn.Linear(D, 30),
        )

    def forward(self, frames: Tensor, lengths: Tensor) -> Any:
        x = self.embed(frames)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).log_softmax(-1), lengths


def _decisions() -> dict[str, Any]:
    return {
        "states": normal(3, 5, 11),
        "actions": normal(3, 5, 3),
        "rewards": None,
        "returns_to_go": normal(3, 5, 1),
        "timesteps": torch.arange(5).repeat(3, 1),
    }


def _torch_encoder(batch_first: bool, norm_first: bool) -> Case:
    layers = in_list("encoder.layers")
    return Case(lambda: TorchEncoder(batch_first, norm_first), layers=layers, tokens_first=not batch_first)


def _torch_both(batch_first: bool) -> Case:
    layers = in_list("transformer.decoder.layers")
    return Case(lambda: TorchBoth(batch_first), lambda: (ids(), ids().flip(1)), layers, tokens_first=not batch_first)


_BOTH = (True, False)

CASES = {
    **{f"torch encoder, batch_first={b}, norm_first={n}": _torch_encoder(b, n) for b in _BOTH for n in _BOTH},
    **{f"torch.nn.Transformer, batch_first={b}": _torch_both(b) for b in _BOTH},
    "fairseq": Case(
        Fairseq,
        lambda: {"src_tokens": ids(), "src_lengths": torch.full((3,), LENGTH)},
        tokens_first=True,
        loss=lambda out: (out["logits"] * normal(3, LENGTH, WORDS)).sum(),
    ),
    "packed tokens (ESM C)": Case(Packed, stream=lambda out: out.unflatten(0, (3, LENGTH))),
    "PatchTST": Case(PatchTST, lambda: normal(3, 2, 96), in_list("layers")),
    "decision transformer": Case(Decisions, _decisions, loss=lambda out: (out[1] * normal(3, 5, 3)).sum()),
    "set transformer": Case(Sets, lambda: normal(3, 9, 2)),
    "Perceiver": Case(Perceiver, lambda: normal(3, 20, 5)),
    "Conformer": Case(Frames, lambda: (normal(3, 15, 20), torch.full((3,), 15)), in_list("layers")),
}
