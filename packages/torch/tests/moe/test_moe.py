"""moe_mlp: the bits of permute, grouped_mlp and unpermute, whatever is kept, and only the gradients asked for."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from moe_layers import FORMS, RECIPES, REFERENCE, C, G, N, T, assert_equal, composed, draw, states_of

import octavo_registry
from octavo import MXFP8, NVFP4, BlockScaling, DelayedScaling, QuantizerSpec
from octavo_registry.contract import BackendCard, hookimpl
from octavo_torch import DelayedState, moe_mlp, quantize_weight
from octavo_torch.compiler.host_reads import watch_host_reads
from octavo_torch.functions.activations import ACTIVATIONS

SAME_BITS = tuple(form for form in FORMS if form != "lean")


@pytest.mark.parametrize("name", RECIPES)
def test_bits_of_permute_grouped_mlp_and_unpermute(name: str, rng: np.random.Generator) -> None:
    """y, all gradients and delayed scaling's states, in all forms that keep values and with either way of weights."""
    recipe, seed = RECIPES[name], int(rng.integers(0, 1 << 62))
    activation = str(rng.choice(ACTIVATIONS))
    given, choices = draw(rng, activation)
    states = states_of(recipe)
    leaves = list(given.values())
    twins = copy.deepcopy(states)
    expected = composed(given, choices, activation=activation, recipe=recipe, seed=seed, state=twins, backend=REFERENCE)
    dy = torch.randn(T, N).to(expected.dtype)
    wanted = [expected, *torch.autograd.grad(expected, leaves, dy)]
    for form in FORMS:
        for weight_codes in ("keep", "remake"):
            own = copy.deepcopy(states)
            y = moe_mlp(
                choices=choices, activation=activation, recipe=recipe, seed=seed, state=own, form=form,
                weight_codes=weight_codes, backend=REFERENCE, **given,
            )  # fmt: skip
            made = [y, *torch.autograd.grad(y, leaves, dy)]
            if form == "lean":
                assert torch.equal(y, expected)
                assert all(bool(grad.isfinite().all()) for grad in made)
                continue
            assert_equal(made, wanted)
            for state, twin in zip(own or (), twins or (), strict=True):
                assert torch.equal(state.history, twin.history)


@pytest.mark.parametrize("name", RECIPES)
def test_bits_without_biases(name: str, rng: np.random.Generator) -> None:
    """Nobody sums dy's rows, which quantized recipes then do not write: y, gradients and states are as before."""
    recipe = RECIPES[name]
    given, choices = draw(rng)
    given = {key: value for key, value in given.items() if not key.startswith("bias")}
    states, leaves = states_of(recipe), list(given.values())
    twins = copy.deepcopy(states)
    expected = composed(given, choices, recipe=recipe, seed=3, state=twins, backend=REFERENCE)
    dy = torch.randn(T, N).to(expected.dtype)
    wanted = [expected, *torch.autograd.grad(expected, leaves, dy)]
    for form in SAME_BITS:
        own = copy.deepcopy(states)
        y = moe_mlp(choices=choices, recipe=recipe, seed=3, state=own, form=form, backend=REFERENCE, **given)
        assert_equal([y, *torch.autograd.grad(y, leaves, dy)], wanted)
        for state, twin in zip(own or (), twins or (), strict=True):
            assert torch.equal(state.history, twin.history)


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "quantized wgrad"])
@pytest.mark.parametrize("form", FORMS)
def test_only_what_is_asked_for(form: str, name: str, rng: np.random.Generator) -> None:
    """The gradient of one argument alone is that of all of them, and no other is made."""
    given, choices = draw(rng)
    dy = torch.randn(T, N).bfloat16()
    call: dict[str, Any] = {"choices": choices, "recipe": RECIPES[name], "form": form, "backend": REFERENCE}
    every = dict(zip(given, torch.autograd.grad(moe_mlp(**given, **call), list(given.values()), dy), strict=True))
    for wanted in given:
        alone = {key: value.detach().requires_grad_(key == wanted) for key, value in given.items()}
        y = moe_mlp(**alone, **call)
        y.backward(dy)
        assert [key for key, leaf in alone.items() if leaf.grad is not None] == [wanted]
        grad = alone[wanted].grad
        assert grad is not None
        assert torch.equal(grad, every[wanted])
    y = moe_mlp(**given, **call)
    (dx,) = torch.autograd.grad(y, given["x"], dy)  # of a graph with all of them
    assert torch.equal(dx, every["x"])
    with torch.no_grad():
        assert torch.equal(moe_mlp(**given, **call), y)


