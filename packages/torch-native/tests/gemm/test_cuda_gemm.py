"""The CUDA GEMMs through torch: bounds, captured graphs, streams, races, strides, whole steps; plans of device sizes.

Skipped where torch sees no Hopper device or octavo-native was built without CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import native_calls as native
import numpy as np
import pytest
import torch
from cuda_device import MARKS, SPLITS, no_sync
from gemm_layers import Layer, bound, draw_layer, request
from torch import Tensor

import octavo_registry
from octavo import PRESETS, CurrentScaling, HighPrecision, NoBackendError, Recipe, RowScaling
from octavo.recipe_base import GEMMS, Gemm
from octavo_conformance.cards.variants import MORE_RECIPES, RECIPES
from octavo_registry.contract.cards import Capability
from octavo_registry.dispatch.match import match
from octavo_torch import DelayedState, GroupedLinear, check_errors, grouped_linear
from octavo_torch.compiler.status import DeviceSizesError
from octavo_torch_native.plugin import CARD

pytestmark = MARKS

SHAPE = (700, 272, 208, 6)
M, K, N, G = SHAPE
ALL = {**RECIPES, **MORE_RECIPES}
HIGH = HighPrecision()
CUDA: dict[str, Any] = {"device": "cuda", "arch": (9, 0)}


@pytest.fixture(autouse=True)
def no_flag_is_left() -> Iterator[None]:
    """Sizes that fit set no flag."""
    check_errors()
    yield
    check_errors()


def layer_of(rng: np.random.Generator, recipe: Recipe, dtype: str = "bfloat16", **rest: Any) -> Layer:
    return draw_layer(rng, recipe, dtype, shape=rest.pop("shape", SHAPE), device="cuda", **rest)


def accumulation(recipe: Recipe, gemm: Gemm) -> str:
    """What the card states."""

    row = match(CARD, request(gemm, recipe, **CUDA))
    assert isinstance(row, Capability)
    return row.accumulation


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("name", ALL)
def test_within_the_bounds(name: str, gemm: Gemm, rng: np.random.Generator) -> None:
    """Every recipe against float64, in every output dtype, native and plain operands bit for bit alike (faults 1, 2, 3,
    6, 7, 8, 13, 16, 17, 19, 20, 59)."""
    recipe = ALL[name]
    for split in SPLITS:
        layer = layer_of(rng, recipe, sizes=split)
        operands, plain = layer.operands(gemm), layer.operands(gemm, plain=True)
        for out in ("bfloat16", "float32", "float16"):
            run = bound(gemm, recipe, out_dtype=out, **CUDA)
            made = run(*operands, layer.sizes)
            layer.check(gemm, made, accumulation=accumulation(recipe, gemm))
            assert torch.equal(raw(run(*plain, layer.sizes)), raw(made)), f"{out}, plain operands"


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", [CurrentScaling, RowScaling])
def test_fast_accumulation(recipe: Any, gemm: Gemm, rng: np.random.Generator) -> None:
    """Without promotion the sums keep to the wider bound; K past many promotion intervals (faults 21, 24, 25)."""
    fast = recipe(fast_accumulation=frozenset(GEMMS))
    shape = (256, 4112, 48, 2) if gemm == "fprop" else (256, 48, 4112, 2) if gemm == "dgrad" else (4096, 48, 64, 2)
    layer = layer_of(rng, fast, shape=shape, sizes=[shape[0] - 120, 100])
    made = bound(gemm, fast, **CUDA)(*layer.operands(gemm), layer.sizes)
    layer.check(gemm, made, accumulation="hopper_fp8")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gemm", GEMMS)
def test_strides(gemm: Gemm, dtype: str, rng: np.random.Generator) -> None:
    """Operands and results in any memory; odd addresses are copied (faults 44, 45, 58)."""
    layer = layer_of(rng, HIGH, dtype, sizes=SPLITS[0])
    first, second = layer.operands(gemm)
    run = bound(gemm, HIGH, dtype, **CUDA)
    expected = run(first, second, layer.sizes)

    def views(value: Tensor) -> dict[str, Tensor]:
        wide = torch.full((*value.shape[:-1], 2 * value.shape[-1]), torch.nan, dtype=value.dtype, device="cuda")
        wide[..., 16 : 16 + value.shape[-1]] = value
        late = torch.full((value.numel() + 1,), torch.nan, dtype=value.dtype, device="cuda")
        late[1:] = value.reshape(-1)
        return {
            "slice": wide[..., 16 : 16 + value.shape[-1]],
            "odd address": late[1:].view(value.shape),
            "transposed": value.transpose(-1, -2).contiguous().transpose(-1, -2),
        }

    for what, view in views(first).items():
        assert torch.equal(raw(run(view, second, layer.sizes)), raw(expected)), f"first, {what}"
    for what, view in views(second).items():
        assert torch.equal(raw(run(first, view, layer.sizes)), raw(expected)), f"second, {what}"
    for what, out in views(torch.full_like(expected, torch.nan)).items():
        assert run(first, second, layer.sizes, out=out) is out
        assert torch.equal(raw(out), raw(expected)), f"out, {what}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_wgrad_accumulates(name: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """main_grad: added in fp32, rounded once; a group without rows keeps its bits, NaN and -0 included."""
    recipe = RECIPES[name]
    layer = layer_of(rng, recipe, sizes=SPLITS[0])
    operands = layer.operands("wgrad")
    exact = bound("wgrad", recipe, out_dtype="float32", **CUDA)(*operands, layer.sizes)
    start = torch.randn(G, N, K, device="cuda").to(dtype)
    start[1] = torch.nan
    start[1, 0] = -0.0
    expected = (start.float() + exact).to(dtype)
    expected[1] = start[1]
    wide = torch.full((G, N, 2 * K), torch.nan, dtype=dtype, device="cuda")
    odd = torch.full((G, N, K + 3), torch.nan, dtype=dtype, device="cuda")
    run = bound("wgrad", recipe, **CUDA)
    for out in (torch.empty_like(start), wide[..., :K], odd[..., 1 : 1 + K]):
        out.copy_(start)
        with no_sync():
            run(*operands, layer.sizes, out=out, accumulate=True)
        assert torch.equal(raw(out), raw(expected))
    assert wide[..., K:].isnan().all()


def bias_of(layer: Layer) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(layer.problem.bias.astype(np.float32)).cuda(), torch.randn(M, device="cuda")


@pytest.mark.parametrize("name", RECIPES)
def test_bias(name: str, rng: np.random.Generator) -> None:
    """Alone and times the rows' scales, which are not read past the sum."""
    recipe = RECIPES[name]
    layer = layer_of(rng, recipe, sizes=SPLITS[0])
    bias, scales = bias_of(layer)
    scales[sum(SPLITS[0]) :] = torch.nan
    run = bound("fprop", recipe, **CUDA)
    operands = layer.operands("fprop")
    how = accumulation(recipe, "fprop")
    layer.check("fprop", run(*operands, layer.sizes, bias=bias), bias=True, accumulation=how)
    y = run(*operands, layer.sizes, bias=bias, bias_scales=scales)
    layer.check("fprop", y, bias=True, bias_scales=scales.cpu().numpy(), accumulation=how)


Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def step_of(recipe: Recipe, w: Tensor, main_grad: Tensor | None = None) -> Step:
    """y, dx and dw of a layer from (x, dy, sizes); with main_grad dw is added to it as well."""
    state = DelayedState.create(recipe, G, "cuda") if recipe.stateful else None  # type: ignore[arg-type]
    seed = torch.tensor(7, device="cuda") if recipe.stochastic else None

    def step(x: Tensor, dy: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        y = grouped_linear(leaf, w, sizes, recipe=recipe, seed=seed, state=state, backend="torch-native")
        dx, dw = torch.autograd.grad(y, (leaf, w), dy)
        if main_grad is not None:
            main_grad.add_(dw)
        return y.detach(), dx, dw

    return step


def captured(step: Step, *inputs: Tensor) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """The step in a graph, after a warm-up on another stream; nothing in it waits."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with no_sync(), torch.cuda.graph(graph):
        made = step(*inputs)
    return graph, made


def inputs_of(split: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """x, dy with NaN tails, and sizes."""
    x, dy = torch.randn(M, K, device="cuda").bfloat16(), torch.randn(M, N, device="cuda").bfloat16()
    x[sum(split) :], dy[sum(split) :] = torch.nan, torch.nan
    return x, dy, torch.tensor(split, device="cuda")


@pytest.mark.parametrize("name", PRESETS)
def test_a_step_is_captured_and_replayed_with_other_sizes(name: str, rng: np.random.Generator) -> None:
    """Forward and backward in one graph: sizes, inputs and weights change, and every replay has the bits of eager
    (faults 33, 35, 36, 37)."""
    recipe = PRESETS[name]
    w = torch.randn(G, N, K, device="cuda").bfloat16().requires_grad_()
    main_grad = torch.zeros(G, N, K, device="cuda")
    held = inputs_of(SPLITS[0])
    graph, made = captured(step_of(recipe, w, main_grad), *held)
    eager = step_of(recipe, w)
    for split in [*SPLITS, *SPLITS]:
        for target, value in zip(held, inputs_of(split), strict=True):
            target.copy_(value)
        with torch.no_grad():
            w.normal_()
        before = main_grad.clone()
        graph.replay()
        expected = eager(*held)
        for what, ours, theirs in zip(("y", "dx", "dw"), made, expected, strict=True):
            assert torch.equal(raw(ours), raw(theirs)), f"{what} of sizes {split}"
        assert torch.equal(main_grad, before + expected[2])


@pytest.mark.parametrize("name", ["bf16", "fp8-current", "mxfp8", "nvfp4"])
def test_graphed_callables(name: str, rng: np.random.Generator) -> None:
    """make_graphed_callables captures forward and backward apart: backward's plan is the replayed forward's."""
    recipe = PRESETS[name]
    module = GroupedLinear(G, K, N, recipe=recipe, device="cuda", dtype=torch.bfloat16, backend="torch-native", seed=1)
    twin = GroupedLinear(G, K, N, recipe=recipe, device="cuda", dtype=torch.bfloat16, backend="torch-native", seed=1)
    twin.load_state_dict(module.state_dict())
    x, dy, sizes = inputs_of(SPLITS[0])
    graphed = torch.cuda.make_graphed_callables(module, (x.clone().requires_grad_(), sizes))
    for split in SPLITS:
        x, dy, sizes = inputs_of(split)
        results = []
        for call in (graphed, twin):
            if recipe.stochastic:
                # the warm-up has moved the counter
                (module if call is graphed else twin).seed_counter.zero_()
            leaf = x.clone().requires_grad_()
            y = call(leaf, sizes)
            weight = (module if call is graphed else twin).weight
            weight.grad = None
            y.backward(dy)
            results.append((y.detach().clone(), leaf.grad, weight.grad))
        for what, ours, theirs in zip(("y", "dx", "dw"), *results, strict=True):
            assert torch.equal(raw(ours), raw(theirs)), f"{what} of sizes {split}"


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_waits(name: str, rng: np.random.Generator) -> None:
    """Device sizes: no call of a step synchronizes."""
    step = step_of(RECIPES[name], torch.randn(G, N, K, device="cuda").bfloat16().requires_grad_())
    inputs = inputs_of(SPLITS[0])
    step(*inputs)
    with no_sync():
        step(*inputs)


@pytest.mark.parametrize("name", RECIPES)
def test_two_streams_at_once(name: str, rng: np.random.Generator) -> None:
    """Each call's workspace and plan are its own (faults 34, 35)."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    w = torch.randn(G, N, K, device="cuda").bfloat16().requires_grad_()
    step = step_of(RECIPES[name], w)
    problems = [inputs_of(split) for split in SPLITS[:2]]
    expected = [step(*problem) for problem in problems]
    torch.cuda.synchronize()
    results: list[list[tuple[Tensor, ...]]] = [[], []]
    for _ in range(50):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[number].append(step(*problems[number]))
    torch.cuda.synchronize()
    for number in range(2):
        for made in results[number][::7]:
            for ours, theirs in zip(made, expected[number], strict=True):
                assert torch.equal(raw(ours), raw(theirs)), f"stream {number}"


@pytest.mark.parametrize("name", RECIPES)
def test_a_hundred_repeats(name: str, rng: np.random.Generator) -> None:
    """The same bytes each time, under load on another stream (faults 22, 30, 32, 41)."""
    step = step_of(RECIPES[name], torch.randn(G, N, K, device="cuda").bfloat16().requires_grad_())
    inputs = inputs_of(SPLITS[0])
    first = step(*inputs)
    load, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        with torch.cuda.stream(load):
            busy = busy @ busy * 1e-3
        for ours, theirs in zip(step(*inputs), first, strict=True):
            wrong += (raw(ours) != raw(theirs)).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("sizes", [[400, 400, 0, 0, 0, 0], [33, -5, 10, 0, 0, 0], [1 << 62, 1 << 62, 3, 0, 0, 0]])
def test_bad_device_sizes_are_flagged(sizes: list[int], gemm: Gemm, rng: np.random.Generator) -> None:
    """Sums past M, negative and huge sizes: cut, flagged, nothing read or written out of bounds (faults 61, 62)."""
    layer = layer_of(rng, HIGH, sizes=SPLITS[4])
    operands = layer.operands(gemm)
    run = bound(gemm, HIGH, **CUDA)
    ends = np.minimum(np.cumsum([min(max(size, 0), M) for size in sizes]), M)
    right = torch.from_numpy(np.diff(ends, prepend=0)).cuda()
    made = run(*operands, torch.tensor(sizes, device="cuda"))
    with pytest.raises(DeviceSizesError, match="cuda:0"):
        check_errors()
    assert torch.equal(raw(made), raw(run(*operands, right)))


def test_host_sizes_and_plans(rng: np.random.Generator) -> None:
    """A CPU tensor, a device tensor of either width, a plan: the same bits."""
    layer = layer_of(rng, HIGH, sizes=SPLITS[0])
    operands = layer.operands("fprop")
    run = bound("fprop", HIGH, **CUDA)
    expected = run(*operands, layer.sizes)
    for form in (layer.sizes.cpu(), layer.sizes.long(), native.plan(layer.sizes, M)):
        assert torch.equal(raw(run(*operands, form)), raw(expected))


@pytest.mark.parametrize("name", ["bf16", "mxfp8"])
def test_device_sizes_overwritten_before_backward(name: str, rng: np.random.Generator) -> None:
    """A router's buffer that holds the next step's sizes already: one plan a step, and backward has forward's."""
    w = torch.randn(G, N, K, device="cuda").bfloat16().requires_grad_()
    x, dy, sizes = inputs_of(SPLITS[0])
    results = []
    for overwrite in (False, True):
        leaf, held = x.clone().requires_grad_(), sizes.clone()
        y = grouped_linear(leaf, w, held, recipe=PRESETS[name], backend="torch-native")
        if overwrite:
            held.copy_(held.flip(0))
        results.append((y.detach(), *torch.autograd.grad(y, (leaf, w), dy)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(raw(ours), raw(theirs))


def test_operands_of_two_dtypes_go_to_another_backend(rng: np.random.Generator) -> None:
    """dy of a fp16 layer with bf16 results is bf16: dgrad and wgrad are planned elsewhere, and the layer trains."""
    w = torch.randn(G, N, K, device="cuda").half().requires_grad_()
    x, dy, sizes = inputs_of(SPLITS[0])
    recipe = HighPrecision(output_dtype="bfloat16")
    leaf = x.half().requires_grad_()
    y = grouped_linear(leaf, w, sizes, recipe=recipe)
    assert y.dtype is torch.bfloat16
    dx, dw = torch.autograd.grad(y, (leaf, w), dy)
    used = sum(SPLITS[0])
    assert (dx.dtype, dw.dtype) == (torch.float16, torch.float16)
    assert dx[:used].isfinite().all()
    assert dw.isfinite().all()
    with pytest.raises(NoBackendError, match="dy is bfloat16 and w float16"):
        grouped_linear(leaf, w, sizes, recipe=recipe, backend="torch-native")


def test_what_cuda_refuses(rng: np.random.Generator) -> None:
    """fp32 operands and odd sides are another backend's, with a reason; nothing is refused while a layer runs."""
    with pytest.raises(NoBackendError, match="takes bfloat16, float16, the input is float32"):
        bound("fprop", HIGH, "float32", **CUDA)
    with pytest.raises(NoBackendError, match="k is 40, and its cuda GEMMs take multiples of 16"):
        bound("fprop", HIGH, k=40, n=32, **CUDA)
    x, w = torch.randn(20, 40, device="cuda"), torch.randn(2, 24, 40, device="cuda")
    y = grouped_linear(x, w, [5, 9], recipe=None)
    assert y.shape == (20, 24)


def test_compiled(rng: np.random.Generator) -> None:
    """reduce-overhead captures what the compiler makes of a step."""
    torch.compiler.reset()
    w = torch.randn(G, N, K, device="cuda").bfloat16().requires_grad_()

    def run(x: Tensor, sizes: Tensor) -> Tensor:
        return grouped_linear(x, w, sizes, recipe=PRESETS["mxfp8"], backend="torch-native")

    compiled = torch.compile(run, fullgraph=True, mode="reduce-overhead")
    for split in SPLITS:
        x, dy, sizes = inputs_of(split)
        results = []
        for call in (run, compiled):
            leaf = x.clone().requires_grad_()
            torch.compiler.cudagraph_mark_step_begin()
            y = call(leaf, sizes)
            results.append([value.clone() for value in (y, *torch.autograd.grad(y, (leaf, w), dy))])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(raw(ours), raw(theirs)), split


def test_kernels_are_told(rng: np.random.Generator) -> None:
    """`octavo why --kernels` on this device: the chosen tile first."""
    from octavo_torch_native.backend import NativeBackend

    choices = NativeBackend().kernels(request("fprop", PRESETS["mxfp8"], k=K, n=N, groups=G, **CUDA), M)
    assert choices[0].chosen
    assert octavo_registry.plan(request("fprop", PRESETS["mxfp8"], k=K, n=N, groups=G, **CUDA)).backend == CARD.name
