"""The functions of requests for fused quantizers: an activation, its gradient or a normalization, and the quantizer.

Each is computed in fp32 and rounded once to the input's dtype, in one pass over memory; the quantizer of that rounded
array has the bits that `octavo_jax.quantize` gives it. None of them is differentiable. `octavo_jax.act_quantize`,
`dact_quantize` and `norm_quantize` are their public door.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from octavo import QuantizerSpec
from octavo.quantizer import Operand
from octavo_jax.plugin_api import (
    BoundFused,
    Extras,
    check_activation,
    check_array,
    check_input,
    check_norm,
    check_sizes,
    dtype_name,
    features,
    one_group,
)
from octavo_jax_native.arrays.planes import result_array, tensor_of
from octavo_jax_native.arrays.quantizer_keywords import QuantizerKeywords, keyword_operands
from octavo_jax_native.ffi import targets
from octavo_jax_native.ffi.quantize import Prologue
from octavo_jax_native.quantizers.forms import Directions, directions_as_values, two_forms
from octavo_jax_native.quantizers.kernel import QuantizeKernel, values_of
from octavo_native import support
from octavo_registry.contract import (
    Activation,
    BoundActQuantize,
    BoundDactQuantize,
    BoundNormQuantize,
    FusedRequest,
    Norm,
    NormRequest,
    Wanted,
    WantedOfGradient,
)

Layouts = tuple[str, str]

MaybeTwoForms: TypeAlias = Any
"""A GroupedTensor, or TwoForms of one where a function was bound with planes that GEMMs read `as_values`."""

_OF_GRADIENT = ("dbias", "dprobs")


def bind_fused(request: FusedRequest) -> BoundFused:
    """The kernels' function for `request`, which is jitted; extras that nobody reads are not computed under jit."""
    as_values = directions_as_values(request, of_array=False)
    bound_in_two_forms: Any = _bound(request, as_values, None)
    return _bound(request, None, (lambda: bound_in_two_forms) if as_values else None)


def _bound(request: FusedRequest, as_values: Directions | None, in_two_forms: Any) -> BoundFused:
    """The bound function, which returns TwoForms where `as_values` is given."""
    spec, layouts = request.quantizer, request.layouts
    if isinstance(request, NormRequest):
        return BoundNormQuantize(NormQuantizer(spec, layouts, request.norm, as_values), in_two_forms=in_two_forms)
    if request.op == "act_quantize":
        activation = ActQuantizer(spec, layouts, request.activation, as_values)
        return BoundActQuantize(activation, values=activation.values, in_two_forms=in_two_forms)
    gradient = DactQuantizer(spec, layouts, request.activation, as_values)
    return BoundDactQuantize(gradient, values=gradient.values, in_two_forms=in_two_forms)


class ActQuantizer:
    """The function of "act_quantize"."""

    def __init__(
        self, spec: QuantizerSpec, layouts: Layouts, activation: Activation, as_values: Directions | None = None
    ) -> None:
        self._spec, self._activation = spec, check_activation(activation)
        self._function = fused_function(QuantizeKernel(spec, layouts, Prologue("activation", activation)), as_values)

    def __call__(
        self,
        x: Array,
        group_sizes: Array | None = None,
        /,
        *,
        probs: Array | None = None,
        seed: int | Array | None = None,
        operand: Operand | None = None,
        group_offset: int | Array = 0,
        scale: Array | None = None,
        wanted: Wanted = None,
    ) -> tuple[MaybeTwoForms, Extras]:
        operands, columns = self._operands(x, probs)
        keywords: QuantizerKeywords = {"seed": seed, "operand": operand, "group_offset": group_offset, "scale": scale}
        return self._function(operands, columns, group_sizes, keywords, _extra_names(self._spec, wanted))

    def values(
        self,
        x: Array,
        group_sizes: Array | None = None,
        /,
        *,
        probs: Array | None = None,
        wanted: Wanted = None,
    ) -> Extras:
        """act(x) times probabilities as it is: octavo_registry.contract.fused.ActValues."""
        operands, columns = self._operands(x, probs)
        return values_function(Prologue("activation", self._activation))(operands, columns, group_sizes, ("activated",))

    def _operands(self, x: Array, probs: Array | None) -> tuple[dict[str, Array], int]:
        """Checked, and the columns of the result."""
        check_input(x, "x", (2,))
        columns = features(int(x.shape[1]), self._activation, f"x {list(x.shape)}")
        return {"x": x, **_probs_operand(probs, x)}, columns


