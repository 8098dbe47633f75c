"""`start`: one launch, whose results JAX owns."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from octavo_jax.plugin_api import varying_alike, varying_axes, varying_over
from octavo_jax_triton.launch.arguments import Fetched, Made, Target

DEFAULTS = {"num_warps": 16, "enable_fp_fusion": False}
"""What a launch has unless it says otherwise: the definition rounds after each operation, so nothing is contracted."""


def start(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], target: Target, **constants: Any
) -> dict[str, Array]:
    """The results of `kernel`, by name; of a grid without programs they are zeros.

    arguments   of the kernel in its order, up to its constants: arrays, `Fetched` ones, `Made` ones, numbers, None;
                no array after a `Made` one, since XLA hands over operands first and jax-triton takes them in turn
    constants   by name, and Triton's options
    """
    made = [argument for argument in arguments if isinstance(argument, Made)]
    handed = [argument for argument in arguments if isinstance(argument, Array | Fetched | Made)]
    if any(isinstance(argument, Made) for argument in handed[: len(handed) - len(made)]):
        raise TypeError(
            f"{kernel.__name__} takes an operand after a result; jax-triton would hand one over for the other: "
            "put the results behind all operands in the kernel's signature"
        )
    if not all(grid):
        return {each.name: jnp.zeros(each.shape, each.dtype) for each in made}
    places = [place for place, argument in enumerate(arguments) if isinstance(argument, Array | Fetched)]
    given = [_array(arguments[place]) for place in places]
    # JAX takes the results of a call to be alike on all shards, whatever its operands are
    alike = varying_alike(given)
    placed = list(arguments)
    for place, array in zip(places, alike, strict=True):
        argument = arguments[place]
        placed[place] = argument._replace(array=array) if isinstance(argument, Fetched) else array
    options = {**DEFAULTS, **constants}
    # here, because one of the two needs jax-triton, and the other torch
    if target.arch is None:
        from octavo_jax_triton.launch.interpreted import call as interpreted

        results = interpreted(kernel, grid, placed, made, options)
    else:
        from octavo_jax_triton.launch.compiled import call as compiled

        results = compiled(kernel, grid, placed, made, options, target.arch)
    results = varying_over(results, varying_axes(alike))
    return {each.name: result for each, result in zip(made, results, strict=True)}


def _array(argument: Array | Fetched) -> Array:
    return argument.array if isinstance(argument, Fetched) else argument
