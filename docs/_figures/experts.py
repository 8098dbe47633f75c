"""The figure of experts over ranks: what a MoE layer sends away and what comes back, in forward and backward."""

from __future__ import annotations

from sketch import Sketch

LEFT, WIDTH = (20, 430), 270
_AT_HOME = ((76, "x [T, K], choices, weights", "torch"), (126, "tokens for each rank, once", "native"))
_THERE = (
    (190, "tokens of all ranks, in order", "native"),
    (240, "permute, fc1, activation, fc2", "tool"),
    (290, "rows of its experts", "native"),
)


def draw() -> str:
    """The SVG file."""
    sketch = Sketch(title="Experts over ranks: a token travels once to each rank, rows or sums come back")
    for rank, x in enumerate(LEFT):
        sketch.say(
            x + WIDTH / 2, 26, f"rank {rank}: experts {'0 to G - 1' if rank == 0 else 'G to 2G - 1'}", "middle", "head1"
        )
        sketch.box(x, 40, WIDTH, 380, "tool")
        for y, text, family in (*_AT_HOME, *_THERE, (354, "y [T, N]: summed at home, in fp32", "torch")):
            sketch.box(x + 14, y, WIDTH - 28, 34, family, 4)
            sketch.say(x + 24, y + 22, text, kind="quiet")
        for y in (110, 224, 274):
            sketch.arrow((x + WIDTH / 2, y), (x + WIDTH / 2, y + 15))
        sketch.arrow((x + 60, 160), (x + 60, 189))
        sketch.arrow((x + 60, 324), (x + 60, 353))
    for top, name, what in ((160, "tokens", "values or codes"), (324, "rows or sums", "bf16")):
        (left, right), far = (LEFT[0] + WIDTH - 40, LEFT[1] + 40), top + 29
        sketch.arrow((left, top), (right, far))
        sketch.arrow((right, top), (left, far))
        middle = (left + right) / 2
        sketch.say(middle, top - 8, name, "middle", "quiet")
        sketch.say(middle, far + 22, what, "middle", "quiet")
    sketch.say(
        LEFT[0],
        446,
        "Backward: dy takes the tokens' way, dx and the weights' gradients take the rows' way.",
        kind="quiet",
    )
    return sketch.text(462)
