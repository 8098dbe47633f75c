"""Docstrings as reStructuredText. Here they are plain text, in which aligned columns stay aligned and the rest flows.

A paragraph in which a line has a word, two or more blanks and more text is a table and becomes a literal block; in
other paragraphs `names` become literals and characters that mean something to reStructuredText are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sphinx.application import Sphinx

_COLUMNS = re.compile(r"\S {2,}\S")
_NAME = re.compile(r"`+([^`]+)`+")
_SPECIAL = re.compile(r"([*|_\\])")


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []


def _prose(line: str) -> str:
    parts = _NAME.split(line.strip())
    return "".join(f"``{part}``" if i % 2 else _SPECIAL.sub(r"\\\1", part) for i, part in enumerate(parts))


def _is_table(paragraph: list[str]) -> bool:
    indented = any(line.startswith(" ") for line in paragraph)
    return indented or any(_COLUMNS.search(line) or line.startswith(("|", "- ")) for line in paragraph)


def render(lines: list[str]) -> list[str]:
    """The lines of one docstring as reStructuredText."""
    rendered: list[str] = []
    for paragraph in _paragraphs(lines):
        if paragraph == ["::"]:  # reStructuredText's sign that code follows, which is a literal block anyway
            continue
        if _is_table(paragraph):
            rendered += [".. code-block:: text", "", *(f"   {line}" for line in paragraph), ""]
        else:
            rendered += [*map(_prose, paragraph), ""]
    return rendered


def _process(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = render(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True}
