"""How signals grow with depth, for every registered scheme, and three things that the papers show: docs/growth.md.

python -m benchmarks.growth              # predict (a few minutes), write the page
python -m benchmarks.growth --measure    # also simulate the networks of its second half (docs/growth.json)
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from signalprop.data.batches import Batch, load_text, text_batch, word_ids
from signalprop.errors import InputError
from signalprop.files.storage import read_json, write_json, write_text
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.results.profile import Profile
from signalprop.schemes import SCHEMES, scheme
from signalprop.theory.growth import fixed_point
from signalprop_lab.reproductions.correlation import paper_fixed_point
from signalprop_lab.reproductions.orders import DEPTHS, TABLE_3, Orders, encoder, orders

PAGE = Path("docs/growth.md")
STORE = Path("docs/growth.json")
SCHEMA = "signalprop/growth/1"
QUANTITIES = ("forward", "gradient", "sensitivity_mean", "sensitivity_median")


# --- orders -----------------------------------------------------------------------------------------------------------


def all_orders() -> Iterator[Orders]:
    """Every registered scheme, pre- and post-norm; once where a scheme has a placement of its own."""
    for name in sorted(SCHEMES):
        seen = set()
        for asked in ("pre", "post"):
            row = orders(name, asked)
            print(f"{name}, {asked}: {row.laws or row.refused}", flush=True)
            if (row.placement, row.refused) not in seen and ("", row.refused) not in seen:
                seen.add(("" if row.refused else row.placement, row.refused))
                yield row


def orders_table(rows: Sequence[Orders]) -> list[str]:
    """The table of fitted laws, with the paper's beside them."""
    lines = [
        "| scheme | norm | forward variance | gradient, first over last | sensitivity, mean | median | TGS Table 3 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row.refused:
            continue
        printed = TABLE_3.get((row.scheme, row.placement), ("", "", ""))
        named = zip(("forward", "gradient", "sensitivity"), printed, strict=True)
        paper = "; ".join(f"{what} {law}" for what, law in named if law)
        laws = " | ".join(math_of(row.laws[key]) for key in QUANTITIES)
        lines.append(f"| `{row.scheme}` | {row.placement} | {laws} | {math_of(paper)} |")
    return lines


def math_of(text: str) -> str:
    """Braces, which only mathematics needs, taken out."""
    return text.replace("{", "(").replace("}", ")")


# --- what the papers show ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Show:
    """Networks of one kind, as predicted and as simulated.

    Attributes:
        name: key in the store. what: row name on the page. gaussian: tokens are Gaussian, with the same average
            correlations as the text's; else real text.
    """

    name: str
    what: str
    parametrization: Parametrization
    n_seeds: int
    gaussian: bool = False
    backward: bool = False

    def inputs(self) -> InputStatistics:
        """Statistics of what the networks read."""
        text = _text(self.parametrization.architecture)
        statistics = text.statistics(self.parametrization.architecture)
        if not self.gaussian:
            return statistics
        profile = predict(self.parametrization, statistics, fidelity="moments")
        assert profile.gradient is not None
        return InputStatistics(
            kind="stream",
            variance=profile.input["variance"],
            token_correlation=profile.input["token_correlation"],
            target_correlation=float(profile.gradient["stream_out"].token_correlation[-1]),
            loss_fraction=1.0,
        )

    def predicted(self) -> Profile:
        """The closed-form moments."""
        return predict(self.parametrization, self.inputs(), fidelity="moments", backward=self.backward)

    def measured(self) -> dict[str, Any]:
        """Simulated networks: correlation after every layer, gradient growth, with standard errors."""
        from signalprop.measurement.simulation import simulate

        data: dict[str, Any] = (
            {"inputs": self.inputs()} if self.gaussian else {"batch": _text(self.parametrization.architecture)}
        )
        found = simulate(
            self.parametrization, n_seeds=self.n_seeds, seed=100, batch_size=1, backward=self.backward, **data
        )
        last = found.forward["stream_out"]
        assert last.token_correlation_se is not None
        out: dict[str, Any] = {
            "n_seeds": self.n_seeds,
            "r": np.round(last.token_correlation[1::2], 5).tolist(),
            "r_se": np.round(last.token_correlation_se[1::2], 5).tolist(),
        }
        if found.gradient is not None:
            first = found.gradient["stream_in"]
            assert first.variance_se is not None
            out |= {"growth": float(first.variance[0]), "growth_se": float(first.variance_se[0])}
        return out


def _text(a: Architecture) -> Batch:
    """One window of the default text."""
    return text_batch(a, word_ids(load_text(), a.vocab_size), 1, 0, "sotu")


def query_key_shows() -> list[Show]:
    """Queries and keys at twice Xavier's standard deviation."""
    out = []
    for n, seeds in ((24, 48), (192, 8)):
        p = scheme("xavier", qk_gain=2.0)(encoder(n, "pre"))
        out.append(Show(f"qk-text-{n}", f"{n} layers, real text", p, seeds, backward=True))
        out.append(Show(f"qk-gaussian-{n}", f"{n} layers, Gaussian tokens", p, seeds, gaussian=True, backward=True))
    return out


def noci_values(n_layers: int, placement: str, dropout: float) -> Parametrization:
    """Xavier's weights, but values and outputs at Noci et al.'s initialisation (variance 1/fan_out of a head's matrix).

    TGS v1 appendix F: what makes tokens collapse is not the depth alone but attention that outweighs feed-forwards.
    """
    a = encoder(n_layers, placement, dropout)
    theirs = scheme("noci")(a).weights
    return scheme("xavier")(a).with_columns(weight__value=theirs["value"], weight__output=theirs["output"])


COLLAPSE_LAYERS, COLLAPSE_AT = 48, (1, 3, 6, 12, 24, 48)


def collapse_shows() -> list[Show]:
    """Tokens that become one: without dropout, and with."""
    out = []
    for placement in ("pre", "post"):
        for dropout in (0.0, 0.1):
            what = f"{placement}-norm, p = {dropout:g}"
            p = noci_values(COLLAPSE_LAYERS, placement, dropout)
            out.append(Show(f"noci-{placement}-{dropout:g}", f"values and outputs at Noci's, {what}", p, 4))
            p = scheme("xavier")(encoder(COLLAPSE_LAYERS, placement, dropout))
            out.append(Show(f"xavier-{placement}-{dropout:g}", f"all Xavier, {what}", p, 4))
    return out


# --- the page ---------------------------------------------------------------------------------------------------------


def query_key_lines(measured: dict[str, Any]) -> list[str]:
    lines = [
        "| network | predicted | measured | networks |",
        "| --- | --- | --- | --- |",
    ]
    for show in query_key_shows():
        gradient = show.predicted().gradient
        assert gradient is not None
        found = measured[show.name]
        predicted = math.exp(float(gradient["stream_in"].log_variance[0]))
        lines.append(
            f"| {show.what} | {predicted:.0f} | {found['growth']:.0f} ± {100 * found['growth_se']:.0f} % "
            f"| {found['n_seeds']} |"
        )
    return lines


def collapse_lines(measured: dict[str, Any]) -> list[str]:
    lines = [
        "| network | token correlation after layer | " + " | ".join(map(str, COLLAPSE_AT)) + " |",
        "| --- | --- |" + " --- |" * len(COLLAPSE_AT),
    ]
    for show in collapse_shows():
        r = show.predicted().forward["stream_out"].token_correlation[1::2]
        found = measured[show.name]
        at = [layer - 1 for layer in COLLAPSE_AT]
        lines.append(f"| {show.what} | predicted | " + " | ".join(f"{r[i]:.3f}" for i in at) + " |")
        numbers = [f"{found['r'][i]:.3f} ± {found['r_se'][i]:.3f}" for i in at]
        lines.append("| | measured | " + " | ".join(numbers) + " |")
    return lines


def fixed_point_lines(measured: dict[str, Any]) -> list[str]:
    lines = [
        f"| Xavier, p = 0.1 | fixed point r* | predicted after {COLLAPSE_LAYERS} layers | measured there "
        "| predicted after 10,000 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for placement in ("pre", "post"):
        r = fixed_point(scheme("xavier")(encoder(1, placement))).token_correlation
        shows = {show.name: show for show in collapse_shows()}
        show = shows[f"xavier-{placement}-0.1"]
        here = show.predicted().forward["stream_out"].token_correlation[-1]
        deep = predict(scheme("xavier")(encoder(10_000, placement)), fidelity="moments", backward=False)
        found = measured[show.name]
        lines.append(
            f"| {placement}-norm | {r:.3f} | {here:.3f} | {found['r'][-1]:.3f} ± {found['r_se'][-1]:.3f} "
            f"| {deep.forward['stream_out'].token_correlation[-1]:.3f} |"
        )
    return lines


def papers_size() -> str:
    """Growth over 192 layers by the correlation of the gradient that arrives at the top."""
    found: dict[float, list[str]] = {1.0: [], 2.0: []}
    for gain, numbers in found.items():
        for r_g in (0.03, 0.1, 0.3):
            p = scheme("xavier", qk_gain=gain)(encoder(192, "pre"))
            inputs = InputStatistics(kind="stream", token_correlation=0.3, target_correlation=r_g)
            gradient = predict(p, inputs, fidelity="moments").gradient
            assert gradient is not None
            numbers.append(f"{math.exp(float(gradient['stream_in'].log_variance[0])):,.0f}")
    return f"{', '.join(found[2.0])} at r_g = 0.03, 0.1, 0.3 (at Xavier's own: {', '.join(found[1.0])})"


def page(rows: Sequence[Orders], measured: dict[str, Any]) -> str:
    """docs/growth.md."""
    theirs, xavier = (2.2, 0.4), (1 / 0.9, 0.32 / 0.9)
    roots = [paper_fixed_point(*c, by_variance=way) for c in (theirs, xavier) for way in (False, True)]
    refused = "; ".join(f"`{row.scheme}` ({row.refused})" for row in rows if row.refused)
    return TEXT.format(
        depths=", ".join(f"{n:,}" for n in DEPTHS),
        orders="\n".join(orders_table(rows)),
        refused=f"Without numbers here: {refused}.\n\n" if refused else "",
        query_key="\n".join(query_key_lines(measured)),
        papers_size=papers_size(),
        collapse="\n".join(collapse_lines(measured)),
        fixed_point="\n".join(fixed_point_lines(measured)),
        roots=[f"{root:.3f}" for root in roots],
    )


TEXT = """# Growth with depth

Written by `python -m benchmarks.growth`. The model of this page is a bidirectional encoder with ReLU, width 256, 128
tokens, dropout 0.1 unless stated. TGS is *Transformers Get Stable* (Kedia et al., 2024).

## Orders, from predictions

Closed-form moments at {depths} layers. A power law shows its exponent at the deep end, an exponential its rate per
layer; O(log N) has a local power that falls like 1/ln N, O(1) one below 0.02. An exponent that is neither 0 nor 1 may
still be on its way: a logarithm in the stream's variance looks like a small power. The gradient is that of the first
stream over the last; sensitivity (TGS section 4.6) is 2N times the mean, or median, over sublayers of branch over
stream variance, and 0 where branches start at 0. Schemes that own their placement have one row.

{orders}

{refused}Where this differs from TGS Table 3: the exponential of vanilla post-norm is an effect of dropout (without it
the rate is 1), and it is a decay; DS-Init's sensitivity falls like 1/N only for the median sublayer, since the first
layers keep the mean at O(1); LayerScale's is β² N, not β N.

## Queries and keys at twice Xavier

Gradient variance at the first stream over the last, pre-norm; the standard deviation of queries and keys is twice
Xavier's, so scores have 16 times their variance.

{query_key}

Gaussian tokens have the text's average correlations. What they leave open is the overlap of two rows of weights this
hard, which is [an interpolation](theory/attention.md); what text adds to it is that some tokens are equal and others
are not, which an average over pairs cannot say. TGS (section 3.3) reports a growth of 10⁴ over 192 layers. It is
nearly proportional to the gradient's token correlation at the top, r_g, which is not given there; for inputs with
r = 0.3 we predict {papers_size}.

## Rank collapse

Values and outputs at the initialisation of Noci et al. (2022) (1/fan_out of one head's matrix, TGS v1 appendix F) give
attention four times the weight that Xavier gives it here. Without dropout all tokens become one; dropout stops that.

{collapse}

## The fixed point under dropout

{fixed_point}

TGS v1 appendix F prints 0.88. Its equation has the root {roots[0]} with the constants it states (C1 = 2.2, C2 = 0.4),
and {roots[1]} if attention is weighed by its variance C1 r. The Xavier initialisation that the paper defines has C1 =
1.11, C2 = 0.356, which gives {roots[2]} and {roots[3]}. Ours is the last one for many tokens, and differs a little at
128. Pre-norm streams approach it as a power of depth, post-norm ones exponentially
([derivation](theory/network.md#fixed-points-growth-and-strength)).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="simulate the networks of the page's second half anew")
    if parser.parse_args().measure:
        shows = {}
        for show in [*collapse_shows(), *query_key_shows()]:
            print(show.what, flush=True)
            shows[show.name] = show.measured()
        write_json(STORE, {"schema": SCHEMA, "shows": shows})
    stored = read_json(STORE)
    if stored.get("schema") != SCHEMA:
        raise InputError(f"{STORE} has schema {stored.get('schema')!r}, expected {SCHEMA!r}; run with --measure")
    write_text(PAGE, page(list(all_orders()), stored["shows"]))


if __name__ == "__main__":
    main()
