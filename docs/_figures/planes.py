"""The figure of planes and panels: an operand quantized along its rows and along its columns, and who reads which."""

from __future__ import annotations

from sketch import Sketch

TOP, HEIGHT = 66, 198
PANEL = 60
GROUPS = (("torch", 108, 2), ("jax", 30, 1), ("native", 60, 1))  # family, height of its rows in x, its panels


def draw() -> str:
    """The SVG file."""
    sketch = Sketch(title="An operand has two planes of codes: rows for fprop and dgrad, columns in panels for wgrad")
    for x, text in ((24, "x, in bf16"), (258, "row plane"), (494, "column plane, in panels")):
        sketch.say(x, 28, text, kind="head1")
    for x, text in ((24, "[M, K]"), (258, "codes [M, K], scales"), (494, "128 rows each, by group")):
        sketch.say(x, 48, text, kind="quiet")
    at, panel_at = float(TOP), float(TOP)
    for group, (family, height, panels) in enumerate(GROUPS):
        sketch.cell(24, at, 150, height, family)
        sketch.say(99, at + height / 2 + 5, f"group {group}", "middle")
        rows = round(height / 9)
        for row in range(rows):  # a strip of 128 values, a scale beside it
            y = at + row * height / rows
            for part in range(2):
                sketch.cell(258 + 66 * part, y, 66, height / rows, family if (row + part) % 2 else f"{family}-deep")
                sketch.cell(396 + 12 * part, y, 12, height / rows, family if (row + part) % 2 else f"{family}-deep")
        left = height
        for _ in range(panels):
            sketch.cell(494, panel_at, 150, PANEL, "void")
            filled = min(PANEL, left)
            for column in range(15):
                kind = family if column % 2 else f"{family}-deep"
                sketch.cell(494 + 10 * column, panel_at, 10, filled, kind)
            left -= filled
            panel_at += PANEL + 6
        at += height
    middle = TOP + HEIGHT / 2
    sketch.arrow((178, middle), (252, middle))
    sketch.say(215, middle - 10, "quantize", "middle", "quiet")
    below = TOP + HEIGHT + 16
    sketch.arrow((99, TOP + HEIGHT + 3), (99, below), (488, below))
    bottom = TOP + 4 * (PANEL + 6) + 18
    sketch.say(24, bottom - 20, "A panel restarts at", kind="quiet")
    sketch.say(24, bottom - 2, "each group: no padding", kind="quiet")
    sketch.say(24, bottom + 16, "by the caller.", kind="quiet")
    sketch.say(258, bottom - 20, "fprop and dgrad sum", kind="say")
    sketch.say(258, bottom, "along a row.", kind="say")
    sketch.say(494, bottom + 4, "wgrad sums over tokens,", kind="say")
    sketch.say(494, bottom + 24, "down a column.", kind="say")
    return sketch.text(bottom + 44)
