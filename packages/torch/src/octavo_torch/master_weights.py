"""MasterWeights: the values of weights that are codes, for an optimizer to step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from octavo_torch.arrays.checks import brief, check_dtype, check_module
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.optimizers.state import stands_for, values_of
from octavo_torch.optimizers.written import Versions, check_unchanged, note

_LATER_VALUES = (
    "Create the MasterWeights after values are loaded, give them as values, or copy them into the master, too"
)


class MasterWeights(nn.ParameterDict):
    """High-precision values of a module's weights that are codes: an optimizer steps them, and writes the codes.

    It holds one parameter per CodedWeight, under its name with "/" in the place of ".", and its state dict is what a
    checkpoint keeps beside the model's. Gradients go to the CodedWeights, where backward, DistributedDataParallel and
    accumulation over microbatches leave them; `collect` moves them to the masters in the masters' dtype. With
    `main_grad` in a layer its gradient is added to the master's at once. The module's own `zero_grad` does not reach
    the masters: call the optimizer's. A GradScaler sees the masters' gradients alone: call `collect` before its
    `unscale_` or `step`, which is refused otherwise.

        with octavo_torch.quantized_parameters("fp8-block"):
            model = Model()
        masters = octavo_torch.MasterWeights(model)
        optimizer = torch.optim.AdamW(masters.all_parameters())
        masters.follow(optimizer)  # each step begins with collect() and ends with write()

    A copy, or what a pickle holds, belongs to the copies of the module and of the optimizers that are made in the same
    call, and follows those: `copy.deepcopy((model, masters, optimizer))`. Of parts that are copied one by one none
    belongs to another: torch copies no optimizer's hooks, so that of such parts `follow` has to be called again, on a
    MasterWeights of that model and an optimizer over it.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype = torch.float32, values: Mapping[str, Tensor] | None = None
    ) -> None:
        """module: its CodedWeights get masters; dtype: of the masters.

        values   of the weights by the names of the module's parameters, such as a checkpoint's: they are written to
                 the codes, too. A weight that is not there starts from what its codes stand for

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
        self._taken = _Taken()
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
        self._give_buffers()

    def _give_buffers(self) -> None:
        """Has a layer with `main_grad` add to the masters' gradients."""
        for name, weight in self._coded.items():
            weight.get_main_grad = partial(_gradient_of, self[_key(name)])  # type: ignore[attr-defined]

    def all_parameters(self) -> Iterator[nn.Parameter]:
        """What an optimizer steps: the masters, and the module's other parameters."""
        yield from self.parameters()
        yield from self._others

    def follow(self, optimizer: Optimizer) -> Callable[[], None]:
        """From now on each step of `optimizer` begins with `collect` and ends with `write`; returns what undoes it.

        A closure that a step is given finds the codes of the masters, and `collect` follows it. `optimizer.zero_grad`
        clears the CodedWeights' gradients, too. A step takes the masters' gradients: `collect` raises ValueError where
        it would add new ones to these. A copy of the optimizer is followed where it is made together with one of this:
        see the class.
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
            assert own is not None  # whose attribute this is
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
        """Collects, or has the closure among the arguments of the step do so, in which the gradients come."""
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._collecting(kwargs["closure"])}
        if len(args) > 1 and args[1] is not None:
            return (args[0], self._collecting(args[1]), *args[2:]), kwargs
        self._check_scaler()
        self.collect()
        return None

    def _check_scaler(self) -> None:
        """ValueError where a GradScaler steps and there are gradients that it has not seen."""
        waiting = [name for name, weight in self._coded.items() if _has_gradient(weight)]
        if waiting and _scaler_steps():
            raise ValueError(
                f"a GradScaler steps the optimizer and has not seen the gradient of {waiting[0]}, which is still "
                "scaled and may hold infinities; call collect() of the MasterWeights before scaler.unscale_ or "
                "scaler.step"
            )

    def _after_step(self, *_: object) -> None:
        self._taken.note(self.items())
        self._write_moved()

    def _collecting(self, closure: object) -> Callable[[], object]:
        self._check_written()  # before the first of its calls writes
        run = cast("Callable[[], object]", closure)

        def collected() -> object:
            self._write_moved()  # an optimizer may have moved the masters since its last call
            loss = run()
            self.collect()
            return loss

        return collected

    def _clear_coded(self) -> None:
        for weight in self._coded.values():
            weight.grad = None
            weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]

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
            "_written": None,
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__({**state, "_followed": [], "_taken": _Taken(), "_written": {}})  # type: ignore[no-untyped-call]
        # neither an optimizer's state nor a weight's has what this has given to it
        self._give_buffers()
        for optimizer in cast("list[Optimizer]", state.get("_followed", ())):
            self.follow(optimizer)

    def collect(self) -> None:
        """Moves the gradients that the CodedWeights have received to the masters: call it before you clip them.

        Raises ValueError where a CodedWeight has got other values than its master since it was written, which the next
        `write` would undo.
        """
        self._check_written()
        for name, weight in self._coded.items():
            _move_gradient(name, self[_key(name)], weight, self._taken)

    @torch.no_grad()
    def write(self) -> None:
        """Quantizes every master, cast to its weight's dtype, into the weight's codes."""
        for name, weight in self._coded.items():
            self._write_one(name, weight)

    @torch.no_grad()
    def _write_moved(self) -> None:
        """Not the codes of frozen weights, which are not always those that quantizing their values again gives."""
        for name, weight in self._coded.items():
            if weight.requires_grad or self[_key(name)].grad is not None:
                self._write_one(name, weight)

    def _write_unless_there(self, name: str, weight: CodedWeight) -> None:
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
        """As a module's, without `assign`; codes that do not stand for their master's values are written afterwards."""
        if assign:
            raise ValueError("assign is True, and the optimizer steps the masters that are here; leave it out")
        result = super().load_state_dict(state_dict, strict)
        with torch.no_grad():
            for name, weight in self._coded.items():
                self._write_unless_there(name, weight)
        return result


def _scaler_steps() -> bool:
    """Whether a GradScaler that is enabled has called this. Hooks of an optimizer are told nothing of it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False


