"""The promise that needs both frameworks in one process: one recipe, one set of bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import octavo
import octavo_jax
import octavo_numerics
import octavo_registry
import octavo_torch
from octavo_conformance.oracles.checks import assert_same_bits
from octavo_registry.contract.frameworks import PLANES, Framework

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid in groups": {"score": "sigmoid", "groups": 4, "kept_groups": 2, "scale": 2.5},
    "sqrtsoftplus": {"score": "sqrtsoftplus", "renormalize": False},
}
RECIPES = [name for name, recipe in octavo.PRESETS.items() if recipe.quantizer("x") is not None]
SIZES = np.array([33, 0, 17, 64, 1, 13], dtype=np.int64)
ROWS = 144  # 128 rows in groups, 16 in the tail


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def _bits(framework: Framework, tensor: Any, sizes: np.ndarray | None) -> dict[str, np.ndarray]:
    """The planes of a framework's grouped tensor, without what has no value."""
    planes = {p: framework.to_numpy(getattr(tensor, p)) for p in PLANES if getattr(tensor, p) is not None}
    array = octavo_numerics.QuantizedArray(
        **{plane: planes.get(plane) for plane in PLANES}, group_sizes=sizes, spec=tensor.spec
    )
    return octavo_numerics.valid(array)


def _assert_same_planes(have: dict[str, np.ndarray], want: dict[str, np.ndarray], of: str) -> None:
    assert have.keys() == want.keys()
    for plane, value in want.items():
        assert_same_bits(have[plane], value, f"{plane} of {of}")


