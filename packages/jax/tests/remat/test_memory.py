"""What a policy keeps, in bytes: the memory table of docs/guide/jax-remat.md."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import octavo
import octavo_jax
from octavo import GroupedTensorSpec
from octavo.quantizer import Direction
from octavo_jax.policies import plane_names, save_quantized

pytestmark = pytest.mark.filterwarnings("ignore:a layer with delayed scaling")  # its scales are given and stay

M, K, N, G = 256, 128, 64, 2
SIZES = [100, 120]
KINDS = ("fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4")
SCALE_BYTES = {"fp32": 4, "e8m0": 1, "e4m3": 1}
BOTH: tuple[Direction, ...] = ("rowwise", "columnwise")

# policy, whether the activation needs y, planes of x, planes of the kernel, whether y is kept
ROWS: dict[str, tuple[Any, bool, tuple[Direction, ...], tuple[Direction, ...], bool]] = {
    "none": (None, True, (), (), False),
    "quantized": (save_quantized(), False, ("columnwise",), ("columnwise",), False),
    "quantized, y again": (save_quantized(), True, BOTH, BOTH, False),
    "quantized and y": (save_quantized("quantization", "y"), True, ("columnwise",), ("columnwise",), True),
    "x and y": (save_quantized(*plane_names(("x",)), "y"), True, ("columnwise",), (), True),
}


def _bytes(spec: Any, shape: tuple[int, ...], directions: tuple[Direction, ...]) -> int:
    tensor = GroupedTensorSpec(shape=shape, groups=G, quantizer=spec, ragged_axis=0 if len(shape) == 2 else None)
    different = directions[:1] if spec.shares_codes else directions
    second = 4 * G if spec.scaling == "nvfp4" else 0
    return sum(
        prod(tensor.payload_shape(direction))
        + SCALE_BYTES[spec.scale_format] * prod(tensor.scale_shape(direction))
        + second
        for direction in different
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", ROWS)
def test_bytes_that_a_layer_keeps(row: str, kind: str, probe: str) -> None:
    """Beside its bf16 inputs, which a layer without a policy keeps: the planes that are read again, and y."""
    policy, needs_y, of_x, of_kernel, keeps_y = ROWS[row]
    recipe = octavo.DelayedScaling(history=2) if kind == "fp8-delayed" else octavo.recipe(kind)
    state = octavo_jax.init_delayed(recipe, G) if isinstance(recipe, octavo.DelayedScaling) else None
    x, kernel = jnp.ones((M, K), jnp.bfloat16), jnp.ones((G, K, N), jnp.bfloat16)

    def layer(x: Any, kernel: Any) -> Any:
        y = octavo_jax.grouped_dense(
            x, kernel, SIZES, recipe=recipe, seed=1, state=state, output_checkpoint_name="y", backend=probe
        )
        y = y if state is None else y[0]
        return jnp.tanh(y) if needs_y else y * 2

    kept = jax.eval_shape(lambda *inputs: jax.vjp(jax.checkpoint(layer, policy=policy), *inputs)[1], x, kernel)
    arrays = [leaf for leaf in jax.tree.leaves(kept) if leaf.dtype != jnp.int32 and leaf.ndim]
    inputs = {(M, K): x, (G, K, N): kernel}
    found = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays if not _is(leaf, inputs))
    assert sum(_is(leaf, inputs) for leaf in arrays) == (not of_x) + (not of_kernel)
    specs = [recipe.quantizer(operand) for operand in ("x", "w")]  # type: ignore[arg-type]
    wanted = _bytes(specs[0], (M, K), of_x) + _bytes(specs[1], (G, N, K), of_kernel) + 2 * M * N * keeps_y
    seed, states = 8 * recipe.stochastic, 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert wanted <= found <= wanted + seed + states


def _is(leaf: Any, inputs: dict[tuple[int, ...], Any]) -> bool:
    return leaf.shape in inputs and leaf.dtype == jnp.bfloat16
