"""The directive `commands`: what `--help` says of every command of signalprop, as sections with a table of options."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

import typer.main
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from signalprop.cli import all_commands, command_line

CODE = re.compile(r"`([^`]+)`|(?<![\w-])(--[a-z][a-z-]*)")


class Commands(SphinxDirective):
    """One section per command, in the order of `signalprop --help`."""

    def run(self) -> list[nodes.Node]:
        commands = typer.main.get_command(command_line(all_commands())).commands  # type: ignore[attr-defined]
        return [self.section(name, command) for name, command in commands.items() if not command.hidden]

    def section(self, name: str, command: Any) -> nodes.section:
        context = command.make_context(f"signalprop {name}", [], resilient_parsing=True)
        section = nodes.section(ids=[f"signalprop-{name}"], names=[f"signalprop {name}"])
        section += nodes.title("", "", nodes.literal("", f"signalprop {name}"))
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        section += nodes.literal_block(usage, usage, language="text")
        section += [block for part in (command.help or "").split("\n\n") for block in described(part)]
        by_kind: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None:  # hidden ones have none
                by_kind[parameter.param_type_name].append(record)
        for kind, records in by_kind.items():
            if records:
                section += table(kind, records)
        return section


def described(part: str) -> list[nodes.Node]:
    """One paragraph of a command's help; one that begins with a backspace keeps its lines (an example)."""
    if not part.startswith("\b"):
        return [nodes.paragraph("", "", *with_code(" ".join(part.split())))]
    title, _, lines = part[1:].strip("\n").partition("\n")
    lines = textwrap.dedent(lines)
    return [nodes.paragraph("", title), nodes.literal_block(lines, lines, language="console")]


def with_code(text: str) -> list[nodes.Node]:
    """Text, with names of options and what stands between backquotes as code."""
    found: list[nodes.Node] = []
    end = 0
    for match in CODE.finditer(text):
        found += [nodes.Text(text[end : match.start()]), nodes.literal("", match[1] or match[2])]
        end = match.end()
    return [*found, nodes.Text(text[end:])]


def table(kind: str, records: Sequence[tuple[str, str]]) -> nodes.table:
    """Two columns: the spelling, and what it means."""
    group = nodes.tgroup("", nodes.colspec(colwidth=30), nodes.colspec(colwidth=70), cols=2)
    group += nodes.thead("", row([nodes.Text(kind)], [nodes.Text("meaning")]))
    group += nodes.tbody("", *(row([nodes.literal("", names)], with_code(text)) for names, text in records))
    return nodes.table("", group, classes=["options"])


def row(*cells: list[nodes.Node]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", *cell)) for cell in cells))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
