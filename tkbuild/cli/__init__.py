"""The command line: options in, one call, text out. A command's module is imported when that command runs."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
import warnings
from typing import Any, TextIO

import click

from tkbuild.errors import ArgumentError, MissingPackageError, TkbuildError

INTERRUPTED_EXIT_CODE = 130
_OUTPUT_EXIT_CODE = 1
_NEED_TORCH = ("verify", "bench")

#: command -> (module, one-line help). The help stands here so that ``tkbuild --help`` imports no command.
COMMANDS = {
    "list": ("tkbuild.cli.show", "List variants, one line each."),
    "compile": ("tkbuild.cli.compile", "Compile what the store lacks; needs no GPU."),
    "explain": ("tkbuild.cli.show", "Show a variant's key fields and what changed since its last build."),
    "inspect": ("tkbuild.cli.show", "Show registers, spills, shared memory, size and verified state."),
    "package": ("tkbuild.cli.build", "Write one wheel per arch from the store."),
    "verify": ("tkbuild.cli.gpu", "Run installed kernels on a GPU against their references."),
    "bench": ("tkbuild.cli.gpu", "Time installed kernels on a GPU against a copy and a peer."),
    "doctor": ("tkbuild.cli.doctor", "Name what is missing or mismatched, and how to mend it."),
    "gc": ("tkbuild.cli.build", "Remove what no present variant needs from the store."),
    "clean": ("tkbuild.cli.build", "Empty the store."),
    "schema": ("tkbuild.cli.show", "Print the JSON Schema of kernel specs, for editors."),
    "init": ("tkbuild.cli.init", "Start a project of your own: spec, template, test, wheel."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            near = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            ctx.fail(f"no command {cmd_name!r}{f'; did you mean {near[0]!r}?' if near else '.'} There are: {', '.join(COMMANDS)}.")
        if cmd_name in _NEED_TORCH and importlib.util.find_spec("torch") is None:
            raise MissingPackageError(f"{cmd_name} needs torch: pip install 'torch>=2.10'")
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_module, text) in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tkbuild")
def main() -> None:
    """Compile TileLang kernels ahead of time, pack them into wheels, check them on a GPU."""


def emit_json(value: Any) -> None:
    """Print one JSON value on a line of its own."""
    click.echo(json.dumps(value, sort_keys=True))


def run() -> None:
    """Run the command line; a foreseen failure prints its text and exits with the code of its kind."""
    warnings.showwarning = _show_warning
    try:
        code = _execute()
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as exc:
        if not _stdout_is_broken() and not _is_of_echo(exc):
            raise
        if exc.errno != errno.EPIPE:
            click.echo(f"error: cannot write the output: {exc.strerror}", err=True)
        code = _OUTPUT_EXIT_CODE
    sys.exit(code)


def _execute() -> int:
    try:
        return main.main(standalone_mode=False) or 0
    except (click.Abort, KeyboardInterrupt):
        told = "interrupted; what was finished is in the store" if sys.argv[1:2] == ["compile"] else "interrupted"
        return _fail("KeyboardInterrupt", told, INTERRUPTED_EXIT_CODE)
    except click.exceptions.NoArgsIsHelpError as exc:
        click.echo(exc.format_message(), err=True)
        return ArgumentError.exit_code
    except click.ClickException as exc:
        if isinstance(exc, click.UsageError) and exc.ctx is not None:
            click.echo(exc.ctx.get_usage(), err=True)
        return _fail(type(exc).__name__, exc.format_message(), ArgumentError.exit_code)
    except TkbuildError as exc:
        return _fail(type(exc).__name__, str(exc), exc.exit_code)


def _fail(error: str, message: str, exit_code: int) -> int:
    """Tell of a failure, on stdout too if the caller reads JSON there; return ``exit_code``."""
    if "--json" in sys.argv:
        emit_json({"error": error, "message": message, "exit_code": exit_code})
    click.echo(f"error: {message}", err=True)
    return exit_code


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    click.echo(f"warning: {' '.join(str(message).split())}", err=True)


def _is_of_echo(exc: OSError) -> bool:
    """Whether ``click.echo`` met the error: stdout without a buffer keeps nothing that a second try could tell by."""
    return traceback.extract_tb(exc.__traceback__)[-1].filename == inspect.getfile(click.echo)


def _stdout_is_broken() -> bool:
    """Whether what is still to be written to stdout cannot be; if so, nothing tries it again."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
