"""docs/what-we-know.md: the papers' claims, one line each, from stored rows. `benchmarks.results` writes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from signalprop.errors import InputError
from signalprop.files.storage import read_json
from signalprop_lab.training.tables import markdown_table
from signalprop_lab.training.verdicts import CONTROL, Judged, claim_of, verdicts

PAGE, GALLERY = Path("docs/what-we-know.md"), Path("records/gallery")
DEEP = "DeepScaleLM with 48 layers of width 64 ends below 12 of 128"

# By paper: the stored results and the part of their claim, or the reproduction that needs no training.
CLAIMS: dict[str, list[tuple[str, str]]] = {
    "TGS": [
        ("gallery", "tgs-fig1"), ("gallery", "tgs-fig4"), ("gallery", "tgs-fig8"),
        ("gallery", "tgs-tab3"),
        ("depth-postln", "DeepScaleLM leaves the plateau at every depth"),
        (
            "depth-postln",
            "plain Post-LN does not leave the plateau within 1,500 steps at 48 and 96 layers, at any rate and warm-up",
        ),
        ("both-train", "DeepScaleLM ends below plain Post-LN"),
        ("deeper", DEEP),
        ("tgs-tab11", "the full DeepScaleLM ends below the simpler one, as in Table 14"),
        ("tgs-tab11", "DeepScaleLM ends below LayerScale"), ("tgs-tab11", "DeepScaleLM ends below DS-Init"),
        ("tgs-tab11", "DeepScaleLM ends below ReZero"),
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
        ("spa-longer", "E-SPA of 1000 steps ends below Pre-LN of 200"),
        ("spa-longer", "in 200 steps Pre-LN ends below E-SPA"),
        ("spa-tab2", "E-SPA with norms ends below Pre-LN"),
        ("spa-tab2", "without norms E-SPA ends below normalised skips"),
        ("spa-fig8-10", "E-SPA: orthogonal weights end below Gaussian ones"),
    ],
    "COD": [
        ("gallery", "cod-thm"), ("gallery", "cod-fig2"),
        ("lns", "LayerNorm Scaling ends below Pre-LN"), ("lns", "LayerNorm Scaling ends below scaled initialisation"),
        ("finetuned", "fine-tuned, LayerNorm Scaling ends below Pre-LN"),
    ],
}  # fmt: skip

TEXT = """# What we know now

Written by `python -m benchmarks.results` from stored runs: do not edit. One line for each claim of the three papers
that was put to a test, those that need no training first. "+" is a difference in favour of the claim, in nats (of
images: in the share that is right), with its standard error. The budget is that of the smaller run, in tokens per
parameter over the paper's. "Confirmed" and "contradicted" are kept for budgets within a factor of 5.

{table}

All trained networks are 32 to 128 wide and read one text of 12 MB: they show whether a mechanism is there, not what a
large model would end at. Runs of 200 to 400 steps say who leaves the plateau at chance first.

## What to take from it

{advice}
"""

ADVICE = """\
- **Post-norm, 24 layers and more**: scale the branches (`deepscalelm-simple`, `deepscalelm`, `deepnorm`). Plain
  Post-LN of 48 layers learned nothing at any rate and warm-up that we tried; at 12 layers it trains later.
- **Which DeepScaleLM**: the simpler one for decoders and for text without segments, the full one where tokens are
  alike ([numbers](schemes.md#deepscalelm)). Tuned, it [ends](../records/results.md#tgs-tab11) below LayerScale, DS-Init
  and ADMIN, beside muP, Noci and Bamboo, above SkipInit and ReZero.
- **Tune the warm-up with the rate** for anything post-norm. Pages that do not say "tuned with the rate" have 10 % for
  all.
- **Pre-norm, 24 layers and more**: `lns` led to the end of 2,000 steps, the best supported choice here, at a fraction
  of the paper's budget.
- **Less than a token per parameter** (a prototype): branches that start at 0 (`rezero`, `skipinit`) leave the plateau
  first. Nothing here says that they end lower.
- **Deeper and thinner at equal parameters**: no gain at any budget that we reached. The claim is about a hundred
  times more tokens, and stays open.
- **No skips, no norms**: `e-spa` trains at 36 to 108 layers, slower than Pre-LN step by step.
- **Whatever the scheme**: predict it for your own shape (`signalprop schemes`). A healthy prediction is needed, and
  does not rank methods ([found](../records/results.md#found))."""


def page(folder: Path) -> str:
    """The page, from the results in `folder` and the gallery beside it; claims without a stored run are left out."""
    stores = {file.stem: read_json(file) for file in folder.glob("*.json")}
    judged = {stem: verdicts(store) for stem, store in stores.items() if "sweep" in store}
    rows = []
    for paper, claims in CLAIMS.items():
        for source, words in claims:
            rows.append([paper, *(_reproduced(words) if source == "gallery" else _trained(source, words, judged))])
    known = [row for row in rows if len(row) > 1]
    table = markdown_table(["paper", "claim", "effect", "budget", "verdict"], known)
    return TEXT.format(table=table, advice=ADVICE)


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
