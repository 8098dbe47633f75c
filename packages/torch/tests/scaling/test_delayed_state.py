"""Delayed scaling's state equals octavo_numerics' pure functions, step for step and bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

import octavo_numerics
import octavo_registry
from octavo import DelayedScaling
from octavo_registry import BackendCard, Bound, Request
from octavo_torch import DelayedState, GroupedLinear, grouped_linear
from octavo_torch.plugin import CARD
from octavo_torch.reference.backend import ReferenceBackend

SIZES = [5, 0, 9]


@pytest.mark.parametrize("margin", [0, 1, -3, 64])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_updates_equal_the_definition(
    algorithm: Literal["max", "most_recent"], margin: int, rng: np.random.Generator
) -> None:
    """Random amaxes with zeros (no tokens), Inf, NaN, subnormals and several records per step."""
    recipe = DelayedScaling(history=5, algorithm=algorithm, margin=margin)
    state = DelayedState.create(recipe, 4)
    definition = octavo_numerics.init_delayed(4, 5)
    odd = np.array([0, np.inf, np.nan, 1e-42, 3e38], np.float32)
    for _ in range(30):
        for _ in range(int(rng.integers(0, 3))):
            amax = np.where(rng.random(4) < 0.5, rng.choice(odd, 4), rng.random(4) * 100).astype(np.float32)
            state.record("x", torch.from_numpy(amax))
            definition = octavo_numerics.record_amax(definition, amax)
        state.update()
        definition = octavo_numerics.update_delayed(definition, "e4m3", algorithm=algorithm, margin=margin)
        assert state.history[0].numpy().tobytes() == definition.history.tobytes()
        assert state.scale[0].numpy().tobytes() == definition.scale.tobytes()
    assert torch.equal(state.scale[1], torch.ones(4))


def test_amax_of_every_operand_over_microbatches(rng: np.random.Generator) -> None:
    """x and w are recorded in forward, dy in backward, the maximum over microbatches; tails and empty groups stay out
    (faults.md 14, 54)."""
    recipe = DelayedScaling(history=3)
    state = DelayedState.create(recipe, 3)
    w = torch.randn(3, 16, 32, requires_grad=True)
    xs = [torch.randn(20, 32) for _ in range(2)]
    dys = [torch.randn(20, 16) for _ in range(2)]
    for x, dy in zip(xs, dys, strict=True):
        x[14:], dy[14:] = torch.inf, torch.nan
        grouped_linear(x, w, SIZES, recipe=recipe, state=state).backward(dy)
    for index, values in ((0, xs), (2, dys)):
        both = torch.stack(values).abs()
        expected = torch.stack([both[:, :5].amax(), torch.tensor(0.0), both[:, 5:14].amax()])
        assert torch.equal(state.history[index, 0], expected)
    assert torch.equal(state.history[1, 0], w.detach().abs().amax((1, 2)))
    before = state.scale.clone()
    state.update()
    assert torch.equal(state.scale[0, 1], before[0, 1]), "a group without tokens keeps its scale"
    largest = torch.stack(xs)[:, :5].abs().max()
    assert torch.equal(state.scale[0, 0], torch.div(torch.tensor(448.0), largest))
    steepest = torch.stack(dys)[:, :5].abs().max()
    assert recipe.gradient_format == "e5m2"
    assert torch.equal(state.scale[2, 0], torch.div(torch.tensor(57344.0), steepest))
    assert not state.history[:, 0].any()


def test_shapes_that_do_not_fit() -> None:
    """A state of another recipe is refused."""
    made = DelayedState.create(DelayedScaling(history=3), 2)
    with pytest.raises(ValueError, match=r"give \[3, 4, G\] and \[3, G\]"):
        DelayedState(DelayedScaling(history=4), made.history, made.scale)


CASTS: dict[str, Callable[[DelayedState], object]] = {
    "scales in bfloat16": lambda made: setattr(made, "scale", made.scale.bfloat16()),
    "a history in float64": lambda made: setattr(made, "history", made.history.double()),
    "a shorter history": lambda made: setattr(made, "history", made.history[:, :2].clone()),
    "a history of fewer groups": lambda made: setattr(made, "history", made.history[..., :1].clone()),
    "scales of one operand": lambda made: setattr(made, "scale", made.scale[:1].clone()),
    "scales elsewhere": lambda made: setattr(made, "scale", made.scale.to("meta")),
}


@pytest.mark.parametrize("name", CASTS)
def test_tensors_that_were_replaced(name: str, rng: np.random.Generator) -> None:
    """Kernels read them as fp32 of their first shapes: scales in bfloat16 made NaN, and histories were written
    beyond."""
    recipe = DelayedScaling(history=3)
    x, w = torch.randn(14, 32), torch.randn(3, 16, 32)
    made = DelayedState.create(recipe, 3)
    grouped_linear(x, w, SIZES, recipe=recipe, state=made)
    CASTS[name](made)
    calls: list[Callable[[], object]] = [
        lambda: grouped_linear(x, w, SIZES, recipe=recipe, state=made),
        lambda: DelayedState(recipe, made.history, made.scale),
        made.update,
    ]
    for call in calls:
        with pytest.raises(
            ValueError, match=r"history is .* and scale .*; give \[3, 3, G\] and \[3, G\], both in float32"
        ):
            call()


def test_a_module_that_is_called_with_other_buffers(rng: np.random.Generator) -> None:
    """`functional_call` gives it whatever it is given, such as all tensors of a model in bfloat16."""
    layer, x = GroupedLinear(3, 32, 16, recipe=DelayedScaling(), dtype=torch.bfloat16), torch.randn(14, 32).bfloat16()
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    y = torch.func.functional_call(layer, tensors, (x, SIZES))
    assert torch.equal(y, layer(x, SIZES))
    cast = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    with pytest.raises(ValueError, match="both in float32, whatever a model is cast to"):
        torch.func.functional_call(layer, cast, (x, SIZES))


class Measuring(ReferenceBackend):
    """The reference, whose quantizers return a made-up amax beside the codes."""

    def bind(self, request: Request) -> Bound:
        bound = super().bind(request)

        def with_amax(x: Tensor, group_sizes: Tensor | None = None, **rest: Any) -> tuple[Any, Tensor]:
            return bound.run(x, group_sizes, **rest), torch.tensor([1.0, 0.0, torch.nan])

        return replace(bound, with_amax=with_amax) if request.op == "quantize" else bound


class Plugin:
    """One backend that measures."""

    def octavo_backends(self) -> list[BackendCard]:
        return [CARD.model_copy(update={"name": "measuring", "priority": -1000})]

    def octavo_load(self, name: str) -> ReferenceBackend:
        return Measuring()


def test_a_quantizer_that_returns_amax() -> None:
    """What it returns is what is recorded, for every operand; values and gradients are those of its codes."""
    x, w, dy = torch.randn(16, 32), torch.randn(3, 16, 32), torch.randn(16, 16)
    states, results = [], []
    octavo_registry.register(Plugin(), "test-measuring")
    try:
        for backend in ("measuring", "torch-reference"):
            state = DelayedState.create(DelayedScaling(), 3)
            leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
            y = grouped_linear(*leaves, SIZES, recipe=state.recipe, state=state, backend=backend)
            results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
            states.append(state)
    finally:
        octavo_registry.unregister("test-measuring")
    assert states[0].history[:, 0].tolist() == [[1.0, 0.0, 0.0]] * 3
    assert (states[1].history[:, 0, 0] > 1).all()
    assert all(torch.equal(made, expected) for made, expected in zip(*results, strict=True))


def test_an_infinite_gradient_stays_in_the_history_unless_it_is_taken_out() -> None:
    """recipes.md: a step that a GradScaler skips zeroes the running amaxes in place of an update of the scales."""
    recipe = DelayedScaling(history=4)
    for takes_out in (False, True):
        layer = GroupedLinear(1, 16, 16, recipe=recipe, dtype=torch.float16)
        scales = []
        for gradient in (1.0, float("inf"), 2.0, 2.0, 2.0, 2.0):
            y = layer(torch.ones(4, 16, dtype=torch.float16), [4])
            y.backward(torch.full_like(y, gradient))
            if takes_out and gradient == float("inf"):
                layer.amax_history[..., 0, :].zero_()
            else:
                layer.update_scales()
            scales.append(float(layer.encode_scale[2, 0]))
        assert scales == [57344.0] * (2 if takes_out else 5) + [28672.0] * (4 if takes_out else 1)
