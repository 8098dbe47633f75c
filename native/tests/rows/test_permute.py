"""route, permute_rows, combine_rows and dot_rows on the CPU, against numpy; guarded arrays see every stray write.

docs/faults: rows 18 (choices that no group has), 61 (indices out of range).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cpu_calls import DTYPE
from guarded import POISON, Array, Guarded, put

import octavo_native as native

U = 2.0**-24


@dataclass(eq=False)
class Routed:
    """Choices [T, k] among `groups`, and what `route` made of them; `index` holds numbers of no group, too."""

    index: Array
    groups: int

    def __post_init__(self) -> None:
        given, count = put(self.index), self.index.size
        sizes, order, position = (Guarded(shape, np.int64) for shape in ((self.groups,), (count,), self.index.shape))
        routed = Guarded(self.index.shape, np.uint8)
        native.route(
            cuda=False,
            index=given.address,
            choices=count,
            groups=self.groups,
            group_sizes=sizes.address,
            order=order.address,
            position=position.address,
            routed=routed.address,
        )
        self.sizes, self.order, self.position, self.routed = sizes.array, order.array, position.array, routed.array

    @property
    def live(self) -> Array:
        """bool [T, k]."""
        mask: Array = (self.index >= 0) & (self.index < self.groups)
        return mask


def draw_choices(rng: np.random.Generator) -> Routed:
    """Any number of tokens and groups; some choices of no group, in some draws all of them."""
    tokens, each, groups = int(rng.integers(0, 50)), int(rng.integers(1, 9)), int(rng.choice([1, 2, 7, 300]))
    index = rng.integers(0, groups, (tokens, each))
    lost = rng.random(index.shape) < rng.choice([0.0, 0.3, 1.0])
    return Routed(np.where(lost, rng.choice([-1, groups, -(1 << 63), (1 << 63) - 1], index.shape), index), groups)


def draw_rows(rng: np.random.Generator, count: int, cols: int, dtype: str) -> Array:
    """[count, cols] with rows further apart in memory than they are long."""
    values = rng.standard_normal((count, cols + int(rng.integers(0, 3)))).astype(DTYPE[dtype])
    return values[:, :cols]


def rounded(values: Array, dtype: str) -> Array:
    """fp32 in `dtype`."""
    result: Array = values.astype(np.float32).astype(DTYPE[dtype])
    return result


def call(what: str, held: Routed, arrays: dict[str, Array], into: Guarded, **change: Any) -> None:
    """One native call; `arrays` by argument, with `<name>_stride` or `stride` as they lie."""
    placed = {name: put(array.base if array.base is not None else array) for name, array in arrays.items()}
    first = next(iter(arrays.values()))
    strides = {name: array.strides[0] // array.itemsize for name, array in arrays.items()}
    named = {"dy": "dy_stride", "rows": "row_stride", "from_": "stride"}
    position, routed = put(held.position), put(held.routed)
    rows = into.array if what == "permute_rows" else first
    given = {
        "tokens": held.index.shape[0],
        "each": held.index.shape[1],
        "row_count": rows.shape[0],
        "position": position.address,
        "routed": routed.address,
        "dtype": native.DTYPES[first.dtype.name],
        "cols": first.shape[1],
        "out": into.address,
        **{name: array.address for name, array in placed.items()},
        **{named[name]: stride for name, stride in strides.items()},
    }
    getattr(native, what)(cuda=False, **(given | change))


def test_route_sorts_stably(rng: np.random.Generator) -> None:
    """Groups in order, choices in order within them, those of no group last; position is order's inverse."""
    for _ in range(20):
        held = draw_choices(rng)
        keys = np.where(held.live, held.index, held.groups).reshape(-1)
        assert (held.order == np.argsort(keys, kind="stable")).all()
        assert (held.order[held.position.reshape(-1)] == np.arange(keys.size)).all()
        assert (held.routed == held.live).all()
        assert (held.sizes == np.bincount(keys, minlength=held.groups + 1)[: held.groups]).all()


def test_a_workspace_is_for_many_choices_of_few_groups() -> None:
    """What one launch sorts as fast needs none, and counts of many groups would not fit in smem."""
    assert native.route_workspace(24_576, 64) == 0
    assert native.route_workspace(24_577, 64) == 4 * 13 * 65
    assert native.route_workspace(1 << 20, 1024) == 0
    with pytest.raises(ValueError, match="past 2\\^30"):
        native.route_workspace((1 << 63) - 1, 64)


