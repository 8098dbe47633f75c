"""The figure of scales: which values of x and of a weight share one scale, in each recipe."""

from __future__ import annotations

from sketch import Sketch

SIDE, LEFT, STEP = 104, 96, 124
GROUPS = (5, 8)  # rows of the two groups that are drawn

# title, second line, cells across a row of x, rows of x in a cell (0: the whole group), cells of w across and down
RECIPES = (
    ("delayed, current", "per group", 1, 0, 1, 1),
    ("row", "per row", 1, 1, 1, 13),
    ("block", "1x128, 128x128", 2, 1, 2, 2),
    ("mxfp8", "1x32", 8, 1, 8, 13),
    ("nvfp4", "1x16, 16x16", 16, 1, 16, 16),
)


def draw() -> str:
    """The SVG file."""
    sketch = Sketch(title="Which values share a scale in each recipe")
    for number, (name, unit, across, rows, w_across, w_down) in enumerate(RECIPES):
        x = LEFT + number * STEP
        sketch.say(x + SIDE / 2, 28, name, "middle", "code")
        sketch.say(x + SIDE / 2, 48, unit, "middle", "quiet")
        height, at = SIDE / sum(GROUPS), 62.0
        parity = 0
        for family, size in zip(("torch", "jax"), GROUPS, strict=True):
            down = size if rows else 1
            _grid(sketch, (x, at, SIDE, size * height), (across, down), family, parity)
            parity += down
            if name == "nvfp4":
                sketch.cell(x, at, SIDE, size * height, "frame")
            at += size * height
        _grid(sketch, (x, 196, SIDE, SIDE), (w_across, w_down), "native", 0)
        if name == "nvfp4":
            sketch.cell(x, 196, SIDE, SIDE, "frame")
    sketch.say(84, 88, "x: group 0", "end")
    sketch.say(84, 132, "group 1", "end")
    sketch.say(84, 252, "w, one", "end")
    sketch.say(84, 270, "expert", "end")
    sketch.say(24, 332, "Each cell has one scale; sizes of cells are not to scale.", kind="quiet")
    sketch.say(24, 352, "A frame is the second scale of nvfp4, one per group.", kind="quiet")
    return sketch.text(370)


def _grid(
    sketch: Sketch, box: tuple[float, float, float, float], cells: tuple[int, int], family: str, parity: int
) -> None:
    x, y, width, height = box
    across, down = cells
    sketch.cell(x, y, width, height, family)
    step_x, step_y = width / across, height / down
    for row in range(down):
        for column in range(across):
            if (row + column + parity) % 2:
                sketch.cell(x + column * step_x, y + row * step_y, step_x, step_y, f"{family}-deep")
