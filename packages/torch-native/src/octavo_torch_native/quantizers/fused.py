"""The functions of "act_quantize", "dact_quantize" and "norm_quantize", as octavo_registry.contract.fused has them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from octavo import QuantizerSpec
from octavo_native import support
from octavo_registry.contract import Activation, Norm
from octavo_torch.plugin_api import DTYPE_NAMES, Bounded, Extras, GroupedTensor, seed_tensor
from octavo_torch_native.arrays.group_index import GroupIndex, group_index_of
from octavo_torch_native.quantizers import operators
from octavo_torch_native.quantizers.launches import QuantizeLaunch, launch_of
from octavo_torch_native.quantizers.spec import LaunchSpec, Prologue, spec_text

GroupSizes = Tensor | GroupIndex | None
Wanted = tuple[str, ...] | None
"""Names of the fields of Extras to compute; None: all that the function has."""


_OUTPUTS = ("amax", "dequantized", "activated", "dbias", "dprobs", "forward")
_UNREAD = QuantizerSpec(scaling="mxfp8", format="e4m3", orientation="rowwise")
"""The quantizer of a launch without planes, which nothing reads: one that needs neither a scale nor random bits."""


class _Rounding(NamedTuple):
    """How codes are rounded: the seed, the number of the first group, and encode scales of delayed scaling."""

    seed: Tensor | int | None
    group_offset: int
    scale: Tensor | None


class _PrologueInputs(NamedTuple):
    """What a prologue reads besides x, in the order of the operator's arguments."""

    dy: Tensor | None = None
    probs: Tensor | None = None
    gamma: Tensor | None = None
    beta: Tensor | None = None


class _Fused:
    """A quantizer behind one prologue, in the layouts of its request."""

    def __init__(
        self, spec: QuantizerSpec, layouts: tuple[str, str], prologue: Prologue, everything: tuple[str, ...]
    ) -> None:
        self._spec, self._layouts, self._prologue = spec, layouts, prologue
        self._everything = (*everything, "amax") if spec.scaling == "delayed" else everything
        self._launches: Bounded[tuple[Any, ...], QuantizeLaunch] = Bounded()
        self._value_launches: dict[frozenset[str], QuantizeLaunch] = {}

    def _quantize(
        self,
        x: Tensor,
        group_sizes: GroupSizes,
        operand: str | None,
        wanted: Wanted,
        rounding: _Rounding,
        prologue: _PrologueInputs,
        **function: str | float,
    ) -> tuple[GroupedTensor, Extras]:
        """Codes and the extras that are wanted.

        function   fields of LaunchSpec that name what the prologue computes
        """
        key = (operand, wanted, *function.values())
        launch = self._launches.get(key) or self._new_launch(operand, wanted, function)
        index = group_index_of(x.shape, group_sizes, x)
        assert index is not None  # these operations take rows
        random = seed_tensor(rounding.seed, x.device) if self._spec.stochastic else None
        outputs = operators.quantize(
            x, index.words, index.groups, launch.text, random, rounding.group_offset, rounding.scale, *prologue
        )
        codes = launch.tensor(launch.shapes(x, index.groups), index.group_sizes, outputs)
        extras = outputs[len(outputs) - len(launch.extras) :]
        return codes, Extras(**dict(zip(launch.extras, extras, strict=True)))

    def _new_launch(self, operand: Any, wanted: Wanted, function: dict[str, Any]) -> QuantizeLaunch:
        names = self._everything if wanted is None else wanted
        outputs: dict[str, Any] = {name: name in names for name in _OUTPUTS}
        operand_of_bits = operand or self._spec.role
        spec = LaunchSpec(self._spec, operand_of_bits, self._layouts, self._prologue, **function, **outputs)
        launch = self._launches[operand, wanted, *function.values()] = launch_of(spec_text(spec))
        return launch

    def _values(
        self,
        x: Tensor,
        group_sizes: GroupSizes,
        dy: Tensor | None,
        probs: Tensor | None,
        wanted: Wanted,
        activation: Activation,
    ) -> Extras:
        """The extras that are wanted, "activated" among them, of a launch without planes."""
        names = frozenset({"activated", *(self._everything if wanted is None else wanted)})
        launch = self._value_launches.get(names) or self._new_value_launch(names, activation)
        index = group_index_of(x.shape, group_sizes, x)
        assert index is not None  # these operations take rows
        outputs = operators.quantize(x, index.words, index.groups, launch.text, None, 0, None, dy, probs, None, None)
        return Extras(**dict(zip(launch.extras, outputs, strict=True)))

    def _new_value_launch(self, names: frozenset[str], activation: Activation) -> QuantizeLaunch:
        spec = LaunchSpec(
            _UNREAD,
            "x",
            prologue=self._prologue,
            activation=activation,
            planes=False,
            activated=True,
            dbias="dbias" in names,
            dprobs="dprobs" in names,
            forward="forward" in names,
        )
        launch = self._value_launches[names] = launch_of(spec_text(spec))
        return launch


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
        return self._quantize(
            x,
            group_sizes,
            operand,
            wanted,
            _Rounding(seed, group_offset, scale),
            _PrologueInputs(probs=probs),
            activation=self._activation,
        )

    def values(
        self, x: Tensor, group_sizes: GroupSizes = None, *, probs: Tensor | None = None, wanted: Wanted = None
    ) -> Extras:
        """act(x) times probabilities as it is: octavo_registry.contract.fused.ActValues."""
        return self._values(x, group_sizes, None, probs, wanted, self._activation)


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
        return self._quantize(
            x,
            group_sizes,
            operand,
            wanted,
            _Rounding(seed, group_offset, scale),
            _PrologueInputs(dy, probs),
            activation=self._activation,
        )

    def values(
        self, dy: Tensor, x: Tensor, group_sizes: GroupSizes = None, *, probs: Tensor | None = None,
        wanted: Wanted = None,
    ) -> Extras:  # fmt: skip
        """The gradient of act_quantize's x as it is: octavo_registry.contract.fused.DactValues."""
        names = wanted or ()
        if "forward" in names and not support.gives_forward(self._activation, DTYPE_NAMES[x.dtype], names):
            wanted = tuple(name for name in names if name != "forward")
        return self._values(x, group_sizes, dy, probs, wanted, self._activation)


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
        return self._quantize(
            x, group_sizes, operand, wanted, _Rounding(seed, group_offset, scale),
            _PrologueInputs(gamma=gamma, beta=beta), norm=self._norm, epsilon=float(epsilon),
        )  # fmt: skip
