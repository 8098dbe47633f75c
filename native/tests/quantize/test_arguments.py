"""Bad arguments at the binding: refused with a sentence, whatever they are, and nothing is written."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from guarded import aligned
from quantize_call import run_quantizer

import octavo_native as native

ROWS, COLS, GROUPS = 40, 64, 3


class Call:
    """Arguments of a call that fits, and its arrays, which `untouched` compares with what they were."""

    def __init__(self) -> None:
        self.quantizer = native.Quantizer(format=native.FORMATS["e4m3"], scaling=native.SCALINGS["mxfp8"])
        self.arrays = {
            "x": aligned(ROWS * COLS, np.uint16),
            "plan": aligned(native.plan_words(ROWS, GROUPS), np.int64),
            "row_codes": aligned(ROWS * COLS, np.uint8),
            "row_scales": aligned(ROWS * COLS // 32, np.uint8),
        }
        sizes = np.array([10, 0, 25], np.int32)
        plan = {"plan": self.arrays["plan"].ctypes.data, "rows": ROWS, "groups": GROUPS}
        native.plan(cuda=False, sizes=sizes.ctypes.data, sizes_are_64=False, **plan)
        for name in ("row_codes", "row_scales"):
            self.arrays[name][:] = 0xA5
        self.arguments: dict[str, Any] = {name: array.ctypes.data for name, array in self.arrays.items()}
        self.arguments |= {"cuda": False, "dtype": native.DTYPES["bfloat16"], "rows": ROWS, "cols": COLS}
        self.arguments |= {"row_stride": COLS, "groups": GROUPS}
        self.before = {name: array.copy() for name, array in self.arrays.items()}

    def run(self, **changes: Any) -> None:
        run_quantizer(self.quantizer, **{**self.arguments, **changes})

    def untouched(self) -> bool:
        return all(np.array_equal(array, self.before[name]) for name, array in self.arrays.items())


@pytest.fixture
def call() -> Call:
    return Call()


def test_the_call_that_the_others_spoil_is_served(call: Call) -> None:
    """Rows of the groups are zero codes of a zero block; the poison is gone from them."""
    call.run()
    assert not call.arrays["row_codes"][: 35 * COLS].any()


@pytest.mark.parametrize("name", ["x", "plan", "row_codes"])
@pytest.mark.parametrize("value", [1.5, "64", None, b"", np.float32(2), -1, 2**64])
def test_an_address_is_an_integer_of_64_bits(call: Call, name: str, value: Any) -> None:
    """A float, a string or None in an address's place is a TypeError, and no number is read from it."""
    with pytest.raises(TypeError, match="incompatible function arguments"):
        call.run(**{name: value})
    assert call.untouched()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": 0}, "input is null"),
        ({"plan": 0}, "plan is null"),
        ({"rows": -1}, "rows is negative"),
        ({"rows": 2**62}, "rows is past 2\\^30"),
        ({"cols": -64}, "cols is negative"),
        ({"groups": 0}, "groups is less than 1"),
        ({"row_stride": COLS - 1}, "row_stride is less than cols"),
        ({"row_codes": 0}, "scales and no codes"),
        ({"row_scales": 0}, "codes and no scales"),
        ({"row_codes": 0, "row_scales": 0}, "no plane is requested"),
        ({"matrix_rows": 7}, "rows is not groups \\* matrix_rows"),
        ({"dtype": 3}, "dtype is 3; it takes 0 to 2"),
        ({"dtype": -1}, "dtype is -1; it takes 0 to 2"),
        ({"row_layout": 3}, "layout is 3; it takes 0 to 2"),
        ({"prologue": 4}, "kind is 4; it takes 0 to 3"),
        ({"activation": 8}, "activation is 8; it takes 0 to 7"),
        ({"norm": 2}, "norm is 2; it takes 0 to 1"),
        ({"each": 0}, "each is less than 1"),
        ({"each": 2**32}, "each is less than 1 or past 2\\^30"),
        ({"prologue": 2}, "dy is null"),
        ({"prologue": 3}, "gamma is null"),
    ],
)
def test_what_does_not_fit_is_a_value_error_with_the_reason(call: Call, changes: dict[str, Any], reason: str) -> None:
    """The native layer checks again what the Python edges have checked, and answers with an error, never an abort."""
    with pytest.raises(ValueError, match=reason):
        call.run(**changes)
    assert call.untouched()


@pytest.mark.parametrize(("name", "by"), [("x", 1), ("plan", 8), ("plan", 16)])
def test_misaligned_addresses_are_refused(call: Call, name: str, by: int) -> None:
    """Vector loads of the kernels would fault, on a GPU for the whole context."""
    with pytest.raises(ValueError, match="not aligned"):
        call.run(**{name: call.arguments[name] + by})
    assert call.untouched()


@pytest.mark.parametrize("missing", ["cuda", "x", "dtype", "rows", "cols", "row_stride", "groups"])
def test_what_has_no_default_must_be_given(call: Call, missing: str) -> None:
    del call.arguments[missing]
    with pytest.raises(TypeError):
        call.run()
    assert call.untouched()


