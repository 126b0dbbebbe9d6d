"""docs/what-we-know.md: the papers' claims, one line each, from stored rows. `benchmarks.results` writes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from signalprop.errors import InputError
from signalprop.files.storage import read_json
from signalprop_lab.training.verdicts import CONTROL, Judged, claim_of, verdicts

PAGE, GALLERY = Path("docs/what-we-know.md"), Path("records/gallery")
DEEP = "DeepScaleLM with 48 layers of width 64 ends below 12 of 128"

# By paper: the stored results and the part of their claim, or the reproduction that needs no training.
CLAIMS: dict[str, list[tuple[str, str]]] = {
    "TGS": [
        ("gallery", "tgs-fig1"), ("gallery", "tgs-fig4"), ("gallery", "tgs-fig8"),
        ("gallery", "tgs-tab3"),
        ("past-the-peak", "DeepScaleLM trains at every depth"),
        (
            "depth-postln",
            "plain Post-LN does not leave the plateau within 1,500 steps at 48 and 96 layers, at any rate and warm-up",
        ),
        ("both-train", "DeepScaleLM ends below plain Post-LN"),
        ("gpu-deeper", "DeepScaleLM with 12 layers of width 64 ends below 3 of 128"), ("deeper", DEEP),
        ("tgs-tab11", "the full DeepScaleLM ends below the simpler one, as in Table 14"),
        ("tgs-tab11", "DeepScaleLM ends below LayerScale"), ("tgs-tab11", "DeepScaleLM ends below DS-Init"),
        ("tgs-tab11", "DeepScaleLM ends below ReZero"),
        ("encoder-methods", "masked encoders: DeepScaleLM ends below LayerScale"),
        ("encoder-methods", "masked encoders: DeepScaleLM ends below DeepNorm"),
        ("encoder-methods", "masked encoders: DeepScaleLM ends below ReZero"),
        ("very-deep", "DeepScaleLM trains 192 Post-LN layers"),
        ("tgs-tab13-14", "48 Post-LN layers without scaled residuals learn nothing"),
        (
            "tgs-tab9",
            "speech to text: DeepScaleLM with 24 + 12 layers of width 32 ends below the baseline of 6 + 3 of width 64",
        ),
        (
            "tgs-tab10",
            "DeepScaleLM with 48 layers of width 32 is more often right than the baseline with 12 of 64",
        ),
        ("finetuned-postln", "fine-tuned, DeepScaleLM ends below Post-LN"),
    ],
    "SPA": [
        ("gallery", "spa-fig1-7"),
        ("spa-tab3", "networks of 72 and 108 layers without skips and norms train"),
        ("spa-tab1", "DKS, without norms: E-SPA ends below U-SPA"),
        ("spa-tab1", "DKS, without norms: U-SPA ends below Value-SkipInit"),
        ("spa-tab1", "E-SPA, DKS: without norms ends lower"),
        ("spa-longer", "in 200 steps Pre-LN ends below E-SPA"),
        ("spa-longer", "in 1000 steps Pre-LN ends below E-SPA"),
        ("spa-longer", "E-SPA of 3000 steps ends below Pre-LN of 1000"),
        ("spa-longer", "E-SPA of 5000 steps ends below Pre-LN of 1000"),
        ("spa-tab2", "E-SPA with norms ends below Pre-LN"),
        ("spa-tab2", "without norms E-SPA ends below normalised skips"),
        ("spa-fig8-10", "E-SPA: orthogonal weights end below Gaussian ones"),
    ],
    "COD": [
        ("gallery", "cod-thm"), ("gallery", "cod-fig2"),
        ("gpu-lns", "LayerNorm Scaling ends below Pre-LN"),
        ("lns", "LayerNorm Scaling ends below Pre-LN"), ("lns", "LayerNorm Scaling ends below scaled initialisation"),
        ("finetuned", "fine-tuned, LayerNorm Scaling ends below Pre-LN"),
    ],
}  # fmt: skip

TEXT = """# What we know now

The claims of the three papers that were put to a test, from stored runs (`python -m benchmarks.results` writes this
page). The papers' pages say what holds of each: [Transformers Get Stable](papers/transformers-get-stable.md) (TGS),
[Deep Transformers without Shortcuts](papers/without-shortcuts.md) (SPA),
[The Curse of Depth](papers/curse-of-depth.md) (COD).
[Choose a scheme](choosing-a-scheme.md#what-trainings-showed) says what to do with it.

- *Effect*: the difference in final loss in nats (for images, in accuracy) with its standard error; "+" favours the
  claim.
- *Budget*: tokens per parameter of our smaller run over those of the paper.
- *Verdict*: "confirmed" and "contradicted" need a budget within a factor of 5, or no training.
  "Control failed": the runs that had to agree with the paper did not.

All trained networks are 32 to 128 wide and read one text of 12 MB. They show whether a mechanism is there, not which
loss a large model would reach. Runs of 200 to 400 steps show which method leaves the plateau first.

{table}
"""


def page(folder: Path) -> str:
    """The page, from the results in `folder` and the gallery beside it; claims without a stored run are left out."""
    stores = {file.stem: read_json(file) for file in folder.glob("*.json")}
    judged = {stem: verdicts(store) for stem, store in stores.items() if "sweep" in store}
    known = []
    for paper, claims in CLAIMS.items():
        for source, words in claims:
            row = [paper, *(_reproduced(words) if source == "gallery" else _trained(source, words, judged))]
            if len(row) > 1:
                known.append(row)
    rows = [["paper", "claim", "effect", "budget", "verdict"], ["---"] * 5, *known]
    return TEXT.format(table="\n".join(f"| {' | '.join(row)} |" for row in rows))


def _reproduced(name: str) -> list[str]:
    one = read_json(GALLERY / f"{name}.json")
    holds = sum(check["state"] == "holds" for check in one["checks"])
    words = f"[{one['source']}](../records/reproductions.md#{name}): {one['title']}: {one['claim']}"
    return [words, f"{holds} of {len(one['checks'])} checks hold", "none needed", one["verdict"]]


def _trained(source: str, words: str, judged: Mapping[str, Sequence[Judged]]) -> list[str]:
    if source not in judged:
        return []
    found = [one for one in judged[source] if claim_of(one.check) == words]
    if len(found) != 1:
        raise InputError(f"records/results/{source}.json has no part {words!r}; name one of its verdict")
    (one,) = found
    by = re.search(r"difference ([+-][\d.]+), standard error ([\d.]+)", one.told)
    effect = f"{float(by[1]):+.2g} ± {float(by[2]):.2g}" if by and one.kind != CONTROL else ""
    return [f"[{words}](../records/results.md#{source})", effect, one.budget, one.kind]
