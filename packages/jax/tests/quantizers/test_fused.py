"""act_quantize, dact_quantize, norm_quantize: who serves them, what is composed, names, bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_numerics
import octavo_registry
from octavo import QuantizerSpec
from octavo_jax.counting import count_runs
from octavo_jax.dispatch.device import device_of
from octavo_jax.functions.activations import activate
from octavo_jax.functions.norms import normalize
from octavo_jax.mlp.mlp import grouped_mlp
from octavo_jax.quantizers.functional import dequantize, quantize
from octavo_jax.quantizers.fused import act_quantize, dact_quantize, norm_quantize
from octavo_jax.reference.backend import ReferenceBackend
from octavo_registry import BackendCard, Bound, Capability, Request, hookimpl

M, F = 40, 32
SIZES = np.array([17, 0, 15], np.int32)
ROW = QuantizerSpec(format="e4m3", scaling="row", power_of_two=True)


class _Partial:
    """The reference backend's functions under another name, some operations of them; counts what it binds."""

    def __init__(self, name: str, ops: set[str], priority: int) -> None:
        here = device_of(np.ones(1)).kind
        row = Capability(ops=frozenset(ops), recipes=frozenset({"row"}), framework="jax", device=here)  # type: ignore[arg-type]
        self.card = BackendCard(name=name, api_level=5, priority=priority, capabilities=(row,))
        self.bound: list[str] = []

    @hookimpl
    def octavo_backends(self) -> tuple[BackendCard, ...]:
        return (self.card,)

    @hookimpl
    def octavo_load(self, name: str) -> _Partial | None:
        return self if name == self.card.name else None

    def refuses(self, request: Request) -> str | None:
        return None

    def bind(self, request: Request) -> Bound:
        self.bound.append(request.op)
        return ReferenceBackend().bind(request)


@pytest.fixture
def register() -> Iterator[Any]:
    """`register(name, ops, priority)`: a partial backend for one test."""
    made: list[str] = []

    def add(name: str, ops: set[str], priority: int = 0) -> _Partial:
        backend = _Partial(name, ops, priority)
        octavo_registry.register(backend, name)
        made.append(name)
        return backend

    yield add
    for name in made:
        octavo_registry.unregister(name)


def _rows(rng: np.random.Generator, columns: int) -> np.ndarray:
    x: np.ndarray = rng.standard_normal((M, columns)).astype(np.float32)
    x[SIZES.sum() :] = np.nan
    return x


def test_bits_are_the_quantizer_s_of_the_rounded_array(rng: np.random.Generator, as_definition: Any) -> None:
    """Each of the three: what it says it quantized is the function's result, and its codes are the definition's."""
    x, dy, gamma = _rows(rng, 2 * F), _rows(rng, F), rng.standard_normal(F).astype(np.float32)
    probs = jnp.asarray(rng.random(M), jnp.float32)
    how: dict[str, Any] = {"backend": "jax-reference"}

    @jax.jit
    def functions(x: Any, dy: Any) -> Any:
        activated, pull = jax.vjp(lambda x: activate(x, "swiglu", probs=probs), x)
        return {"act": activated, "dact": pull(dy)[0], "norm": normalize(dy, gamma)}

    @jax.jit
    def fused(x: Any, dy: Any) -> Any:
        of: dict[str, Any] = {"activation": "swiglu", "probs": probs, **how}
        return {
            "act": act_quantize(x, ROW, SIZES, **of),
            "dact": dact_quantize(dy, x, ROW, SIZES, **of),
            "norm": norm_quantize(dy, gamma, ROW, SIZES, **how),
        }

    made = fused(x, dy)
    wanted = {name: (array, made[name]) for name, array in functions(x, dy).items()}
    for name, (array, (q, extras)) in wanted.items():
        assert np.array_equal(array, extras.activated, equal_nan=True), name
        expected = octavo_numerics.quantize(np.asarray(extras.activated), ROW, SIZES)
        mine, theirs = octavo_numerics.valid(as_definition(q)), octavo_numerics.valid(expected)
        for plane in theirs:
            assert np.array_equal(mine[plane].view(np.uint8), theirs[plane].view(np.uint8)), f"{name} {plane}"
    dbias = np.asarray(wanted["dact"][1][1].dbias)
    assert not dbias[1].any()
    assert np.isfinite(dbias).all()


def test_every_plane_is_named_once() -> None:
    """Two planes of payload and scale; nothing else carries the name."""
    spec = QuantizerSpec(**{**dict(ROW), "checkpoint_name": "mine"})
    x = jnp.ones((M, 2 * F))

    def run(x: Any) -> Any:
        return act_quantize(x, spec, activation="swiglu", backend="jax-reference")

    text = str(jax.make_jaxpr(run)(x))
    assert text.count("name[name=mine]") == 4


