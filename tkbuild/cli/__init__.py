"""The command line: options in, one call, text out. A command's module is imported when that command runs."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import click

from tkbuild.errors import TkbuildError

INTERRUPTED_EXIT_CODE = 130

#: command -> (module, one-line help). The help stands here so that ``tkbuild --help`` imports no command.
COMMANDS = {
    "list": ("tkbuild.cli.show", "List variants, one line each."),
    "compile": ("tkbuild.cli.build", "Compile what the store lacks; needs no GPU."),
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
            return None
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
    try:
        main.main(standalone_mode=False)
    except click.exceptions.Exit as exc:
        sys.exit(exc.exit_code)
    except click.Abort:
        click.echo("interrupted; what was finished is in the store", err=True)
        sys.exit(INTERRUPTED_EXIT_CODE)
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except TkbuildError as exc:
        if "--json" in sys.argv:
            emit_json({"error": type(exc).__name__, "message": str(exc), "exit_code": exc.exit_code})
        click.echo(f"error: {exc}", err=True)
        sys.exit(exc.exit_code)
