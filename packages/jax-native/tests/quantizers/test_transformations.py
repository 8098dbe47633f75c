"""Under JAX's transformations the calls have the bits they have alone, and only what is read is computed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, export
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P

import octavo
import octavo_jax
import octavo_numerics
from octavo import QuantizerSpec
from octavo_jax import GroupedTensor
from octavo_jax.policies import save_quantized
from octavo_jax_native import TARGETS
from octavo_jax_native.quantizers.primitive import needed_results

BACKEND = "jax-native"
M, K, G = 200, 96, 4


def _quantize(x: Any, spec: QuantizerSpec, sizes: Any, **arguments: Any) -> GroupedTensor:
    return octavo_jax.quantize(x, spec, sizes, backend="jax-native", **arguments)


def _calls(program: Any) -> int:
    """Custom calls of quantizers in a program's text."""
    return str(program.as_text()).count("custom_call @octavo_quantize_") or str(program.as_text()).count(
        'custom_call_target="octavo_quantize_'
    )


@pytest.fixture
def same_planes(same_bits: Any, as_definition: Any) -> Callable[[GroupedTensor, GroupedTensor], None]:
    """Fails where two tensors differ in an element that means something."""

    def check(actual: GroupedTensor, expected: GroupedTensor) -> None:
        wanted, got = (octavo_numerics.valid(as_definition(q)) for q in (expected, actual))
        assert wanted.keys() == got.keys()
        for name, plane in wanted.items():
            same_bits(got[name], plane, name)

    return check


def test_jit_with_traced_sizes_seed_and_offset(
    one_per_scaling: QuantizerSpec, rng: Any, rows_of: Any, sizes_of: Any, arguments_for: Any, same_planes: Any
) -> None:
    """One compilation serves every size vector, seed, offset and scale (faults.md 36: changed splits are seen)."""
    traces = 0

    @jax.jit
    def run(x: Array, sizes: Array, arguments: dict[str, Array]) -> GroupedTensor:
        nonlocal traces
        traces += 1
        return _quantize(x, one_per_scaling, sizes, **arguments)

    for _ in range(3):
        x, sizes = rows_of(rng, (M, K)), sizes_of(rng, G, M)
        arguments = arguments_for(one_per_scaling, rng, G)
        arguments = {k: v % (1 << 31) if k != "scale" else v for k, v in arguments.items()}
        traced = {k: jnp.asarray(v, jnp.uint32 if k == "group_offset" else None) for k, v in arguments.items()}
        q = run(jnp.asarray(x), jnp.asarray(sizes), traced)
        same_planes(q, _quantize(x, one_per_scaling, jnp.asarray(sizes), **arguments))
    assert traces == 1


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_sizes_of_any_integer_type(dtype: str, rng: Any, rows_of: Any, same_planes: Any) -> None:
    """The plan reads int32 and int64; others are converted, and what does not fit is cut as the rows' end."""
    spec = QuantizerSpec(format="e4m3", scaling="mxfp8")
    x, sizes = jnp.asarray(rows_of(rng, (M, K))), np.array([100, 0, 50, 7])
    q = _quantize(x, spec, jnp.asarray(sizes.astype(dtype)))
    same_planes(q, _quantize(x, spec, jnp.asarray(sizes.astype(np.int32))))
    if dtype == "uint32":
        traced = jax.jit(lambda x, sizes: _quantize(x, spec, sizes).rowwise)  # concrete ones are refused
        past = traced(x, jnp.asarray(np.array([100, 2**32 - 1, 5, 0], np.uint32)))
        cut = traced(x, jnp.asarray(np.array([100, 100, 0, 0], np.int32)))
        np.testing.assert_array_equal(np.asarray(past), np.asarray(cut))


def test_vmap_over_operands_and_over_sizes(
    one_per_scaling: QuantizerSpec, rng: Any, rows_of: Any, sizes_of: Any, arguments_for: Any, same_bits: Any
) -> None:
    """A batch of calls, one after the other; sizes in the batch or shared."""
    arguments = arguments_for(one_per_scaling, rng, G)
    x = jnp.asarray(rows_of(rng, (3, M, K)))
    sizes = jnp.asarray(np.stack([sizes_of(rng, G, M) for _ in range(3)]))

    def run(x: Array, sizes: Array) -> list[Array]:
        q = _quantize(x, one_per_scaling, sizes, **arguments)
        return [octavo_jax.dequantize(q, d, backend="jax-native") for d in ("rowwise", "columnwise")]

    one_call = jax.jit(run)
    for in_axes, given in (((0, 0), sizes), ((0, None), sizes[0])):
        batched = jax.jit(jax.vmap(run, in_axes=in_axes))(x, given)
        for i in range(3):
            alone = one_call(x[i], given if in_axes[1] is None else given[i])
            for one, many in zip(alone, batched, strict=True):
                same_bits(many[i], one, f"batch {i}")