def _mlp(**how: Any) -> Any:
    recipe, ones = octavo.RowScaling(), jnp.ones
    x, wi, wo = ones((M, F)), ones((3, F, 2 * F)) / F, ones((3, F, F)) / F

    def loss(x: Any, wi: Any, wo: Any) -> Any:
        return grouped_mlp(x, wi, wo, jnp.asarray(SIZES), recipe=recipe, **how).sum()

    return count_runs(jax.grad(loss, argnums=(0, 1, 2)), x, wi, wo)


def test_composed_where_nothing_serves_it_fused(register: Any) -> None:
    """A backend that quantizes and multiplies, and no more: the activation is composed with its quantizer."""
    backend = register("plain-ops", {"quantize", "fprop", "dgrad", "wgrad"})
    runs = _mlp(backend="plain-ops")
    assert (runs.quantize, runs.by_name["octavo_quantize_row"]) == (6, 6)
    assert set(backend.bound) == {"quantize", "fprop", "dgrad", "wgrad"}
    x = jnp.ones((M, 2 * F))
    q, extras = act_quantize(x, ROW, SIZES, activation="swiglu", backend="plain-ops")
    same, _ = act_quantize(x, ROW, SIZES, activation="swiglu", backend="jax-reference")
    assert np.array_equal(q.rowwise, same.rowwise)
    assert extras.dbias is None


def test_a_backend_of_fused_forms_alone_is_used(register: Any) -> None:
    """What computes no plain quantizer serves the fused one, beside another backend's GEMMs."""
    backend = register("fused-only", {"act_quantize", "dact_quantize"}, priority=50)
    _mlp(backend=["fused-only", "jax-reference"])
    assert set(backend.bound) == {"act_quantize", "dact_quantize"}


def test_the_quantizer_s_choice_decides(register: Any) -> None:
    """A backend that could quantize, but comes second at that, does not get the fused form by its being alone there."""
    first = register("first", {"quantize", "fprop", "dgrad", "wgrad"}, priority=60)
    second = register("second", {"quantize", "act_quantize"}, priority=50)
    act_quantize(jnp.ones((M, 2 * F)), ROW, activation="swiglu", backend=["first", "second"])
    assert "quantize" in first.bound
    assert second.bound == ["act_quantize"]  # bound to be asked, and passed over


def test_no_derivative_is_made_up() -> None:
    """Differentiating a fused quantizer is refused with a sentence, not zeros: in its rows and in what they meet. So is
    what reads codes and scales."""
    rows, probs, gamma = jnp.ones((M, F)), jnp.ones(M), jnp.ones(F)
    how: dict[str, Any] = {"activation": "silu", "backend": "jax-reference"}
    calls: dict[Any, tuple[Any, ...]] = {
        lambda x, probs: act_quantize(x, ROW, probs=probs, **how): (rows, probs),
        lambda dy, x, probs: dact_quantize(dy, x, ROW, probs=probs, **how): (rows, rows, probs),
        lambda x, gamma, beta: norm_quantize(x, gamma, ROW, beta=beta, norm="layer", backend="jax-reference"): (
            rows,
            gamma,
            gamma,
        ),
    }
    for call, given in calls.items():
        for argument in range(len(given)):
            with pytest.raises(TypeError, match="codes have no derivative"):
                jax.grad(lambda *given, call=call: call(*given)[0].rowwise_scale.sum(), argument)(*given)
    q = quantize(rows, ROW, backend="jax-reference")
    for plane in ("rowwise", "rowwise_scale"):
        with pytest.raises(TypeError, match="codes have no derivative"):
            jax.grad(lambda part, plane=plane: dequantize(replace(q, **{plane: part})).sum())(getattr(q, plane))


X, ONES = jnp.ones((8, 32)), jnp.ones(32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: act_quantize(X[0], ROW, activation="silu"), r"x has shape \[32\]; it is rows \[M, C\]"),
        (lambda: act_quantize(X[:, :31], ROW, activation="geglu"), r"x \[8, 31\] has 31 columns; geglu needs 2 F"),
        (lambda: act_quantize(X, ROW, [9], activation="silu"), "group_sizes sum to 9"),
        (lambda: act_quantize(X, ROW, ONES[:0].astype(int), activation="silu"), "there are 0 groups"),
        (lambda: act_quantize(X, ROW, activation="silu", scale=ONES[:1]), "scale was given"),
        (lambda: dact_quantize(X, X, ROW, activation="swiglu"), r"dy has shape \[8, 32\] .* needs \[8, 16\]"),
        (lambda: norm_quantize(X, ONES[:8], ROW), r"gamma has shape \[8\]"),
        (
            lambda: act_quantize(
                X, QuantizerSpec(format="e2m1", scaling="nvfp4", rounding="stochastic"), activation="silu"
            ),
            "seed is None and rounding is 'stochastic'",
        ),
    ],
)
def test_arguments_are_refused_by_name(call: Any, message: str) -> None:
    """Like `quantize`'s."""
    with pytest.raises(ValueError, match=message):
        call()
