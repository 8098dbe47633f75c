"""The figure of a mesh: what stays on a device and what moves between devices, in a layer over ep and fsdp."""

from __future__ import annotations

from sketch import Sketch

LEFT, WIDTH, GAP = (20, 430), 270, 140


def draw() -> str:
    """The SVG file."""
    sketch = Sketch(title="A grouped layer on a mesh of experts (ep) by data (fsdp): codes move, tokens stay")
    for place, x in enumerate(LEFT):
        sketch.say(x + WIDTH / 2, 26, f"fsdp {place}", "middle", "head1")
        sketch.box(x, 40, WIDTH, 294, "tool")
        sketch.say(x + 14, 64, "ep 0: experts 0 to G - 1", kind="quiet")
        half = ("first", "second")[place]
        for y, height, family, text in (
            (76, 34, "torch", f"tokens of block (0, {place}): they stay"),
            (122, 34, "native", f"weights, {half} half of K, bf16"),
            (172, 34, "native", "codes and scales of its half"),
            (222, 34, "native", "codes and scales of all of K"),
            (272, 46, "jax", f"dw: its {half} half, summed"),
        ):
            sketch.box(x + 14, y, WIDTH - 28, height, family, 4)
            sketch.say(x + 24, y + height / 2 + 5, text, kind="quiet")
        for y in (156, 206):
            sketch.arrow((x + WIDTH / 2, y), (x + WIDTH / 2, y + 15))
        sketch.say(x + WIDTH / 2 + 10, 169, "quantize", kind="quiet")
    middle = (LEFT[0] + WIDTH + LEFT[1]) / 2
    for y, name, what in ((186, "all-gather", "1 byte per value"), (294, "reduce-scatter", "once, in fp32")):
        sketch.arrow((LEFT[0] + WIDTH - 10, y + 8), (LEFT[1] + 10, y + 8))
        sketch.arrow((LEFT[1] + 10, y + 14), (LEFT[0] + WIDTH - 10, y + 14))
        sketch.say(middle, y - 14, name, "middle", "quiet")
        sketch.say(middle, y + 34, what, "middle", "quiet")
    sketch.box(LEFT[0], 352, LEFT[1] + WIDTH - LEFT[0], 54, "tool")
    sketch.say(LEFT[0] + 14, 376, "ep 1: experts G to 2G - 1, likewise.", kind="quiet")
    sketch.say(LEFT[0] + 14, 396, "Nothing moves between ep 0 and ep 1: only a MoE block sends tokens.", kind="quiet")
    return sketch.text(424)
