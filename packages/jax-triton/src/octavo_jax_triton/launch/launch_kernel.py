"""`launch_kernel`: one launch, whose results JAX owns."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from octavo_jax.plugin_api import varying_alike, varying_axes, varying_over
from octavo_jax_triton.launch.arguments import BlockDescriptor, Output, Target, operand_array

DEFAULTS = {"num_warps": 16, "enable_fp_fusion": False}
"""What a launch has unless it says otherwise: the definition rounds after each operation, so nothing is contracted."""


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], target: Target, **constants: Any
) -> dict[str, Array]:
    """The results of `kernel`, by name; of a grid without programs they are zeros.

    arguments   of the kernel in its order, up to its constants: arrays, BlockDescriptors, Outputs, numbers, None; no
                array after an Output, since XLA hands over operands first and jax-triton takes them in turn
    constants   by name, and Triton's options
    """
    outputs = [argument for argument in arguments if isinstance(argument, Output)]
    handed = [argument for argument in arguments if isinstance(argument, Array | BlockDescriptor | Output)]
    if any(isinstance(argument, Output) for argument in handed[: len(handed) - len(outputs)]):
        raise TypeError(
            f"{kernel.__name__} takes an operand after a result; jax-triton would hand one over for the other: "
            "put the results behind all operands in the kernel's signature"
        )
    if not all(grid):
        return {each.name: jnp.zeros(each.shape, each.dtype) for each in outputs}
    places = [place for place, argument in enumerate(arguments) if isinstance(argument, Array | BlockDescriptor)]
    operands = [operand_array(arguments[place]) for place in places]
    # JAX takes the results of a call to be alike on all shards, whatever its operands are
    alike = varying_alike(operands)
    placed = list(arguments)
    for place, array in zip(places, alike, strict=True):
        argument = arguments[place]
        placed[place] = argument._replace(array=array) if isinstance(argument, BlockDescriptor) else array
    options = {**DEFAULTS, **constants}
    # here, because one of the two needs jax-triton, and the other torch
    if target.arch is None:
        from octavo_jax_triton.launch.interpreted import call as interpreted

        results = interpreted(kernel, grid, placed, outputs, options)
    else:
        from octavo_jax_triton.launch.compiled import call as compiled

        results = compiled(kernel, grid, placed, outputs, options, target.arch)
    results = varying_over(results, varying_axes(alike))
    return {each.name: result for each, result in zip(outputs, results, strict=True)}
