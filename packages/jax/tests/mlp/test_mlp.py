"""grouped_mlp and layernorm_mlp: gradients against float64, the bits of the unfused functions, states, residuals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
from octavo_jax.counting import count_runs, unnamed_planes
from octavo_jax.functions.activations import activate
from octavo_jax.functions.norms import normalize
from octavo_jax.mlp.mlp import grouped_mlp, layernorm_mlp
from octavo_jax.policies import save_quantized
from octavo_jax.scaling.seeds import second_stream, seed_words

M, K, F, N, G = 48, 32, 48, 32, 3
SIZES = np.array([20, 0, 17], np.int32)
USED = int(SIZES.sum())
REFERENCE: dict[str, Any] = {"backend": "jax-reference"}
NAMES = ("x", "wi", "wo", "bi", "bo", "probs", "bo_scales")


def _arrays(rng: np.random.Generator, dtype: Any) -> dict[str, np.ndarray]:
    """Arguments by name, and dy; NaN in rows past the sum."""

    def draw(*shape: int) -> np.ndarray:
        return np.asarray(rng.standard_normal(shape).astype(dtype))

    arrays = {
        "x": draw(M, K),
        "wi": draw(G, K, 2 * F) / np.asarray(math.sqrt(K), dtype),
        "wo": draw(G, F, N) / np.asarray(math.sqrt(F), dtype),
        "bi": draw(G, 2 * F),
        "bo": draw(G, N),
        "probs": rng.random(M).astype(np.float32),
        "bo_scales": rng.standard_normal(M).astype(np.float32),
        "dy": draw(M, N),
    }
    for name in ("x", "probs", "bo_scales", "dy"):
        arrays[name][USED:] = np.nan
    return arrays


def _both(function: Callable[..., Any], arrays: dict[str, np.ndarray], names: tuple[str, ...] = NAMES) -> Any:
    """(y, gradients by name) of `function(**arrays)` in one compiled program."""

    @jax.jit
    def run(given: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda given: function(**given), given)
        return y, pull(dy)[0]

    return run({name: arrays[name] for name in names}, arrays["dy"])


def _exact(a: dict[str, np.ndarray], *, terms: bool = False) -> dict[str, np.ndarray]:
    """float64 y and gradients of a SwiGLU MLP by name; `terms`: sums of absolute products instead."""
    size = np.abs if terms else np.asarray
    w = {name: size(array.astype(np.float64)) for name, array in a.items()}
    out: dict[str, np.ndarray] = {name: np.zeros(a[name].shape) for name in NAMES} | {"y": np.zeros((M, N))}
    starts = np.cumsum(SIZES) - SIZES
    for g, (start, count) in enumerate(zip(starts, SIZES, strict=True)):
        rows = slice(start, start + count)
        y1 = w["x"][rows] @ w["wi"][g] + w["bi"][g]
        gate, up = np.split(y1, 2, 1)
        s = 1 / (1 + np.exp(-gate))
        # with terms: silu(|x|) is at most |x|, and so is the rest of its slope at most 1.1
        value, slope = (gate, np.full_like(gate, 1.1)) if terms else (gate * s, s * (1 + gate * (1 - s)))
        p, scales = w["probs"][rows, None], w["bo_scales"][rows, None]
        out["y"][rows] = (value * up * p) @ w["wo"][g] + scales * w["bo"][g]
        dy = w["dy"][rows]
        da = dy @ w["wo"][g].T
        dy1 = np.concatenate([da * p * slope * up, da * p * value], 1)
        out["x"][rows], out["wi"][g], out["bi"][g] = dy1 @ w["wi"][g].T, w["x"][rows].T @ dy1, dy1.sum(0)
        out["wo"][g], out["bo"][g] = (value * up * p).T @ dy, (scales * dy).sum(0)
        out["probs"][rows], out["bo_scales"][rows] = (da * value * up).sum(1), dy @ w["bo"][g]
    return out


def test_gradients_against_float64(rng: np.random.Generator) -> None:
    """High precision in fp32, an empty group, a NaN tail (faults.md 8 to 12): every gradient, zeros in every tail."""
    a = _arrays(rng, np.float32)
    y, gradients = _both(lambda x, wi, wo, **rest: grouped_mlp(x, wi, wo, SIZES, recipe=None, **REFERENCE, **rest), a)
    exact, terms = _exact(a), _exact(a, terms=True)
    # three products and an activation in a row, each within 4 sqrt(n) 2^-24 of its terms (docs/numerics)
    share = 4 * 4 * math.sqrt(K + F + M) * 2.0**-24
    for name, actual in {"y": y, **gradients}.items():
        assert np.all(np.abs(actual - exact[name]) <= share * terms[name]), name
    for name, rows in {"y": y, **{name: gradients[name] for name in ("x", "probs", "bo_scales")}}.items():
        assert not np.asarray(rows[USED:]).any(), name
    for name in ("wi", "wo", "bi", "bo"):
        assert not np.asarray(gradients[name][1]).any(), name


def _assert_same(fused: Any, unfused: Any) -> None:
    for (path, one), other in zip(jax.tree.leaves_with_path(fused), jax.tree.leaves(unfused), strict=True):
        assert one.dtype == other.dtype, path
        assert np.array_equal(one, other), path


@pytest.mark.parametrize("kind", ["fp8-current", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_the_bits_of_the_unfused_functions(kind: str, rng: np.random.Generator) -> None:
    """grouped_dense, activate, grouped_dense: equal bits in y and in every gradient, fc2's seed being seed XOR 2^63.

    packages/jax-native has this test for the other recipes, their slots and states, with kernels that compile at once.
    """
    recipe, a = octavo.recipe(kind), _arrays(rng, jnp.bfloat16)
    seeds = (7, 7 ^ 1 << 63) if recipe.stochastic else (None, None)

    def unfused(x: Any, wi: Any, wo: Any, bi: Any, bo: Any, probs: Any) -> Any:
        how = {"recipe": recipe, **REFERENCE}
        y1 = octavo_jax.grouped_dense(x, wi, SIZES, bias=bi, seed=seeds[0], **how)
        activated = activate(y1, "swiglu", probs=probs)
        return octavo_jax.grouped_dense(activated, wo, SIZES, bias=bo, seed=seeds[1], **how)

    def fused(x: Any, wi: Any, wo: Any, **rest: Any) -> Any:
        return grouped_mlp(x, wi, wo, SIZES, recipe=recipe, seed=seeds[0], **REFERENCE, **rest)

    names = tuple(name for name in NAMES if name != "bo_scales")  # which grouped_dense does not take
    _assert_same(_both(fused, a, names), _both(unfused, a, names))


def test_bytes_that_the_backward_pass_keeps() -> None:
    """mlp.py's table: a plane of x, of the activated operand and of each kernel, and fc1's result in bf16."""
    m, k, f, n = 1024, 128, 256, 128
    avals = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, k), (1, k, 2 * f), (1, f, n))]

    def layer(x: Any, wi: Any, wo: Any) -> Any:
        return grouped_mlp(x, wi, wo, jnp.full(1, m), recipe=octavo.RowScaling(), **REFERENCE)

    saved = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(layer, *a)[1], *avals))
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in saved)
    codes = m * k + m * f + k * 2 * f + f * n
    scales = 4 * (k + f + k + 2 * f + f + n)
    assert codes + 2 * m * 2 * f <= total <= codes + 2 * m * 2 * f + scales + 1024


def test_quantizations_and_products_of_a_step() -> None:
    """Six quantizations and six products; with saved planes a remat adds fc1's product, and nothing is unnamed."""
    avals = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((M, K), (K,), (K, 2 * F), (F, N))]

    def layer(x: Any, gamma: Any, wi: Any, wo: Any) -> Any:
        return layernorm_mlp(x, gamma, wi, wo, recipe=octavo.CurrentScaling(), **REFERENCE)

    def step(policy: Any) -> Any:
        run = jax.checkpoint(layer, policy=policy) if policy else layer
        return jax.value_and_grad(lambda *a: jnp.sum(run(*a)), argnums=(0, 1, 2, 3))

    assert unnamed_planes(layer, *avals) == ()
    for policy, fprops in ((None, 2), (save_quantized(), 3)):
        runs = count_runs(step(policy), *avals)
        assert (runs.quantize, runs.fprop, runs.dgrad, runs.wgrad) == (6, fprops, 2, 2)


