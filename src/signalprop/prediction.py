"""`predict`: the cheapest reading of a Parametrization that is right for its architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import numpy as np

from signalprop.data.batches import Batch, default_statistics, shortened
from signalprop.errors import InputError, require
from signalprop.files.limits import check_fits
from signalprop.files.validation import typed
from signalprop.network.architecture import Architecture, Config
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import kinds_in
from signalprop.network.parametrization import PLACEMENTS, Parametrization
from signalprop.prediction_notes import is_shaped, left_out_of, scores_of
from signalprop.results.cost import count_parameters
from signalprop.results.profile import EXPERT_LOAD, Profile
from signalprop.results.verdicts import SCORE_VARIANCE
from signalprop.schemes.base import parametrized
from signalprop.sublayers.attention.roles import has_window

if TYPE_CHECKING:
    from torch import nn

    from signalprop.attachment.anatomy import Anatomy
    from signalprop.sublayers.experts.load import ExpertLoads

Fidelity = Literal["auto", "moments", "kernel", "simulate"]


@typed
def predict(
    subject: str | Architecture | Config | Parametrization | nn.Module | Anatomy,
    inputs: Any = None,
    *,
    scheme: str | None = None,
    fidelity: Fidelity = "auto",
    backward: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Predict the signal at every probe point.

    Args:
        subject: a preset's name, an Architecture or a configuration of Hugging Face (`LlamaConfig(...)`), or a
            Parametrization, which has all numbers of the network; or a PyTorch model, whose weights are taken as
            random, with the sizes that they have.
        inputs: InputStatistics of the data, or a Batch; default: Zipf's law (15 % of positions carry loss in an
            encoder). For a model, also what it is called with, as `measure` takes it; statistics are then those of its
            tokens.
        scheme: name of the initialisation of a preset or an Architecture; default: that of `signalprop predict`.
        fidelity: `moments` (closed form), `kernel` (token kernels, one parametrization at a time), `simulate`
            (random-weight networks), or `auto`: kernel where positions differ (decoders, encoder-decoders, classifiers,
            images; real ids in shallow encoders; shaped attention), else moments. `auto` follows a long decoder without
            real ids on a grid of positions, `kernel` all of them.
        backward: also the gradient.
        progress: called with (sublayers passed, all of them, both ways) while token kernels are followed.

    The profile's `fidelity` says what was used, its `notes` why.

    Raises:
        InputError: an unknown preset or scheme, a scheme for a Parametrization, or a fidelity that does not cover the
            architecture; or a model that `read_parametrization` cannot read.
    """
    alike = ""
    if not isinstance(subject, (str, Architecture, Config, Parametrization)):
        subject, alike, inputs = _of_model(subject, inputs)
    parametrization = parametrized(subject, scheme)
    if isinstance(inputs, Batch):
        inputs = inputs.statistics(parametrization.architecture)
    if inputs is not None and not isinstance(inputs, InputStatistics):
        raise InputError(
            f"inputs= is a {type(inputs).__name__}; expected InputStatistics or a Batch (for a live model: "
            "its arguments)"
        )
    statistics = inputs or default_statistics(parametrization.architecture)
    check_fidelity(fidelity)
    expected_cost(parametrization, statistics, fidelity)  # refuses what does not fit
    return predicted(parametrization, statistics, fidelity, backward, progress, alike)


def predicted(
    parametrization: Parametrization,
    statistics: InputStatistics,
    fidelity: Fidelity,
    backward: bool = True,
    progress: Callable[[int, int], None] | None = None,
    alike: str = "",
    roughly: bool = False,
) -> Profile:
    """`predict` of a parametrization whose cost was checked; roughly: for `ranking`."""
    chosen, note, loads = fidelity, "", None
    if fidelity == "auto":
        chosen, note = cheapest(parametrization, statistics)
    elif fidelity == "moments":
        note = _averages_asked_for(parametrization, statistics)
    if chosen == "moments":
        from signalprop.kernels.averages import predict_averages
        from signalprop.theory.scatter.bands import with_scatter

        profile = predict_averages(parametrization, statistics, backward=backward)
        if parametrization.skip.ndim == 1 and not roughly:
            profile = with_scatter(parametrization, profile)
    elif chosen == "kernel":
        from signalprop.kernels.position_grid import grid_for
        from signalprop.kernels.predicting import predict_token_kernels

        read, seen = parametrization, statistics
        if fidelity == "auto":
            read, seen, note = _shortened(parametrization, statistics, note)
        grid = grid_for(read, seen, coarse=roughly) if fidelity == "auto" else None
        loads = _watched_loads(read)
        profile = predict_token_kernels(
            read, seen, backward=backward, grid=grid, watch=loads, progress=progress, bands=not roughly
        )
        profile = replace(profile, architecture=parametrization.architecture)
    else:
        require("torch", "models")
        from signalprop.measurement.simulation import simulate

        profile = simulate(parametrization, statistics, backward=backward)
    if chosen != "simulate" and parametrization.skip.ndim == 1:
        profile = _with_expert_loads(parametrization, profile, loads)
    return finished(parametrization, statistics, profile, (note, alike))


