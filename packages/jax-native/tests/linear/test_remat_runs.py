"""How often XLA calls the kernels' handlers in a training step under `jax.checkpoint`, from a profile of the run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
from octavo_jax.counting import count_runs
from octavo_jax.policies import save_quantized

LAYERS, M, K, G = 5, 32, 32, 2


def _calls(step: Callable[..., Any], arguments: tuple[Any, ...], folder: Path) -> Counter[str]:
    """Runs of each FFI target in one call of the compiled step."""
    compiled = jax.jit(step).lower(*arguments).compile()
    targets = dict(re.findall(r'%([\w.-]+) = .*custom_call_target="(octavo_\w+)"', compiled.as_text()))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        jax.block_until_ready(compiled(*arguments))
    (file,) = folder.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    names = (event.name for plane in planes for line in plane.lines for event in line.events)
    return Counter(targets[name] for name in names if name in targets)


@pytest.mark.parametrize(("policy", "quantized"), [(None, 25), (save_quantized(), 15)], ids=["no policy", "saved"])
def test_handlers_run_as_often_as_the_jaxpr_says(
    policy: Any, quantized: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    """Five layers inside lax.scan, whose activation needs y: what is counted in the jaxpr is what XLA:CPU runs."""

    def loss(kernels: Any, x: Any) -> Any:
        def layer(x: Any, kernel: Any) -> Any:
            return jnp.tanh(
                octavo_jax.grouped_dense(x, kernel, [20, 10], recipe=octavo.CurrentScaling(), backend="jax-native")
            )

        step = jax.checkpoint(layer, policy=policy)
        return jnp.sum(jax.lax.scan(lambda x, kernel: (step(x, kernel), None), x, kernels)[0])

    step = jax.value_and_grad(loss, argnums=(0, 1))
    shapes = ((LAYERS, G, K, K), (M, K))
    arguments = tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    runs, calls = count_runs(step, *arguments), _calls(step, arguments, tmp_path)
    assert _total(calls, "octavo_quantize_") == quantized == runs.quantize
    assert _total(calls, "octavo_gemm", "octavo_wgrad") == runs.fprop + runs.dgrad + runs.wgrad


def _total(calls: Counter[str], *prefixes: str) -> int:
    return sum(n for target, n in calls.items() if target.startswith(prefixes))
