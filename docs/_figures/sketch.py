"""Sketches for the pages of a guide: larger type than the maps of the tree, cells, tails, two tints per family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from svg import FAMILIES, MONO, Drawing, width_of

WIDTH = 720
LARGEST = 15
_STYLE = "\n".join(
    [
        ".say { font-size: 14px; }",
        ".quiet { font-size: 13px; fill: #57606a; }",
        ".head1 { font-size: 15px; font-weight: 600; }",
        f".code {{ font-family: {MONO}; font-size: 13px; }}",
        ".void { fill: none; stroke: #8a939e; stroke-dasharray: 5 4; }",
        ".tail { fill: #8a939e; fill-opacity: 0.22; stroke: #8a939e; stroke-dasharray: 5 4; }",
        ".rule { stroke: #8a939e; stroke-width: 1; }",
        ".frame { fill: none; stroke: #1b1f24; stroke-width: 2; }",
        *(f".{name}-deep {{ fill: {line}; fill-opacity: 0.55; }}" for name, (_, line, _, _) in FAMILIES.items()),
        *(
            f".{name}-line {{ fill: none; stroke: {line}; stroke-width: 2; }}"
            for name, (_, line, _, _) in FAMILIES.items()
        ),
        "@media (prefers-color-scheme: dark) {",
        ".quiet { fill: #b3bcc6; }",
        ".frame { stroke: #e6edf3; }",
        *(f".{name}-deep {{ fill: {line}; }}" for name, (_, _, _, line) in FAMILIES.items()),
        *(f".{name}-line {{ stroke: {line}; }}" for name, (_, _, _, line) in FAMILIES.items()),
        "}",
    ]
)


@dataclass
class Sketch(Drawing):
    """A drawing 720 wide whose smallest text is 13 px, so that it can be read on a telephone held sideways."""

    width: float = WIDTH
    title: str = ""
    style: str = _STYLE + "\n"

    def cell(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """A rectangle with sharp corners: a family, "<family>-deep", void, tail or frame."""
        self.shapes.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>')

    def say(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "say") -> None:
        """A line of text; ValueError where it leaves the sheet in the widest of the usual fonts."""
        width = width_of(text, {"head1": 15, "say": 14}.get(kind, 13), mono=kind == "code")
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        if left < 0 or left + width > self.width:
            raise ValueError(f"{text!r} reaches from {left:.0f} to {left + width:.0f} of {self.width}; make it shorter")
        self.write(x, y, text, kind, anchor)

    def rule(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A thin line."""
        self.shapes.append(f'<line class="rule" x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"/>')

    def line(self, points: Sequence[tuple[float, float]], family: str, *, dashed: bool = False) -> None:
        """A line through the points, in a family's colour."""
        path = " ".join(f"{'L' if number else 'M'}{x:g},{y:g}" for number, (x, y) in enumerate(points))
        dashes = ' stroke-dasharray="6 3"' if dashed else ""
        self.shapes.append(f'<path class="{family}-line"{dashes} d="{path}"/>')
