"""Call: everything about one call of a grouped layer but its operands, from the public function to its backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

from torch import Tensor

from octavo import Recipe
from octavo.formats import DType
from octavo_registry.contract.layer import WholeLayer
from octavo_torch.arrays.checks import HashableNames
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.sizes import GroupSizes, Sizes
from octavo_torch.dispatch.layer import Layer
from octavo_torch.dispatch.layers import Layers
from octavo_torch.dispatch.room import Room
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.probe import Probe
from octavo_torch.scaling.seeds import Seed
from octavo_torch.wgrad.main_grad import MainGrad
from octavo_torch.wgrad.postponed import DelayedWgrad
from octavo_torch.wgrad.target import WgradTarget

WholePasses: TypeAlias = WholeLayer[Tensor, DelayedState]


class Adapter(ABC):
    """Computes, from the rows that a grouped layer reads, what is added to the layer's result."""

    @abstractmethod
    def delta(self, x: Tensor, group_sizes: GroupSizes | None, interleave: int = 0) -> Tensor:
        """[M, N] of rows x [M, K] in high precision; zeros past the sum of the sizes.

        interleave   b: b gate rows and b up rows alternate in the layer's weight, and in the result all gate columns
                     come first; 0: the result's columns are in the order of the weight's rows
        """

    def added_to(self, y: Tensor, x: Tensor, group_sizes: GroupSizes | None, interleave: int = 0) -> Tensor:
        """y plus `delta`, in y's dtype, whatever x's is: the sum is rounded once."""
        return (y + self.delta(x, group_sizes, interleave)).to(y.dtype)


@dataclass(slots=True, eq=False)
class Options:
    """What the caller of a layer, or of an MLP, says in addition to its operands. The public functions document each.

    record   whether delayed scaling records the amax of this call; modules record while they train
    room     multiprocessors that the call leaves to others; None: it takes all
    """

    recipe: Recipe
    backend: HashableNames = None
    group_offset: int = 0
    seed: Seed = None
    record: bool = True
    out: Tensor | None = None
    grad_input: Tensor | None = None
    main_grad: MainGrad | None = None
    room: Room | None = None

    def present(self) -> dict[str, object]:
        """The options that are not None, by name."""
        named = ((part.name, getattr(self, part.name)) for part in fields(self) if part.init)
        return {name: value for name, value in named if value is not None}


@dataclass(slots=True, eq=False)
class Call(Options):
    """One call of one layer: its options, and what `apply` resolves before the forward runs.

    interleave  b: b gate rows and b up rows alternate in the weight, and its codes, if the call has them, are of the
              gate half followed by the up half; 0: they do not alternate
    output_dtype  replaces the recipe's, and changes no codes; "x": x's dtype; None: the recipe's
    probe     counts what the quantizers do to this call's operands; None: nobody observes the call
    layers    remembers the layers that the caller has resolved; None: those of functional calls
    layer     the resolved layer
    sizes     int [G], or what `layer.prepare` returned for them
    x_codes   the codes of an x that was quantized before the call
    w_codes   the codes of a weight that was quantized before the call
    w_values  the weight in the dtype in which the call reads it, if autograd is given the weight before that cast
    w_made    codes of the weight that the call has made before its product starts
    target    where the weight's gradient goes; None: to autograd
    whole     the passes of a layer that one backend runs whole; only set on that route
    rest      what such a forward passes to its backward in addition to tensors
    """

    state: DelayedState | None = None
    delayed_wgrad: DelayedWgrad | None = None
    interleave: int = 0
    output_dtype: DType | Literal["x"] | None = None
    probe: Probe | None = None
    layers: Layers | None = None
    layer: Layer = field(init=False)
    sizes: Sizes = field(init=False)
    x_codes: GroupedTensor | None = field(default=None, init=False)
    w_codes: GroupedTensor | None = field(default=None, init=False)
    w_values: Tensor | None = field(default=None, init=False)
    w_made: GroupedTensor | None = field(default=None, init=False)
    target: WgradTarget | None = field(default=None, init=False)
    whole: WholePasses = field(init=False)
    rest: object = field(default=None, init=False)

    def values_of(self, weight: Tensor) -> Tensor:
        """The weight as the call reads it, of the one that autograd is given."""
        return weight if self.w_values is None else self.w_values

    def release(self) -> None:
        """Drops what only the forward reads, because backward keeps the call alive."""
        self.out = self.x_codes = self.w_codes = self.w_values = self.w_made = None
