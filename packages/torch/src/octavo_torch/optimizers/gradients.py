"""Which tensor a step reads as a parameter's gradient: `.grad`, or the buffer `main_grad`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from octavo_torch.arrays.checks import brief
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.zero_gradient import ZeroGradient
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.distributed.fsdp.shard import WeightShard
from octavo_torch.wgrad.main_grad import ZEROS_BESIDE, buffer_shapes


def unwrapped(tensor: Tensor) -> Tensor:
    """What a DTensor, or a shard of a weight, has on this rank; any other tensor itself."""
    if is_plain(tensor):
        return tensor
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.wrapped if isinstance(tensor, WeightShard) else tensor


def local_of(tensor: Tensor) -> Tensor:
    """This rank's values, an ordinary tensor over the same memory."""
    return unwrapped(tensor).detach()


def has_main_grad(parameter: Tensor) -> bool:
    """True where the parameter has a buffer `main_grad`."""
    return getattr(parameter, "main_grad", None) is not None


def has_gradient(parameter: Tensor) -> bool:
    """Whether a step reads a gradient. A frozen parameter has one in `main_grad` only if a layer has added to it since
    `zero_grad`: a step with its zeros would decay the weight."""
    added = parameter.requires_grad or getattr(parameter, "grad_added_to_main_grad", False)
    return parameter.grad is not None or (has_main_grad(parameter) and added)


@torch.no_grad()
def gradient_of(name: str, parameter: Tensor) -> Tensor | None:
    """The gradient as the step reads it, in the parameter's shape on this rank; None where there is none.

    It is `main_grad` where the parameter has it. A `.grad` beside it is added to it first, if a layer has not done so,
    and becomes None, as in Megatron's DistributedDataParallel. Raises ValueError for a gradient that does not fit.
    """
    main, grad = getattr(parameter, "main_grad", None), parameter.grad
    if main is None:
        return None if grad is None else _checked(f"{name}.grad", grad, parameter)
    buffer = _checked(f"{name}.main_grad", main, parameter)
    if grad is not None:
        if _is_more(parameter, grad):
            buffer.add_(_checked(f"{name}.grad", grad, parameter))
        parameter.grad = None
    return buffer


def _is_more(parameter: Tensor, grad: Tensor) -> bool:
    """Whether `.grad` has something that `main_grad` lacks: because no layer has added it there, or because other
    operations that read the parameter have added to the zeros that a layer leaves in `.grad`."""
    if not getattr(parameter, "grad_added_to_main_grad", False):
        return True
    return getattr(parameter, ZEROS_BESIDE, False) and not (isinstance(grad, ZeroGradient) and not grad.is_written)


def check_gradient(name: str, parameter: Tensor) -> None:
    """Raises the ValueErrors of `gradient_of`, and changes nothing."""
    for kind in ("main_grad", "grad"):
        grad = getattr(parameter, kind, None)
        if grad is not None:
            _checked(f"{name}.{kind}", grad, parameter)


def clear(parameter: Tensor) -> None:
    """Zero `main_grad`, to which no layer has then added a gradient."""
    if has_main_grad(parameter):
        local_of(parameter.main_grad).zero_()  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def _checked(name: str, grad: object, parameter: Tensor) -> Tensor:
    if not isinstance(grad, Tensor) or grad.layout is not torch.strided or grad.dtype not in DTYPE_NAMES:
        kind = f"{brief(grad)} {grad.layout}" if isinstance(grad, Tensor) else brief(grad)
        raise ValueError(f"{name} is {kind}; give a dense float32, bfloat16 or float16 tensor")
    local, values = local_of(grad), local_of(parameter)
    shape = tuple(values.shape)
    shapes = buffer_shapes(values)
    same = local.shape == values.shape
    if tuple(local.shape) not in shapes or local.device != values.device or not (same or local.is_contiguous()):
        views = " or ".join(str(list(other)) for other in shapes[1:])
        raise ValueError(
            f"{name} is {brief(local)} on {local.device} and the parameter {list(shape)} on {values.device}; give a "
            f"gradient of that shape there, or its memory without gaps as {views}"
        )
    return local if same else local.view(shape)