def test_scan_and_while_loop(rng: Any, rows_of: Any, same_bits: Any) -> None:
    """Inside loops, with the carry quantized each turn."""
    spec = QuantizerSpec(format="e4m3", scaling="block", power_of_two=True)
    x, sizes = jnp.asarray(rows_of(rng, (M, K))), jnp.array([64, 0, 100, 3])

    def step(x: Array) -> Array:
        return octavo_jax.dequantize(_quantize(x * 1.5, spec, sizes), backend="jax-native")

    expected = step(step(step(x)))
    same_bits(jax.lax.scan(lambda c, _: (step(c), None), x, length=3)[0], expected, "scan")
    looped = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, x))
    same_bits(looped[1], expected, "while_loop")


def test_differentiating_it_is_refused(rng: Any, rows_of: Any) -> None:
    """Codes have no gradient, and none is made up."""
    spec = QuantizerSpec(format="e4m3", scaling="block")

    def loss(x: Array) -> Array:
        return jnp.sum(octavo_jax.dequantize(_quantize(x, spec, None), backend="jax-native"))

    with pytest.raises(TypeError, match="codes have no derivative"):
        jax.grad(loss)(jnp.asarray(rows_of(rng, (8, 32))))


@pytest.mark.parametrize(("policy", "quantized"), [(None, 5), (save_quantized(), 3)], ids=["nothing saved", "saved"])
def test_remat_quantizes_again_only_without_a_policy(policy: Any, quantized: int, equations: Any) -> None:
    """x, the kernel and dy once each where quantized operands are saved by name (faults.md 42, jax.md 4)."""
    x, kernel = jnp.ones((M, K)), jnp.ones((G, K, 48))

    def layer(x: Array, kernel: Array) -> Array:
        y = octavo_jax.grouped_dense(x, kernel, [100, 0, 50, 7], recipe=octavo.recipe("mxfp8"), backend=BACKEND)
        return jnp.sum(jnp.tanh(y))

    program = jax.make_jaxpr(jax.grad(jax.checkpoint(layer, policy=policy), (0, 1)))(x, kernel)
    assert equations(program.jaxpr, "octavo_native_quantize") == quantized


def _results(text: str) -> list[set[str]]:
    """The result names of each quantize call in StableHLO text."""
    calls = [line for line in text.splitlines() if "custom_call @octavo_quantize_" in line]
    return [set(call.split('results = "')[1].split('"')[0].split(",")) for call in calls]


@pytest.mark.parametrize(("field", "made"), [("rowwise", "row"), ("columnwise_scale", "col"), ("", None)])
def test_planes_that_nobody_reads_are_not_made(field: str, made: str | None) -> None:
    """One variant each: row data alone, column data alone, nothing at all, not even the plan."""
    spec = QuantizerSpec(format="e2m1", scaling="nvfp4")

    def run(x: Array, sizes: Array) -> Array:
        q = _quantize(x, spec, sizes)
        return getattr(q, field) if field else x + 1

    text = jax.jit(run).lower(jnp.ones((M, K)), jnp.array([100, 0, 50, 7])).as_text()
    expected = [] if made is None else [{f"{made}_codes", f"{made}_scales", f"{made}_global"}]
    assert [names - {"workspace"} for names in _results(text)] == expected
    assert text.count("@octavo_plan(") == len(expected)


ROWS, COLUMNS = ("row_codes", "row_scales", "row_global"), ("col_codes", "col_scales", "col_global")
VALUES = ("row_values", "row_global", "rstd")


