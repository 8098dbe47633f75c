"""GroupedLinear: a grouped linear layer as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from octavo import Recipe
from octavo.unsaid import UNSAID, Unsaid
from octavo_registry.dispatch.layer_plan import LayerPlan
from octavo_torch.arrays.group_parameters import PerGroup
from octavo_torch.arrays.sizes import GroupSizes
from octavo_torch.dispatch.room import Room
from octavo_torch.linear.call import Adapter
from octavo_torch.linear.functional import explain_linear
from octavo_torch.linear.grouped import InputRows
from octavo_torch.linear.module_base import LinearModule
from octavo_torch.linear.quantize_input import quantize_input
from octavo_torch.linear.quantize_weight import code_weights
from octavo_torch.linear.quantized_input import QuantizedInput
from octavo_torch.linear.weights import QuantizedWeight
from octavo_torch.scaling.recipe_module import ModuleOptions


class GroupedLinear(LinearModule):
    """y[r] = x[r] @ weight[g].T + bias[g] for every row r of group g, in the precision that `recipe` says.

    Parameters are plain tensors: weight [G, N, K], bias [G, N]; with `per_group_parameters` weight0, weight1 ... [N, K]
    and bias0, bias1 ... [N], in one piece of memory, see GroupParameters. State lives in RecipeModule's buffers:
    amax_history [3, H, G] and encode_scale [3, G], operands in the order x, w, dy.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        recipe: Recipe | str | Unsaid | None = UNSAID,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | Sequence[str] | None = None,
        seed: int | None = None,
        main_grad: Literal["accumulate", "overwrite"] | None = None,
        per_group_parameters: PerGroup = False,
        delay_wgrad: bool = False,
        room: Room | None = None,
    ) -> None:
        """Parameters are uniform in +-1 / sqrt(in_features), as torch.nn.Linear's are.

        num_groups              G, the experts
        in_features             K
        out_features            N
        bias                    adds a bias [G, N]
        recipe                  of all three GEMMs; None: high precision, no quantization
        device, dtype           of the parameters; None: torch's defaults
        backend                 a name or a closed list of names; None: the registry's preference
        seed                    base of stochastic rounding's seeds; None: drawn from torch's generator
        main_grad               "accumulate" or "overwrite": the weight's gradient goes to `weight.main_grad`
        per_group_parameters    one parameter per group: weight0, weight1 and so on; {"weight"} or {"bias"}: of these
                                alone
        delay_wgrad             backward leaves the weight's gradient to `backward_dw()`
        room                    multiprocessors that the GEMMs leave to what runs beside them; None: they take all
        """
        sides = {"num_groups": num_groups, "in_features": in_features, "out_features": out_features}
        options = ModuleOptions(recipe, backend, seed, main_grad, per_group_parameters, delay_wgrad, room)
        super().__init__(sides, options, bias, device, dtype)
        code_weights(self, {"weight": None})

    def forward(
        self,
        x: InputRows,
        group_sizes: GroupSizes | None,
        *,
        weight: QuantizedWeight | None = None,
        bias_scales: Tensor | None = None,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
        lora: Adapter | None = None,
    ) -> Tensor:
        """y [M, N], or [..., N] of x [..., K]: see octavo_torch.grouped_linear.

        weight   what `quantize_weight` returned this step
        lora     added to the product, in the place of the module's own: see add_lora
        """
        return self.product(x, group_sizes, weight, bias_scales, out, grad_input, lora)

    def quantize_input(self, x: Tensor, group_sizes: GroupSizes) -> QuantizedInput:
        """`x` quantized once, for every forward of this layer and of others with such weights that reads it."""
        return quantize_input(
            x,
            self.weights,
            group_sizes,
            self.recipe,
            seed=self.seed.current() if self.seed else None,
            state=self.delayed_state,
            backend=self.backend,
            record=self.training,
        )

    def explain(self, x: Tensor, group_sizes: GroupSizes) -> LayerPlan:
        """What a forward and backward with these runs, printable: who quantizes and multiplies what, in which layouts.

        Nothing is computed. Raises as `forward` does.
        """
        return explain_linear(x, self.weights, group_sizes, self.recipe, self.backend)

    def extra_repr(self) -> str:
        """Shape, bias and recipe."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.biases is not None}, recipe={self.recipe.kind}{self.repr_of_options()}"
        )
