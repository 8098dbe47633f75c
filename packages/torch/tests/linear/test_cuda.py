"""The reference backend on a GPU: no host sync, captured graphs, TF32 kept out. Skipped where torch sees none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import octavo_numerics
import octavo_registry
from octavo import PRESETS, DelayedScaling, Recipe
from octavo_torch import DelayedState, GroupedLinear, check_errors, grouped_linear, quantize
from octavo_torch.compiler.graphs import no_waiting
from octavo_torch.compiler.status import DeviceSizesError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

G, K, N, M = 4, 160, 144, 300
SIZES = [33, 0, 150, 70]
RECIPES: dict[str, Recipe] = {**PRESETS, "fp8-delayed": DelayedScaling(history=4)}


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    """Whatever else is installed."""
    with octavo_registry.prefer("torch-reference"):
        yield


@contextmanager
def no_sync() -> Iterator[None]:
    """Any wait for the device raises."""
    torch.cuda.synchronize()
    with no_waiting():
        yield


def make(recipe: Recipe) -> tuple[GroupedLinear, Tensor, Tensor, Tensor]:
    layer = GroupedLinear(G, K, N, bias=True, recipe=recipe, dtype=torch.bfloat16, device="cuda", seed=1)
    x = torch.randn(M, K, dtype=torch.bfloat16, device="cuda")
    dy = torch.randn(M, N, dtype=torch.bfloat16, device="cuda")
    x[sum(SIZES) :], dy[sum(SIZES) :] = torch.nan, torch.nan
    return layer, x.requires_grad_(), dy, torch.tensor(SIZES, device="cuda")


def step(layer: GroupedLinear, x: Tensor, dy: Tensor, sizes: Tensor) -> list[Tensor]:
    assert layer.bias is not None
    y = layer(x, sizes)
    return [y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)]


@pytest.mark.parametrize("name", RECIPES)
def test_no_sync_and_the_values_of_the_cpu(name: str, rng: object) -> None:
    """Device sizes, forward and backward without a wait; values agree with the CPU's to output rounding."""
    layer, x, dy, sizes = make(RECIPES[name])
    host = GroupedLinear(G, K, N, bias=True, recipe=RECIPES[name], dtype=torch.bfloat16, seed=1)
    host.load_state_dict({key: value.cpu() for key, value in layer.state_dict().items()})
    step(layer, x, dy, sizes)
    layer.load_state_dict({key: value.cuda() for key, value in host.state_dict().items()})
    with no_sync():
        ours = step(layer, x, dy, sizes)
    theirs = step(host, x.detach().cpu().requires_grad_(), dy.cpu(), sizes.cpu())
    for a, b in zip(ours, theirs, strict=True):
        # twice bf16's unit of 2^-8: each device rounds its own sum once
        least = 2**-7 * float(b.detach().float().abs().mean())
        torch.testing.assert_close(a.cpu().float(), b.float(), rtol=2**-7, atol=least)
    again = step(layer, x, dy, sizes)
    if not layer.recipe.stochastic:
        assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_captured_once_replayed_with_other_sizes(name: str, rng: object) -> None:
    """A captured step equals eager bit for bit after sizes and inputs change (faults.md 36, 37)."""
    layer, x, dy, sizes = make(RECIPES[name])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(layer, x, dy, sizes)
    torch.cuda.current_stream().wait_stream(stream)
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, x, dy, sizes)
    for now in ([33, 0, 150, 70], [0, 300, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0]):
        with torch.no_grad():
            sizes.copy_(torch.tensor(now))
            x.copy_(torch.randn(M, K, device="cuda"))
            dy.copy_(torch.randn(M, N, device="cuda"))
        layer.load_state_dict(state)
        graph.replay()
        replayed = [value.clone() for value in captured]
        layer.load_state_dict(state)
        for a, b in zip(replayed, step(layer, x, dy, sizes), strict=True):
            assert torch.equal(a, b)


def test_tf32_is_never_used(rng: object) -> None:
    """Whatever the process allows, fp32 operands keep their 24 bits."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        x, w = torch.randn(64, K, device="cuda"), torch.randn(2, N, K, device="cuda")
        y = grouped_linear(x, w, [32, 32], recipe=PRESETS["bf16"])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    bound = octavo_numerics.error_bound(PRESETS["bf16"], K, out_dtype="float32")
    for g in range(2):
        rows = slice(32 * g, 32 * g + 32)
        report = bound.check(y[rows].cpu().numpy(), x[rows].cpu().numpy(), w[g].cpu().numpy())
        assert report.passed, report.describe()


def test_device_sizes_out_of_bounds_set_the_flag(rng: object) -> None:
    """A sum past M and a negative size: nothing raised, nothing out of bounds, told by check_errors (faults.md 61)."""
    x, w = torch.randn(64, K, device="cuda"), torch.randn(2, N, K, device="cuda")
    check_errors()
    for wrong, right in (([60, 60], [60, 4]), ([-5, 64], [0, 64])):
        y = grouped_linear(x, w, torch.tensor(wrong, device="cuda"), recipe=PRESETS["mxfp8"])
        with pytest.raises(DeviceSizesError, match="cuda:0"):
            check_errors()
        assert torch.equal(y, grouped_linear(x, w, right, recipe=PRESETS["mxfp8"]))
        check_errors()


def test_host_and_device_sizes_agree(rng: object) -> None:
    """Sizes from a list, a CPU tensor and a device tensor give the same bits; seeds from a device scalar, too."""
    x, w = torch.randn(64, K, device="cuda"), torch.randn(2, N, K, device="cuda")
    forms = ([30, 20], torch.tensor([30, 20]), torch.tensor([30, 20], device="cuda", dtype=torch.int32))
    results = [grouped_linear(x, w, sizes, recipe=PRESETS["nvfp4"]) for sizes in forms]
    assert all(torch.equal(results[0], other) for other in results[1:])
    spec = PRESETS["nvfp4"].quantizer("dy")
    assert spec is not None
    drawn = [quantize(x, spec, forms[2], seed=seed) for seed in (9, torch.tensor(9), torch.tensor(9, device="cuda"))]
    # codes past the sum are nobody's
    assert all(torch.equal(drawn[0].rowwise[:50], other.rowwise[:50]) for other in drawn[1:])


def test_delayed_state_on_the_device(rng: object) -> None:
    """Recording and updating wait for nothing."""
    recipe = DelayedScaling(history=4)
    state = DelayedState.create(recipe, 2, "cuda")
    x, w = torch.randn(64, K, device="cuda"), torch.randn(2, N, K, device="cuda", requires_grad=True)
    sizes = torch.tensor([30, 20], device="cuda")
    grouped_linear(x, w, sizes, recipe=recipe, state=state).sum().backward()
    state.update()
    with no_sync():
        grouped_linear(x, w, sizes, recipe=recipe, state=state).sum().backward()
        state.update()
    assert not torch.equal(state.scale, torch.ones_like(state.scale))
