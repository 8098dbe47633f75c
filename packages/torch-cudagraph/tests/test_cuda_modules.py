"""make_graphed, graphed_step and StaticWeight on a device: training as eager trains, bit for bit.

Skipped where torch sees no Hopper device or octavo-native was built without CUDA kernels.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from graph_layers import MARKS, Differences, G, follow, inputs, pair, splits, state, stir, train
from torch import Tensor

import octavo_torch_cudagraph as graphs
from octavo import NoBackendError
from octavo_conformance.cards.variants import RECIPES
from octavo_torch import GroupedLinear, QuantizedWeight, quantize_weight
from octavo_torch.compiler.graphs import no_waiting

pytestmark = MARKS


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("name", RECIPES)
def test_make_graphed_trains_as_eager(name: str, main_grad: bool, rng: np.random.Generator) -> None:
    """Forward and backward graphs inside an eager loop: sizes, inputs, weights, main_grad, states and seeds change
    between replays, nothing waits, and the weight says that its main_grad was written (faults 35, 36, 37)."""
    layer, twin = pair(RECIPES[name], main_grad=main_grad)
    x, _, sizes = inputs([50] * 6)
    wrong = Differences()
    assert graphs.make_graphed(layer, (x.requires_grad_(), sizes)) is layer
    wrong.add("after the warm-up", state(layer), state(twin))
    for number, split in enumerate(splits(rng, 8)):
        stir(layer)
        follow(layer, twin)
        if main_grad:
            assert not getattr(layer.weight, "grad_added_to_main_grad", False) or number
            layer.weight.grad_added_to_main_grad = False
        arguments = inputs(split)
        with no_waiting():
            made, expected = train(layer, *arguments), train(twin, *arguments)
            wrong.add(f"step {number}, sizes {split}", [*made, *state(layer)], [*expected, *state(twin)])
        assert not main_grad or layer.weight.grad_added_to_main_grad
    wrong.none()


def test_make_graphed_checks_its_arguments(rng: np.random.Generator) -> None:
    """What torch would broadcast, ignore or read at a stale address is refused; the other mode runs as before."""
    layer, twin = pair(RECIPES["mxfp8"], main_grad=True)
    x, dy, sizes = inputs([50] * 6)
    graphs.make_graphed(layer, (x, sizes))
    with pytest.raises(ValueError, match=r"argument 0 is bfloat16 \[1, 272\]"):
        layer(x[:1], sizes)
    with pytest.raises(ValueError, match=r"the arguments are \(\*, \[\*, \*, \*, \*, \*, \*\]\)"):
        layer(x, [50] * 6)
    with pytest.raises(ValueError, match="argument 0 requires a gradient and the sample did not"):
        layer(x.clone().requires_grad_(), sizes)
    with pytest.raises(ValueError, match="bias_scales came by name"):
        layer(x, sizes, bias_scales=None)
    layer(x, sizes).backward(dy)
    kept = layer.weight.main_grad
    layer.weight.main_grad = torch.zeros_like(kept)
    with pytest.raises(ValueError, match=r"weight\.main_grad is another tensor since the capture"):
        layer(x, sizes)
    layer.weight.main_grad = kept
    layer.eval()
    assert torch.equal(layer(x[:60], [10] * 6), twin(x[:60], [10] * 6))


def test_a_module_that_cannot_be_captured(rng: np.random.Generator) -> None:
    """Host sizes inside a module are refused before anything is captured, and it works on as before."""

    class Router(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.twin = pair(RECIPES["mxfp8"])

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, [50] * G)

    module = Router()
    x, _, sizes = inputs([50] * 6)
    with pytest.raises(NoBackendError, match="sizes are on the host"):
        graphs.make_graphed(module, (x,))
    assert torch.equal(module(x), module.twin(x, sizes))


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(1e-2, device="cuda"), capturable=True),
}


def loss_of(layer: GroupedLinear, x: Tensor, dy: Tensor, sizes: Tensor) -> Tensor:
    return (layer(x, sizes).float() * dy.nan_to_num().float()).mean()


@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize("name", ["bf16", "delayed", "mxfp8", "nvfp4"])
def test_graphed_step_trains_as_eager(name: str, which: str, rng: np.random.Generator) -> None:
    """Whole steps, optimizer and new scales included; a rate on the device changes between replays (faults 37, 65)."""
    layer, twin = pair(RECIPES[name])
    optimizers = [OPTIMIZERS[which](one.parameters()) for one in (layer, twin)]

    def eager(which: int, x: Tensor, dy: Tensor, sizes: Tensor) -> Tensor:
        one = (layer, twin)[which]
        one.zero_grad(set_to_none=True)
        value = loss_of(one, x, dy, sizes)
        value.backward()
        optimizers[which].step()
        one.update_scales()
        return value.detach()

    x, dy, sizes = inputs([50] * 6)
    with pytest.raises(ValueError, match="run one eager step before"):
        graphs.graphed_step(layer, loss_of, x, dy, sizes, optimizer=optimizers[0])
    wrong = Differences()
    wrong.add("after the refusal", state(layer), state(twin))
    for number in (0, 1):
        eager(number, x, dy, sizes)
    wrong.add("after an eager step", state(layer), state(twin))
    step = graphs.graphed_step(layer, loss_of, x, dy, sizes, optimizer=optimizers[0])
    wrong.add("after the capture", state(layer), state(twin))
    for number, split in enumerate(splits(rng, 8)):
        if which == "adam":
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"].fill_(0.1 / (1 + number))
        arguments = inputs(split)
        with no_waiting():
            value, expected = step(*arguments), eager(1, *arguments)
        grads = [[p.grad for p in one.parameters()] for one in (layer, twin)]
        wrong.add(f"step {number}", [value, *state(layer), *grads[0]], [expected, *state(twin), *grads[1]])
    wrong.none()
    layer.zero_grad(set_to_none=True)
    with pytest.raises(ValueError, match=r"weight\.grad is gone since the capture"):
        step(x, dy, sizes)


def test_an_optimizer_that_counts_on_the_host_is_refused() -> None:
    """Adam without capturable would keep the first step's bias correction; a rate that is a number would stay."""
    layer, _ = pair(RECIPES["mxfp8"])
    arguments = inputs([50] * 6)
    with pytest.raises(ValueError, match="construct Adam with capturable=True"):
        graphs.graphed_step(layer, loss_of, *arguments, optimizer=torch.optim.Adam(layer.parameters()))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    step = graphs.graphed_step(layer, loss_of, *arguments, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(ValueError, match=r"\['lr'\] is 0\.2 and the graph was captured with 0\.1"):
        step(*arguments)


def microbatch(
    layer: GroupedLinear, weight: QuantizedWeight, x: Tensor, dy: Tensor, sizes: Tensor
) -> tuple[Tensor, ...]:
    leaf = x.detach().requires_grad_()
    y = layer(leaf, sizes, weight=weight)
    return y, *torch.autograd.grad(y, (leaf, layer.weight), dy)


@pytest.mark.parametrize("name", RECIPES)
def test_static_weights(name: str, rng: np.random.Generator) -> None:
    """Codes are made again in the graph, or stay where the flag on the device says so (fault 37)."""
    layer, twin = pair(RECIPES[name])
    static = graphs.StaticWeight(layer.weight, layer.recipe, state=layer.delayed_state)
    captured = graphs.capture(
        lambda *arguments: microbatch(layer, static.refresh(), *arguments), *inputs([50] * 6), restore=state(layer)
    )
    old: QuantizedWeight | None = None
    for unchanged, split in zip((0, 1, 1, 0, 1), splits(rng, 5), strict=True):
        stir(layer)
        follow(layer, twin)
        static.unchanged.fill_(unchanged)
        if not unchanged:
            old = quantize_weight(twin.weight, twin.recipe, state=twin.delayed_state, backend="torch-native")
            old.codes = copy.deepcopy(old.codes)
        assert old is not None
        old.version = twin.weight._version  # older than the weight, and meant to be
        arguments = inputs(split)
        with no_waiting():
            made = captured(*arguments)
        wrong = Differences()
        wrong.add(f"unchanged={unchanged}, sizes {split}", made, microbatch(twin, old, *arguments))
        wrong.none()
