"""How normal gradients and embedded images are: TGS v1 section I.1 and appendix M.2."""

from __future__ import annotations

import numpy as np
from scipy import stats
from torch import Tensor, nn

from signalprop.models.transformer import batch_tensors, build
from signalprop.network.architecture import Architecture
from signalprop.network.moments import FloatArray
from signalprop.schemes import scheme
from signalprop_lab.reproductions.networks import batch_of, tgs
from signalprop_lab.reproductions.result import Check, Curve, Findings, Panel, Settings

SEEDS = 4
_GRID = stats.norm.ppf((np.arange(193) + 0.5) / 193)


def explained(values: FloatArray) -> float:
    """R² of the straight line through the quantiles of the values against those of a normal distribution."""
    return float(stats.probplot(values)[1][2] ** 2)


def top_gradient(settings: Settings, seed: int) -> FloatArray:
    """The gradient of the masked-language loss at the output of the last block, at masked positions, all features."""
    a = tgs(settings, "pre", 12)
    model, batch = build(scheme("xavier")(a), seed=seed), batch_of(a, seed)
    found: list[Tensor] = []

    def watch(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.retain_grad()
        found.append(output)

    model.sublayers()[-1].register_forward_hook(watch)
    model(**batch_tensors(batch)).loss.backward()
    gradient = found[0].grad
    assert batch.targets is not None and gradient is not None
    return np.asarray(gradient.double().numpy()[batch.targets >= 0]).ravel()


def embedded_images(settings: Settings, seed: int) -> FloatArray:
    """Patches of two photographs after a linear map of weights of variance 1/inputs, all features."""
    side, patch = settings.pick((8, 4), (14, 16))
    shape = {"patch_dim": 3 * patch * patch, "n_classes": 10, "seq_len": side * side + 1}
    patches = batch_of(Architecture.preset("vit-base", **shape), seed).patches
    assert patches is not None
    weights = np.random.default_rng(seed).normal(size=(patches.shape[-1], 256)) / np.sqrt(patches.shape[-1])
    return np.asarray(patches @ weights).ravel()


def normality(settings: Settings) -> Findings:
    """Quantiles of gradients and of embedded images beside those of a normal distribution."""
    checks, panels = [], []
    for i, (name, source, paper, draw) in enumerate(
        (
            ("gradient at the last block", "0.999 (v1 M.2)", 0.999, top_gradient),
            ("embedded images", "0.95 (v1 I.1)", 0.95, embedded_images),
        )
    ):
        drawn = []
        for seed in range(SEEDS):
            drawn.append(draw(settings, settings.seed + seed))
            settings.progress(i * SEEDS + seed + 1, 2 * SEEDS)
        r2 = np.array([explained(values) for values in drawn])
        error = float(r2.std(ddof=1) / np.sqrt(SEEDS))
        checks.append(
            Check(f"{name}: R² of the best-fit normal", source, float(r2.mean()), low=paper, standard_error=error)
        )
        values = (drawn[0] - drawn[0].mean()) / drawn[0].std()
        quantiles = np.quantile(values, stats.norm.cdf(_GRID))
        line = Curve("normal", _GRID, _GRID, "paper")
        panels.append(
            Panel(
                f"{name}, standardised",
                "normal quantile",
                "quantile",
                (Curve(name, _GRID, quantiles, "measured"), line),
            )
        )
    variances = np.array([values.var() for values in drawn])
    error = float(variances.std(ddof=1) / np.sqrt(SEEDS))
    name = "embedded images: variance, weights of variance 1/inputs"
    checks.append(Check(name, "1.02 (v1 I.1)", float(variances.mean()), 0.9, 1.1, error))
    reduced = (
        "12 Pre-LN layers of width 256, Xavier, before training (the paper does not say when); scikit-learn's two "
        f"sample photographs in place of ImageNet, standardised; {SEEDS} draws each"
    )
    notes = ("R² is that of the quantiles against normal ones; the paper does not say which it took.",)
    return Findings(tuple(checks), reduced, tuple(panels), notes)