class DactQuantizer:
    """The function of "dact_quantize"."""

    def __init__(
        self, spec: QuantizerSpec, layouts: Layouts, activation: Activation, as_values: Directions | None = None
    ) -> None:
        self._spec, self._activation = spec, check_activation(activation)
        self._function = fused_function(
            QuantizeKernel(spec, layouts, Prologue("activation_grad", activation)), as_values
        )

    def __call__(
        self,
        dy: Array,
        x: Array,
        group_sizes: Array | None = None,
        /,
        *,
        probs: Array | None = None,
        seed: int | Array | None = None,
        operand: Operand | None = None,
        group_offset: int | Array = 0,
        scale: Array | None = None,
        wanted: Wanted = None,
    ) -> tuple[MaybeTwoForms, Extras]:
        operands = self._operands(dy, x, probs)
        keywords: QuantizerKeywords = {"seed": seed, "operand": operand, "group_offset": group_offset, "scale": scale}
        names = _extra_names(self._spec, wanted, "dbias", "dprobs")
        return self._function(operands, x.shape[1], group_sizes, keywords, names)

    def values(
        self,
        dy: Array,
        x: Array,
        group_sizes: Array | None = None,
        /,
        *,
        probs: Array | None = None,
        wanted: WantedOfGradient = None,
    ) -> Extras:
        """The gradient of act_quantize's x as it is: octavo_registry.contract.fused.DactValues."""
        operands = self._operands(dy, x, probs)
        names = ("activated", *(name for name in _OF_GRADIENT if wanted is None or name in wanted))
        asks = wanted is not None and "forward" in wanted
        if asks and support.gives_forward(self._activation, dtype_name(x.dtype, "x"), names):
            names = (*names, "forward")
        return values_function(Prologue("activation_grad", self._activation))(operands, x.shape[1], group_sizes, names)

    def _operands(self, dy: Array, x: Array, probs: Array | None) -> dict[str, Array]:
        check_input(x, "x", (2,))
        check_input(dy, "dy", (2,))
        inner = features(int(x.shape[1]), self._activation, f"x {list(x.shape)}")
        check_array(dy, "dy", (x.shape[0], inner), x.dtype)
        return {"x": x, "dy": dy, **_probs_operand(probs, x)}


class NormQuantizer:
    """The function of "norm_quantize"."""

    def __init__(self, spec: QuantizerSpec, layouts: Layouts, norm: Norm, as_values: Directions | None = None) -> None:
        self._spec, self._layouts, self._norm, self._as_values = spec, layouts, norm, as_values

    def __call__(
        self,
        x: Array,
        gamma: Array,
        beta: Array | None = None,
        group_sizes: Array | None = None,
        /,
        *,
        epsilon: float = 1e-6,
        seed: int | Array | None = None,
        operand: Operand | None = None,
        group_offset: int | Array = 0,
        scale: Array | None = None,
        wanted: Wanted = None,
    ) -> tuple[MaybeTwoForms, Extras]:
        check_input(x, "x", (2,))
        check_norm(self._norm, epsilon, x, gamma, beta)
        operands = {"x": x, "gamma": gamma} | ({} if beta is None else {"beta": beta})
        prologue = Prologue("norm", norm=self._norm, epsilon=float(epsilon))
        function = fused_function(QuantizeKernel(self._spec, self._layouts, prologue), self._as_values)
        statistics = ("rstd", "mean") if self._norm == "layer" else ("rstd",)
        keywords: QuantizerKeywords = {"seed": seed, "operand": operand, "group_offset": group_offset, "scale": scale}
        return function(operands, x.shape[1], group_sizes, keywords, _extra_names(self._spec, wanted, *statistics))


def _probs_operand(probs: Array | None, x: Array) -> dict[str, Array]:
    if probs is None:
        return {}
    check_array(probs, "probs", (x.shape[0],), jnp.float32)
    return {"probs": probs}


