"""What holds of every call: thread counts, concurrent callers, a caller that flushes subnormals, refused arguments.

docs/faults: rows 26 to 29 (offsets past 2^31), 30 (bitwise repeats under load), 58 (strides); the classes "int
overflow", "races" and "uninitialised reads".
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cpu_calls import NATIVE, Operand, prepare, quantizer, run
from cpu_operands import SPECS, random_values
from expected_planes import differences
from flushing import FLUSH, flushed_subnormals, sets_mode
from guarded import put

import octavo_native as native
from octavo import QuantizerSpec
from octavo_numerics import quantize

BOTH = {"rowwise": NATIVE["rowwise"], "columnwise": NATIVE["columnwise"]}
LARGE = ("delayed.e4m3", "current.e5m2", "row.e4m3", "block.e4m3.pow2", "block.e4m3.square", "mxfp8.e4m3",
         "nvfp4.stochastic.hadamard", "nvfp4.stochastic.square")  # fmt: skip


def both(name: str) -> QuantizerSpec:
    return SPECS[name].model_copy(update={"orientation": "both"})


def scale_of(spec: QuantizerSpec, groups: int) -> np.ndarray | None:
    return np.linspace(0.5, 9, groups, dtype=np.float32) if spec.scaling == "delayed" else None


def large_operand(rng: np.random.Generator) -> Operand:
    """2.6 MB, so that more than one thread is used."""
    sizes = (300, 0, 17, 129, 256, 1, 390)
    return Operand(random_values(rng, (sum(sizes) + 5, 590), "float32"), sizes)


@pytest.mark.parametrize("name", LARGE)
def test_the_result_does_not_depend_on_threads(name: str, rng: np.random.Generator) -> None:
    """Every output, dbias included, from 1, 2, 3 and 16 threads, and from the plain loops."""
    spec, op = both(name), large_operand(rng)
    more: dict[str, Any] = {"seed": 3, "scale": scale_of(spec, op.groups), "wanted": ("amax", "dequantized", "dbias")}
    once = run(spec, op, BOTH, **more).everything
    for threads in (2, 3, 16, 0):
        again = run(spec, op, BOTH, threads=threads, **more).everything
        assert all((again[key].bytes == once[key].bytes).all() for key in once), threads


@pytest.mark.parametrize("name", LARGE)
def test_eight_callers_at_once(name: str, rng: np.random.Generator) -> None:
    """The kernels keep nothing between calls: 8 threads of Python, each with its own outputs, 4 calls each."""
    spec = both(name)
    op = Operand(random_values(rng, (200, 150), "bfloat16"), (60, 0, 129))
    calls = [prepare(spec, op, BOTH, seed=5, scale=scale_of(spec, 3), threads=1 + i % 2) for i in range(8)]
    want = run(spec, op, BOTH, seed=5, scale=scale_of(spec, 3)).everything
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            for result in pool.map(lambda call: call(), calls):
                assert all((array.bytes == want[key].bytes).all() for key, array in result.everything.items())


@sets_mode
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", LARGE)
def test_a_caller_that_flushes_subnormals(name: str, threads: int, rng: np.random.Generator) -> None:
    """XLA's threads set FTZ and DAZ: the bits stay those of the definition, and the mode is given back."""
    spec = both(name)
    x = (rng.standard_normal((700, 520)) * 2.0**-132).astype(np.float32)
    op = Operand(x, (300, 0, 129, 257))
    scale = None if scale_of(spec, 1) is None else np.full(4, 2.0**100, dtype=np.float32)
    q = quantize(x, spec, op.sizes, seed=1, scale=scale)
    call = prepare(spec, op, BOTH, seed=1, scale=scale, threads=threads)
    values = put(np.full(1, 2.0**-126, dtype=np.float32))
    with flushed_subnormals() as mxcsr:
        assert values.array[0] * np.float32(0.5) == 0  # the mode is on
        result = call()
        assert mxcsr() & FLUSH == FLUSH
    assert not differences(result, q, spec, op, BOTH)


def test_offsets_past_two_to_the_31(rng: np.random.Generator) -> None:
    """40 rows 2^26 elements apart: the last ones begin past 2^31 elements, and most of the 5 GB is never touched."""
    rows, cols, stride = 40, 48, 1 << 26
    wide = np.empty((rows, stride), dtype=np.uint16)
    x = random_values(rng, (rows, cols), "bfloat16")
    wide[:, :cols] = x.view(np.uint16)
    for name in ("block.e4m3", "mxfp8.e4m3.square", "nvfp4.nearest.hadamard"):
        spec = both(name)
        op = Operand(x, (33, 7))
        call = prepare(spec, op, BOTH)
        result = call(x=wide.ctypes.data, row_stride=stride)
        assert not differences(result, quantize(x, spec, op.sizes), spec, op, BOTH)