def test_unknown_and_positional_arguments_are_refused(call: Call) -> None:
    """Forty integers in a row would be a trap: every argument has its name."""
    with pytest.raises(TypeError):
        call.run(colour=3)
    with pytest.raises(TypeError):
        call.quantizer.run(*call.arguments.values())  # type: ignore[misc]
    with pytest.raises(TypeError):
        native.InputArgs(*range(8))  # type: ignore[misc]
    with pytest.raises(TypeError):
        native.PrologueArgs(*range(12))  # type: ignore[misc]
    assert call.untouched()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"format": 3, "scaling": 0}, "format is 3; it takes 0 to 2"),
        ({"format": 0, "scaling": 6}, "scaling is 6; it takes 0 to 5"),
        ({"format": 0, "scaling": 0, "operand": 3}, "operand is 3; it takes 0 to 2"),
    ],
)
def test_a_quantizer_of_unknown_numbers_is_refused(fields: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        native.Quantizer(**fields)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"rows": -1}, "rows is negative"), ({"groups": 0}, "groups"), ({"rowwise": False}, "no plane is requested")],
)
def test_workspace_bytes_refuses_what_run_refuses(call: Call, changes: dict[str, Any], reason: str) -> None:
    """A size computed from nonsense would be allocated."""
    fine = {"cuda": False, "dtype": 2, "rows": ROWS, "cols": COLS, "groups": GROUPS}
    planes = {"rowwise": True, "columnwise": False}
    assert call.quantizer.workspace_bytes(**fine, **planes) >= 0  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=reason):
        call.quantizer.workspace_bytes(**{**fine, **planes, **changes})


@pytest.mark.parametrize(("rows", "groups"), [(-1, 4), (8, 0), (8, -3)])
def test_plan_words_takes_counts(rows: int, groups: int) -> None:
    with pytest.raises(ValueError, match="plan_words takes rows of 0 or more"):
        native.plan_words(rows, groups)


@pytest.mark.parametrize(("rows", "groups", "word"), [(2**30 + 1, 1, "rows is past"), (8, 65537, "groups is past")])
def test_plan_words_takes_what_plans_hold(rows: int, groups: int, word: str) -> None:
    """Words of a plan that nothing could write would be allocated, or their number would overflow."""
    with pytest.raises(ValueError, match=word):
        native.plan_words(rows, groups)


@pytest.mark.skipif(not native.HAS_CUDA, reason="this build has no CUDA kernels, and no workspaces for them")
def test_a_dequantized_copy_needs_the_rows_scales(call: Call) -> None:
    """Row scaling of rows alone makes a row's scale where it makes the codes, and needs none of them in memory; a copy
    of the values is made by kernels that do.
    """
    quantizer = native.Quantizer(format=native.FORMATS["e4m3"], scaling=native.SCALINGS["row"])
    sides = {"cuda": True, "dtype": 2, "rows": ROWS, "cols": COLS, "groups": GROUPS}
    planes = {"rowwise": True, "columnwise": False}
    assert quantizer.workspace_bytes(**sides, **planes, dequantized=False) == 0  # type: ignore[arg-type]
    assert quantizer.workspace_bytes(**sides, **planes, dequantized=True) >= 4 * ROWS  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dequantized holds rowwise data"):
        quantizer.workspace_bytes(**sides, rowwise=False, columnwise=True, dequantized=True)  # type: ignore[arg-type]


@pytest.mark.skipif(native.HAS_CUDA, reason="this build has CUDA kernels, so cuda=True is no mistake")
def test_a_build_for_the_cpu_says_so(call: Call) -> None:
    """cuda=True is answered with why, and with the command that changes it."""
    with pytest.raises(ValueError, match=r"this build has no CUDA kernels: nvcc was not found .* pip install"):
        call.run(cuda=True)
    assert call.untouched()


def test_other_threads_run_beside_the_kernels() -> None:
    """The interpreter is free while the CPU works: another thread reads the clock in the middle of one long call.

    A loaded machine may give that thread no core during one call; without the interpreter it has none in any.
    """
    rows, cols = 4096, 8192
    source = np.zeros(rows * cols, np.uint16)
    codes = aligned(rows * cols, np.uint8)
    scales = aligned(rows * cols // 32, np.uint8)
    quantizer = native.Quantizer(format=native.FORMATS["e4m3"], scaling=native.SCALINGS["mxfp8"])
    stamps: list[float] = []
    started, done = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.is_set():
            stamps.append(time.perf_counter())
            started.set()
            time.sleep(0.001)

    def call() -> tuple[float, float]:
        start = time.perf_counter()
        run_quantizer(
            quantizer,
            cuda=False,
            x=source.ctypes.data,
            dtype=native.DTYPES["bfloat16"],
            rows=rows,
            cols=cols,
            row_stride=cols,
            groups=1,
            matrix_rows=rows,
            row_codes=codes.ctypes.data,
            row_scales=scales.ctypes.data,
        )
        return start, time.perf_counter() - start

    def is_watched() -> bool:
        start, length = call()
        return any(0.25 * length < stamp - start < 0.75 * length for stamp in stamps)

    thread = threading.Thread(target=watch)
    thread.start()
    started.wait()
    try:
        assert any(is_watched() for _ in range(20))
    finally:
        done.set()
        thread.join()