@pytest.mark.parametrize("operand", ["x", "w", "dy"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_framework_gives_the_bits_of_the_definition(name: str, operand: str, rng: np.random.Generator) -> None:
    """Promise 5: a trainer in one framework and a sampler in another hold the same weights, byte for byte."""
    spec = octavo.recipe(name).quantizer(operand)
    if spec is None:
        pytest.skip(f"{name} does not quantize {operand}")
    stacked = operand == "w"
    shape = (len(SIZES), 48, 80) if stacked else (ROWS, 80)
    numbers = (rng.standard_normal(shape) * np.exp2(rng.integers(-8, 8, shape))).astype(np.float32)
    if not stacked:
        numbers[SIZES.sum() :] = np.nan
    scale = np.exp2(rng.integers(-4, 5, len(SIZES))).astype(np.float32) if spec.scaling == "delayed" else None
    sizes = None if stacked else SIZES
    want = octavo_numerics.valid(octavo_numerics.quantize(numbers, spec, sizes, seed=7, scale=scale))
    for framework in map(octavo_registry.framework, ("torch", "jax")):
        given = [None if a is None else framework.from_numpy(a) for a in (numbers, sizes, scale)]
        got = framework.quantize(given[0], spec, given[1], seed=7, scale=given[2])
        _assert_same_planes(_bits(framework, got, sizes), want, f"{framework.name}, {operand} in {name}")


@pytest.mark.parametrize(("name", "operand"), [("fp8-current", "x"), ("nvfp4", "dy")])
def test_xla_makes_the_codes_of_the_definition(name: str, operand: str, rng: np.random.Generator) -> None:
    """As users have it. The suite sees all others of the reference's codes, in programs that LLVM has not optimized."""
    spec = octavo.recipe(name).quantizer(operand)
    assert spec is not None
    numbers = (rng.standard_normal((ROWS, 80)) * np.exp2(rng.integers(-8, 8, (ROWS, 80)))).astype(np.float32)
    numbers[SIZES.sum() :] = np.nan
    got = jax.jit(lambda x: octavo_jax.quantize(x, spec, SIZES, seed=7, backend="jax-reference"))(numbers)
    want = octavo_numerics.valid(octavo_numerics.quantize(numbers, spec, SIZES, seed=7))
    _assert_same_planes(_bits(octavo_registry.framework("jax"), got, SIZES), want, f"{operand} in {name}")


@pytest.mark.parametrize("name", ["fp8-row", "fp8-block", "mxfp8", "nvfp4"])
def test_fused_quantizers_give_the_bits_of_what_they_rounded(name: str, rng: np.random.Generator) -> None:
    """XLA as users have it fuses an activation with its quantizer, and still rounds between them."""
    spec = octavo.recipe(name).quantizer("x")
    assert spec is not None
    numbers = rng.standard_normal((ROWS, 160)).astype(np.float32)
    numbers[SIZES.sum() :] = np.nan

    @jax.jit
    def in_jax(x: jax.Array, sizes: jax.Array) -> Any:
        return octavo_jax.act_quantize(x, spec, sizes, activation="swiglu", seed=7, backend="jax-reference")

    got = {
        "torch": octavo_torch.act_quantize(
            torch.from_numpy(numbers), spec, torch.from_numpy(SIZES), activation="swiglu", seed=7, wanted=("activated",)
        ),
        "jax": in_jax(jnp.asarray(numbers), jnp.asarray(SIZES)),
    }
    for framework in map(octavo_registry.framework, got):
        tensor, extras = got[framework.name]
        rounded = framework.to_numpy(extras.activated)
        want = octavo_numerics.valid(octavo_numerics.quantize(rounded, spec, SIZES, seed=7))
        _assert_same_planes(_bits(framework, tensor, SIZES), want, f"{framework.name}, {name}")


@pytest.mark.parametrize("name", ROUTERS)
def test_every_framework_chooses_the_same_experts(name: str, rng: np.random.Generator) -> None:
    """A sampler's choices are those of the trainer that replays them, ties included; weights are the definition's."""
    rule = ROUTERS[name]
    # Steps of a quarter tie often, in every dtype alike. Sums of scores must not: of one sign, because sigmoid(a) +
    # sigmoid(-a) is 1 for every a, and with one bias per group of experts, because a bias fits either of two scores.
    logits = (rng.integers(1, 18, (65, 16)) / 4).astype(np.float32)
    bias = rng.permutation(rng.standard_normal(2).repeat(2)).repeat(4).astype(np.float32)
    wanted = octavo_numerics.choose_experts(logits, octavo_numerics.RouterRule(4, **rule), bias)
    in_torch = octavo_torch.choose_experts(torch.from_numpy(logits), 4, bias=torch.from_numpy(bias), **rule)
    in_jax = octavo_jax.choose_experts(logits, 4, bias=bias, **rule)
    for choice in (in_torch, in_jax):
        assert np.array_equal(np.asarray(choice.choices), wanted.choices)
        assert np.array_equal(np.asarray(choice.counts), wanted.counts)
        # sixteen units of fp32: a sum of at most 16 scores, a quotient, and functions that are right to a unit or two
        np.testing.assert_allclose(np.asarray(choice.weights), wanted.weights, rtol=2**-20)


def test_lean_moe_layers_agree(rng: np.random.Generator) -> None:
    """y and all gradients of the lean form, whose kept rows decide the last digits of E4M3: one form, one definition,
    with biases, of which the choices' weights multiply the second.

    x and the first weights are small integers, so that fc1's result is exact and its codes are the same bits. What
    follows are float32 sums in each framework's own order: three in a row, of 48 terms or fewer, which differ by
    4 sqrt(48) roundings of 2^-24 each (`octavo_numerics.error_bound`, T1), of results whose addends may be four times
    as large as the largest of them.
    """
    tokens, k, experts, width, hidden = 24, 2, 3, 16, 48
    x, w1 = rng.integers(-4, 5, (tokens, width)), rng.integers(-4, 5, (experts, 2 * hidden, width)) / 16
    w2, dy = rng.standard_normal((experts, width, hidden)), rng.standard_normal((tokens, width))
    weights = rng.random((tokens, k))
    biases = rng.integers(-4, 5, (experts, 2 * hidden)) / 16, rng.standard_normal((experts, width))
    choices = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)])
    given = [np.asarray(one, np.float32) for one in (x, w1, w2, weights, *biases)]

    leaves = [torch.from_numpy(one).requires_grad_() for one in given]
    y = octavo_torch.moe_mlp(
        leaves[0], torch.from_numpy(choices), leaves[3], leaves[1], leaves[2], bias1=leaves[4], bias2=leaves[5],
        recipe=None, form="lean",
    )  # fmt: skip
    in_torch = [y.detach(), *torch.autograd.grad(y, leaves, torch.from_numpy(dy).float())]

    def layer(x: Any, w1: Any, w2: Any, weights: Any, bi: Any, bo: Any) -> Any:
        routing = octavo_jax.moe.arrange(jnp.asarray(choices), weights, experts)
        kernels = jnp.swapaxes(w1, 1, 2), jnp.swapaxes(w2, 1, 2)
        return octavo_jax.moe.routed_mlp(x, routing, *kernels, bi=bi, bo=bo, recipe=None, form="lean")

    result, pull = jax.vjp(layer, *given)
    in_jax = [result, *pull(jnp.asarray(dy, jnp.float32))]
    for ours, theirs in zip(in_jax, in_torch, strict=True):
        wanted = np.asarray(theirs, np.float64)
        off = np.abs(np.asarray(ours, np.float64) - wanted).max()
        assert off <= 3 * 4 * 48**0.5 * 2.0**-24 * 4 * np.abs(wanted).max()