def test_sizes_that_the_plan_cut(rng: np.random.Generator) -> None:
    """Whatever the sizes say, the kernels see what the plan made of them, and stay within the arrays."""
    rows = 300
    x = random_values(rng, (rows, 70), "bfloat16")
    most = int(np.iinfo(np.int64).max)
    for sizes, real in (
        ((-5, 100, most, 40), (0, 100, 200, 0)),
        ((most, most), (300, 0)),
        ((-most, -1), (0, 0)),
        ((129, 170, 2), (129, 170, 1)),
    ):
        for name in LARGE:
            spec = both(name)
            op = Operand(x, real)
            assert op.plan is not None
            given = put(np.array(sizes, dtype=np.int64))
            native.plan(
                cuda=False,
                sizes=given.address,
                sizes_are_64=True,
                groups=len(sizes),
                rows=rows,
                plan=op.plan.address,
            )
            scale = scale_of(spec, len(real))
            result = run(spec, op, BOTH, seed=2, scale=scale)
            assert not differences(result, quantize(x, spec, real, seed=2, scale=scale), spec, op, BOTH), (name, sizes)


BLOCK, DELAYED, NVFP4 = "block.e4m3", "delayed.e4m3", "nvfp4.stochastic"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (BLOCK, {"x": 0}, "the input is null"),
    (BLOCK, {"x": 3}, "the input is not aligned"),
    (BLOCK, {"rows": -1}, "rows is negative"),
    (BLOCK, {"rows": (1 << 30) + 1}, "rows is past 2\\^30"),
    (BLOCK, {"cols": -1}, "cols is negative"),
    (BLOCK, {"cols": 21}, "row_stride is less than cols"),
    (BLOCK, {"row_stride": 1 << 60}, "row_stride is past"),
    (BLOCK, {"groups": 0}, "groups is less than 1"),
    (BLOCK, {"groups": 1 << 40}, "groups is past"),
    (BLOCK, {"matrix_rows": -3}, "matrix_rows is negative"),
    (BLOCK, {"matrix_rows": 99}, "matrix_rows is more than rows"),
    (BLOCK, {"matrix_rows": 7, "plan": 0}, "not groups \\* matrix_rows"),
    (BLOCK, {"matrix_rows": 4}, "plan was given with stacked"),
    (BLOCK, {"plan": 0}, "plan is null"),
    (BLOCK, {"plan": 8}, "plan is not aligned"),
    (BLOCK, {"row_codes": 0}, "scales and no codes"),
    (BLOCK, {"row_scales": 0}, "codes and no scales"),
    (BLOCK, {"col_scales": 6}, "not aligned to 4"),
    (BLOCK, {"row_codes": 0, "row_scales": 0, "col_codes": 0, "col_scales": 0}, "no plane is requested"),
    (BLOCK, {"row_codes": 0, "row_scales": 0, "dequantized": 64}, "no rowwise plane"),
    (BLOCK, {"dequantized": 1}, "dequantized is not aligned"),
    (BLOCK, {"activated": 2}, "activated is not aligned"),
    (BLOCK, {"amax": 2}, "amax is not aligned"),
    (BLOCK, {"dbias": 2}, "dbias is not aligned"),
    (BLOCK, {"encode_scales": 64}, "makes its own"),
    (BLOCK, {"unchanged": 2}, "unchanged is not aligned"),
    (BLOCK, {"threads": -1}, "threads is negative"),
    (BLOCK, {"ctas": -1}, "ctas is negative"),
    (BLOCK, {"prologue": 1, "activation": 4, "cols": 19}, "cols is odd"),
    (BLOCK, {"prologue": 1, "probs": 2}, "probs is not aligned"),
    (BLOCK, {"prologue": 2}, "dy is null"),
    (BLOCK, {"prologue": 2, "dy": 64, "dy_stride": 19}, "dy_stride is less"),
    (BLOCK, {"prologue": 2, "dy": 2, "dy_stride": 20}, "dy is not aligned"),
    (BLOCK, {"prologue": 2, "dy": 64, "dy_stride": 20, "dprobs": 2}, "dprobs is not aligned"),
    (BLOCK, {"prologue": 1, "dprobs": 64}, "dprobs was given and the prologue is not activation_grad"),
    (BLOCK, {"prologue": 3}, "gamma is null"),
    (BLOCK, {"prologue": 3, "gamma": 2}, "gamma or beta is not aligned"),
    (BLOCK, {"prologue": 3, "gamma": 64, "beta": 64}, "RMSNorm"),
    (BLOCK, {"prologue": 3, "gamma": 64, "epsilon": -1.0}, "epsilon is negative"),
    (BLOCK, {"prologue": 3, "gamma": 64, "probs": 64}, "probs was given with a norm"),
    (BLOCK, {"prologue": 3, "gamma": 64, "rstd": 2}, "mean or rstd"),
    (DELAYED, {"encode_scales": 0}, "encode_scales is null"),
    (DELAYED, {"encode_scales": 2}, "encode_scales is not aligned"),
    (DELAYED, {"workspace": 0}, "workspace is null"),
    (DELAYED, {"workspace_bytes": 1}, "workspace_bytes is less"),
    (DELAYED, {"workspace": 4}, "workspace is not aligned"),
    (NVFP4, {"seed": 0}, "seed is null"),
    (NVFP4, {"seed": 2}, "seed, group_offset_device"),
    (NVFP4, {"row_global": 0}, "no global"),
    (NVFP4, {"col_global": 2}, "global is not aligned"),
    ("nvfp4.nearest.hadamard", {"matrix_rows": 4, "plan": 0}, "hadamard is for ragged"),
]


