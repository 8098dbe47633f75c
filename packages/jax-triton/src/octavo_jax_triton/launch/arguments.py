"""What stands in the places of a kernel's arguments beside arrays, numbers and None."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Made(NamedTuple):
    """A result: its name among those of the launch, shape and dtype. What the kernel leaves out holds anything."""

    name: str
    shape: tuple[int, ...]
    dtype: Any


def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """What a call gives back."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


class Fetched(NamedTuple):
    """An array of which the kernel fetches blocks, zeros past its ends; `layout`: a block's in Gluon."""

    array: Array
    block: tuple[int, ...]
    layout: Any = None


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


def even(*lengths: int) -> bool:
    """Whether 16 divides them, which kernels have to be told, see octavo_triton.kernels.formats.multiple_of_16."""
    return not any(length % 16 for length in lengths)


def fetched(array: Array, block: tuple[int, ...]) -> Fetched | None:
    """Blocks of `array`; None where the hardware could not fetch them: rows that do not begin at 16 bytes, no rows."""
    size = jnp.dtype(array.dtype).itemsize
    if not math.prod(array.shape) or array.shape[-1] * size % 16:
        return None
    return Fetched(array, block)


def fetched_rows(array: Array, block: tuple[int, int], swizzle: int) -> Fetched | None:
    """The same of the array's rows for a kernel in Gluon, each block swizzled within `swizzle` bytes."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    size = jnp.dtype(array.dtype).itemsize
    argument = fetched(array.reshape(-1, array.shape[-1]), block)
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * size, rank=2)
    return None if argument is None else argument._replace(layout=layout)
