"""The networks of records/accuracy.md, and how near their predictions ought to be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from signalprop.data.batches import Batch, load_text, text_batch, word_ids
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import IntArray
from signalprop.schemes import scheme

LARGE = 6e7  # n_layers * d_model^2 from which only two cells of a size are run, minutes each
LARGEST = 4e8


@lru_cache(maxsize=4)
def _ids(vocab_size: int) -> IntArray:
    return word_ids(load_text(), vocab_size)


@dataclass(frozen=True)
class Cell:
    """One network of the grid. `group` names the row of the issue's table that it belongs to."""

    group: str
    preset: str
    n_layers: int
    d_model: int
    placement: str
    scheme: str
    activation: str
    dropout: float
    qk_gain: float = 1.0
    seq_len: int = 128
    batch_size: int = 1

    @property
    def name(self) -> str:
        """What sets it apart, in words."""
        shape = f"{self.preset} {self.n_layers} x {self.d_model}"
        gain = f", Q/K x {self.qk_gain:g}" * (self.qk_gain != 1)
        return f"{shape}, {self.placement}, {self.scheme}, {self.activation}, p {self.dropout:g}{gain}"

    @property
    def cost(self) -> int:
        """What one network takes, in arbitrary units."""
        return self.n_layers * self.d_model**2

    def batch(self, architecture: Architecture) -> Batch:
        """The one real batch that the cell reads."""
        return text_batch(architecture, _ids(architecture.vocab_size), self.batch_size, 0, "sotu")

    def architecture(self) -> Architecture:
        changes: dict[str, Any] = {"n_layers": self.n_layers, "d_model": self.d_model, "seq_len": self.seq_len}
        changes |= {"dropout": self.dropout, "activation": self.activation, "norm_placement": self.placement}
        if self.preset.startswith("llama"):  # grouped heads: four query heads share a key/value head
            changes["n_kv_heads"] = max(1, self.d_model // 64 // 4)
        return Architecture.preset(self.preset, **changes)

    def parametrization(self, architecture: Architecture) -> Any:
        options = {"qk_gain": self.qk_gain} if self.qk_gain != 1 else {}
        return scheme(self.scheme, **options)(architecture)


def grid() -> list[Cell]:
    """The cells, cheap ones first, so that a short run already covers every group."""
    return sorted(_cells(), key=lambda cell: cell.cost)


def _cells() -> Iterator[Cell]:
    variants = [("relu", 0.1), ("gelu", 0.1), ("relu", 0.0), ("gelu", 0.0)]
    schemes = ("xavier", "fixed", "deepscalelm", "deepscalelm-simple")
    sizes = [(n, d) for d in (128, 256, 512, 1024, 4096) for n in (1, 2, 12, 48, 192, 768)]
    # 4096 up to 12 layers; 768 layers of width 1024 (10^10 weights) take a quarter of an hour for one network: left out
    sizes = [(n, d) for n, d in sizes if not (d == 4096 and n > 12) and n * d**2 <= LARGEST]
    turn = 0
    for n, d in sorted(sizes, key=lambda size: size[0] * size[1] ** 2):
        for placement in ("pre", "post"):
            for name in schemes:
                activation, p = variants[turn % len(variants)]
                turn += 1
                if n * d**2 <= LARGE or (placement, name) in (("pre", "xavier"), ("post", "deepscalelm")):
                    yield Cell("bidirectional", "tgs", n, d, placement, name, activation, p)
        turn += 1  # the next size pairs schemes with other activations and dropouts
    for n in (12, 48):
        for d in (256, 512):
            for preset, activation in (("gpt2", "gelu_tanh"), ("llama-130m", "silu")):
                for name in ("huggingface", "xavier", "deepscalelm"):
                    yield Cell("causal", preset, n, d, "pre", name, activation, 0.0)
    for n in (24, 192):
        yield Cell("Q/K at twice Xavier", "tgs", n, 256, "pre", "xavier", "relu", 0.1, qk_gain=2.0)


# median errors that predictions ought to have
TARGETS = {"forward variance": 0.02, "token correlation": 0.02, "gradient variance": 0.03}
MOST_Z = 1.3  # root mean square of what is left, in units of the predicted scatter
GROUPS = ("bidirectional", "causal", "Q/K at twice Xavier")
