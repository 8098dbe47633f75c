"""Blocks of tokens on one shard: they run one after the other, and their number is known when the program is traced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from octavo_jax.sharding.placement import Placement

Tree = TypeVar("Tree")


class Block(NamedTuple):
    """Which expert block and which data block of its shard."""

    e: int
    f: int


class Blocks(NamedTuple):
    """The blocks of tokens on one shard; `lead` are the lengths of the tokens' leading axes there."""

    placement: Placement
    lead: tuple[int, ...]

    @classmethod
    def of(cls, placement: Placement, group_sizes: Array) -> Blocks:
        """The blocks of a shard whose group sizes are [*B, G]."""
        return cls(placement, group_sizes.shape[:-1])

    def _count(self, letter: str) -> int:
        return dict(zip(self.placement.block_letters, self.lead, strict=True)).get(letter, 1)  # type: ignore[call-overload,no-any-return]

    @property
    def experts(self) -> int:
        """The number of expert blocks, 1 without such an axis."""
        return self._count("e")

    @property
    def data(self) -> int:
        """The number of data blocks, 1 without such an axis."""
        return self._count("f")

    def __iter__(self) -> Iterator[Block]:
        for e in range(self.experts):
            for f in range(self.data):
                yield Block(e, f)

    def take(self, tree: Tree, block: Block) -> Tree:
        """The block's part of arrays with the leading axes."""
        if not self.lead:
            return tree
        position = tuple(block.e if letter == "e" else block.f for letter in self.placement.block_letters)
        return jax.tree.map(lambda array: array[position], tree)  # type: ignore[no-any-return]

    def join(self, parts: Sequence[Tree]) -> Tree:
        """Arrays with the leading axes, from one part per block, in order."""
        return _stacked(parts, self.lead)

    def summed_over_data(self, each: Sequence[Array]) -> Array:
        """[E * G, ...] from [G, ...] of each block, in order: the data blocks of an expert block are added up."""
        totals: list[Array] = []
        for number, sums in enumerate(each):
            if number % self.data == 0:
                totals.append(sums)
            else:
                totals[-1] = totals[-1] + sums
        return jnp.concatenate(totals)

    def first_group(self, offset: Array | np.uint32, block: Block, groups: int) -> Array | np.uint32:
        """The number of the block's first group: blocks count with F outside and E inside, over the whole mesh."""
        experts, first_e = self._position("e", self.experts)
        _, first_f = self._position("f", self.data)
        number = (first_f + np.uint32(block.f)) * np.uint32(experts) + first_e + np.uint32(block.e)
        return offset + number * np.uint32(groups)

    def _position(self, letter: Any, local: int) -> tuple[int, Array | np.uint32]:
        """How many blocks the whole mesh has along a letter, of which each shard has `local`; and the number of this
        shard's first."""
        axes = self.placement.block_axes(letter)
        if not axes:
            return local, np.uint32(0)
        first = lax.axis_index(axes).astype(jnp.uint32) * np.uint32(local)
        return local * self.placement.shard_count(axes), first


def expert_block(tree: Tree, e: int) -> Tree:
    """The expert block's part of arrays with the leading axis E."""
    return jax.tree.map(lambda array: array[e], tree)  # type: ignore[no-any-return]


def join_experts(parts: Sequence[Tree]) -> Tree:
    """Arrays with the leading axis E, from one part per expert block."""
    return _stacked(parts, (len(parts),))


def _stacked(parts: Sequence[Tree], lead: tuple[int, ...]) -> Tree:
    if not lead:
        return parts[0]

    def stack(*arrays: Any) -> Any:
        one = arrays[0]
        joined = one[None] if len(arrays) == 1 else jnp.stack(arrays)
        return joined.reshape(*lead, *one.shape)

    return jax.tree.map(stack, *parts)  # type: ignore[no-any-return]
