"""records/results.md and docs/what-we-know.md, from the stored sweeps in records/results/NAME.json.

python -m benchmarks.results                       # write both pages anew
python -m benchmarks.results sweeps/NAME ...       # store what these sweeps have come to, then write both
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import what_we_know
from signalprop.errors import InputError
from signalprop.files.storage import read_json, write_json, write_text
from signalprop_lab.training.grid import load_sweep
from signalprop_lab.training.recipe_files import shipped
from signalprop_lab.training.sweep_definition import Sweep
from signalprop_lab.training.tables import SCHEMA, verdict_lines
from signalprop_lab.training.verdicts import verdicts

FOLDER, PAGE = Path("records/results"), Path("records/results.md")
STEPS, PICTURE = Path("records/first-steps.md"), Path("docs/pictures/plateau.svg")
STEPS_LINK = "[first steps](first-steps.md)"


def store(directories: list[Path]) -> None:
    """Copy the results of sweeps to where they are kept."""
    for directory in directories:
        results = read_json(directory / "results.json")
        write_json(FOLDER / f"{results['sweep']['name']}.json", results)


def wrapped(text: str) -> str:
    """Paragraphs in lines of 120 columns; lists, tables and code as they are."""
    parts = []
    for part in text.strip().split("\n\n"):
        plain = not part.lstrip().startswith(("|", "-", "#", "!", "```"))
        parts.append(
            "\n".join(textwrap.wrap(part, 120, break_long_words=False, break_on_hyphens=False)) if plain else part
        )
    return "\n\n".join(parts)


INTRODUCTION = """\
# Results of training

Written by `python -m benchmarks.results` from `records/results/`: do not edit.

What was trained to test the papers' claims, and the verdicts, with the budget beside the paper's. What follows of all
of it: [What we know now](../docs/what-we-know.md)."""
JUDGED_BY = (
    "title",
    "claim",
    "description",
    "reference",
    "paper",
    "verdict",
    "controls",
    "spread",
    "shared_error",
)  # no run depends on them


def source_of(results: dict[str, Any]) -> str | None:
    """What `signalprop sweep` takes for the sweep of stored results; None: the sweep is gone."""
    name = results["sweep"]["name"]
    if f"sweep-{name}" in shipped():
        return f"sweep-{name}"
    on_a_gpu = Path("benchmarks/gpu") / f"{name.removeprefix('gpu-')}.yaml"
    return str(on_a_gpu) if on_a_gpu.is_file() else None


def judged_anew(results: dict[str, Any]) -> dict[str, Any]:
    """Stored results with the words and the verdicts that their sweep has now, where it still is of these runs."""
    name = source_of(results)
    if name is None:
        return results
    then, now = Sweep(**results["sweep"]), load_sweep(name).sweep
    if then.model_copy(update={field: getattr(now, field) for field in JUDGED_BY}) != now:
        return {**results, "sweep": then.model_copy(update={"paper": now.paper}).to_json()}
    return {**results, "sweep": now.to_json()}


def _changed(results: dict[str, Any]) -> list[str]:
    """A line where the sweep of the package is another one now than that of the stored runs."""
    name = source_of(results)
    if name is None or Sweep(**results["sweep"]) == load_sweep(name).sweep:
        return []
    return [
        f"The sweep has been changed since these runs; `signalprop sweep {name}` runs today's, which is not stored."
    ]


def stored_results() -> dict[Path, dict[str, Any]]:
    """What is stored of sweeps, by file; other benchmarks write pages of their own."""
    found = {file: read_json(file) for file in sorted(FOLDER.glob("*.json"))}
    return {file: one for file, one in found.items() if isinstance(one, dict) and one.get("schema") == SCHEMA}


class Shown(NamedTuple):
    """A section of the page: the name of its record, its title, what the claim and the budget are, its verdicts."""

    name: str
    title: str
    about: list[str]
    verdicts: list[str]


def sections() -> list[Shown]:
    """Of every stored sweep; its record gets the words and verdicts of today."""
    found = []
    for file, results in stored_results().items():
        results = judged_anew(results)
        write_json(file, results)
        sweep = Sweep(**results["sweep"])
        lines = [f"- {line}" for line in verdict_lines(verdicts(results))] if sweep.verdict else []
        about = [linked(wrapped(text)) for text in (sweep.claim, sweep.description) if text]
        changed = _changed(results)
        source = None if changed else source_of(results)
        again = f"`{file}`" if source is None else f"`signalprop sweep {source} --from {file} --jobs 0`"
        about += [*changed, f"{len(results['rows'])} runs; every one, settings and tables: {again}."]
        found.append(Shown(file.stem, sweep.title or sweep.name, about, lines or [f"Judged in {STEPS_LINK}."]))
    return found


def linked(text: str) -> str:
    """Descriptions link to sweeps as NAME.md: here each is a section."""
    return re.sub(r"\]\(([\w-]+)\.md\)", r"](#\1)", text).replace("](../first-steps.md", "](first-steps.md")


def counted() -> str:
    """How many runs are stored, how many of them are different, and which sections the same ones decide."""
    files: dict[tuple[Any, ...], set[str]] = {}
    rows = [(file, row) for file, results in stored_results().items() for row in results["rows"]]
    for file, row in rows:
        key = tuple(row.get(name) for name in ("seed", "parameters", "train_loss", "eval_loss"))
        files.setdefault(key, set()).add(f"[{file.stem}](#{file.stem})")
    shared = Counter(" and ".join(sorted(names)) for names in files.values() if len(names) > 1)
    text = f"{len(rows)} runs of sweeps are stored; {len(files)} of them are different."
    if shared:
        told = "; ".join(f"{names} {runs}" for names, runs in sorted(shared.items()))
        text += f" Some decide parts of several claims, which are no evidence of their own for each other: {told}."
    return text


def others() -> list[Shown]:
    """What was trained and judged by scripts that are finished: their records have a text."""
    found = []
    for file in sorted(FOLDER.glob("*.md")):
        text = file.read_text(encoding="utf-8")
        lines = [f"- {claim.words}: **{claim.verdict}**" for claim in claims(text)]
        title = text.partition("\n")[0].removeprefix("# ")
        found.append(Shown(file.stem, title, [f"The record, with its numbers: `{file}`."], lines))
    return found


class Claim(NamedTuple):
    """A part of a page's claim and its verdict."""

    words: str
    verdict: str


