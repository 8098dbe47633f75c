"""MasterWeights: the values of weights that are codes, for an optimizer to step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from octavo_torch.arrays.checks import brief, check_dtype, check_module
from octavo_torch.linear.coded_weight import CodedWeight, values_of
from octavo_torch.optimizers.master_gradients import (
    NotedGradients,
    a_scaler_steps,
    check_not_taken,
    clear_gradient,
    gradient_buffer,
    has_uncollected,
    take_gradient,
)
from octavo_torch.optimizers.state import stands_for
from octavo_torch.optimizers.written import Versions, check_unchanged, note

_LATER_VALUES = (
    "Create the MasterWeights after values are loaded, give them as values, or copy them into the master, too"
)


class MasterWeights(nn.ParameterDict):
    """High-precision values, called masters, of a module's weights that are codes: an optimizer steps the masters, and
    they are quantized into the codes.

    It holds one parameter per CodedWeight, under the weight's name with "/" instead of ".". A checkpoint keeps its
    state dict beside the model's. Backward, DistributedDataParallel and accumulation over microbatches leave gradients
    at the CodedWeights, from which `collect` moves them to the masters, in the masters' dtype. A layer with `main_grad`
    adds its gradient to the master's at once. The module's own `zero_grad` does not reach the masters: call the
    optimizer's. A GradScaler sees the masters' gradients alone: call `collect` before its `unscale_` or `step`; a step
    that would leave a gradient unscaled is refused.

        with octavo_torch.quantized_parameters("fp8-block"):
            model = Model()
        masters = octavo_torch.MasterWeights(model)
        optimizer = torch.optim.AdamW(masters.all_parameters())
        masters.follow(optimizer)  # each step begins with collect() and ends with write()

    Copy or pickle the module, this and its optimizers in one call, such as `copy.deepcopy((model, masters,
    optimizer))`: the copies then belong to one another. Copies that are made one by one do not, because torch does not
    copy an optimizer's hooks: create a MasterWeights of the copied model and an optimizer over it, and call `follow`.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype = torch.float32, values: Mapping[str, Tensor] | None = None
    ) -> None:
        """A master of each CodedWeight in `module`.

        dtype    of the masters
        values   of the weights by the names of the module's parameters, such as a checkpoint's: they are written to
                 the codes, too. The master of a weight that is not among them starts from what its codes stand for

        Raises ValueError for a module without CodedWeights, and for values that do not fit.
        """
        super().__init__()
        check_module(module)
        check_dtype(dtype)
        coded = {name: value for name, value in module.named_parameters() if isinstance(value, CodedWeight)}
        if not coded:
            raise ValueError(
                f"module is a {type(module).__name__} without a CodedWeight; create it inside of quantized_parameters"
            )
        if values is not None and not isinstance(values, Mapping):
            raise ValueError(f"values is {brief(values)}; give a mapping from parameters' names to tensors")
        strange = sorted(set(values or {}) - set(coded))
        if strange:
            raise ValueError(f"values has {strange[0]!r}; give values of {', '.join(coded)} alone")
        self._followed: list[weakref.ref[Optimizer]] = []
        self._taken, self._zeroed = NotedGradients(), NotedGradients()
        self._written: Versions = {}
        self._coded, self._others = coded, [p for p in module.parameters() if not isinstance(p, CodedWeight)]
        # each is checked before any is written
        masters = {name: _master(name, weight, dtype, (values or {}).get(name)) for name, weight in coded.items()}
        for name, weight in coded.items():
            self[_key(name)] = masters[name]
            note(weight, masters[name], self._written)
            if values is not None and name in values:
                with torch.no_grad():
                    self._write_unless_there(name, weight)
        self._connect_main_grads()

    def _connect_main_grads(self) -> None:
        """Let layers with `main_grad` add to the masters' gradients."""
        for name, weight in self._coded.items():
            weight.get_main_grad = partial(gradient_buffer, self[_key(name)])  # type: ignore[attr-defined]

    def all_parameters(self) -> Iterator[nn.Parameter]:
        """What an optimizer steps: the masters, and the module's other parameters."""
        yield from self.parameters()
        yield from self._others

    def follow(self, optimizer: Optimizer) -> Callable[[], None]:
        """From now on each step of `optimizer` begins with `collect` and ends with `write`; returns a function that
        undoes this.

        A closure that is given to a step runs on codes of the present masters, and `collect` follows it.
        `optimizer.zero_grad` clears the CodedWeights' gradients, too. Clear gradients after each step: `collect` raises
        ValueError where it would add a new gradient to one that a step has taken. For copies see the class.
        """
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"optimizer is {brief(optimizer)}; give a torch.optim.Optimizer over all_parameters()")
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        missing = [name for name in self._coded if id(self[_key(name)]) not in stepped]
        if missing:
            raise ValueError(
                f"optimizer does not step the master of {missing[0]}; create it over the all_parameters() of this "
                "MasterWeights"
            )
        before = optimizer.register_step_pre_hook(self._before_step)
        after = optimizer.register_step_post_hook(self._after_step)
        followed = weakref.ref(optimizer)
        self._followed.append(followed)
        earlier = vars(optimizer).get("zero_grad")

        def zero_grad(set_to_none: bool = True) -> None:
            own = followed()
            assert own is not None  # its method is being called
            type(own).zero_grad(own, set_to_none) if earlier is None else earlier(set_to_none)
            if followed in self._followed:
                self._clear_coded()

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

        def undo() -> None:
            before.remove()
            after.remove()
            if followed in self._followed:
                self._followed.remove(followed)

        return undo

    def _before_step(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Collect the gradients; or, where the step is given a closure, which computes them, collect at its end."""
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._collecting(kwargs["closure"])}
        if len(args) > 1 and args[1] is not None:
            return (args[0], self._collecting(args[1]), *args[2:]), kwargs
        self._check_scaler()
        self.collect()
        return None

    def _check_scaler(self) -> None:
        """ValueError where a GradScaler steps and there are gradients that it has not seen."""
        waiting = [name for name, weight in self._coded.items() if has_uncollected(weight)]
        if waiting and a_scaler_steps():
            raise ValueError(
                f"a GradScaler steps the optimizer and has not seen the gradient of {waiting[0]}, which is still "
                "scaled and may hold infinities; call collect() of the MasterWeights before scaler.unscale_ or "
                "scaler.step"
            )

    def _after_step(self, *_: object) -> None:
        self._taken.note(self.items())
        self._write_trained()

    def _collecting(self, closure: object) -> Callable[[], object]:
        """`closure` on codes of the present masters, with `collect` after it."""
        self._check_written()  # before its first call writes the codes
        run = cast("Callable[[], object]", closure)

        def collected() -> object:
            self._write_trained()  # an optimizer may have moved the masters since its last call
            loss = run()
            self.collect()
            return loss

        return collected

    def _clear_coded(self) -> None:
        """Called when the masters' gradients are None or zeros."""
        self._zeroed.note(self.items())
        for weight in self._coded.values():
            clear_gradient(weight)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As a module's; the CodedWeights' gradients are cleared, too."""
        super().zero_grad(set_to_none)
        self._clear_coded()

    def __getstate__(self) -> dict[str, object]:
        optimizers = (followed() for followed in self._followed)
        return {
            **self.__dict__,
            "_followed": [one for one in optimizers if one is not None],
            "_taken": None,
            "_zeroed": None,
            "_written": None,
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        anew = {"_followed": [], "_taken": NotedGradients(), "_zeroed": NotedGradients(), "_written": {}}
        super().__setstate__({**state, **anew})  # type: ignore[no-untyped-call]
        # a copied weight or optimizer has lost the method or the hooks that it got here
        self._connect_main_grads()
        for optimizer in cast("list[Optimizer]", state.get("_followed", ())):
            self.follow(optimizer)

    def collect(self) -> None:
        """Moves the gradients that the CodedWeights have received to the masters: call it before you clip them.

        Raises ValueError where a CodedWeight was given new values and its master was not: the next `write` would undo
        them.
        """
        self._check_written()
        for name, weight in self._coded.items():
            self._collect_one(name, weight)

    @torch.no_grad()
    def _collect_one(self, name: str, weight: CodedWeight) -> None:
        master, grad = self[_key(name)], take_gradient(weight)
        if grad is None:
            # with zeros an optimizer would let the master of a frozen weight decay
            if master.grad is not None and not weight.requires_grad and self._zeroed.has(_key(name), master.grad):
                master.grad = None
            return
        if master.grad is None:
            master.grad = grad.to(master.dtype, copy=True)
        else:
            check_not_taken(self._taken, _key(name), name, master.grad)
            master.grad.add_(grad)

    @torch.no_grad()
    def write(self) -> None:
        """Quantizes every master, cast to its weight's dtype, into the weight's codes."""
        for name, weight in self._coded.items():
            self._write_one(name, weight)

    @torch.no_grad()
    def _write_trained(self) -> None:
        """`write` without frozen weights: quantizing their values again does not always give the same codes."""
        for name, weight in self._coded.items():
            if weight.requires_grad or self[_key(name)].grad is not None:
                self._write_one(name, weight)

    def _write_unless_there(self, name: str, weight: CodedWeight) -> None:
        """Write the weight's codes, unless they stand for the master's values already."""
        if stands_for(weight, self[_key(name)]):
            note(weight, self[_key(name)], self._written)
        else:
            self._write_one(name, weight)

    def _write_one(self, name: str, weight: CodedWeight) -> None:
        weight.copy_(self[_key(name)])
        note(weight, self[_key(name)], self._written)

    def _check_written(self) -> None:
        for name, weight in self._coded.items():
            check_unchanged(name, weight, self[_key(name)], self._written, _LATER_VALUES)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As a module's, without `assign`. Codes that do not stand for the loaded values are then written from them."""
        if assign:
            raise ValueError("assign is True, and the optimizer steps the masters that are here; leave it out")
        result = super().load_state_dict(state_dict, strict)
        with torch.no_grad():
            for name, weight in self._coded.items():
                self._write_unless_there(name, weight)
        return result


def _key(name: str) -> str:
    return name.replace(".", "/")


def _master(name: str, weight: CodedWeight, dtype: torch.dtype, values: Tensor | None) -> nn.Parameter:
    if values is None:
        values = values_of(weight)
    elif not isinstance(values, Tensor) or values.shape != weight.shape or not values.is_floating_point():
        raise ValueError(f"values of {name} is {brief(values)}; give floating-point {list(weight.shape)}")
    return nn.Parameter(values.detach().to(weight.device, dtype, copy=True))
