"""Random networks as predicted and as simulated: what the figures of variances and correlations over depth show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from signalprop.data.batches import Batch, default_batch, patches_of
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import layer_ends, layout
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.results.comparison import r_squared, relative_errors
from signalprop.results.profile import Profile, average
from signalprop.results.series import Series
from signalprop_lab.reproductions.result import Check, Curve, Settings

# TGS section 2.4: median relative error and R² of its predictions against measurements.
PAPER_MEDIAN, PAPER_R2 = 0.052, 0.998
DEPTH, WIDTH = 192, 256  # of TGS figures 1 to 4: "a very deep 192-layer model"; the width is that of its table 4
HEADS = 16  # of width 64 at width 1024, whose values v1 appendices F and G.1.1 draw one by one
LENGTHS = (128, 256)  # tokens, by scale: TGS v1 states its text's statistics for 256


@dataclass(frozen=True)
class Pair:
    """A network's profile by theory, the mean over simulated networks, and these one by one."""

    predicted: Profile
    measured: Profile
    runs: tuple[Profile, ...]

    def series(self, which: Literal["forward", "gradient"]) -> tuple[Series, Series]:
        """Predicted and measured: the stream after every sublayer, or the gradient at its input."""
        return series_of(self.predicted, which), series_of(self.measured, which)

    def error_of(self, statistic: Callable[[Profile], float]) -> float:
        """Jackknife standard error, over the networks, of a number that is computed from their mean profile."""
        n = len(self.runs)
        without = [statistic(average([*self.runs[:i], *self.runs[i + 1 :]])) for i in range(n)]
        return float(np.std(without) * np.sqrt(n - 1))


def tgs(settings: Settings, placement: str, n_layers: int = DEPTH, **changes: Any) -> Architecture:
    """The encoder of TGS figures 1 to 4 and 8: ReLU, width 256, dropout 0.1, real text."""
    fields = {"n_layers": n_layers, "d_model": WIDTH, "seq_len": settings.pick(*LENGTHS), "norm_placement": placement}
    return Architecture.preset("tgs", **(fields | changes))


# Two figures may show one network; profiles are small.
_KNOWN: dict[Any, tuple[Profile, ...]] = {}


def both(
    p: Parametrization,
    settings: Settings,
    n_seeds: int,
    done: int = 0,
    total: int = 1,
    *,
    backward: bool = True,
    inputs: InputStatistics | None = None,
) -> Pair:
    """Predict and simulate a network on one batch of real data, on one thread: its matrices are too small to share.

    Args:
        done, total: how many networks of equal cost went before, and all of them, for the progress.
        inputs: Gaussian streams of these statistics in place of the batch.
    """
    import torch

    from signalprop.measurement.simulation import simulate

    given: dict[str, Any] = {"inputs": inputs}
    if inputs is None:
        given = {"batch": batch_of(p.architecture, settings.seed)}
        inputs = given["batch"].statistics(p.architecture)
    predicted = predict(p, inputs, backward=backward)
    key = (repr(p.to_json()), n_seeds, backward, settings.seed, settings.device, repr(inputs))
    if key not in _KNOWN:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            runs = []
            for number in range(n_seeds):

                def step(now: int, of: int, before: int = done * n_seeds + number) -> None:
                    settings.progress(before * of + now, total * n_seeds * of)

                options: dict[str, Any] = {"seed": settings.seed + number, "device": settings.device, "progress": step}
                runs.append(simulate(p, n_seeds=1, backward=backward, batch_size=1, **options, **given))
            _KNOWN[key] = tuple(runs)
        finally:
            torch.set_num_threads(threads)
    return Pair(predicted, average(_KNOWN[key]), _KNOWN[key])


@lru_cache(maxsize=4)
def batch_of(architecture: Architecture, seed: int) -> Batch:
    """What a network of this shape reads."""
    if architecture.input == "patches":
        return photographs(architecture, seed)
    return default_batch(architecture, batch_size=1, seed=seed)


