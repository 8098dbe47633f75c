"""The figure of groups and tails: rows sorted by expert, a matrix each, an empty group, rows past the sum."""

from __future__ import annotations

from sketch import Sketch

SIZES, ROWS = (20, 0, 3, 17), 48  # the quick start's
FAMILIES = ("torch", "check", "native", "jax")
TOP, PER_ROW, BAND = 64, 6, 110


def draw() -> str:
    """The SVG file."""
    sketch = Sketch(title="A grouped linear layer: consecutive rows of x are multiplied by their group's matrix")
    tail, bottom = TOP + sum(SIZES) * PER_ROW, TOP + ROWS * PER_ROW
    for x, name in ((176, "x  [48, K]"), (348, "weight  [4, N, K]"), (560, "y  [48, N]")):
        sketch.say(x + BAND / 2, 30, name, "middle", "code")
    at, box_at = TOP, TOP - 6
    for group, (size, family) in enumerate(zip(SIZES, FAMILIES, strict=True)):
        height, middle = size * PER_ROW, at + size * PER_ROW / 2
        sketch.cell(348, box_at, BAND, 58, family)
        sketch.say(348 + BAND / 2, box_at + 34, f"w[{group}]", "middle", "code")
        if size:
            sketch.say(160, middle + 5, f"group {group}: {size} rows", "end")
            sketch.cell(176, at, BAND, height, family)
            sketch.arrow((176 + BAND + 4, middle), (344, box_at + 29))
            sketch.arrow((348 + BAND + 4, box_at + 29), (556, middle))
            sketch.cell(560, at, BAND, height, family)
        else:
            sketch.say(160, at - 3, f"group {group}: none", "end")
            sketch.rule(166, at, 176 + BAND, at)
            sketch.say(474, box_at + 34, "dw[1] = 0", kind="code")
        at += height
        box_at += 72
    for x, text in ((176, "never read"), (560, "zeros")):
        sketch.cell(x, tail, BAND, bottom - tail, "tail")
        sketch.say(x + BAND / 2, (tail + bottom) / 2 + 5, text, "middle")
    sketch.say(160, (tail + bottom) / 2 + 5, "tail: 8 rows", "end")
    sketch.say(24, bottom + 34, "group_sizes = [20, 0, 3, 17]", kind="code")
    sketch.say(282, bottom + 34, "Any sizes, zero included, without padding.")
    return sketch.text(bottom + 54)
