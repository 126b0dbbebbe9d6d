"""Commands that are killed, stopped, starved of disk and lied to about the time: what is lost.

    python -m benchmarks.faults [KIND ...] [--times 50] [--json docs/faults.json]
    python -m benchmarks.faults --page

Writes docs/faults.json and, from it, docs/faults.md; kinds that are not named stay as they were. Kinds: kills,
changes, workers, signals, disk, read-only, cut, clock. A tiny model is used, every command runs in a process of its
own, and what it leaves is compared with what an undisturbed command leaves. Full and read-only disks are small file
systems in memory, which only root can mount; the clock is set by faketime (Debian: apt-get install faketime).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import killing
from benchmarks.faults_page import page
from benchmarks.timing import machine, versions
from killing import Ended, Moment
from signalprop.files.storage import write_json, write_text

ROOT = Path(__file__).resolve().parents[1]
STORED, PAGE = ROOT / "docs" / "faults.json", ROOT / "docs" / "faults.md"
ASKED = ("train", "sweep", "diagnose", "fold", "apply", "report")  # commands that are killed most often
PER_RUN = 5  # faults, after which a training run or a sweep may end
Row = dict[str, Any]


class Ground:
    """Where commands are disturbed: their inputs, and what each leaves when it is not.

    Attributes:
        top: a directory. given: the inputs. cases: the commands by name.
    """

    def __init__(self, top: Path, names: Sequence[str]) -> None:
        self.top, self.given = top, top / "given"
        killing.prepare(self.given)
        self.cases = {name: case for name, case in killing.cases(self.given).items() if name in (names or [name])}
        self._whole: dict[str, Ended] = {}

    def whole(self, name: str) -> Ended:
        """An undisturbed command; it runs once, in the directory `folder_of` it."""
        if name not in self._whole:
            ended = killing.run(self.cases[name].arguments, self.folder_of(name))
            assert ended.status == 0, ended.err
            self._whole[name] = ended
        return self._whole[name]

    def folder_of(self, name: str) -> Path:
        return self.top / f"{name}-whole"

    def differences(self, name: str, folder: Path) -> list[str]:
        """Files on which a directory and that of the undisturbed command do not agree."""
        self.whole(name)
        return killing.different(self.folder_of(name), folder, self.cases[name].written)


# --- kill -9 ----------------------------------------------------------------------------------------------------------


def empty_row(name: str) -> Row:
    return {"command": name, "faults": 0, "early": 0, "amid": 0, "late": 0, "reported": 0, "lost": 0, "broken": 0,
            "left": 0, "finished": 0, "same": 0, "problems": []}  # fmt: skip


def look(ground: Ground, name: str, folder: Path, ended: Ended, row: Row) -> None:
    """Count what a command that was killed has left."""
    case, whole = ground.cases[name], ground.whole(name)
    row["faults"] += 1
    phase = "early" if not ended.changes else "late" if len(ended.changes) >= len(whole.changes) else "amid"
    row[phase] += 1
    found = killing.broken(folder)
    row["broken"] += len(found)
    row["left"] += bool(killing.leftovers(folder))
    row["problems"] += found
    for path in killing.said(ended):
        row["reported"] += 1
        compared = [item for item in case.written if item == path or item.startswith(f"{path}/")]
        if name == "sweep":  # of what there was until then
            compared = []
        gone = [] if (folder / path).exists() else [path]
        gone += killing.different(ground.folder_of(name), folder, compared)
        row["lost"] += bool(gone)
        row["problems"] += [f"{path} was reported, but {item} is not there as it should be" for item in gone]


def compare(ground: Ground, name: str, folder: Path, ended: Ended, row: Row) -> None:
    """Count a command that was run again until its end."""
    row["finished"] += 1
    problems = [f"status {ended.status}: {ended.err[-300:]}"] if ended.status else []
    problems += killing.broken(folder) + ground.differences(name, folder)
    row["same"] += not problems
    row["problems"] += problems


def killed(ground: Ground, name: str, times: int, seed: int) -> Row:
    """Kill a command at random moments; run it again each time."""
    chance, row, whole = random.Random(seed), empty_row(name), ground.whole(name)
    while row["faults"] < times:
        folder = ground.top / f"{name}-killed"
        ended = killing.run(ground.cases[name].arguments, folder, killing.some_moment(chance, whole))
        if ended.killed:
            look(ground, name, folder, ended, row)
            compare(ground, name, folder, killing.remade(ground.cases[name], folder), row)
        shutil.rmtree(folder)
    return row


def killed_and_resumed(ground: Ground, name: str, times: int, seed: int) -> Row:
    """Kill a command that goes on where it was, several times before it may end."""
    chance, row, whole = random.Random(seed), empty_row(name), ground.whole(name)
    row |= {"steps_lost": 0, "most_steps_lost": 0}
    case = ground.cases[name]
    while row["faults"] < times:
        folder, until = ground.top / f"{name}-killed", min(row["faults"] + PER_RUN, times)
        runs: set[str] = set()
        while True:
            moment = killing.some_moment(chance, whole) if row["faults"] < until else None
            ended = killing.run(case.arguments, folder, moment)
            again = runs & killing.runs_said(ended)
            row["lost"] += len(again)
            row["problems"] += [f"the run {run} was reported twice" for run in again]
            runs |= killing.runs_said(ended)
            if not ended.killed:
                break
            look(ground, name, folder, ended, row)
            if name == "train":
                lost = _steps_lost(folder / "run")
                row["steps_lost"] += lost
                row["most_steps_lost"] = max(row["most_steps_lost"], lost)
        row["reported"] += len(runs)
        compare(ground, name, folder, ended, row)
        shutil.rmtree(folder)
    return row


def _steps_lost(out: Path) -> int:
    """Steps that are in the log, but after the newest whole checkpoint."""
    from signalprop_lab.training.checkpoints import problem_of, step_of

    try:
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return 0
    kept = [step_of(item) for item in (out / "checkpoints").glob("checkpoint-*") if problem_of(item) is None]
    return max(sum('"loss"' in line for line in lines) - max(kept, default=0), 0)


def kills(ground: Ground, times: int) -> list[Row]:
    """Every command, killed at random moments."""
    rows = []
    for name in ground.cases:
        resumed = name in ("train", "sweep")
        n = times if name in ASKED else max(1, times // 2)
        row = (killed_and_resumed if resumed else killed)(ground, name, n, seed=1)
        rows.append(row)
        tell(row)
    return rows


def changes(ground: Ground, times: int) -> list[Row]:
    """Every command, killed in place of each of its changes to files; of training and sweeps, of `times` of them."""
    rows = []
    for name, case in ground.cases.items():
        row, n = empty_row(name), len(ground.whole(name).changes)
        row["of"] = n
        every = range(1, n + 1)
        for change in every if n <= times else sorted(random.Random(2).sample(every, times)):
            folder = ground.top / f"{name}-killed"
            ended = killing.run(case.arguments, folder, Moment(change))
            if ended.killed:  # the number of changes of a sweep varies with the clock
                look(ground, name, folder, ended, row)
                compare(ground, name, folder, killing.remade(case, folder), row)
            shutil.rmtree(folder)
        rows.append(row)
        tell(row)
    return rows


def workers(ground: Ground, times: int) -> list[Row]:
    """A sweep with two processes, of which one, the one that started them, or all are killed."""
    rows = []
    case = ground.cases["sweep"]
    two = (*case.arguments, "--jobs", "2")
    chance = random.Random(3)
    for whom in ("one of two", "the parent", "all three"):
        row = empty_row(whom)
        for _ in range(max(1, times // 10)):
            folder = ground.top / "sweep-workers"
            running = killing.start(two, folder)
            _wait(lambda: len(list(folder.glob("sweep/runs/*/*/recipe.yaml"))) >= chance.randint(1, 3))  # noqa: B023
            time.sleep(chance.uniform(0, 1))
            pids = [pid for pid in _children(running.process.pid) if "spawn_main" in _command_line(pid)]
            if whom == "all three":
                running.kill()
            else:
                os.kill(running.process.pid if whom == "the parent" else chance.choice(pids), signal.SIGKILL)
            ended = running.end()
            _wait(lambda: not any(_command_line(pid) for pid in pids))  # noqa: B023
            row["faults"] += 1
            row["amid"] += 1
            found = killing.broken(folder)
            row["broken"] += len(found)
            row["problems"] += found
            before = killing.runs_said(ended)
            row["reported"] += len(before)
            again = killing.run(case.arguments, folder)
            row["lost"] += len(before & killing.runs_said(again))
            compare(ground, "sweep", folder, again, row)
            shutil.rmtree(folder)
        rows.append(row)
        tell(row)
    return rows


def _wait(condition: Callable[[], bool], seconds: float = 600) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise SystemExit("this takes too long")
        time.sleep(0.01)


def _children(pid: int | None) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command_line(pid: int) -> str:
    """Of a living process; "" of any other."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return ""


