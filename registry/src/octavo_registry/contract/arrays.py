"""The types that the contract is generic over: arrays of a framework, and its quantized operands.

    A          an array: torch.Tensor, jax.Array
    Q          a quantized operand: the front end's GroupedTensor, with the fields `frameworks.PLANES`
    Operand    what a GEMM takes: Q where the backend's card has quantized recipes alone, else Q or A

A suffix says how a protocol uses the type: `_co` in results alone, `_contra` in arguments alone.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, TypeVar

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
A_contra = TypeVar("A_contra", contravariant=True)
Q = TypeVar("Q")
Q_co = TypeVar("Q_co", covariant=True)
Q_contra = TypeVar("Q_contra", contravariant=True)
Operand_contra = TypeVar("Operand_contra", contravariant=True)

GroupSizes: TypeAlias = Any
"""Sizes of the groups of rows: integers [G] on the host or the rows' device, or what `Bound.prepare` returned for them.

`Any`, because only the backend knows the second type, and only a backend with a `prepare` is given it.
"""

GroupOffset: TypeAlias = Any
"""Number of the first group, for random bits: an int; where a framework traces integers (JAX), an array [], too."""


class Prepared(Protocol[A_co]):
    """Group sizes as a backend's kernels read them."""

    @property
    def group_sizes(self) -> A_co:
        """int64 [G] on the rows' device, cut to the rows, in memory of their own."""


class Prepare(Protocol[A]):
    """Prepares group sizes: what it returns, the bound functions of a backend take in place of the sizes.

    A front end calls it once for a layer's forward and backward, if all operations on rows have an equal one.
    """

    def __call__(self, group_sizes: A, rows: int, like: A, /) -> Prepared[A]:
        """The sizes [G] of `rows` rows, on the device of `like`. Sizes on a device are not read back."""
