"""What commands print: Rich tables on a terminal, plain text on one without colours or in a pipe; JSON on request."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from octavo_registry.contract.plan import table

if TYPE_CHECKING:
    from rich.console import Console

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
_LAST_COLUMN = 28
"""A last column that is longer wraps in a column of this width or more; with less room a row becomes a block."""

_GAP = 2
"""Spaces between two columns of plain text and of a block."""
_PADDING, _EDGES = 3, 1
"""What Rich draws around each column of a table, and around the table."""


def prepare_streams() -> None:
    """A stdout or stderr that is closed drops what is printed; stdout escapes what its encoding has no character for,
    as stderr does."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - the process's own
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def fancy() -> bool:
    """True where stdout is a terminal that takes colours: not under NO_COLOR or TERM=dumb, not in a pipe or closed."""
    return _on_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _on_terminal() -> bool:
    stdout: TextIO | None = sys.stdout
    return stdout is not None and stdout.isatty()


def clean(text: object) -> str:
    """One line without control characters: what plugins say must not move the terminal's cursor."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def print_json(value: Any) -> None:
    """One JSON document on stdout, in ASCII where that has not all of Unicode: `prepare_streams` would break JSON."""
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(value, indent=2, ensure_ascii=not unicode))


def print_line(text: str = "") -> None:
    """One line of text on stdout."""
    print("\n".join(clean(line) for line in text.split("\n")))


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A titled table. Off a terminal every row is one line, however long, so that grep and diff work.

    On a terminal nothing is cropped: where the columns do not fit side by side each row becomes a block of lines.
    """
    cells = [[clean(cell) for cell in row] for row in rows]
    if not fancy():
        plain = [name.upper() for name in header]
        if _on_terminal():
            print(table_text(title, plain, cells, shutil.get_terminal_size().columns))
        else:
            print(title)
            print(table([plain, *cells]) if cells else "  none")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if not cells:
        console.print(Text(f"{title}: none"))
    elif needed_width(header, cells) <= console.width:
        _print_grid(console, title, header, cells)
    else:
        _print_blocks(console, title, header, cells)


def table_text(title: str, header: Sequence[str], rows: Iterable[Sequence[object]], width: int) -> str:
    """A titled table as plain text whose lines have at most `width` columns: where they do not fit, blocks of lines."""
    cells = [[clean(cell) for cell in row] for row in rows]
    wanted = sum(max(len(name), *(len(row[i]) for row in cells)) + _GAP for i, name in enumerate(header))
    if not cells or wanted <= width:
        return f"{title}\n" + (table([list(header), *cells]) if cells else "  none")
    label = max(map(len, header)) + _GAP
    lines = [title]
    for row in cells:
        lines += [f"  {part}" for part in wrap(row[0], max(width - 2, 8)) or [""]]
        for name, cell in zip(header[1:], row[1:], strict=True):
            parts = wrap(cell, max(width - label - 4, 8)) if cell else []
            lines += [f"    {name if i == 0 else '':<{label}}{part}" for i, part in enumerate(parts)]
    return "\n".join(lines)


def needed_width(header: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """Columns of the terminal below which something of a table would have to be left out.

    All but the last column are shown whole; the last one wraps between words.
    """
    from rich.cells import cell_len

    def width(texts: Iterable[str]) -> int:
        return max(map(cell_len, texts), default=0)

    columns = list(zip(*cells, strict=True))
    widths = [max(cell_len(name), width(column)) for name, column in zip(header, columns, strict=True)]
    longest_word = width(word for cell in columns[-1] for word in cell.split())
    widths[-1] = max(cell_len(header[-1]), longest_word, min(widths[-1], _LAST_COLUMN))
    return sum(widths) + _PADDING * len(widths) + _EDGES


def _print_grid(console: Console, title: str, header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, header_style="dim")
    for index, name in enumerate(header):
        shown.add_column(name, no_wrap=index < len(header) - 1, overflow="fold")
    for row in cells:
        shown.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(shown)


def _print_blocks(console: Console, title: str, header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Each row as its first cell and below it a line per other cell, which wraps where it is long."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console.print(Text(title, style="bold"))
    for row in cells:
        console.print()
        console.print(Padding(Text(row[0], style="bold", overflow="fold"), (0, 0, 0, 1)))
        block = Table.grid(padding=(0, _GAP, 0, 0))
        block.add_column(style="dim", no_wrap=True)
        block.add_column(overflow="fold")
        for name, cell in zip(header[1:], row[1:], strict=True):
            if cell:
                block.add_row(name, Text(cell, style=_STYLES.get(cell, "")))
        console.print(Padding(block, (0, 0, 0, 3)))
    console.print()
