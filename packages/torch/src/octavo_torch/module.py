"""GroupedLinear: a grouped linear layer as a module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from octavo import HighPrecision, Recipe
from octavo_torch import functional
from octavo_torch.delayed import DelayedState
from octavo_torch.linear import Held, apply, traced
from octavo_torch.main_grad import MainGrad, check_mode
from octavo_torch.seeds import SeedCounter
from octavo_torch.tracing import register_constants
from octavo_torch.weights import QuantizedWeight

_is_compiling = torch.compiler.is_compiling


class GroupedLinear(nn.Module):
    """y[r] = x[r] @ weight[g].T + bias[g] for every row r of group g, in the precision that `recipe` says.

    Parameters are plain tensors: weight [G, N, K], bias [G, N]. State lives in buffers, which a state dict holds as
    plain tensors, and only where the recipe has some:

    seed_base, seed_counter   int64 scalars, for stochastic recipes. The counter moves in backward, when gradients are
                              rounded, so activation checkpointing changes no bit
    amax_history [3, H, G]    float32, for delayed scaling, operands in the order x, w, dy. Training forwards and
    encode_scale [3, G]       backwards record; `update_scales()` after a step makes the next scales. Casting the module
                              leaves them float32
    """

    recipe: Recipe
    weight: nn.Parameter
    bias: nn.Parameter | None
    seed_base: Tensor
    seed_counter: Tensor
    amax_history: Tensor
    encode_scale: Tensor
    main_grad: MainGrad | None = None

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
        super().__init__()
        for name, value in (("num_groups", num_groups), ("in_features", in_features), ("out_features", out_features)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; give an integer of at least 1")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise ValueError(f"recipe is {recipe!r}; give a Recipe, octavo.recipe(name) makes one from a name")
        if main_grad is not None:
            check_mode(main_grad)
        register_constants()
        self.main_grad = main_grad
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.recipe = HighPrecision() if recipe is None else recipe
        self._held: Held = {}
        # properties of a recipe are Python calls, and forward asks each time
        self._stochastic, self._stateful = self.recipe.stochastic, self.recipe.stateful
        self.backend = backend if backend is None or isinstance(backend, str) else tuple(backend)
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(num_groups, out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self._seed = seed
        if self.recipe.stochastic:
            self.register_buffer("seed_base", torch.empty((), dtype=torch.int64, device=device))
            self.register_buffer("seed_counter", torch.empty((), dtype=torch.int64, device=device))
        if self.recipe.stateful:
            state = DelayedState.create(self.recipe, num_groups, device)  # type: ignore[arg-type]
            self.register_buffer("amax_history", state.history)
            self.register_buffer("encode_scale", state.scale)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Parameters uniform in +-1 / sqrt(in_features), as torch.nn.Linear's; buffers as before the first step."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)
        with torch.no_grad():
            if self.recipe.stochastic:
                if self._seed is None:
                    self.seed_base.random_()
                else:
                    self.seed_base.fill_((self._seed + (1 << 63)) % (1 << 64) - (1 << 63))
                self.seed_counter.zero_()
            if self.recipe.stateful:
                self.amax_history.zero_()
                self.encode_scale.fill_(1.0)

    @property
    def delayed_state(self) -> DelayedState | None:
        """The module's buffers as the state of delayed scaling; None for other recipes."""
        if not self.recipe.stateful:
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
            seed=self.seed_base if self.recipe.stochastic else None,
            state=self.delayed_state,
            backend=self.backend,
        )

    def update_scales(self, process_group: Any = None) -> None:
        """End a step of delayed scaling: make the next scales from the recorded amax; nothing for other recipes.

        process_group   reduce amax over its ranks first; every rank calls, ranks without tokens too
        """
        state = self.delayed_state
        if state is not None:
            state.update(process_group)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the resolved layers: bound functions stay in their process."""
        return {**self.__dict__, "_held": {}}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedLinear:
        kept = {name: self._buffers[name] for name in ("amax_history", "encode_scale") if name in self._buffers}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self._buffers[name]
            # module.bfloat16() means the parameters: scales are fp32 by definition
            if before is not None and after is not None and after.dtype is not before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def extra_repr(self) -> str:
        """Shape, bias and recipe."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, recipe={self.recipe.kind}"
        )


def update_scales(module: nn.Module, process_group: Any = None) -> None:
    """`update_scales` of every GroupedLinear in `module`: call it after each optimizer step."""
    for layer in module.modules():
        if isinstance(layer, GroupedLinear):
            layer.update_scales(process_group)