def test_normalized_mlp_has_the_bits_of_its_parts(rng: np.random.Generator) -> None:
    """normalize, dense, activate, dense: equal bits in y and every gradient; x keeps its leading axes.

    The parts normalize rows [M, K], as the MLP does: XLA adds up gamma's gradient over two leading axes in another
    order, and rounds it to another bf16 number in one of a hundred draws.
    """
    a = _arrays(rng, jnp.bfloat16)
    gamma = rng.standard_normal(K).astype(jnp.bfloat16)
    how: dict[str, Any] = {"recipe": None, **REFERENCE}
    for name in ("x", "dy"):  # one group of all rows: no tail
        a[name][USED:] = 1
    given = {"x": a["x"].reshape(2, -1, K), "gamma": gamma, "wi": a["wi"][0], "wo": a["wo"][0]}
    given |= {"beta": gamma[::-1].copy(), "bi": a["bi"][0], "dy": a["dy"].reshape(2, -1, N)}
    names = ("x", "gamma", "wi", "wo", "beta", "bi")

    def unfused(x: Any, gamma: Any, wi: Any, wo: Any, beta: Any, bi: Any) -> Any:
        y1 = octavo_jax.grouped_dense(
            normalize(x.reshape(-1, K), gamma, beta, norm="layer"), wi[None], [M], bias=bi[None], **how
        )
        return octavo_jax.grouped_dense(activate(y1, "swiglu"), wo[None], [M], **how).reshape(*x.shape[:-1], N)

    def fused(**arrays: Any) -> Any:
        return layernorm_mlp(**arrays, norm="layer", **how)

    _assert_same(_both(fused, given, names), _both(unfused, given, names))


