"""Placement: how the mesh cuts the arrays of one layer, for every route."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import AxisType

from octavo_jax.sharding.axes import MeshAxes, Role

Letter = Literal["e", "f", "m", "h", "g", "k", "n", "i", "o"]
"""A dimension of a layer's arrays.

e, f      expert blocks and data blocks of tokens
m, h      rows and groups of one block, which no mesh axis cuts
g, k, n   the kernel's groups, K and N, which fsdp may cut
i, o      tokens' in-features and out-features, which fsdp does not cut
"""

Route = Literal["single", "auto", "explicit", "manual", "partly manual", "auto, mesh unknown"]

_Mesh = Any  # jax.sharding.AbstractMesh, which mypy takes for Any


def mesh_of(*operands: Any) -> _Mesh | None:
    """The abstract mesh in scope, else the mesh in an operand's type; None where there is none.

    Arrays that are sharded over an Auto mesh carry it into `jax.jit` without `jax.set_mesh`.
    """
    context = jax.sharding.get_abstract_mesh()
    if not context.empty:
        return context
    for leaf in jax.tree.leaves(operands):
        sharding = getattr(jax.typeof(leaf), "sharding", None)
        if sharding is not None and not sharding.mesh.empty:
            return sharding.mesh
    return None


_partitioned: ContextVar[_Mesh | None] = ContextVar("octavo_jax_partitioned", default=None)


@contextmanager
def partitioned(mesh: _Mesh) -> Iterator[None]:
    """A context for the time while a program is partitioned, in which placements without a mesh have this one."""
    token = _partitioned.set(mesh)
    try:
        yield
    finally:
        _partitioned.reset(token)


@dataclass(frozen=True)
class Placement:
    """The mesh axes that cut each dimension of a layer's arrays.

    axes         the roles of mesh axes
    mesh         the abstract mesh; None: one device, or a mesh that is not known before XLA partitions the program
    blocks       the lengths of the tokens' leading axes, as the caller gave them
    experts      whether one leading axis is of expert blocks and not of data blocks
    one_matrix   whether the kernel has no groups, so that ep shards tokens, inside of dp and fsdp
    """

    axes: MeshAxes
    mesh: _Mesh | None
    blocks: tuple[int, ...]
    experts: bool = False
    one_matrix: bool = False

    @property
    def manual_axes(self) -> frozenset[str]:
        """Axes that the caller's shard_map is already manual over."""
        if self.mesh is None:
            return frozenset()
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return frozenset(name for name, kind in types if kind == AxisType.Manual)

    @property
    def non_manual_axes(self) -> tuple[str, ...]:
        """Axes that the caller is not manual over, whether or not they have a role."""
        manual = self.manual_axes
        return () if self.mesh is None else tuple(name for name in self.mesh.axis_names if name not in manual)

    @property
    def route(self) -> Route:
        """How the layer reaches its shards."""
        if not self.axes.every:
            return "single"
        if self.mesh is None:
            return "auto, mesh unknown"
        if not set(self.axes.every) - self.manual_axes:
            return "manual"
        if self.manual_axes:
            return "partly manual"
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        return "explicit" if AxisType.Explicit in kinds.values() else "auto"

    @property
    def block_letters(self) -> tuple[Letter, ...]:
        """The letters of the tokens' leading axes: ("e", "f"), ("e",), ("f",) or ()."""
        if len(self.blocks) == 2:
            return ("e", "f")
        experts = self.experts or (self.axes.ep and not self.one_matrix)
        return () if not self.blocks else ("e",) if experts else ("f",)

    def block_count(self, letter: Letter) -> int:
        """The number of blocks along "e" or "f", 1 where there is no such axis."""
        return dict(zip(self.block_letters, self.blocks, strict=True)).get(letter, 1)

    def axes_of(self, letter: Letter) -> tuple[str, ...]:
        """The mesh axes that shard a dimension, the caller's manual ones included."""
        axes = self.axes
        if letter == "e":
            return () if self.one_matrix else axes.names("ep")
        if letter == "f":
            return axes.names("dp") + axes.names("fsdp") + (axes.names("ep") if self.one_matrix else ())
        if letter in ("m", "h"):
            return ()
        if letter in ("i", "o"):
            return self._kernel_axes("k" if letter == "i" else "n", "tp")
        return self._kernel_axes(letter, "tp") + self._kernel_axes(letter, "fsdp")

    def _kernel_axes(self, letter: Letter, role: Role) -> tuple[str, ...]:
        dim = self.axes.tp_dim if role == "tp" else self.axes.fsdp_sharded
        return self.axes.names(role) if dim.lower() == letter else ()

    def non_manual(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `names` that the caller is not manual over: the axes that a PartitionSpec may name here."""
        manual = self.manual_axes
        return tuple(name for name in names if name not in manual)

    def shard_count(self, names: tuple[str, ...]) -> int:
        """The number of shards along these axes together."""
        mesh = _partitioned.get() if self.mesh is None else self.mesh
        return 1 if mesh is None else math.prod(mesh.shape[name] for name in names)

    def _of_several_devices(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if self.shard_count((name,)) > 1)

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        """Axes along which the kernel's shards are gathered, and its gradient is scattered."""
        return self._of_several_devices(self.axes.names("fsdp"))

    @property
    def gathered_letter(self) -> Letter:
        """The dimension of the kernel along which its shards are gathered."""
        letters: dict[str, Letter] = {"G": "g", "K": "k", "N": "n"}
        return letters[self.axes.fsdp_sharded]

    def cutting_axes(self, letter: Letter) -> tuple[str, ...]:
        """The axes that cut a dimension: those that shard it, and have more than one device."""
        return self._of_several_devices(self.axes_of(letter))

    def block_axes(self, letter: Letter) -> tuple[str, ...]:
        """Axes over which blocks "e" or "f" are distributed: all that cut them, or the caller's alone where the tokens
        have no such leading axis, because its shard_map has taken it off."""
        manual = self.manual_axes
        has_axis = letter in self.block_letters
        return tuple(name for name in self.cutting_axes(letter) if has_axis or name in manual)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which a kernel's gradient is summed: those that shard the tokens but not the experts."""
        return self.block_axes("f")

    @property
    def sums_data_blocks(self) -> bool:
        """True where a kernel's gradient is a sum over blocks."""
        return self.block_count("f") > 1 or bool(self.data_axes)

    def is_summed_over(self, letter: Letter) -> bool:
        """True where products over this dimension are summed over shards, or may be once the mesh is known."""
        return bool(self.axes_of(letter) if self.mesh_unknown else self.cutting_axes(letter))

    def is_cut(self, *letters: Letter) -> bool:
        """True where shards of an operand with these dimensions are not the whole."""
        return self.mesh_unknown or any(self.shard_count(self.axes_of(letter)) > 1 for letter in letters)

    @property
    def mesh_unknown(self) -> bool:
        """True where no mesh is known before XLA partitions the program: see `custom_partitioning`."""
        return self.mesh is None and bool(self.axes.every)

    def gemm_size(self, letter: Letter, length: int) -> int:
        """The length that a GEMM on one shard sees of a dimension of the kernel, which the caller gave as `length`."""
        manual = self.manual_axes
        gathered = tuple(name for name in self._kernel_axes(letter, "fsdp") if name in manual)
        return length * self.shard_count(gathered) // self.shard_count(self.non_manual(self._kernel_axes(letter, "tp")))

    def whole_size(self, letter: Letter, length: int) -> int:
        """The length of a dimension of the kernel after the shards that the caller is manual over are gathered."""
        manual = self.manual_axes
        return length * self.shard_count(tuple(name for name in self._kernel_axes(letter, "fsdp") if name in manual))
