"""`signalprop advise`."""

from __future__ import annotations

from typing import Annotated

import typer

from signalprop.cli import options as opt
from signalprop.cli import output


def advise(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT", help="ARCH, a checkpoint, a recipe of train (.yaml, .toml) or a monitor's .jsonl."
        ),
    ],
    layers: opt.Layers = None,
    seq_len: opt.SeqLen = None,
    norm: opt.Norm = None,
    assignments: opt.Set = None,
    scheme: opt.SchemeName = None,
    fail_on: opt.FailOn = None,
    json_file: opt.Json = None,
) -> None:
    """Say what is wrong with a network's start, and how to cure it.

    Every change (scheme, placement of norms, multipliers, QK-norm, depth) is predicted for this network; those that
    leave nothing wrong come first, with their cost and the line to paste.

    \b
    Example: signalprop advise tgs --layers 96 --norm post --scheme xavier
    """
    from signalprop.advice import CHANGES, PAIRS
    from signalprop.advice import advise as advised
    from signalprop.cli.advise_input import subject_of
    from signalprop.data.batches import default_statistics
    from signalprop.ranking import expected_cost_of_ranking

    output.check_outputs(json_file)
    output.check_severity(fail_on)
    changed = opt.changes(assignments, n_layers=layers, seq_len=seq_len, norm_placement=norm)
    subject = subject_of(what, changed, scheme)
    p = subject.table
    costs = [expected_cost_of_ranking(p, default_statistics(p.architecture))] * (2 + len(CHANGES) + len(PAIRS))
    output.announce(costs, chosen=False)
    found = advised(p, found=subject.found, seen=subject.seen)
    output.deliver(json_file, found.to_json, lambda: output.echo(str(found)))
    output.fail_on(found.findings, fail_on)
