"""A step that a backend serves: what it is given, what it writes, and that its bits are those of the composed one."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import octavo_numerics
import octavo_torch
from octavo import MXFP8, BlockScaling, Recipe
from octavo_registry.contract.optimizers import AdamWArrays, AdamWStepRule
from octavo_torch import AdamW, CodedWeight
from octavo_torch.optimizers import stepping
from octavo_torch.optimizers.backends import Step, step_for
from octavo_torch.quantizers.functional import quantize


def served(arrays: AdamWArrays[Any], rule: AdamWStepRule[Any], out: Any) -> None:
    """octavo_numerics' step of fp32 masters and moments, in place, and codes or values of it."""
    state = octavo_numerics.AdamWState(int(rule.step) - 1, arrays.exp_avg.numpy(), arrays.exp_avg_sq.numpy())
    known = octavo_numerics.AdamWRule(float(rule.lr), rule.betas, rule.eps, rule.weight_decay)
    master, made = octavo_numerics.adamw_step(arrays.master.numpy(), arrays.grad.numpy(), state, known)
    new = (master, made.exp_avg, made.exp_avg_sq)
    for array, values in zip((arrays.master, arrays.exp_avg, arrays.exp_avg_sq), new, strict=True):
        array.copy_(torch.from_numpy(np.asarray(values)))
    if isinstance(out, torch.Tensor):
        out.copy_(arrays.master)
    elif out is not None:
        layouts = out.spec.rowwise_layout, out.spec.columnwise_layout
        quantize(arrays.master.bfloat16(), out.spec.quantizer, layouts=layouts, operand="w", out=out)


def weight(recipe: Recipe | None, values: torch.Tensor) -> nn.Parameter:
    """Codes of these values, or the values."""
    if recipe is None:
        return nn.Parameter(values.clone())
    with octavo_torch.quantized_parameters(recipe):
        layer = octavo_torch.GroupedLinear(2, 160, 48, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(values)
    assert isinstance(layer.weight, nn.Parameter)
    return layer.weight


@pytest.mark.parametrize("writes_codes", [True, False])
@pytest.mark.parametrize("recipe", [None, BlockScaling(), MXFP8()], ids=["values", "block", "mxfp8"])
def test_a_served_step_has_the_composed_bits(
    recipe: Recipe | None, writes_codes: bool, rng: np.random.Generator
) -> None:
    """Masters, moments, and the parameter, whose codes the backend writes or the quantizer makes of its values."""
    values = torch.from_numpy(rng.standard_normal((2, 48, 160)).astype(np.float32)).bfloat16()
    parameters = [weight(recipe, values) for _ in range(2)]
    optimizers = [AdamW([parameter], 1e-2, weight_decay=0.1) for parameter in parameters]
    step = Step("a backend", served, writes_codes)
    for _ in range(3):
        grad = torch.from_numpy(rng.standard_normal((2, 48, 160)).astype(np.float32))
        for parameter in parameters:
            parameter.main_grad = grad.clone()  # type: ignore[attr-defined]
        before = None if recipe else parameters[0]._version
        with mock.patch.object(stepping, "step_for", return_value=step):
            optimizers[0].step()
        optimizers[1].step()
        assert before is None or parameters[0]._version > before
    states = [optimizer.state[parameter] for optimizer, parameter in zip(optimizers, parameters, strict=True)]
    for name, array in states[1].items():
        assert torch.equal(states[0][name], array), name
    if recipe is None:
        assert torch.equal(*parameters)
        return
    first, second = parameters
    assert isinstance(first, CodedWeight)
    assert isinstance(second, CodedWeight)
    for name in ("rowwise", "rowwise_scale", "columnwise", "columnwise_scale"):
        planes = [getattr(coded.codes, name).view(torch.uint8) for coded in (first, second)]
        assert torch.equal(*planes), name


def test_nothing_serves_a_cpu() -> None:
    """No backend here declares the operation for CPUs, so the step is composed."""
    parameter = nn.Parameter(torch.zeros(3, 8))
    assert step_for(parameter, AdamW([parameter]).state[parameter], torch.float32) is None


def test_a_compiled_step_is_the_step(rng: np.random.Generator) -> None:
    """Nothing of it is in a graph, which took a minute to compile, and as long again for another learning rate."""
    values = torch.from_numpy(rng.standard_normal((2, 48, 160)).astype(np.float32)).bfloat16()
    parameters = [nn.Parameter(values.clone()) for _ in range(2)]
    optimizers = [AdamW([parameter], 1e-2, state_bits=8) for parameter in parameters]
    graphs: list[torch.fx.GraphModule] = []
    compiled = torch.compile(optimizers[0].step, backend=lambda graph, _: graphs.append(graph) or graph)
    for step in range(2):
        grad = torch.from_numpy(rng.standard_normal((2, 48, 160)).astype(np.float32)).bfloat16()
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad, optimizer.param_groups[0]["lr"] = grad.clone(), 1e-2 / (1 + step)
        compiled()
        optimizers[1].step()
    assert torch.equal(*parameters)
    assert not [node for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")], graphs
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs between graphs: compile what is before"):
        torch.compile(optimizers[0].step, backend="eager", fullgraph=True)()
