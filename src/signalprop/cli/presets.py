"""`signalprop presets`."""

from __future__ import annotations

from signalprop.cli import options as opt
from signalprop.cli import output

SCHEMA = "signalprop/presets/1"


def presets(json_file: opt.Json = None) -> None:
    """List the networks that have a name.

    \b
    Example:
      signalprop presets
    """
    from signalprop.network.architecture import Architecture
    from signalprop.network.presets import PRESETS
    from signalprop.results.cost import active_parameters, count_parameters
    from signalprop.results.text import network_in_words, text_table

    output.check_outputs(json_file)
    found = {name: Architecture.preset(name) for name in PRESETS}
    sizes = {name: count_parameters(architecture)["total"] for name, architecture in found.items()}
    active = {name: active_parameters(architecture) for name, architecture in found.items()}
    listed = {
        name: {
            "parameters": sizes[name],
            "active_parameters": active[name],
            "architecture": a.model_dump(mode="json", exclude_defaults=True),
        }
        for name, a in found.items()
    }

    def millions(count: int) -> str:
        return f"{count / 1e6:,.1f} M"

    rows = [
        [name, network_in_words(a), millions(sizes[name]), millions(active[name]) * (active[name] < sizes[name])]
        for name, a in found.items()
    ]
    table = text_table(["preset", "network", "parameters", "active"], rows, left=2)
    output.deliver(json_file, lambda: {"schema": SCHEMA, "presets": listed}, lambda: output.echo(table))
