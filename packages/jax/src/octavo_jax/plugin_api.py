"""What octavo_jax offers to packages of kernels: the one module of it that a backend imports.

Arrays
    `GroupedTensor`     what a quantizer returns and a GEMM reads: codes and scales as a pytree
    `Extras`, `BoundFused`   the further results of a fused quantizer, and the answer to a request for one
    `one_group`         the group sizes of a matrix that is one group
    `PAYLOAD_DTYPE`, `SCALE_DTYPE`   the dtypes of codes and of decode scales, by their formats
Arguments, each refused with its name
    `dtype_name`        Octavo's name of a dtype; ValueError for one that no operand may have
    `check_input`, `check_float`, `check_array`, `check_sizes`, `check_out`   arrays, by rank or shape and by dtype
    `check_groups`      a tensor's group sizes, which are as many as its spec says
    `checked_groups`    a quantizer's operand, with the sizes and the number of its groups
    `seed_words`        a seed, host integer or array, as uint32 [2] words
    `random_key`        seed words and the number of the first group, where a quantizer rounds stochastically
    `encode_scale`      delayed scaling's scales
    `check_activation`, `features`   the activations' names, and F of an input with C columns
    `check_norm`        the arguments of a normalization
Derivatives
    `refusing_derivatives`   an identity through which none is taken, with the sentence that says so
Sharding
    `varying_axes`, `varying_over`, `varying_alike`   types inside `jax.shard_map`, where the operands of a custom call
                        must differ over the same mesh axes
Devices
    `device_kind`       kind and compute capability of a JAX device, as requests name them

Importing it imports JAX, so that a card (`plugin.py`) must not. Names here change as the public ones of octavo_jax do:
with a line in the changelog.
"""

from __future__ import annotations

from octavo_jax.arithmetic.casts import PAYLOAD_DTYPE, SCALE_DTYPE
from octavo_jax.arrays.dtypes import dtype_name
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.arrays.operands import (
    check_array,
    check_float,
    check_groups,
    check_input,
    check_out,
    check_sizes,
    checked_groups,
    encode_scale,
)
from octavo_jax.arrays.sizes import one_group
from octavo_jax.arrays.varying import varying_alike, varying_axes, varying_over
from octavo_jax.dispatch.device import device_kind
from octavo_jax.functions.activations import check_activation, features
from octavo_jax.functions.composed import BoundFused, Extras
from octavo_jax.functions.derivatives import refusing_derivatives
from octavo_jax.functions.norms import check_norm
from octavo_jax.scaling.seeds import random_key, seed_words

__all__ = [
    "PAYLOAD_DTYPE",
    "SCALE_DTYPE",
    "BoundFused",
    "Extras",
    "GroupedTensor",
    "check_activation",
    "check_array",
    "check_float",
    "check_groups",
    "check_input",
    "check_norm",
    "check_out",
    "check_sizes",
    "checked_groups",
    "device_kind",
    "dtype_name",
    "encode_scale",
    "features",
    "one_group",
    "random_key",
    "refusing_derivatives",
    "seed_words",
    "varying_alike",
    "varying_axes",
    "varying_over",
]