@pytest.mark.parametrize(("name", "change", "word"), REFUSED)
def test_bad_arguments_are_refused(name: str, change: dict[str, Any], word: str, rng: np.random.Generator) -> None:
    """Before anything is written, with the argument's name. Small numbers are pointers that nothing follows."""
    spec = both(name)
    op = Operand(random_values(rng, (20, 20), "float32"), (3, 4, 5, 6, 2))
    call = prepare(spec, op, BOTH, scale=scale_of(spec, op.groups))
    with pytest.raises(ValueError, match=word):
        call(**change)
    assert all(array.untouched for array in call.result.everything.values())


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"format": "e2m1"}, "do not go together"),
        ({"scaling": "nvfp4"}, "do not go together"),
        ({"scaling": "row", "square": True}, "square needs blocks"),
        ({"scaling": "mxfp8", "square_columns": True}, "square_columns is for blocks of 128"),
        ({"square": True, "square_columns": True}, "square_columns is for blocks of 128"),
        ({"stochastic": True}, "stochastic rounding is defined for e2m1"),
        ({"hadamard": True}, "hadamard is defined for nvfp4"),
        ({"format": "e2m1", "scaling": "nvfp4", "hadamard": True, "square": True}, "drop one of them"),
        ({"scaling": "mxfp8", "power_of_two": True}, "power_of_two is an option"),
        ({"scaling": "mxfp8", "amax_epsilon": 1.0}, "amax_epsilon is an option"),
        ({"amax_epsilon": -1.0}, "amax_epsilon is negative"),
        ({"amax_epsilon": float("nan")}, "amax_epsilon is negative, infinite or NaN"),
    ],
)
def test_impossible_quantizers_are_refused(fields: dict[str, Any], word: str, rng: np.random.Generator) -> None:
    """A spec that octavo.QuantizerSpec refuses is refused here, too, by every call that takes one."""
    op = Operand(random_values(rng, (8, 16), "float32"), (8,))
    call = prepare(both(BLOCK), op, BOTH)
    names = {"format": native.FORMATS, "scaling": native.SCALINGS}
    numbers = {"format": native.FORMATS["e4m3"], "scaling": native.SCALINGS["block"]}
    bad = native.Quantizer(**(numbers | {key: names[key][v] if key in names else v for key, v in fields.items()}))
    call.quantizer = bad
    with pytest.raises(ValueError, match=word):
        call()
    place = {"cuda": False, "direction": 0, "codes": 64, "scales": 64, "rows": 8, "cols": 16, "groups": 1}
    with pytest.raises(ValueError, match=word):
        bad.dequantize(**place, out=64, out_dtype=0, plan=64)
    with pytest.raises(ValueError, match=word):
        bad.convert(**place, to=1, into_codes=64, into_scales=64, plan=64)
    assert all(array.untouched for array in call.result.everything.values())


def test_workspace_bytes_is_what_a_call_needs(rng: np.random.Generator) -> None:
    """One byte less is refused, and a call with all options stays within it (its guards are checked)."""
    for name in SPECS:
        spec = both(name)
        op = Operand(random_values(rng, (150, 20), "float32"), (100, 0, 40))
        call = prepare(spec, op, BOTH, scale=scale_of(spec, 3), wanted=("amax", "dbias"))
        needed = call.arguments["workspace_bytes"]
        assert needed > 0
        with pytest.raises(ValueError, match="workspace_bytes is less"):
            call(workspace_bytes=needed - 1)
        call()
    assert quantizer(both(BLOCK)).workspace_bytes(
        cuda=False, dtype=0, rows=150, cols=20, groups=3, rowwise=True, columnwise=True
    ) == 0  # fmt: skip