@pytest.mark.parametrize("weighted", [False, True], ids=["copies", "weighted"])
@pytest.mark.parametrize("dtype", DTYPE)
def test_permute_and_combine(dtype: str, *, weighted: bool, rng: np.random.Generator) -> None:
    """Bit for bit: a product is rounded once, a sum runs in fp32 in the order of choices; NaN rows of no choice stay
    there."""
    for _ in range(6):
        held, cols = draw_choices(rng), int(rng.choice([1, 8, 37, 1100]))
        tokens, each = held.index.shape
        weights = rng.random(held.index.shape).astype(np.float32)
        with_weights = put(weights)
        how = {"weights": with_weights.address if weighted else 0, "threads": int(rng.integers(0, 3))}
        factor = weights if weighted else np.ones_like(weights)

        x, rows = draw_rows(rng, tokens, cols, dtype), Guarded((tokens * each, cols), DTYPE[dtype])
        call("permute_rows", held, {"from_": x}, rows, **how)
        expected = np.zeros((tokens * each, cols), DTYPE[dtype])
        made = rounded(x.astype(np.float32)[:, None] * factor[..., None], dtype)
        expected[held.position[held.live]] = made[held.live]
        assert (rows.bytes == expected.reshape(-1).view(np.uint8)).all()

        given = draw_rows(rng, tokens * each, cols, dtype)
        given[held.position[~held.live]] = np.nan
        out = Guarded((tokens, cols), DTYPE[dtype])
        call("combine_rows", held, {"from_": given}, out, **how)
        total = np.zeros((tokens, cols), np.float32)
        for j in range(each):
            part = given[held.position[:, j]].astype(np.float32) * factor[:, j, None]
            total += np.where(held.live[:, j, None], part, np.float32(0))
        assert (out.bytes == rounded(total, dtype).reshape(-1).view(np.uint8)).all()


@pytest.mark.parametrize("dtype", DTYPE)
def test_dot(dtype: str, rng: np.random.Generator) -> None:
    """The gradient of combine's weights is within n u of float64; 0 for a choice of no group."""
    held, cols = draw_choices(rng), int(rng.choice([1, 37, 1100]))
    tokens, each = held.index.shape
    rows, dy = draw_rows(rng, tokens * each, cols, dtype), draw_rows(rng, tokens, cols, dtype)
    rows[held.position[~held.live]] = np.nan
    out = Guarded(held.index.shape, np.float32)
    call("dot_rows", held, {"rows": rows, "dy": dy}, out)
    terms = rows[held.position].astype(np.float64) * dy.astype(np.float64)[:, None]
    allowed = (cols + 2) * U * np.abs(terms).sum(-1)
    error = np.abs(out.array - terms.sum(-1))
    assert (error[held.live] <= allowed[held.live]).all()
    assert not out.array[~held.live].any()


def test_positions_out_of_range_are_not_followed(rng: np.random.Generator) -> None:
    """Whatever stands in `position`, only rows of the arrays are read and written (faults.md 61)."""
    held = Routed(rng.integers(0, 4, (9, 3)), 4)
    wild = rng.random(held.index.shape) < 0.5
    held.position = np.where(wild, rng.choice([-1, 27, -(1 << 63), (1 << 63) - 1], wild.shape), held.position)
    x, rows = draw_rows(rng, 9, 5, "float32"), Guarded((27, 5), np.float32)
    call("permute_rows", held, {"from_": x}, rows, weights=0)
    written = np.zeros(27, bool)
    written[held.position[~wild]] = True
    assert (rows.array[~written].view(np.uint8) == POISON).all()
    assert (rows.array[held.position[~wild]] == np.repeat(x, 3, 0).reshape(9, 3, 5)[~wild]).all()
    out, sums = Guarded((9, 3), np.float32), Guarded((9, 5), np.float32)
    given = draw_rows(rng, 27, 5, "float32")
    call("combine_rows", held, {"from_": given}, sums, weights=0)
    call("dot_rows", held, {"rows": given, "dy": x}, out)
    assert not out.array[wild].any()
    assert not sums.array[wild.all(1)].any()


