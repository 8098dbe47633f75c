"""What AdamW keeps of a parameter, under torch.optim.AdamW's names: made, checked against a saved one, and loaded.

step                                 fp32, of no dimension: finished steps
exp_avg, exp_avg_sq                  the moments, fp32 in the parameter's shape; or uint8 codes of it, and
exp_avg_tops, exp_avg_sq_tops        int32 [..., ceil(last axis / 128)]
master                               fp32 or bf16, where the parameter is not its own
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from octavo_torch.arrays.checks import brief
from octavo_torch.arrays.dtypes import DTYPE_NAMES, name_of
from octavo_torch.linear.coded_weight import CodedWeight, values_of
from octavo_torch.optimizers.block_state import LARGEST_TOP, NOT_FINITE, tops_shape
from octavo_torch.optimizers.gradients import local_of, unwrapped

State = dict[str, Tensor]

MOMENTS = ("exp_avg", "exp_avg_sq")
_FP32, _INT32 = (torch.float32,), (torch.int32,)
_DTYPES = {"step": _FP32, "master": (torch.float32, torch.bfloat16)} | dict.fromkeys(MOMENTS, _FP32)
"""What the tensors of a state may be."""

_DTYPES_OF_CODES = (
    _DTYPES | dict.fromkeys(MOMENTS, (torch.uint8,)) | dict.fromkeys([f"{name}_tops" for name in MOMENTS], _INT32)
)
_MOST_STEPS = 1 << 24  # beyond, fp32 does not count


def stands_for(weight: CodedWeight, master: Tensor) -> bool:
    """Whether the codes stand for the master's values, from which quantizing may make other codes, as for a file's."""
    return torch.equal(values_of(weight).to(master.dtype), master)


def check_parameter(name: str, parameter: Tensor, master_dtype: torch.dtype, state_bits: int) -> None:
    """Raises ValueError for a parameter that cannot be stepped in this way."""
    if parameter.dtype not in DTYPE_NAMES or parameter.layout is not torch.strided:
        raise ValueError(
            f"{name} is {brief(parameter)} {parameter.layout}; AdamW steps dense float32, bfloat16 and float16 "
            "parameters, so leave it out of params"
        )
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device; create the optimizer when the parameters have values")
    if parameter.dtype is torch.float16 and master_dtype is torch.bfloat16:
        raise ValueError(f"{name} is float16, whose values bfloat16 does not hold; make master_dtype torch.float32")
    if state_bits == 8 and parameter.dim() > 1 and isinstance(parameter, DTensor):
        last = parameter.dim() - 1
        if any(placement.is_shard(last) for placement in parameter.placements):
            raise ValueError(
                f"{name} is sharded along its last axis, where 8-bit states have blocks of 128; shard another axis, or "
                "make state_bits 32"
            )


def check_state(name: str, parameter: Tensor, state: State, master_dtype: torch.dtype) -> None:
    """Raises ValueError for a parameter that was its own master, and was cast to a dtype that needs one since; and for
    states, or a parameter, that were cast, moved or given another shape, because kernels get addresses alone."""
    values, dtypes = unwrapped(parameter), _DTYPES_OF_CODES if "exp_avg_tops" in state else _DTYPES
    shape, device = values.shape, values.device
    for key, tensor in state.items():
        part = unwrapped(tensor)
        needed = () if key == "step" else tops_shape(shape) if key.endswith("_tops") else shape
        if part.dtype not in dtypes[key] or part.shape != needed or (key != "step" and part.device != device):
            given = " or ".join(map(name_of, dtypes[key]))
            raise ValueError(
                f"the state's {key} of {name} is {brief(part)} on {part.device}, and the parameter {list(shape)} on "
                f"{device} needs {given} {list(needed)}; bring back what was cast or moved before a step, or create "
                "the optimizer when the parameters have their shape and device"
            )
    if "master" not in state and parameter.dtype is not torch.float32 and parameter.dtype is not master_dtype:
        raise ValueError(
            f"{name} was cast to {name_of(parameter.dtype)} after this optimizer was created, so it has no master in "
            f"{name_of(master_dtype)}; cast the model first, and create the optimizer then"
        )


def new_state(parameter: Tensor, master_dtype: torch.dtype, state_bits: int, capturable: bool) -> State:
    """The state before the first step: moments of zero, and a master with the parameter's values."""
    local = local_of(parameter)
    shape, device = tuple(local.shape), local.device
    state = {"step": torch.zeros((), dtype=torch.float32, device=device if capturable else "cpu")}
    for name in MOMENTS:
        if state_bits == 8 and parameter.dim() > 1:
            state[name] = _as_sharded(torch.zeros(shape, dtype=torch.uint8, device=device), parameter)
            tops = torch.zeros(tops_shape(shape), dtype=torch.int32, device=device)
            state[f"{name}_tops"] = _as_sharded(tops, parameter, tops_shape(tuple(parameter.shape)))
        else:
            state[name] = _as_sharded(torch.zeros(shape, dtype=torch.float32, device=device), parameter)
    if isinstance(parameter, CodedWeight):
        state["master"] = values_of(parameter).to(master_dtype)
    elif parameter.dtype is not torch.float32 and parameter.dtype is not master_dtype:
        state["master"] = _as_sharded(local.to(torch.float32), parameter)
    return state


