"""The roofline of the grouped GEMMs: the rate that each reached over the products that it makes of a byte."""

from __future__ import annotations

from math import log2

from sketch import Sketch
from speed import BATCHED, record

from octavo_bench.gemm.row import moved_bytes
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.shapes import Shape
from octavo_cli.advice import CHIPS

LEFT, BOTTOM, OCTAVE = 64, 350, 84
INTENSITIES, RATES = (64, 4096), (256, 2048)
MARK = 9
CHIP = CHIPS["h200"]
SERIES = {  # case, whether it is a wgrad: label, family
    ("bf16", False): ("bf16", "base"),
    ("bf16", True): ("bf16", "base"),
    ("bf16 += fp32", True): ("bf16 += fp32", "tool"),
    ("block", False): ("block", "jax"),
    ("block", True): ("block wgrad", "check"),
    ("block += fp32", True): ("block wgrad += fp32", "torch"),
}


def points() -> list[tuple[str, float, float]]:
    """Case, FLOP per byte and TFLOP/s of every GEMM of the record that is drawn."""
    found = []
    for row in record(BATCHED)["rows"]:
        wgrad = row["gemm"] == "wgrad"
        if (row["case"], wgrad) in SERIES:
            kind, _, added = row["case"].partition(" ")
            shape = Shape(row["name"], *row["shape"])
            bytes_moved = moved_bytes(GemmCase(kind, row["gemm"], accumulate=bool(added)), shape)
            found.append((SERIES[row["case"], wgrad][0], shape.flops / bytes_moved, row["tflops"]))
    return found


def place(intensity: float, rate: float) -> tuple[float, float]:
    """Where it lies on the sheet: both axes are logarithmic, with octaves of one length."""
    return LEFT + log2(intensity / INTENSITIES[0]) * OCTAVE, BOTTOM - log2(rate / RATES[0]) * OCTAVE


def draw() -> str:
    """The SVG file."""
    copy = float(record(BATCHED)["copy_tb_per_s"])
    sketch = Sketch(title="Grouped GEMMs on an H200 under the limits of memory and of the tensor cores")
    sketch.say(16, 28, sketch.title, kind="head1")
    x = 16.0
    families = dict(SERIES.values())
    for label, family in families.items():
        sketch.cell(x, 42, 14, 14, f"{family}-deep")
        sketch.say(x + 20, 54, label, kind="quiet")
        x += 20 + len(label) * 7.4 + 22
    right, top = place(INTENSITIES[1], RATES[1])
    for octave in range(round(log2(RATES[1] / RATES[0])) + 1):
        rate = RATES[0] * 2**octave
        sketch.rule(LEFT, place(1, rate)[1], right, place(1, rate)[1])
        sketch.say(LEFT - 8, place(1, rate)[1] + 5, f"{rate}", "end", "quiet")
    for octave in range(round(log2(INTENSITIES[1] / INTENSITIES[0])) + 1):
        sketch.say(
            place(INTENSITIES[0] * 2**octave, 1)[0], BOTTOM + 20, f"{INTENSITIES[0] * 2**octave}", "middle", "quiet"
        )
    sketch.line([place(INTENSITIES[0], copy * INTENSITIES[0]), place(CHIP.fp8 / copy, CHIP.fp8)], "native")
    for rate, name in ((CHIP.fp8, "FP8"), (CHIP.bf16, "bf16")):
        y = place(1, rate)[1]
        sketch.line([place(rate / copy, rate), (right, y)], "native")
        sketch.say(right + 6, y + 5, f"{name}, {rate:.0f}", kind="quiet")
    x, y = place(1400 / copy, 1400)
    sketch.say(x - 12, y, f"memory, {copy:.2f} TB/s", "end", "quiet")
    for label, intensity, rate in points():
        at_x, at_y = place(intensity, rate)
        sketch.cell(at_x - MARK / 2, at_y - MARK / 2, MARK, MARK, f"{families[label]}-deep")
    sketch.say((LEFT + right) / 2, BOTTOM + 42, "FLOP per byte that has to move", "middle", "quiet")
    sketch.say(16, top - 14, "TFLOP/s", kind="quiet")
    sketch.say(16, BOTTOM + 66, f"One H200, even groups; benchmarks/results/{BATCHED}.json", kind="quiet")
    return sketch.text(BOTTOM + 84)
