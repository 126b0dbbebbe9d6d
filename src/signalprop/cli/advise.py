"""`signalprop advise`."""

from __future__ import annotations

from signalprop.cli import options as opt
from signalprop.cli import output, sources


@opt.of_a_network()
def advise(
    arch: opt.Arch,
    changed: opt.Changes,
    scheme: opt.SchemeName = None,
    option: opt.SchemeOption = None,
    fail_on: opt.FailOn = None,
    json_file: opt.Json = None,
) -> None:
    """Say what is wrong with a network's start, and what would cure it.

    Every change (scheme, placement of norms, multipliers, QK-norm, depth) is applied to the description and predicted
    for this very network; those that leave nothing wrong come first, with their cost and the line to paste.

    \b
    Example:
      signalprop advise tgs --layers 96 --norm post --scheme xavier
    """
    from signalprop.advice import CHANGES, LONGEST, PAIRS
    from signalprop.advice import advise as advised
    from signalprop.data.batches import default_statistics
    from signalprop.prediction import expected_cost

    output.check_outputs(json_file)
    output.check_severity(fail_on)
    p = sources.parametrization(arch, changed, scheme, option, longest=LONGEST)
    output.announce(
        [expected_cost(p, default_statistics(p.architecture), "auto")] * (1 + len(CHANGES) + len(PAIRS)), chosen=False
    )
    found = advised(p)
    output.deliver(json_file, found.to_json, lambda: output.echo(str(found)))
    output.fail_on(found.findings, fail_on)