def finished(p: Parametrization, inputs: InputStatistics, profile: Profile, notes: tuple[str, ...]) -> Profile:
    """A Profile of formulas or draws, with its largest score variance, these notes and what is left out of it."""
    if p.skip.ndim == 1:
        largest = float(scores_of(p, profile).max(initial=0.0))
        profile = replace(profile, statistics={**profile.statistics, SCORE_VARIANCE: largest})
    left_out = () if profile.source == "simulated" else left_out_of(p, inputs, profile)
    lines = [*profile.notes, *(line for line in (*notes, *left_out) if line)]
    return replace(profile, reads=inputs.source, notes=tuple(lines))


def _of_model(model: nn.Module | Anatomy, inputs: Any) -> tuple[Parametrization, str, InputStatistics | None]:
    """Of its weights as they are, without dropout where it is in evaluation mode; a note; statistics of its inputs."""
    from signalprop.attachment.anatomy import attach, require_roles
    from signalprop.attachment.arguments import batch_in, statistics_in
    from signalprop.attachment.parametrization_of import not_alike, parametrization_of
    from signalprop.streams.live_model import in_its_mode

    attached = require_roles(attach(model, None, inputs))
    arguments = attached.arguments
    a = in_its_mode(attached.mapping.architecture, attached.model)
    batch = None if arguments is None else batch_in(attached.mapping, arguments)
    if batch is not None and batch.tokens is not None:
        a = shortened(a, batch.tokens.shape[1])
        a = a if batch.decoder_tokens is None else a.replace(target_len=batch.decoder_tokens.shape[1])
    table = parametrization_of(attached, a)
    said = (not_alike(attached), _TRAINED * has_trained_norms(attached.model))
    notes = "; ".join(filter(None, said))
    return table, notes, statistics_in(attached.mapping, inputs, arguments)


_TRAINED = (
    "the weights are trained (gains of norms differ between features), but the prediction assumes random ones: of a "
    "Llama of 6 layers after 250 steps the stream's variance was 395, where .05 is predicted; measure it"
)


def has_trained_norms(model: nn.Module) -> bool:
    """Whether some norm has gains that differ, which none has at the start."""
    gains = (getattr(part, "weight", None) for part in model.modules() if "norm" in type(part).__name__.lower())
    return any(
        x is not None and x.ndim == 1 and x.numel() > 1 and float(x.detach().float().std()) > 1e-6 for x in gains
    )


_LONGEST_DRAWN = 256  # tokens that drawn sublayers are followed over, unless more are asked for


def _shortened(p: Parametrization, inputs: InputStatistics, note: str) -> tuple[Parametrization, InputStatistics, str]:
    """The first tokens alone, where sublayers without a closed form would have to be drawn over many."""
    a = p.architecture
    if a.seq_len <= _LONGEST_DRAWN or all(kind.closed for kind in kinds_in(p)):
        return p, inputs, note
    ids = {name: getattr(inputs, name) for name in ("tokens", "targets", "segments")}
    first = {name: found[:, :_LONGEST_DRAWN] for name, found in ids.items() if found is not None}
    target = None if a.target_len is None else min(a.target_len, _LONGEST_DRAWN)
    few = replace(p, architecture=a.replace(seq_len=_LONGEST_DRAWN, target_len=target))
    said = f"over the first {_LONGEST_DRAWN} of {a.seq_len:,} tokens; fidelity kernel takes all of them"
    return few, replace(inputs, **first), f"{note}; {said}"


def parametrization_of_model(model: nn.Module) -> Parametrization:
    """The table of a PyTorch model, its weights taken as random with the sizes that they have."""
    return _of_model(model, None)[0]


_PER_PAIR = 3.5e-7  # seconds that a pair of tokens takes in a sublayer, on one core
# Seconds and bytes that a sublayer takes beside: measured with gpt2 of 1,000 and 4,000 layers on a grid (7.3 ms), and
# of 10,000 by averages (1 ms, 7 kB).
_PER_SUBLAYER = {"moments": 0.001, "kernel": 0.007}
_BYTES = 10_000
_MATRICES = 64  # of tokens x tokens that are held at once, of 32 layers; more of them are computed again


