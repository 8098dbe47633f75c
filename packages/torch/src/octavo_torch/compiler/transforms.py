"""torch.func's transforms: what each function of ours says inside of one that it has no rule for."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from octavo_torch.compiler.recorders import check_not_recorded
from octavo_torch.compiler.tracing import one_call

P = ParamSpec("P")
R = TypeVar("R")

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


GROUPS = "groups are its own batch: give all rows in one call, a group of group_sizes for each"
"""What a caller of vmap does where a function takes rows of groups."""


class Subject(NamedTuple):
    """Who has no rule for a transform: its name, and what a caller of vmap does in its place."""

    name: str
    instead_of_vmap: str


def no_transform(transform: str, subject: Subject) -> NotImplementedError:
    """The error of a call inside the transform of that name."""
    others = "call it outside of that, and take gradients with backward or torch.func.grad"
    instead = subject.instead_of_vmap if transform.lower() == "vmap" else others
    return NotImplementedError(
        f"torch.func's {transform.lower()} was applied to {subject.name}, which has no rule for it; {instead}"
    )


def check_transform(subject: Subject) -> None:
    """Raises NotImplementedError unless the innermost transform is torch.func.grad."""
    interpreter = _functorch.peek_interpreter_stack()
    assert interpreter is not None  # transforms are active
    if interpreter.key() != _functorch.TransformType.Grad:
        raise no_transform(interpreter.key().name, subject)


def unwrapped(value: Tensor) -> Tensor:
    """The tensor that torch.func.grad has wrapped, or `value`: for what takes no part in a derivative."""
    while _functorch.is_gradtrackingtensor(value):
        value = _functorch.get_unwrapped(value)
    return value


def is_batched(value: Tensor) -> bool:
    """Whether a vmap, or a backward of many gradients at once, stands behind `value`, at whatever level."""
    return _functorch.is_batchedtensor(unwrapped(value)) or _functorch.is_legacy_batchedtensor(value)


def outside_transforms(subject: Subject, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`function` of the tensors behind those of the transforms, for what has no derivative: its results are constants.

    One that requires a gradient inside still does: what is made of it may depend on that. Raises NotImplementedError
    where a vmap stands behind one, and inside of functionalize.
    """
    interpreter = _functorch.peek_interpreter_stack()
    if interpreter is not None and interpreter.key() == _functorch.TransformType.Functionalize:
        raise no_transform("functionalize", subject)
    known: dict[int, Tensor] = {}  # a tensor that comes twice is one tensor to the function, too

    def plain(value: Tensor) -> Tensor:
        if is_batched(value):
            raise no_transform("vmap", subject)
        own = known.get(id(value), unwrapped(value))
        if value.requires_grad and not own.requires_grad:
            own = own.detach().requires_grad_()
        return known.setdefault(id(value), own)

    with temporarily_clear_interpreter_stack():  # what a kernel allocates would else be wrapped, too
        own_args, own_kwargs = pytree.tree_map_only(Tensor, plain, (args, kwargs))
        return function(*own_args, **own_kwargs)


def without_derivative(subject: Subject) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of functions without derivative: `one_call` to dynamo, and plain tensors inside of transforms.

    Refused where a recorder would write down a call without what its kernels do.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        without_grad = torch.no_grad()(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            check_not_recorded((args, kwargs))
            if transforms_active():
                return outside_transforms(subject, without_grad, *args, **kwargs)
            return without_grad(*args, **kwargs)

        return one_call(call)

    return decorated
