"""A callable for `tokamax.ragged_dot(..., implementation=[...])`, written for tokamax 0.0.12.

    import tokamax
    from octavo_jax.adapters.tokamax import implementation

    y = tokamax.ragged_dot(lhs, rhs, group_sizes, implementation=[implementation(octavo.recipe("mxfp8"))])

tokamax goes on to the next implementation of its sequence where one raises NotImplementedError; give ours alone, and
what it cannot do is an error with its reason. tokamax itself is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from octavo import NoBackendError
from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.adapters.call import RaggedDot, Seed
from octavo_jax.arrays.recipes import RecipeLike, as_recipe
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.dispatch.layer import HIGH_PRECISION
from octavo_jax.linear.ragged import check_precision

Activation = Callable[[Array], Array]

_ROWS_TIMES_MATRICES = (((1,), (1,)), ((), ()))
_ROWS_TIMES_TURNED = (((1,), (2,)), ((), ()))


def implementation(
    recipe: RecipeLike,
    *,
    seed: Seed = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    backend: BackendNames = None,
) -> Callable[..., Array]:
    """What tokamax calls with lhs [M, K] and rhs [G, K, N] or, in `ragged_dot_general`, [G, N, K].

    recipe            a Recipe, or the name of one; None: high precision
    seed              of stochastic rounding, or a function that gives one for each product
    checkpoint_name   of the quantized operands
    backend           a name or a closed list of names

    The callable raises NotImplementedError for quantized arrays, for group sizes that contract (a weight gradient,
    which the gradient of this call has anyway), for a precision that the recipe does not have, and where no backend
    serves the call; ValueError, which tokamax passes on, for arguments that do not fit. An activation is computed in
    fp32 before the result is rounded, as tokamax's kernels do.
    """
    known = as_recipe(recipe)
    product = RaggedDot(known, seed, checkpoint_name, backend)

    def octavo(
        lhs: Any,
        rhs: Any,
        *,
        group_sizes: Any,
        ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers | None = None,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        activation: Activation | None = None,
    ) -> Array:
        for name, operand in (("lhs", lhs), ("rhs", rhs)):
            if not isinstance(operand, jax.Array | np.ndarray):
                raise NotImplementedError(
                    f"{name} is a {type(operand).__name__}; octavo quantizes by its own recipe, so give a plain array"
                )
        kernel = _kernel(rhs, ragged_dot_dimension_numbers)
        try:
            check_precision(precision, known or HIGH_PRECISION)
        except ValueError as error:
            raise NotImplementedError(str(error)) from error
        out_dtype = preferred_element_type or jnp.result_type(lhs, rhs)
        preferred = out_dtype if activation is None else jnp.float32
        try:
            y = product(lhs, kernel, _sizes(group_sizes), precision, preferred)
        except NoBackendError as error:
            raise NotImplementedError(str(error)) from error
        return y if activation is None else activation(y).astype(out_dtype)

    return octavo


def _kernel(rhs: Array, numbers: jax.lax.RaggedDotDimensionNumbers | None) -> Array:
    """rhs as [G, K, N]; NotImplementedError for dimension numbers of another product."""
    if numbers is None:
        return rhs
    if tuple(numbers.lhs_ragged_dimensions) == (0,) and tuple(numbers.rhs_group_dimensions) == (0,):
        if numbers.dot_dimension_numbers == _ROWS_TIMES_MATRICES:
            return rhs
        if numbers.dot_dimension_numbers == _ROWS_TIMES_TURNED:
            return jnp.swapaxes(rhs, 1, 2)
    raise NotImplementedError(
        f"ragged_dot_dimension_numbers is {numbers}; octavo multiplies ragged rows [M, K] by [G, K, N] or [G, N, K], "
        "and computes weight gradients in the gradient of that"
    )


def _sizes(group_sizes: Any) -> Array | np.ndarray | Sequence[int]:
    """The sizes out of tokamax's GroupSizes, which carries a typical vector along for tuning."""
    if isinstance(group_sizes, jax.Array | np.ndarray | list | tuple):
        return group_sizes
    value: Array | np.ndarray = group_sizes.value
    return value
