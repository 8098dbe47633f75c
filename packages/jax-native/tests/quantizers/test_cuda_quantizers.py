"""Quantizers on a Hopper GPU: the CPU's bits for all sizes, repeated, and no copy of sizes to the host.

Skipped without such a GPU or without CUDA kernels, with the reason.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper_gpu import BACKEND, MARKS, G, K, M, on_gpu

import octavo_jax
import octavo_numerics
import octavo_registry
from octavo import QuantizerSpec
from octavo_jax import act_quantize, dact_quantize
from octavo_registry import Request

pytestmark = MARKS


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Each input dtype."""
    return str(request.param)


def _quantized(x: Any, spec: QuantizerSpec, sizes: Any, **arguments: Any) -> Any:
    given = {k: on_gpu(v) if k == "scale" else v for k, v in arguments.items()}
    sizes = None if sizes is None else on_gpu(sizes)
    return octavo_jax.quantize(on_gpu(x), spec, sizes, backend=BACKEND, **given)


def test_ragged_bits(
    spec: QuantizerSpec, dtype: str, rng: Any, rows_of: Any, sizes_of: Any, arguments_for: Any, same_tensor: Any
) -> None:
    """Every recipe equals the definition, subnormals and a NaN tail included (faults.md 8, 14, 22, 56)."""
    for _ in range(5):
        sizes = sizes_of(rng, G, M)
        x, arguments = rows_of(rng, (M, K), dtype, sizes), arguments_for(spec, rng, G)
        q = _quantized(x, spec, sizes, **arguments)
        assert next(iter(q.rowwise.devices())).platform == "gpu"
        same_tensor(q, octavo_numerics.quantize(x, spec, sizes, **arguments))


def test_stacked_bits(stackable: QuantizerSpec, rng: Any, rows_of: Any, arguments_for: Any, same_tensor: Any) -> None:
    """Weights [G, N, K] with block tails in both axes."""
    w, arguments = rows_of(rng, (3, 150, 200), "bfloat16"), arguments_for(stackable, rng, 3)
    q = _quantized(w, stackable, None, **arguments)
    same_tensor(q, octavo_numerics.quantize(w, stackable, **arguments))


@pytest.mark.parametrize("layouts", [("plain", "plain"), ("rows", "panels")], ids="-".join)
def test_cuda_and_cpu_planes_are_the_same(
    spec: QuantizerSpec,
    layouts: tuple[str, str],
    rng: Any,
    rows_of: Any,
    sizes_of: Any,
    arguments_for: Any,
    same_bits: Any,
) -> None:
    """In the native layouts too, through dequantize of both directions."""
    sizes = sizes_of(rng, G, M)
    x, arguments = rows_of(rng, (M, K), "bfloat16", sizes), arguments_for(spec, rng, G)
    values = []
    for device, arch in (("cpu", None), ("cuda", (9, 0))):
        place = jax.devices(device)[0]
        request = Request(
            "quantize", "jax", device, "bfloat16", "bfloat16", quantizer=spec, arch=arch, groups=G, layouts=layouts
        )
        run = octavo_registry.plan(request, backend=BACKEND).run
        given = {k: jax.device_put(v, place) if k == "scale" else v for k, v in arguments.items()}
        q = run(jax.device_put(x, place), jax.device_put(sizes, place), **given)
        back = octavo_registry.plan(
            Request("dequantize", "jax", device, "float32", "float32", quantizer=spec, arch=arch), backend=BACKEND
        ).run
        values.append([np.asarray(back(q, direction)) for direction in ("rowwise", "columnwise")])
    for on_cpu, on_cuda in zip(*values, strict=True):
        same_bits(on_cuda, on_cpu, str(layouts))


