"""A backend that returns something else than its operation does is named where a call is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import octavo
import octavo_jax
import octavo_registry
from octavo import OctavoError
from octavo_jax.plugin import CARD
from octavo_jax.reference.backend import ReferenceBackend
from octavo_registry import BackendCard, hookimpl
from octavo_registry.contract import AnyBound, AnyRequest, Backend

M, K, N, G = 8, 16, 32, 2
RECIPE = octavo.recipe("fp8-current")  # which JAX traces fastest


class Returning(Backend):
    """The reference, whose function of one operation returns what `change` makes of its result."""

    def __init__(self, op: str, change: Callable[[Any], object]) -> None:
        self.op, self.change = op, change
        self.card = CARD.model_copy(update={"name": "returning"})

    @hookimpl
    def octavo_backends(self) -> tuple[BackendCard, ...]:
        return (self.card,)

    @hookimpl
    def octavo_load(self, name: str) -> Backend | None:
        return self if name == "returning" else None

    def refuses(self, request: AnyRequest) -> str | None:
        return None

    def bind(self, request: AnyRequest) -> AnyBound:
        answer: Any = ReferenceBackend().bind(request)
        if request.op != self.op:
            return answer  # type: ignore[no-any-return]
        run = answer.run
        changed = replace(answer, run=lambda *operands, **more: self.change(run(*operands, **more)))
        return changed if request.op != "quantize" else replace(changed, in_two_forms=None)  # type: ignore[no-any-return]


@pytest.fixture
def returning(request: pytest.FixtureRequest) -> Iterator[None]:
    """The backend with the operation and the change of the test's parameters, registered for one test."""
    octavo_registry.register(Returning(*request.param), "returning")
    yield
    octavo_registry.unregister("returning")


def _gradients(x: Any, kernel: Any) -> Any:
    def loss(x: Any, kernel: Any) -> Any:
        y = octavo_jax.grouped_dense(x, kernel, jnp.array([3, 5]), recipe=RECIPE, backend="returning")
        return y.astype(jnp.float32).sum()

    return jax.eval_shape(jax.grad(loss, argnums=(0, 1)), x, kernel)


@pytest.mark.parametrize(
    ("returning", "message"),
    [
        (("fprop", lambda y: y.astype(jnp.float32)), r"float32 \[8, 32\] from fprop, which returns bfloat16 \[8, 32\]"),
        (("fprop", lambda y: (y,)), r"a tuple from fprop, which returns bfloat16 \[8, 32\]"),
        (("dgrad", lambda dx: None), r"a NoneType from dgrad, which returns bfloat16 \[8, 16\]"),
        (("dgrad", lambda dx: dx[:-1]), r"bfloat16 \[7, 16\] from dgrad, which returns bfloat16 \[8, 16\]"),
        (("wgrad", lambda dw: dw.mT), r"bfloat16 \[2, 32, 16\] from wgrad, which returns bfloat16 \[2, 16, 32\]"),
        (("quantize", lambda q: (q, None)), "a tuple from quantize, which returns a GroupedTensor"),
    ],
    indirect=["returning"],
    ids=["dtype", "tuple", "nothing", "rows", "turned", "codes"],
)
def test_a_wrong_result_is_named(returning: None, message: str) -> None:
    """With the backend, the operation, what it returned and what was needed: JAX takes None from dgrad for a gradient
    of zeros, and fp32 in the place of bf16 as it is, both in silence."""
    x, kernel = jnp.ones((M, K), jnp.bfloat16), jnp.ones((G, K, N), jnp.bfloat16)
    with pytest.raises(OctavoError, match=f"the backend returning returned {message}; mend the backend"):
        _gradients(x, kernel)


@pytest.mark.parametrize("returning", [("quantize", lambda q: None)], indirect=True)
def test_codes_that_are_none_are_named(returning: None) -> None:
    """The public quantizer, too."""
    x, spec = jnp.ones((M, K), jnp.bfloat16), RECIPE.quantizer("x")
    assert spec is not None
    with pytest.raises(OctavoError, match="the backend returning returned a NoneType from quantize, which returns a"):
        octavo_jax.quantize(x, spec, backend="returning")