# --- SIGTERM and Ctrl-C -----------------------------------------------------------------------------------------------


def signals(ground: Ground, times: int) -> list[Row]:
    """Every command, asked to stop at random moments: one line, a status that says so, nothing left behind."""
    rows = []
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        for name, case in ground.cases.items():
            row = empty_row(name) | {"signal": number.name, "statuses": {}}
            chance, whole = random.Random(4), ground.whole(name)
            for _ in range(max(1, times // 5)):
                folder = ground.top / f"{name}-stopped"
                ended = killing.run(case.arguments, folder, killing.some_moment(chance, whole, number))
                if ended.status != 0:
                    look(ground, name, folder, ended, row)
                    row["statuses"][str(ended.status)] = row["statuses"].get(str(ended.status), 0) + 1
                    # a run that trains stops after its step, and says so in its result
                    row["problems"] += _unclear(ended, {status} | {"train": {1}, "sweep": {130}}.get(name, set()))
                    compare(ground, name, folder, killing.remade(case, folder), row)
                shutil.rmtree(folder)
            rows.append(row)
            tell(row)
    return rows


def _unclear(ended: Ended, statuses: set[int]) -> list[str]:
    """What is wrong with how a command has ended: its status, or what it said."""
    lines = [line for line in ended.err.splitlines() if line.startswith("signalprop: ")]  # a line of its own
    found = [] if ended.status in statuses else [f"status {ended.status}: {ended.err[-300:]}"]
    found += ["it said nothing"] if not lines and ended.status != 1 else []
    return found + ([f"a traceback: {ended.err[-600:]}"] if "Traceback" in ended.err else [])


# --- disks ------------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A file system in memory of so many bytes."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def disk(ground: Ground, times: int) -> list[Row]:
    """Every command, on disks that are full at another place each; then again, with room."""
    rows = []
    for name, case in ground.cases.items():
        ground.whole(name)
        folder = ground.top / f"{name}-disk"
        used = _bytes_on_disk(ground.folder_of(name))
        row = empty_row(name) | {"bytes": used}
        for i in range(1, times + 1):
            pages = max(1, round(used / 4096 * (i / times) ** 2))  # most of the bytes are those of one report
            with small_disk(folder, pages * 4096):
                ended = killing.run(case.arguments, folder)
                if ended.status != 0:
                    look(ground, name, folder, ended, row)
                    row["problems"] += _unclear(ended, {1, 2})
                    remount(folder, "size=64m")
                    compare(ground, name, folder, killing.remade(case, folder), row)
        rows.append(row)
        tell(row)
    return rows


def _bytes_on_disk(folder: Path) -> int:
    return sum(item.stat().st_blocks * 512 + 4096 * item.is_dir() for item in folder.rglob("*"))


def read_only(ground: Ground, times: int) -> list[Row]:
    """Every command, in a directory that cannot be written."""
    rows = []
    for name, case in ground.cases.items():
        row, folder = empty_row(name), ground.top / f"{name}-readonly"
        with small_disk(folder, 1 << 26):
            remount(folder, "ro")
            ended = killing.run(case.arguments, folder)
            row |= {"status": ended.status, "line": ended.err.strip().replace(str(ground.top), "")}
            row["faults"] = 1
            row["problems"] += _unclear(ended, {2})
            remount(folder, "rw")
            compare(ground, name, folder, killing.remade(case, folder), row)
        rows.append(row)
        tell(row)
    return rows


# --- damaged files ----------------------------------------------------------------------------------------------------


def cut(ground: Ground, times: int) -> list[Row]:
    """Files cut short at random places: a run and a sweep that go on from them, a model and results that are read."""
    rows = []
    for name, where in (
        ("train", "run/checkpoints/*/*"), ("train", "cache/*/*"), ("sweep", "sweep/study.log"),
        ("sweep", "sweep/runs/*/*/result.json"), ("sweep", "sweep/results.*"), ("fold", "given/applied/deep/*"),
        ("diagnose", "given/plain/*"), ("report", "given/p.json"), ("report", "given/run/*.json"),
    ):  # fmt: skip
        if name not in ground.cases:
            continue
        chance = random.Random(5)
        ground.whole(name)
        row = empty_row(name) | {"files": where.removeprefix("given/"), "refused": 0}
        for _ in range(max(1, times // 5)):
            folder = ground.top / f"{name}-cut"
            inputs = where.startswith("given/")
            shutil.copytree(ground.given if inputs else ground.folder_of(name), folder / "given" if inputs else folder)
            if name == "train":
                (folder / "run" / "result.json").unlink()  # it had done its last step
            files = [item for item in folder.glob(where) if item.is_file() and item.stat().st_size]
            victim = chance.choice(sorted(files))
            os.truncate(victim, chance.randrange(victim.stat().st_size))
            case = killing.cases(folder / "given")[name] if inputs else ground.cases[name]
            ended = killing.run(case.arguments, folder)
            row["faults"] += 1
            if ended.status == 2 and not _unclear(ended, {2}):
                row["refused"] += 1
            else:
                row["finished"] += 1
                problems = _unclear(ended, {0}) if ended.status else []
                problems += ground.differences(name, folder)
                row["same"] += not problems
                row["problems"] += [f"{victim.relative_to(folder)}: {problem}" for problem in problems]
            shutil.rmtree(folder)
        rows.append(row)
        tell(row)
    return rows


# --- the clock --------------------------------------------------------------------------------------------------------

_LIBRARY = "/usr/lib/*/faketime/libfaketime.so.1"
JUMPS = {"an hour back": "-3600", "an hour on": "+3600", "a day back": "-86400", "ten years on": "+315360000"}


def clock(ground: Ground, times: int) -> list[Row]:
    """Training and sweeps whose wall clock jumps in their midst; the clock that cannot jump goes on as it does."""
    library = next(iter(sorted(Path("/").glob(_LIBRARY[1:]))), None)
    if library is None:
        raise SystemExit("no faketime here: apt-get install faketime")
    rows = []
    for name in ("train", "sweep"):
        for jump, offset in JUMPS.items() if name in ground.cases else ():
            row = empty_row(name) | {"jump": jump}
            folder = ground.top / f"{name}-clock"
            folder.mkdir()
            times_file = ground.top / "offset"
            times_file.write_text("+0\n")
            environment = os.environ | {
                "LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(times_file), "FAKETIME_CACHE_DURATION": "1",
                "DONT_FAKE_MONOTONIC": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            }  # fmt: skip
            ground.whole(name)
            began = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, "-m", "signalprop", *ground.cases[name].arguments],
                cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            _wait(lambda: any(folder.glob("**/tensorboard/*")) or process.poll() is not None)  # noqa: B023
            times_file.write_text(f"{offset}\n")
            out, err = process.communicate(timeout=300)
            took = time.monotonic() - began
            ended = Ended(process.returncode, out, err, (), took)
            row["faults"] += 1
            compare(ground, name, folder, ended, row)
            row["problems"] += _impossible_times(folder, took)
            if not _jumped(folder):
                row["problems"].append("the jump came too late")
            shutil.rmtree(folder)
            rows.append(row)
            tell(row)
    return rows


def _jumped(folder: Path) -> bool:
    """Whether a run met the jump: TensorBoard's files have the time in their names."""
    stamps = [[int(file.name.split(".")[3]) for file in run.iterdir()] for run in folder.rglob("tensorboard")]
    return any(max(some) - min(some) > 1800 for some in stamps)


def _impossible_times(folder: Path, took: float) -> list[str]:
    """Durations and rates of runs that cannot be, as the whole thing took so many seconds."""
    found = []
    for path in folder.rglob("result.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        if not (0 <= result["seconds"] <= took and result["throughput"] and result["throughput"] > 0):
            found.append(f"{path.parent.name}: {result['seconds']} s, {result['throughput']} tokens/s of {took:.1f} s")
        for line in (path.parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            rate = json.loads(line).get("tokens_per_second", 1.0)
            found += [] if rate > 0 else [f"{path.parent.name}: {rate} tokens/s in {line[:40]}"]
    return found


# --- all of it -------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Ground, int], list[Row]]] = {
    "kills": kills, "changes": changes, "workers": workers, "signals": signals, "disk": disk, "read-only": read_only,
    "cut": cut, "clock": clock,
}  # fmt: skip


def tell(row: Row) -> None:
    """One line of progress."""
    shown = {key: value for key, value in row.items() if key != "problems"}
    print(shown, flush=True)
    for problem in row["problems"][:5]:
        print(f"    {problem}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--times", type=int, default=50, help="faults per command")
    parser.add_argument("--commands", nargs="*", default=[], metavar="NAME", help="only these commands")
    parser.add_argument("--json", type=Path, default=STORED)
    parser.add_argument("--page", action="store_true", help="run nothing")
    given = parser.parse_args()
    unknown = [kind for kind in given.kinds if kind not in KINDS]
    if unknown:
        parser.error(f"there is no kind {', '.join(unknown)}; there are {', '.join(KINDS)}")
    if not given.page:
        top = Path(tempfile.mkdtemp(prefix="faults-"))
        try:
            ground = Ground(top, given.commands)
            for kind in given.kinds or KINDS:
                print(f"== {kind}", flush=True)
                stored = json.loads(given.json.read_text(encoding="utf-8")) if given.json.is_file() else {}
                began = time.monotonic()
                rows = KINDS[kind](ground, given.times)
                about = {"date": time.strftime("%Y-%m-%d"), "times": given.times, "machine": machine(),
                         "versions": versions(), "seconds": round(time.monotonic() - began)}  # fmt: skip
                others = [row for row in stored.get(kind, {}).get("rows", []) if row["command"] not in ground.cases]
                kept = others if given.commands else []
                write_json(given.json, stored | {kind: about | {"rows": kept + rows}})
        finally:
            shutil.rmtree(top, ignore_errors=True)
    if given.json == STORED:
        write_text(PAGE, page(json.loads(STORED.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
