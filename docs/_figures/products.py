"""The figure of the three products: which plane of which operand each one reads."""

from __future__ import annotations

from sketch import Sketch

ROWS = (
    ("fprop", "y = x w[g]ᵀ", ("x", "rows", "torch"), ("w", "rows", "native"), "in-features"),
    ("dgrad", "dx = dy w[g]", ("dy", "rows", "jax"), ("w", "columns", "native"), "out-features"),
    ("wgrad", "dw[g] = dyᵀ x", ("dy", "columns", "jax"), ("x", "columns", "torch"), "the group's tokens"),
)


def draw() -> str:
    """The SVG file."""
    sketch = Sketch(title="The three products of a grouped linear layer and the planes that they read")
    for x, text in ((24, "product"), (110, "computes"), (262, "reads"), (558, "sums over")):
        sketch.say(x, 30, text, kind="head1")
    for number, (name, formula, first, second, over) in enumerate(ROWS):
        y = 50 + number * 92
        sketch.rule(24, y, 696, y)
        sketch.say(24, y + 50, name, kind="code")
        sketch.say(110, y + 50, formula, kind="code")
        for place, (operand, direction, family) in enumerate((first, second)):
            _plane(sketch, 262 + place * 144, y + 16, direction, family)
            sketch.say(262 + place * 144 + 66, y + 40, operand, kind="code")
            sketch.say(262 + place * 144 + 66, y + 60, direction, kind="quiet")
        sketch.say(558, y + 50, over, kind="say")
    return sketch.text(50 + 3 * 92)


def _plane(sketch: Sketch, x: float, y: float, direction: str, family: str) -> None:
    """A small matrix striped along its rows or its columns."""
    for part in range(6):
        kind = family if part % 2 else f"{family}-deep"
        box = (x, y + part * 10, 56, 10) if direction == "rows" else (x + part * 56 / 6, y, 56 / 6, 60)
        sketch.cell(*box, kind)
