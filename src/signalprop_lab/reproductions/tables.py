"""TGS v1 tables 20 (component formulas) and 24 (FLOPs)."""

from __future__ import annotations

import numpy as np

from signalprop.network.architecture import Architecture
from signalprop.results.cost import train_flops
from signalprop_lab.reproductions.result import Check, Curve, Findings, Panel, Settings

PAPER_LARGEST, PAPER_ATTENTION = 10.0, 44.5  # per cent, 99th percentile: v1 appendix E, Table 20


def table_20(settings: Settings) -> Findings:
    """Errors of the component formulas, at three percentiles."""
    from signalprop_lab.verification.verify import PAPER_TABLE_20, verify

    names = list(PAPER_TABLE_20)
    done = 0

    def told(_: str) -> None:
        nonlocal done
        done += 1
        settings.progress(done, len(names))

    effort = settings.pick("default", "thorough")
    report = verify(names, effort=effort, seed=settings.seed, progress=told)
    rows = [row for row in report.rows if row.paper is not None]
    exempt = ("attention", "gradient variance")
    largest = max((row for row in rows if (row.component, row.quantity) != exempt), key=lambda row: row.percentiles[2])
    attention = next(row for row in rows if (row.component, row.quantity) == exempt)
    worse = [f"{row.component} {row.quantity}" for row in rows if row.standing == "worse"]
    checks = (
        Check("cells whose error is above Table 20's by more than the simulation's", "Table 20", len(worse), high=0),
        Check(
            f"largest error at the 99th percentile but for attention's gradient ({largest.component}, "
            f"{largest.quantity}), %",
            "at most 10 (v1 appendix E)",
            largest.percentiles[2],
            high=PAPER_LARGEST,
            standard_error=largest.standard_error,
        ),
        Check(
            "attention, gradient variance, 99th percentile, %",
            "44.5",
            attention.percentiles[2],
            high=PAPER_ATTENTION,
            standard_error=attention.standard_error,
        ),
    )
    x = np.arange(1.0, len(rows) + 1)
    panels = tuple(
        Panel(f"Error at the {name} percentile, {len(rows)} cells of Table 20", "cell", "error, %", (
            Curve("ours", x, np.maximum([row.percentiles[i] for row in rows], 0.01), "measured"),
            Curve("Table 20", x, np.maximum([row.paper[i] for row in rows if row.paper], 0.01), "paper"),
        ), log_y=True)
        for i, name in ((0, "50th"), (2, "99th"))
    )  # fmt: skip
    configurations = sorted({row.configurations for row in rows})
    reduced = f"{' or '.join(map(str, configurations))} configurations per component, drawn from the ranges of Table 21"
    notes = (
        "Formulas are this library's, with the papers' errata mended; cells that both call 0 are drawn at 0.01. "
        "Cells from "
        "left to right: " + ", ".join(f"{row.component} {row.quantity}" for row in rows) + ".",
    ) + ((f"Above Table 20: {', '.join(worse)}.",) if worse else ())
    return Findings(checks, reduced, panels, notes, {"rows": report.as_json()["rows"]})


# v1 Table 24: layers, width, extra FLOPs in per cent over the layers of width 1024 beside it. What it prints as 784
# layers of width 128 and 384 of width 128 are 768 and of width 256, as in Table 4.
PAPER_TABLE_24 = (
    (48, 512, 12, -2.5),
    (192, 256, 12, 6.3),
    (768, 128, 12, 30.6),
    (96, 512, 24, 2.3),
    (384, 256, 24, 14.5),
)
PRINTED_24 = ((784, 128, 12, 30.6), (384, 128, 24, 14.5))
_ROUNDING = 0.06  # of a table with one digit, and of ours


def extra_flops(n_layers: int, d_model: int, base_layers: int) -> float:
    """Per cent of FLOPs that BERT of a shape takes more than `base_layers` of width 1024; ELECTRA's accounting."""

    def total(n: int, d: int) -> float:
        return train_flops(Architecture.preset("bert-base", n_layers=n, d_model=d), 256, 1_000_000)["total"]

    return 100 * (total(n_layers, d_model) / total(base_layers, 1024) - 1)


def table_24(settings: Settings) -> Findings:
    """FLOPs of deep narrow models over shallow wide ones of as many weights."""
    del settings  # exact at any scale
    checks = tuple(
        Check(
            f"extra FLOPs of {n} layers of width {d} over {base} of 1024, %",
            f"{paper:+.1f}",
            extra_flops(n, d, base),
            paper - _ROUNDING,
            paper + _ROUNDING,
        )
        for n, d, base, paper in PAPER_TABLE_24
    )
    notes = tuple(
        f"The table prints {n} layers of width {d} with {paper:+.1f} %, which would be "
        f"{extra_flops(n, d, base):+.1f} %: a "
        "misprint, Table 4 has the shape used above."
        for n, d, base, paper in PRINTED_24
    )
    panels = tuple(
        Panel(f"FLOPs over {base} layers of width 1024, N d² equal", "layers", "extra FLOPs, %", (
            Curve("ours", np.array([n for n, _, b, _ in PAPER_TABLE_24 if b == base], float),
                  np.array([check.ours for check, row in zip(checks, PAPER_TABLE_24, strict=True) if row[2] == base]),
                  "measured"),
            Curve("Table 24", np.array([n for n, _, b, _ in PAPER_TABLE_24 if b == base], float),
                  np.array([extra for _, _, b, extra in PAPER_TABLE_24 if b == base]), "paper"),
        ), log_x=True)
        for base in (12, 24)
    )  # fmt: skip
    return Findings(checks, "nothing: counted exactly", panels, notes)
