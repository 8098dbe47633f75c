"""torch.func's transforms: calls without a derivative run inside of them, and others are refused with advice."""

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

is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
"""Whether a tensor stands for another one, inside of a transform: it has no memory of its own."""


GROUPS = "groups are its own batch: give all rows in one call, a group of group_sizes for each"
"""What a caller of vmap does where a function takes rows of groups."""


class Subject(NamedTuple):
    """A function that has no rule for some transforms: its name in messages, and what to do instead of vmap."""

    name: str
    instead_of_vmap: str


def no_transform(transform: str, subject: Subject) -> NotImplementedError:
    """The error of calling `subject` inside the transform of that name."""
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


def functionalizing() -> bool:
    """Whether the call is inside of torch.func.functionalize, which takes no autograd function."""
    stack = (transforms_active() and _functorch.get_interpreter_stack()) or ()
    return any(one.key() == _functorch.TransformType.Functionalize for one in stack)


def unwrapped(value: Tensor) -> Tensor:
    """The tensor that torch.func.grad has wrapped, or `value` itself; derivatives do not see what is done with it."""
    while _functorch.is_gradtrackingtensor(value):
        value = _functorch.get_unwrapped(value)
    return value


def is_batched(value: Tensor) -> bool:
    """Whether `value` is batched at some level, by a vmap or by a backward of many gradients at once."""
    return _functorch.is_batchedtensor(unwrapped(value)) or _functorch.is_legacy_batchedtensor(value)


def outside_transforms(subject: Subject, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a `function` without derivative on the tensors that the transforms have wrapped; its results are constants.

    A tensor that requires a gradient inside the transform still requires one in the call, whose results may depend on
    that. Raises NotImplementedError where a vmap has batched one of the tensors, and inside of functionalize.
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
    """A decorator of functions without derivative: dynamo takes each for `one_call`, and they run inside of transforms.

    A call inside of torch.jit.trace or make_fx is refused by `check_not_recorded`.
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
