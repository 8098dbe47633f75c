"""Compact vectors: inputs generated from a seed, and the SHA-256 of every recipe's output for them.

`python -m octavo_numerics.vectors FOLDER` writes one JSON file an input class. A clone verifies itself with them, and
a backend in another language can, without any binary file.

Inputs are [280, 160] fp32 with groups of 64, 0, 17, 100, 0 and 75 rows and a NaN tail, from Philox4x32-10 under the
key (20, 0): element n (row-major) takes words 0 and 1 of the counter (n, 0, class, 0). All classes are integer
arithmetic on those words, so that no library's transcendental functions are in the inputs.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo import QuantizerSpec
from octavo.quantizer import Operand
from octavo_numerics.arrays import QuantizedArray
from octavo_numerics.casts import F32, round_bfloat16
from octavo_numerics.dequantize import dequantize, valid
from octavo_numerics.philox import U32, philox4x32
from octavo_numerics.quantize import quantize

ROWS, COLS = 280, 160
GROUP_SIZES = (64, 0, 17, 100, 0, 75)
SEED = 0x0123456789ABCDEF
KEY = (20, 0)


def _float(bits: U32) -> F32:
    return bits.astype(np.uint32).view(np.float32)


def _uniform(first: U32, second: U32) -> F32:
    """Sum of four 16-bit uniforms, centred: bell-shaped, exact in fp32."""
    parts = [word >> np.uint32(shift) & np.uint32(0xFFFF) for word in (first, second) for shift in (0, 16)]
    total = sum(part.astype(np.int64) for part in parts) - 2 * 65535
    return np.asarray(total, dtype=np.float32) * np.float32(2.0**-15)


def _with_outliers(first: U32, second: U32) -> F32:
    """One element in 64 is 2^10 times as large."""
    return _uniform(first, second) * np.where(first % 64 == 0, np.float32(1024), np.float32(1))


def _wide(first: U32, second: U32) -> F32:
    """Exponents from 2^-40 to 2^39, random mantissas, rounded to bfloat16."""
    exponent = np.uint32(87) + second % np.uint32(80)
    return round_bfloat16(_float((first & np.uint32(0x807FFFFF)) | (exponent << np.uint32(23))))


def _subnormal(first: U32, second: U32) -> F32:
    """Subnormal numbers, with a normal one in 8."""
    exponent = np.where(second % 8 == 0, second % 5, 0).astype(np.uint32)
    return _float((first & np.uint32(0x807FFFFF)) | (exponent << np.uint32(23)))


def _any_bits(first: U32, second: U32) -> F32:
    """Any finite pattern, the largest exponents included."""
    return _float(np.where(first & np.uint32(0x7F800000) == 0x7F800000, first ^ np.uint32(0x40000000), first))


def _non_finite(first: U32, second: U32) -> F32:
    """Bell-shaped with a few Inf and NaN in rows 70 to 89 alone, so that units of both kinds exist."""
    out = _uniform(first, second).reshape(ROWS, COLS)
    special = _float(np.uint32(0x7F800000) | (first & np.uint32(0x80000001))).reshape(ROWS, COLS)
    chosen = (second % 61 == 0).reshape(ROWS, COLS)
    chosen[:70] = chosen[90:] = False
    return np.where(chosen, special, out)


def _ties(first: U32, second: U32) -> F32:
    """Multiples of 1/16 up to 7, half of them powers of two apart: many lie midway between two codes."""
    units = (first % np.uint32(225)).astype(np.int64) - 112
    return np.asarray(units, dtype=np.float32) * np.where(second % 2 == 0, np.float32(0.0625), np.float32(1))


def _zeros(first: U32, second: U32) -> F32:
    """Zeros of both signs."""
    return _float(first & np.uint32(0x80000000))


INPUTS: dict[str, Callable[[U32, U32], F32]] = {
    "bell": _uniform,
    "outliers": _with_outliers,
    "wide": _wide,
    "subnormal": _subnormal,
    "any_bits": _any_bits,
    "non_finite": _non_finite,
    "ties": _ties,
    "zeros": _zeros,
}


@np.errstate(all="ignore")
def make_input(name: str) -> F32:
    """The [280, 160] input of class `name`, rows past the sum NaN."""
    n = np.arange(ROWS * COLS, dtype=np.uint32)
    zero = np.zeros(1, dtype=np.uint32)
    number = np.full(1, list(INPUTS).index(name), dtype=np.uint32)
    first, second, _, _ = philox4x32((n, zero, number, zero), KEY)
    values = INPUTS[name](first, second).reshape(ROWS, COLS).astype(np.float32)
    values[sum(GROUP_SIZES) :] = np.nan
    return values


@dataclass(frozen=True)
class Case:
    """One call: a spec, and x given as ragged rows or as 7 stacked matrices of 40 rows."""

    key: str
    spec: QuantizerSpec
    stacked: bool = False
    operand: Operand | None = None
    group_offset: int = 0

    @property
    def scale(self) -> F32 | None:
        """Encode scales of the delayed cases: powers of two and others, near 1."""
        groups = 7 if self.stacked else len(GROUP_SIZES)
        return np.arange(1, groups + 1, dtype=np.float32) * np.float32(0.75) if self.spec.scaling == "delayed" else None


def _specs() -> Iterator[tuple[str, dict[str, Any]]]:
    for fmt in ("e4m3", "e5m2"):
        yield f"delayed.{fmt}", {"scaling": "delayed", "format": fmt}
        for scaling in ("current", "row", "block"):
            for power_of_two in (False, True):
                name = f"{scaling}.{fmt}" + (".pow2" if power_of_two else "")
                yield name, {"scaling": scaling, "format": fmt, "power_of_two": power_of_two}
        yield f"block.{fmt}.square", {"scaling": "block", "format": fmt, "square": True}
        yield f"block.{fmt}.square.pow2", {"scaling": "block", "format": fmt, "square": True, "power_of_two": True}
        yield f"block.{fmt}.square_columns", {"scaling": "block", "format": fmt, "square_columns": True}
        yield f"mxfp8.{fmt}", {"scaling": "mxfp8", "format": fmt}
        yield f"mxfp8.{fmt}.square", {"scaling": "mxfp8", "format": fmt, "square": True}
    for scaling in ("current", "row", "block"):
        yield f"{scaling}.e4m3.eps", {"scaling": scaling, "format": "e4m3", "amax_epsilon": 0.5}
    both = {"scaling": "block", "format": "e4m3", "power_of_two": True, "square_columns": True}
    yield "block.e4m3.square_columns.pow2", both
    for direction in ("rowwise", "columnwise"):
        of_w = {"scaling": "block", "format": "e4m3", "square": True, "power_of_two": True, "role": "w"}
        yield f"block.e4m3.square.mxfp4.{direction}", {**of_w, "mxfp4": direction}
    for rounding in ("nearest", "stochastic"):
        fields = {"scaling": "nvfp4", "format": "e2m1", "rounding": rounding}
        yield f"nvfp4.{rounding}", fields
        yield f"nvfp4.{rounding}.square", {**fields, "square": True}
        yield f"nvfp4.{rounding}.hadamard", {**fields, "hadamard": True}


def cases() -> list[Case]:
    """Every combination of scaling, format and option that a spec allows, ragged and stacked."""
    out = []
    for name, fields in _specs():
        spec = QuantizerSpec(**fields)
        out.append(Case(f"{name}.ragged", spec))
        if not spec.hadamard:
            out.append(Case(f"{name}.stacked", spec, stacked=True))
        if spec.stochastic:
            out.append(Case(f"{name}.ragged.dy.offset3", spec, operand="dy", group_offset=3))
    return out


def _sha256(array: npt.NDArray[Any]) -> str:
    """Hash of the bytes in C order, little-endian."""
    little = array if array.dtype.itemsize == 1 else array.astype(array.dtype.newbyteorder("<"))
    return hashlib.sha256(np.ascontiguousarray(little).tobytes()).hexdigest()


def digests(x: F32, case: Case) -> dict[str, str]:
    """SHA-256 of each valid plane and of each direction's dequantized values."""
    sizes = None if case.stacked else GROUP_SIZES
    x = x.reshape(7, 40, COLS) if case.stacked else x
    q = quantize(x, case.spec, sizes, seed=SEED, operand=case.operand, group_offset=case.group_offset, scale=case.scale)
    return digests_of(q)


def digests_of(q: QuantizedArray) -> dict[str, str]:
    """The same for a tensor that has been quantized, by whatever backend."""
    out = {name: _sha256(array) for name, array in valid(q).items()}
    return out | {f"{way}_values": _sha256(dequantize(q, way)) for way in q.spec.quantizer.directions}


def make(name: str) -> dict[str, Any]:
    """The content of one file."""
    x = make_input(name)
    return {"input": name, "input_sha256": _sha256(x), "cases": {case.key: digests(x, case) for case in cases()}}


def main(folder: str) -> None:
    """Write every file into `folder`."""
    for name in INPUTS:
        text = json.dumps(make(name), indent=1, sort_keys=True)
        Path(folder, f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python -m octavo_numerics.vectors FOLDER, a folder that exists")
    main(sys.argv[1])