def test_a_graph_is_walked_twice(rng: np.random.Generator) -> None:
    """What backward makes again, it makes in every backward."""
    given, choices = draw(rng)
    leaves = list(given.values())
    for form in FORMS:
        y = moe_mlp(
            choices=choices, recipe=BlockScaling(), form=form, weight_codes="remake", backend=REFERENCE, **given
        )
        dy = torch.randn(T, N).bfloat16()
        assert_equal(torch.autograd.grad(y, leaves, dy, retain_graph=True), torch.autograd.grad(y, leaves, dy))


def test_scales_and_seed_are_those_of_forward(rng: np.random.Generator) -> None:
    """A step that ends between forward and backward changes nothing that backward makes again."""
    recipe = DelayedScaling(history=4)
    given, choices = draw(rng)
    leaves, dy = list(given.values()), torch.randn(T, N).bfloat16()
    states = states_of(recipe)
    results = []
    for form in SAME_BITS:
        own = copy.deepcopy(states)
        assert own is not None
        y = moe_mlp(
            choices=choices, recipe=recipe, state=own, form=form, weight_codes="remake", backend=REFERENCE, **given
        )
        gradients_scale = [state.scale[2].clone() for state in own]
        for state, scale in zip(own, gradients_scale, strict=True):
            state.update()
            state.scale[2] = scale  # dy's is backward's own
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
        histories = [state.history[:2, 0] for state in own]
        assert not torch.stack(histories).any()  # nothing of forward's operands is recorded a second time
    for result in results[1:]:
        assert_equal(result, results[0])


class _Nothing:
    """A plugin without backends."""

    @hookimpl
    def octavo_backends(self) -> Iterable[BackendCard]:
        return ()


@pytest.fixture
def stochastic(monkeypatch: pytest.MonkeyPatch) -> Iterator[NVFP4]:
    """NVFP4 that rounds every operand stochastically. No recipe of Octavo does; one of a plugin may.

    The registry remembers plans by a recipe's fields, and forgets them where a plugin comes or goes: neither this test
    nor a later one is to have the plans of the other NVFP4.
    """
    of_recipe = NVFP4._spec

    def spec(self: NVFP4, *arguments: Any) -> QuantizerSpec:
        return of_recipe(self, *arguments).model_copy(update={"rounding": "stochastic"})

    monkeypatch.setattr(NVFP4, "_spec", spec)
    octavo_registry.register(_Nothing(), "comes and goes")
    yield NVFP4()
    octavo_registry.unregister("comes and goes")


def test_what_is_rounded_again_has_the_seed_of_forward(stochastic: NVFP4, rng: np.random.Generator) -> None:
    """The caller counts a seed on between forward and backward: codes that backward makes again are forward's, dy's
    are not."""
    given, choices = draw(rng)
    leaves, dy = list(given.values()), torch.randn(T, N).bfloat16()
    results = []
    for form, weight_codes in (("keep_all", "keep"), *((form, "remake") for form in SAME_BITS)):
        seed, call = torch.tensor(7), {"form": form, "weight_codes": weight_codes, "backend": REFERENCE}
        y = moe_mlp(choices=choices, recipe=stochastic, seed=seed, **given, **call)
        assert not torch.equal(y, moe_mlp(choices=choices, recipe=stochastic, seed=seed + 1, **given, **call))
        seed.add_(1)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    for result in results[1:]:
        assert_equal(result, results[0])


