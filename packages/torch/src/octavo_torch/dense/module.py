"""Linear: a linear layer with one matrix for all rows, which can replace a torch.nn.Linear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo import Recipe
from octavo.unsaid import UNSAID, Unsaid
from octavo_registry.dispatch.layer_plan import LayerPlan
from octavo_torch.arrays.leading import LeadingAxes
from octavo_torch.arrays.per_group import Weights
from octavo_torch.arrays.sizes import all_rows
from octavo_torch.dispatch.room import Room
from octavo_torch.linear.call import Adapter
from octavo_torch.linear.functional import explain_linear
from octavo_torch.linear.grouped import InputRows
from octavo_torch.linear.module_base import LinearModule
from octavo_torch.linear.quantize_input import quantize_input
from octavo_torch.linear.quantized_input import QuantizedInput
from octavo_torch.linear.weights import QuantizedWeight
from octavo_torch.scaling.recipe_module import ModuleOptions


class Linear(LinearModule, nn.Linear):
    """y = x @ weight.T + bias, in the precision that `recipe` says: torch.nn.Linear for attention and dense layers.

    It is a grouped product of one group, and has the bits of `grouped_linear(x, weight[None], [rows])`. Parameters are
    plain tensors: weight [N, K], bias [N]; state dicts are those of torch.nn.Linear, with the recipe's state where it
    has one, in RecipeModule's buffers: amax_history [3, H, 1] and encode_scale [3, 1], operands in the order x, w, dy.

    It is a subclass of torch.nn.Linear, so that code which looks for linear layers, such as the initialization of
    transformers or PEFT's LoRA, finds it; and like torch.nn.Linear it is called with x alone.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str | Unsaid | None = UNSAID,
        backend: str | Sequence[str] | None = None,
        seed: int | None = None,
        main_grad: Literal["accumulate", "overwrite"] | None = None,
        delay_wgrad: bool = False,
        room: Room | None = None,
    ) -> None:
        """Parameters are uniform in +-1 / sqrt(in_features), as torch.nn.Linear's are.

        in_features     K; kernels on GPUs take multiples of 16
        out_features    N; kernels on GPUs take multiples of 16
        bias            adds a bias [N]
        device, dtype   of the parameters; None: torch's defaults
        recipe          of all three GEMMs; None: high precision, no quantization
        backend         a name or a closed list of names; None: the registry's preference
        seed            base of stochastic rounding's seeds; None: drawn from torch's generator
        main_grad       "accumulate" or "overwrite": the weight's gradient goes to `weight.main_grad`
        delay_wgrad     backward leaves the weight's gradient to `backward_dw()`
        room            multiprocessors that the GEMMs leave to what runs beside them; None: they take all

        Raises ValueError for arguments that do not fit. Inside of `quantized_parameters` the weight stays values.
        """
        sides = {"num_groups": 1, "in_features": in_features, "out_features": out_features}
        options = ModuleOptions(recipe, backend, seed, main_grad, False, delay_wgrad, room)
        super().__init__(sides, options, bias, device, dtype)

    def is_per_group(self, name: str) -> bool:
        """True: the one group has parameters of its own, without an axis of groups."""
        return True

    def part_names(self, name: str) -> Sequence[str]:
        """The parameter's own name, as torch.nn.Linear has it."""
        return (name,)

    def of_all_groups(self, name: str) -> Weights | None:
        """The parameter as that of the only group, in a tuple; None where there is none."""
        own = self._parameters.get(name)
        if own is None:  # absent, or replaced by a parametrization
            own = getattr(self, name)
        return None if own is None else (own,)

    def forward(
        self,
        x: InputRows,
        *,
        weight: QuantizedWeight | None = None,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
        lora: Adapter | None = None,
    ) -> Tensor:
        """y [..., N] of x [..., K]: see octavo_torch.grouped_linear.

        x                 bf16, fp16 or fp32, of the weight's dtype unless torch.autocast is on; or what
                          `quantize_input` returned, or a GroupedTensor of one group, which takes no gradient
        weight            what `quantize_weight` returned this step
        out, grad_input   buffers for y and for dx, of any strides without overlap
        lora              an adapter to add to the product, instead of the module's own: see add_lora

        Raises ValueError for shapes, dtypes or buffers that do not fit, and for parameters that tensor parallelism has
        split; NoBackendError where no installed backend serves the request.
        """
        if isinstance(x, DTensor) or isinstance(self._parameters.get("weight"), DTensor):
            raise ValueError(
                "x or weight is a DTensor, and Linear multiplies whole tensors: FSDP2 gathers them before a forward, "
                "and tensor parallelism does not; leave this layer out of the parallelize plan, or give a "
                "GroupedLinear(1, ...), which GroupedColumnParallel and GroupedRowParallel split"
            )
        sizes = all_rows(x) if isinstance(x, Tensor) else None
        return self.product(x, sizes, weight, None, out, grad_input, lora)

    def quantize_input(self, x: Tensor) -> QuantizedInput:
        """`x` [M, K] quantized once, for every forward of this layer and of others that reads it: q, k and v, say."""
        return quantize_input(
            x,
            self.weights,
            all_rows(x),
            self.recipe,
            seed=self.seed.current() if self.seed else None,
            state=self.delayed_state,
            backend=self.backend,
            record=self.training,
        )

    def explain(self, x: Tensor) -> LayerPlan:
        """What a forward and backward with x [..., K] would run, printable: which backend quantizes and multiplies
        what, and in which layouts. Nothing is computed.

        Raises as `forward` does.
        """
        rows = LeadingAxes(x).flat(x)
        return explain_linear(rows, self.weights, all_rows(x), self.recipe, self.backend)

    def extra_repr(self) -> str:
        """Shape, bias and recipe."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.biases is not None}, "
            f"recipe={self.recipe.kind}{self.repr_of_options()}"
        )
