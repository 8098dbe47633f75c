"""Names: each quantized array of x and of a kernel has two before anything reads it, and nothing else has one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import octavo
import octavo_jax
from octavo import GroupedTensorSpec
from octavo_jax.counting import count_runs, unnamed_planes
from octavo_jax.policies import plane_names, save_quantized
from octavo_jax.remat import name_checks
from octavo_jax.remat.checkpoint_names import FIELDS, NAMED_OPERANDS, name_bits, name_planes, plane_name

M, K, N, G = 48, 32, 16, 2
SIZES = [20, 10]
KINDS = sorted(octavo.PRESETS)


def _names(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"], equation.outvars[0].aval
        for part in jaxprs_in_params(equation.params):
            yield from _names(part)


def _expected(recipe: octavo.Recipe) -> Counter[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each plane of x and of the kernel, by the specification of quantized tensors."""
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for operand, shape in (("x", (M, K)), ("w", (G, N, K))):
        spec = recipe.quantizer(operand)  # type: ignore[arg-type]
        if spec is None:
            continue
        tensor = GroupedTensorSpec(shape=shape, groups=G, quantizer=spec, ragged_axis=0 if operand == "x" else None)
        shared = spec.shares_codes and spec.orientation == "both"
        for number, direction in enumerate(spec.directions):
            shapes = [tensor.payload_shape(direction), tensor.scale_shape(direction)]
            shapes += [(G,)] if spec.scaling == "nvfp4" else []
            for one in shapes:
                found[plane_name(NAMED_OPERANDS[operand], direction), one] += 1  # type: ignore[index]
                found["quantization", one] += not (shared and number)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_arrays_have_names_and_nothing_else_has(kind: str, probe: str) -> None:
    """In a training step of a layer with bias and state: planes are named; dy, dbias, amaxes, sizes and y are not."""
    recipe = octavo.DelayedScaling(history=2) if kind == "fp8-delayed" else octavo.recipe(kind)
    state = octavo_jax.init_delayed(recipe, G) if isinstance(recipe, octavo.DelayedScaling) else None

    def loss(x: Any, kernel: Any, bias: Any, state: Any) -> Any:
        result = octavo_jax.grouped_dense(
            x, kernel, SIZES, recipe=recipe, bias=bias, seed=1, state=state, backend=probe
        )
        return jnp.sum(jnp.tanh(result if state is None else result[0]))

    step = jax.grad(loss, argnums=(0, 1, 2, 3))
    program = jax.make_jaxpr(step)(jnp.ones((M, K)), jnp.ones((G, K, N)), jnp.ones((G, N)), state)
    assert Counter((name, aval.shape) for name, aval in _names(program.jaxpr)) == _expected(recipe)
    assert all(jnp.issubdtype(aval.dtype, jnp.unsignedinteger) for _, aval in _names(program.jaxpr))


def _quantized(operand: str, name: str | None = None, recipe: octavo.Recipe | None = None) -> Any:
    spec = (recipe or octavo.MXFP8()).quantizer(operand, checkpoint_name=name)  # type: ignore[arg-type]
    assert spec is not None
    return spec


def test_name_planes_names_no_gradient(probe: str) -> None:
    """A quantized dy comes back as it went in, whatever the name; nothing is named where there is no name."""
    x = jnp.ones((M, K))
    dy = octavo_jax.quantize(x, _quantized("dy"), backend=probe)
    assert name_planes(dy, "quantization") is dy
    q = octavo_jax.quantize(x, _quantized("x"), backend=probe)
    program = jax.make_jaxpr(lambda q: name_planes(q, None))(q)
    assert not list(_names(program.jaxpr))


