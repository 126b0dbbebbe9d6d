"""The attention-only networks that the SPA paper draws kernels of (He et al. 2023, figures 1, 6 and 7), as tables."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from signalprop.kernels.schedules import decay_schedule, rho_schedule
from signalprop.kernels.trace import attention_only
from signalprop.network.architecture import Architecture, Placement
from signalprop.network.embedding_and_head import Embedding
from signalprop.network.kinds import rows_where
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization, Shaping, blank

HEADS = 8
# What the paper uses where it does not say otherwise (section 3, appendix H.2).
LAST_RHO, LAST_GAMMA = 0.8, 0.005


def figure_7(n_layers: int = 100, length: int = 100, repeats: float = 0.02) -> dict[str, Parametrization]:
    """The seven rows of SPA figure 7 by name, in its order; the first three are figure 1.

    Attention alone, infinitely wide, without query-key scores: ALiBi with 8 heads except in U-SPA and E-SPA, which are
    made for tokens of which a share `repeats` of the pairs is equal.
    """
    skip = 0.98
    return {
        "skipless": alibi(n_layers, length, "none", 0.0, 1.0),
        "U-SPA": u_spa(n_layers, length, repeats),
        "E-SPA": e_spa(n_layers, length, repeats),
        "skipless + norm": alibi(n_layers, length, "pre", 0.0, 1.0),
        "Pre-LN": alibi(n_layers, length, "pre", 1.0, 1.0),
        "Pre-LN, skips 0.98": alibi(n_layers, length, "pre", skip, math.sqrt(1 - skip**2)),
        "Post-LN": alibi(n_layers, length, "post", 1.0, 1.0),
    }


def figure_6(repeats: float = 0.05) -> dict[str, Parametrization]:
    """The two networks of SPA figure 6 (36 layers, 100 tokens, last gamma 0.02): what repeats do to the diagonal."""
    names = {"repeats ignored": 0.0, "repeats corrected for": repeats}
    return {name: e_spa(36, 100, share, 0.02) for name, share in names.items()}


def alibi(n_layers: int, length: int, placement: Placement, skip: float, branch: float) -> Parametrization:
    """Blocks of attention that only knows ALiBi's biases: skip X + branch Attn(X), norms as the placement says."""
    return _table(n_layers, length, "alibi", placement, "alibi", skip=skip, branch=branch)


def u_spa(n_layers: int, length: int, repeats: float) -> Parametrization:
    """U-SPA without skips and norms: rho from `repeats` (the kernel of the tokens) to `LAST_RHO`."""
    rho = rho_schedule(n_layers, LAST_RHO, repeats)
    p = _table(n_layers, length, "none", "none", "u-spa", skip=0.0, branch=1.0)
    return _shaped(p, rho, Shaping(kind="u-spa"))


def e_spa(n_layers: int, length: int, repeats: float, gamma: float = LAST_GAMMA) -> Parametrization:
    """E-SPA without skips and norms, its rows rescaled for repeated tokens (SPA appendix B; 0: as if none were)."""
    p = _table(n_layers, length, "none", "none", "e-spa", skip=0.0, branch=1.0)
    return _shaped(p, decay_schedule(n_layers, gamma), Shaping(kind="e-spa", repeats=repeats))


def _table(
    n_layers: int, length: int, positions: str, placement: Placement, name: str, *, skip: float, branch: float
) -> Parametrization:
    # eps 0 and no final norm: what is drawn is the stream; without a head gradients arrive white
    fields: dict[str, Any] = {
        "kind": "decoder", "n_layers": n_layers, "d_model": HEADS, "n_heads": HEADS, "seq_len": length,
        "positions": positions, "norm": "rmsnorm", "norm_placement": placement, "norm_eps": 0.0, "final_norm": False,
        "bias": False, "head": "none",
    }  # fmt: skip
    a = Architecture(**fields)
    keeps = a.d_model**-0.5
    p = blank(a, name).with_columns(weight__value=keeps, weight__output=keeps, skip=skip, branch=branch)
    return attention_only(replace(p, embedding=Embedding(token=1.0)))


def _shaped(p: Parametrization, schedule: FloatArray, shaping: Shaping) -> Parametrization:
    """Layer l takes the kernel from schedule[l] to schedule[l + 1]."""
    attention = rows_where(p, lambda kind: kind.attends)
    before, after = (np.where(attention, schedule[p.layer + step], 0.0) for step in (0, 1))
    return replace(p.with_columns(shape_in=before, shape_out=after), shaping=shaping)
