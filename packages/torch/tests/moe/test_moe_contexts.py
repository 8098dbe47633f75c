"""moe_mlp where other machinery runs it: compiled, checkpointed, under autocast, in transforms, postponed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from moe_layers import FORMS, REFERENCE, C, F, G, K, N, T, assert_equal, composed, draw, states_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from octavo import MXFP8, NVFP4, BlockScaling, DelayedScaling, NoBackendError
from octavo_torch import DelayedWgrad, MoE, moe_mlp
from octavo_torch.moe import moe
from octavo_torch.moe.call import MoeCall
from octavo_torch.scaling.seeds import SeedCounter

SAME_BITS = tuple(form for form in FORMS if form != "lean")


def gradients(y: Tensor, given: dict[str, Tensor]) -> list[Tensor]:
    return [y, *torch.autograd.grad(y, list(given.values()), torch.ones_like(y))]


@pytest.mark.parametrize("form", ["standard", "lean"])
def test_one_graph_with_the_bits_of_eager(form: str, rng: np.random.Generator) -> None:
    """fullgraph forward and backward; a compiler does not keep the rows that backward makes again."""
    given, choices = draw(rng)
    call: dict[str, Any] = {"recipe": MXFP8(), "form": form, "weight_codes": "remake", "backend": REFERENCE}
    expected = gradients(moe_mlp(choices=choices, **given, **call), given)
    torch.compiler.reset()
    compiled = torch.compile(lambda **given: moe_mlp(**given, **call), fullgraph=True, backend="aot_eager")
    assert_equal(gradients(compiled(choices=choices, **given), given), expected)
    kept: list[tuple[int, ...]] = []
    with saved_tensors_hooks(lambda value: (kept.append(tuple(value.shape)), value)[1], lambda value: value):
        compiled(choices=choices, **given)
    rows = choices.numel()
    for columns in (K, F, N):
        assert (rows, columns) not in kept
    assert (rows, 2 * F) in kept


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(reentrant: bool, rng: np.random.Generator) -> None:
    """Gradients, amax histories and seeds are those of a run without."""
    for recipe in (DelayedScaling(history=4), NVFP4()):
        given, choices = draw(rng)
        states, results = states_of(recipe), []
        for wrapped in (False, True):
            own, counter = copy.deepcopy(states), torch.tensor(0)
            seed = SeedCounter(torch.tensor(5), counter) if recipe.stochastic else None

            def layer(x: Tensor, weights: Tensor, own: Any = own, seed: Any = seed, given: Any = given) -> Tensor:
                call = MoeCall(recipe, REFERENCE, seed=seed, states=own)  # noqa: B023
                routed = moe.Routed(choices, weights, given["bias1"], given["bias2"])  # noqa: B023
                return moe.run(x, given["w1"], given["w2"], routed, call)

            arguments = given["x"], given["weights"]
            y = checkpoint(layer, *arguments, use_reentrant=reentrant) if wrapped else layer(*arguments)
            y.sum().backward()
            grads = [leaf.grad for leaf in given.values() if leaf.grad is not None]
            for leaf in given.values():
                leaf.grad = None
            results.append([y.detach(), *grads, counter, *(state.history for state in own or ())])
        assert len(results[0]) > len(given)
        assert_equal(results[1], results[0])


def test_autocast(rng: np.random.Generator) -> None:
    """fp32 operands run in autocast's dtype, as if x and the weights had been cast; gradients come back in fp32."""
    given, choices = draw(rng)
    wide = {name: value.detach().float().requires_grad_() for name, value in given.items()}
    call: dict[str, Any] = {"recipe": BlockScaling(), "backend": REFERENCE}
    with torch.autocast("cpu", torch.bfloat16):
        y = moe_mlp(choices=choices, **wide, **call)
    narrow = {name: value.bfloat16() if name in ("x", "w1", "w2") else value for name, value in wide.items()}
    assert_equal(gradients(y, wide), gradients(composed(narrow, choices, **call), wide))
    assert y.dtype is torch.bfloat16


