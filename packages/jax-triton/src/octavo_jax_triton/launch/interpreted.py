"""A launch on a CPU: Triton's interpreter in a callback of XLA's, for tests of kernels and of what starts them.

The interpreter takes torch's tensors, so these share the callback's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo_jax_triton.launch.arguments import BlockDescriptor, Output, operand_array, result_array

POISON = 0xFF
"""The bytes of what a kernel leaves out: NaN in every floating dtype."""

# XLA's threads flush subnormals, and codes need them kept; a thread has the mode of the one that made it.
_KEEPS_SUBNORMALS = ThreadPoolExecutor(1, "octavo_jax_triton_interpreter")
_KEEPS_SUBNORMALS.submit(int).result()


def call(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], outputs: Sequence[Output], options: dict[str, Any]
) -> list[Array]:
    """The results of one launch."""
    places = [place for place, argument in enumerate(arguments) if isinstance(argument, Array | BlockDescriptor)]
    shapes = [result_array(each.shape, each.dtype) for each in outputs]

    def run(*arrays: Any) -> list[np.ndarray]:
        return _KEEPS_SUBNORMALS.submit(interpret, [np.array(each) for each in arrays]).result()

    def interpret(arrays: list[np.ndarray]) -> list[np.ndarray]:
        placed = list(arguments)
        for place, given in zip(places, arrays, strict=True):
            argument, tensor = arguments[place], _stored(given)
            placed[place] = _described(tensor, argument.block) if isinstance(argument, BlockDescriptor) else tensor
        results: list[np.ndarray] = []
        for place, argument in enumerate(arguments):
            if isinstance(argument, Output):
                results.append(np.empty(argument.shape, jnp.dtype(argument.dtype)))
                results[-1].reshape(-1).view(np.uint8).fill(POISON)
                placed[place] = _stored(results[-1])
        # NumPy warns of what fp32 does on a GPU, too: x * scale may overflow before it saturates
        with np.errstate(all="ignore"):
            kernel[grid](*placed, **options)
        return results

    arrays = [operand_array(arguments[place]) for place in places]
    return list(jax.pure_callback(run, shapes, *arrays, vmap_method="sequential"))


def _stored(given: np.ndarray) -> torch.Tensor:
    """The memory of an array as the interpreter takes it: bfloat16 as int16, codes as uint8."""
    if given.dtype == jnp.bfloat16:
        given = given.view(np.int16)
    elif given.dtype.itemsize == 1:
        given = given.view(np.uint8)
    return torch.from_numpy(given)


def _described(tensor: torch.Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))
