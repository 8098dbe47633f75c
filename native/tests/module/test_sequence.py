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
    with pytest.raises(ValueError, match=r"an address in no named array; give octavo_native\.place"):
        native.plan(cuda=False, sizes=4096, plan=place(2), into=sequence, **plan)
    with pytest.raises(ValueError, match="record launches of one device"):
        native.plan(cuda=True, sizes=place(1), plan=place(2), into=sequence, **plan)
    weights = native.InputArgs(
        x=place(1), dtype=native.DTYPES["bfloat16"], rows=128, cols=128, row_stride=128, groups=1, matrix_rows=128,
        mxfp4_scales=4096,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"an address in no named array; give octavo_native\.place"):
        native.Quantizer(**SPEC).run(cuda=False, input=weights, into=sequence)
    assert len(sequence) == 0
    sequence = recorded()
    given = [array.ctypes.data for array in arrays(rng).values()]
    with pytest.raises(ValueError, match="fewer than the recorded launches name"):
        sequence.run(given[:-1])
    with pytest.raises(ValueError, match="sizes"):
        sequence.run([0, *given[1:]])


def test_addresses_in_named_arrays_are_places(rng: np.random.Generator) -> None:
    """Launches on addresses are recorded once their arrays are named, each in its place at its offset, and the sequence
    tells which arrays each launch has."""
    given, other = arrays(rng), arrays(rng)
    sequence = native.Sequence(cuda=False)
    for number, array in enumerate(given.values(), 1):
        assert sequence.name(array.ctypes.data, array.nbytes) == number
    at = {name: array.ctypes.data for name, array in given.items()}
    common = {"cuda": False, "rows": ROWS, "groups": GROUPS, "into": sequence}
    bounded = at["workspace"] + (1 << 15)
    native.plan(sizes=at["sizes"], sizes_are_64=True, plan=at["plan"], bounded=bounded, **common)
    run_quantizer(
        native.Quantizer(**SPEC),
        x=at["x"], dtype=0, cols=COLS, row_stride=COLS, plan=at["plan"], row_codes=at["codes"],
        row_scales=at["codes"] + ROWS * COLS, workspace=at["workspace"], workspace_bytes=1 << 15, **common,
    )  # fmt: skip
    assert [set(numbers) for numbers in sequence.arrays()] == [{1, 3, 5}, {2, 3, 4, 5}]
    assert not given["codes"].any(), "recording launches nothing"
    addresses = [array.ctypes.data for array in other.values()]
    sequence.run(addresses, end=1)
    assert not other["codes"].any()
    assert np.array_equal(other["workspace"][1 << 15 :].view(np.int64)[:GROUPS], other["sizes"])
    sequence.run(addresses, first=1)
    assert other["codes"].any()
    whole = recorded()
    expected = {**other, "codes": np.zeros_like(other["codes"])}
    whole.run([array.ctypes.data for array in expected.values()])
    used = int(other["sizes"].sum()) * COLS
    assert np.array_equal(other["codes"][:used], expected["codes"][:used])


def test_a_named_array_gives_way_to_what_replaces_it() -> None:
    """Memory that was freed and allocated again is another array; one that is there shares no byte with another."""
    sequence = native.Sequence(cuda=False)
    memory = np.zeros(4096, np.uint8)
    start = memory.ctypes.data
    first, second = sequence.name(start, 1024), sequence.name(start + 1024, 1024)
    for begin, size in ((start, 1024), (start + 1023, 1), (start + 2047, 100), (start - 1, 4096), (start + 10, 1)):
        with pytest.raises(ValueError, match="shares bytes with one that has a number"):
            sequence.name(begin, size)
    for begin, size in ((start, 0), (0, 16)):
        with pytest.raises(ValueError, match="an array is empty"):
            sequence.name(begin, size)
    third = sequence.name(start + 1000, 40, replaces=True)
    assert (first, second, third) == (1, 2, 3)
    choices = {"choices": 2, "groups": 1, "into": sequence, "cuda": False}
    names = ("index", "group_sizes", "order", "position", "routed")
    native.route(**{name: start + 1000 + 8 * place for place, name in enumerate(names)}, **choices)
    assert sequence.arrays() == [[third] * len(names)]
    with pytest.raises(ValueError, match="an address in no named array"):
        native.route(**{name: start + 8 * place for place, name in enumerate(names)}, **choices)
    assert len(sequence) == 1


def test_rows_are_routed_moved_and_read_again(rng: np.random.Generator) -> None:
    """route, permute_rows, combine_rows, dot_rows and dequantize as one sequence have the bits of direct calls."""
    tokens, each, cols, groups = 19, 3, 16, 4
    rows = tokens * each

    def drawn() -> dict[str, Array]:
        shapes: dict[str, tuple[int, type]] = {
            "index": (rows, np.int64), "group_sizes": (groups, np.int64), "order": (rows, np.int64),
            "position": (rows, np.int64), "routed": (rows, np.uint8), "x": (tokens * cols, np.float32),
            "weights": (rows, np.float32), "rows": (rows * cols, np.float32), "y": (tokens * cols, np.float32),
            "dots": (rows, np.float32), "codes": (rows * cols, np.uint8), "scales": (groups, np.float32),
            "plan": (native.plan_words(rows, groups), np.int64), "values": (rows * cols, np.float32),
        }  # fmt: skip
        made = {name: aligned(size, dtype) for name, (size, dtype) in shapes.items()}
        made["index"][:] = rng.integers(-1, groups, rows)
        for name in ("x", "weights", "scales"):
            made[name][:] = rng.random(made[name].size)
        made["codes"][:] = rng.integers(0, 120, rows * cols)
        return made

    def call(made: dict[str, Array], **into: native.Sequence) -> None:
        at = {name: array.ctypes.data for name, array in made.items()}
        routed = {name: at[name] for name in ("group_sizes", "order", "position", "routed")}
        native.route(cuda=False, index=at["index"], choices=rows, groups=groups, **routed, **into)
        native.plan(
            cuda=False, sizes=at["group_sizes"], sizes_are_64=True, groups=groups, rows=rows, plan=at["plan"], **into
        )
        moved = {
            "cuda": False, "tokens": tokens, "each": each, "row_count": rows, "position": at["position"],
            "routed": at["routed"], "dtype": native.DTYPES["float32"], "cols": cols, **into,
        }  # fmt: skip
        native.permute_rows(**moved, weights=at["weights"], from_=at["x"], stride=cols, out=at["rows"])
        native.combine_rows(**moved, weights=0, from_=at["rows"], stride=cols, out=at["y"])
        native.dot_rows(**moved, rows=at["rows"], row_stride=cols, dy=at["x"], dy_stride=cols, out=at["dots"])
        native.Quantizer(**SPEC).dequantize(
            cuda=False, direction=native.DIRECTIONS["rowwise"], codes=at["codes"], scales=at["scales"], rows=rows,
            cols=cols, groups=groups, plan=at["plan"], out=at["values"], out_dtype=native.DTYPES["float32"], **into,
        )  # fmt: skip

    recorded, direct = drawn(), drawn()
    sequence = native.Sequence(cuda=False)
    for array in recorded.values():
        sequence.name(array.ctypes.data, array.nbytes)
    call(recorded, into=sequence)
    again = {name: aligned(array.size, array.dtype.type) for name, array in direct.items()}
    for name, array in direct.items():
        again[name][:] = array
    call(direct)
    sequence.run([array.ctypes.data for array in again.values()])
    for name, array in direct.items():
        assert np.array_equal(array, again[name]), name
