"""The page around charts and tables: one style for light, dark, phones and paper; a link to Octavo's documentation."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from html import escape
from importlib.resources import files


def document(title: str, lead: str, body: str) -> str:
    """A whole HTML page: nothing is fetched from anywhere."""
    assets = files("octavo_cli.page")
    style, script = ((assets / name).read_text(encoding="utf-8") for name in ("page.css", "charts.js"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Octavo: {escape(title)}</title>
<style>{style}</style>
</head>
<body>
<main>
<header>
<p class="brand">{_brand()}</p>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
</header>
{body}
<footer><p>{_brand()}</p></footer>
</main>
<script>{script}</script>
</body>
</html>
"""


def _brand() -> str:
    """Octavo's name and version, and where its documentation is: an address where the package names one."""
    about = importlib.metadata.metadata("octavo")
    urls = dict(part.split(", ", 1) for part in about.get_all("Project-URL") or [] if ", " in part)
    name = f"<strong>Octavo</strong> {escape(about['Version'])}"
    address = urls.get("Documentation") or urls.get("Homepage")
    if address is None:
        return f"{name} · documentation: <code>docs/index.md</code> of its source tree, or <code>octavo --help</code>"
    return f'{name} · <a href="{escape(address)}">documentation</a>'


def section(name: str, heading: str, content: str) -> str:
    """A part of the page that a link can lead to."""
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(heading)}</h2>{content}</section>'


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table, of which each row becomes a list of named values on a narrow screen. Cells are HTML.

    numbers   columns that are aligned to the right
    """

    def kind(column: int) -> str:
        return ' class="n"' if column in numbers else ""

    head = "".join(f'<th scope="col"{kind(at)}>{escape(name)}</th>' for at, name in enumerate(header))
    lines = []
    for first, *cells in rows:
        rest = "".join(
            f'<td{kind(at)} data-name="{escape(header[at])}">{cell}</td>' for at, cell in enumerate(cells, 1)
        )
        lines.append(f'<tr><th scope="row">{first}</th>{rest}</tr>')
    told = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table>{told}<thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def facts(named: dict[str, str]) -> str:
    """A list of names and values."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in named.items())}</dl>"
