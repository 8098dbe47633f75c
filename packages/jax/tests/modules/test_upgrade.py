"""Orbax checkpoints of Flax modules that earlier releases wrote restore into today's modules (tests/golden)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

GOLDEN = Path(__file__).parents[1] / "golden"
RELEASES = sorted(folder.parent.name for folder in GOLDEN.glob("*/orbax"))


def _trees() -> Any:
    spec = importlib.util.spec_from_file_location("flax_trees", GOLDEN / "flax_trees.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TREES = _trees()


@pytest.fixture(scope="module", params=RELEASES)
def restored(request: pytest.FixtureRequest) -> Any:
    """The checkpoint of a release in the tree that today's modules have; orbax restores it where it was written."""
    if jax.default_backend() != "cpu":
        pytest.skip("these checkpoints name the CPU that their arrays were on")
    target = jax.eval_shape(TREES.trees)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(GOLDEN / request.param / "orbax", target)


def test_each_array_is_in_its_place(restored: Any) -> None:
    """A parameter, histories of delayed scaling, seeds and counters: each has the values that belong to its name."""
    wanted = TREES.patterned(restored)
    for (path, left), right in zip(jax.tree_util.tree_leaves_with_path(restored), jax.tree.leaves(wanted), strict=True):
        assert left.dtype == right.dtype, path
        assert np.array_equal(np.asarray(left), np.asarray(right)), path
    names = str(jax.tree.structure(restored)) + str(jax.tree_util.tree_leaves_with_path(restored))
    assert all(name in names for name in ("kernel", "bias", "history", "base_seed", "calls"))


def test_modules_run_on_what_was_restored(restored: Any) -> None:
    """linen's variables are applied, and nnx modules take the state."""
    x = TREES.rows()
    for name, module in TREES.LINEN.items():
        assert jnp.isfinite(module.apply(restored["linen"][name], x, TREES.SIZES)).all()
    for name, module in TREES.nnx_modules().items():
        state = nnx.state(module)
        nnx.replace_by_pure_dict(state, restored["nnx"][name])
        nnx.update(module, state)
        assert jnp.isfinite(module(x, TREES.SIZES)).all()
        assert np.array_equal(np.asarray(module.kernel[...]), np.asarray(restored["nnx"][name]["kernel"]))