def test_changed_sizes_after_compiling(
    spec: QuantizerSpec, rng: Any, rows_of: Any, sizes_of: Any, arguments_for: Any, same_tensor: Any
) -> None:
    """One program, twenty size vectors, all empty and one full group among them (faults.md 5, 6, 36)."""
    arguments = arguments_for(spec, rng, G)
    traced = {k: jnp.asarray(v % (1 << 31) if k != "scale" else v) for k, v in arguments.items()}
    run = jax.jit(lambda x, s, given: octavo_jax.quantize(x, spec, s, backend=BACKEND, **given))
    x = rows_of(rng, (M, K), "bfloat16")
    every = [np.zeros(G, np.int32), np.eye(G, dtype=np.int32)[2] * M, *(sizes_of(rng, G, M) for _ in range(18))]
    results = [run(on_gpu(x), on_gpu(sizes), traced) for sizes in every]
    assert run._cache_size() == 1
    host = {k: v % (1 << 31) if k != "scale" else v for k, v in arguments.items()}
    for q, sizes in zip(results, every, strict=True):
        same_tensor(q, octavo_numerics.quantize(x, spec, sizes, **host))


def test_wrong_sizes_write_nothing_out_of_bounds(rng: Any, rows_of: Any, same_bits: Any) -> None:
    """Negative sizes, a sum past M: clamped on the device; groups before them are right (faults.md 61)."""
    spec = QuantizerSpec(format="e4m3", scaling="mxfp8")
    x = rows_of(rng, (M, K), "bfloat16")
    right = np.asarray(_quantized(x, spec, np.array([100, 0, 0, 0, 0, 0], np.int32)).rowwise)[:100]
    for sizes in ([100, -5, 50, 0, 7, 1], [100, 2**31 - 1, 2**31 - 1, 2, 0, 0], [100, 0, M, 7, 0, 1]):
        codes = np.asarray(_quantized(x, spec, np.array(sizes, np.int32)).rowwise)
        same_bits(codes[:100], right, str(sizes))


def test_the_compiled_program_copies_nothing_to_the_host(one_per_scaling: QuantizerSpec) -> None:
    """No host memory, callback, outfeed or send in the optimized HLO: sizes stay on the device."""
    arguments: dict[str, Any] = {"seed": 5} if one_per_scaling.stochastic else {}
    if one_per_scaling.scaling == "delayed":
        arguments["scale"] = jnp.ones(G)
    run = jax.jit(lambda x, s: octavo_jax.quantize(x, one_per_scaling, s, backend=BACKEND, **arguments))
    text = run.lower(jnp.ones((M, K), jnp.bfloat16), jnp.zeros(G, jnp.int32)).compile().as_text()
    assert f'custom_call_target="octavo_quantize_{one_per_scaling.scaling}"' in text
    for word in ("S(5)", "copy-start", "outfeed", "callback", "send("):
        assert word not in text, word


def test_repeats_are_equal(
    one_per_scaling: QuantizerSpec, rng: Any, rows_of: Any, sizes_of: Any, arguments_for: Any, same_bits: Any
) -> None:
    """A hundred runs without a wait in between, byte for byte (faults.md 22, 30, 33)."""
    sizes = sizes_of(rng, G, M)
    x, arguments = rows_of(rng, (M, K), "bfloat16"), arguments_for(one_per_scaling, rng, G)
    used = int(sizes.sum())
    runs = [_quantized(x, one_per_scaling, sizes, **arguments) for _ in range(100)]
    first = np.asarray(runs[0].rowwise)[:used]
    for q in runs[1:]:
        same_bits(np.asarray(q.rowwise)[:used], first, "row codes of a later run")


def test_fused_functions_quantize_what_they_round(rng: Any, specs: Any, same_tensor: Any, same_bits: Any) -> None:
    """The quantizer's bits on the rounded activation; dbias the same each time."""
    spec, sizes = specs["block"], np.array([300, 0, 257], np.int32)
    x = (rng.standard_normal((M, 2 * 136)) * 2).astype(jnp.bfloat16)
    dy = rng.standard_normal((M, 136)).astype(jnp.bfloat16)
    q, extras = act_quantize(on_gpu(x), spec, on_gpu(sizes), activation="swiglu", backend="jax-native")
    same_tensor(q, octavo_numerics.quantize(np.asarray(extras.activated), spec, sizes))
    runs = [
        dact_quantize(on_gpu(dy), on_gpu(x), spec, on_gpu(sizes), activation="swiglu", backend="jax-native")
        for _ in range(5)
    ]
    for q, extras in runs:
        same_tensor(q, octavo_numerics.quantize(np.asarray(extras.activated), spec, sizes))
        same_bits(extras.dbias, runs[0][1].dbias, "dbias")
