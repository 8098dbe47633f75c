"""QuantizerSpec and GroupedTensorSpec: what fits together, and the shapes that follow."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo import GroupedTensorSpec, MXFP4Weights, QuantizerSpec, RecipeError, block_bound, check_group_sizes

MXFP4 = MXFP4Weights().quantizer("w")
assert MXFP4 is not None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"format": "e2m1", "scaling": "row"}, "e2m1 and nvfp4 need each other"),
        ({"format": "e4m3", "scaling": "nvfp4"}, "e2m1 and nvfp4 need each other"),
        ({"format": "e4m3", "scaling": "row", "square": True}, "^QuantizerSpec: square=True needs blocks"),
        ({"format": "e4m3", "scaling": "mxfp8", "rounding": "stochastic"}, "defined for e2m1"),
        ({"format": "e4m3", "scaling": "block", "hadamard": True}, "defined for nvfp4"),
        ({"format": "e2m1", "scaling": "nvfp4", "hadamard": True, "square": True}, "drop one of the two"),
        ({"format": "e2m1", "scaling": "nvfp4", "hadamard": True, "role": "w"}, "role is 'w'"),
        ({"format": "e4m3", "scaling": "mxfp8", "power_of_two": True}, "fixes its own"),
        ({"format": "e4m3", "scaling": "delayed", "amax_epsilon": 1e-6}, "takes 0"),
        ({"format": "e4m3", "scaling": "block", "amax_epsilon": -1}, "amax_epsilon"),
        ({"format": "fp8", "scaling": "block"}, "QuantizerSpec.format: got 'fp8'"),
    ],
)
def test_a_spec_that_means_nothing_is_refused(fields: dict[str, Any], reason: str) -> None:
    """Two options that contradict each other are an error where they are written, not a guess later."""
    with pytest.raises(RecipeError, match=reason):
        QuantizerSpec(**fields)


def test_a_spec_round_trips() -> None:
    """A spec is stored beside the codes that it made."""
    spec = QuantizerSpec(format="e2m1", scaling="nvfp4", role="dy", rounding="stochastic", hadamard=True)
    tensor = GroupedTensorSpec(shape=(40, 32), groups=3, quantizer=spec)
    assert GroupedTensorSpec.model_validate_json(tensor.model_dump_json()) == tensor
    assert hash(tensor) == hash(GroupedTensorSpec.model_validate_json(tensor.model_dump_json()))


def _spec(scaling: str, **more: Any) -> QuantizerSpec:
    return QuantizerSpec(format="e2m1" if scaling == "nvfp4" else "e4m3", scaling=scaling, **more)


@pytest.mark.parametrize(
    ("spec", "payload", "rowwise", "columnwise"),
    [
        (_spec("current"), (300, 200), (4,), (4,)),
        (_spec("delayed"), (300, 200), (4,), (4,)),
        (_spec("row"), (300, 200), (300,), (4, 200)),
        (_spec("block"), (300, 200), (300, 2), (6, 200)),
        (_spec("block", square=True), (300, 200), (6, 2), (6, 2)),
        (_spec("mxfp8"), (300, 200), (300, 7), (13, 200)),
        (_spec("nvfp4"), (300, 200), (300, 13), (22, 200)),
        (_spec("nvfp4", hadamard=True), (352, 200), (300, 13), (22, 200)),
    ],
)
def test_ragged_shapes(spec: QuantizerSpec, payload: Any, rowwise: Any, columnwise: Any) -> None:
    """Shapes of a ragged tensor follow from static numbers alone, so a compiler knows them (M 300, K 200, G 4)."""
    tensor = GroupedTensorSpec(shape=(300, 200), groups=4, quantizer=spec)
    assert tensor.payload_shape("columnwise") == payload
    assert tensor.payload_shape("rowwise") == (300, 200)
    assert tensor.scale_shape("rowwise") == rowwise
    assert tensor.scale_shape("columnwise") == columnwise


@pytest.mark.parametrize(
    ("spec", "rowwise", "columnwise"),
    [
        (_spec("current"), (4,), (4,)),
        (_spec("row"), (4, 300), (4, 200)),
        (_spec("block"), (4, 300, 2), (4, 3, 200)),
        (_spec("block", square=True), (4, 3, 2), (4, 3, 2)),
        (_spec("nvfp4", square=True), (4, 19, 13), (4, 19, 13)),
    ],
)
def test_stacked_shapes(spec: QuantizerSpec, rowwise: Any, columnwise: Any) -> None:
    """Each expert of a weight [G, N, K] is its own matrix (G 4, N 300, K 200)."""
    tensor = GroupedTensorSpec(shape=(4, 300, 200), groups=4, ragged_axis=None, quantizer=spec)
    assert tensor.scale_shape("rowwise") == rowwise
    assert tensor.scale_shape("columnwise") == columnwise


@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=20),
    tail=st.integers(0, 300),
    size=st.sampled_from([16, 32, 128]),
)
def test_the_block_bound_holds_any_split(sizes: list[int], tail: int, size: int) -> None:
    """Blocks restart at each group; no split of the rows may need more blocks than were allocated."""
    assert sum(-(-n // size) for n in sizes) <= block_bound(sum(sizes) + tail, len(sizes), size)


@pytest.mark.parametrize("size", [16, 32, 128])
def test_the_block_bound_is_reached(size: int) -> None:
    """The bound is not generous: some split needs every block of it."""
    assert block_bound(5, 5, size) == 5
    assert block_bound(size + 1, 1, size) == 2


@pytest.mark.parametrize("size", [16, 32, 128])
def test_the_block_bound_is_no_looser(size: int) -> None:
    """It is the most blocks that any split of the rows has, wherever each group can have a row: shapes of the plain
    layout follow from it, so that a larger one would be another layout."""
    for groups in (1, 2, 3, 7):
        for rows in range(groups, 3 * size + groups):
            worst = [1] * (groups - 1) + [rows - groups + 1]
            assert block_bound(rows, groups, size) == sum(-(-n // size) for n in worst), (rows, groups)
    mxfp8 = QuantizerSpec(scaling="mxfp8", format="e4m3", orientation="columnwise")
    assert GroupedTensorSpec(shape=(100, 8), groups=4, quantizer=mxfp8).scale_shape("columnwise") == (7, 8)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"shape": (3, 4, 5), "groups": 3}, r"ragged tensor has shape \[M, K\]"),
        ({"shape": (3, 4), "groups": 3, "ragged_axis": None}, r"stacked matrices have shape \[G, N, K\]"),
        ({"shape": (3, 4, 5), "groups": 2, "ragged_axis": None}, "holds 3 matrices, but groups=2"),
        ({"shape": (-3, 4), "groups": 2}, "got -3"),
        ({"shape": (3, 4), "groups": 0}, "groups: got 0"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(fields: dict[str, Any], reason: str) -> None:
    """A wrong rank or group count is named with both values."""
    with pytest.raises(RecipeError, match=reason):
        GroupedTensorSpec(quantizer=_spec("block"), **fields)


def test_a_quantizer_that_rounds_to_mxfp4_holds_its_values() -> None:
    """Any other field than those of 128x128 blocks of E4M3 with powers of two would lose them: the message names it."""
    for name, value in {
        "format": "e5m2",
        "square": False,
        "power_of_two": False,
        "role": "x",
        "amax_epsilon": 1.0,
    }.items():
        with pytest.raises(
            RecipeError, match=rf"MXFP4's values of weights, and {name} is {value!r}; take MXFP4Weights"
        ):
            QuantizerSpec(**{**dict(MXFP4), name: value})
    with pytest.raises(RecipeError, match="mxfp4: got 'both'"):
        QuantizerSpec(**{**dict(MXFP4), "mxfp4": "both"})


def test_the_json_of_other_quantizers_has_not_changed() -> None:
    """Files and JSON of 0.1.0 know no `mxfp4`, and that release reads what this one writes of a quantizer it knows."""
    assert "mxfp4" not in _spec("block").model_dump_json()
    assert "mxfp4" not in _spec("block").model_dump()
    nested = GroupedTensorSpec(shape=(1, 4, 4), groups=1, ragged_axis=None, quantizer=MXFP4)
    assert GroupedTensorSpec.model_validate_json(nested.model_dump_json()) == nested
    assert nested.quantizer.mxfp4 == "rowwise"


def test_host_sizes_are_checked() -> None:
    """Promise 2 of the product: negative sizes and sums past M are a ValueError where sizes are on the host."""
    check_group_sizes([0, 3, 0], 3)
    check_group_sizes([], 0)
    with pytest.raises(ValueError, match=r"group_sizes\[1\] is -2"):
        check_group_sizes([5, -2], 8)
    with pytest.raises(ValueError, match="sum to 9 and the tensor has 8 rows"):
        check_group_sizes([5, 4], 8)


def test_comparing_and_hashing_runs_no_pydantic() -> None:
    """Specs are keys of plans and of jit caches: a forward compares and hashes them, and may run no pydantic."""
    spec = GroupedTensorSpec(shape=(4, 8), groups=2, quantizer=_spec("block"))
    again = GroupedTensorSpec(shape=(4, 8), groups=2, quantizer=_spec("block"))
    other = GroupedTensorSpec(shape=(4, 8), groups=3, quantizer=_spec("block"))
    files: set[str] = set()
    sys.setprofile(lambda frame, event, arg: files.add(frame.f_code.co_filename))
    try:
        equal, differs, same_hash = spec == again, spec != other, hash(spec) == hash(again)
    finally:
        sys.setprofile(None)
    assert equal
    assert differs
    assert same_hash
    assert not [file for file in files if "pydantic" in file]
