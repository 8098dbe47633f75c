"""The `octavo` command. Other distributions add commands by the entry-point group `octavo.commands`."""

from __future__ import annotations

from octavo_registry.cli.app import app
from octavo_registry.cli.output import prepare_streams


def main() -> None:
    """Entry point of the console script; exits with 0 (fine), 1 (broken or unserved) or 2 (bad input)."""
    prepare_streams()
    app()


__all__ = ["app", "main"]
