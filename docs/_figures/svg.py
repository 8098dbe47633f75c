"""SVG drawings in the look of the docs: text stays text, and colours follow the reader's light or dark scheme."""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.sax.saxutils import escape

# name: (tint and line in a light scheme, tint and line in a dark one)
FAMILIES = {
    "base": ("#e3edfb", "#2f6bb3", "#16283f", "#7fb2ee"),
    "torch": ("#fdeadf", "#c2571c", "#3a2113", "#f0a070"),
    "jax": ("#e2f3e8", "#2c7f4f", "#132e1f", "#79cf9e"),
    "native": ("#efe7fb", "#6f45b8", "#271a3d", "#b898f0"),
    "check": ("#fbf1d3", "#8f6a00", "#332a0e", "#e0bf5c"),
    "tool": ("#eceef1", "#57606a", "#22272e", "#aab4c0"),
}
SANS = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
# em; those of DejaVu, the widest of the usual fonts: what fits with them fits everywhere
MONO_WIDTH, SANS_WIDTH = 0.602, 0.56


def width_of(text: str, size: float, *, mono: bool = False) -> float:
    """An upper estimate of the width of a line of text."""
    return len(text) * size * (MONO_WIDTH if mono else SANS_WIDTH)


def wrap(text: str, width: float, size: float) -> list[str]:
    """`text` in lines that are at most `width` wide."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width_of(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


@dataclass
class Drawing:
    """Shapes on a sheet of a given width; `text` gives the file."""

    width: float
    title: str
    style: str = ""
    shapes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, family: str, radius: float = 8) -> None:
        """A rounded rectangle in the colours of a family."""
        self.shapes.append(
            f'<rect class="{family}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'
        )

    def write(self, x: float, y: float, text: str, kind: str = "prose", anchor: str = "start") -> None:
        """A line of text with its baseline at y; kind: title, name, prose, chip, step."""
        self.shapes.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def chip(self, x: float, y: float, text: str, size: float = 11) -> float:
        """A small label with its top at y; returns its width."""
        width = round(width_of(text, size, mono=True) + 10)
        self.shapes.append(f'<rect class="label" x="{x:g}" y="{y:g}" width="{width:g}" height="18" rx="4"/>')
        self.write(x + 5, y + 13, text, "chip")
        return width

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through the points, with a head at the last one."""
        path = " ".join(f"{'L' if number else 'M'}{x:g},{y:g}" for number, (x, y) in enumerate(points))
        self.shapes.append(f'<path class="arrow" d="{path}" marker-end="url(#head)"/>')

    def text(self, height: float) -> str:
        """The file, `height` high."""
        size = f'width="{self.width:g}" height="{height:g}" viewBox="0 0 {self.width:g} {height:g}"'
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>\n{_style()}{self.style}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto">'
            '<path class="head" d="M0,0 L8,4 L0,8 z"/></marker></defs>',
            f'<rect class="sheet" width="{self.width:g}" height="{height:g}" rx="10"/>',
        ]
        return "\n".join([*head, *self.shapes, "</svg>"]) + "\n"


def _style() -> str:
    lines = [
        f"text {{ font-family: {SANS}; fill: #1b1f24; }}",
        ".title { font-size: 15px; font-weight: 600; }",
        f".name {{ font-family: {MONO}; font-size: 13px; font-weight: 600; }}",
        ".prose { font-size: 11.5px; fill: #454c55; }",
        ".step { font-size: 12px; font-weight: 600; }",
        f".chip {{ font-family: {MONO}; font-size: 11px; }}",
        ".sheet { fill: #ffffff; stroke: #d5dae0; }",
        ".label { fill: #ffffff; fill-opacity: 0.75; }",
        ".arrow { fill: none; stroke: #57606a; stroke-width: 1.6; }",
        ".head { fill: #57606a; }",
        *(f".{name} {{ fill: {tint}; stroke: {line}; }}" for name, (tint, line, _, _) in FAMILIES.items()),
        "@media (prefers-color-scheme: dark) {",
        "text { fill: #e6edf3; }",
        ".prose { fill: #b3bcc6; }",
        ".sheet { fill: #13161b; stroke: #3a414a; }",
        ".label { fill: #000000; fill-opacity: 0.35; }",
        ".arrow { stroke: #aab4c0; }",
        ".head { fill: #aab4c0; }",
        *(f".{name} {{ fill: {tint}; stroke: {line}; }}" for name, (_, _, tint, line) in FAMILIES.items()),
        "}",
    ]
    return "\n".join(lines) + "\n"
