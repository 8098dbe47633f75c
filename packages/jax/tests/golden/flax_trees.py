"""Arrays of Flax modules as users save them with orbax: linen's variables and nnx's state, with every kind of array."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

import octavo
from octavo_jax import linen as octavo_linen
from octavo_jax import nnx as octavo_nnx

G, K, N, HIDDEN = 2, 16, 16, 32
SIZES = jnp.array([5, 6])
DELAYED = octavo.DelayedScaling(history=3)
NVFP4 = octavo.NVFP4()
LINEN: dict[str, Any] = {
    "dense": octavo_linen.GroupedDense(G, N, recipe=octavo.MXFP8(), use_bias=True),
    "mlp": octavo_linen.GroupedMLP(num_groups=G, hidden=HIDDEN, recipe=DELAYED),
}


def rows() -> Any:
    """Input of every module."""
    return jnp.ones((11, K), jnp.bfloat16)


def nnx_modules() -> dict[str, Any]:
    """A module that counts its calls, and one with histories."""
    rngs = nnx.Rngs(0)
    return {
        "stochastic": octavo_nnx.GroupedLinear(G, K, N, recipe=NVFP4, rngs=rngs),
        "delayed": octavo_nnx.GroupedLinear(G, K, N, recipe=DELAYED, rngs=rngs),
    }


def trees() -> dict[str, Any]:
    """The arrays of all modules; `patterned` gives them values."""
    linen = {name: module.init(jax.random.key(0), rows(), SIZES) for name, module in LINEN.items()}
    states = {name: nnx.to_pure_dict(nnx.state(module)) for name, module in nnx_modules().items()}
    return {"linen": linen, "nnx": states}


def patterned(tree: Any) -> Any:
    """The tree with values that follow from an array's place in it alone, small integers: no release draws others."""

    def values(path: Any, leaf: Any) -> Any:
        start = zlib.crc32(jax.tree_util.keystr(path).encode()) % 7
        return jnp.asarray(np.arange(start, start + leaf.size).reshape(leaf.shape) % 11 + 1, leaf.dtype)

    return jax.tree_util.tree_map_with_path(values, tree)


def write_orbax(folder: Path) -> None:
    """A checkpoint of `trees()`."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve(), patterned(trees()))
    (folder / "commit_success.txt").unlink(missing_ok=True)  # it holds the folder's path on this machine
