"""Arguments of kernels other than arrays, numbers and None: outputs, descriptors of blocks; and where kernels run."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Output(NamedTuple):
    """A result of a kernel: its name among those of the launch, shape and dtype.

    Elements that the kernel does not write hold anything.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any


def result_array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array that a call returns."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


class BlockDescriptor(NamedTuple):
    """An array that a kernel reads block by block, by a descriptor; past its ends are zeros.

    block    the shape of a block
    layout   of a block in shared memory, for kernels in Gluon
    """

    array: Array
    block: tuple[int, ...]
    layout: Any = None


def operand_array(argument: Array | BlockDescriptor) -> Array:
    """The array of an argument that is read."""
    return argument.array if isinstance(argument, BlockDescriptor) else argument


class Target(NamedTuple):
    """Where kernels run: a compute capability, or None, Triton's interpreter."""

    arch: tuple[int, int] | None

    @property
    def has_fp8_casts(self) -> bool:
        """Whether the chip has instructions that round to FP8: sm_89 and later ones."""
        return self.arch is not None and self.arch >= (8, 9)

    @property
    def has_copy_engine(self) -> bool:
        """Whether an array can be handed over as a descriptor: sm_90 and later ones, and the interpreter."""
        return self.arch is None or self.arch >= (9, 0)


def divisible_by_16(*lengths: int) -> bool:
    """Whether 16 divides them, which kernels have to be told, see octavo_triton.kernels.formats.multiple_of_16."""
    return not any(length % 16 for length in lengths)


def block_descriptor(array: Array, block: tuple[int, ...]) -> BlockDescriptor | None:
    """`array`, read by blocks; None where the hardware could not: its rows do not begin at 16 bytes, or it is empty."""
    size = jnp.dtype(array.dtype).itemsize
    if not math.prod(array.shape) or array.shape[-1] * size % 16:
        return None
    return BlockDescriptor(array, block)


def row_descriptor(array: Array, block: tuple[int, int], swizzle: int) -> BlockDescriptor | None:
    """The same of the array as a matrix of rows, for a kernel in Gluon, each block swizzled within `swizzle` bytes."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    size = jnp.dtype(array.dtype).itemsize
    argument = block_descriptor(array.reshape(-1, array.shape[-1]), block)
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * size, rank=2)
    return None if argument is None else argument._replace(layout=layout)