class Cost(NamedTuple):
    """What a prediction takes, about: `seconds` of one core, `bytes` of memory."""

    seconds: float
    bytes: float


def least_cost(a: Architecture) -> Cost:
    """What a prediction takes at least, whatever the scheme and the fidelity of formulas: one sublayer a layer."""
    n = a.n_layers + (a.n_decoder_layers or 0)
    return Cost(n * _PER_SUBLAYER["moments"], float(_BYTES * n))


def expected_cost(p: Parametrization, inputs: InputStatistics, fidelity: Fidelity) -> Cost:
    """What a prediction takes by formulas; networks that are simulated, and kinds that are drawn, are not counted.

    Raises:
        InputError: it would not fit into memory; the line says how much it needs.
    """
    chosen = cheapest(p, inputs)[0] if fidelity == "auto" else fidelity
    if chosen == "simulate":
        return Cost(0.0, 0.0)
    n = p.n_sublayers
    seconds, needed = n * _PER_SUBLAYER[chosen], float(_BYTES * n)
    if chosen == "kernel":
        from signalprop.kernels.memory_limits import check_fits_of
        from signalprop.kernels.position_grid import grid_for

        read, seen, _ = _shortened(p, inputs, "") if fidelity == "auto" else (p, inputs, "")
        grid = grid_for(read, seen) if fidelity == "auto" else None
        if grid is None:
            check_fits_of(read)
            rows = max(read.architecture.seq_len, read.architecture.target_len or 0)
            seconds += _PER_PAIR * n * rows**2
        else:
            rows = 2 * len(grid.n)
        needed += 8 * _MATRICES * rows**2
    cure = "take fewer layers" if chosen == "moments" else "take fewer layers or tokens, or fidelity moments"
    check_fits(needed, f"a prediction of {n:,} sublayers", cure)
    return Cost(seconds, needed)


# What a network takes that is built and run: floating-point operations in a second of one core, bytes of a parameter
# (weight, gradient, copies) and of a token in a sublayer (measured with gpt2 of 4 and 24 layers, tgs of 12 and 48).
_OPERATIONS, _PER_PARAMETER, _PER_FEATURE, _BESIDE = 4e10, 12, 32, 5e8
# Of one that is read or drawn, written and averaged over: seconds (`apply` and `check` of 5 and 193 million), bytes.
_LOOKED_THROUGH, _WITHOUT_GRADIENT = 5e-8, 8


def cost_of_runs(p: Parametrization, sequences: int, runs: int = 1) -> Cost:
    """What networks take that are built one after the other, with a forward and a backward pass of each run.

    Args:
        sequences: of a batch. runs: passes of all networks together.

    Raises:
        InputError: it would not fit into memory; the line says how much it needs.
    """
    a, n = p.architecture, count_parameters(p.architecture)["total"]
    tokens = sequences * max(a.seq_len, a.target_len or 0)
    needed = _BESIDE + _PER_PARAMETER * n + tokens * (_PER_FEATURE * p.n_sublayers * a.d_model + 8 * a.vocab_size)
    check_fits(needed, f"a network of {n:,} parameters on {tokens:,} tokens", "take fewer layers or a smaller batch")
    return Cost(6 * n * tokens * runs / _OPERATIONS, needed)


def cost_of_model(n: int, tokens: float = 0) -> Cost:
    """What a model of n parameters takes that is read (or drawn) and looked through, and what its passes take.

    Args:
        tokens: read by all passes together, forwards and backwards.
    """
    held = _PER_PARAMETER if tokens else _WITHOUT_GRADIENT
    return Cost(n * _LOOKED_THROUGH + 6 * n * tokens / _OPERATIONS, _BESIDE + held * n)


def _watched_loads(p: Parametrization) -> ExpertLoads | None:
    """What counts the loads of experts on the way of token kernels; None: there are none."""
    if "experts" not in p.architecture.settings:
        return None
    from signalprop.sublayers.experts.load import ExpertLoads

    return ExpertLoads(p)


