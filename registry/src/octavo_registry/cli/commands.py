"""Which commands there are: Octavo's, and those of the entry-point group `octavo.commands`, loaded when called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

import typer

from octavo import OctavoError
from octavo_registry.cli.output import fancy
from octavo_registry.discovery.entry_points import Published, published
from octavo_registry.discovery.guard import Fault, guard
from octavo_registry.discovery.install import how_to_install
from octavo_registry.discovery.names import void_claims

GROUP = "octavo.commands"

BUILT_IN: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "doctor": ("octavo_registry.cli.doctor:doctor", "What is installed, what of it works, and a self-test."),
        "why": (
            "octavo_registry.cli.why.command:why",
            "Which backend serves an operation or a layer, and why the others do not.",
        ),
        "recipes": ("octavo_registry.cli.recipes:app", "List, show and compare recipes."),
    }
)
"""Commands of this distribution: where they are, and their line of help."""

OWN: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "conform": ("octavo-conformance", "Run the conformance suite on a backend."),
        "inspect": ("octavo", "What is in a checkpoint, and what each recipe would do to its tensors."),
        "compare": ("octavo", "Compare two runs of train, or two results of bench."),
        "advise": ("octavo", "Which recipe suits a layer: SQNR, bytes and expected time."),
        "train": ("octavo", "Train a small mixture-of-experts model in several recipes and compare them."),
        "bench": ("octavo-bench", "Time kernels and layers against the hardware and other libraries."),
        "new": ("octavo", "Start a backend package of your own from the tested template."),
    }
)
"""Commands of Octavo's other distributions, which alone may use these names, and their lines of help."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its line of help is known without loading it.

    fault  why it must not be loaded; "" otherwise
    """

    name: str
    value: str
    distribution: str
    version: str
    help: str
    entry: Published | None
    fault: str = ""

    def load(self) -> Any:
        """The click command; `Fault` where it does not load."""
        if self.fault:
            raise Fault(self.fault)
        if self.entry is not None:
            return guard(_as_command, self.name, self.entry.load())
        module, _, attribute = self.value.partition(":")
        return _as_command(self.name, getattr(import_module(module), attribute))

    def load_or_fail(self) -> Any:
        """The click command; OctavoError says which distribution's command does not load, and why."""
        try:
            return self.load()
        except Fault as fault:
            raise OctavoError(
                f"{self.name}: the command of {self.distribution} {self.version} is broken: {fault}; "
                f"upgrade or uninstall {self.distribution}"
            ) from fault


def _as_command(name: str, loaded: Any) -> Any:
    """A click command called `name` from a Typer app, a click command or a function."""
    if isinstance(loaded, typer.Typer):
        loaded.rich_markup_mode = "rich" if fancy() else None
        command = typer.main.get_command(loaded)
        command.params = [p for p in command.params if p.name not in ("install_completion", "show_completion")]
    elif hasattr(loaded, "make_context") and hasattr(loaded, "invoke"):
        command = loaded
    elif callable(loaded):
        app = typer.Typer(add_completion=False, rich_markup_mode="rich" if fancy() else None)
        app.command(name)(loaded)
        command = typer.main.get_command(app)
    else:
        raise TypeError(f"{loaded!r} is not a command; name a Typer app or a function")
    command.name = name
    return command


def _line_of_help(entry: Published) -> str:
    owner, line = OWN.get(entry.name, ("", ""))
    if owner == entry.distribution:
        return line
    return f"{entry.summary or 'No summary.'} ({entry.distribution})"


def external_commands() -> tuple[Command, ...]:
    """Commands of other distributions by name, those whose name is not theirs too. Nothing is imported."""
    entries = published(GROUP)
    reserved = dict.fromkeys(BUILT_IN, "octavo-registry") | {name: owner for name, (owner, _) in OWN.items()}
    void = void_claims([entry.claim for entry in entries], reserved)
    commands = (
        Command(
            name=entry.name,
            value=entry.value,
            distribution=entry.distribution,
            version=entry.version,
            help=_line_of_help(entry),
            entry=entry,
            fault=void.get(position, entry.fault),
        )
        for position, entry in enumerate(entries)
    )
    return tuple(sorted(commands, key=lambda command: (command.name, command.fault != "", command.distribution)))


def absent_command(name: str) -> str | None:
    """What to install for a command of Octavo's own that is not here; None for a name that no distribution has."""
    if name not in OWN:
        return None
    owner, _ = OWN[name]
    return f"`octavo {name}` is a command of {owner}, which is not installed; {how_to_install(owner)}"


def find_commands() -> dict[str, Command]:
    """The command that each name stands for: Octavo's, then those of others. Nothing is imported."""
    by_name = {
        name: Command(name, value, "octavo-registry", "", text, None) for name, (value, text) in BUILT_IN.items()
    }
    for command in external_commands():
        by_name.setdefault(command.name, command)
    return by_name