@pytest.mark.parametrize("form", FORMS)
def test_quantized_weights_and_main_grad(form: str, rng: np.random.Generator) -> None:
    """Weights quantized once give the same bits; both weights' gradients go into their buffers."""
    given, choices = draw(rng)
    call: dict[str, Any] = {"choices": choices, "recipe": MXFP8(), "form": form, "backend": REFERENCE}
    y = moe_mlp(**given, **call)
    grads = torch.autograd.grad(y.sum(), list(given.values()))
    handles = {name: quantize_weight(given[name], MXFP8(), backend=REFERENCE) for name in ("w1", "w2")}
    again = moe_mlp(**{**given, **handles}, **call, weight_codes="remake")
    assert_equal([again, *torch.autograd.grad(again.sum(), list(given.values()))], [y, *grads])
    for name in ("w1", "w2"):
        given[name].main_grad = torch.ones(given[name].shape)  # type: ignore[attr-defined]
    moe_mlp(**given, **call, main_grad="accumulate").sum().backward()
    for name, grad in zip(given, grads, strict=True):
        weight: Any = given[name]
        if name in ("w1", "w2"):
            # grad is main_grad's sum rounded once to bf16, whose unit is 2^-8
            torch.testing.assert_close(weight.main_grad, 1 + grad.float(), rtol=2**-8, atol=2**-8)
            assert weight.grad_added_to_main_grad


def test_interleaved_gates(rng: np.random.Generator) -> None:
    """Gate and up projection that take turns: the bits of the composed form, also where codes are made again."""
    given, choices = draw(rng)
    leaves = list(given.values())
    call: dict[str, Any] = {"recipe": BlockScaling(), "interleave": 4, "backend": REFERENCE}
    expected = composed(given, choices, **call)
    wanted = [expected, *torch.autograd.grad(expected.sum(), leaves)]
    for form in SAME_BITS:
        y = moe_mlp(choices=choices, form=form, weight_codes="remake", **given, **call)
        assert_equal([y, *torch.autograd.grad(y.sum(), leaves)], wanted)


def test_without_tokens_and_with_all_on_one_expert(rng: np.random.Generator) -> None:
    """No token, none that is routed, and one expert for all: zeros and finite gradients, as composed."""
    for tokens, fill in ((0, 0), (9, -1), (9, 1)):
        given, _ = draw(rng, tokens=tokens)
        choices = torch.full((tokens, C), fill)
        leaves = list(given.values())
        expected = composed(given, choices, recipe=BlockScaling(), backend=REFERENCE)
        wanted = [expected, *torch.autograd.grad(expected.sum(), leaves)]
        for form in SAME_BITS:
            y = moe_mlp(choices=choices, recipe=BlockScaling(), form=form, backend=REFERENCE, **given)
            assert_equal([y, *torch.autograd.grad(y.sum(), leaves)], wanted)


def test_no_value_is_read(rng: np.random.Generator) -> None:
    """Forward and backward of every form read no value of a tensor but those that grouped_mlp reads of CPU sizes."""
    given, choices = draw(rng)
    with watch_host_reads() as reads:
        composed(given, choices, recipe=MXFP8(), backend=REFERENCE).sum().backward()
    allowed = set(reads)
    for form in FORMS:
        with watch_host_reads() as reads:
            moe_mlp(choices=choices, recipe=MXFP8(), form=form, backend=REFERENCE, **given).sum().backward()
        assert set(reads) <= allowed


def test_messages(rng: np.random.Generator) -> None:
    """Errors name the argument, what was given, and what is needed."""
    given, choices = draw(rng)
    given = {name: value.detach() for name, value in given.items()}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"form": "slim"}, "form is 'slim'; give one of keep_all, standard, lean, recompute"),
        ({"weight_codes": True}, "weight_codes is True; give 'keep' or 'remake'"),
        ({"choices": choices.float()}, r"choices is float32 \[37, 3\]; give integers \[T, k\]"),
        ({"choices": choices[1:]}, r"choices has shape \[36, 3\] and x \[37, 64\]"),
        ({"weights": given["weights"][:, 1:]}, r"weights is float32 \[37, 2\]; give \[37, 3\]"),
        ({"x": given["x"][:, 1:]}, "x has 63 features and w1 has shape"),
        ({"bias1": given["bias2"]}, r"bias1 has shape \[5, 80\]; give \[5, 96\]"),
        ({"recipe": DelayedScaling()}, "state is None and DelayedScaling"),
        ({"state": (DelayedState.create(DelayedScaling(), G),) * 2}, "state was given and HighPrecision keeps none"),
    ]
    for changed, message in wrong:
        with pytest.raises(ValueError, match=message):
            moe_mlp(**{"recipe": None, "backend": REFERENCE, "choices": choices, **given, **changed})
