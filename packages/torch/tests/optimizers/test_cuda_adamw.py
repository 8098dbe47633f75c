"""AdamW on a GPU: the definition's bits, eager and from a captured graph, without a wait. Skipped without a device."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from code_planes import planes
from torch import nn

import octavo_numerics as on
from octavo_torch import AdamW, CodedWeight, GroupedMLP, quantize_weight, quantized_parameters
from octavo_torch.compiler.graphs import no_waiting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

SHAPES = [(3, 200), (5,), (2, 3, 130)]


def on_host(tensor: Any) -> Any:
    return tensor.detach().float().cpu().numpy()


def as_defined(values: Any, dtype: torch.dtype) -> Any:
    return values.astype(ml_dtypes.bfloat16) if dtype is torch.bfloat16 else values


@pytest.mark.parametrize("state_bits", [32, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_step_is_the_definitions(dtype: torch.dtype, state_bits: int, rng: np.random.Generator) -> None:
    """One eager step, then one captured and replayed with other gradients and another learning rate."""
    parameters = [nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in SHAPES]
    seed, rate = int(rng.integers(1 << 40)), torch.tensor(1e-2, dtype=torch.float64, device="cuda")
    how: dict[str, Any] = {"master_dtype": dtype, "state_bits": state_bits, "seed": seed, "capturable": True}
    optimizer = AdamW(parameters, lr=rate, weight_decay=0.1, **how)
    masters = [as_defined(on_host(parameter), dtype) for parameter in parameters]
    states = [on.init_adamw(shape, state_bits=state_bits if len(shape) > 1 else 32) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    graph = torch.cuda.CUDAGraph()
    for step in range(6):
        rate.fill_(float(10.0 ** rng.uniform(-4, -1)))
        rule = on.AdamWRule(float(rate), (0.9, 0.999), 1e-8, 0.1)
        for number, parameter in enumerate(parameters):
            assert parameter.grad is not None
            parameter.grad.copy_(torch.randn(parameter.shape) * 2.0 ** int(rng.integers(-12, 4)))
            grad = as_defined(on_host(parameter.grad), dtype)
            masters[number], states[number] = on.adamw_step(
                masters[number], grad, states[number], rule, seed=seed, tensor=number
            )
        torch.cuda.synchronize()
        if step == 0:
            with no_waiting():
                optimizer.step()
        elif step == 1:
            with torch.cuda.graph(graph):
                optimizer.step()
            graph.replay()
        else:
            graph.replay()
        for parameter, master, state in zip(parameters, masters, states, strict=True):
            assert np.array_equal(on_host(parameter), master.astype(np.float32))
            own = optimizer.state[parameter]
            for name in ("exp_avg", "exp_avg_sq"):
                moment = getattr(state, name)
                wanted = moment.codes if isinstance(moment, on.BlockState) else moment
                assert np.array_equal(own[name].cpu(), wanted), (step, name)


@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8", "fp8-row", "nvfp4", "mxfp4"])
def test_codes_are_those_of_the_cast_master(recipe: str, rng: np.random.Generator) -> None:
    """Both planes equal quantize(cast(master)) after steps, by whatever backend serves the weights here."""
    with quantized_parameters(recipe):
        layer = GroupedMLP(3, 256, 128, dtype=torch.bfloat16, device="cuda", seed=7)
    optimizer = AdamW(layer.named_parameters(), lr=1e-2, state_bits=8, seed=3)
    x = torch.randn(96, 256, device="cuda").bfloat16()
    for _ in range(3):
        layer(x, torch.tensor([40, 0, 50], device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in layer.named_parameters():
        assert isinstance(weight, CodedWeight), name
        master = optimizer.state[weight]["master"]
        fresh = quantize_weight(master.bfloat16().requires_grad_(), recipe)
        assert all(map(torch.equal, planes(weight), planes(fresh)))
