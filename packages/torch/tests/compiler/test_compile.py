"""torch.compile in one graph, with the bits of eager; operators pass torch's own checks."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch

from octavo import NVFP4, BlockScaling, DelayedScaling, HighPrecision, Recipe
from octavo_torch import GroupedLinear, grouped_linear, quantize, quantize_weight
from octavo_torch.arithmetic import operators

SIZES = torch.tensor([20, 0, 40])
RECIPES: dict[str, Recipe] = {
    "high_precision": HighPrecision(),
    "block": BlockScaling(),
    "nvfp4": NVFP4(),
    "delayed": DelayedScaling(history=3),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def steps(layer: GroupedLinear, forward: Any, inputs: list[tuple[Any, Any, Any]]) -> list[torch.Tensor]:
    seen = []
    for x, sizes, dy in inputs:
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = forward(leaf, sizes)
        y.backward(dy)
        layer.update_scales()
        seen += [y.detach(), leaf.grad, layer.weight.grad.clone(), layer.bias.grad.clone()]  # type: ignore[union-attr]
        seen += [buffer.clone() for buffer in layer.buffers()]
    return seen


@pytest.mark.parametrize("name", RECIPES)
def test_one_graph_with_the_bits_of_eager(name: str, rng: object) -> None:
    """fullgraph forward and backward, other sizes without compiling again, state and seeds kept in step."""
    layer = GroupedLinear(3, 64, 48, bias=True, recipe=RECIPES[name], dtype=torch.bfloat16, seed=1)
    twin = copy.deepcopy(layer)
    inputs = [
        (torch.randn(70, 64, dtype=torch.bfloat16), sizes, torch.randn(70, 48, dtype=torch.bfloat16))
        for sizes in (SIZES, torch.tensor([0, 70, 0]), torch.tensor([1, 2, 3]))
    ]
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(steps(layer, compiled, inputs), steps(twin, twin, inputs), strict=True):
        assert torch.equal(ours, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ and there is no g++ here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_and_the_function(rng: object) -> None:
    """The default backend; a function with a quantized weight; wrong sizes raise when the graph runs."""
    recipe = RECIPES["block"]
    x, w = torch.randn(70, 64), torch.randn(3, 48, 64, requires_grad=True)
    handle = quantize_weight(w, recipe)

    def run(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        y = grouped_linear(x, w, sizes, recipe=recipe) + grouped_linear(x, handle, sizes, recipe=recipe)
        return y.relu()

    compiled = torch.compile(run, fullgraph=True)
    # g++ neither tries each instruction set of this processor nor precompiles headers for one kernel
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}):
        assert torch.equal(compiled(x, SIZES), run(x, SIZES))
    with pytest.raises(ValueError, match="sum to 80"):
        compiled(x, torch.tensor([40, 0, 40]))


def test_operators_pass_opcheck(rng: object) -> None:
    """Fake kernels against real metadata (faults.md 46), and schemas that name no mutation because there is none."""
    x, w, dy = torch.randn(70, 64), torch.randn(3, 48, 64), torch.randn(70, 48)
    text = operators.quantizer_text(NVFP4().quantizer("dy"))  # type: ignore[arg-type]
    q = quantize(x, NVFP4().quantizer("x"), SIZES)  # type: ignore[arg-type]
    plane = q.rowwise, q.rowwise_scale, q.rowwise_global, SIZES, operators.quantizer_text(q.spec.quantizer)
    space = torch.ops.octavo_torch
    plain = operators.quantizer_text(BlockScaling().quantizer("w"))  # type: ignore[arg-type]
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (space.bound_sizes, (SIZES, 70, x)),
        (space.group_amax, (x, SIZES)),
        (space.group_amax, (w, None)),
        (space.fprop, (x, w, SIZES, None, None, torch.bfloat16)),
        (space.dgrad, (dy, w, SIZES, torch.float32)),
        (space.wgrad, (x, dy, SIZES, torch.float32)),
        (space.bias_grads, (dy, SIZES, torch.randn(3, 48), torch.randn(70))),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    # torch compares no float8 tensors, which its schema test would
    float8: list[tuple[Any, tuple[Any, ...]]] = [
        (space.quantize, (dy, SIZES, text, torch.tensor(3), "dy", 0, None)),
        (space.quantize, (w, None, plain, None, "w", 0, None)),
        (space.dequantize, (*plane, [70, 64], 3, "rowwise")),
    ]
    for operator, arguments in float8:
        torch.library.opcheck(operator, arguments, test_utils=("test_faketensor",))
