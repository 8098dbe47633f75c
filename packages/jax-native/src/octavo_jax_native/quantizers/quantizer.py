"""The functions of a "quantize" request, as octavo_registry.contract.quantize has them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import Array

from octavo import QuantizerSpec
from octavo.quantizer import Operand
from octavo_jax.plugin_api import GroupedTensor, check_out, checked_groups
from octavo_jax_native.arrays.planes import result_array, tensor_of
from octavo_jax_native.arrays.quantizer_keywords import QuantizerKeywords, keyword_operands
from octavo_jax_native.arrays.words import as_int64
from octavo_jax_native.ffi import targets
from octavo_jax_native.quantizers.forms import Directions, directions_as_values, two_forms
from octavo_jax_native.quantizers.kernel import QuantizeKernel
from octavo_native import support
from octavo_registry.contract import BoundQuantize, QuantizeRequest, TwoForms


class RowsOfTokens(NamedTuple):
    """Rows that a router's choices make of tokens: the choice of each row [M], and how many choices a token has."""

    order: Array
    choices: int


class Quantizer:
    """The quantizer by `spec` into these (rowwise, columnwise) layouts."""

    def __init__(self, spec: QuantizerSpec, layouts: tuple[str, str]) -> None:
        self._spec, self._kernel = spec, QuantizeKernel(spec, layouts)
        self._tensor_spec = lru_cache(maxsize=512)(self._kernel.tensor_spec)

        def octavo_quantize(
            operands: dict[str, Array],
            group_sizes: Array | None,
            operand: Operand,
            extras: tuple[str, ...],
            choices: int,
            as_values: Directions,
        ) -> tuple[dict[str, Array], ...]:
            x = operands["x"]
            if group_sizes is None and 0 in x.shape[:2]:
                # Stacked matrices without rows: to the kernels a third axis of 0 would mean ragged rows.
                raise ValueError(f"x has shape {list(x.shape)}; stacked matrices have one or more of one or more rows")
            groups = x.shape[0] if group_sizes is None else group_sizes.shape[0]
            more = {name: result_array((groups,), jnp.float32) for name in extras}
            if choices:
                operands = {**operands, "order": as_int64(operands["order"])}
            return self._kernel.results(operands, group_sizes, operand, x.shape[-1], more, choices, as_values)

        octavo_quantize.__name__ = octavo_quantize.__qualname__ = targets.QUANTIZE[spec.scaling]
        self._compiled = jax.jit(octavo_quantize, static_argnames=("operand", "extras", "choices", "as_values"))

    def __call__(
        self,
        x: Array,
        group_sizes: Array | None = None,
        *,
        seed: int | Array | None = None,
        operand: Operand | None = None,
        group_offset: int | Array = 0,
        scale: Array | None = None,
        out: None = None,
    ) -> GroupedTensor:
        """The codes and scales of x, in the planes that the spec names."""
        check_out(out)
        keywords: QuantizerKeywords = {"seed": seed, "operand": operand, "group_offset": group_offset, "scale": scale}
        return self.quantized(x, group_sizes, keywords)[0]

    def with_amax(
        self,
        x: Array,
        group_sizes: Array | None = None,
        *,
        seed: int | Array | None = None,
        operand: Operand | None = None,
        group_offset: int | Array = 0,
        scale: Array | None = None,
    ) -> tuple[GroupedTensor, Array]:
        """The same, and the amax of each group of x, fp32 [G], in one launch."""
        keywords: QuantizerKeywords = {"seed": seed, "operand": operand, "group_offset": group_offset, "scale": scale}
        tensor, results = self.quantized(x, group_sizes, keywords, ("amax",))
        return tensor, results["amax"]

    def of_tokens(
        self,
        x: Array,
        group_sizes: Array,
        order: Array,
        position: Array,
        routed: Array,
        *,
        amax: bool = False,
        **keywords: Unpack[QuantizerKeywords],
    ) -> tuple[GroupedTensor, Array | None]:
        """The codes of the rows that a router's choices make of tokens x, which are not gathered first."""
        rows = RowsOfTokens(order, position.shape[1])
        tensor, results = self.quantized(x, group_sizes, keywords, ("amax",) if amax else (), rows)
        return tensor, results["amax"] if amax else None

    def quantized(
        self,
        x: Array,
        group_sizes: Array | None,
        keywords: QuantizerKeywords,
        extras: tuple[str, ...] = (),
        rows: RowsOfTokens | None = None,
        as_values: Directions = (),
    ) -> tuple[GroupedTensor, dict[str, Array]]:
        """The codes, and the results of the first call by name: `extras`, and the planes that are made as values."""
        spec, shape, choices = self._spec, x.shape, 0
        group_sizes, groups = checked_groups(x, group_sizes)
        operands = {
            "x": x,
            **keyword_operands(spec, keywords, groups),
        }
        if rows is not None:
            operands["order"], choices = rows
            shape = (rows.order.shape[0], x.shape[1])
        operand = keywords.get("operand") or spec.role
        results = self._compiled(
            operands, group_sizes, operand=operand, extras=extras, choices=choices, as_values=as_values
        )
        return tensor_of(self._tensor_spec(shape, groups), group_sizes, results), results[0]


class QuantizerInTwoForms:
    """The quantizer that a request asks for, which returns its result in two forms."""

    def __init__(self, request: QuantizeRequest, quantizer: Quantizer) -> None:
        self._quantizer = quantizer
        self._of_array = directions_as_values(request, of_array=True)
        self._of_tokens = directions_as_values(request, of_array=False)

    def __call__(
        self, x: Array, group_sizes: Array | None = None, **keywords: Unpack[QuantizerKeywords]
    ) -> TwoForms[GroupedTensor]:
        """Codes of x, and its planes as values where the kernels write these."""
        q, made = self._quantizer.quantized(x, group_sizes, keywords, as_values=self._of_array)
        return two_forms(q, made, self._of_array)

    def of_tokens(
        self,
        x: Array,
        group_sizes: Array,
        order: Array,
        position: Array,
        routed: Array,
        *,
        amax: bool = False,
        **keywords: Unpack[QuantizerKeywords],
    ) -> tuple[TwoForms[GroupedTensor], Array | None]:
        """The same of the rows that a router's choices make of tokens x."""
        rows, extras = RowsOfTokens(order, position.shape[1]), ("amax",) if amax else ()
        q, made = self._quantizer.quantized(x, group_sizes, keywords, extras, rows, self._of_tokens)
        return two_forms(q, made, self._of_tokens), made["amax"] if amax else None


def bind_quantize(request: QuantizeRequest) -> BoundQuantize[Array, GroupedTensor]:
    """The answer to a request for a quantizer."""
    quantizer = Quantizer(request.quantizer, request.layouts)
    in_two_forms = QuantizerInTwoForms(request, quantizer)
    bound_in_two_forms = BoundQuantize(in_two_forms, of_tokens=in_two_forms.of_tokens)
    return BoundQuantize(
        quantizer,
        with_amax=quantizer.with_amax,
        of_tokens=quantizer.of_tokens,
        round_first=_round_first,
        in_two_forms=(lambda: bound_in_two_forms) if directions_as_values(request, of_array=True) else None,
    )


def _round_first(request: QuantizeRequest) -> BoundQuantize[Array, GroupedTensor] | None:
    """Kernels that round to MXFP4 on their way to the codes; None where the front end has to."""
    if support.rounding_refusal(request.quantizer.mxfp4, request.in_dtype):
        return None
    return BoundQuantize(Quantizer(request.quantizer, request.layouts))
