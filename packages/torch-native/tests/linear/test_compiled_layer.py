"""Compiled layers on this backend: one graph, its operators and plans, with the bits and the records of eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gemm_layers import draw_layer
from linear_steps import BACKEND, SPLIT, state_of, step
from torch import Tensor

from octavo import PRESETS, Recipe
from octavo.recipe_base import GEMMS
from octavo_torch import DelayedState, grouped_linear


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["bf16", "fp8-current", "fp8-block", "mxfp8", "mxfp8-forward-only", "nvfp4"])
def test_compiled(name: str, rng: np.random.Generator, fresh_compiler: None) -> None:
    """One graph, forward and backward, with the bits of eager for every split of the rows (faults 46, 63)."""
    recipe = PRESETS[name]
    w = torch.randn(3, 32, 64, requires_grad=True)
    bias = torch.randn(3, 32, requires_grad=True)

    def run(x: Tensor, sizes: Tensor, scales: Tensor) -> Tensor:
        return grouped_linear(x * 2, w, sizes, recipe=recipe, seed=3, bias=bias, bias_scales=scales, backend=BACKEND)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for sizes in ([20, 0, 40], [0, 60, 0], [1, 2, 57]):
        x, dy, scales = torch.randn(70, 64), torch.randn(70, 32), torch.randn(70)
        results = []
        for call in (run, compiled):
            leaf = x.clone().requires_grad_()
            y = call(leaf, torch.tensor(sizes), scales)
            results.append([y, *torch.autograd.grad(y, (leaf, w, bias), dy)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), sizes
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_out_in_a_graph(rng: np.random.Generator, fresh_compiler: None) -> None:
    """A compiled call writes the caller's buffer where it stands."""
    x, w, sizes = torch.randn(70, 64), torch.randn(3, 32, 64), torch.tensor([20, 0, 40])
    out = torch.full((70, 32), torch.nan)
    address = out.data_ptr()

    def run(x: Tensor, out: Tensor) -> Tensor:
        return grouped_linear(x, w, sizes, recipe=PRESETS["mxfp8"], out=out, backend=BACKEND) + 1

    expected = run(x, torch.empty(70, 32))
    with torch.no_grad():
        made = torch.compile(run, fullgraph=True, backend="aot_eager")(x, out)
    assert torch.equal(made, expected)
    assert torch.equal(out + 1, expected)
    assert out.data_ptr() == address


def check(operator: Any, *arguments: Any, schema: bool = False) -> None:
    """torch's own checks; its schema test compares no float8 tensors."""
    utilities = ("test_schema", "test_faketensor") if schema else ("test_faketensor",)
    torch.library.opcheck(operator, arguments, test_utils=utilities)


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4", "fp8-current"])
def test_fake_kernels(name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators that a layer calls have the shapes, dtypes, strides and mutations that they state (fault 46)."""
    from octavo_torch_native.gemm import operators as gemm_ops

    recipe: Recipe = PRESETS[name]
    layer = draw_layer(rng, recipe, sizes=SPLIT)
    calls: list[tuple[Any, ...]] = []
    real = gemm_ops.gemm
    monkeypatch.setattr(gemm_ops, "gemm", lambda *given: (calls.append(given), real(*given))[1])
    bias = torch.full(layer.problem.w.shape[:2], float(layer.array("x")[0, 0]), dtype=torch.bfloat16)
    step(layer, bias=bias, bias_scales=torch.ones(len(layer.problem.x)))  # which no whole layer takes
    monkeypatch.undo()
    assert len(calls) == len(GEMMS)
    space = torch.ops.octavo_torch_native
    for given in calls:
        plain = given[0].dtype is torch.bfloat16
        check(space.gemm, *given, schema=plain)
        out = gemm_ops.gemm(*given)
        check(space.gemm_into, *given, torch.zeros_like(out), schema=plain)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            fake = space.gemm(*given)
        assert fake.shape == out.shape
        assert fake.dtype is out.dtype


def test_compiled_amax(rng: np.random.Generator, fresh_compiler: None) -> None:
    """One graph without the reference's operator; the history of an eager step."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    layer = draw_layer(rng, PRESETS["fp8-delayed"], sizes=SPLIT)
    targets: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    def run(x: Tensor, w: Tensor, sizes: Tensor, state: DelayedState) -> Tensor:
        return grouped_linear(x, w, sizes, recipe=layer.recipe, state=state, backend=BACKEND)

    # as inductor: without these torch cannot split a graph whose backward changes an input
    compiler = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    states = []
    for call in (run, torch.compile(run, fullgraph=True, backend=compiler)):
        state = state_of(layer)
        assert state is not None
        x, w = layer.array("x").requires_grad_(), layer.array("w").requires_grad_()
        torch.autograd.grad(call(x, w, layer.sizes, state), (x, w), layer.array("dy"))
        states.append(state)
    assert torch.equal(states[0].history, states[1].history)
    assert states[0].history[:, 0].any(1).all()
    assert targets.count("octavo_torch_native.quantize.default") == 3
    assert "octavo_torch.group_amax.default" not in targets


def test_one_plan_in_a_graph(rng: np.random.Generator, fresh_compiler: None) -> None:
    """Compiled, forward and backward hold one plan together: backward takes it from forward."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    x, w = torch.randn(70, 64, requires_grad=True), torch.randn(3, 32, 64, requires_grad=True)
    sizes = torch.tensor([20, 0, 40])

    def run(x: Tensor, sizes: Tensor) -> Tensor:
        return grouped_linear(x, w, sizes, recipe=PRESETS["mxfp8"], backend=BACKEND)

    compiled = torch.compile(run, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    torch.autograd.grad(compiled(x, sizes), (x, w), torch.randn(70, 32))
    assert len(seen) == 2
    for name, expected in (("plan", [1, 0]), ("gemm", [1, 2])):
        assert [graph.count(f"octavo_torch_native.{name}.default") for graph in seen] == expected, name
