"""The search on a ladder: what it ends with, whatever the costs are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from signalprop_lab.training.ladder import best_rung, further, on_edge, rungs, wanted, wanted_of_cells
from signalprop_lab.training.plateau import left_at
from signalprop_lab.training.run import train
from signalprop_lab.training.sweep_definition import Sweep, Tune

LADDERS = {
    "1, 3": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "2, 6": (2e-4, 6e-4, 2e-3, 6e-3, 2e-2, 6e-2),
    "decades": (1e-4, 1e-3, 1e-2, 1e-1),
    "halves": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0),
}


def tuned(tune, seeds, seeds_at="best"):
    """What a sweep says of its search."""
    return Sweep.model_construct(tune=tune, seeds=seeds, seeds_at=seeds_at)


def search(sweep, cost):
    """Do what is wanted until nothing is; the costs, and the order in which runs were wanted."""
    costs, order = {}, []
    while runs := wanted(sweep, costs):
        assert len({(run.rate, run.seed) for run in runs}) == len(runs)
        for run in runs:
            assert (run.rate, run.seed) not in costs
            costs[run.rate, run.seed] = cost(run.rate, run.seed)
            order.append(run)
        assert len(costs) < 1000
    return costs, order


@pytest.mark.parametrize("ladder", LADDERS.values(), ids=LADDERS)
def test_ladders_go_on_as_they_began(ladder) -> None:
    for n in range(2, len(ladder)):
        assert further(ladder[:n], up=True) == pytest.approx(ladder[n], rel=1e-9)
        assert further(ladder[-n:], up=False) == pytest.approx(ladder[-n - 1], rel=1e-9)


@given(
    st.lists(st.floats(1e-8, 1e8), min_size=2, max_size=6, unique_by=lambda x: round(math.log(x), 1)).map(sorted),
)
def test_further_rungs_lie_beyond(values) -> None:
    assert further(values, up=True) > values[-1]
    assert 0 < further(values, up=False) < values[0]


costs_by_rung = st.functions(
    like=lambda rate, seed: None, returns=st.one_of(st.floats(-10, 10), st.just(math.inf)), pure=True
)


@given(
    cost=costs_by_rung,
    n=st.integers(1, 5),
    extend=st.integers(0, 3),
    seeds=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(tuple),
    seeds_at=st.sampled_from(["best", "all"]),
)
def test_what_a_search_ends_with(cost, n, extend, seeds, seeds_at) -> None:
    tune = Tune(values=LADDERS["1, 3"][:n], extend=extend if n > 1 else 0)
    sweep = tuned(tune, seeds, seeds_at)
    costs, order = search(sweep, cost)
    best = best_rung(sweep, costs)
    tuning = seeds if seeds_at == "all" else seeds[:1]
    assert {(rate, seed) for rate in tune.values for seed in tuning} <= costs.keys()
    assert {(best, seed) for seed in seeds} <= costs.keys()
    mean = {rate: sum(costs[rate, seed] for seed in tuning) for rate in rungs(tune, costs)}
    assert mean[best] == min(mean.values())
    tried = rungs(tune, costs)
    assert sum(rate > tune.values[-1] for rate in tried) <= tune.extend
    assert sum(rate < tune.values[0] for rate in tried) <= tune.extend
    inner = tried[0] < best < tried[-1]
    assert on_edge(sweep, costs) is not inner
    if not inner and best == tried[-1] != tried[0]:
        assert sum(rate > tune.values[-1] for rate in tried) == tune.extend
    stages = [run.stage for run in order]
    assert stages == sorted(stages)


WARM_UPS = ("short", "middle", "long")


@given(
    cost=st.functions(like=lambda warm_up, rate: None, returns=st.floats(-10, 10), pure=True), extend=st.integers(0, 2)
)
def test_rate_and_warm_up_are_tuned_until_nothing_around_is_better(cost, extend) -> None:
    sweep = Sweep(
        schema="signalprop/sweep/1",
        name="warm-up",
        base="bytes-decoder",
        axes={"method": {"a": {}}, "warm-up": {label: {} for label in WARM_UPS}},
        best_of=["warm-up"],
        tune={"values": [0.1, 0.3], "extend": extend},
        seeds=[0, 1, 2],
    )
    costs: dict[str, dict] = {f"a / {label}": {} for label in WARM_UPS}
    seeds_begun = False
    while open_runs := [(name, run) for name, runs in wanted_of_cells(sweep, costs).items() for run in runs]:
        name, run = open_runs[0]
        assert (run.rate, run.seed) not in costs[name]
        assert run.seed or not seeds_begun  # the search is over before any other seed
        seeds_begun = run.seed > 0
        costs[name][run.rate, run.seed] = cost(name, run.rate)
    of_first = {(name, rate): value for name, runs in costs.items() for (rate, seed), value in runs.items() if not seed}
    (best,) = {(name, rate) for name, runs in costs.items() for rate, seed in runs if seed}
    assert of_first[best] == min(of_first.values())
    assert {seed for rate, seed in costs[best[0]] if rate == best[1]} == {0, 1, 2}
    i = WARM_UPS.index(best[0].removeprefix("a / "))
    for label in WARM_UPS[max(i - 1, 0) : i] + WARM_UPS[i + 1 : i + 2]:
        assert (f"a / {label}", best[1]) in of_first
    own = sorted(rate for name, rate in of_first if name == best[0])
    assert best[1] not in (own[0], own[-1]) or sum(not 0.1 <= rate <= 0.3 for rate in own) >= extend


# --- when a run has left the plateau at chance


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([3.0] * 20, None),
        ([3.0, 2.6] + [3.0] * 18, None),  # one lucky batch is no learning
        ([2.0] * 10, 50),  # not before there is a whole stretch
        ([3.0] * 10 + [2.85] * 10, 140),
    ],
)
def test_a_plateau_is_left_when_fifty_steps_are_below_chance(losses, step) -> None:
    lines = [{"step": 10 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]
    assert left_at([*lines, {"step": 5, "eval_loss": 0.0}], 3.0) == step


@pytest.mark.slow
def test_a_run_may_end_there(tmp_path: Path) -> None:
    changes = {
        "model.architecture.n_layers": 1,
        "model.architecture.norm_placement": "pre",
        "optimizer.learning_rate": 0.01,
        "budget.until_learning": "true",
        "cadence.signal": 0,
    }
    settings = [f"{key}={value}" for key, value in changes.items()]
    result = train("bytes-decoder", tmp_path / "run", settings=settings, progress=False, final=False)
    assert result.status == "finished"
    assert result.scores["plateau_steps"] == result.steps < 200
