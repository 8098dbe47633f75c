"""A layer under JAX's transformations: the bits that it has alone, or a sentence that says why not."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export
from jax.experimental.compilation_cache import compilation_cache

import octavo
import octavo_jax
from octavo_jax import GroupedTensor
from octavo_jax.linear import autograd

M, K, N, G = 24, 32, 16, 3
SIZES = np.array([9, 0, 8], np.int32)
RECIPE = octavo.recipe("fp8-current")
BACKEND = "jax-reference"


def _layer(x: Any, kernel: Any, sizes: Any, recipe: octavo.Recipe = RECIPE) -> Any:
    return octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe, backend=BACKEND)


def _step(x: Any, kernel: Any, sizes: Any, dy: Any) -> tuple[Any, ...]:
    y, pull = jax.vjp(lambda x, kernel: _layer(x, kernel, sizes), x, kernel)
    return (y, *pull(dy))


STEP = jax.jit(_step)


def _arrays(rng: np.random.Generator, *lead: int) -> list[Any]:
    """x with a NaN tail, kernel, dy with one."""
    x, kernel, dy = (rng.standard_normal((*lead, *side)).astype(np.float32) for side in ((M, K), (G, K, N), (M, N)))
    x[..., SIZES.sum() :, :] = np.nan
    dy[..., SIZES.sum() :, :] = np.nan
    return [jnp.asarray(one) for one in (x, kernel, dy)]


def _same(actual: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("mapped", ["x kernel sizes dy", "kernel dy"])
def test_vmap_of_a_training_step_is_its_loop(mapped: str, rng: np.random.Generator) -> None:
    """Result and gradients, with sizes in the batch or shared."""
    axes = [0 if name in mapped.split() else None for name in ("x", "kernel", "sizes", "dy")]
    x, kernel, dy = _arrays(rng, 2)
    every = [x, kernel, jnp.asarray(np.stack([SIZES, [0, 17, 0]])), dy]
    given = [one if axis == 0 else one[0] for one, axis in zip(every, axes, strict=True)]
    batched = jax.jit(jax.vmap(_step, in_axes=tuple(axes)))(*given)
    largest = [float(jnp.nanmax(jnp.abs(one))) for one in (x, kernel, dy)]
    for i in range(2):
        alone = STEP(*(one[i] if axis == 0 else one for one, axis in zip(given, axes, strict=True)))
        for many, one, (length, a, b) in zip(batched, alone, ((K, 0, 1), (N, 2, 1), (M, 0, 2)), strict=True):
            # XLA may sum a batch's products in another order: each way is off by its length in ulps of the whole
            bound = 2 * length * 2.0**-24 * length * largest[a] * largest[b]
            np.testing.assert_allclose(many[i], one, rtol=0, atol=bound)


def test_export_and_back(rng: np.random.Generator) -> None:
    """A training step of plain operations needs no list of allowed calls, and gives its bits after the round trip."""
    x, kernel, dy = _arrays(rng)
    exported = export.export(STEP)(x, kernel, jnp.asarray(SIZES), dy)
    again = export.deserialize(exported.serialize())
    _same(again.call(x, kernel, jnp.asarray(SIZES), dy), STEP(x, kernel, SIZES, dy))


PROGRAM = """
import jax, jax.numpy as jnp, octavo, octavo_jax
from jax import monitoring
seen, traces = [], []
def note(name, **_):
    seen.append(name.rsplit("/", 1)[-1])
x, kernel, sizes = jnp.ones((24, 32)), jnp.ones((3, 32, 16)), jnp.array([9, 0, 8])
def loss(x, kernel):
    traces.append(x)
    return octavo_jax.grouped_dense(x, kernel, sizes, recipe=octavo.recipe("fp8-current"), backend="BACKEND").sum()
step = jax.jit(jax.grad(loss, (0, 1)))
monitoring.register_event_listener(note)
for _ in range(3):
    jax.block_until_ready(step(x, kernel))
