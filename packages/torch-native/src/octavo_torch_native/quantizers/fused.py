"""The functions of "act_quantize", "dact_quantize" and "norm_quantize", as octavo_registry.contract.fused has them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo import QuantizerSpec
from octavo_registry.contract import Activation, Norm
from octavo_torch.plugin_api import Extras, GroupedTensor, seed_tensor
from octavo_torch_native.arrays.group_index import GroupIndex, group_index_of
from octavo_torch_native.quantizers import operators
from octavo_torch_native.quantizers.kernel import Kernel, kernel_of
from octavo_torch_native.quantizers.work import Prologue, Work, text_of

GroupSizes = Tensor | GroupIndex | None
Wanted = tuple[str, ...] | None
"""Names of the fields of Extras that are made; None: all that the function has."""


class _Fused:
    """What the three have in common: one spec in the layouts of its request, after one prologue."""

    def __init__(
        self, spec: QuantizerSpec, layouts: tuple[str, str], prologue: Prologue, everything: tuple[str, ...]
    ) -> None:
        self._spec, self._layouts, self._prologue = spec, layouts, prologue
        self._everything = (*everything, "amax") if spec.scaling == "delayed" else everything
        self._kernels: dict[tuple[Any, ...], tuple[str, Kernel]] = {}

    def _launch(
        self,
        x: Tensor,
        group_sizes: GroupSizes,
        operand: Any,
        wanted: Wanted,
        seed: Tensor | int | None,
        group_offset: int,
        scale: Tensor | None,
        dy: Tensor | None = None,
        probs: Tensor | None = None,
        gamma: Tensor | None = None,
        beta: Tensor | None = None,
        **how: Any,
    ) -> tuple[GroupedTensor, Extras]:
        key = (operand, wanted, *how.values())
        text, kernel = self._kernels.get(key) or self._new_kernel(key, how)
        plan = group_index_of(x.shape, group_sizes, x)
        assert plan is not None  # rows, by the contract of these operations
        drawn = seed_tensor(seed, x.device) if self._spec.stochastic else None
        outputs = operators.quantize(
            x, plan.words, plan.groups, text, drawn, group_offset, scale, dy, probs, gamma, beta
        )
        codes = kernel.tensor(kernel.frame(x, plan.groups), plan.group_sizes, outputs)
        extras = outputs[len(outputs) - len(kernel.extras) :]
        return codes, Extras(**dict(zip(kernel.extras, extras, strict=True)))

    def _new_kernel(self, key: tuple[Any, ...], how: dict[str, Any]) -> tuple[str, Kernel]:
        operand, wanted = key[:2]
        names = self._everything if wanted is None else wanted
        made = {name: name in names for name in ("amax", "dequantized", "activated", "dbias", "dprobs")}
        what: dict[str, Any] = {**how, **made}
        text = text_of(Work(self._spec, operand or self._spec.role, self._layouts, self._prologue, **what))
        kernel = self._kernels[key] = text, kernel_of(text)
        return kernel


class ActQuantizer(_Fused):
    """act(x) times probabilities, quantized."""

    def __init__(self, spec: QuantizerSpec, layouts: tuple[str, str], activation: Activation) -> None:
        super().__init__(spec, layouts, "activation", ("activated",))
        self._activation = activation

    def __call__(
        self,
        x: Tensor,
        group_sizes: GroupSizes = None,
        *,
        probs: Tensor | None = None,
        seed: Tensor | int | None = None,
        operand: str | None = None,
        group_offset: int = 0,
        scale: Tensor | None = None,
        wanted: Wanted = None,
    ) -> tuple[GroupedTensor, Extras]:
        """Codes of [M, F], of x [M, F] or [M, 2 F]; see octavo_torch.act_quantize."""
        return self._launch(
            x, group_sizes, operand, wanted, seed, group_offset, scale, probs=probs, activation=self._activation
        )


class DactQuantizer(_Fused):
    """The gradient of act_quantize's x, quantized, its column sums, and the gradient of its probs."""

    def __init__(self, spec: QuantizerSpec, layouts: tuple[str, str], activation: Activation) -> None:
        super().__init__(spec, layouts, "activation_grad", ("activated", "dbias", "dprobs"))
        self._activation = activation

    def __call__(
        self,
        dy: Tensor,
        x: Tensor,
        group_sizes: GroupSizes = None,
        *,
        probs: Tensor | None = None,
        seed: Tensor | int | None = None,
        operand: str | None = None,
        group_offset: int = 0,
        scale: Tensor | None = None,
        wanted: Wanted = None,
    ) -> tuple[GroupedTensor, Extras]:
        """Codes of x's shape, of dy [M, F] in x's dtype; see octavo_torch.dact_quantize."""
        return self._launch(
            x, group_sizes, operand, wanted, seed, group_offset, scale, dy, probs, activation=self._activation
        )


class NormQuantizer(_Fused):
    """A normalization of x's rows, quantized."""

    def __init__(self, spec: QuantizerSpec, layouts: tuple[str, str], norm: Norm) -> None:
        super().__init__(spec, layouts, "norm", ("activated",))
        self._norm = norm

    def __call__(
        self,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor | None = None,
        group_sizes: GroupSizes = None,
        *,
        epsilon: float = 1e-6,
        seed: Tensor | int | None = None,
        operand: str | None = None,
        group_offset: int = 0,
        scale: Tensor | None = None,
        wanted: Wanted = None,
    ) -> tuple[GroupedTensor, Extras]:
        """Codes of [M, C], with `rstd`, and `mean` for LayerNorm; see octavo_torch.norm_quantize."""
        return self._launch(
            x, group_sizes, operand, wanted, seed, group_offset, scale, gamma=gamma, beta=beta,
            norm=self._norm, epsilon=float(epsilon),
        )  # fmt: skip
