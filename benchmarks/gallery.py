"""The gallery of reproductions: records/gallery/ (a picture and JSON of each) and records/reproductions.md.

    python -m benchmarks.gallery --checkpoint MODEL     # every figure and table that runs on any machine, then the page
    python -m benchmarks.gallery tgs-fig1 cod-thm       # some of them anew, then the page
    python -m benchmarks.gallery --page                 # only the page, from the JSON that is there

MODEL is what cod-fig2 is shown on; without one its last result stays.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.timing import compact
from signalprop.files.storage import read_json, write_text
from signalprop_lab.reproductions import ROWS, Row, Settings, find, run
from signalprop_lab.reproductions.pictures import save
from signalprop_lab.reproductions.result import slug

PAGE, PICTURES = Path("records/reproductions.md"), Path("records/gallery")
LARGEST = 60_000  # bytes of a picture

TEXT = """# The papers' figures and tables, reproduced

Written by `python -m benchmarks.gallery`: do not edit. `signalprop reproduce` lists the same rows, `signalprop
reproduce ID` computes one anew, and `signalprop reproduce --all --out DIR` all that run on any machine, with pictures
and JSON. TGS is *Transformers Get Stable* (Kedia et al. 2024; v1: the arXiv version with the long appendix), SPA *Deep
Transformers without Shortcuts* (He et al. 2023), COD *The Curse of Depth in Large Language Models* (Sun et al. 2025).

A verdict is computed from numbers. Each check has bounds that come from what the paper prints, or from what its words
can mean at most; a number beyond a bound fails, one that lies beyond it by less than two standard errors is open, and
so is one that is known no better than the bounds are apart. *Confirmed*: every check holds. *Contradicted*: none holds,
and one fails. *Partly*: anything else.

{summary}

{table}

{sections}
## Not run here

{others}

## What no row shows

- TGS section 2.4, "1 to 768 layers, widths 128 to 6,096, within 10 %": [accuracy](accuracy.md) has widths to 4,096,
  and of 768 layers the first gradient only.
- TGS section 4.6, 192 layers of width 256 beside 24 of 1024 at equal wall-clock time, and tgs-wall: a GPU.
- TGS v1 figure 15 as printed (the correlation after a layer): not offered, since the first branch then has variance
  0.60 ([errata](../docs/papers/transformers-get-stable.md#errors-in-print)).
- SPA lemmas 2 to 4 are steps of proofs; theorems 1 to 3, which they prove, are tested. COD theorems 1 and 2 and the
  constants of lemma 2 are [vacuous bounds](../docs/papers/curse-of-depth.md#theorems-1-and-2), without functions here.
- COD section 2, five models and BERT, more layers to spare in larger ones, and Fig 2's half on Post-LN: cod-fig2
  takes one checkpoint at a time, and has been shown on one of 135M parameters. It needs trained checkpoints, a
  Post-LN one among them.
- Recipes at the papers' scale follow the printed hyperparameters but for what their comments say: C4 for Pile-CC, no
  next-sentence task, BERT's own weight decay.
"""


def page() -> str:
    """records/reproductions.md, from the JSON in records/gallery."""
    here = [row for row in ROWS if row.runs]
    stored = {row.id: read_json(path) for row in here if (path := PICTURES / f"{slug(row.id)}.json").is_file()}
    header = ["id", "source", "what must be seen", "verdict", "checks that hold", "processor seconds"]
    lines = []
    for row in (row for row in here if row.id in stored):
        one = stored[row.id]
        held = f"{sum(check['state'] == 'holds' for check in one['checks'])} of {len(one['checks'])}"
        link = f"[{row.id}](#{slug(row.id)})"
        lines.append([link, row.source, row.claim, one["verdict"], held, f"{one['processor_seconds']:.0f}"])
    counts = {
        word: [one["id"] for one in stored.values() if one["verdict"] == word]
        for word in ("confirmed", "partly", "contradicted")
    }
    summary = "; ".join(f"{len(ids)} {word}" for word, ids in counts.items())
    seconds = sum(one["processor_seconds"] for one in stored.values())
    others = [row for row in ROWS if row.id not in stored]
    return TEXT.format(
        summary=f"{len(stored)} of the {len(here)} rows that run anywhere, {seconds / 60:.0f} minutes of processor "
        f"time together: {summary}.",
        table=compact(header, lines),
        sections="\n".join(section(row, stored[row.id]) for row in here if row.id in stored),
        others=compact(["id", *header[1:3], "state"], [[r.id, r.source, r.claim, state_of(r)] for r in others]),
    )


def state_of(row: Row) -> str:
    """The state, with a link to the page of a result."""
    page = row.result_page
    return (
        row.state
        if page is None
        else row.state.replace(page, f"[{page.partition('#')[2] or Path(page).stem}]({page.removeprefix('records/')})")
    )


def section(row: Row, one: dict[str, Any]) -> str:
    """One row: checks, picture, what was reduced."""
    checks = []
    for check in one["checks"]:
        ours = "none" if check["ours"] is None else f"{check['ours']:.4g}"
        ours += f" ± {check['standard_error']:.2g}" if check["standard_error"] else ""
        cells = [check["what"], check["paper"], ours, check["criterion"], check["state"]]
        checks.append([cell.replace("|", "\\|") for cell in cells])
    lines = [
        f'<a id="{slug(row.id)}"></a>',
        "",
        f"## {row.id}: {row.title}",
        "",
        f"{row.source}: {row.claim}. **{one['verdict'].capitalize()}**: {one['reason']}.",
        "",
        compact(["quantity", "paper", "ours", "holds if", ""], checks),
    ]
    if (PICTURES / f"{slug(row.id)}.png").is_file():
        lines += ["", f"![{row.title}](gallery/{slug(row.id)}.png)"]
    lines += [
        "",
        f"Reduced: {one['reduced']}. {one['processor_seconds']:.0f} s of processor time. "
        f"[JSON](gallery/{slug(row.id)}.json)",
    ]
    lines += ["", *one["notes"]] if one["notes"] else []
    return "\n".join([*lines, ""])


def small(path: Path) -> bytes:
    """A picture in few colours, of at most 60 kB where so few do."""
    whole = Image.open(path).convert("RGB")
    data = b""
    for colours in (160, 64, 32, 16):
        file = io.BytesIO()
        whole.quantize(colours, dither=Image.Dither.NONE).save(file, format="png", optimize=True)
        data = file.getvalue()
        if len(data) <= LARGEST:
            break
    return data


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", help="only these")
    parser.add_argument("--checkpoint", help="for cod-fig2")
    parser.add_argument("--page", action="store_true", help="run nothing")
    given = parser.parse_args(arguments)
    rows = [find(name) for name in given.ids] or ([] if given.page else [row for row in ROWS if row.runs])
    PICTURES.mkdir(exist_ok=True)
    for row in rows:
        found = run(row, Settings(checkpoint=given.checkpoint))
        print(f"{row.id}: {found.verdict}, {found.seconds:.0f} s: {found.reason}", file=sys.stderr, flush=True)
        if found.checks:
            for path in save(PICTURES, found)[1:]:
                path.write_bytes(small(path))
    write_text(PAGE, page())


if __name__ == "__main__":
    main()
