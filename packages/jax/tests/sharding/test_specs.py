"""Specs of quantized operands: a dimension that a letter names is the one that grows with the operand along it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import octavo
from octavo import GroupedTensorSpec
from octavo_jax import MeshAxes
from octavo_jax.remat.checkpoint_names import DIRECTIONS, FIELDS
from octavo_jax.sharding import specs
from octavo_jax.sharding.placement import Placement
from octavo_jax.sharding.planes import structure_of

RECIPES = ("fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "mxfp8-square", "nvfp4")
NAMED_BY_LETTERS = Placement(MeshAxes(ep="ep", fsdp="fsdp", tp="tp"), None, (2, 2))
"""Of a mesh that is not known yet: its specs name letters in the place of axes."""

KERNEL = {"g": 3, "k": 256, "n": 512}
ROWS, COLUMNS, GROUPS = 384, 256, 3


def _shapes(spec: GroupedTensorSpec) -> dict[str, tuple[int, ...]]:
    """Every array of a tensor by its field."""
    by_field: dict[str, tuple[int, ...]] = {}
    for direction in DIRECTIONS:
        of_plane = (spec.payload_shape(direction), spec.scale_shape(direction), (spec.groups,))
        by_field |= dict(zip(FIELDS[direction], of_plane, strict=True))
    return by_field


def _assert_follow(letter: str, partitions: Any, before: GroupedTensorSpec, after: GroupedTensorSpec) -> None:
    """The operand doubled along `letter`: so are the dimensions that the specs call it, and no others."""
    form = structure_of(before)
    for field, shape in _shapes(before).items():
        if getattr(form, field) is None:
            continue
        named = getattr(partitions, field)[-len(shape) :]
        wanted = tuple(2 * size if name == letter else size for size, name in zip(shape, named, strict=True))
        assert _shapes(after)[field] == wanted, f"{field} {named}"


@pytest.mark.parametrize("weight", ["kn", "nk"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_kernel(recipe: str, weight: Any) -> None:
    """Shards of a kernel are quantized, and their codes and scales side by side are those of the whole: so each array
    is cut where the kernel is."""
    quantizer = octavo.recipe(recipe).quantizer("w")
    assert quantizer is not None
    letters = ("g", *specs.matrix_letters(weight))

    def made(**sizes: int) -> GroupedTensorSpec:
        shape = tuple((KERNEL | sizes)[letter] for letter in letters)
        return GroupedTensorSpec(shape=shape, groups=shape[0], quantizer=quantizer, ragged_axis=None)

    partitions = specs.quantized_kernel(NAMED_BY_LETTERS, structure_of(made()), weight)
    for letter in letters:
        _assert_follow(letter, partitions, made(), made(**{letter: 2 * KERNEL[letter]}))
    assert {partitions.rowwise[0], partitions.columnwise[0]} == {"e"}


@pytest.mark.parametrize("column", ["i", "o"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens(recipe: str, column: Any) -> None:
    """Features of x and dy are cut by tensor parallelism, and with them whatever has an entry a feature or a block of
    them; a whole row's scale is not."""
    quantizer = octavo.recipe(recipe).quantizer("x" if column == "i" else "dy")
    assert quantizer is not None
    quantizer = quantizer.model_copy(update={"rounding": "nearest"})

    def made(columns: int) -> GroupedTensorSpec:
        return GroupedTensorSpec(shape=(ROWS, columns), groups=GROUPS, quantizer=quantizer, ragged_axis=0)

    partitions = specs.quantized_rows(NAMED_BY_LETTERS, structure_of(made(COLUMNS)), column)
    _assert_follow(column, partitions, made(COLUMNS), made(2 * COLUMNS))
    assert tuple(partitions.rowwise)[:2] == ("e", "f")


def test_a_spec_that_follows_another_side_is_seen() -> None:
    """Planted: row scaling's scales of columns along the kernel's other side."""
    quantizer = octavo.RowScaling().quantizer("w")
    assert quantizer is not None
    before, after = (
        GroupedTensorSpec(shape=(3, 256, n), groups=3, quantizer=quantizer, ragged_axis=None) for n in (512, 1024)
    )
    partitions = specs.quantized_kernel(NAMED_BY_LETTERS, structure_of(before), "kn")
    wrong = replace(partitions, columnwise_scale=specs.spec_of(NAMED_BY_LETTERS, ("e", "g", "k")))
    with pytest.raises(AssertionError, match="columnwise_scale"):
        _assert_follow("n", wrong, before, after)
