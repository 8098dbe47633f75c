"""The eight recipes; `docs/numerics` defines each of them bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from octavo.quantizer import AmaxEpsilon, Operand, Orientation, QuantizerSpec, Scaling
from octavo.recipe_base import Gemm, HighPrecision, Recipe
from octavo.schema import not_a_truth_value

Fp8Format = Literal["e4m3", "e5m2"]


class _Quantized(Recipe):
    """Base of the quantizing recipes: the format of each operand."""

    forward_format: Fp8Format = "e4m3"
    gradient_format: Fp8Format = "e4m3"
    fast_accumulation: frozenset[Gemm] = frozenset()

    def _format(self, operand: Operand) -> Fp8Format:
        return self.gradient_format if operand == "dy" else self.forward_format


class DelayedScaling(_Quantized):
    """FP8 with one scale per group, computed from the amax history of earlier steps.

    Source: Micikevicius et al., arXiv 2209.05433, section 4; NVIDIA's "delayed scaling".

    history     steps remembered, at least 2
    algorithm   "max" of the history, or its "most_recent" entry
    margin      the scale is divided by 2^margin
    """

    kind: Literal["delayed"] = "delayed"
    gradient_format: Fp8Format = "e5m2"
    history: Annotated[int, BeforeValidator(not_a_truth_value), Field(ge=2, le=1 << 20)] = 1024
    algorithm: Literal["max", "most_recent"] = "max"
    margin: Annotated[int, BeforeValidator(not_a_truth_value), Field(ge=-64, le=64)] = 0

    @property
    def stateful(self) -> bool:
        """True: scales come from history."""
        return True

    def _spec(self, operand: Operand, orientation: Orientation, checkpoint_name: str | None) -> QuantizerSpec:
        return QuantizerSpec(
            format=self._format(operand),
            scaling="delayed",
            orientation=orientation,
            role=operand,
            checkpoint_name=checkpoint_name,
        )


class _Fp32Scaled(_Quantized):
    """FP8 with fp32 scales computed from the tensor's own amax."""

    power_of_two: bool = True
    amax_epsilon: AmaxEpsilon = 0.0

    def _fp32_spec(
        self,
        scaling: Scaling,
        operand: Operand,
        orientation: Orientation,
        checkpoint_name: str | None,
        square: bool,
        square_columns: bool = False,
    ) -> QuantizerSpec:
        return QuantizerSpec(
            format=self._format(operand),
            scaling=scaling,
            orientation=orientation,
            role=operand,
            square=square,
            square_columns=square_columns,
            power_of_two=self.power_of_two,
            amax_epsilon=self.amax_epsilon,
            checkpoint_name=checkpoint_name,
        )


class CurrentScaling(_Fp32Scaled):
    """FP8 with one scale per group, computed from the group's own amax."""

    kind: Literal["current"] = "current"
    gradient_format: Fp8Format = "e5m2"
    power_of_two: bool = False

    def _spec(self, operand: Operand, orientation: Orientation, checkpoint_name: str | None) -> QuantizerSpec:
        return self._fp32_spec("current", operand, orientation, checkpoint_name, square=False)


class RowScaling(_Fp32Scaled):
    """FP8 with one scale per row; column data have one per (group, column)."""

    kind: Literal["row"] = "row"

    def _spec(self, operand: Operand, orientation: Orientation, checkpoint_name: str | None) -> QuantizerSpec:
        return self._fp32_spec("row", operand, orientation, checkpoint_name, square=False)


class BlockScaling(_Fp32Scaled):
    """FP8 with 1x128 blocks for activations and gradients, 128x128 for weights.

    Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3.2.

    square_columns   wgrad reads x in blocks of 128 tokens of a group x 128 features, with one scale each, instead of
                     128 tokens of one feature. A product of wgrad then takes one operation of its sum, and not two, in
                     kernels that read a scale for each square block. fprop, dgrad, w and dy stay as they are.
                     Features far quieter than the loudest of their 128 lose bits: docs/numerics bounds it
    """

    ADDED_FIELDS: ClassVar[Mapping[str, object]] = MappingProxyType({"square_columns": False})

    kind: Literal["block"] = "block"
    square_columns: bool = False

    @model_validator(mode="after")
    def _wgrad_reads_columns(self) -> Self:
        if self.square_columns and self.wgrad == "high_precision":
            raise ValueError(
                "square_columns=True is about the columns of x, which wgrad alone reads, and wgrad is "
                "'high_precision'; leave square_columns False, or wgrad 'quantized'"
            )
        return self

    def _spec(self, operand: Operand, orientation: Orientation, checkpoint_name: str | None) -> QuantizerSpec:
        square_columns = self.square_columns and operand == "x"
        return self._fp32_spec("block", operand, orientation, checkpoint_name, operand == "w", square_columns)