def test_several_names_keep_one_array() -> None:
    """A policy that saves both names of an array saves it once."""

    def layer(x: Any) -> Any:
        return jnp.sin(name_bits(jnp.exp(x), "outer", "inner"))

    def saved(*names: str) -> list[tuple[int, ...]]:
        _, pull = jax.eval_shape(
            lambda x: jax.vjp(jax.checkpoint(layer, policy=save_quantized(*names)), x), jnp.ones(7)
        )
        return [leaf.shape for leaf in jax.tree.leaves(pull)]

    assert saved("outer", "inner") == saved("outer") == saved("inner")


def test_an_array_of_the_callers_own_keeps_its_gradient(rng: np.random.Generator) -> None:
    """With a name that a policy saves and without: named by its bits, an activation had a gradient of zeros. Codes have
    none, and say so; without a derivative they are named, and so are numpy's arrays."""
    x = jnp.asarray(rng.standard_normal(7), jnp.float32)

    def loss(x: Any, name: Any) -> Any:
        return jnp.sum(jnp.sin(name(jnp.exp(x))))

    named = partial(loss, name=lambda y: name_bits(y, "mine"))
    wanted = jax.jit(jax.grad(partial(loss, name=lambda y: y)))(x)
    assert np.asarray(wanted).all()
    for function in (named, jax.checkpoint(named, policy=save_quantized("mine"))):
        assert np.array_equal(jax.jit(jax.grad(function))(x), wanted)

    codes = partial(loss, name=lambda y: name_bits(y.astype(jnp.float8_e4m3fn), "mine").astype(jnp.float32))
    with pytest.raises(TypeError, match="name_bits was given floats of 8 bits and differentiated"):
        jax.grad(codes)(x)
    assert codes(x).dtype == jnp.float32
    assert name_bits(np.ones(3), "mine").dtype == jnp.float32


@pytest.mark.parametrize(
    ("names", "quantized"),
    [
        (plane_names(), 3),
        (plane_names(("x",)), 4),
        (plane_names(("kernel",)), 4),
        (plane_names(directions=("columnwise",)), 3),
        (plane_names(directions=("rowwise",)), 5),
        (plane_names(("x",), ("columnwise",), name="other"), 5),
    ],
)
def test_a_policy_chooses_operands_and_planes(names: tuple[str, ...], quantized: int, probe: str) -> None:
    """Of a layer whose y nobody needs again, the backward pass reads the columnwise planes alone."""
    recipe = octavo.MXFP8()

    def loss(x: Any, kernel: Any) -> Any:
        layer = lambda x, kernel: octavo_jax.grouped_dense(x, kernel, SIZES, recipe=recipe, backend=probe)  # noqa: E731
        return jnp.sum(jax.checkpoint(layer, policy=save_quantized(*names))(x, kernel))

    assert count_runs(jax.value_and_grad(loss, (0, 1)), jnp.ones((M, K)), jnp.ones((G, K, N))).quantize == quantized


def test_names_of_planes_are_checked() -> None:
    """A plane that does not exist has no name."""
    with pytest.raises(ValueError, match=r"operand is 'dy'.*'x' and 'kernel'"):
        plane_names(("dy",))
    with pytest.raises(ValueError, match=r"direction 'row'.*'rowwise'"):
        plane_names(directions=("row",))  # type: ignore[arg-type]


def test_one_operand_or_direction_needs_no_tuple() -> None:
    """Text is one name, not a sequence of its letters."""
    assert plane_names("kernel", "columnwise") == plane_names(("kernel",), ("columnwise",))


@pytest.mark.parametrize("names", [(plane_names(),), (jax.checkpoint_policies.dots_saveable,), (None,)])
def test_a_policy_takes_names_one_by_one(names: tuple[Any, ...]) -> None:
    """A tuple of names, or a policy, would be a name that no array has: nothing would be saved, and nobody told."""
    with pytest.raises(ValueError, match=r"not text.*\*plane_names\(\.\.\.\)\), and another policy as base="):
        save_quantized(*names)


@jax.jit
def octavo_gemm_fprop(*planes: Any) -> Any:
    """Stands for a GEMM of any backend."""
    return sum(jnp.sum(plane.astype(jnp.float32)) for plane in planes)


