"""GroupedMLP: recomputed, stored and compiled with the bits of a plain run, and what the module says that it is."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from mlp_operands import RECIPES, REFERENCE, SIZES, F, G, K, M, N, assert_equal
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from octavo import Recipe
from octavo_torch import GroupedMLP, update_scales


def make(recipe: Recipe, seed: int = 3) -> GroupedMLP:
    return GroupedMLP(G, K, F, N, bias=True, recipe=recipe, dtype=torch.bfloat16, seed=seed, backend=REFERENCE)


WAYS: dict[str, Any] = {
    "plain": lambda layer, x, p: layer(x, torch.tensor(SIZES), p),
    "reentrant": lambda layer, x, p: checkpoint(layer, x, torch.tensor(SIZES), p, use_reentrant=True),
    "non-reentrant": lambda layer, x, p: checkpoint(layer, x, torch.tensor(SIZES), p, use_reentrant=False),
}


def train(layer: GroupedMLP, forward: Any, data: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """y, gradients and buffers of some steps, each of two microbatches."""
    seen: list[Tensor] = []
    for x, probs, dy in data:
        layer.zero_grad()
        for _ in range(2):
            leaves = x.clone().requires_grad_(), probs.clone().requires_grad_()
            y = forward(layer, *leaves)
            y.backward(dy)
            seen += [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        update_scales(layer)
        seen += [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        seen += [b.clone() for b in layer.buffers()]
    return seen


def batches(steps: int) -> list[tuple[Tensor, ...]]:
    return [(torch.randn(M, K).bfloat16(), torch.rand(M), torch.randn(M, N).bfloat16()) for _ in range(steps)]


KEPT = ("bf16", "fp8-delayed", "nvfp4", "mxfp8-forward-only")


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", KEPT)
def test_activation_checkpointing_changes_no_bit(name: str, way: str, rng: np.random.Generator) -> None:
    """Outputs, gradients, amax histories and seeds are those of a run without (faults.md 42)."""
    layer, data = make(RECIPES[name]), batches(2)
    assert_equal(train(copy.deepcopy(layer), WAYS["plain"], data), train(layer, WAYS[way], data))


@pytest.mark.parametrize("name", KEPT)
def test_save_and_load_resume_bit_for_bit(name: str, rng: np.random.Generator) -> None:
    """A state dict of plain tensors resumes exactly, and does not grow; so does a pickled copy (faults.md 47, 48)."""
    layer, data = make(RECIPES[name]), batches(3)
    train(layer, WAYS["plain"], data[:1])
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    size = stream.tell()
    stream.seek(0)
    loaded = make(RECIPES[name], seed=99)
    loaded.load_state_dict(torch.load(stream, weights_only=True))
    unpickled = pickle.loads(pickle.dumps(layer))
    expected = train(layer, WAYS["plain"], data[1:])
    assert_equal(train(loaded, WAYS["plain"], data[1:]), expected)
    assert_equal(train(unpickled, WAYS["plain"], data[1:]), expected)
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    assert stream.tell() == size


@pytest.mark.parametrize("name", ["bf16", "fp8-delayed", "nvfp4"])
def test_one_graph_with_the_bits_of_eager(name: str, rng: np.random.Generator) -> None:
    """fullgraph forward and backward, other sizes without compiling again, state and seeds kept in step."""
    layer, data = make(RECIPES[name]), batches(1)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    theirs = train(copy.deepcopy(layer), WAYS["plain"], data)
    assert_equal(train(layer, lambda _, x, p: compiled(x, torch.tensor(SIZES), p), data), theirs)
    compiled(data[0][0], torch.tensor([0, M, 0]), data[0][1])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_module_says_what_it_is(rng: np.random.Generator) -> None:
    """repr, parameters, casts that leave scales fp32, eval that records nothing, weights quantized once."""
    layer = make(RECIPES["fp8-delayed"])
    assert "hidden_features=48, out_features=80, activation=swiglu, bias=True, recipe=delayed" in repr(layer)
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
        "weight1": (G, 2 * F, K),
        "bias1": (G, 2 * F),
        "weight2": (G, N, F),
        "bias2": (G, N),
        "amax_history": (2, 3, 4, G),
        "encode_scale": (2, 3, G),
    }
    layer.bfloat16().eval()
    assert layer.encode_scale.dtype is torch.float32
    x = torch.randn(M, K).bfloat16()
    y = layer(x, SIZES)
    assert not layer.amax_history.any()
    assert torch.equal(layer(x, SIZES, weights=layer.quantize_weights()), y)
    with pytest.raises(ValueError, match="weights were not made by this module"):
        layer(x, SIZES, weights=make(RECIPES["fp8-delayed"]).quantize_weights())
    assert GroupedMLP(2, 8, 6, activation="relu2").weight1.shape == (2, 6, 8)
