"""torch.export: a layer is a program of its operations, for one number of rows and any group sizes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from octavo import DelayedScaling, QuantizerSpec
from octavo_torch import (
    DelayedState,
    GroupedLinear,
    GroupedTensor,
    MoE,
    Routing,
    dequantize,
    grouped_linear,
    permute,
    quantize,
    unpermute,
)

REFERENCE = "torch-reference"
HOW: dict[str, Any] = {"dtype": torch.bfloat16, "backend": REFERENCE, "seed": 5}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: GroupedLinear(3, 64, 48, recipe="fp8-block", **HOW),
    "moe": lambda: MoE(4, 64, 48, 2, recipe="mxfp8", **HOW),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_stored_program_has_the_layers_bits(name: str, rng: np.random.Generator) -> None:
    """Weights are quantized in the program, and other group sizes or other choices need no other one."""
    torch.manual_seed(int(rng.integers(1 << 31)))
    layer = LAYERS[name]().eval()
    x, other = torch.randn(32, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    sizes: tuple[Tensor, ...] = (torch.tensor([10, 0, 15]),) if name == "linear" else ()
    others = tuple(size.flip(0) for size in sizes)
    stored = io.BytesIO()
    with torch.no_grad():
        torch.export.save(torch.export.export(layer, (x, *sizes), strict=False), stored)
        stored.seek(0)
        program = torch.export.load(stored).module()
        for given in ((x, *sizes), (other, *others)):
            assert torch.equal(_first(program(*given)), _first(layer(*given)))


class Given(nn.Module):
    """Functions of octavo_torch whose arguments are trees of tensors."""

    def forward(self, x: Tensor, weight: Tensor, state: DelayedState, routing: Routing) -> tuple[Tensor, Tensor]:
        y = grouped_linear(x, weight, [7, 9], recipe=state.recipe, state=state, backend=REFERENCE)
        return y, unpermute(x, routing)


def test_states_and_routings_are_arguments(rng: np.random.Generator) -> None:
    """torch wants names of what is inside of an argument ("Did not find a flatten_with_keys_fn"). A program changes a
    state in place, as a call does."""
    weight, routing = torch.randn(2, 48, 64), permute(torch.zeros(16, 1), torch.randint(2, (16, 1)), 2)[2]
    example, own, other = (DelayedState.create(DelayedScaling(history=4), 2) for _ in range(3))
    stored = io.BytesIO()
    with torch.no_grad():
        torch.export.save(torch.export.export(Given(), (torch.randn(16, 64), weight, example, routing)), stored)
        stored.seek(0)
        program = torch.export.load(stored).module()
        x = torch.randn(16, 64)
        made, expected = program(x, weight, other, routing), Given()(x, weight, own, routing)
    assert all(map(torch.equal, made, expected))
    assert torch.equal(own.history, other.history)
    assert own.history.any()


class Decoded(nn.Module):
    """A function of a quantized operand."""

    def forward(self, q: GroupedTensor) -> Tensor:
        return dequantize(q, "columnwise", backend=REFERENCE)


def test_quantized_operands_are_arguments(rng: np.random.Generator) -> None:
    """A program's code names planes, of which one's name begins another's: torch wrote `args[1]_scale`, no Python.

    It takes operands as it was made, and as it was loaded: torch compares how they flatten with the example's trees.
    """
    spec = QuantizerSpec(scaling="nvfp4", format="e2m1")
    example, other = (quantize(torch.randn(16, 64), spec, [7, 9], backend=REFERENCE) for _ in range(2))
    stored = io.BytesIO()
    with torch.no_grad():
        exported = torch.export.export(Decoded(), (example,))
        assert torch.equal(exported.module()(other), Decoded()(other))
        torch.export.save(exported, stored)
        stored.seek(0)
        program = torch.export.load(stored).module()
        assert torch.equal(program(other), Decoded()(other))


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result