class MXFP8(_Quantized):
    """FP8 with E8M0 scales on blocks of 32, rounded up so that no block saturates.

    Source: OCP Microscaling Formats specification v1.0, section 5; Mishra et al., arXiv 2506.08027 (round-up rule).

    square_weights   32x32 weight blocks, whose column data are the transpose of the same codes
    products         what the GEMMs multiply. "exact": the values of the MX codes; chips without MX instructions take
                     copies in bf16. "folded": operands that are quantized with the scales of four blocks folded into
                     one, a power of two for 1x128 elements (128x128 of weights), which FP8 kernels for blocks multiply.
                     A folded value differs from the MX one by at most 2^-10 (E5M2: 2^-17) of the folded scale, and
                     only where it is subnormal; docs/numerics defines and bounds it
    """

    ADDED_FIELDS: ClassVar[Mapping[str, object]] = MappingProxyType({"products": "exact"})

    kind: Literal["mxfp8"] = "mxfp8"
    square_weights: bool = False
    products: Literal["exact", "folded"] = "exact"

    @model_validator(mode="after")
    def _one_shape_of_weight_blocks(self) -> Self:
        if self.square_weights and self.products == "folded":
            raise ValueError(
                "square_weights=True is about blocks of 32, and products='folded' gives weights one scale for 128x128; "
                "leave square_weights False, or products 'exact'"
            )
        return self

    @cached_property
    def computed_as(self) -> Recipe:
        """Itself; with folded products the `BlockScaling` with power-of-two scales that has the same slots."""
        if self.products == "exact":
            return self
        shared = {name: getattr(self, name) for name in _Quantized.model_fields if name != "kind"}
        return BlockScaling(**shared, power_of_two=True)

    def _spec(self, operand: Operand, orientation: Orientation, checkpoint_name: str | None) -> QuantizerSpec:
        if self.products == "folded":
            return self.computed_as._spec(operand, orientation, checkpoint_name)
        return QuantizerSpec(
            format=self._format(operand),
            scaling="mxfp8",
            orientation=orientation,
            role=operand,
            square=self.square_weights and operand == "w",
            checkpoint_name=checkpoint_name,
        )


class MXFP4Weights(_Quantized):
    """Training for MXFP4 files on FP8 tensor cores: weights with MXFP4's values, x and dy as in BlockScaling.

    A weight is rounded to E2M1 with an E8M0 scale for each 32 elements along K, rounded up so that no block saturates,
    and these values become E4M3 codes with one power of two for 128x128: exactly, where the E8M0 exponents in 128x128
    are at most 14 apart. Of a wider block the smallest values are rounded once more, to multiples of 2^-17 of the power
    of two in its largest one; docs/numerics lists them, and `tensor_stats` counts them as inexact. In either case fprop
    and dgrad read codes of values that an MXFP4 file holds, and those are what `export_experts` writes.

    The gradient of a weight is that of its rounded values, passed on as it is (straight-through; nothing is clipped,
    because no value saturates). A GEMM whose slot is "high_precision" reads the weight as it was before rounding; fprop
    has no such slot.

    Source: OCP Microscaling Formats specification v1.0, sections 5.3.3 and 6.3; Mishra et al., arXiv 2506.08027
    (round-up rule); DeepSeek-V3 technical report, section 3.3.2 (blocks); Bengio et al., arXiv 1308.3432
    (straight-through estimator).
    """

    kind: Literal["mxfp4_weights"] = "mxfp4_weights"
    fprop: Literal["quantized"] = "quantized"
    forward_format: Literal["e4m3"] = "e4m3"

    @cached_property
    def computed_as(self) -> Recipe:
        """The `BlockScaling` with power-of-two scales that has the same slots, of weights that have been rounded."""
        shared = {name: getattr(self, name) for name in _Quantized.model_fields if name != "kind"}
        return BlockScaling(**shared, power_of_two=True)

    def _spec(self, operand: Operand, orientation: Orientation, checkpoint_name: str | None) -> QuantizerSpec:
        spec = self.computed_as._spec(operand, orientation, checkpoint_name)
        return QuantizerSpec(**{**dict(spec), "mxfp4": "rowwise"}) if operand == "w" else spec


class NVFP4(Recipe):
    """E2M1 with E4M3 scales on blocks of 16 and an fp32 second level per group.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), section 4.

    square_weights         16x16 weight blocks; else 1x16 and again 16x1
    stochastic_gradients   dY is rounded stochastically; the caller provides a seed
    hadamard               X and dY column data go through a 16-point Hadamard transform along rows
    """

    kind: Literal["nvfp4"] = "nvfp4"
    square_weights: bool = True
    stochastic_gradients: bool = True
    hadamard: bool = True

    def _spec(self, operand: Operand, orientation: Orientation, checkpoint_name: str | None) -> QuantizerSpec:
        return QuantizerSpec(
            format="e2m1",
            scaling="nvfp4",
            orientation=orientation,
            role=operand,
            square=self.square_weights and operand == "w",
            rounding="stochastic" if self.stochastic_gradients and operand == "dy" else "nearest",
            hadamard=self.hadamard and operand != "w",
            checkpoint_name=checkpoint_name,
        )


__all__ = [
    "MXFP8",
    "NVFP4",
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "Fp8Format",
    "HighPrecision",
    "MXFP4Weights",
    "RowScaling",
]
