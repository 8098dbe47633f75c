"""GroupedLinear: a grouped linear layer as a module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from octavo import Recipe
from octavo_torch import functional
from octavo_torch.delayed import DelayedState
from octavo_torch.linear import Held, apply, traced
from octavo_torch.recipe_module import RecipeModule
from octavo_torch.seeds import SeedCounter
from octavo_torch.weights import QuantizedWeight

_is_compiling = torch.compiler.is_compiling


class GroupedLinear(RecipeModule):
    """y[r] = x[r] @ weight[g].T + bias[g] for every row r of group g, in the precision that `recipe` says.

    Parameters are plain tensors: weight [G, N, K], bias [G, N]. State lives in RecipeModule's buffers: amax_history
    [3, H, G] and encode_scale [3, G], operands in the order x, w, dy.
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
        recipe: Recipe | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | Sequence[str] | None = None,
        seed: int | None = None,
        main_grad: Literal["accumulate", "overwrite"] | None = None,
    ) -> None:
        """seed: base of stochastic rounding's seeds; None draws one from torch's generator.

        main_grad: "accumulate" or "overwrite" writes the weight's gradient into `weight.main_grad`, see grouped_linear.
        """
        sides = {"num_groups": num_groups, "in_features": in_features, "out_features": out_features}
        super().__init__(sides, recipe, device, backend, seed, main_grad)
        self._held: Held = {}
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(num_groups, out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Parameters uniform in +-1 / sqrt(in_features), as torch.nn.Linear's; buffers as before the first step."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)
        self.reset_buffers()

    @property
    def delayed_state(self) -> DelayedState | None:
        """The module's buffers as the state of delayed scaling; None for other recipes."""
        if not self._stateful:
            return None
        return DelayedState(self.recipe, self.amax_history, self.encode_scale)  # type: ignore[arg-type]

    def forward(
        self,
        x: Tensor,
        group_sizes: Any,
        *,
        weight: QuantizedWeight | None = None,
        bias_scales: Tensor | None = None,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
    ) -> Tensor:
        """y [M, N]: see octavo_torch.grouped_linear. `weight`: what `quantize_weight` returned this step."""
        # straight from the dictionary: nn.Module.__getattr__ costs more than the rest of this function
        own = self._parameters.get("weight")
        if own is None:  # a parametrization or a sharding wrapper has taken its place
            own = self.weight
        if weight is not None and weight.weight is not own:
            raise ValueError("weight was not made by this module; give what its quantize_weight returned")
        seed = SeedCounter(self.seed_base, self.seed_counter) if self._stochastic else None
        state = self.delayed_state if self._stateful else None
        call = traced if _is_compiling() else apply
        return call(
            x,
            own if weight is None else weight,
            group_sizes,
            self.recipe,
            self.backend,
            self._parameters.get("bias"),
            bias_scales,
            seed,
            state,
            self.training,
            0,
            out,
            grad_input,
            self._held,
            self.main_grad,
        )

    def quantize_weight(self) -> QuantizedWeight:
        """The weight quantized once, for every forward until it changes; with delayed scaling its amax is recorded."""
        return functional.quantize_weight(
            self.weight,
            self.recipe,
            seed=self.seed_base if self._stochastic else None,
            state=self.delayed_state,
            backend=self.backend,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the resolved layers: bound functions stay in their process."""
        return {**self.__dict__, "_held": {}}

    def extra_repr(self) -> str:
        """Shape, bias and recipe."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, recipe={self.recipe.kind}"
        )
