"""The calls that compare_quantizers.py makes: those whose bits are compared, and those that are timed."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from layers import LINEAR

BOTH = ("rowwise", "columnwise")
NATIVE = {"rowwise": "rows", "columnwise": "panels"}

SPECS: dict[str, dict[str, Any]] = {
    "nvfp4": {"scaling": "nvfp4", "format": "e2m1"},
    "nvfp4 x": {"scaling": "nvfp4", "format": "e2m1", "hadamard": True},
    "nvfp4 dy": {"scaling": "nvfp4", "format": "e2m1", "hadamard": True, "stochastic": True, "operand": "dy"},
    "nvfp4 stochastic": {"scaling": "nvfp4", "format": "e2m1", "stochastic": True, "operand": "dy"},
    "nvfp4 w": {"scaling": "nvfp4", "format": "e2m1", "square": True, "operand": "w"},
    "nvfp4 stochastic w": {
        "scaling": "nvfp4", "format": "e2m1", "square": True, "stochastic": True, "operand": "w"
    },
    "delayed": {"scaling": "delayed", "format": "e4m3"},
    "current": {"scaling": "current", "format": "e5m2"},
    "row": {"scaling": "row", "format": "e4m3"},
    "block": {"scaling": "block", "format": "e4m3", "power_of_two": True},
    "block of any scale": {"scaling": "block", "format": "e4m3"},
    "block w": {"scaling": "block", "format": "e4m3", "power_of_two": True, "square": True, "operand": "w"},
    "mxfp8": {"scaling": "mxfp8", "format": "e4m3"},
    "mxfp8 w": {"scaling": "mxfp8", "format": "e4m3", "square": True, "operand": "w"},
}  # fmt: skip

RAGGED = {  # name: (sizes, rows past the last group)
    "ragged": ((0, 1, 17, 130, 0, 96, 300), 21),
    "bad sizes": ((-3, 120, 1 << 62, 5), 0),
    "edges": ((15, 16, 31, 33, 127, 128, 129, 0), 3),
    "one": ((513,), 0),
    "none": ((0, 0, 0), 5),
}
COLUMNS = (8, 16, 24, 37, 128, 136, 272, 1040, 2048)
PROLOGUES = ("swiglu", "dswiglu", "clamped_swiglu", "clamped_dswiglu", "silu", "rms")
TIMED: dict[str, tuple[Any, ...]] = {  # what is timed: (spec, prologue, planes, other inputs and outputs)
    "w": ("nvfp4 w", "", BOTH),
    "x": ("nvfp4 x", "", BOTH),
    "dy": ("nvfp4 dy", "", BOTH),
    "plain": ("nvfp4", "", BOTH),
    "row": ("nvfp4", "", ("rowwise",)),
    "dswiglu block": ("block", "dswiglu", BOTH),
    "clamped dswiglu block": ("block", "clamped_dswiglu", BOTH, ("probs",)),
    "dswiglu block rows": ("block", "dswiglu", ("rowwise",)),
    "dswiglu delayed": ("delayed", "dswiglu", BOTH),
    "dswiglu mxfp8": ("mxfp8", "dswiglu", BOTH),
    "swiglu block": ("block", "swiglu", BOTH),
    "current": ("current", "", BOTH),
    "current row": ("current", "", ("rowwise",)),
    "current w": ("current", "", BOTH),
    "current dy": ("current", "", BOTH),
    "rows": ("row", "", BOTH),
    "rows w": ("row", "", BOTH),
    "rows dy": ("row", "", BOTH),
}


def case_of(spec: str, cols: int, **others: Any) -> dict[str, Any]:
    """A case: groups of `sizes`, or matrices of `matrix_rows` rows."""
    plain = {"dtype": "bfloat16", "planes": BOTH, "native": True, "prologue": "", "values": "normal", "extras": ()}
    return {"spec": spec, "cols": cols, "sizes": (), "tail": 0, "matrix_rows": 0, "each": 0, "gap": 0} | plain | others


def judged(kinds: list[str]) -> list[dict[str, Any]]:
    """Cases whose bits are compared."""
    cases = []
    turn = itertools.count()
    planes = (("rowwise",), ("columnwise",), BOTH)
    values = ("normal", "every", "exponents", "zeros", "special", "small", "huge")
    for spec in kinds:
        square, hadamard = "square" in SPECS[spec], "hadamard" in SPECS[spec]
        for dtype, cols, which in itertools.product(("bfloat16", "float16", "float32"), COLUMNS, planes):
            for _ in range(2 if which == BOTH else 1):
                number = next(turn)
                sizes, tail = list(RAGGED.values())[number % len(RAGGED)]
                one = case_of(
                    spec,
                    cols,
                    sizes=sizes,
                    tail=tail,
                    dtype=dtype,
                    planes=which,
                    native=number % 5 != 4,
                    values=values[number % len(values)],
                    gap=(0, 0, 8, 3)[number % 4],
                    each=(0, 0, 2)[number % 3],
                    extras=((), ("amax",), (), ("dequantized",), (), ("dbias",))[number % 6],
                )
                if "dequantized" in one["extras"] and "rowwise" not in which:
                    one["extras"] = ()
                cases.append(one)
            if not hadamard:
                rows = (129, 48, 17, 256)[number % 4]
                cases.append({**one, "sizes": (0, 0, 0), "tail": 0, "each": 0, "matrix_rows": rows, "extras": ()})
        if not square:
            for prologue, cols, extras in itertools.product(PROLOGUES, (256, 304), ((), ("amax", "probs"))):
                number = next(turn)
                sizes, tail = list(RAGGED.values())[number % len(RAGGED)]
                cases.append(
                    case_of(
                        spec,
                        cols,
                        sizes=sizes,
                        tail=tail,
                        prologue=prologue,
                        values=values[number % 2],
                        dtype=("bfloat16", "bfloat16", "float16", "float32")[number % 4],
                        extras=extras if prologue != "rms" else (),
                    )
                )
    return cases


def timed(shapes: list[str], kinds: list[str], skewed: bool) -> list[dict[str, Any]]:
    """Cases with even groups, and with groups that are 128 rows long and less if `skewed`."""
    cases = []
    for shape, kind in itertools.product(shapes, kinds):
        groups, k, n, rows = LINEAR[shape]
        spec, prologue, which, *extras = TIMED[kind]
        operand = kind.split()[-1]
        matrix_rows = n if operand == "w" else 0
        # of a gradient: [M, 2 F] gates and up projections of fc1
        cols = n if operand == "dy" or prologue else k
        sizes = [0] * groups if matrix_rows else [rows // groups] * groups
        if skewed and not matrix_rows:
            sizes = [rows // groups * 2 if group % 2 else 0 for group in range(groups)]
        one = case_of(spec, cols, sizes=sizes, matrix_rows=matrix_rows, planes=which, prologue=prologue)
        one["extras"] = tuple(*extras)
        cases.append({**one, "shape": shape, "kind": kind})
    return cases


def bytes_of(case: dict[str, Any]) -> int:
    """What a call reads and writes at least; scales that an amax pass needs have the input read once more."""
    rows = len(case["sizes"]) * case["matrix_rows"] if case["matrix_rows"] else sum(case["sizes"])
    spec, cols = SPECS[case["spec"]], case["cols"]
    prologue = case["prologue"].removeprefix("clamped_")
    inputs = {"": 1.0, "swiglu": 1.0, "dswiglu": 1.5}[prologue]
    made = rows * cols // (2 if prologue == "swiglu" else 1)
    passes = 2 if spec["scaling"] in ("nvfp4", "current", "row") else 1
    code = 0.5 if spec["format"] == "e2m1" else 1.0
    scales = {"nvfp4": 1 / 16, "mxfp8": 1 / 32, "block": 4 / 128}.get(spec["scaling"], 0.0)
    written = len(case["planes"]) * (code + scales)
    return int(rows * cols * 2 * inputs * passes + made * written)