def claims(page: str) -> list[Claim]:
    """The parts of a page's claim."""
    told = page.partition("## Verdict")[2].partition("\n## ")[0]
    lines = re.findall(r"^- (.*?): \*\*(.+?)\*\*", told, re.MULTILINE)
    return [Claim(*line) for line in lines]


def foreseen(first_steps: str) -> list[str]:
    """What was predicted before it was run, from the page on first steps."""
    adam = re.search(r"\| adam +\| unseen +\| (\d+) +\| (\d+%) ", first_steps)
    edge = re.search(r"It \*\*(fails|holds)\*\*: (.*?\.)(?= Far)", first_steps.replace("\n", " "))
    rates = re.search(r"\*\*The claims\*\*: (.*)", first_steps)
    found = []
    if adam and edge:
        found.append(
            f"**Predicted before it was run** ({STEPS_LINK}): Adam's first step, claimed within 1.5 "
            f"in 90%, is in {adam[2]} of {adam[1]} unseen networks, SGD's and Muon's fail; "
            f"the early edge of the learning rate {edge[1]}: {edge[2]}"
        )
    if rates:
        found.append(f"**Rates carried over by the first step** ({STEPS_LINK}): {rates[1]}")
    return found


def plateau(results: dict[str, Any]) -> str:
    """When networks of every depth leave the plateau at chance: the first of the rates and warm-ups that were run."""
    methods: dict[str, dict[str, list[float | None]]] = {}
    for row in results["rows"]:
        methods.setdefault(row["method"], {}).setdefault(row["layers"], []).append(row["score"])
    lines = []
    for method, depths in methods.items():
        fastest = {layers: min((x for x in found if x is not None), default=None) for layers, found in depths.items()}
        left = [f"{steps:.0f} ({layers} layers)" for layers, steps in fastest.items() if steps is not None]
        stayed = [layers for layers, steps in fastest.items() if steps is None]
        runs = sum(len(depths[layers]) for layers in stayed)
        lines.append(
            f"- {method}: after {', '.join(left) or 'no number of'} steps"
            + (f"; never at {', '.join(stayed)} layers ({runs} runs)" if stayed else "")
        )
    shown = "![steps until the plateau is left, against depth](../docs/pictures/plateau.svg)"
    title = (
        "**Leaving the plateau at chance** ([runs](#depth-postln)), at the best rate, warm-up and seed of each depth:"
    )
    return "\n\n".join([title, "\n".join(lines), shown])


def plateau_picture(results: dict[str, Any]) -> None:
    """plateau.svg: a point per run, a line through the fastest of every depth; runs that never left it at the top."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "plateau"
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    most = max(row["steps"] for row in results["rows"])
    for number, method in enumerate(dict.fromkeys(row["method"] for row in results["rows"])):
        runs = [(int(row["layers"]), row["score"]) for row in results["rows"] if row["method"] == method]
        left = [(layers, score) for layers, score in runs if score is not None]
        stayed = [layers for layers, score in runs if score is None]
        style: dict[str, Any] = {"color": f"C{number}", "linestyle": "none", "markersize": 5}
        axes.plot([x for x, _ in left], [y for _, y in left], marker="o", fillstyle="none", **style)
        axes.plot(stayed, [most] * len(stayed), marker="^", **style)
        fastest = {layers: min(y for x, y in left if x == layers) for layers, _ in sorted(left)}
        axes.plot(list(fastest), list(fastest.values()), color=f"C{number}", label=method)
    depths = sorted({int(row["layers"]) for row in results["rows"]})
    axes.set(xscale="log", yscale="log", xlabel="layers", ylabel="steps until the plateau is left")
    axes.set_xticks(depths, map(str, depths), minor=False)
    axes.minorticks_off()
    ticks = [t for t in (100, 200, 500, 1000) if t < most]
    axes.set_yticks([*ticks, most], [*map(str, ticks), f"not within {most}"])
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(PICTURE, metadata={"Date": None})
    plt.close(figure)


def page(found: Sequence[Shown]) -> str:
    """What was trained, and the verdicts."""
    depths = FOLDER / "depth-postln.json"
    parts = [INTRODUCTION, counted(), *foreseen(STEPS.read_text(encoding="utf-8") if STEPS.is_file() else "")]
    if depths.is_file():
        plateau_picture(read_json(depths))
        parts.append(plateau(read_json(depths)))
    for one in found:
        parts += [f"## {one.name}", f"**{one.title}.**", *one.about, "\n".join(one.verdicts)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", type=Path, help="directories that `signalprop sweep` has written")
    arguments = parser.parse_args()
    try:
        store(arguments.sweeps)
        found = sorted([*sections(), *others()])
        write_text(what_we_know.PAGE, what_we_know.page(FOLDER))
        write_text(PAGE, page(found))
    except InputError as error:
        sys.exit(f"results: {error}")
    print(f"wrote {PAGE} and {what_we_know.PAGE} from {len(found)} records", file=sys.stderr)


if __name__ == "__main__":
    main()
