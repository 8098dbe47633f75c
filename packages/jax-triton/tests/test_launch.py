"""What a launch refuses."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from octavo_jax_triton.arrays.table import row_table
from octavo_jax_triton.launch.arguments import Output, Target
from octavo_jax_triton.launch.launch_kernel import launch_kernel
from octavo_triton.kernels.panels import index_rows


def test_an_operand_after_a_result_is_refused() -> None:
    """On a GPU jax-triton would hand over one for the other, and the kernel would write to whatever that points at; the
    interpreter places both by name and would not notice."""
    table = row_table(jnp.array([3, 5], jnp.int32), 8, Target(None))
    arguments = (Output("sizes", (2,), jnp.int32), table, None, None, 8, 2, 3)
    with pytest.raises(TypeError, match="index_rows takes an operand after a result"):
        launch_kernel(index_rows, (1,), arguments, Target(None), GROUPS=16, CHUNK=4, FLAG=False)
