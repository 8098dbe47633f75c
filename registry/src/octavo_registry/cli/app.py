"""The root of the `octavo` command: a group whose commands are loaded when they are called, and its errors."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from functools import cached_property
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from octavo_registry.cli.commands import OWN, Command, absent_command, find_commands
from octavo_registry.cli.errors import STOPPED, fail
from octavo_registry.cli.output import fancy
from octavo_registry.discovery.guard import stdout_kept


class Commands(TyperGroup):
    """A group that knows its commands' names and help lines without importing them, so that help is quick."""

    @cached_property
    def by_name(self) -> dict[str, Command]:
        """Commands by name."""
        return find_commands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help, those of packages that are not installed last."""
        return [*self.by_name, *(name for name in OWN if name not in self.by_name)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in with the line of help; `resolve_command` loads the command itself."""
        command = self.by_name.get(cmd_name)
        if command is None:
            owner, line = OWN.get(cmd_name, ("", ""))
            line = f"{line} ({owner} is not installed)"
            return TyperCommand(cmd_name, help=line, short_help=line) if owner else None
        line = command.help + (" (broken)" if command.fault else "")
        return TyperCommand(cmd_name, help=line, short_help=line)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that `args` begin with, loaded."""
        name = args[0]
        command = self.by_name.get(name)
        if command is not None:
            return name, command.load_or_fail(), args[1:]
        absent = absent_command(name)
        if absent is not None:
            ctx.fail(absent)
        close = difflib.get_close_matches(name, self.by_name, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(self.by_name)}"
        return ctx.fail(f"there is no command {name!r}; {hint}")  # type: ignore[no-any-return]

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run; in standalone mode exit with 0, 1, 2 or 130 after at most one line on stderr."""
        arguments = list(sys.argv[1:] if args is None else args)
        try:
            with stdout_kept():
                result = super().main(
                    arguments or ["--help"], "octavo", complete_var, False, windows_expand_args, **extra
                )
            if standalone_mode:
                sys.stdout.flush()  # here, where a full disk is a sentence
        except KeyboardInterrupt:
            if not standalone_mode:
                raise
            result = STOPPED
        except Exception as error:
            if not standalone_mode:
                raise
            fail(error, arguments)
        if not standalone_mode:
            return result
        if result == STOPPED:  # as typer returns it, too, which catches Ctrl-C in a command and says nothing
            print("octavo: stopped", file=sys.stderr)
        sys.exit(result if isinstance(result, int) and not isinstance(result, bool) else 0)


app = typer.Typer(
    name="octavo",
    cls=Commands,
    help="Low-precision grouped linear layers: what runs here, in which recipe, and why.",
    rich_markup_mode="rich" if fancy() else None,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 fine; 1 what was asked about is broken or unserved; 2 bad input; 130 stopped by Ctrl-C.",
)


def _version(wanted: bool) -> None:
    if wanted:
        found: dict[str, str] = {}
        for each in metadata.distributions():
            found.setdefault(str(each.metadata["Name"]), each.version)  # of two, Python imports the first
        ours = {name: version for name, version in found.items() if re.match(r"octavo(-|$)", name)}
        for name in sorted(ours):
            typer.echo(f"{name} {ours[name]}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version of each installed package and exit."
        ),
    ] = False,
) -> None:
    """Options of the command itself."""