@torch.no_grad()
def write_parameter(parameter: Tensor, state: State) -> None:
    """Write the master, cast to the parameter's dtype, into the parameter: its values, or all planes of its codes."""
    master = state.get("master")
    if master is not None:
        (parameter if isinstance(parameter, CodedWeight) else local_of(parameter)).copy_(local_of(master))


def checked_entry(name: str, saved: object, state: Callable[[], State]) -> State | None:
    """A saved state that fits the present `state`, or None where it is empty; ValueError for one that does not fit."""
    if not isinstance(saved, Mapping) or any(not isinstance(key, str) for key in saved):
        raise ValueError(f"state_dict's state of {name} is {brief(saved)}; give what this optimizer's state_dict has")
    if not saved:
        return None
    present = state()
    if saved.keys() != present.keys():
        raise ValueError(
            f"state_dict's state of {name} has {', '.join(sorted(saved))} and this optimizer keeps "
            f"{', '.join(sorted(present))}; create it with the master_dtype and state_bits of the saved one"
        )
    entry = dict(saved)
    if isinstance(entry["step"], int | float) and not isinstance(entry["step"], bool):
        entry["step"] = torch.tensor(float(entry["step"]), dtype=torch.float32)
    for key, value in present.items():
        _check_like(f"state_dict's {key} of {name}", entry[key], value)
    step = float(entry["step"])
    if not (0 <= step <= _MOST_STEPS and math.floor(step) == step):
        raise ValueError(f"state_dict's step of {name} is {step}; give a whole number of at least 0, up to 2^24")
    second = local_of(entry["exp_avg_sq"])
    if second.dtype is torch.float32 and bool((second < 0).any()):
        raise ValueError(
            f"state_dict's exp_avg_sq of {name} holds {float(second.min())}, and means of squares are never negative; "
            "give the state_dict() of an optimizer"
        )
    for moment in MOMENTS:
        tops = entry.get(f"{moment}_tops")
        if tops is not None and bool(((local_of(tops) < NOT_FINITE) | (local_of(tops) > LARGEST_TOP)).any()):
            raise ValueError(
                f"state_dict's {moment}_tops of {name} holds values outside of {NOT_FINITE} to {LARGEST_TOP}, which no "
                "optimizer has saved; give the state_dict() of one"
            )
    return entry


def write_unless_there(parameter: Tensor, state: State) -> None:
    """`write_parameter`, where codes do not stand for the master already."""
    if not (isinstance(parameter, CodedWeight) and stands_for(parameter, state["master"])):
        write_parameter(parameter, state)


@torch.no_grad()
def load_entry(entry: State | None, parameter: Tensor, present: State, new: State) -> None:
    """Copy a checked state into the present one, whose tensors stay, or `new` where it is empty; then write the
    parameter from its master."""
    for key, value in present.items():
        local_of(value).copy_(local_of((new if entry is None else entry)[key]))
    write_unless_there(parameter, present)


def _check_like(name: str, saved: object, present: Tensor) -> None:
    fits = isinstance(saved, Tensor) and saved.dtype is present.dtype and saved.shape == present.shape
    if not fits or isinstance(saved, DTensor) is not isinstance(present, DTensor):
        given = "a DTensor of " if isinstance(saved, DTensor) else ""
        needed = "a DTensor of " if isinstance(present, DTensor) else ""
        raise ValueError(
            f"{name} is {given}{brief(saved)} and needs to be {needed}{name_of(present.dtype)} {list(present.shape)}; "
            "give the state of an optimizer of these parameters, with this master_dtype and these state_bits"
        )
    if isinstance(saved, DTensor) and local_of(saved).shape != local_of(present).shape:
        raise ValueError(
            f"{name} is sharded as {saved.placements} and the parameter as {present.placements}; "  # type: ignore[attr-defined]
            "load it with torch.distributed.checkpoint, which reshards"
        )


def _as_sharded(local: Tensor, parameter: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """`local` as a DTensor that is placed as the parameter; itself for an ordinary parameter."""
    if not isinstance(parameter, DTensor):
        return local
    whole = torch.Size(parameter.shape if shape is None else shape)
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=whole, stride=stride
    )