def _named_first(q: Any) -> Any:
    q = name_planes(q, "quantization")
    return octavo_gemm_fprop(q.rowwise, q.rowwise_scale)


def _never_named(q: Any) -> Any:
    return octavo_gemm_fprop(q.rowwise, q.rowwise_scale)


def _named_after_use(q: Any) -> Any:
    y = octavo_gemm_fprop(q.rowwise, q.rowwise_scale)
    named = name_planes(q, "quantization")
    return y + octavo_gemm_fprop(named.columnwise, named.columnwise_scale)


def _scale_forgotten(q: Any) -> Any:
    named = name_planes(q, "quantization")
    return octavo_gemm_fprop(named.rowwise, q.rowwise_scale)


def _read_by_no_gemm(q: Any) -> Any:
    return jnp.sum(q.rowwise.astype(jnp.float32) * 2)


FAULTS: dict[str, tuple[Callable[..., Any], int, str]] = {
    "named first": (_named_first, 0, ""),
    "never named": (_never_named, 2, "octavo_gemm_fprop reads"),
    "named after use": (_named_after_use, 2, "octavo_gemm_fprop reads"),
    "scale forgotten": (_scale_forgotten, 1, "float32[48]"),
    "read by no GEMM": (_read_by_no_gemm, 1, "mul reads"),
}


@pytest.mark.parametrize("loop", [False, True], ids=["flat", "scan"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_of_names_can_fail(fault: str, loop: bool, probe: str) -> None:
    """Of five planted programs it accepts the one that names before the first use, alone or carried around a loop."""
    use, sentences, word = FAULTS[fault]
    spec = _quantized("x", recipe=octavo.RowScaling())

    def program(x: Any) -> Any:
        q = octavo_jax.quantize(jax.lax.stop_gradient(x), spec, backend=probe)
        if not loop:
            return use(q)
        return jax.lax.scan(lambda held, _: (held, use(replace(q, **held))), _held(q), None, length=2)[1]

    told = unnamed_planes(program, jnp.ones((M, K)))
    assert len(told) == sentences
    assert all(word in sentence and "octavo_quantize_row makes" in sentence for sentence in told)


def _held(q: Any) -> dict[str, Any]:
    return {field: getattr(q, field) for fields in FIELDS.values() for field in fields[:2]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_passes_the_check_and_fails_it_without_names(kind: str, probe: str) -> None:
    """grouped_dense in every recipe, bias, activation and scan around it; its gradients' quantizers are no fault."""
    recipe = octavo.DelayedScaling(history=2) if kind == "fp8-delayed" else octavo.recipe(kind)
    state = octavo_jax.init_delayed(recipe, G) if isinstance(recipe, octavo.DelayedScaling) else None

    def loss(x: Any, kernels: Any, state: Any, name: str | None) -> Any:
        def layer(x: Any, kernel: Any) -> Any:
            result = octavo_jax.grouped_dense(
                x, kernel, SIZES, recipe=recipe, seed=1, state=state, checkpoint_name=name, backend=probe
            )
            return jnp.tanh(result if state is None else result[0]), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=save_quantized()), x, kernels)[0])

    arguments = jnp.ones((M, K)), jnp.ones((3, G, K, K)), state
    assert unnamed_planes(lambda *given: loss(*given, "quantization"), *arguments) == ()
    assert bool(unnamed_planes(lambda *given: loss(*given, None), *arguments)) == (kind != "bf16")


def test_a_scan_says_its_constants_in_two_ways() -> None:
    """JAX 0.10 counts them; 0.11 and 0.12 have a tree for each kind of operand."""
    trees = SimpleNamespace(unpack=lambda: (["kernel"], ["x", "key"], ["row"] * 3))
    assert name_checks._consts_and_carried({"ft_in": trees}) == (1, 2)
    assert name_checks._consts_and_carried({"num_consts": 1, "num_carry": 2}) == (1, 2)