def _with_expert_loads(p: Parametrization, profile: Profile, watched: ExpertLoads | None) -> Profile:
    """The profile with how unevenly experts are loaded, as `statistics` and in a note."""
    if "experts" not in p.architecture.settings or (p.architecture.streams and watched is None):
        return profile
    from signalprop.sublayers.experts.load import expert_loads

    loads = expert_loads(p, profile) if watched is None else watched.variation()
    layers = np.flatnonzero(loads)
    shown = dict.fromkeys(layers[np.linspace(0, len(layers) - 1, 4).astype(int)].tolist() if len(layers) else [])
    said = ", ".join(f"{loads[i]:.2g} in layer {i}" for i in shown)
    note = (
        f"within a sequence the load of an expert varies by {said} of its mean, because correlated tokens choose the "
        "same experts"
    )
    return replace(
        profile,
        statistics={**profile.statistics, EXPERT_LOAD: loads.tolist()},
        notes=(*profile.notes, *([note] if len(layers) else [])),
    )


def check_fidelity(name: str) -> Fidelity:
    """The fidelity of that name."""
    if name not in get_args(Fidelity):
        raise InputError(f"unknown fidelity {name!r}; choose {', '.join(get_args(Fidelity))}")
    return cast(Fidelity, name)


# Sublayers times squared length up to which token kernels take well under a second.
_CHEAP = 500_000
_LONG = 25_000_000  # up to which they take seconds


def cheapest(parametrization: Parametrization, inputs: InputStatistics) -> tuple[Fidelity, str]:
    """The cheapest fidelity that is right for an architecture, and why: token kernels where positions differ."""
    p, a = parametrization, parametrization.architecture
    if a.squash:
        return "simulate", f"fidelity simulate: {a.norm} divides nothing by its size and has no closed form here"
    differ = next(_why_positions_differ(p, inputs), "") if p.skip.ndim == 1 else ""
    if differ and (a.kind != "encoder-decoder" or _can_be_followed(p, inputs)):
        return "kernel", f"fidelity kernel: {differ}"
    if a.causal:
        averages = "a sweep is averaged over positions, which is not exact for causal models, least for gradients"
    elif differ:
        averages = (
            "averages over positions, though those of a causal decoder differ: gradients at its first sublayers were "
            "1.3 (T5) to 1.8 times (Whisper) the prediction; fidelity kernel follows every position"
        )
    else:
        averages = "averages suffice for equivalent positions"
    return "moments", f"fidelity moments: {averages}"


def _why_positions_differ(p: Parametrization, inputs: InputStatistics) -> Iterator[str]:
    """Why one number for all positions is not enough, the weightiest reason first."""
    a, pairs = p.architecture, p.n_sublayers * p.architecture.seq_len**2
    if is_shaped(p):
        yield "shaped attention weighs tokens by their positions"
    if drawn := [kind.words for kind in kinds_in(p) if not kind.closed]:
        yield f"{' and '.join(drawn)} have no closed form, so networks are drawn"
    if a.causal:
        yield "positions of a causal stack differ" if a.seq_len > 1 else "there is one position"
    if a.kind == "encoder-decoder":
        yield "positions of a causal decoder differ"
    if a.kind != "encoder":
        return
    if a.head == "classes" and (a.class_token or pairs <= _LONG):
        yield "the token that the classes are read from carries the whole gradient, so positions differ"
    if inputs.kind == "patches" and inputs.second_moments is not None:
        yield "images differ in contrast, and norms divide each by its contrast"
    if has_window(a):
        yield "in a window neighbouring tokens read the same keys"
    ids = inputs.tokens is not None and inputs.tokens.shape[1] == a.seq_len
    if ids and pairs <= _CHEAP and _reads_normed(p):
        yield "in a shallow stack it matters which tokens are equal"


def _can_be_followed(p: Parametrization, inputs: InputStatistics) -> bool:
    """Whether the positions of an encoder-decoder are few, or stand on a grid, or some sublayers have to be drawn."""
    from signalprop.kernels.position_grid import grid_for

    a = p.architecture
    lengths = np.where(p.stack == 0, a.seq_len, a.target_len or a.seq_len).astype(float)
    drawn = not all(kind.closed for kind in kinds_in(p))
    return drawn or bool((lengths**2).sum() <= _LONG) or grid_for(p, inputs) is not None


def _averages_asked_for(parametrization: Parametrization, inputs: InputStatistics) -> str:
    """A note where they are not what is right for an architecture; else ""."""
    right, why = cheapest(parametrization, inputs)
    if right == "moments":
        return ""
    measured = " (of a Llama of 3 layers they gave .6 of the measured first gradient)" * ("causal stack" in why)
    takes = "token kernels (slower)" if right == "kernel" else right
    return f"moments are only a rough guide here: {why.partition(': ')[2]}{measured}; fidelity auto takes {takes}"


def _reads_normed(p: Parametrization) -> bool:
    """Whether every attention reads a normed stream."""
    return not ((p.placement == PLACEMENTS.index("none")) | (p.placement == PLACEMENTS.index("res-post"))).any()
