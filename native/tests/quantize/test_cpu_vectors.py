"""The vectors that octavo-numerics carries: SHA-256 of every plane and of its values, from the CPU kernels."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from cpu_calls import Operand, quantizer, run
from cpu_operands import KERNEL_CASES
from guarded import Guarded

import octavo_native as native
from octavo_native.layouts import PLAIN
from octavo_numerics import vectors
from octavo_numerics.groups import Groups, units_of

FOLDER = Path(__file__).resolve().parents[3] / "packages" / "numerics" / "tests" / "vectors"


def sha256(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def digests(x: np.ndarray, case: vectors.Case) -> dict[str, str]:
    """What vectors.digests says, computed from the native planes."""
    spec = case.spec
    op = Operand(x.reshape(7, 40, -1) if case.stacked else x, None if case.stacked else vectors.GROUP_SIZES)
    planes = dict.fromkeys(spec.directions, PLAIN)
    result = run(
        spec,
        op,
        planes,
        seed=vectors.SEED,
        operand=case.operand,
        group_offset=case.group_offset,
        scale=case.scale,
    )
    out = {}
    for direction, plane in result.planes.items():
        groups = Groups(op.group_sizes)
        groups = groups.padded() if spec.hadamard and direction == "columnwise" else groups
        scales = int(np.prod(units_of(spec, direction, groups, op.cols).shape))
        out[direction] = sha256(plane.codes.array.reshape(-1, op.cols)[: groups.rows])
        out[f"{direction}_scale"] = sha256(plane.scales.array.reshape(-1)[:scales])
        if plane.factor:
            out[f"{direction}_global"] = sha256(plane.factor.array)
        values = Guarded(plane.codes.shape, np.float32)
        quantizer(spec).dequantize(
            cuda=False,
            direction=native.DIRECTIONS[direction],
            codes=plane.codes.address,
            scales=plane.scales.address,
            global_=plane.factor.address if plane.factor else 0,
            cols=op.cols,
            out=values.address,
            out_dtype=0,
            **op.place,
        )
        out[f"{direction}_values"] = sha256(values.array)
    return out


@pytest.mark.parametrize("name", list(vectors.INPUTS))
def test_the_recorded_bits(name: str) -> None:
    """Every recorded case of one input class."""
    recorded = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    x = vectors.make_input(name)
    assert sha256(x) == recorded["input_sha256"]
    made = {case.key: digests(x, case) for case in KERNEL_CASES}
    assert {case.key for case in vectors.cases()} == recorded["cases"].keys()
    different = [key for key, found in made.items() if found != recorded["cases"][key]]
    assert not different
