"""Captured forward and backward against eager, bit for bit, while everything changes between replays.

Skipped where torch sees no Hopper device or octavo-native was built without CUDA kernels.
"""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
import torch
from graph_layers import MARKS, Differences, M, follow, inputs, pair, splits, state, step_of, stir
from torch import Tensor

import octavo_torch_cudagraph as graphs
from octavo import NoBackendError
from octavo_conformance.cards.variants import RECIPES
from octavo_torch import check_errors, quantize
from octavo_torch.compiler.graphs import no_waiting
from octavo_torch.compiler.status import DeviceSizesError

pytestmark = MARKS

MXFP8 = RECIPES["mxfp8"]


def replays_equal_eager(name: str, main_grad: bool, rng: np.random.Generator, count: int) -> None:
    layer, twin = pair(RECIPES[name], main_grad=main_grad)
    step, eager = step_of(layer), step_of(twin)
    captured = graphs.capture(step, *inputs([7] * 6), restore=state(layer))
    wrong = Differences()
    wrong.add("after the warm-up", state(layer), state(twin))
    for number, split in enumerate(splits(rng, count)):
        stir(layer)
        follow(layer, twin)
        arguments = inputs(split)
        # whatever the graph does not own is overwritten
        torch.full((1 << 24,), torch.nan, device="cuda")
        with no_waiting():
            made = captured(*arguments)
            expected = eager(*arguments)
            wrong.add(f"replay {number}, sizes {split}", [*made, *state(layer)], [*expected, *state(twin)])
    wrong.none()


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("name", RECIPES)
def test_replays_equal_eager(name: str, main_grad: bool, rng: np.random.Generator) -> None:
    """Sizes (none at all, all in one group, tails), inputs, loss scale, weights (quantized in the graph), main_grad
    and delayed scaling's state change between replays, and nothing waits (faults 33, 35, 36, 37)."""
    replays_equal_eager(name, main_grad, rng, 50)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_thousand_replays_equal_eager(name: str, rng: np.random.Generator) -> None:
    """The same a thousand times, into main_grad."""
    replays_equal_eager(name, True, rng, 1000)


@pytest.mark.parametrize("name", RECIPES)
def test_two_graphs_on_two_streams(name: str, rng: np.random.Generator) -> None:
    """Workspaces, plans and results are each graph's own (faults 34, 35)."""
    layers, arguments, captured, expected = [], [], [], []
    for split in splits(rng, 4)[2:]:
        layer, twin = pair(RECIPES[name])
        for one in (layer, twin):
            one.update_scales = lambda: None  # the same scales at each replay
        arguments.append(inputs(split))
        step = step_of(layer)
        captured.append(graphs.capture(step, *arguments[-1], restore=state(layer)))
        expected.append([value.clone() for value in step_of(twin)(*arguments[-1])])
        layers.append(layer)
    before = [[value.clone() for value in state(layer)] for layer in layers]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    wrong = Differences()
    torch.cuda.synchronize()
    for number in range(40):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream), no_waiting():
                for value, was in zip(state(layers[which]), before[which], strict=True):
                    value.detach().copy_(was)
                made = captured[which](*arguments[which])
                wrong.add(f"graph {which}, replay {number}", made, expected[which])
    torch.cuda.synchronize()
    wrong.none()