def test_rows_may_be_more_than_choices(rng: np.random.Generator) -> None:
    """Buffers of several ranks have more places than a rank has choices, and its rows may stand at any of them. Once
    those past tokens * each were taken for rows of nobody."""
    held, count = Routed(rng.integers(0, 4, (9, 3)), 4), 100
    held.position = np.append(rng.permutation(count - 1)[:26], count - 1).reshape(9, 3)  # the last row among them
    x, rows = draw_rows(rng, 9, 5, "float32"), Guarded((count, 5), np.float32)
    call("permute_rows", held, {"from_": x}, rows, weights=0)
    assert (rows.array[held.position] == x[:, None]).all()
    given, sums = draw_rows(rng, count, 5, "float32"), Guarded((9, 5), np.float32)
    call("combine_rows", held, {"from_": given}, sums, weights=0)
    total = np.zeros((9, 5), np.float32)
    for j in range(3):
        total += given[held.position[:, j]]
    assert (sums.array == total).all()
    out = Guarded((9, 3), np.float32)
    call("dot_rows", held, {"rows": given, "dy": x}, out)
    exact = (given[held.position].astype(np.float64) * x.astype(np.float64)[:, None]).sum(-1)
    assert (np.abs(out.array - exact) <= 7 * U * np.abs(given[held.position] * x[:, None]).sum(-1)).all()


def test_nobodys_choices_write_nothing_where_rows_are_few(rng: np.random.Generator) -> None:
    """With fewer rows than choices those that are routed nowhere have one row, which nobody reads. Once each of them
    cleared it, which took three times as long as moving the rows."""
    held = Routed(np.where(rng.random((40, 3)) < 0.7, -1, rng.integers(0, 4, (40, 3))), 4)
    used = int(held.live.sum())
    held.position = np.where(held.live, held.position, used)
    x, rows = draw_rows(rng, 40, 5, "float32"), Guarded((used + 1, 5), np.float32)
    call("permute_rows", held, {"from_": x}, rows, weights=0)
    assert (rows.array[held.position[held.live]] == np.repeat(x, 3, 0).reshape(40, 3, 5)[held.live]).all()
    assert (rows.array[used].view(np.uint8) == POISON).all()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("permute_rows", {"tokens": -1}, "tokens is negative"),
    ("permute_rows", {"each": 0}, "each is less than 1"),
    ("permute_rows", {"row_count": -1}, "row_count is negative"),
    ("combine_rows", {"row_count": (1 << 30) + 1}, "row_count is past 2\\^30"),
    ("permute_rows", {"tokens": 1 << 30}, "past 2\\^30"),
    ("permute_rows", {"position": 0}, "position or routed is null"),
    ("permute_rows", {"position": 4}, "position is not aligned"),
    ("permute_rows", {"weights": 2}, "weights is not aligned"),
    ("permute_rows", {"out": 0}, "is null"),
    ("permute_rows", {"from_": 2}, "not aligned to its elements"),
    ("combine_rows", {"stride": 4}, "less than cols"),
    ("combine_rows", {"stride": 1 << 40}, "past 2\\^32"),
    ("combine_rows", {"cols": -1}, "cols is negative"),
    ("combine_rows", {"dtype": 3}, "dtype is 3"),
    ("combine_rows", {"threads": -1}, "threads is negative"),
]


@pytest.mark.parametrize(("what", "change", "word"), REFUSED)
def test_bad_arguments_are_refused(what: str, change: dict[str, Any], word: str, rng: np.random.Generator) -> None:
    """Small numbers are misaligned pointers, which nothing follows."""
    held = Routed(rng.integers(0, 4, (9, 3)), 4)
    combine = what == "combine_rows"
    given = draw_rows(rng, 27 if combine else 9, 5, "float32")
    out = Guarded((9 if combine else 27, 5), np.float32)
    with pytest.raises(ValueError, match=word):
        call(what, held, {"from_": given}, out, **({"weights": 0} | change))
    assert out.untouched


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"groups": 0}, "groups is less than 1"),
        ({"choices": -1}, "rows is negative"),
        ({"group_sizes": 0}, "group_sizes is null"),
        ({"routed": 0}, "routed is null"),
        ({"order": 12}, "not aligned to 8"),
    ],
)
def test_bad_routes_are_refused(change: dict[str, int], word: str) -> None:
    """Null and misaligned arrays, and counts that no routing has."""
    given = {"index": 16, "choices": 3, "groups": 2, "group_sizes": 16, "order": 16, "position": 16, "routed": 16}
    with pytest.raises(ValueError, match=word):
        native.route(cuda=False, **(given | change))