@pytest.mark.parametrize(
    ("names", "used", "made"),
    [
        ((*ROWS, "row_values"), "row_values", "row_values row_global"),
        ((*ROWS, "row_values"), "row_scales row_values", "row_codes row_scales row_global row_values"),
        ((*ROWS, "row_values"), "row_global", "row_codes row_scales row_global"),
        (
            (*ROWS, "row_values", *COLUMNS),
            "row_values col_codes",
            "row_values row_global col_codes col_scales col_global",
        ),
        (VALUES, "row_values", "row_values row_global"),
        (VALUES, "row_global", "row_values row_global"),
        (VALUES, "rstd", "row_values row_global rstd"),
        (("activated", "amax"), "amax", "activated amax"),
    ],
)
def test_each_plane_in_the_form_that_is_read(names: tuple[str, ...], used: str, made: str) -> None:
    """Codes with their scales, values, or both, and the second level with either; and a call always makes a plane, in a
    form that is still among its results."""
    wanted = needed_results(names, [name in used.split() for name in names])
    assert {name for name, is_made in zip(names, wanted, strict=True) if is_made} == set(made.split())


def test_a_forward_pass_makes_one_plane_an_operand() -> None:
    """A layer that is not differentiated quantizes x and the kernel for its fprop, although the recipe trains.

    Rows of x, columns of the kernel, which lies as [G, K, N].
    """
    x, kernel = jnp.ones((M, K)), jnp.ones((G, K, 48))

    def layer(x: Array, kernel: Array) -> Array:
        return octavo_jax.grouped_dense(x, kernel, [100, 0, 50, 7], recipe=octavo.recipe("mxfp8"), backend=BACKEND)

    names = _results(jax.jit(layer).lower(x, kernel).as_text())
    assert sorted(map(sorted, names)) == [["col_codes", "col_scales"], ["row_codes", "row_scales"]]


def test_one_plan_for_all_operands_of_the_same_sizes() -> None:
    """XLA merges the plans of x and dy, and of every layer with the same routing."""
    spec, twin = QuantizerSpec(format="e4m3", scaling="block"), QuantizerSpec(format="e4m3", scaling="mxfp8")

    def run(x: Array, y: Array, sizes: Array) -> tuple[Any, Any]:
        return _quantize(x, spec, sizes).rowwise, _quantize(y, twin, sizes).rowwise

    lowered = jax.jit(run).lower(jnp.ones((M, K)), jnp.ones((M, 2 * K)), jnp.array([100, 0, 50, 7]))
    assert lowered.as_text().count("@octavo_plan(") == 2
    assert lowered.compile().as_text().count('custom_call_target="octavo_plan"') == 1


def test_equal_quantizations_are_merged() -> None:
    """Nothing says that a call has side effects, so XLA may run it once where it stands twice."""
    spec = QuantizerSpec(format="e4m3", scaling="row")

    def run(x: Array, sizes: Array) -> tuple[Any, Any]:
        return _quantize(x, spec, sizes).rowwise, _quantize(x, spec, sizes).rowwise_scale

    compiled = jax.jit(run).lower(jnp.ones((M, K)), jnp.array([100, 0, 50, 7])).compile()
    assert _calls(compiled) == 1


def test_export_and_back(rng: Any, rows_of: Any, same_planes: Any) -> None:
    """Serialized and read again, with the targets on the list of allowed custom calls."""
    spec = QuantizerSpec(format="e2m1", scaling="nvfp4", rounding="stochastic")
    x, sizes = jnp.asarray(rows_of(rng, (M, K))), jnp.array([100, 0, 50, 7])

    def run(x: Array, sizes: Array, seed: Array) -> list[Any]:
        return jax.tree.leaves(_quantize(x, spec, sizes, seed=seed))

    seed = jnp.uint32(9)
    with pytest.raises(ValueError, match="octavo_quantize_nvfp4"):
        export.export(jax.jit(run))(x, sizes, seed)
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]
    exported = export.export(jax.jit(run), disabled_checks=checks)(x, sizes, seed)
    again = export.deserialize(exported.serialize())
    q = _quantize(x, spec, sizes, seed=9)
    same_planes(jax.tree.unflatten(jax.tree.structure(q), again.call(x, sizes, seed)), q)


