"""graphed_step: forward, loss, backward, optimizer step and the next scales in one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo_torch.plugin_api import WARMUP, update_scales
from octavo_torch_cudagraph.graphed import Graphed, capture
from octavo_torch_cudagraph.held import Held, Named, held_by
from octavo_torch_cudagraph.restoring import state_of


def graphed_step(
    module: nn.Module,
    loss: Callable[..., Tensor],
    *examples: Any,
    optimizer: torch.optim.Optimizer | None = None,
    process_group: Any = None,
    warmup: int = WARMUP,
    pool: Any = None,
) -> Graphed[Tensor]:
    """A training step as one graph: call it with new arguments, it returns the loss and has trained.

    loss           loss(module, *arguments) -> scalar: runs the module and is differentiated
    examples       arguments like the later ones, see `capture`
    optimizer      its step is captured, too. Give `capturable=True` where it has that option, and run one eager step
                   before, because a graph cannot create its state. The graph keeps its options: for a rate that changes
                   use an optimizer that takes `lr` as a tensor on the device, as Adam does. None: step eagerly; the
                   parameters' .grad are those of the last replay
    process_group  reduce delayed scaling's amax over its ranks

    Gradients are made anew at each replay, at the same addresses; those of `main_grad` go where the layer's mode says.
    With delayed scaling every replay ends with the next scales. The warm-up changes nothing: parameters, buffers,
    main_grad and the optimizer's state get their values back.

    Raises as `capture` does; at a replay ValueError where parameters, buffers, gradients, main_grad, or an option or a
    state of the optimizer are not those of the capture: torch's `load_state_dict` makes new states.
    """
    kept = state_of(module)
    if optimizer is not None:
        _check_capturable(optimizer)
        kept += _states(optimizer)
    before = {} if optimizer is None else {parameter: dict(state) for parameter, state in optimizer.state.items()}

    def step(*arguments: Any) -> Tensor:
        module.zero_grad(set_to_none=True)
        value = loss(module, *arguments)
        value.backward()  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()
        update_scales(module, process_group)
        return value

    graphed = capture(step, *examples, restore=kept, warmup=warmup, pool=pool)
    if optimizer is not None and len(_states(optimizer)) != sum(
        isinstance(value, Tensor) for state in before.values() for value in state.values()
    ):
        optimizer.state.clear()
        optimizer.state.update(before)
        raise ValueError(
            "the optimizer has made its state in the warm-up, and a graph would make it again at each replay; run one "
            "eager step before graphed_step"
        )
    graphed.hold(Held(lambda: _held(module, optimizer)))
    return graphed


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for _, value in _named_states(optimizer)]


def _held(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Any]]:
    yield from held_by(module, grads=True)
    if optimizer is not None:
        yield from _options(optimizer)
        yield from _named_states(optimizer)


def _options(optimizer: torch.optim.Optimizer) -> Named:
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                yield f"optimizer.param_groups[{number}][{name!r}]", value


def _named_states(optimizer: torch.optim.Optimizer) -> Named:
    for number, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            if isinstance(value, Tensor):
                yield f"optimizer's state {number}[{name!r}]", value


def _check_capturable(optimizer: torch.optim.Optimizer) -> None:
    for number, group in enumerate(optimizer.param_groups):
        if group.get("capturable") is False:
            raise ValueError(
                f"optimizer.param_groups[{number}] has capturable=False, and its step counts on the host; construct "
                f"{type(optimizer).__name__} with capturable=True"
            )
