"""Parameters of grouped modules: one tensor for all groups or one per group, and state dicts of either form."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from octavo_torch.arrays.checks import brief, check_device
from octavo_torch.arrays.per_group import Weights, leaves_of, share, stacked
from octavo_torch.arrays.valueless import Valueless
from octavo_torch.compiler.tracing import is_plain

Kind = Literal["weight", "bias"]
PerGroup = bool | Collection[Kind]
"""Which parameters there are per group: all of them, none, or those of the named kinds."""
_KINDS: frozenset[Kind] = frozenset({"weight", "bias"})


def kinds_per_group(value: object) -> frozenset[Kind]:
    """The kinds of parameters that `per_group_parameters=value` means; ValueError for anything but a PerGroup."""
    if isinstance(value, bool):
        return _KINDS if value else frozenset()
    if not isinstance(value, (set, frozenset, tuple, list)) or not all(
        isinstance(kind, str) and kind in _KINDS for kind in value
    ):
        raise ValueError(f"per_group_parameters is {brief(value)}; give True, False, {{'weight'}} or {{'bias'}}")
    return frozenset(value)


def reshard(module: nn.Module) -> None:
    """Let the FSDP2 modules in `module` put their parameters back into shards; call it before parameters are changed.

    After a forward a module may still have gathered copies as its parameters, and a change of these would be lost.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


class GroupParameters(nn.Module):
    """Parameters [G, ...], or for kinds in `per_group_parameters` G parameters [...] each, in one block of memory.

    The parameters of `weight` are then `weight0`, `weight1` and so on, those of `weight1` are `weight1_0`, `weight1_1`.
    Moving, casting, copying or loading may separate them; they are then put into one block of memory again, so that a
    layer reads them without a copy. A state dict of one form loads into a module of the other.
    """

    num_groups: int
    per_group_parameters: frozenset[Kind] = frozenset()
    _shapes: Mapping[str, tuple[int, ...]] = {}

    def add_parameters(
        self, shapes: Mapping[str, tuple[int, ...] | None], device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Register parameters of these shapes (None: the parameter is absent), uninitialized."""
        check_device(device, dtype)
        self._shapes = {name: shape for name, shape in shapes.items() if shape is not None}
        for name, shape in shapes.items():
            if shape is None:
                self.register_parameter(name, None)
                continue
            memory = torch.empty(shape, device=device, dtype=dtype)
            for part_name, part in self._split(name, memory).items():
                self.register_parameter(part_name, nn.Parameter(part))

    def of_all_groups(self, name: str) -> Weights | None:
        """The parameter, or one parameter per group: what the functions take as a weight or a bias."""
        if not self.per_group_parameters:
            # straight from the dictionary: nn.Module.__getattr__ costs more than a layer's forward. A parameter missing
            # there has been replaced by a parametrization or a sharding wrapper
            own = self._parameters.get(name)
            return cast("Tensor | None", getattr(self, name)) if own is None else own
        if not self.has(name):
            return None
        if name not in self._shapes or not self.is_per_group(name):
            return cast(Tensor, getattr(self, name))
        return tuple([cast(Tensor, getattr(self, part)) for part in self.part_names(name)])

    def has(self, name: str) -> bool:
        """Whether this parameter is there: from the start, or set since, as torch's fusions set a bias."""
        return name in self._shapes or self._parameters.get(name) is not None

    def is_per_group(self, name: str) -> bool:
        """True where each group has a parameter of its own instead of this one for all."""
        return name.rstrip("12") in self.per_group_parameters

    def part_names(self, name: str) -> Sequence[str]:
        """The names that the groups' parameters have where each group has its own, in group order."""
        stem = f"{name}_" if name[-1].isdigit() else name
        return [f"{stem}{group}" for group in range(self.num_groups)]

    def reset_uniform(self, name: str, bound: float) -> None:
        """Fill a parameter, if it is present, with values uniform in +-bound."""
        value = self.of_all_groups(name)
        for leaf in () if value is None else leaves_of(value):
            nn.init.uniform_(leaf, -bound, bound)

    def _split(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """The parts of `value` [G, ...] by the names of this module's parameters."""
        if not self.is_per_group(name):
            return {name: value}
        return dict(zip(self.part_names(name), value.unbind(0), strict=True))

    def _join_parts(self) -> None:
        """Put the parameters of each name into one block of memory again, where they are ordinary tensors."""
        for name in filter(self.is_per_group, self._shapes):
            leaves = [cast(Tensor, getattr(self, part)) for part in self.part_names(name)]
            if all(map(is_plain, leaves)):
                share(leaves)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: object) -> None:
        for name, shape in self._shapes.items():
            whole = prefix + name
            parts = [prefix + part for part in self.part_names(name)]
            parted = self.is_per_group(name)
            if parted and whole in state_dict and tuple(state_dict[whole].shape) == shape:
                state_dict.update(zip(parts, state_dict.pop(whole).unbind(0), strict=True))
            elif not parted and whole not in state_dict and all(part in state_dict for part in parts):
                state_dict[whole] = stacked([state_dict.pop(part) for part in parts])
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._join_parts()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # torch swaps such a parameter with its copy, and with that loses hooks and attributes
        own: list[Tensor | None] = [*self._parameters.values()]
        marks = [(value, value.marks()) for value in own if isinstance(value, Valueless)]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for parameter, marked in marks:
            parameter.mark_again(marked)
        self._join_parts()
        return self

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._join_parts()
