"""Several residual streams: how sublayers read them, write to them and mix them, at initialisation.

Every sublayer reads u = sum_i a_i x_i, and x_i becomes sum_j M_ij (lambda x_j) + b_i beta F(norm(u)). Hyper-connections
(Zhu et al. 2024, 2409.19606) and their manifold-constrained form (Xie et al. 2025, 2512.24880).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from signalprop.files.validation import Value


class Streams(Value):
    """The streams of an Architecture; all start as the model's input.

    Attributes:
        n: how many.
        mixing: `mhc`: read and write gates, and a matrix of gates made doubly stochastic by Sinkhorn's algorithm
            (DeepSeek-V4, GLM-5.3). `independent`: the same gates without a matrix (Hy4). `hyper`: fixed numbers, of
            which sublayer k reads stream k mod n, all are written equally, and none are mixed (what hyper-connections
            start as). `siamese`: two streams, x after a norm and y: every sublayer reads the sum of both normed, y gets
            its branch, and x the branch over sqrt(2 (layer + 1)) (SiameseNorm, Li et al. 2026, 2602.08064, released
            code; the streams' norms are RMSNorms without gains here).
        gate_std: of the gates' weights, which read all streams, normed by their common root mean square. gate_scale:
            factor on what they give (1 in transformers' DeepSeek-V4 and GLM-5.3, 0.01 in Hy4 and in the paper).
        read_bias, write_bias: added to a gate before its sigmoid. write_gain: factor on write gates.
        mix_bias: added to the diagonal of the matrix before its softmax; 0: it starts as the average.
        sinkhorn: passes over rows and columns.
    """

    n: int = Field(4, ge=2, le=16)
    mixing: Literal["mhc", "independent", "hyper", "siamese"] = "mhc"
    gate_std: float = Field(0.02, ge=0, le=100)
    gate_scale: float = Field(1.0, ge=0, le=100)
    read_bias: float = Field(0.0, ge=-50, le=50)
    write_bias: float = Field(0.0, ge=-50, le=50)
    write_gain: float = Field(2.0, gt=0, le=1e6)
    mix_bias: float = Field(0.0, ge=-50, le=50)
    sinkhorn: int = Field(20, ge=1, le=1000)

    @property
    def gated(self) -> bool:
        """Whether every token has its gates, which weigh the streams."""
        return self.mixing in ("mhc", "independent")

    def logit_std(self, d_model: int) -> float:
        """Standard deviation of what a gate adds to its bias."""
        return self.gate_scale * self.gate_std * (self.n * d_model) ** 0.5 if self.gated else 0.0

    def gates(self) -> int:
        """Gates of one sublayer."""
        return 2 * self.n + self.n**2 * (self.mixing == "mhc") if self.gated else 0

    def parameters(self, d_model: int) -> int:
        """Trainable numbers of one sublayer's connections."""
        if self.mixing == "siamese":
            return 0
        if not self.gated:
            return 2 * self.n + self.n**2
        return self.gates() * (self.n * d_model + 1) + 2 + (self.mixing == "mhc")

    def operations(self, d_model: int) -> float:
        """Of one sublayer at one token: gates, what is read, written and mixed; a multiply-add is 2."""
        mixed = self.mixing != "independent"
        return float(2 * self.n * d_model * (self.gates() + 2 + mixed * self.n))

    def fixed(self, index: int, layer: int) -> tuple[list[float], list[float], list[list[float]]]:
        """(a, b, M) of sublayer `index` of a layer, where nothing is gated."""
        if self.mixing == "siamese":  # of streams after their norms
            return [1.0, 1.0], [(2 * (layer + 1)) ** -0.5, 1.0], [[1.0, 0.0], [0.0, 1.0]]
        read = [float(i == index % self.n) for i in range(self.n)]
        return read, [1.0] * self.n, [[float(i == j) for i in range(self.n)] for j in range(self.n)]

    def head(self) -> list[float]:
        """Weights by which the head reads the last streams: their mean."""
        return [1 / self.n] * self.n
