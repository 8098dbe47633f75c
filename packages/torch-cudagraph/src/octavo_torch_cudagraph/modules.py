"""make_graphed: a module whose forward and backward are CUDA graphs inside an eager training loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from octavo_torch.plugin_api import WARMUP, RecipeModule, explained_waits, graph_safe
from octavo_torch_cudagraph.arguments import Arguments
from octavo_torch_cudagraph.graphed import check_warmup
from octavo_torch_cudagraph.held import Held, held_by
from octavo_torch_cudagraph.restoring import restored, state_of

Module = TypeVar("Module", bound=nn.Module)

_FLAG = "grad_added_to_main_grad"


def make_graphed(
    module: Module,
    sample_arguments: Sequence[Any],
    *,
    warmup: int = WARMUP,
    pool: Any = None,
    allow_unused_input: bool = False,
) -> Module:
    """`module` itself, whose forward and backward are a CUDA graph each, by torch.cuda.make_graphed_callables.

    sample_arguments    tensors as the module's later ones: shapes, dtypes, device, and requires_grad where a gradient
                        is wanted. Group sizes are among them, on the device
    pool                another graph's `pool()`, where the two never run at once
    allow_unused_input  let there be parameters and arguments that get no gradient

    Autograd, hooks, accumulated gradients and the optimizer stay as they are. The graphs serve the mode, training or
    not, in which the module is now; in the other one it runs as before. Every forward must have its backward before
    the next forward: both write the same memory. `main_grad` is written inside the backward graph. What the warm-up
    changes (buffers, states, main_grad) is put back.

    Raises as `capture` does; at a replay ValueError for arguments that differ, and for parameters, buffers or main_grad
    that have moved since.
    """
    check_warmup(warmup)
    arguments = Arguments(sample_arguments)
    if len(arguments.tensors) != len(arguments.names):
        raise ValueError("sample_arguments hold something else than tensors; bind it with a module of your own")
    for name, parameter in module.named_parameters():
        if parameter.device != arguments.device:
            raise ValueError(f"{name} is on {parameter.device} and argument 0 on {arguments.device}; move the module")
    for name, part in module.named_modules():
        if isinstance(part, RecipeModule) and part.delayed_wgrad is not None:
            raise ValueError(
                f"{name or 'the module'} has delay_wgrad=True, and a graph's backward leaves nothing out that a later "
                "backward_dw could find; capture forward, backward and backward_dw together with capture()"
            )
    training = module.training
    flags = {parameter: getattr(parameter, _FLAG, None) for parameter in module.parameters()}
    for parameter in flags:
        setattr(parameter, _FLAG, False)
    try:
        with restored(state_of(module)), graph_safe():
            _run_once(module, arguments)
            with explained_waits(), torch.cuda.device(arguments.device):
                torch.cuda.make_graphed_callables(
                    module,
                    arguments.values,
                    num_warmup_iters=warmup - 1,
                    allow_unused_input=allow_unused_input,
                    pool=pool,
                )
        written = [parameter for parameter in flags if getattr(parameter, _FLAG)]
    finally:
        for parameter, flag in flags.items():
            delattr(parameter, _FLAG) if flag is None else setattr(parameter, _FLAG, flag)
    for parameter in written:
        parameter.register_hook(_flag_setter(parameter))  # type: ignore[no-untyped-call]
    module.forward = _checked(module, module.forward, arguments, training)
    return module


def _run_once(module: nn.Module, arguments: Arguments) -> None:
    """A forward and backward that may wait: libraries load, memory is found."""
    stream = torch.cuda.Stream(arguments.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(arguments.device))
    with torch.cuda.stream(stream):
        outputs = [leaf for leaf in pytree.tree_leaves(module(*arguments.values)) if leaf.requires_grad]
        wanted = [leaf for leaf in (*arguments.tensors, *module.parameters()) if leaf.requires_grad]
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, [torch.zeros_like(leaf) for leaf in outputs], allow_unused=True)
    torch.cuda.current_stream(arguments.device).wait_stream(stream)


def _checked(
    module: nn.Module, forward: Callable[..., Any], arguments: Arguments, training: bool
) -> Callable[..., Any]:
    """`forward`, with the arguments and everything that the graphs hold checked before a replay."""
    held = Held(lambda: held_by(module))

    def call(*given: Any, **named: Any) -> Any:
        if module.training == training:
            if named:
                raise ValueError(f"{', '.join(named)} came by name; a graphed module takes arguments by position")
            for name, own, new in zip(arguments.names, arguments.tensors, arguments.check(given), strict=True):
                if new.requires_grad and not own.requires_grad and torch.is_grad_enabled():
                    raise ValueError(
                        f"{name} requires a gradient and the sample did not, so none would come; give make_graphed a "
                        "sample that requires one"
                    )
            held.check()
        return forward(*given, **named)

    return call


def _flag_setter(parameter: Tensor) -> Callable[[Tensor], None]:
    """A hook for when the gradient arrives: the backward graph has been enqueued, its Python has not run again."""
    found = weakref.ref(parameter)

    def added(_: Tensor) -> None:
        alive = found()
        if alive is not None:
            setattr(alive, _FLAG, True)

    return added
