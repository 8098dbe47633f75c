"""A launch on a GPU: `jax_triton.triton_call`, which compiles the kernel when JAX lowers the program."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from octavo_jax_triton.launch.arguments import BlockDescriptor, Output, operand_array, result_array

_DESCRIBES = "triton>=3.8"
"""Triton 3.7, which jax-triton 0.4.1 asks for, leaves out of its descriptors what jax-triton reads there."""


def call(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    outputs: Sequence[Output],
    options: dict[str, Any],
    arch: tuple[int, int],
) -> list[Array]:
    """The results of one launch, one after the other under vmap."""
    import jax_triton

    from_array = jax_triton.TensorDescriptor.from_array
    names: Sequence[str] = kernel.arg_names
    places = [place for place, argument in enumerate(arguments) if isinstance(argument, Array | BlockDescriptor)]
    fixed = {
        names[place]: argument
        for place, argument in enumerate(arguments)
        if place not in places and not isinstance(argument, Output)
    }
    # Triton's options are in lower case, and so are operands: constants of our kernels are in capitals
    how = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    constants = {name: value for name, value in options.items() if name.isupper()}

    def run(*arrays: Array) -> list[Array]:
        operands = dict(fixed)
        for place, given in zip(places, arrays, strict=True):
            argument, view = arguments[place], _viewed(given, _kernel_dtype(given.dtype, arch))
            by_blocks = isinstance(argument, BlockDescriptor)
            operands[names[place]] = from_array(view, argument.block, argument.layout) if by_blocks else view
        results: list[Array] = jax_triton.triton_call(
            kernel=kernel,
            out_type=[result_array(each.shape, _kernel_dtype(each.dtype, arch)) for each in outputs],
            grid=grid,
            name=kernel.__name__,
            compute_capability=10 * arch[0] + arch[1],
            backend_options={name: options[name] for name in ("enable_fp_fusion", "maxnreg") if name in options},
            **how,
            **operands,
            **constants,
        )
        return [_viewed(result, each.dtype) for result, each in zip(results, outputs, strict=True)]

    arrays = [operand_array(arguments[place]) for place in places]
    one_by_one = jax.custom_batching.sequential_vmap(run)  # type: ignore[no-untyped-call]
    results: list[Array] = one_by_one(*arrays)
    return results


def _kernel_dtype(dtype: Any, arch: tuple[int, int]) -> Any:
    """uint8 for FP8, to which Triton knows no pointer on chips without it; kernels read and write bytes anyway."""
    eight_bits = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1
    return jnp.dtype(jnp.uint8) if eight_bits and arch < (8, 9) else jnp.dtype(dtype)


def _viewed(given: Array, dtype: Any) -> Array:
    return given if given.dtype == dtype else jax.lax.bitcast_convert_type(given, dtype)


def refusal() -> str | None:
    """Why the installed jax-triton cannot compile: it asks for another Triton than is installed; None: it can."""
    from packaging.requirements import Requirement

    for line in (*(metadata.requires("jax-triton") or ()), _DESCRIBES):
        requirement = Requirement(line)
        if requirement.name == "triton" and not requirement.specifier.contains(metadata.version("triton")):
            return (
                f"jax-triton {metadata.version('jax-triton')} needs {requirement} and triton "
                f"{metadata.version('triton')} is installed; pip install '{requirement}'"
            )
    return None
