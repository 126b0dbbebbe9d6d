"""Training runs that are killed, stopped, starved of disk and damaged: what is lost, and what goes on from where.

    python -m benchmarks.training_faults [KILLS]

Prints a Markdown table. A small built GPT-2 with dropout is trained once undisturbed; then again and again with SIGKILL
at random moments (or SIGTERM, or files cut short between a stop and a restart) until it is done, and the logs and the
trained weights are compared bit by bit. Every run is a process of its own.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from safetensors.torch import load_file

import trained
from signalprop.training.checkpoints import WEIGHTS

SAVE = 3  # steps from one checkpoint to the next
PER_RUN = 5  # faults, after which a run may end


def trained_steps(out: Path) -> int:
    """The last step that was logged; the logs have a line for every step."""
    path = out / "metrics.jsonl"
    if not path.is_file():
        return 0
    return sum('"loss"' in line for line in path.read_text(errors="replace").splitlines())


def disturbed(folder: Path, kind: str, times: int, seed: int) -> dict[str, float | str]:
    """Disturb a run `times` times, starting it anew where it ends before; what it cost."""
    chance = random.Random(seed)
    done, lost, worst, runs, same = 0, 0, 0, 0, 0
    while done < times:
        runs += 1
        out, until = folder / f"{kind}-{runs}", min(done + PER_RUN, times)
        while True:
            process = trained.start(recipe(folder), out, trained.stderr_of(out), resume=True)
            if done < until:
                reached = trained_steps(out)
                target = chance.randint(reached, trained.STEPS)
                while process.is_alive() and trained_steps(out) < target:
                    time.sleep(0.001)
                process.join(chance.uniform(0, 0.3))  # behind the last step there is more to be disturbed
            else:
                process.join(300)
            if not process.is_alive():
                if process.exitcode != 0:
                    raise SystemExit(trained.stderr_of(out).read_text())
                break
            before = trained_steps(out)
            if kind == "SIGTERM":
                trained.stop(process)
                before = trained_steps(out)
            else:
                process.kill()
                process.join()
            done += 1
            if kind == "SIGKILL, newest file cut":
                newest = max((out / "checkpoints").glob("checkpoint-*"), key=lambda p: int(p.name[11:]), default=None)
                if newest is not None:
                    victim = chance.choice(sorted(newest.iterdir()))
                    with victim.open("r+b") as file:
                        file.truncate(chance.randint(0, victim.stat().st_size - 1))
            last = max(usable(out), default=0)
            lost += max(before - last, 0)
            worst = max(worst, before - last)
        same += trained.same_course(folder / "whole", out) and same_weights(folder / "whole", out)
        shutil.rmtree(out)
    return {"kind": kind, "faults": done, "runs": runs, "same": same, "lost": lost / done, "worst": worst}


def usable(out: Path) -> list[int]:
    from signalprop.training.checkpoints import problem_of, step_of

    return [step_of(item) for item in (out / "checkpoints").glob("checkpoint-*") if problem_of(item) is None]


def same_weights(one: Path, other: Path) -> bool:
    a, b = (load_file(path / "final" / WEIGHTS) for path in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def recipe(folder: Path) -> dict[str, object]:
    return trained.recipe_of(folder, cadence={"log": 1, "save": SAVE, "evaluate": 10, "signal": 8})


def main(times: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        trained.run(recipe(folder), folder / "whole")
        print("| fault | faults | runs finished | the same bit by bit | steps lost, mean | at most |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        for kind, share in (("SIGKILL", 1.0), ("SIGTERM", 0.2), ("SIGKILL, newest file cut", 0.4)):
            row = disturbed(folder, kind, max(1, round(share * times)), seed=1)
            shown = [row["kind"], row["faults"], row["runs"], row["same"], f"{row['lost']:.2f}", row["worst"]]
            print(f"| {' | '.join(map(str, shown))} |", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
