"""Every path that quantizes names what it quantizes before its first use, and names nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

import octavo
import octavo_jax
from octavo_jax import linen, moe, nnx
from octavo_jax.counting import unnamed_planes
from octavo_jax.linear.dense import dense
from octavo_jax.linear.normalized_dense import layernorm_dense
from octavo_jax.mlp.mlp import grouped_mlp, layernorm_mlp
from octavo_jax.remat.checkpoint_names import NAMED_OPERANDS

M, K, F, N, G = 48, 32, 16, 24, 2
SIZES = [20, 10]
X = jnp.ones((M, K))
NAME = "mine"


@dataclass(frozen=True)
class Path:
    """A function of differentiable arguments and of what every layer takes.

    linears   GEMM layers in it, whose x and kernel are quantized each
    groups    of delayed scaling's states, one a linear layer
    choices   int32 arrays of a router that carry the name, too, so that rows and sizes stay those that were quantized
    """

    call: Callable[..., Any]
    arguments: dict[str, tuple[int, ...]]
    linears: int = 1
    groups: int = 1
    choices: int = 0


def _mlp(groups: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {"wi": (*groups, K, 2 * F), "wo": (*groups, F, N), "bi": (*groups, 2 * F), "bo": (*groups, N)}


GROUPED = {"kernel": (G, K, N), "bias": (G, N)}
PLAIN = {"kernel": (K, N), "bias": (N,)}
NORM = {"gamma": (K,), "beta": (K,)}
PATHS = {
    "grouped_dense": Path(lambda a, **how: octavo_jax.grouped_dense(X, group_sizes=SIZES, **a, **how), GROUPED, 1, G),
    "ragged_dot": Path(
        lambda a, **how: octavo_jax.ragged_dot(X, a["rhs"], jnp.array(SIZES), **how), {"rhs": (G, K, N)}
    ),
    "dense": Path(lambda a, **how: dense(X, **a, **how), PLAIN),
    "layernorm_dense": Path(lambda a, **how: layernorm_dense(X, norm="layer", **a, **how), {**PLAIN, **NORM}),
    "layernorm_mlp": Path(lambda a, **how: layernorm_mlp(X, norm="layer", **a, **how), {**_mlp(()), **NORM}, 2),
    "grouped_mlp": Path(
        lambda a, **how: grouped_mlp(X, group_sizes=SIZES, **a, **how), {**_mlp((G,)), "probs": (M,)}, 2, G
    ),
    "moe_mlp": Path(  # the form that quantizes each operand once
        lambda a, **how: moe.moe_mlp(X, k=1, form="keep_all", **a, **how)[0],
        {**_mlp((G,)), "router": (K, G)},
        2,
        G,
        choices=3,
    ),
}
LINEN: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "GroupedDense": (lambda **how: linen.GroupedDense(G, N, **how), (SIZES,), 1),
    "DenseGeneral": (lambda **how: linen.DenseGeneral(N, **how), (), 1),
    "LayerNormDenseGeneral": (lambda **how: linen.LayerNormDenseGeneral(N, **how), (), 1),
    "LayerNormMLP": (lambda **how: linen.LayerNormMLP(hidden=F, features=N, **how), (), 2),
    "GroupedMLP": (lambda **how: linen.GroupedMLP(num_groups=G, hidden=F, features=N, **how), (SIZES,), 2),
}
NNX: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "GroupedLinear": (lambda **how: nnx.GroupedLinear(G, K, N, **how), (SIZES,), 1),
    "LayerNormLinear": (lambda **how: nnx.LayerNormLinear(K, N, **how), (), 1),
}
KINDS = ("fp8-delayed", "nvfp4")


def _names(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"], equation.outvars[0].aval
        for part in jaxprs_in_params(equation.params):
            yield from _names(part)


def _check(call: Callable[[Any], Any], argument: Any, recipe: octavo.Recipe, linears: int, choices: int = 0) -> None:
    wanted: Counter[str] = Counter()
    for operand, word in NAMED_OPERANDS.items():
        spec = recipe.quantizer(operand)
        assert spec is not None
        arrays = 3 if spec.scaling == "nvfp4" else 2
        for direction in spec.directions:
            wanted[f"{NAME}.{word}.{direction}"] = linears * arrays
        wanted[NAME] += linears * arrays * (1 if spec.shares_codes else 2)
    program = jax.make_jaxpr(jax.grad(lambda a: jnp.sum(call(a)), allow_int=True))(argument)
    bits, others = Counter(), []
    for name, aval in _names(program.jaxpr):
        if jnp.issubdtype(aval.dtype, jnp.unsignedinteger):
            bits[name] += 1
        else:
            others.append((name, aval.dtype))
    assert bits == wanted
    assert others == [(NAME, jnp.int32)] * choices
    assert unnamed_planes(call, argument) == ()


@pytest.mark.parametrize("fused", [False, True], ids=["composed", "fused"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS)
def test_functions_name_what_they_quantize(path: str, kind: str, fused: bool, probes: tuple[str, str]) -> None:
    """Plain, normalized, activated: payload and scales of x and of kernels, by name and plane; biases and probs not."""
    one = PATHS[path]
    recipe = octavo.DelayedScaling(history=2) if kind == "fp8-delayed" else octavo.recipe(kind)
    how: dict[str, Any] = {"recipe": recipe, "seed": 1, "checkpoint_name": NAME, "backend": probes[fused]}
    state = None
    if isinstance(recipe, octavo.DelayedScaling):
        if path == "ragged_dot":
            pytest.skip("ragged_dot keeps no state")
        state = (octavo_jax.init_delayed(recipe, one.groups),) * one.linears
        state = state if one.linears > 1 else state[0]

    def call(argument: Any) -> Any:
        arrays, state = argument
        result = one.call(arrays, **how, **({} if state is None else {"state": state}))
        return result[0] if isinstance(result, tuple) else result

    _check(
        call,
        ({name: jnp.ones(shape) for name, shape in one.arguments.items()}, state),
        recipe,
        one.linears,
        one.choices,
    )


@pytest.mark.parametrize("kind", ["fp8-delayed", "mxfp8"])
@pytest.mark.parametrize("module", LINEN)
def test_linen_modules_name_what_they_quantize(module: str, kind: str, probe: str) -> None:
    """`quantization_checkpoint_name` reaches every quantizer."""
    make, arguments, linears = LINEN[module]
    recipe = octavo.DelayedScaling(history=2) if kind == "fp8-delayed" else octavo.recipe(kind)
    layer = make(recipe=recipe, quantization_checkpoint_name=NAME, backend=probe)
    shapes = jax.eval_shape(lambda: layer.init(jax.random.key(0), X, *arguments))
    variables = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)
    _check(lambda variables: layer.apply(variables, X, *arguments), variables, recipe, linears)


@pytest.mark.parametrize("module", NNX)
def test_nnx_modules_name_what_they_quantize(module: str, probe: str) -> None:
    """The same argument, the same reach."""
    from flax import nnx as flax_nnx

    make, arguments, linears = NNX[module]
    recipe = octavo.MXFP8()
    layer = make(recipe=recipe, quantization_checkpoint_name=NAME, backend=probe, rngs=flax_nnx.Rngs(0))
    graph, params = flax_nnx.split(layer)
    _check(lambda params: flax_nnx.merge(graph, params)(X, *arguments), params, recipe, linears)
