"""LinearModule: the parameters and the state of one linear layer, and how it runs; GroupedLinear and Linear."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from octavo_torch.arrays.checks import check_flag
from octavo_torch.arrays.per_group import Weights
from octavo_torch.arrays.sizes import GroupSizes
from octavo_torch.dispatch.layers import Layers
from octavo_torch.dispatch.room import check_room
from octavo_torch.linear.arguments import check_adaptable
from octavo_torch.linear.call import Adapter, Call
from octavo_torch.linear.grouped import InputRows, apply, traced
from octavo_torch.linear.quantize_weight import quantize_weight
from octavo_torch.linear.weights import QuantizedWeight, check_own
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.recipe_module import ModuleOptions, RecipeModule
from octavo_torch.scaling.seeds import SeedCounter

_is_compiling = torch.compiler.is_compiling


class LinearModule(RecipeModule):
    """What GroupedLinear and Linear have in common: the weights [N, K] and biases [N] of G groups, and their product.

    State lives in RecipeModule's buffers: amax_history [3, H, G] and encode_scale [3, G], operands in the order x, w,
    dy.
    """

    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        sides: Mapping[str, int],
        options: ModuleOptions,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """sides: num_groups, in_features and out_features; the rest as GroupedLinear has it."""
        check_flag("bias", bias)
        check_room(options.room, of_mlp=False)
        super().__init__(sides, options, device)
        self._layers: Layers = Layers()
        shapes = {
            "weight": (self.num_groups, self.out_features, self.in_features),
            "bias": (self.num_groups, self.out_features) if bias else None,
        }
        self.add_parameters(shapes, device, dtype)
        self.reset_parameters()

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

    def product(
        self,
        x: InputRows,
        group_sizes: GroupSizes | None,
        weight: QuantizedWeight | None,
        bias_scales: Tensor | None,
        out: Tensor | None,
        grad_input: Tensor | None,
        lora: Adapter | None,
    ) -> Tensor:
        """y [..., N] of x [..., K] with this module's options: see GroupedLinear.forward."""
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
        bias = self.of_all_groups("bias") if self.has("bias") else None
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
        """The weight quantized once, for every forward until it changes; with delayed scaling its amax is recorded in
        training mode.

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
            record=self.training,
        )
