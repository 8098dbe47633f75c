"""Arguments of other kinds than asked for are refused by a sentence: nothing of them is taken for something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
from octavo_jax import moe

T, E, K, F = 6, 2, 16, 32
BACKEND = "jax-reference"
SPEC: Any = octavo.MXFP8().quantizer("x")

FUNCTIONS: Any = octavo_jax
MOE: Any = moe
"""Their types would refuse most of this."""

Arguments = dict[str, Any]


@pytest.fixture
def draw(rng: np.random.Generator) -> Callable[..., jax.Array]:
    return lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)


@pytest.fixture
def routing(draw: Callable[..., jax.Array], rng: np.random.Generator) -> moe.Routing:
    return moe.arrange(jnp.asarray(rng.integers(-1, E, (T, 2))), draw(T, 2), E)


@pytest.fixture
def experts(draw: Callable[..., jax.Array]) -> Arguments:
    return {"wi": draw(E, K, 2 * F), "wo": draw(E, F, K), "recipe": None, "backend": BACKEND}


@pytest.mark.parametrize("backend", [None, BACKEND])
@pytest.mark.parametrize("direction", ["column", "Rowwise", None, 0])
def test_a_direction_that_is_none(draw: Callable[..., jax.Array], backend: str | None, direction: Any) -> None:
    """It gave the values of the columns, or a KeyError, which of the two the backend decided."""
    q = FUNCTIONS.quantize(draw(T, K), SPEC, backend=backend)
    with pytest.raises(ValueError, match=r"direction is .*; give 'rowwise' or 'columnwise'"):
        FUNCTIONS.dequantize(q, direction, backend=backend)


@pytest.mark.parametrize("backend", [None, BACKEND])
def test_codes_of_numpy_are_read(draw: Callable[..., jax.Array], backend: str | None) -> None:
    """A tensor whose planes went through files or `jax.device_get` is one of jax.Arrays."""
    q = FUNCTIONS.quantize(draw(T, K), SPEC, [2, 3], backend=backend)
    values = FUNCTIONS.dequantize(jax.device_get(q), backend=backend)
    assert jnp.array_equal(values, FUNCTIONS.dequantize(q, backend=backend))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.float8_e4m3fn, jnp.complex64, "int8", 0, "nosuch"])
def test_results_are_of_high_precision(
    draw: Callable[..., jax.Array], routing: moe.Routing, experts: Arguments, dtype: Any
) -> None:
    """A block's y of integers was its values, cut off; each of its doors refuses what grouped_dense does."""
    x = draw(T, K)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: MOE.routed_mlp(x, routing, **experts, preferred_element_type=dtype),
        lambda: MOE.moe_mlp(x, draw(K, E), **experts, k=1, preferred_element_type=dtype),
        lambda: MOE.combine(draw(2 * T, K), routing, preferred_element_type=dtype),
        lambda: FUNCTIONS.grouped_dense(x, draw(E, K, F), [2, 3], recipe=None, preferred_element_type=dtype),
    )
    for run in calls:
        with pytest.raises(ValueError, match="preferred_element_type"):
            run()


@pytest.mark.parametrize("offset", [1.5, 2.0, "1", np.float32(1), jnp.float32(1), jnp.zeros(2, jnp.int32)])
def test_an_offset_is_one_integer(draw: Callable[..., jax.Array], offset: Any) -> None:
    """A fraction was cut off, so that groups got random bits of others; integers of numpy and of JAX are taken."""
    x, spec = draw(T, K), octavo.NVFP4().quantizer("dy")
    with pytest.raises(ValueError, match=r"group_offset is .*; it is the number of the first group, one integer"):
        FUNCTIONS.quantize(x, spec, seed=3, group_offset=offset, backend=BACKEND)
    ours = [
        FUNCTIONS.quantize(x, spec, seed=3, group_offset=one, backend=BACKEND).rowwise
        for one in (1, np.int64(1), jnp.int32(1))
    ]
    assert all(jnp.array_equal(ours[0], other) for other in ours)