@pytest.mark.parametrize("compiled", [False, True], ids=["backward inside", "compiled, called inside"])
def test_a_routers_gradients_are_products_in_fp32_in_autocast(compiled: bool) -> None:
    """A backward that runs inside of autocast multiplies as one outside does; a compiled graph's is traced inside."""
    module = MoE(G, K, F, C, recipe="fp8-block", dtype=torch.float32, seed=1, backend=REFERENCE)
    x, dy = torch.randn(T, K).requires_grad_(), torch.randn(T, K).bfloat16()
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = call(x), module(x)
    leaves = [x, *module.parameters()]
    with torch.autocast("cpu", torch.bfloat16, enabled=not compiled):
        grads = torch.autograd.grad(y, leaves, dy)
    assert_equal([y, *grads], [expected, *torch.autograd.grad(expected, leaves, dy)])


def test_a_routers_gradients_where_its_forward_ran_without_autocast() -> None:
    """A model that switches autocast off around the layer runs its backward where the caller stands: inside."""
    module = MoE(G, K, F, C, recipe="fp8-block", dtype=torch.float32, seed=1, backend=REFERENCE)
    x, dy = torch.randn(T, K).requires_grad_(), torch.randn(T, K)
    leaves = [x, *module.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            y = module(x)
        grads = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    assert_equal(grads, torch.autograd.grad(module(x), leaves, dy))


def test_functional_gradient(rng: np.random.Generator) -> None:
    """torch.func.grad gives the gradients of backward; a second derivative is refused."""
    given, choices = draw(rng)
    call: dict[str, Any] = {"choices": choices, "recipe": BlockScaling(), "backend": REFERENCE}
    expected = gradients(moe_mlp(**given, **call), given)[1:]
    made = torch.func.grad(lambda own: moe_mlp(**own, **call).sum())(given)
    assert_equal(list(made.values()), expected)
    with pytest.raises(NotImplementedError, match="second"):
        torch.autograd.grad(moe_mlp(**given, **call).sum(), given["x"], create_graph=True)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_meta_device_is_refused_by_its_name(autocast: bool) -> None:
    """A model that still has to be given memory; torch's own sentence was "unknown device type for autocast"."""
    layer = MoE(G, K, F, C, recipe=MXFP8(), device="meta")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.raises(NoBackendError, match="on meta"):
        layer(torch.empty(T, K, device="meta"))


@pytest.mark.parametrize("form", SAME_BITS)
def test_postponed_weight_gradients(form: str, rng: np.random.Generator) -> None:
    """backward_dw gives the gradients of both weights, with the bits of a backward that computes them."""
    given, choices = draw(rng)
    call: dict[str, Any] = {"choices": choices, "recipe": BlockScaling(), "form": form, "backend": REFERENCE}
    expected = gradients(moe_mlp(**given, **call), given)[1:]
    store = DelayedWgrad()
    y = moe_mlp(**given, **call, delayed_wgrad=store)
    y.backward(torch.ones_like(y))
    assert given["w1"].grad is None
    store.backward_dw()
    assert_equal([leaf.grad for leaf in given.values() if leaf.grad is not None], expected)


def test_stochastic_gradients_are_drawn_by_the_row_of_the_permuted_order(rng: np.random.Generator) -> None:
    """A SeedCounter moves on once a backward; forms draw the same numbers as the composed operations."""
    given, choices = draw(rng)
    expected = gradients(composed(given, choices, recipe=NVFP4(), seed=12, backend=REFERENCE), given)
    routed = moe.Routed(choices, given["weights"], given["bias1"], given["bias2"])
    for form in SAME_BITS:
        counter = torch.tensor(0)
        call = MoeCall(NVFP4(), REFERENCE, seed=SeedCounter(torch.tensor(12), counter), form=form)  # type: ignore[arg-type]
        y = moe.run(given["x"], given["w1"], given["w2"], routed, call)
        assert_equal(gradients(y, given), expected)
        assert counter == 1
