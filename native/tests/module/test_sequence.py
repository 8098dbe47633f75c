"""Recorded launches: other arrays each time, the bits of direct calls, a sentence for what cannot be recorded."""

from __future__ import annotations

import numpy as np
import pytest
from guarded import Array, aligned
from quantize_call import run_quantizer

import octavo_native as native
from octavo_native import place

ROWS, COLS, GROUPS = 40, 48, 3
SPEC = {"format": native.FORMATS["e4m3"], "scaling": native.SCALINGS["current"]}
SIZES, X, PLAN, CODES = range(1, 5)


def recorded() -> native.Sequence:
    """A plan, and x quantized to rows: codes first, their scales behind them."""
    made = native.Sequence(cuda=False)
    common = {"cuda": False, "groups": GROUPS, "rows": ROWS, "into": made}
    native.plan(sizes=place(SIZES), sizes_are_64=True, plan=place(PLAN), **common)
    quantizer = native.Quantizer(**SPEC)
    size = quantizer.workspace_bytes(
        cuda=False, dtype=0, rows=ROWS, cols=COLS, groups=GROUPS, rowwise=True, columnwise=False
    )
    run_quantizer(
        quantizer,
        x=place(X), dtype=0, cols=COLS, row_stride=COLS, plan=place(PLAN), row_codes=place(CODES),
        row_scales=place(CODES, ROWS * COLS), workspace=place(CODES + 1), workspace_bytes=size, **common,
    )  # fmt: skip
    return made


def arrays(rng: np.random.Generator) -> dict[str, Array]:
    made = {"sizes": aligned(GROUPS, np.int64), "x": aligned(ROWS * COLS, np.float32)}
    made["sizes"][:] = rng.multinomial(ROWS - 5, [1 / GROUPS] * GROUPS)
    made["x"][:] = rng.standard_normal(ROWS * COLS)
    made["plan"] = aligned(native.plan_words(ROWS, GROUPS), np.int64)
    made["codes"] = aligned(ROWS * COLS + 4 * GROUPS, np.uint8)
    made["workspace"] = aligned(1 << 16, np.uint8)
    return made


def test_a_sequence_runs_on_other_arrays_each_time(rng: np.random.Generator) -> None:
    """Places are resolved at each run, and its launches are those of the direct calls, bit for bit."""
    sequence = recorded()
    assert len(sequence) == 2
    for _ in range(3):
        given = arrays(rng)
        sequence.run([array.ctypes.data for array in given.values()])
        codes, plan = given["codes"].copy(), given["plan"].copy()
        given["codes"][:], given["plan"][:] = 0, 0
        at = {name: array.ctypes.data for name, array in given.items()}
        native.plan(cuda=False, sizes=at["sizes"], sizes_are_64=True, groups=GROUPS, rows=ROWS, plan=at["plan"])
        run_quantizer(
            native.Quantizer(**SPEC),
            cuda=False, x=at["x"], dtype=0, rows=ROWS, cols=COLS, row_stride=COLS, groups=GROUPS, plan=at["plan"],
            row_codes=at["codes"], row_scales=at["codes"] + ROWS * COLS, workspace=at["workspace"],
            workspace_bytes=given["workspace"].nbytes,
        )  # fmt: skip
        used = int(given["sizes"].sum()) * COLS
        assert np.array_equal(plan, given["plan"])
        assert np.array_equal(codes[:used], given["codes"][:used])
        assert np.array_equal(codes[ROWS * COLS :], given["codes"][ROWS * COLS :])


def test_what_cannot_be_recorded_or_run(rng: np.random.Generator) -> None:
    """Addresses in the place of places, launches of another device, arrays that are not given, null ones."""
    plan = {"sizes_are_64": True, "groups": GROUPS, "rows": ROWS}
    sequence = native.Sequence(cuda=False)
    with pytest.raises(ValueError, match=r"an address; give octavo_native\.place"):
        native.plan(cuda=False, sizes=4096, plan=place(2), into=sequence, **plan)
    with pytest.raises(ValueError, match="record launches of one device"):
        native.plan(cuda=True, sizes=place(1), plan=place(2), into=sequence, **plan)
    weights = native.InputArgs(
        x=place(1), dtype=native.DTYPES["bfloat16"], rows=128, cols=128, row_stride=128, groups=1, matrix_rows=128,
        mxfp4_scales=4096,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"an address; give octavo_native\.place"):
        native.Quantizer(**SPEC).run(cuda=False, input=weights, into=sequence)
    assert len(sequence) == 0
    sequence = recorded()
    given = [array.ctypes.data for array in arrays(rng).values()]
    with pytest.raises(ValueError, match="fewer than the recorded launches name"):
        sequence.run(given[:-1])
    with pytest.raises(ValueError, match="sizes"):
        sequence.run([0, *given[1:]])
