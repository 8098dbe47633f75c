"""Exported programs in processes that only load them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from octavo_jax_native import TARGETS

LAYER = """
import sys

import jax
import jax.numpy as jnp
from jax import export

import octavo_jax
import octavo_jax_native.backend


def layer(x, w, sizes):
    return octavo_jax.grouped_dense(x, w, sizes, recipe="mxfp8", backend="jax-native")
"""
LOAD = """
with open(sys.argv[1], "rb") as file:
    loaded = export.deserialize(bytearray(file.read()))
arguments = [jnp.ones(one.shape, one.dtype) for one in loaded.in_avals]
try:
    loaded.call(*arguments)
except jax.errors.JaxRuntimeError as error:
    assert "No FFI handler registered" in str(error), error
else:
    raise AssertionError("an import has registered the targets, and the README says that none does")
jax.eval_shape(layer, *loaded.in_avals)
assert (loaded.call(*arguments)[:3] == layer(*arguments)[:3]).all()
"""


def test_a_trace_registers_the_targets_and_no_import_does(tmp_path: Path) -> None:
    """README.md: a process that only loads a program traces a layer before it runs the program."""
    here: dict[str, Any] = {}
    exec(LAYER, here)
    shapes = (
        jax.ShapeDtypeStruct((64, 32), jnp.bfloat16),
        jax.ShapeDtypeStruct((3, 32, 48), jnp.bfloat16),
        jax.ShapeDtypeStruct((3,), jnp.int32),
    )
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]
    file = tmp_path / "exported.bin"
    file.write_bytes(export.export(jax.jit(here["layer"]), disabled_checks=checks)(*shapes).serialize())
    command = [sys.executable, "-c", LAYER + LOAD, str(file)]
    settings = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