def photographs(architecture: Architecture, seed: int) -> Batch:
    """Patches of scikit-learn's two sample photographs: of each one square crop of random place, with random classes.

    Pixels are standardised over both, channel by channel. Unlike handwritten digits they have the long-range
    correlation of natural images, which DeepScaleLM divides by.
    """
    from signalprop.errors import require

    datasets = require("sklearn.datasets", "models")
    a, rng = architecture, np.random.default_rng([seed, 6])
    grid = round((a.seq_len - a.n_class_tokens) ** 0.5)
    patch = round((a.patch_dim / 3) ** 0.5)
    images = np.stack(datasets.load_sample_images().images).astype(np.float64)
    images = (images - images.mean((0, 1, 2))) / images.std((0, 1, 2))
    height, width = images.shape[1:3]
    rows = np.arange(grid * patch) * height // (grid * patch)
    crops = np.stack([image[rows][:, rows + rng.integers(0, width - height)] for image in images])
    targets = rng.integers(0, a.n_classes, len(crops))
    patches = patches_of(crops.transpose(0, 3, 1, 2), patch)
    return Batch(tokens=None, patches=patches, targets=targets, source="scikit-learn sample photographs")


def agreement(name: str, pair: Pair, which: Literal["forward", "gradient"], *, shape: bool = True) -> list[Check]:
    """Theory on measurement, by the errors that TGS reports of its theory.

    Args:
        shape: also R² of the logarithm over layers; for what does not vary with depth it says nothing.
    """
    predicted = series_of(pair.predicted, which)

    def median(profile: Profile) -> float:
        return float(np.median(np.abs(relative_errors(predicted, series_of(profile, which))[0])))

    def explained(profile: Profile) -> float:
        return r_squared(predicted.log_variance, series_of(profile, which).log_variance) or 0.0

    said = f"{PAPER_MEDIAN:.1%} (section 2.4, over its networks)"
    checks = [
        Check(
            f"{name}: median error of the theory", said, median(pair.measured), high=PAPER_MEDIAN,
            standard_error=pair.error_of(median),
        )
    ]  # fmt: skip
    if shape:
        checks.append(
            Check(
                f"{name}: R² of the theory, logarithms", f"{PAPER_R2} (section 2.4)", explained(pair.measured),
                low=PAPER_R2, standard_error=pair.error_of(explained),
            )
        )  # fmt: skip
    return checks


def series_of(profile: Profile, which: Literal["forward", "gradient"]) -> Series:
    """The stream after every sublayer, or the gradient at its input."""
    if which == "forward":
        return profile.forward["stream_out"]
    assert profile.gradient is not None
    return profile.gradient["stream_in"]


def layers(profile: Profile) -> FloatArray:
    """Variances of the streams after whole layers."""
    return np.asarray(profile.forward["stream_out"].variance[layer_ends(layout(profile.architecture))])


def over_depth(pair: Pair, which: str, label: str = "") -> tuple[Curve, Curve]:
    """Predicted and measured variance of the stream (`forward`, `gradient`) or its token correlation (`r`)."""
    words = label + ", " if label else ""
    names: dict[Literal["theory", "measured"], str] = {
        "theory": "predicted",
        "measured": f"measured, {pair.measured.n_seeds} networks",
    }
    found = []
    for kind, series in zip(names, pair.series("gradient" if which == "gradient" else "forward"), strict=True):
        x = (np.arange(pair.measured.n_sublayers) + (which != "gradient")) / 2
        y, error = series.variance, series.variance_se
        if which == "r":
            y, error = series.token_correlation, series.token_correlation_se
        elif error is not None:
            error = error * y
        found.append(Curve(words + names[kind], x, y, kind, error if kind == "measured" else None))
    return found[0], found[1]


def data_words(architecture: Architecture) -> str:
    """What a network of these figures reads, in words."""
    return f"{architecture.seq_len} tokens of the State of the Union addresses"
