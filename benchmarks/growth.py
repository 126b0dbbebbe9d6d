"""The orders of growth of every registered scheme: the first table of records/growth.md. A few minutes.

python -m benchmarks.growth
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.timing import compact
from signalprop.files.storage import read_text, write_text
from signalprop.schemes import SCHEMES
from signalprop_lab.reproductions.orders import TABLE_3, Orders, orders

PAGE = Path("records/growth.md")
QUANTITIES = ("forward", "gradient", "sensitivity_mean", "sensitivity_median")
HEADER = (
    "scheme",
    "norm",
    "forward variance",
    "gradient, first over last",
    "sensitivity, mean",
    "median",
    "TGS Table 3",
)
# what the table replaces: the one there is, and the schemes without numbers
_TABLE = re.compile(r"^\| scheme \| norm \|.*?(?=^Where this differs from TGS Table 3)", re.MULTILINE | re.DOTALL)


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


def orders_table(rows: Sequence[Orders]) -> str:
    """The table of fitted laws, with the paper's beside them, and the schemes that have none."""
    lines = []
    for row in rows:
        if row.refused:
            continue
        printed = TABLE_3.get((row.scheme, row.placement), ("", "", ""))
        named = zip(("forward", "gradient", "sensitivity"), printed, strict=True)
        paper = "; ".join(f"{what} {law}" for what, law in named if law)
        lines.append([f"`{row.scheme}`", row.placement, *(row.laws[key] for key in QUANTITIES), paper])
    refused = "; ".join(f"`{row.scheme}` ({row.refused})" for row in rows if row.refused)
    shown = compact(HEADER, lines).replace("{", "(").replace("}", ")")  # braces are for mathematics
    return shown + (f"\n\nWithout numbers here: {refused}." if refused else "") + "\n\n"


def main() -> None:
    """Write the table into the page; the rest of the page stays."""
    table = orders_table(list(all_orders()))
    text, found = _TABLE.subn(lambda _: table, read_text(PAGE))
    assert found == 1
    write_text(PAGE, text)


if __name__ == "__main__":
    main()
