"""Models that read no words, or not in rows: PyTorch's own layers, vision, series, sets, packed tokens, wrappers, adapters."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.code_bases.language import NanoGPT, cross_entropy, in_dictionary
from benchmarks.code_bases.parts import (
    D, HEADS, LAYERS, LENGTH, WORDS, Attention, Block, Case, FeedForward, LM, ids, normal,
)  # fmt: skip
from benchmarks.code_bases.variations import LayerScaleModule

# --- PyTorch's own ----------------------------------------------------------------------------------------------------


class TorchEncoder(nn.Module):
    """An embedding, nn.TransformerEncoder, a head; ids are (batch, tokens) outside, whatever the layers want."""

    def __init__(self, batch_first: bool, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, HEADS, 4 * D, 0.0, batch_first=batch_first, norm_first=norm_first)
        self.embed, self.encoder = nn.Embedding(WORDS, D), nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        for one in self.encoder.layers:
            one.apply(lambda m: m._reset_parameters() if isinstance(m, nn.MultiheadAttention) else m.reset_parameters() if isinstance(m, nn.Linear) else None)
        self.head, self.batch_first = nn.Linear(D, WORDS), batch_first

    def forward(self, src: Tensor) -> Tensor:
        x = self.encoder(self.embed(src if self.batch_first else src.T))
        return self.head(x if self.batch_first else x.transpose(0, 1))  # type: ignore[no-any-return]


class TorchBoth(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embed, self.head, self.batch_first = nn.Embedding(WORDS, D), nn.Linear(D, WORDS), batch_first
        self.transformer = nn.Transformer(D, HEADS, 2, LAYERS, 4 * D, 0.0, batch_first=batch_first, norm_first=True)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        rows = [self.embed(x if self.batch_first else x.T) for x in (src, tgt)]
        return self.head(self.transformer(*rows))  # type: ignore[no-any-return]


class TokensFirst(Attention):
    """Reads and gives (tokens, batch, features)."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        tokens, n, d = x.shape
        q, k, v = (m(x).view(tokens, n * HEADS, d // HEADS).transpose(0, 1) for m in (self.wq, self.wk, self.wv))
        y = torch.bmm((q @ k.mT * (d // HEADS) ** -0.5).softmax(-1), v)
        return self.out(y.transpose(0, 1).reshape(tokens, n, d))  # type: ignore[no-any-return]


class FairseqLayer(Block):
    """fairseq: (tokens, batch, features), norms after the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = TokensFirst(fused=False)

    def forward(self, x: Tensor, encoder_padding_mask: Any = None) -> Tensor:
        residual = x
        x = self.norm1(residual + self.attn(x))
        return self.norm2(x + self.mlp(x))  # type: ignore[no-any-return]


class Fairseq(LM):
    def __init__(self) -> None:
        super().__init__(FairseqLayer, final=nn.Identity())

    def forward(self, src_tokens: Tensor, src_lengths: Tensor) -> Any:  # type: ignore[override]
        x = self.embedded(src_tokens).transpose(0, 1)
        for layer in self.blocks:
            x = layer(x, None)
        return {"encoder_out": [x], "logits": self.head(x).transpose(0, 1)}


class PackedBlock(Block):
    """ESM C, flash-attention code: sequences stand one after the other in (tokens, features)."""

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:  # type: ignore[override]
        y = self.norm1(x).split(lengths)
        x = x + torch.cat([self.attn(one[None])[0] for one in y])
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Packed(LM):
    def __init__(self) -> None:
        super().__init__(lambda: PackedBlock(causal=False))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embedded(idx).flatten(0, 1)
        for block in self.blocks:
            x = block(x, [idx.shape[1]] * idx.shape[0])
        return self.head(self.final(x))  # type: ignore[no-any-return]


# --- vision -----------------------------------------------------------------------------------------------------------


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
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """timm's: patches by a convolution, a class token, positions as a parameter."""

    def __init__(self, block: Callable[[], nn.Module] = DropPathBlock, how: str = "classes") -> None:
        super().__init__()
        self.patch_embed, self.how = nn.Conv2d(3, D, 8, 8), how
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, D) * 0.02), nn.Parameter(torch.randn(1, 17, D) * 0.02)
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
        return x + g2 * self.mlp(self.norm2(x) * (1 + c2) + s2)  # type: ignore[no-any-return]


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
        return self.final_layer(x)  # type: ignore[no-any-return]


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
        return self.head(self.norm(x))  # type: ignore[no-any-return]


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
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Swin(ViT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(SwinBlock(i % 2) for i in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patch_embed(x).permute(0, 2, 3, 1))
        return self.head(self.norm(x).mean((1, 2)))  # type: ignore[no-any-return]


class Mixer(Block):
    """A map over tokens in the place of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x).mT).mT
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class MixerModel(ViT):
    def __init__(self) -> None:
        super().__init__(Mixer)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patch_embed(x).flatten(2).mT)).mean(1))  # type: ignore[no-any-return]


# --- series, decisions, sets ------------------------------------------------------------------------------------------


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
        return self.head(x.view(n, channels, -1))  # type: ignore[no-any-return]


class Decisions(nn.Module):
    """Returns, states and actions by turns; three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_t, self.embed_r, self.embed_s, self.embed_a = nn.Embedding(64, D), nn.Linear(1, D), nn.Linear(11, D), nn.Linear(3, D)
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
        self.enc, self.blocks, self.dec = nn.Linear(2, D), nn.Sequential(*(SetBlock() for _ in range(LAYERS))), nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dec(self.blocks(self.enc(x)).mean(1))  # type: ignore[no-any-return]


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
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Conformer(Block):
    """Half a feed-forward, attention, a convolution, half a feed-forward, a norm."""

    def __init__(self) -> None:
        super().__init__(causal=False)
        self.norm3, self.norm4, self.norm5, self.mlp2 = nn.LayerNorm(D), nn.LayerNorm(D), nn.LayerNorm(D), FeedForward(F.silu)
        self.pointwise, self.depthwise, self.last = nn.Linear(D, 2 * D), nn.Conv1d(D, D, 3, padding=1, groups=D), nn.Linear(D, D)

    def convolved(self, x: Tensor) -> Tensor:
        return self.last(F.silu(self.depthwise(F.glu(self.pointwise(x), -1).mT).mT))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.mlp(self.norm2(x))
        x = x + self.attn(self.norm1(x))
        x = x + self.convolved(self.norm3(x))
        return self.norm5(x + 0.5 * self.mlp2(self.norm4(x)))  # type: ignore[no-any-return]


class Frames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(20, D), nn.ModuleList(Conformer() for _ in range(LAYERS)), nn.Linear(D, 30)

    def forward(self, frames: Tensor, lengths: Tensor) -> Any:
        x = self.embed(frames)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).log_softmax(-1), lengths


# --- wrappers ---------------------------------------------------------------------------------------------------------


def distributed() -> nn.Module:
    """In DistributedDataParallel, of one process."""
    if not torch.distributed.is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(LM())


def lightning() -> nn.Module:
    """A LightningModule that holds the model."""
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = LM()

        def forward(self, idx: Tensor) -> Any:
            return self.model(idx)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return cross_entropy(self(batch[:, :-1]), batch[:, 1:])

    return Lit()


def lora() -> nn.Module:
    """A model of one's own with LoRA of PEFT."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(LM(), LoraConfig(target_modules=["qkv", "up"], r=4, init_lora_weights=False))  # type: ignore[arg-type]


def learnt_tokens(kind: str) -> nn.Module:
    """A GPT-2 with PEFT's prompt or prefix tuning."""
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = GPT2Config(vocab_size=WORDS, n_embd=D, n_layer=LAYERS, n_head=HEADS, n_positions=64, use_cache=True)
    config = (PromptTuningConfig if kind == "prompt" else PrefixTuningConfig)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return get_peft_model(GPT2LMHeadModel(sizes), config)


def x_transformers(**options: Any) -> nn.Module:
    """The package's own."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=D, depth=LAYERS, heads=HEADS, attn_dim_head=D // HEADS, **options)
    return TransformerWrapper(num_tokens=WORDS, max_seq_len=32, attn_layers=layers)  # type: ignore[no-any-return]


def added(model: nn.Module) -> list[nn.Module]:
    """x-transformers': the modules that are given a branch and the stream."""
    return [m for m in model.modules() if type(m).__name__ == "Residual"]


def inside(path: str) -> Callable[[nn.Module], list[nn.Module]]:
    """The members of a list in a wrapped model."""
    return in_dictionary(path)


_LAYERS, _IMAGES = in_dictionary("layers"), lambda: normal(3, 3, 32, 32)
_ENCODER = {f"torch encoder, batch_first={b}, norm_first={n}": Case(lambda b=b, n=n: TorchEncoder(b, n), layers=inside("encoder.layers"), tokens_first=not b)  # type: ignore[misc]
            for b in (True, False) for n in (True, False)}  # fmt: skip

CASES = {
    **_ENCODER,
    **{f"torch.nn.Transformer, batch_first={b}": Case(lambda b=b: TorchBoth(b), lambda: (ids(), ids().flip(1)),  # type: ignore[misc]
       inside("transformer.decoder.layers"), tokens_first=not b) for b in (True, False)},
    "fairseq": Case(Fairseq, lambda: {"src_tokens": ids(), "src_lengths": torch.full((3,), LENGTH)}, tokens_first=True,
                    loss=lambda out: (out["logits"] * normal(3, LENGTH, WORDS)).sum()),
    "packed tokens (ESM C)": Case(Packed, stream=lambda out: out.unflatten(0, (3, LENGTH))),
    "timm ViT, stochastic depth": Case(ViT, _IMAGES),
    "DINOv2": Case(lambda: ViT(lambda: LayerScaleModule(causal=False), "features"), _IMAGES,
                   loss=lambda out: (out["x_norm_patchtokens"] * normal(3, 16, D)).sum()),
    "DiT": Case(DiT, lambda: (normal(3, 4, 8, 8), torch.tensor([0.1, 0.5, 0.9]), torch.tensor([1, 4, 10]))),
    "U-ViT": Case(UViT, _IMAGES),
    "Swin": Case(Swin, _IMAGES, stream=lambda out: out.flatten(1, 2)),
    "MLP-Mixer": Case(MixerModel, _IMAGES),
    "PatchTST": Case(PatchTST, lambda: normal(3, 2, 96), _LAYERS),
    "decision transformer": Case(Decisions, lambda: {
        "states": normal(3, 5, 11), "actions": normal(3, 5, 3), "rewards": None, "returns_to_go": normal(3, 5, 1),
        "timesteps": torch.arange(5).repeat(3, 1)}, loss=lambda out: (out[1] * normal(3, 5, 3)).sum()),
    "set transformer": Case(Sets, lambda: normal(3, 9, 2)),
    "Perceiver": Case(Perceiver, lambda: normal(3, 20, 5)),
    "Conformer": Case(Frames, lambda: (normal(3, 15, 20), torch.full((3,), 15)), _LAYERS),
    "torch.compile": Case(lambda: torch.compile(LM(), backend="eager"), layers=inside("_orig_mod.blocks")),  # type: ignore[arg-type, return-value]
    "DistributedDataParallel": Case(distributed, layers=inside("module.blocks")),
    "a LightningModule": Case(lightning, layers=inside("model.blocks"), needs="lightning"),
    "LoRA (PEFT) in a model of one's own": Case(lora, layers=inside("base_model.model.blocks"), needs="peft"),
    "prompt tuning (PEFT)": Case(lambda: learnt_tokens("prompt"), lambda: {"input_ids": ids()}, inside("base_model.transformer.h"), needs="peft",
                                 loss=lambda out: (out.logits[:, -1] * normal(3, WORDS)).sum()),
    "prefix tuning (PEFT)": Case(lambda: learnt_tokens("prefix"), lambda: {"input_ids": ids()}, inside("base_model.transformer.h"), needs="peft",
                                 loss=lambda out: (out.logits[:, -1] * normal(3, WORDS)).sum()),
    "double precision": Case(lambda: LM().double()),
    "bfloat16": Case(lambda: NanoGPT().bfloat16(), lambda: (ids(), ids().roll(-1, 1)), inside("transformer.h"), loss=lambda out: out[1]),
    "x-transformers": Case(x_transformers, layers=added, needs="x-transformers"),
    "x-transformers, post-norm": Case(lambda: x_transformers(pre_norm=False), layers=lambda m: [*(norms[2] for norms, _, _ in m.attn_layers.layers[:-1]), m.attn_layers.layers[-1][2]], needs="x-transformers"),
}  # fmt: skip
