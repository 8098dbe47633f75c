"""What commands print: Rich tables on a terminal; plain aligned text in a pipe or under NO_COLOR; JSON on request."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from octavo_registry.contract.plan import table

Json = Annotated[bool, typer.Option("--json", help="Print JSON, errors too.")]

_STYLES = {
    "ok": "green",
    "chosen": "bold green",
    "eligible": "cyan",
    "refused": "yellow",
    "absent": "dim",
    "skipped": "dim",
    "broken": "bold red",
}


def fancy() -> bool:
    """True where stdout is a terminal that takes colours: not under NO_COLOR or TERM=dumb, not in a pipe."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def clean(text: object) -> str:
    """One line without control characters: what plugins say must not move the terminal's cursor."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_line(text: str = "") -> None:
    """One line of text on stdout."""
    print("\n".join(clean(line) for line in text.split("\n")))


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A titled table. Off a terminal every row is one line, however long, so that grep and diff work."""
    cells = [[clean(cell) for cell in row] for row in rows]
    if not fancy():
        print(title)
        print(table([[name.upper() for name in header], *cells]) if cells else "  none")
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not cells:
        console.print(Text(f"{title}: none"))
        return
    shown = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, header_style="dim")
    for index, name in enumerate(header):
        shown.add_column(name, overflow="fold", no_wrap=index < len(header) - 1 and len(name) < 12)
    for row in cells:
        shown.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(shown)
