"""make_graphed: a module whose forward and backward are CUDA graphs inside an eager training loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from octavo_torch.plugin_api import WARMUP, RecipeModule
from octavo_torch_cudagraph.arguments import Arguments
from octavo_torch_cudagraph.graphed import check_warmup
from octavo_torch_cudagraph.held import Held, held_by
from octavo_torch_cudagraph.passes import GraphedPass, Recorder
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
    """`module` itself, whose forward and backward are a CUDA graph each.

    sample_arguments    tensors as the module's later ones: shapes, dtypes, device, and requires_grad where a gradient
                        is wanted. Group sizes are among them, on the device
    pool                another graph's `pool()`, where the two never run at once
    allow_unused_input  let there be parameters and arguments that get no gradient

    Autograd, hooks, accumulated gradients and the optimizer stay as they are. The graphs serve the mode, training or
    not, in which the module is now; in the other one it runs as before. Every forward must have its backward before
    the next forward: both write the same memory, and a backward that comes too late is refused; `make_graphed_pipeline`
    keeps several in flight. `main_grad` is written inside the backward graph. What the warm-up changes (buffers,
    states, main_grad) is put back.

    Raises as `capture` does; at a replay ValueError for arguments that differ, and for parameters, buffers or main_grad
    that have moved since.
    """
    check_warmup(warmup)
    arguments = sample_of(module, sample_arguments)
    record = Recorder(arguments.device, pool)
    with warmed_up([(module, arguments)], record, warmup, allow_unused_input) as written:
        run = GraphedPass(module, arguments, written[0])
        run.record_forward(record)
        run.record_backward(record, allow_unused_input)
    forward, training, held = module.forward, module.training, Held(lambda: held_by(module))

    def call(*given: Any, **named: Any) -> Any:
        if module.training != training:
            return forward(*given, **named)
        check_positional(named)
        return run(given, held)

    module.forward = call
    return module


def check_positional(named: Any) -> None:
    """ValueError for arguments that came by name."""
    if named:
        raise ValueError(f"{', '.join(named)} came by name; a graphed module takes arguments by position")


def sample_of(module: nn.Module, sample_arguments: Sequence[Any]) -> Arguments:
    """The arguments of a pass; ValueError where they, or the module, cannot be captured."""
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
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise ValueError(
            "the module has hooks, and whether a graph holds what they do would depend on when they were registered; "
            "register them after the capture, where each call runs them"
        )
    if torch.is_autocast_enabled(arguments.device.type) and torch.is_autocast_cache_enabled():
        raise ValueError(
            "autocast keeps casts of the weights, which a graph would read for good; use autocast with "
            "cache_enabled=False around the capture"
        )
    return arguments


@contextmanager
def warmed_up(
    modules: Sequence[tuple[nn.Module, Arguments]], record: Recorder, warmup: int, allow_unused: bool
) -> Iterator[list[list[Tensor]]]:
    """Runs each module's forward and backward before the block, and puts back after it what block and runs changed.

    The value holds, for each module, the parameters whose main_grad its backward writes.
    """
    state = {id(value): value for module, _ in modules for value in state_of(module)}
    flags = {parameter: getattr(parameter, _FLAG, None) for module, _ in modules for parameter in module.parameters()}
    written: list[list[Tensor]] = []
    try:
        with restored(state.values()):
            for module, arguments in modules:
                for parameter in flags:
                    setattr(parameter, _FLAG, False)
                trial = GraphedPass(module, arguments, ())
                record.warm_up(lambda trial=trial: trial.warm_up(allow_unused), warmup)  # type: ignore[misc]
                written.append([parameter for parameter in module.parameters() if getattr(parameter, _FLAG)])
            yield written
    finally:
        for parameter, flag in flags.items():
            delattr(parameter, _FLAG) if flag is None else setattr(parameter, _FLAG, flag)
