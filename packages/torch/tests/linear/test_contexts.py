"""Layers in autocast, torch.func, activation checkpointing and saved-tensor hooks: same bits, counted quantizers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils.checkpoint import checkpoint

import octavo_registry
from octavo import NVFP4, PRESETS, DelayedScaling
from octavo_registry import BackendCard, Bound, Request
from octavo_torch import Activation, GroupedLinear, GroupedMLP, MoE, grouped_linear, permute, unpermute
from octavo_torch.plugin import CARD
from octavo_torch.reference.backend import ReferenceBackend

G, K, N, M = 3, 64, 48, 40
SIZES = torch.tensor([15, 0, 20])
COUNTED: Counter[str] = Counter()


class Counting(ReferenceBackend):
    """The reference, whose quantizers are counted by operand."""

    def bind(self, request: Request) -> Bound:
        bound = super().bind(request)
        if request.op != "quantize":
            return bound

        def run(*operands: Any, **rest: Any) -> Any:
            COUNTED[rest["operand"]] += 1
            return bound.run(*operands, **rest)

        return replace(bound, run=run)


class Plugin:
    """One backend that counts."""

    def octavo_backends(self) -> list[BackendCard]:
        return [CARD.model_copy(update={"name": "counting", "priority": -1000})]

    def octavo_load(self, name: str) -> ReferenceBackend | None:
        return Counting() if name == "counting" else None


@pytest.fixture
def counting() -> Iterator[str]:
    """The name of the backend that counts."""
    octavo_registry.register(Plugin(), "test-counting")
    COUNTED.clear()
    yield "counting"
    octavo_registry.unregister("test-counting")


def layer_of(name: str, **options: Any) -> GroupedLinear:
    return GroupedLinear(G, K, N, bias=True, recipe=PRESETS[name], seed=3, **options)


# ---- activation checkpointing


Way = Callable[[Any, Tensor], Tensor]
WAYS: dict[str, tuple[Way, dict[str, int]]] = {
    "plain": (lambda layer, x: layer(x, SIZES), {"x": 1, "w": 1, "dy": 1}),
    "reentrant": (lambda layer, x: checkpoint(layer, x, SIZES, use_reentrant=True), {"x": 2, "w": 2, "dy": 1}),
    "non-reentrant": (lambda layer, x: checkpoint(layer, x, SIZES, use_reentrant=False), {"x": 2, "w": 2, "dy": 1}),
}


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_quantizers_run_once_a_forward(way: str, quantized: bool, counting: str) -> None:
    """An operand is quantized once for the GEMMs that read it, and once more where its forward is run again; a weight
    that was quantized before the step never again (faults.md 42)."""
    layer = layer_of("mxfp8", backend=counting)
    call, expected = WAYS[way]
    given: Any = layer
    if quantized:
        codes = layer.quantize_weight()
        COUNTED.clear()

        def given(x: Tensor, sizes: Tensor) -> Tensor:
            return layer(x, sizes, weight=codes)

    call(given, torch.randn(M, K, requires_grad=True)).sum().backward()
    assert dict(COUNTED) == {name: count for name, count in expected.items() if not (quantized and name == "w")}


# ---- autocast


@pytest.mark.parametrize("name", ["bf16", "fp8-block", "nvfp4"])
def test_autocast_casts_rows_and_weights(name: str, rng: np.random.Generator) -> None:
    """As casting by hand: results in bf16, gradients in fp32, products inside as without autocast, and in backward."""
    layer, mlp = layer_of(name), GroupedMLP(G, N, 32, recipe=PRESETS[name], seed=4)
    x, results = torch.randn(M, K), []
    for auto in (True, False):
        layer.reset_buffers()
        mlp.reset_buffers()
        params = {key: value.detach().requires_grad_() for key, value in layer.named_parameters()}
        weights = {key: value.detach().requires_grad_() for key, value in mlp.named_parameters()}
        leaf = x.clone().requires_grad_()
        if auto:
            with torch.autocast("cpu", torch.bfloat16):
                y = functional_call(mlp, weights, (functional_call(layer, params, (leaf, SIZES)), SIZES))
                y.sum().backward()
        else:
            halves = ({k: v if "bias" in k else v.bfloat16() for k, v in part.items()} for part in (params, weights))
            first, second = halves
            y = functional_call(mlp, second, (functional_call(layer, first, (leaf.bfloat16(), SIZES)), SIZES))
            y.sum().backward()
        assert y.dtype is torch.bfloat16
        grads = [leaf.grad, *(value.grad for part in (params, weights) for value in part.values())]
        assert all(value is not None and value.dtype is torch.float32 for value in grads)
        results.append([y.detach(), *grads])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", ["bf16", "fp8-block", "fp8-delayed", "nvfp4"])
def test_what_is_run_again_is_in_autocast(name: str, way: str, rng: np.random.Generator) -> None:
    """A backward outside of autocast runs the forward again as it ran inside: gradients, amax histories and seeds are
    those of a run without checkpointing (faults.md 42)."""
    layer, x, results = layer_of(name), torch.randn(M, K), []
    for call, _ in (WAYS["plain"], WAYS[way]):
        again, leaf = copy.deepcopy(layer), x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = call(again, leaf)
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
        grads = [leaf.grad, *(parameter.grad for parameter in again.parameters())]
        results.append([y.detach(), *grads, *again.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- torch.func


@pytest.mark.parametrize("name", ["bf16", "fp8-current", "nvfp4"])
def test_grad_of_a_function(name: str, rng: np.random.Generator) -> None:
    """torch.func.grad and functional_call give the gradients of backward, bit for bit; buffers move once."""
    layer = layer_of(name)
    x, params = torch.randn(M, K), dict(layer.named_parameters())

    def loss(params: Any, x: Tensor) -> Tensor:
        value: Tensor = functional_call(layer, params, (x, SIZES)).square().sum()
        return value

    made, dx = grad(loss, argnums=(0, 1))({key: value.detach() for key, value in params.items()}, x)
    layer.reset_buffers()
    leaf = x.clone().requires_grad_()
    loss(params, leaf).backward()
    assert leaf.grad is not None
    assert torch.equal(dx, leaf.grad)
    assert all(value.grad is not None and torch.equal(made[key], value.grad) for key, value in params.items())
    if name == "nvfp4":
        assert layer.seed_counter.item() == 1


def test_grad_of_an_mlp(rng: np.random.Generator) -> None:
    """The same for a GroupedMLP with probabilities."""
    mlp, x = GroupedMLP(G, K, 32, recipe=PRESETS["mxfp8"]), torch.randn(M, K)
    probs = torch.rand(M)
    dx, dp = grad(lambda x, p: mlp(x, SIZES, p).square().sum(), argnums=(0, 1))(x, probs)
    leaves = x.clone().requires_grad_(), probs.clone().requires_grad_()
    mlp(leaves[0], SIZES, leaves[1]).square().sum().backward()
    assert torch.equal(dx, leaves[0].grad)  # type: ignore[arg-type]
    assert torch.equal(dp, leaves[1].grad)  # type: ignore[arg-type]


def test_transforms_without_a_rule() -> None:
    """vmap, over a call or over its gradient, and a second derivative say what to do instead."""
    layer, x = layer_of("mxfp8"), torch.randn(2, M, K)
    with pytest.raises(NotImplementedError, match="give all rows in one call"):
        vmap(lambda rows: layer(rows, SIZES))(x)
    with pytest.raises(NotImplementedError, match="give all rows in one call"):
        vmap(grad(lambda rows: layer(rows, SIZES).sum()))(x)
    with pytest.raises(NotImplementedError, match="give all rows in one call"):
        jacrev(lambda rows: layer(rows, SIZES))(x[0])
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad(lambda rows: grad(lambda inner: layer(inner, SIZES).square().sum())(rows).sum())(x[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_block_routes_as_forward_did(reentrant: bool, rng: np.random.Generator) -> None:
    """A router with noise: the same sizes in both runs, and the gradients without checkpointing (faults.md 43)."""
    torch.manual_seed(int(rng.integers(1 << 31)))
    router, experts = torch.nn.Linear(K, G), GroupedMLP(G, K, N, recipe=PRESETS["nvfp4"], seed=1)
    x, state = torch.randn(M, K), torch.get_rng_state()
    sizes_seen: list[list[Tensor]] = []
    results = []

    def block(x: Tensor) -> Tensor:
        logits = router(x)
        weights, index = (logits + torch.randn_like(logits)).softmax(-1).topk(2)
        rows, sizes, routing = permute(x, index, G)
        sizes_seen[-1].append(sizes)
        return unpermute(experts(rows, sizes), routing, weights)

    for recomputed in (False, True):
        torch.set_rng_state(state)
        experts.reset_buffers()
        sizes_seen.append([])
        leaf = x.clone().requires_grad_()
        y = checkpoint(block, leaf, use_reentrant=reentrant) if recomputed else block(leaf)
        torch.rand(3)  # whatever else draws before backward
        leaves = [leaf, *router.parameters(), *experts.parameters()]
        for one in leaves:
            one.grad = None
        y.square().sum().backward()
        results.append([y.detach(), *(one.grad for one in leaves)])
    assert [len(seen) for seen in sizes_seen] == [1, 2]
    assert all(torch.equal(sizes, sizes_seen[0][0]) for seen in sizes_seen for sizes in seen)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- what is saved for backward


@pytest.mark.parametrize("name", ["bf16", "fp8-block", "mxfp8", "nvfp4"])
def test_saved_tensors_may_be_kept_elsewhere(name: str, rng: np.random.Generator) -> None:
    """Everything that backward needs goes through saved-tensor hooks, which may hold it on the CPU."""
    layer, x, seen = layer_of(name), torch.randn(M, K), []

    def pack(value: Tensor) -> Any:
        seen.append(value.numel())
        return value.dtype, value.shape, value.contiguous().view(-1).view(torch.uint8).tolist()

    def unpack(held: Any) -> Tensor:
        dtype, shape, raw = held
        return torch.tensor(raw, dtype=torch.uint8).view(dtype).view(shape)

    results = []
    for hooked in (False, True):
        layer.zero_grad()
        layer.reset_buffers()
        leaf = x.clone().requires_grad_()
        if hooked:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                y = layer(leaf, SIZES)
        else:
            y = layer(leaf, SIZES)
        y.square().sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad for p in layer.parameters())])
    assert sum(seen) >= M * K + G * N * K
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("layer", ["linear", "mlp", "moe", "activation"])
def test_hooks_give_back_what_was_saved(layer: str, rng: np.random.Generator) -> None:
    """Another dtype, shape or device is refused, for kernels take addresses; strided memory is copied."""
    x = torch.randn(M, K).bfloat16().requires_grad_()
    options: Any = {"recipe": "fp8-block", "dtype": torch.bfloat16}
    calls: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
        "linear": (GroupedLinear(G, K, N, **options), (SIZES,)),
        "mlp": (GroupedMLP(G, K, N, **options), (SIZES,)),
        "moe": (MoE(G, K, N, 2, **options), ()),
        "activation": (Activation("swiglu"), ()),
    }
    module, rest = calls[layer]

    def gradients(unpack: Any) -> tuple[Tensor, ...]:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
            y = module(x, *rest)
        return torch.autograd.grad(y.float().square().sum(), [x, *module.parameters()])

    wanted = gradients(lambda saved: saved)
    strided = gradients(lambda saved: torch.stack([saved, saved], -1)[..., 0])
    assert all(torch.equal(one, other) for one, other in zip(strided, wanted, strict=True))
    for unpack, said in (
        (Tensor.double, "gave back float64"),
        (lambda saved: saved.to("meta"), "on meta in the place"),
    ):
        with pytest.raises(ValueError, match=said):
            gradients(unpack)


def test_functional_calls_are_served_the_same(rng: np.random.Generator) -> None:
    """grouped_linear itself under grad and autocast; delayed scaling records once."""
    from octavo_torch import DelayedState

    recipe, x, w = DelayedScaling(history=3), torch.randn(M, K), torch.randn(G, N, K)
    states = [DelayedState.create(recipe, G) for _ in range(2)]
    dx = grad(lambda x: grouped_linear(x, w, SIZES, recipe=recipe, state=states[0]).sum())(x)
    leaf = x.clone().requires_grad_()
    grouped_linear(leaf, w, SIZES, recipe=recipe, state=states[1]).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(dx, leaf.grad)
    assert torch.equal(states[0].history, states[1].history)
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_linear(x, w, SIZES, recipe=NVFP4(stochastic_gradients=False))
    assert y.dtype is torch.bfloat16
