"""quantize and dequantize, through the registry."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from octavo import QuantizerSpec
from octavo.quantizer import Direction, Operand
from octavo_jax.arrays.checks import check_spec
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.arrays.sizes import GroupSizes
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.dispatch.quantizer import dequantizer_for, quantizer_for
from octavo_jax.dispatch.results import checked_codes
from octavo_jax.quantizers.arguments import check_plane, quantizer_keywords, sizes_of
from octavo_jax.quantizers.derivatives import undifferentiated
from octavo_jax.remat.checkpoint_names import name_planes
from octavo_jax.sharding.conflicts import check_whole


def quantize(
    x: Array | np.ndarray,
    spec: QuantizerSpec,
    group_sizes: GroupSizes | None = None,
    *,
    seed: int | Array | None = None,
    operand: Operand | None = None,
    group_offset: int | Array = 0,
    scale: Array | np.ndarray | None = None,
    backend: BackendNames = None,
) -> GroupedTensor:
    """x in the planes that `spec.orientation` asks for, equal bit for bit to `octavo_numerics.quantize`.

    x             [M, K] with group_sizes, or as one group without; or [G, N, K] matrices, each its own group
    group_sizes   [G] integers, sum <= M: checked on the host and in a jax.Array on a CPU; clamped and never read back
                  where they are traced or on an accelerator
    seed          of stochastic rounding: an int, an integer scalar array, uint32 [2] words (low, high), or a key of
                  jax.random.key
    operand       "x", "w" or "dy"; None: spec.role
    group_offset  number of the first group, in stochastic rounding's counter
    scale         [G] float32 encode scales of delayed scaling
    backend       a name or a closed list of names

    Every output of "x" or "w" carries `spec.checkpoint_name`, one of "dy" has no name. Rows past the sum are not read;
    codes and scales there mean nothing.

    Raises ValueError for shapes, dtypes, host sizes or a seed that do not fit; NoBackendError when nothing serves it.
    """
    check_spec(spec)
    x = jnp.asarray(x)
    check_whole("quantize", x=x)
    sizes = sizes_of(x, group_sizes)
    groups = x.shape[0] if sizes is None else sizes.shape[0]
    how = quantizer_keywords(spec, groups, seed, operand, group_offset, scale)
    plan = quantizer_for(spec, x, groups, sizes is None, backend)
    q = checked_codes(plan, plan.run(undifferentiated(x), sizes, **how))
    return name_planes(q, spec.checkpoint_name)


def dequantize(
    q: GroupedTensor,
    direction: Direction = "rowwise",
    *,
    preferred_element_type: DTypeLike = jnp.float32,
    backend: BackendNames = None,
) -> Array:
    """Values of one plane of q: [M, K] or [G, N, K], rows past the sum +0, every NaN 0x7FC00000.

    preferred_element_type   float32, whose values are exact; or bfloat16 or float16, to which these are rounded once

    Hadamard column data stay in the Hadamard domain and in their padded rows, [block_bound(M, G, 16) * 16, K].
    Raises ValueError for a plane that q does not have, and for arrays that are not what its spec says; NoBackendError
    when nothing reads its layouts, and TypeError where a derivative is taken in codes or scales.
    """
    if not isinstance(q, GroupedTensor):
        raise ValueError(f"q is a {type(q).__name__}; give what octavo_jax.quantize returned")
    if any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(q)):  # as files are read
        q = jax.tree.map(jnp.asarray, q)
    check_whole("dequantize", q=q)
    payload, _, _ = q.plane(direction)
    check_plane(q, direction)
    layouts = (q.spec.rowwise_layout, q.spec.columnwise_layout)
    plan = dequantizer_for(q.spec.quantizer, payload, layouts, backend, preferred_element_type)
    return plan.run(undifferentiated(q), direction)  # type: ignore[no-any-return]