def _extra_names(spec: QuantizerSpec, wanted: Wanted, *own: str) -> tuple[str, ...]:
    """The extras to compute: those that are wanted, else the function's `own` and what every layer reads."""
    if wanted is None:
        return ("activated", *(("amax",) if spec.scaling == "delayed" else ()), *own)
    return tuple(name for name in ("activated", "amax", "dequantized", *own) if name in wanted)


def _extra_results(
    names: tuple[str, ...], operands: Mapping[str, Array], columns: int, groups: int
) -> dict[str, jax.ShapeDtypeStruct]:
    x = operands["x"]
    rows = x.shape[0]
    every: dict[str, tuple[tuple[int, ...], Any]] = {
        "activated": ((rows, columns), x.dtype),
        "amax": ((groups,), jnp.float32),
        "dequantized": ((rows, columns), jnp.bfloat16),
        "dbias": ((groups, columns), jnp.float32),
        "dprobs": ((rows,), jnp.float32),
        "forward": ((rows, operands.get("dy", x).shape[1]), x.dtype),
        "mean": ((rows,), jnp.float32),
        "rstd": ((rows,), jnp.float32),
    }
    return {name: result_array(*every[name]) for name in names}


@lru_cache(maxsize=512)
def fused_function(kernel: QuantizeKernel, as_values: Directions | None) -> Callable[..., tuple[MaybeTwoForms, Extras]]:
    """The function of a quantizer with its prologue, whose inner part is jitted once.

    function(operands, columns, group_sizes, keywords, names) returns the tensor [M, columns] and the extras in
    `names`; its operands, by name, are checked already. ValueError for a dequantized copy without row data. With
    `as_values`, the planes that are made as values, too, the tensor is a TwoForms.
    """
    spec = kernel.spec

    def octavo_quantize(
        operands: dict[str, Array], group_sizes: Array, columns: int, operand: Operand, names: tuple[str, ...]
    ) -> tuple[dict[str, Array], ...]:
        extras = _extra_results(names, operands, columns, group_sizes.shape[0])
        return kernel.results(operands, group_sizes, operand, columns, extras, as_values=as_values or ())

    octavo_quantize.__name__ = octavo_quantize.__qualname__ = targets.QUANTIZE[spec.scaling]
    compiled = jax.jit(octavo_quantize, static_argnames=("columns", "operand", "names"))
    tensor_spec = lru_cache(maxsize=512)(kernel.tensor_spec)

    def function(
        operands: dict[str, Array],
        columns: int,
        group_sizes: Array | None,
        keywords: QuantizerKeywords,
        names: tuple[str, ...],
    ) -> tuple[MaybeTwoForms, Extras]:
        if "dequantized" in names and "rowwise" not in spec.directions:
            raise ValueError(
                f"wanted holds 'dequantized', which is the row data's values, and orientation is {spec.orientation!r}; "
                "use 'both' or 'rowwise'"
            )
        rows = operands["x"].shape[0]
        sizes = one_group(rows) if group_sizes is None else group_sizes
        check_sizes(sizes)
        groups = sizes.shape[0]
        all_operands = {**operands, **keyword_operands(spec, keywords, groups)}
        operand = keywords.get("operand") or spec.role
        results = compiled(all_operands, sizes, columns=columns, operand=operand, names=names)
        tensor = tensor_of(tensor_spec((rows, columns), groups), sizes, results)
        made = tensor if as_values is None else two_forms(tensor, results[0], as_values)
        return made, Extras(**{name: results[0][name] for name in names})

    return function


@lru_cache(maxsize=64)
def values_function(prologue: Prologue) -> Callable[..., Extras]:
    """The function of a prologue that nothing quantizes; its arguments are those of `fused_function`'s."""

    def octavo_activation_values(
        operands: dict[str, Array], group_sizes: Array, columns: int, names: tuple[str, ...]
    ) -> dict[str, Array]:
        results = _extra_results(names, operands, columns, group_sizes.shape[0])
        return values_of(operands, group_sizes, prologue, results)

    compiled = jax.jit(octavo_activation_values, static_argnames=("columns", "names"))

    def function(operands: dict[str, Array], columns: int, group_sizes: Array | None, names: tuple[str, ...]) -> Extras:
        sizes = one_group(operands["x"].shape[0]) if group_sizes is None else group_sizes
        check_sizes(sizes)
        return Extras(**compiled(operands, sizes, columns=columns, names=names))

    return function