def cases(draw: Callable[..., jax.Array], routing: moe.Routing, experts: Arguments) -> dict[str, Callable[[], Any]]:
    """Calls by the beginning of what they are refused with."""
    x, kernel, listed = draw(T, K), draw(E, K, F), [[1.0]]
    dense: Arguments = {"group_sizes": [2, 3], "recipe": None}
    return {
        "spec is 'mxfp8'; give a QuantizerSpec": lambda: FUNCTIONS.quantize(x, "mxfp8"),
        "spec is a MXFP8; give a QuantizerSpec": lambda: FUNCTIONS.quantize(x, octavo.MXFP8()),
        "spec is a NoneType": lambda: FUNCTIONS.tensor_stats(x, None),
        "q is a ndarray": lambda: FUNCTIONS.dequantize(np.asarray(x)),
        "backend is 3": lambda: FUNCTIONS.grouped_dense(x, kernel, backend=3, **dense),
        r"backend is \[\]": lambda: MOE.moe_mlp(x, draw(K, E), **{**experts, "backend": []}, k=1),
        r"backend is \[\['": lambda: FUNCTIONS.grouped_dense(x, kernel, backend=[[BACKEND]], **dense),
        "sharding is 'ep'": lambda: MOE.routed_mlp(x, routing, **experts, sharding="ep"),
        "routing is a NoneType": lambda: MOE.routed_mlp(x, None, **experts),
        "x is a list": lambda: MOE.routed_mlp(listed, routing, **experts),
        "wo is a list": lambda: MOE.routed_mlp(x, routing, **{**experts, "wo": listed}),
        "bi is a list": lambda: MOE.routed_mlp(x, routing, **experts, bi=listed),
        "router is a list": lambda: MOE.moe_mlp(x, listed, **experts, k=1),
        "experts is a list": lambda: MOE.arrange([[0]], draw(1, 1), E),
        "weights is a list": lambda: MOE.arrange(jnp.zeros((1, 1), jnp.int32), listed, E),
        "num_experts is 1.5": lambda: MOE.arrange(jnp.zeros((1, 1), jnp.int32), draw(1, 1), 1.5),
        "rows is nan": lambda: MOE.arrange(jnp.zeros((1, 1), jnp.int32), draw(1, 1), E, rows=np.nan),
        "rows is a list": lambda: MOE.combine(listed, routing),
        "logits is a list": lambda: FUNCTIONS.choose_experts(listed, 1),
        "gamma is a NoneType": lambda: FUNCTIONS.layernorm_dense(x, kernel[0], None, recipe=None),
        "probs is a list": lambda: FUNCTIONS.grouped_mlp(x, experts["wi"], experts["wo"], probs=listed, **dense),
        "operand is 'z'; give": lambda: FUNCTIONS.act_quantize(x, SPEC, activation="silu", operand="z"),
        "spec is 'mxfp8'; give": lambda: FUNCTIONS.norm_quantize(x, x[0], "mxfp8"),
        "scale is a list": lambda: FUNCTIONS.quantize(x, octavo.DelayedScaling().quantizer("x"), scale=[1.0]),
        "mask is a list": lambda: MOE.route(x, 1, mask=[True] * T),
        "logits is a list; give": lambda: MOE.route(listed, 1),
        "renormalize is 'no'": lambda: MOE.route(x, 1, renormalize="no"),
        "dtype is 'nosuch'": lambda: MOE.moe_mlp(x, draw(K, E), **experts, k=1, dtype="nosuch"),
        "exchange is a NoneType": lambda: MOE.moe_mlp(x, draw(K, E), **experts, k=1, exchange=None),
        "x is a NoneType": lambda: FUNCTIONS.grouped_dense(None, kernel, **dense),
        "kernel is a GroupedTensor; give an array of high precision": lambda: FUNCTIONS.grouped_dense(
            x, FUNCTIONS.quantize(kernel, SPEC, backend=BACKEND), **dense
        ),
        "bias is a str": lambda: FUNCTIONS.dense(x, kernel[0], bias="b", recipe=None),
        "rhs is a object": lambda: FUNCTIONS.ragged_dot(x, object(), [2, 3], recipe=None),
        "checkpoint_name is 3": lambda: FUNCTIONS.grouped_dense(x, kernel, checkpoint_name=3, **dense),
        r"output_checkpoint_name is \['y'\]": lambda: FUNCTIONS.dense(
            x, kernel[0], recipe=None, output_checkpoint_name=["y"]
        ),
        "output_checkpoint_names is 'up'": lambda: FUNCTIONS.grouped_mlp(
            x, experts["wi"], experts["wo"], output_checkpoint_names="up", **dense
        ),
        "checkpoint_name is b'a'": lambda: MOE.route(x, 1, checkpoint_name=b"a"),
        "routing is a ndarray": lambda: MOE.permute(x, np.zeros((T, 2))),
        "routing is a tuple": lambda: MOE.combine(x, (0, 1)),
        "routing is a dict": lambda: MOE.row_weights({}),
        "routing is a list": lambda: MOE.router_stats([]),
        "rows is 1.5": lambda: MOE.Exchange(rows=1.5),
        "rows is '8'": lambda: MOE.Exchange(rows="8"),
        "groups is 2.0": lambda: FUNCTIONS.init_delayed(octavo.DelayedScaling(), 2.0),
    }


