"""Weight gradients written straight into `weight.main_grad`, the buffer of Megatron's distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from octavo_torch.arrays.checks import brief
from octavo_torch.arrays.dtypes import DTYPE_NAMES, name_of
from octavo_torch.arrays.grouped_tensor import Rows
from octavo_torch.arrays.per_group import stacked, stacked_view
from octavo_torch.arrays.sizes import Sizes
from octavo_torch.arrays.strides import row_strides
from octavo_torch.arrays.zero_gradient import zeros_for
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.dispatch.layer_functions import WgradFunction

MainGrad = Literal["accumulate", "overwrite"]

ZEROS_BESIDE = "grad_is_zeros_or_more"
"""Attribute of a weight whose gradient a layer of this package has written to `main_grad`. Its `.grad` then holds zeros
in place of that gradient, plus what other operations have added. Layers of other libraries set the attribute
`grad_added_to_main_grad`, too, but may leave uninitialized memory in `.grad`."""

_ALIGNMENT = 16
"""Bytes that a CUDA kernel stores at once: each row of a buffer starts at a multiple of them."""


def check_mode(mode: object) -> None:
    """Raises ValueError for anything but the two modes."""
    if isinstance(mode, Tensor):
        raise ValueError(
            "main_grad is a Tensor; set it as weight.main_grad, and give 'accumulate' or 'overwrite' as main_grad here"
        )
    if not isinstance(mode, str) or mode not in ("accumulate", "overwrite"):
        raise ValueError(f"main_grad is {brief(mode)}; give 'accumulate', 'overwrite' or None")


def check_main_grad(leaves: Sequence[Tensor]) -> None:
    """ValueError for a buffer that does not fit. Backward checks what `get_main_grad` returns, because it calls it."""
    for name, leaf in _named(leaves):
        if getattr(leaf, "get_main_grad", None) is None:
            _checked_buffer(f"{name}.main_grad", getattr(leaf, "main_grad", None), leaf)


def write_main_grad(
    wgrad: WgradFunction, x: Rows, dy: Rows, sizes: Sizes, leaves: Sequence[Tensor], mode: MainGrad
) -> Tensor:
    """Run `wgrad` into the buffers of the weight [G, N, K], or of one tensor [N, K] per group.

    The buffers of several tensors are written in place where they are evenly spaced in one block of memory, else from a
    copy of them all. Returns the zeros that stand for the gradient, see ZeroGradient.
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            "main_grad was given and this backward is being traced, where the buffer's writes would be lost; "
            "run backward without compiled autograd, or leave main_grad out"
        )
    targets = [_buffer_of(name, leaf) for name, leaf in _named(leaves)]
    buffers = [target.buffer for target in targets]
    accumulate = mode == "accumulate" and not _overwrites(leaves)
    whole: Tensor | None = buffers[0]
    if leaves[0].dim() == 2:
        _check_apart(buffers)
        whole = stacked_view(buffers)
    if whole is not None and (leaves[0].dim() == 3 or not whole.is_cuda or _is_aligned(whole)):
        wgrad(x, dy, sizes, out=whole, accumulate=accumulate)
    else:
        together = stacked(buffers)
        wgrad(x, dy, sizes, out=together, accumulate=accumulate)
        torch._foreach_copy_(buffers, together.unbind(0))
    for leaf, target in zip(leaves, targets, strict=True):
        # Megatron-FSDP makes the buffer for this backward in get_main_grad, and looks for it here afterwards
        leaf.main_grad = target.given  # type: ignore[attr-defined]
        leaf.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        setattr(leaf, ZEROS_BESIDE, True)
    return zeros_for(leaves)


