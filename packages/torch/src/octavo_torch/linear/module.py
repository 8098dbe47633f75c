"""GroupedLinear: a grouped linear layer as a module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from octavo import Recipe
from octavo_registry.dispatch.layer_plan import LayerPlan
from octavo_torch.arrays.checks import check_flag
from octavo_torch.arrays.group_parameters import PerGroup
from octavo_torch.arrays.per_group import Weights
from octavo_torch.arrays.sizes import GroupSizes
from octavo_torch.dispatch.layer import Layers
from octavo_torch.dispatch.room import Room, check_room
from octavo_torch.linear.arguments import check_adaptable
from octavo_torch.linear.call import Adapter, Call
from octavo_torch.linear.explain import explain_linear
from octavo_torch.linear.grouped import Rows, apply, traced
from octavo_torch.linear.quantized_input import QuantizedInput
from octavo_torch.linear.quantized_operands import code_weights, quantize_input, quantize_weight
from octavo_torch.linear.weights import QuantizedWeight, check_own
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.recipe_module import UNSAID, ModuleOptions, RecipeModule, Unsaid
from octavo_torch.scaling.seeds import SeedCounter

_is_compiling = torch.compiler.is_compiling


class GroupedLinear(RecipeModule):
    """y[r] = x[r] @ weight[g].T + bias[g] for every row r of group g, in the precision that `recipe` says.

    Parameters are plain tensors: weight [G, N, K], bias [G, N]; with `per_group_parameters` weight0, weight1 ... [N, K]
    and bias0, bias1 ... [N], in one piece of memory, see GroupParameters. State lives in RecipeModule's buffers:
    amax_history [3, H, G] and encode_scale [3, G], operands in the order x, w, dy.
    """

    num_groups: int
    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None

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
        check_flag("bias", bias)
        check_room(room, of_mlp=False)
        sides = {"num_groups": num_groups, "in_features": in_features, "out_features": out_features}
        options = ModuleOptions(recipe, backend, seed, main_grad, per_group_parameters, delay_wgrad, room)
        super().__init__(sides, options, device)
        self._layers: Layers = Layers()
        shapes = {
            "weight": (num_groups, out_features, in_features),
            "bias": (num_groups, out_features) if bias else None,
        }
        self.add_parameters(shapes, device, dtype)
        self.reset_parameters()
        code_weights(self, {"weight": None})

    def reset_parameters(self) -> None:
        """Parameters uniform in +-1 / sqrt(in_features), as torch.nn.Linear's; buffers as before the first step."""
        for name in ("weight", "bias"):
            self.reset_uniform(name, 1 / math.sqrt(self.in_features))
        self.reset_buffers()

    @property
    def weights(self) -> Weights:
        """The weight, or one per group: what `grouped_linear` takes."""
        value = self.of_all_groups("weight")
        assert value is not None
        return value

    @property
    def biases(self) -> Weights | None:
        """The bias, or one per group; None without."""
        return self.of_all_groups("bias")

    @property
    def delayed_state(self) -> DelayedState | None:
        """The module's buffers as the state of delayed scaling; None for other recipes."""
        if not self._stateful:
            return None
        # straight from the dictionary, as GroupParameters.of_all_groups
        return DelayedState(self.recipe, self._buffers["amax_history"], self._buffers["encode_scale"])  # type: ignore[arg-type]

    def forward(
        self,
        x: Rows,
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
        own = self.of_all_groups("weight")
        if weight is not None:
            check_own("weight", weight, own)
        seed = SeedCounter(self.seed_base, self.seed_counter) if self._stochastic else None
        call = Call(self.recipe, self.backend)
        call.seed, call.record = seed, self.training
        compiling = _is_compiling()
        if self._stateful:
            call.state = self.delayed_state
            if self.training and not compiling:
                self.notice_unused_amax(own)  # type: ignore[arg-type]
        call.out, call.grad_input = out, grad_input
        call.main_grad, call.delayed_wgrad, call.room = self.main_grad, self.delayed_wgrad, self.room
        call.layers = self._layers
        if self.probes:
            (call.probe,) = self.probes
        run = traced if compiling else apply
        bias: Weights | None = self._parameters.get("bias")
        if bias is None and "bias" in self._shapes:
            bias = self.of_all_groups("bias")
        if lora is None and self._modules:
            lora = self._modules.get("lora")  # type: ignore[assignment]
        used = own if weight is None else weight
        if lora is None:  # last, so that where run breaks torch.compile's graph nothing of y is left to trace
            return run(x, used, group_sizes, bias, bias_scales, call)  # type: ignore[arg-type]
        check_adaptable(x, call, (lora,))
        y = run(x, used, group_sizes, bias, bias_scales, call)  # type: ignore[arg-type]
        return lora.added_to(y, x, group_sizes)  # type: ignore[arg-type]

    def quantize_weight(
        self, *, out: QuantizedWeight | None = None, unchanged: Tensor | None = None
    ) -> QuantizedWeight:
        """The weight quantized once, for every forward until it changes; with delayed scaling its amax is recorded.

        out, unchanged   write an earlier result's codes again, unless a flag on the device says that nothing has
                         changed: see octavo_torch.quantize_weight
        """
        return quantize_weight(
            self.weights,
            self.recipe,
            seed=self.seed_base if self._stochastic else None,
            state=self.delayed_state,
            backend=self.backend,
            out=out,
            unchanged=unchanged,
        )

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
        )

    def explain(self, x: Tensor, group_sizes: GroupSizes) -> LayerPlan:
        """What a forward and backward with these runs, printable: who quantizes and multiplies what, in which layouts.

        Nothing is computed. Raises as `forward` does.
        """
        return explain_linear(x, self.weights, group_sizes, self.recipe, self.backend)

    def __getstate__(self) -> dict[str, object]:
        """Everything but the resolved layers: bound functions stay in their process."""
        return {**self.__dict__, "_layers": Layers()}

    def extra_repr(self) -> str:
        """Shape, bias and recipe."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={'bias' in self._shapes}, recipe={self.recipe.kind}{self.repr_of_options()}"
        )
