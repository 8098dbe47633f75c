"""How every array of a layer is sharded: the letters of its dimensions, PartitionSpecs and Shardy factors from them.

| array | letters |
|---|---|
| x, dx; y, dy | [blocks] m i; [blocks] m o |
| group_sizes | [blocks] h |
| kernel, dw with their own axes | (e g) k n, or (e g) n k |
| bias, dbias | (e h) o |
| amaxes and scales of delayed scaling | (e h), the kernel's (e g) |
| planes of x and dy | [blocks], then payload m c; scales by recipe: h, m, h c, m c, or blocks of rows and c |
| planes of the kernel | e, then payload g r c; scales by recipe: g, g r, g c, or g r c |

Tokens' blocks are e and f, in that order. m and h, rows and groups of a block, are never cut. r and c are the kernel's
two last dimensions. Planes of tokens in a backend's own layout have letters for their blocks alone.

Where the mesh is not known yet, PartitionSpecs name letters in the place of axes:
`octavo_jax.sharding.custom_partitioning` gives them to Shardy as a rule (`shardy_rules`), and later as axes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction, QuantizerSpec
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.remat.checkpoint_names import DIRECTIONS, FIELDS
from octavo_jax.sharding.placement import Letter, Placement
from octavo_registry import Weight

Letters = tuple[Letter | None, ...]
"""The letters of an array's dimensions, the outermost first; None for one that is never sharded."""

_partition_spec: Any = PartitionSpec  # whose constructor has no types in JAX

WHOLE: PartitionSpec = _partition_spec()
"""The PartitionSpec of what is the same everywhere: seeds, group offsets."""


def spec_of(placement: Placement, letters: Letters) -> PartitionSpec:
    """The PartitionSpec of an array with these dimensions, over axes that the caller is not manual over."""

    spec: PartitionSpec = _partition_spec(*(_entry(_names(placement, letter)) for letter in letters))
    return spec


def _names(placement: Placement, letter: Letter | None) -> tuple[str, ...]:
    if letter is None:
        return ()
    return (letter,) if placement.mesh_unknown else placement.non_manual(placement.axes_of(letter))


def _entry(names: tuple[str, ...]) -> Any:
    return names[0] if len(names) == 1 else names or None


def rows(placement: Placement, column: Letter) -> PartitionSpec:
    """The PartitionSpec of tokens with features `column`: "i" for x, "o" for y."""
    return spec_of(placement, (*placement.block_letters, "m", column))


def per_row(placement: Placement) -> PartitionSpec:
    """The PartitionSpec of an array with one value per row, [*B, M]."""
    return spec_of(placement, (*placement.block_letters, "m"))


def sizes(placement: Placement) -> PartitionSpec:
    """The PartitionSpec of group sizes [*B, G]."""
    return spec_of(placement, (*placement.block_letters, "h"))


def groups(placement: Placement, *, of_kernel: bool = False, columns: Letter | None = None) -> PartitionSpec:
    """The PartitionSpec of arrays with one entry per group, [E * G] or [E * G, N], such as biases and states.

    of_kernel   whether they are the kernel's own, which are cut as its groups are
    columns     the letter of N; None without that axis
    """
    return _with_first(placement, of_kernel, () if columns is None else (columns,))


def kernel(placement: Placement, weight: Weight) -> PartitionSpec:
    """Of the kernel and its gradient, [E * G, K, N] or [E * G, N, K]."""
    return _with_first(placement, True, matrix_letters(weight))


def _with_first(placement: Placement, cut_groups: bool, others: Letters) -> PartitionSpec:
    names = _names(placement, "e" if "e" in placement.block_letters else None)
    names += _names(placement, "g" if cut_groups else "h")
    spec: PartitionSpec = _partition_spec(_entry(names), *spec_of(placement, others))
    return spec


def matrix_letters(weight: Weight) -> tuple[Letter, Letter]:
    """The last two dimensions of a kernel."""
    return ("k", "n") if weight == "kn" else ("n", "k")


def plane_letters(
    quantizer: QuantizerSpec, direction: Direction, field: str, row: Letter, column: Letter, *, stacked: bool
) -> Letters:
    """Dimensions of one array of a plane in the plain layout, without blocks; `GroupedTensorSpec` has the shapes.

    field         of the GroupedTensor: a payload, its scales, or its second level
    row, column   of the operand; tokens' rows are "m", and so are their blocks of rows
    """
    group: Letter = "g" if stacked else "h"
    lead: Letters = (group,) if stacked else ()
    if field == direction:
        return (*lead, row, column)
    if field.endswith("_global") or quantizer.scaling in ("delayed", "current"):
        return (group,)
    if quantizer.block_size is None:
        return (*lead, row) if direction == "rowwise" else (group, column)
    return (*lead, row, column)


def quantized_rows(placement: Placement, q: GroupedTensor, column: Letter) -> GroupedTensor:
    """PartitionSpecs of the planes of x ("i") or dy ("o"), as a pytree of q's form."""
    return _planes(placement, q, placement.block_letters, "m", column, stacked=False)


def quantized_kernel(placement: Placement, q: GroupedTensor, weight: Weight) -> GroupedTensor:
    """PartitionSpecs of the planes of a kernel's shards, whose leading axis is E."""
    experts: Letters = ("e",) if "e" in placement.block_letters else (None,)
    return _planes(placement, q, experts, *matrix_letters(weight), stacked=True)


def _planes(
    placement: Placement, q: GroupedTensor, lead: Letters, row: Letter, column: Letter, *, stacked: bool
) -> GroupedTensor:
    by_field: dict[str, PartitionSpec | None] = {}
    for direction in DIRECTIONS:
        layout = q.spec.rowwise_layout if direction == "rowwise" else q.spec.columnwise_layout
        for field in FIELDS[direction]:
            letters: Letters = ()
            if layout == PLAIN:
                letters = plane_letters(q.spec.quantizer, direction, field, row, column, stacked=stacked)
            by_field[field] = None if getattr(q, field) is None else spec_of(placement, lead + letters)
    here = None if q.group_sizes is None else sizes(placement)
    return replace(q, group_sizes=here, **by_field)  # type: ignore[arg-type]