def _key(name: str) -> str:
    return name.replace(".", "/")


def _master(name: str, weight: CodedWeight, dtype: torch.dtype, values: Tensor | None) -> nn.Parameter:
    if values is None:
        values = values_of(weight)
    elif not isinstance(values, Tensor) or values.shape != weight.shape or not values.is_floating_point():
        raise ValueError(f"values of {name} is {brief(values)}; give floating-point {list(weight.shape)}")
    return nn.Parameter(values.detach().to(weight.device, dtype, copy=True))


class _Taken:
    """Gradients of masters that a step has taken, by name."""

    def __init__(self) -> None:
        self._gradients: dict[str, tuple[TensorWeakRef, int]] = {}

    def note(self, masters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """A step has taken the gradients of these."""
        present = ((key, master.grad) for key, master in masters)
        self._gradients = {key: (TensorWeakRef(grad), grad._version) for key, grad in present if grad is not None}

    def check(self, name: str, grad: Tensor) -> None:
        """ValueError where a gradient is to be added to one that was taken, and that nobody has cleared since."""
        taken, version = self._gradients.get(_key(name), (None, 0))
        if taken is not None and taken() is grad and grad._version == version:
            raise ValueError(
                f"the master of {name} has the gradient that the optimizer's last step took, and a new one would be "
                "added to it; call optimizer.zero_grad() after each step: the module's zero_grad() does not reach the "
                "masters"
            )


def _gradient_of(master: nn.Parameter) -> Tensor:
    """The buffer that a layer with `main_grad` adds to."""
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad


def _has_gradient(weight: Tensor) -> bool:
    """Whether there is one to be collected: one that a layer has added to its master's is not."""
    return weight.grad is not None and not getattr(weight, "grad_added_to_main_grad", False)


@torch.no_grad()
def _move_gradient(name: str, master: nn.Parameter, weight: Tensor, taken: _Taken) -> None:
    grad = weight.grad if _has_gradient(weight) else None
    weight.grad = None
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    if grad is None:
        return
    if master.grad is None:
        master.grad = grad.to(master.dtype, copy=True)
    else:
        taken.check(name, master.grad)
        master.grad.add_(grad)
