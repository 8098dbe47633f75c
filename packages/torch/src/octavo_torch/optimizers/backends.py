"""Finds the backend that steps a parameter, and runs its step: octavo_registry.contract.optimizers."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from octavo_registry import plan_if_served
from octavo_registry.contract.optimizers import AdamWArrays, AdamWStep, AdamWStepRule
from octavo_registry.contract.request import OptimizerRequest
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.dispatch.device import arch_of
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.memo import Memo
from octavo_torch.optimizers.gradients import local_of, unwrapped
from octavo_torch.optimizers.state import State, write_parameter

_BLOCKS = 8
_HALVES = (torch.bfloat16, torch.float16)


class Step(NamedTuple):
    """A backend's step of one kind of parameter.

    backend       its name
    run           the function
    writes_codes  the planes of a CodedWeight are its `out`; else they are quantized from what it writes
    """

    backend: str
    run: AdamWStep[Tensor, GroupedTensor]
    writes_codes: bool


_steps: Memo[Step | None] = Memo()


def step_for(parameter: Tensor, state: State, gradient_dtype: torch.dtype) -> Step | None:
    """The step of the backend that serves this parameter; None: torch's operations, composed."""
    master = local_of(state.get("master", parameter))
    coded = "exp_avg_tops" in state
    draws = coded or master.dtype is not torch.float32
    read = map(unwrapped, (master, *state.values()))
    if not all(is_plain(part) and part.is_contiguous() for part in read) or (draws and first_row_of(parameter) is None):
        return None
    weight = parameter if isinstance(parameter, CodedWeight) and _may_write(parameter) else None
    bits, graph_safe = _BLOCKS if coded else 32, wants_graph(master)
    columns = master.shape[-1] if master.dim() else 1
    quantizer = None if weight is None else weight.codes.spec.quantizer
    layouts = None if weight is None else weight.layouts
    key = (master.dtype, master.device, gradient_dtype, bits, columns, id(quantizer), layouts, graph_safe)

    def resolve() -> Step | None:
        request = OptimizerRequest(
            op="adamw_step",
            framework="torch",
            device=master.device.type,
            in_dtype=DTYPE_NAMES[gradient_dtype],
            out_dtype=DTYPE_NAMES[master.dtype],
            arch=arch_of(master.device),
            k=columns,
            graph_safe=graph_safe,
            state_bits=bits,
        )
        if weight is not None:
            codes = replace(request, quantizer=weight.codes.spec.quantizer, layouts=weight.layouts)
            served = _plan(codes, writes_codes=True)
            if served is not None:
                return served
        return _plan(request, writes_codes=False)

    return _steps.get(key, resolve, quantizer)


def _plan(request: OptimizerRequest, *, writes_codes: bool) -> Step | None:
    plan = plan_if_served(request)
    return None if plan is None else Step(plan.backend, plan.run, writes_codes)


def _may_write(weight: CodedWeight) -> bool:
    """Whether a step could write the weight's codes: they depend on its bf16 values alone, in the order of rows."""
    return weight.dtype is torch.bfloat16 and not weight.interleave and not weight.recipe.stateful


def first_row_of(parameter: Tensor) -> int | None:
    """The number that this rank's first row has in the whole parameter, whose rows are those of its last axis; None
    where the rank has parts of rows, or rows that do not follow each other."""
    if not isinstance(parameter, DTensor):
        return 0
    whole = tuple(parameter.shape)
    shape, first = compute_local_shape_and_global_offset(whole, parameter.device_mesh, parameter.placements)
    if len(whole) < 2 or tuple(shape[1:]) != whole[1:]:
        return None
    rows = first[0]
    for size in whole[1:-1]:
        rows *= size
    return int(rows)


def run_step(step: Step, parameter: Tensor, state: State, grad: Tensor, rule: AdamWStepRule[Tensor]) -> None:
    """The step of `parameter`, whose state and values, or codes, are written in place."""
    master = local_of(state.get("master", parameter))
    arrays = AdamWArrays(
        master,
        grad,
        local_of(state["exp_avg"]),
        local_of(state["exp_avg_sq"]),
        *(local_of(state[name]) for name in ("exp_avg_tops", "exp_avg_sq_tops") if name in state),
    )
    written = [tensor for tensor in (master, arrays.exp_avg, arrays.exp_avg_sq) if tensor is not None]
    out = _out_of(step, parameter, state)
    step.run(arrays, rule, out)
    torch.autograd.graph.increment_version(written)  # a kernel's writes are unknown to autograd
    if isinstance(parameter, CodedWeight):
        if isinstance(out, GroupedTensor):
            parameter.was_written()
        else:
            parameter.copy_(master if out is None else out)
    elif isinstance(out, Tensor):
        torch.autograd.graph.increment_version(out)
    else:
        write_parameter(parameter, state)


def _out_of(step: Step, parameter: Tensor, state: State) -> Tensor | GroupedTensor | None:
    """What the step writes from the master: the codes of a CodedWeight, its values where the codes are quantized from
    them afterwards, or another parameter. None where it writes nothing."""
    if "master" not in state:
        return None
    if isinstance(parameter, CodedWeight):
        if step.writes_codes:
            return parameter.codes
        has_values = state["master"].dtype is not parameter.dtype and parameter.dtype in _HALVES
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device) if has_values else None
    local = local_of(parameter)
    return local if local.is_contiguous() and local.dtype in _HALVES else None