def test_donated_inputs(rng: Any, rows_of: Any, same_planes: Any) -> None:
    """x may be given away; what is made of it is right."""
    spec = QuantizerSpec(format="e4m3", scaling="mxfp8")
    host, sizes = rows_of(rng, (M, K)), jnp.array([100, 0, 50, 7])

    def run(x: Array, sizes: Array) -> tuple[GroupedTensor, Array]:
        return _quantize(x, spec, sizes), x * 2

    q, _ = jax.jit(run, donate_argnums=0)(jnp.array(host), sizes)
    same_planes(q, _quantize(jnp.array(host), spec, sizes))


def test_threads_side_by_side(rng: Any, rows_of: Any, sizes_of: Any, same_planes: Any) -> None:
    """Eight threads, each with its own operand and sizes; no state is shared (fault class: races)."""
    spec = QuantizerSpec(format="e4m3", scaling="current")
    work = [(jnp.asarray(rows_of(rng, (M, K))), jnp.asarray(sizes_of(rng, G, M))) for _ in range(8)]
    alone = [_quantize(x, spec, sizes) for x, sizes in work]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for q, expected in zip(pool.map(lambda one: _quantize(one[0], spec, one[1]), work), alone, strict=True):
                same_planes(q, expected)


def test_with_64_bit_integers_turned_on(rng: Any, same_bits: Any) -> None:
    """int64 sizes and seeds past 2^32 reach the kernels; the plan stays two int32 a word."""
    spec = QuantizerSpec(format="e2m1", scaling="nvfp4", rounding="stochastic")
    x = rng.standard_normal((100, 48)).astype(np.float32)
    sizes, seed = np.array([40, 0, 50], np.int64), (1 << 40) + 5
    expected = octavo_numerics.quantize(x, spec, sizes, seed=seed)
    with jax.enable_x64(True):
        for given in (seed, jnp.asarray(seed)):
            q = _quantize(x, spec, jnp.asarray(sizes), seed=given)
            assert q.group_sizes is not None
            assert q.group_sizes.dtype == jnp.int64
            same_bits(q.rowwise[:90], expected.rowwise[:90], f"codes of {type(given)}")


def test_the_persistent_cache_serves_a_second_process(tmp_path: Path) -> None:
    """A training step's program holds target names, no addresses, and its key nothing of a process: a new one with
    another hash seed compiles nothing of what this one has kept."""
    program = """
import jax, jax.numpy as jnp, octavo, octavo_jax
from jax import monitoring
seen = []
def note(name, **_):
    seen.append(name.rsplit("/", 1)[-1])
x, kernel, sizes = jnp.ones((8, 32)), jnp.ones((2, 32, 16)), jnp.array([3, 5])
def loss(x, kernel):
    return octavo_jax.grouped_dense(x, kernel, sizes, recipe=octavo.recipe("mxfp8"), backend="jax-native").sum()
monitoring.register_event_listener(note)
gradients = jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1)))(x, kernel))
monitoring.unregister_event_listener(note)
told = [seen.count("cache_hits"), seen.count("cache_misses"), float(gradients[1].sum())]
"""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    here: dict[str, Any] = {}
    try:
        for name, value in zip(names, (str(tmp_path), 0), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        exec(program, here)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    hits, misses, value = here["told"]
    assert hits == 0
    assert misses > 0
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONHASHSEED": "1",
    }
    command = [sys.executable, "-c", program + "print(*told)"]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(misses), "0", str(value)]


@pytest.mark.parametrize("check_vma", [False, True])
def test_inside_shard_map(check_vma: bool, rng: Any, same_bits: Any) -> None:
    """On local arrays of eight virtual devices, the sizes sharded with the rows or the same everywhere."""
    if jax.device_count() < 8:
        pytest.skip("fewer than eight devices")
    spec = QuantizerSpec(format="e4m3", scaling="mxfp8")
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x, sizes = jnp.asarray(rng.standard_normal((8, 40, 32)), jnp.float32), jnp.array([10, 0, 30])
    parts = jnp.concatenate([_quantize(part, spec, sizes).rowwise for part in x])

    def local(x: Array, sizes: Array) -> Any:
        return _quantize(x, spec, sizes.reshape(-1)).rowwise

    for given, axes in ((jnp.tile(sizes, (8, 1)), P("d")), (sizes, P())):
        run = jax.shard_map(local, mesh=mesh, in_specs=(P("d"), axes), out_specs=P("d"), check_vma=check_vma)
        same_bits(jax.jit(run)(x.reshape(-1, 32), given), parts, f"codes with sizes in {axes}")
