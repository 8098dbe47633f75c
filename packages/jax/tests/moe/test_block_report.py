"""explain of a MoE block: who quantizes and multiplies, what is read from tokens, and how these reach devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import Array
from jax.sharding import AxisType

import octavo_jax
from octavo import MXFP8, NVFP4, DelayedScaling
from octavo_jax import moe
from octavo_jax.linen import MoE as LinenMoE
from octavo_jax.nnx import MoE as NnxMoE

T, E, C, K, F = 16, 8, 2, 64, 64
BACKEND = "jax-reference"


def arrays() -> tuple[Array, ...]:
    """x [T, K], router [K, E], wi [E, K, 2 F], wo [E, F, K]."""
    shapes = (T, K), (K, E), (E, K, 2 * F), (E, F, K)
    return tuple(jnp.ones(shape, jnp.bfloat16) for shape in shapes)


def report(**options: Any) -> moe.MoeReport:
    """Of the reference backend."""
    return moe.explain(*arrays(), **{"k": C, "backend": BACKEND, "weights_on": "activation", **options})


def test_each_operation_has_a_backend_or_a_reason() -> None:
    """Plans of both layers with their gradients, the fused activation, codes of tokens, and why rows are permuted."""
    told = report(recipe=MXFP8())
    text = str(told)
    assert "fc1\n  grouped linear in mxfp8" in text
    assert f"swiglu's gradient + quantize: fused by {BACKEND}" in text
    assert all(plan is not None for layer in (told.fc1, told.fc2) for _, plan in (*layer.gemms, *layer.quantizers))
    taken = f"rows are permuted first: {BACKEND}'s quantizer takes no tokens"
    once = f"{BACKEND} quantizes each token once, and {BACKEND} reads its codes in"
    assert told.tokens == (
        ("experts", "XLA chooses"),
        ("choices", "XLA sorts them"),
        ("x in fprop", f"{once} fprop"),
        ("x in wgrad", taken),
        ("dy", f"{once} dgrad; for wgrad {taken}"),
        ("y and dx", "XLA sums rows by token"),
    )
    assert told.exchange == ""


@pytest.mark.parametrize(
    ("options", "what", "said"),
    [
        ({"recipe": None}, "x in fprop", f"{BACKEND} reads the tokens in its product"),
        ({"recipe": None, "form": "keep_all"}, "x in wgrad", f"{BACKEND} reads the tokens in its product"),
        ({"recipe": None}, "dy", f"{BACKEND} reads the tokens in its product"),
        ({"recipe": MXFP8(wgrad="high_precision")}, "dy", f"in dgrad; {BACKEND} reads the tokens in wgrad"),
        ({"recipe": NVFP4(dgrad="high_precision")}, "dy", "dgrad reads them in high precision"),
        ({"recipe": NVFP4(), "form": "keep_all"}, "x in wgrad", 'kept from forward: form is "keep_all"'),
        ({"recipe": DelayedScaling(), "weights_on": "output"}, "dy", 'weights_on is "output"'),
    ],
)
def test_what_is_read_and_why_is_named(options: dict[str, Any], what: str, said: str) -> None:
    """A product in high precision, the form, and weights that multiply dy; seeds and states need not be given."""
    assert said in dict(report(**options).tokens)[what]


@pytest.mark.parametrize(
    ("exchange", "said"),
    [
        (moe.Exchange(), "gather, every token to every device and one partial sum back: tokens are on cpu, whose XLA"),
        (moe.Exchange(way="gather"), 'Exchange(way="gather") asks for it'),
    ],
)
@pytest.mark.usefixtures("on_a_cpu")
def test_how_tokens_reach_other_devices(exchange: moe.Exchange, said: str) -> None:
    """Over a mesh each device's plan is told, of its own experts, and the way of the exchange with its reason."""
    if jax.device_count() < 4:
        pytest.skip("fewer than four devices")
    with jax.set_mesh(jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Auto,))):
        told = report(recipe=MXFP8(), sharding=octavo_jax.MeshAxes(ep="ep"), exchange=exchange)
    assert said in told.exchange
    assert told.fc1.fprop.request.groups == E // 4


def test_rows_that_a_mesh_cuts() -> None:
    """Experts along tp are sums over devices, so rows are permuted whatever reads them."""
    if jax.device_count() < 2:
        pytest.skip("one device")
    x, router, wi, wo = arrays()
    how: dict[str, Any] = {"k": C, "recipe": MXFP8(), "activation": "relu2", "backend": BACKEND}
    with jax.set_mesh(jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))):
        told = moe.explain(x, router, wi[..., :F], wo, **how, sharding=octavo_jax.MeshAxes(tp="tp"))
    assert dict(told.tokens)["x and dy"] == (
        "rows are permuted first: a mesh cuts them, or sums stand behind the experts"
    )


def test_modules_tell_the_same() -> None:
    """Flax's modules, with their parameters: nothing of theirs changes, and linen's says how it is called."""
    x, *parameters = arrays()
    options: dict[str, Any] = {"k": C, "recipe": NVFP4(), "weights_on": "activation", "backend": BACKEND}
    in_bf16 = options | {"dtype": jnp.bfloat16}
    wanted = str(report(recipe=NVFP4()))
    ours = NnxMoE(E, K, F, **in_bf16, rngs=nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(ours))
    assert str(ours.explain(x)) == wanted
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, nnx.state(ours)))
    linen = LinenMoE(E, F, **in_bf16)
    variables = {"params": dict(zip(("router", "wi", "wo"), parameters, strict=True))}
    assert str(linen.apply(variables, x, method="explain")) == wanted
    with pytest.raises(ValueError, match=r"no parameters; give those that init returned: module\.apply"):
        linen.apply({}, x, method="explain")


def test_arguments_that_do_not_fit() -> None:
    """Raises as moe_mlp does."""
    x, router, wi, wo = arrays()
    with pytest.raises(ValueError, match=r"x has shape \[16, 64\] and router \[48, 8\]"):
        moe.explain(x, router[:48], wi, wo, k=C, recipe=None)