monitoring.unregister_event_listener(note)
told = [seen.count("cache_hits"), seen.count("cache_misses"), len(traces)]
""".replace("BACKEND", BACKEND)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """By this process and a new one with another hash seed, with one persistent cache: hits, misses, and traces."""
    folder, here = str(tmp_path_factory.mktemp("programs")), dict[str, Any]()
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name, value in zip(names, (folder, 0), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        exec(PROGRAM, here)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    settings = {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONHASHSEED": "1",
    }
    command = [sys.executable, "-c", PROGRAM + "print(*told)"]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=True)
    return [here["told"], [int(count) for count in done.stdout.split()]]


def test_the_persistent_cache_serves_a_second_process(told: list[list[int]]) -> None:
    """Nothing of a process (addresses, orders of sets, hash seeds) is in the key: the second compiles nothing."""
    (hits, misses, _), second = told
    assert hits == 0
    assert misses > 0
    assert second[:2] == [misses, 0]


def test_the_first_trace_of_a_process_is_the_last(told: list[list[int]]) -> None:
    """Importing what a layer needs happens inside a new process's first trace, and changes no key of JAX's caches."""
    assert [traces for *_, traces in told] == [1, 1]


def test_donated_arguments(rng: np.random.Generator) -> None:
    """x and the kernel are given away and their gradients take the memory over; JAX warns of nothing."""
    x, kernel, dy = _arrays(rng)
    expected = STEP(x, kernel, SIZES, dy)[1:]
    given = jnp.array(x), jnp.array(kernel)
    donating = jax.jit(lambda x, kernel, dy: _step(x, kernel, jnp.asarray(SIZES), dy)[1:], donate_argnums=(0, 1))
    _same(donating(*given, dy), expected)
    assert all(one.is_deleted() for one in given)


def test_scan_stacks_quantized_tensors(rng: np.random.Generator) -> None:
    """A GroupedTensor goes out of a scan with a leading axis, and into the next one without it."""
    x, _, _ = _arrays(rng, 3)
    spec = RECIPE.quantizer("x")
    assert spec is not None

    def quantize(x: Any) -> GroupedTensor:
        return octavo_jax.quantize(x, spec, jnp.asarray(SIZES), backend=BACKEND)

    def values(q: GroupedTensor) -> Any:
        return octavo_jax.dequantize(q, backend=BACKEND)

    stacked = jax.jit(lambda x: jax.lax.scan(lambda c, x: (c, quantize(x)), 0, x)[1])(x)
    assert stacked.rowwise.shape == (3, M, K)
    _same(jax.tree.map(lambda leaf: leaf[1], stacked), jax.jit(quantize)(x[1]))
    back = jax.jit(lambda q: jax.lax.scan(lambda c, q: (c, values(q)), 0, q)[1])(stacked)
    _same(back[2], values(quantize(x[2])))


def test_while_loop(rng: np.random.Generator) -> None:
    """As many layers as a traced number says."""
    x, _, _ = _arrays(rng)
    kernel = jnp.asarray(rng.standard_normal((G, K, K)) / 8, jnp.float32)

    @jax.jit
    def run(x: Any, turns: Any) -> Any:
        body = lambda state: (state[0] + 1, _layer(state[1], kernel, jnp.asarray(SIZES)))  # noqa: E731
        return jax.lax.while_loop(lambda state: state[0] < turns, body, (0, x))[1]

    _same(run(x, 2), run(run(x, 1), 1))
    _same(run(x, 0), x)


def test_what_is_not_differentiated(rng: np.random.Generator) -> None:
    """Forward mode, second derivatives and quantizers: an error each, where zeros would look like an answer."""
    x, kernel, _ = _arrays(rng)

    def loss(x: Any) -> Any:
        return jnp.sum(_layer(x, kernel, jnp.asarray(SIZES)) ** 2)

    _, pushed = jax.linearize(loss, x)
    for forward in (
        lambda: jax.jvp(loss, (x,), (x,)),
        lambda: jax.jvp(jax.jit(loss), (x,), (x,)),
        lambda: jax.jit(lambda x: jax.jvp(loss, (x,), (x,)))(x),
        lambda: jax.jacfwd(loss)(x),
        lambda: pushed(x),
    ):
        with pytest.raises(TypeError, match=r"grouped_dense was given to forward-mode differentiation .*use jax\.grad"):
            forward()
    with pytest.raises(TypeError, match="codes have no derivative: differentiate layers"):
        jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(x)
    spec = RECIPE.quantizer("x")
    assert spec is not None
    with pytest.raises(TypeError, match="codes have no derivative"):
        jax.jit(jax.grad(lambda x: octavo_jax.quantize(x, spec).rowwise_scale.sum()))(x)
    _, aside = jax.grad(lambda x: (loss(x), octavo_jax.quantize(jax.lax.stop_gradient(x), spec)), has_aux=True)(x)
    assert aside.rowwise.shape == x.shape


@pytest.mark.parametrize("name", ["activate", "normalize", "permute", "row_weights", "combine"])
def test_forward_mode_is_refused_by_name(name: str) -> None:
    """Of what stands beside layers, too, where JAX's own sentence names no function. Reverse mode goes through."""
    x, chosen = jnp.ones((3, 4)), jnp.zeros((3, 1), jnp.int32)
    routing = octavo_jax.moe.arrange(chosen, x[:, :1], 2)
    function = {
        "activate": lambda x: octavo_jax.activate(x, "silu"),
        "normalize": lambda x: octavo_jax.normalize(x, jnp.ones(4)),
        "permute": lambda x: octavo_jax.moe.permute(x, routing),
        "row_weights": lambda x: octavo_jax.moe.row_weights(octavo_jax.moe.arrange(chosen, x[:, :1], 2)),
        "combine": lambda x: octavo_jax.moe.combine(x, routing),
    }[name]
    with pytest.raises(TypeError, match=rf"^{name} was given to forward-mode differentiation .*use jax\.grad"):
        jax.jvp(function, (x,), (x,))
    assert jax.grad(lambda x: function(x).sum())(x).shape == x.shape