def test_moe_layers_are_the_same_bits(rng: np.random.Generator) -> None:
    """y and all gradients of a layer as each framework has it by default, in MXFP8 with biases: a run that began in one
    continues in the other. JAX once weighed the experts' results, and PyTorch their activations.

    Small integers, weights in quarters and the square of ReLU, so that sums are exact in float32, in whatever order.
    """
    tokens, k, experts, width, hidden = 24, 2, 3, 32, 32
    x, dy = rng.integers(-2, 3, (tokens, width)), rng.integers(-2, 3, (tokens, width))
    w1, w2 = rng.integers(-1, 2, (experts, hidden, width)), rng.integers(-1, 2, (experts, width, hidden))
    biases = rng.integers(-2, 3, (experts, hidden)), rng.integers(-2, 3, (experts, width))
    weights = rng.integers(1, 4, (tokens, k)) / 4
    choices = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)])
    given = [np.asarray(one, np.float32) for one in (x, w1, w2, weights, *biases)]
    how: dict[str, Any] = {"recipe": octavo.MXFP8(), "activation": "relu2"}

    leaves = [torch.from_numpy(one).requires_grad_() for one in given]
    layer_of = partial(octavo_torch.moe_mlp, bias1=leaves[4], bias2=leaves[5], **how)
    y = layer_of(leaves[0], torch.from_numpy(choices), leaves[3], leaves[1], leaves[2])
    in_torch = [y.detach(), *torch.autograd.grad(y, leaves, torch.from_numpy(dy).float())]

    def layer(x: Any, w1: Any, w2: Any, weights: Any, bi: Any, bo: Any) -> Any:
        routing = octavo_jax.moe.arrange(jnp.asarray(choices), weights, experts)
        return octavo_jax.moe.routed_mlp(
            x, routing, jnp.swapaxes(w1, 1, 2), jnp.swapaxes(w2, 1, 2), bi=bi, bo=bo, **how
        )

    result, pull = jax.vjp(layer, *given)
    for ours, theirs in zip([result, *pull(jnp.asarray(dy, jnp.float32))], in_torch, strict=True):
        assert np.array_equal(np.asarray(ours), theirs.numpy())


@pytest.mark.parametrize("output_dtype", [None, "bfloat16", "float16"])
def test_gradients_of_x_keep_its_digits(output_dtype: octavo.DType | None, rng: np.random.Generator) -> None:
    """A recipe rounds y to its output_dtype, and dx to x's dtype alone: in both frameworks.

    Integers, so that every sum is exact in float32 and most are not in 16 bits.
    """
    recipe = octavo.HighPrecision(output_dtype=output_dtype)
    sizes, k, n = [5, 0, 9], 24, 16
    x, w = rng.integers(-9, 10, (sum(sizes), k)), rng.integers(-999, 1000, (len(sizes), n, k))
    dy = rng.integers(-99, 100, (sum(sizes), n))
    ends = np.cumsum(sizes)
    wanted = np.concatenate([dy[end - size : end] @ of for of, size, end in zip(w, sizes, ends, strict=True)])

    leaf = torch.from_numpy(x).float().requires_grad_()
    y = octavo_torch.grouped_linear(leaf, torch.from_numpy(w).float(), sizes, recipe=recipe)
    (in_torch,) = torch.autograd.grad(y, leaf, torch.from_numpy(dy).to(y.dtype))
    kernel = jnp.swapaxes(jnp.asarray(w, jnp.float32), 1, 2)
    result, pull = jax.vjp(
        lambda x: octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe), jnp.asarray(x, jnp.float32)
    )
    (in_jax,) = pull(jnp.asarray(dy, result.dtype))
    assert str(y.dtype).endswith(str(result.dtype))
    for dx in (in_torch.numpy(), np.asarray(in_jax)):
        assert dx.dtype == np.float32
        assert np.array_equal(dx, wanted)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_framework_orders_what_is_no_number(name: str, rng: np.random.Generator) -> None:
    """NaN of either sign comes first, then infinity, and zeros of both signs tie: a token goes to the same experts.

    A step whose logits are broken is looked into in one framework and repeated in another.
    """
    rule = ROUTERS[name]
    kinds = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 3.0], np.float32)  # no two sums of scores tie
    logits = kinds[rng.integers(0, len(kinds), (200, 16))]
    if name != "softmax":  # a score of infinity may be NaN, which the logit is not
        logits = np.where(np.isinf(logits), np.float32(2), logits)
    bias = np.zeros(16, np.float32) if "groups" in rule else None
    wanted = octavo_numerics.choose_experts(logits, octavo_numerics.RouterRule(4, **rule), bias).choices
    in_torch = octavo_torch.choose_experts(
        torch.from_numpy(logits), 4, bias=None if bias is None else torch.from_numpy(bias), **rule
    )
    assert np.array_equal(in_torch.choices.numpy(), wanted)
    assert np.array_equal(np.asarray(octavo_jax.choose_experts(logits, 4, bias=bias, **rule).choices), wanted)