@pytest.mark.parametrize("name", RECIPES)
def test_ten_replays_end(name: str, rng: np.random.Generator) -> None:
    """Forward and backward back to back, ten times, within a minute: a shared workspace would hang here (fault 35)."""
    layer, _ = pair(RECIPES[name])
    captured = graphs.capture(step_of(layer), *inputs([60] * 6), restore=state(layer))
    done = torch.cuda.Event()
    for _ in range(10):
        captured.replay()
    done.record()
    end = time.monotonic() + 60
    while not done.query():
        assert time.monotonic() < end, "ten replays have not ended after a minute"
        time.sleep(0.01)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_plain_capture_has_graph_safe_plans(rng: np.random.Generator) -> None:
    """torch.cuda.graph without a helper: the registry gives the capture torch-cudagraph's plans, eager calls
    torch-native's, and host sizes are refused (fault 36)."""
    layer, _ = pair(MXFP8)
    x, _, sizes = inputs([50] * 6)
    layer(x, sizes)
    graph = torch.cuda.CUDAGraph()
    with no_waiting(), torch.cuda.graph(graph):
        y = layer(x, sizes)
    plans = {resolved.graph_safe: resolved.plan.fprop.backend for resolved in layer._layers.values()}
    assert plans == {False: "torch-native", True: "torch-cudagraph"}
    graph.replay()
    assert torch.equal(y, layer(x, sizes))
    with pytest.raises(NoBackendError, match="sizes are on the host"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(x, [50] * 6)
    with pytest.raises(NoBackendError, match="sizes are on the host"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        quantize(x, MXFP8.quantizer("x"), [50] * 6)
    assert torch.equal(layer(x, [50] * 6), layer(x, sizes))


def test_quantize_without_sizes_is_captured(rng: np.random.Generator) -> None:
    """One group of all rows needs no sizes of the caller, and none from the host."""
    x, spec = torch.randn(300, 272, device="cuda"), MXFP8.quantizer("x")
    captured = graphs.capture(lambda x: quantize(x, spec).rowwise, x)
    other = torch.randn_like(x)
    assert torch.equal(captured(other).view(torch.uint8), quantize(other, spec).rowwise.view(torch.uint8))


def test_what_waits_is_refused(rng: np.random.Generator) -> None:
    """Host sizes, a read of a value: refused in the warm-up in a sentence, and the device works on."""
    layer, _ = pair(MXFP8)
    x, dy, sizes = inputs([50] * 6)
    with pytest.raises(NoBackendError, match="sizes are on the host"):
        graphs.capture(lambda x: layer(x, [50] * 6), x)
    with pytest.raises(graphs.GraphUnsafeError, match="waits for the device"):
        graphs.capture(lambda x: x * float(x.sum()), x)
    with pytest.raises(graphs.GraphUnsafeError, match="waits for the device"):
        graphs.capture(lambda x, s: layer(x, torch.tensor(s.tolist(), device="cuda")), x, sizes)
    captured = graphs.capture(step_of(layer), x, dy, sizes, restore=state(layer))
    with pytest.raises(ValueError, match=r"argument 2 is int64 \[6\]"):
        captured(x, dy, sizes.long())
    with pytest.raises(ValueError, match=r"argument 0 is bfloat16 \[1, 272\]"):  # copy_ would broadcast it
        captured(x[:1], dy, sizes)
    captured(x, dy, sizes)


def test_strided_arguments_are_copied_in(rng: np.random.Generator) -> None:
    """Whatever the strides of a replay's arguments, the graph has its own."""
    layer, twin = pair(MXFP8)
    x, dy, sizes = inputs([50] * 6)
    captured = graphs.capture(step_of(layer), x, dy, sizes, restore=state(layer))
    wide = torch.randn(x.shape[0], 2 * x.shape[1], device="cuda").bfloat16()
    for view in (wide[:, 3 : 3 + x.shape[1]], x.T.contiguous().T, x[:1].expand_as(x)):
        wrong = Differences()
        wrong.add("strided x", captured(view, dy, sizes), step_of(twin)(view, dy, sizes))
        wrong.none()


def test_bad_sizes_of_a_replay_are_flagged(rng: np.random.Generator) -> None:
    """A sum past M and a negative size: cut in the graph, told by check_errors outside of it (fault 61)."""
    layer, twin = pair(MXFP8)
    x, dy, sizes = inputs([M, 0, 0, 0, 0, 0])
    captured = graphs.capture(step_of(layer), x, dy, sizes, restore=state(layer))
    for wrong, right in (([300, 300, 0, 0, 0, 0], [300, 100, 0, 0, 0, 0]), ([-5, 9, 0, 0, 0, 0], [0, 9, 0, 0, 0, 0])):
        made = captured(x, dy, torch.tensor(wrong, device="cuda", dtype=torch.int32))
        with pytest.raises(DeviceSizesError, match="cuda:0"):
            check_errors()
        found = Differences()
        found.add("cut sizes", made, step_of(twin)(x, dy, torch.tensor(right, device="cuda")))
        found.none()
    captured(x, dy, sizes)
    check_errors()


def test_what_the_function_closes_over_lives_on(rng: np.random.Generator) -> None:
    """A replay reads it, though nobody else holds it any more."""
    factor = torch.full((64,), 3.0, device="cuda")
    captured = graphs.capture(lambda x, factor=factor: x * factor, torch.ones(64, device="cuda"))
    del factor
    torch.full((64,), torch.nan, device="cuda")
    assert torch.equal(captured(torch.ones(64, device="cuda")), torch.full((64,), 3.0, device="cuda"))


def test_memory_and_addresses_stay(rng: np.random.Generator) -> None:
    """Replays allocate nothing, and results stay where they are (fault 52)."""
    layer, _ = pair(MXFP8)
    arguments = inputs([50] * 6)
    captured = graphs.capture(step_of(layer), *arguments, restore=state(layer))
    captured(*arguments)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # counts what the warm-up's stream still held
    before = torch.cuda.memory_allocated()
    addresses = [value.data_ptr() for value in captured.outputs]
    for _ in range(100):
        made = captured(*arguments)
    assert [value.data_ptr() for value in made] == addresses
    assert torch.cuda.memory_allocated() <= before


def test_out_and_grad_input_are_written_by_replays(rng: np.random.Generator) -> None:
    """The caller's own buffers in place of the pool's."""
    layer, twin = pair(MXFP8)
    x, dy, sizes = inputs([50] * 6)
    out, grad_input = torch.empty_like(dy), torch.empty_like(x)

    def step(x: Tensor, dy: Tensor, sizes: Tensor) -> None:
        leaf = x.detach().requires_grad_()
        y = layer(leaf, sizes, out=out.detach(), grad_input=grad_input)
        torch.autograd.grad(y, leaf, dy)

    captured = graphs.capture(step, x, dy, sizes)
    for split in splits(rng, 5):
        x, dy, sizes = inputs(split)
        captured(x, dy, sizes)
        wrong = Differences()
        wrong.add(f"sizes {split}", (out, grad_input), step_of(twin)(x, dy, sizes)[:2])
        wrong.none()