def test_debug_nans_sees_no_tail(rng: np.random.Generator) -> None:
    """NaN in rows that are not read is no finding, in y, in gradients, and in what an eager forward pass leaves for
    the backward one (faults.md 8, 9, 11, 12)."""
    x, kernel, dy = _arrays(rng)
    with jax.debug_nans(True):
        y, pull = jax.vjp(lambda x, kernel: _layer(x, kernel, SIZES), x, kernel)
        for found in (y, *pull(dy)):
            assert np.isfinite(np.asarray(found)).all()


def test_with_64_bit_types_turned_on(rng: np.random.Generator) -> None:
    """int64 sizes give int32's bits; float64 is refused, for no recipe rounds it."""
    x, kernel, dy = _arrays(rng)
    expected = STEP(x, kernel, SIZES, dy)
    with jax.enable_x64(True):
        sizes = jnp.asarray(SIZES.astype(np.int64))
        assert sizes.dtype == jnp.int64
        _same(STEP(x, kernel, sizes, dy), expected)
        with pytest.raises(ValueError, match="x has dtype float64; it must be bfloat16, float16 or float32"):
            _layer(x.astype(jnp.float64), kernel, sizes)


def test_checks_without_jit(rng: np.random.Generator) -> None:
    """Under jax.disable_jit, where people look for their bugs, the same refusals."""
    x, kernel, _ = _arrays(rng)
    with jax.disable_jit():
        with pytest.raises(ValueError, match="sum to 60 and the tensor has 24 rows"):
            _layer(x, kernel, [20, 20, 20])
        with pytest.raises(ValueError, match="seed is None"):
            _layer(x, kernel, SIZES, octavo.recipe("nvfp4"))


def test_checkpoint_without_jit(rng: np.random.Generator) -> None:
    """Sizes of numpy's that the layer closes over: jax.checkpoint keeps them as constants, which are no `jax.Array`."""
    x, kernel, _ = _arrays(rng)
    layer = jax.checkpoint(lambda kernel: _layer(x, kernel, SIZES, octavo.recipe("bf16")))
    with jax.disable_jit():
        y = layer(kernel)
    assert np.isfinite(y).all()
    assert y[0].any()


def test_dtypes_that_come_in(rng: np.random.Generator) -> None:
    """numpy's arrays of ml_dtypes are as good as JAX's; codes and integers are no operands."""
    x, kernel = (
        rng.standard_normal((M, K)).astype(ml_dtypes.bfloat16),
        rng.standard_normal((G, K, N)).astype(np.float16),
    )
    y = _layer(x, kernel, SIZES)
    assert y.dtype == jnp.bfloat16
    _same(y, _layer(jnp.asarray(x), jnp.asarray(kernel), jnp.asarray(SIZES)))
    for dtype in (ml_dtypes.float8_e4m3fn, np.int32):
        with pytest.raises(ValueError, match=f"x has dtype {np.dtype(dtype)}"):
            _layer(x.astype(dtype), kernel, SIZES)


def test_equal_arguments_are_traced_once(rng: np.random.Generator) -> None:
    """Other sizes, an equal recipe made anew, and a checkpoint name given by its default leave the program as it is."""
    x, kernel, _ = _arrays(rng)
    traces = 0

    def layer(x: Any, kernel: Any, sizes: Any, recipe: octavo.Recipe) -> Any:
        nonlocal traces
        traces += 1
        return octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe, backend=[BACKEND])

    run = jax.jit(layer, static_argnums=3)
    for sizes in ([9, 0, 8], [0, 0, 0], [1, 2, 3]):
        run(x, kernel, jnp.asarray(sizes), octavo.CurrentScaling())
    assert traces == 1
    layer_of = autograd.octavo_grouped_dense  # what an eager call compiles
    before = layer_of._cache_size()
    for _ in range(3):
        octavo_jax.grouped_dense(x, kernel, SIZES, recipe=octavo.CurrentScaling(), backend=BACKEND)
    assert layer_of._cache_size() <= before + 1
    texts = {str(jax.make_jaxpr(lambda x, kernel: _layer(x, kernel, SIZES))(x, kernel)) for _ in range(2)}
    assert len(texts) == 1


def test_ahead_of_time(rng: np.random.Generator) -> None:
    """Lowered and compiled from shapes alone; the program gives the jitted function's bits."""
    x, kernel, dy = _arrays(rng)
    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (x, kernel, jnp.asarray(SIZES), dy)]
    compiled = STEP.lower(*shapes).compile()
    _same(compiled(x, kernel, jnp.asarray(SIZES), dy), STEP(x, kernel, SIZES, dy))
    assert [one.shape for one in jax.eval_shape(_step, *shapes)] == [(M, N), (M, K), (G, K, N)]
