"""Calls on a Hopper GPU inside of XLA's command buffers, replayed with other sizes and seeds.

Skipped without such a GPU or without CUDA kernels, with the reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from hopper_gpu import MARKS

pytestmark = MARKS

COMMAND_BUFFERS = """
import jax, jax.numpy as jnp, numpy as np, octavo_jax, octavo_numerics, sys
from octavo import QuantizerSpec
spec = QuantizerSpec(format="e2m1", scaling="nvfp4", hadamard=True, rounding="stochastic", role="dy")
twin = QuantizerSpec(format="e4m3", scaling="current")
@jax.jit
def run(x, sizes, seed):
    for _ in range(4):
        a = octavo_jax.quantize(x, spec, sizes, seed=seed, backend="jax-native")
        b = octavo_jax.quantize(x, twin, sizes, backend="jax-native")
        x = x * 2.0  # exact: XLA may fold three products into one
    return a, b, x
rng = np.random.default_rng(int(sys.argv[1]))
x = rng.standard_normal((700, 264)).astype(np.float32)
scaled = x * np.float32(8.0)
keep = []
for turn in range(12):
    sizes = rng.multinomial(rng.integers(0, 700), np.ones(6) / 6).astype(np.int32)
    a, b, _ = run(jnp.asarray(x), jnp.asarray(sizes), jnp.uint32(turn))
    keep.append(jnp.full((1 << 20,), turn, jnp.float32))  # live memory that a replay must not touch
    for q, s, given in ((a, spec, {"seed": turn}), (b, twin, {})):
        expected = octavo_numerics.valid(octavo_numerics.quantize(scaled, s, sizes, **given))
        for name, plane in expected.items():
            got = np.asarray(getattr(q, name)).reshape(-1)[: plane.size].reshape(plane.shape)
            assert got.tobytes() == plane.tobytes(), (turn, name)
for turn, block in enumerate(keep):
    assert bool(jnp.all(block == turn)), f"a replay wrote into memory of turn {turn}"
"""


def test_inside_command_buffers(rng: Any, tmp_path: Any) -> None:
    """XLA records the calls and replays them with other sizes and seeds: the bits are right, and scratch of a first run
    is never written again (faults.md 35, 36). The dump shows the calls inside a command buffer."""
    _run_in_command_buffers(COMMAND_BUFFERS, rng, tmp_path)


def _run_in_command_buffers(program: str, rng: Any, tmp_path: Any) -> None:
    """Runs it with command buffers on; the dump shows every custom call inside of one."""
    flags = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    settings = {**os.environ, "XLA_FLAGS": f"{flags} --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"}
    settings.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cached program is not dumped
    command = [sys.executable, "-c", program, str(rng.integers(1 << 31))]
    result = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    dumps = [path.read_text() for path in tmp_path.glob("*jit_run*thunk_sequence*")]
    assert dumps, f"no thunk dump among {sorted(path.name for path in tmp_path.iterdir())[:20]}"
    # thunks inside another are listed below it, further to the right; targets' names are not
    recorded = [text for text in dumps if text.startswith("000: kCommandBuffer")]
    calls = [line for text in recorded for line in text.splitlines() if "kCustomCall" in line]
    assert calls, dumps[0][:2000]
    assert all(line.startswith(" ") for line in calls), dumps[0][:2000]


GEMM_COMMAND_BUFFERS = """
import jax, jax.numpy as jnp, numpy as np, octavo, octavo_jax, sys
rng = np.random.default_rng(int(sys.argv[1]))
x = jnp.asarray(rng.standard_normal((700, 272)), jnp.bfloat16)
kernel = jnp.asarray(rng.standard_normal((6, 272, 144)) / 16, jnp.bfloat16)
def step(x, kernel, sizes, kind):
    def loss(x, kernel):
        y = octavo_jax.grouped_dense(x, kernel, sizes, recipe=octavo.recipe(kind), seed=3 if kind == "nvfp4" else None,
                                     backend="jax-native")
        return jnp.sum(jnp.tanh(y.astype(jnp.float32)))
    return jax.grad(loss, (0, 1))(x, kernel)
@jax.jit
def run(x, kernel, sizes):  # its name is the dump's
    return [step(x, kernel, sizes, kind) for kind in ("bf16", "block", "mxfp8", "nvfp4")]
every = [rng.multinomial(rng.integers(0, 700), np.ones(6) / 6).astype(np.int32) for _ in range(4)]
first = [jax.tree.map(np.asarray, run(x, kernel, jnp.asarray(sizes))) for sizes in every]
keep = []
for turn in range(12):
    keep.append(jnp.full((1 << 20,), turn, jnp.float32))  # live memory that a replay must not touch
    again = run(x, kernel, jnp.asarray(every[turn % 4]))
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(first[turn % 4]), strict=True):
        assert np.asarray(a).tobytes() == b.tobytes(), turn
for turn, block in enumerate(keep):
    assert bool(jnp.all(block == turn)), f"a replay wrote into memory of turn {turn}"
"""


def test_gemms_inside_command_buffers(rng: Any, tmp_path: Any) -> None:
    """Steps of four recipes, replayed with other sizes: the same bits each time (faults.md 35, 36)."""
    _run_in_command_buffers(GEMM_COMMAND_BUFFERS, rng, tmp_path)