def test_one_seed_gives_two_streams() -> None:
    """fc2's words are those of seed XOR 2^63: another key of Philox, for host and device seeds."""
    for seed in (5, 2**63 + 5, -1):
        assert np.array_equal(second_stream(seed_words(seed)), seed_words(seed ^ 1 << 63))


def test_forward_alone_and_dtypes() -> None:
    """Forward-only plans make row planes alone; y has preferred_element_type, and x's leading axes."""
    x, wi, wo = jnp.ones((2, 8, K), jnp.bfloat16), jnp.ones((1, K, F)), jnp.ones((1, F, N))

    def run(x: Any) -> Any:
        return grouped_mlp(
            x, wi, wo, [16], activation="relu2", recipe=octavo.MXFP8(), preferred_element_type=jnp.float32, **REFERENCE
        )

    made = jax.eval_shape(run, x)
    assert (made.shape, made.dtype) == ((2, 8, N), jnp.float32)
    assert (count_runs(run, x).quantize, count_runs(run, x).fprop) == (4, 2)
    gradient = jax.eval_shape(jax.grad(lambda x: run(x).sum()), x)
    assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)


def _call(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "x": jnp.ones((M, K)),
        "wi": jnp.ones((G, K, 2 * F)),
        "wo": jnp.ones((G, F, N)),
        "group_sizes": SIZES,
        "recipe": None,
        **REFERENCE,
        **changes,
    }
    return grouped_mlp(given.pop("x"), given.pop("wi"), given.pop("wo"), given.pop("group_sizes"), **given)


STATE = octavo_jax.init_delayed(octavo.DelayedScaling(), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": jnp.ones((M, K + 1))}, r"x has shape \[48, 33\] and wi .* takes K = 32"),
        ({"wi": jnp.ones((G, 2 * F, K))}, r"takes K = 96; swap wi's last two axes: \[\.\.\., 32, 96\]"),
        ({"wi": jnp.ones((K, 2 * F))}, r"wi has shape \[32, 96\]; it is \[G, K, C\], layernorm_mlp takes one matrix"),
        ({"wi": jnp.ones((G, K, 2 * F + 1))}, "has 97 columns; swiglu needs 2 F"),
        ({"activation": "silu"}, r"wo has shape .* with silu needs \[3, 96, N\]"),
        ({"activation": "mish"}, "activation is 'mish'; give one of"),
        ({"bi": jnp.ones((G, F))}, r"bi has shape \[3, 48\]; it is \[3, 96\]"),
        ({"probs": jnp.ones(M, jnp.bfloat16)}, r"probs has shape \[48\] and dtype bfloat16; give one float32 per row"),
        ({"bo_scales": jnp.ones(M)}, "bo_scales was given and bo is None; give the bias that it scales, or neither"),
        ({"bo_scales": jnp.ones(M + 1), "bo": jnp.ones((G, N))}, r"bo_scales has shape \[49\] and dtype float32; .*48"),
        (
            {"bo_scales": jnp.ones(M, jnp.int32), "bo": jnp.ones((G, N))},
            "bo_scales has .* dtype int32; give one float32",
        ),
        ({"group_sizes": [20, 20]}, "group_sizes has 2 entries and wi 3 matrices"),
        ({"wi": jnp.ones((G, K, 2 * F), jnp.int32)}, "wi has dtype int32; it must be"),
        ({"wo": jnp.ones((G, F, N), jnp.int32)}, "wo has dtype int32; it must be"),
        ({"recipe": octavo.NVFP4()}, "seed is None and the recipe rounds stochastically"),
        ({"recipe": octavo.DelayedScaling()}, "state is None and the recipe scales by history"),
        ({"recipe": octavo.DelayedScaling(), "state": STATE}, "state is a DelayedState; give a pair"),
        ({"recipe": octavo.DelayedScaling(), "state": (STATE, STATE)}, "state is for 2 groups and kernel has 3"),
    ],
)
def test_arguments_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    """With what was given and what is needed."""
    with pytest.raises(ValueError, match=message):
        _call(**changes)


def test_forward_mode_is_refused_with_a_sentence() -> None:
    """Rounding has no derivative to push forward."""
    with pytest.raises(TypeError, match=r"grouped_mlp was given to forward-mode differentiation .* use jax\.grad"):
        jax.jvp(lambda x: _call(x=x), (jnp.ones((M, K)),), (jnp.ones((M, K)),))


def test_the_gradients_slope_in_the_probabilities_is_refused() -> None:
    """Codes between the two made zeros of it, which look like an answer."""
    x, probs = jnp.ones((M, K)), jnp.ones(M)

    def slope(probs: Any) -> Any:
        return jnp.sum(jax.grad(lambda x: jnp.sum(_call(x=x, probs=probs, recipe=octavo.MXFP8())))(x))

    with pytest.raises(TypeError, match="codes have no derivative"):
        jax.eval_shape(jax.grad(slope), probs)
