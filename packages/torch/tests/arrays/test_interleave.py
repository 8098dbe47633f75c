"""Gate and up projections that take turns: the bits of the layer whose gate half comes first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import octavo_registry
from octavo import MXFP8, PRESETS, BlockScaling, DelayedScaling, Recipe
from octavo_torch import (
    CodedWeight,
    DelayedState,
    GroupedMLP,
    PackedWeight,
    add_lora,
    grouped_linear,
    grouped_mlp,
    load_checkpoint,
    quantize_weight,
    save_checkpoint,
)
from octavo_torch.arrays.interleaving import from_halves, to_halves

SIZES = torch.tensor([20, 0, 40])
M, K, F, N, G = 70, 32, 24, 16, len(SIZES)
RECIPES: dict[str, Recipe] = {
    **PRESETS,
    "fp8-delayed": DelayedScaling(history=3),
    "quantized dgrad": MXFP8(fprop="high_precision"),
    "quantized fprop": BlockScaling(dgrad="high_precision", wgrad="high_precision"),
}


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    """Whatever else is installed: other backends have tests of their own."""
    with octavo_registry.prefer("torch-reference"):
        yield


def states_of(recipe: Recipe) -> Any:
    return tuple(DelayedState.create(recipe, G) for _ in range(2)) if recipe.stateful else None  # type: ignore[arg-type]


def test_blocks_take_turns() -> None:
    """Rows by number, in blocks of one and of two."""
    rows = torch.arange(8)[None]
    assert to_halves(rows, 1).tolist() == [[0, 2, 4, 6, 1, 3, 5, 7]]
    assert to_halves(rows, 2).tolist() == [[0, 1, 4, 5, 2, 3, 6, 7]]
    for block in (1, 2, 4):
        assert torch.equal(from_halves(to_halves(rows, block), block), rows)


@pytest.mark.parametrize("name", RECIPES)
def test_bits_of_the_gate_half_first(name: str, rng: np.random.Generator) -> None:
    """y and every gradient, in the order of what was given; a weight that is quantized already, too."""
    recipe, block = RECIPES[name], int(rng.choice([1, 4, 12, 24]))
    x, w2 = torch.randn(M, K).bfloat16().requires_grad_(), torch.randn(G, N, F).bfloat16().requires_grad_()
    w1, b1 = torch.randn(G, 2 * F, K).bfloat16().requires_grad_(), torch.randn(G, 2 * F).bfloat16().requires_grad_()
    dy = torch.randn(M, N).to(torch.bfloat16)
    call: dict[str, Any] = {"group_sizes": SIZES, "recipe": recipe, "seed": 3}
    halves = [to_halves(value.detach(), block).requires_grad_() for value in (w1, b1)]
    y = grouped_mlp(x, halves[0], w2, bias1=halves[1], state=states_of(recipe), **call)
    expected = torch.autograd.grad(y, (x, w2, *halves), dy)
    state = states_of(recipe)
    handle = quantize_weight(w1, recipe, interleave=block, state=None if state is None else state[0], seed=3)
    for weight in (w1, handle):
        z = grouped_mlp(x, weight, w2, bias1=b1, interleave=block, state=states_of(recipe), **call)
        assert torch.equal(z, y)
        grads = torch.autograd.grad(z, (x, w2, w1, b1), dy)
        for ours, theirs in zip((*grads[:2], *(to_halves(grad, block) for grad in grads[2:])), expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("parted", [False, True], ids=["single", "per group"])
@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
def test_main_grad(mode: Any, parted: bool, rng: np.random.Generator) -> None:
    """The buffer has the weight's order, the bits of the other order's, and empty groups keep theirs; later, too."""
    made = []
    for block, delay in ((None, False), (4, False), (4, True)):
        torch.manual_seed(3)
        layer = GroupedMLP(
            G, K, F, N, recipe=MXFP8(), dtype=torch.bfloat16, main_grad=mode, interleave=block, delay_wgrad=delay,
            per_group_parameters=parted,
        )  # fmt: skip
        leaves = {}
        for name, shape in layer._shapes.items():
            value = layer.of_all_groups(name)
            start = torch.randn(shape)
            start[1, 0, 0] = -0.0
            if name == "weight1" and block is not None:
                with torch.no_grad():
                    old = torch.stack(value) if isinstance(value, tuple) else value
                    turned = from_halves(old, block)  # type: ignore[arg-type]
                    for leaf, new in zip(value if parted else (value,), turned if parted else (turned,), strict=True):  # type: ignore[arg-type]
                        leaf.copy_(new)  # type: ignore[union-attr]
                start = from_halves(start, block)
            leaves[name] = value if isinstance(value, tuple) else (value,)
            for leaf, buffer in zip(leaves[name], start if parted else (start,), strict=True):
                leaf.main_grad = buffer.clone()  # type: ignore[union-attr]
        x = torch.randn(M, K).bfloat16()
        y = layer(x, SIZES)
        y.sum().backward()
        if delay:
            layer.backward_dw()
        buffers: list[Tensor] = []
        for name, parts in leaves.items():
            whole = torch.stack([leaf.main_grad for leaf in parts]) if parted else parts[0].main_grad  # type: ignore[union-attr]
            buffers.append(to_halves(whole, 4) if name == "weight1" and block else whole)
        made.append([y.float(), *buffers])
    for other in made[1:]:
        for ours, theirs in zip(other, made[0], strict=True):
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def test_what_does_not_fit_is_refused() -> None:
    """Sentences for blocks, activations without a gate, and weights quantized otherwise."""
    x, w1, w2 = torch.randn(M, K), torch.randn(G, 2 * F, K), torch.randn(G, N, F)
    for block, message in (
        (5, "interleave is 5 and the weight has 24 gate rows; give a divisor of 24"),
        (0, "interleave is 0; give the gate rows per block"),
        (True, "interleave is True"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_mlp(x, w1, w2, SIZES, recipe=None, interleave=block)
        with pytest.raises(ValueError, match=message):
            GroupedMLP(G, K, F, interleave=block)
    with pytest.raises(ValueError, match="interleave is 4 and relu2 has no gate; leave it out"):
        GroupedMLP(G, K, F, activation="relu2", interleave=4)
    handle, turns = quantize_weight(w1, MXFP8()), quantize_weight(w1, MXFP8(), interleave=4)
    with pytest.raises(ValueError, match="w1 was quantized for interleave=None and the call takes it with 4"):
        grouped_mlp(x, handle, w2, SIZES, recipe=MXFP8(), interleave=4)
    coded = CodedWeight(turns.codes, MXFP8(), w1.dtype, turns.interleave)  # type: ignore[arg-type]
    for weight in (turns, coded):  # whose rows are in another order than those of y
        with pytest.raises(ValueError, match="weight was quantized for interleave=4 and the call takes it with None"):
            grouped_linear(x, weight, SIZES, recipe=MXFP8())
    down = quantize_weight(w2, MXFP8(), interleave=4)
    with pytest.raises(ValueError, match="w2 was quantized for interleave=4 and the call takes it with None"):
        grouped_mlp(x, w1, down, SIZES, recipe=MXFP8())
    adapted = GroupedMLP(G, K, F, recipe=MXFP8(), interleave=4).requires_grad_(False)
    add_lora(adapted, rank=2)
    others = quantize_weight(adapted.weight1, MXFP8()), quantize_weight(adapted.weight2, MXFP8())
    with pytest.raises(ValueError, match="weight was quantized for interleave=None and the call takes it with 4"):
        adapted(x, SIZES, weights=others)
    assert "interleave=4" in repr(GroupedMLP(G, K, F, interleave=4))


def test_a_block_of_half_the_rows_is_the_plain_order(tmp_path: Path) -> None:
    """interleave=F: codes of a checkpoint, or made by hand, fit as those of `quantize_weight` do."""
    layer, loaded = (GroupedMLP(G, K, F, recipe=MXFP8(), interleave=F) for _ in range(2))
    x = torch.randn(M, K)
    save_checkpoint(layer, tmp_path / "codes.safetensors", quantized=True)
    load_checkpoint(loaded, tmp_path / "codes.safetensors")
    y = layer(x, SIZES)
    assert torch.equal(loaded(x, SIZES), y)
    codes = layer.quantize_weights()[0].codes
    assert codes is not None
    assert CodedWeight(codes, layer.recipe, torch.float32, F).interleave == 0
    half = torch.zeros(G, 2 * 32, 16, dtype=torch.uint8), torch.zeros(G, 2 * 32, 1, dtype=torch.uint8)
    assert [PackedWeight(*half, layer.recipe, x.dtype, block).interleave for block in (32, 16)] == [0, 16]