def _named(leaves: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    if leaves[0].dim() == 3:
        yield "weight", leaves[0]
        return
    for group, leaf in enumerate(leaves):
        yield f"weight[{group}]", leaf


def _overwrites(leaves: Sequence[Tensor]) -> bool:
    flags = {bool(getattr(leaf, "overwrite_main_grad", False)) for leaf in leaves}
    if len(flags) > 1:
        raise ValueError(
            "overwrite_main_grad is true on some of the weight's tensors and not on others; set the same value on all"
        )
    return flags.pop()


class _Target(NamedTuple):
    """A weight's buffer: in the weight's shape, and as it was given."""

    buffer: Tensor
    given: object


def _buffer_of(name: str, leaf: Tensor) -> _Target:
    get = getattr(leaf, "get_main_grad", None)
    if get is None:
        name, given = f"{name}.main_grad", getattr(leaf, "main_grad", None)
    else:
        name, given = f"{name}.get_main_grad()", get()
    return _Target(_checked_buffer(name, given, leaf), given)


def _check_apart(buffers: Sequence[Tensor]) -> None:
    """Raises ValueError for buffers of several dtypes, or that overlap: a gradient would be lost."""
    if len({buffer.dtype for buffer in buffers}) > 1:
        names = sorted({name_of(buffer.dtype) for buffer in buffers})
        raise ValueError(f"the main_grad buffers of the weight's tensors are {' and '.join(names)}; give one dtype")
    starts = sorted(((buffer.data_ptr(), buffer) for buffer in buffers if buffer.numel()), key=itemgetter(0))
    for (start, buffer), (following, _) in pairwise(starts):
        row, _ = row_strides(buffer) or (0, 0)
        if following < start + ((buffer.shape[0] - 1) * row + buffer.shape[1]) * buffer.element_size():
            raise ValueError(
                f"a main_grad buffer begins at {following:#x}, inside the one from {start:#x}; give each of the "
                "weight's tensors its own buffer"
            )


def buffer_shapes(weight: Tensor) -> list[tuple[int, ...]]:
    """The shapes in which the memory of a gradient may be given: the weight's, flat, and the rows of all groups."""
    shape = tuple(weight.shape)
    return [shape, (weight.numel(),), *([(shape[0] * shape[1], shape[2])] if len(shape) == 3 else [])]


def _checked_buffer(name: str, buffer: object, weight: Tensor) -> Tensor:
    """`buffer` in the weight's shape: itself, or a view of a buffer of another of `buffer_shapes`."""
    shape, device = tuple(weight.shape), weight.device
    if buffer is None:
        raise ValueError(
            f"main_grad was given and {name} is None or absent; set it to a float32 tensor {list(shape)} on {device}, "
            "or leave main_grad out"
        )
    if not isinstance(buffer, Tensor) or not is_plain(buffer) or buffer.layout is not torch.strided:
        kind = f"{buffer.layout} tensor" if isinstance(buffer, Tensor) and is_plain(buffer) else type(buffer).__name__
        raise ValueError(
            f"{name} is a {kind}; give a plain strided tensor {list(shape)}; for a wrapper subclass, its local tensor"
        )
    given = tuple(buffer.shape)
    shapes = buffer_shapes(weight)
    if given not in shapes or buffer.dtype not in DTYPE_NAMES or buffer.device != device:
        views = " or ".join(str(list(other)) for other in shapes[1:])
        raise ValueError(
            f"{name} is {name_of(buffer.dtype)} {list(given)} on {buffer.device}; "
            f"give float32, bfloat16 or float16 {list(shape)} on {device}, or its memory as {views}"
        )
    if buffer.requires_grad:
        raise ValueError(f"{name} requires a gradient; give a plain buffer that backward may write")
    strides = list(buffer.stride())
    # elements at one distance other than 1 have a view of any shape, too, which is refused below
    buffer = buffer if given == shape else buffer.view(shape)
    if row_strides(buffer) is None:
        raise ValueError(
            f"{name} has shape {list(given)} and strides {strides}, which cannot be written in place; "
            "give a buffer whose last stride is 1 and whose rows and groups follow one another without overlap"
        )
    if buffer.is_cuda and buffer.dim() == 3:
        check_alignment(name, buffer)
    return buffer


def check_alignment(name: str, buffer: Tensor) -> None:
    """Raises ValueError for a buffer on a GPU with rows that a kernel cannot store in whole 16-byte pieces."""
    if not _is_aligned(buffer):
        steps = [buffer.stride(d) * buffer.element_size() for d in (0, 1) if buffer.shape[d] > 1]
        raise ValueError(
            f"{name} starts at {buffer.data_ptr():#x} and its groups and rows are {steps} bytes apart; "
            f"give a buffer whose address and strides are multiples of {_ALIGNMENT} bytes"
        )


def _is_aligned(buffer: Tensor) -> bool:
    size = buffer.element_size()
    if buffer.shape[2] * size % _ALIGNMENT:
        return True  # no backend with aligned stores serves such rows
    steps = [buffer.stride(d) * size for d in (0, 1) if buffer.shape[d] > 1]
    return not (buffer.data_ptr() % _ALIGNMENT or any(step % _ALIGNMENT for step in steps))