def test_a_sentence_names_the_argument(
    draw: Callable[..., jax.Array], routing: moe.Routing, experts: Arguments
) -> None:
    """Of recipes in a spec's place, lists in an array's, and numbers in those of names and counts."""
    for beginning, run in cases(draw, routing, experts).items():
        with pytest.raises(ValueError, match=f"^{beginning}") as caught:
            run()
        assert "\n" not in str(caught.value)


def test_counts_of_numpy_are_taken(draw: Callable[..., jax.Array]) -> None:
    """As those of Python: shapes and configurations hold both."""
    made = MOE.arrange(jnp.zeros((T, 1), jnp.int32), draw(T, 1), np.int64(E), rows=np.int32(T))
    assert made.group_sizes.tolist() == [T, 0]
    assert FUNCTIONS.init_delayed(octavo.DelayedScaling(history=2), np.int32(E)).x.scale.shape == (E,)


def test_variables_of_flax_stand_for_arrays(
    draw: Callable[..., jax.Array], routing: moe.Routing, experts: Arguments
) -> None:
    """A kernel may be given as the parameter that holds it."""
    nnx = pytest.importorskip("flax.nnx")
    x = draw(T, K)
    held = {**experts, "wi": nnx.Param(experts["wi"]), "wo": nnx.Param(experts["wo"])}
    assert jnp.array_equal(MOE.routed_mlp(x, routing, **held), MOE.routed_mlp(x, routing, **experts))


def test_arrays_of_numpy_are_taken(draw: Callable[..., jax.Array], experts: Arguments) -> None:
    """By the layers of experts as by linear ones, and k as configurations hold it; it was an AttributeError."""
    x, router = draw(T, K), draw(K, E)

    def block(*given: Any, k: Any) -> Any:
        x, router, logits, wi, wo = given
        how: Arguments = {**experts, "wi": wi, "wo": wo}
        routing = MOE.route(logits, k)
        rows = MOE.permute(x, routing)
        return MOE.moe_mlp(x, router, **how, k=k)[0], MOE.routed_mlp(x, routing, **how), MOE.combine(rows, routing)

    arrays = x, router, x @ router, experts["wi"], experts["wo"]
    ours, theirs = block(*arrays, k=1), block(*map(np.asarray, arrays), k=np.int64(1))
    assert all(jnp.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
