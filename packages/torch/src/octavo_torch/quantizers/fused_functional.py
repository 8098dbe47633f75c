"""The public functions act_quantize, dact_quantize and norm_quantize.

What is computed before the quantizer is computed in fp32 and rounded once to the input's dtype; the codes of those
rounded rows are what `octavo_torch.quantize` makes of them. Where no backend has the fused function it is composed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo_registry.contract import Activation, Norm
from octavo_registry.dispatch.layer_plan import QuantizePlan
from octavo_torch.arithmetic import operators
from octavo_torch.arrays.checks import BackendNames, backend_names, brief
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.operands import check_tensor
from octavo_torch.arrays.sizes import GroupSizes
from octavo_torch.compiler.transforms import GROUPS, Subject, without_derivative
from octavo_torch.functions.activations import check_activation, features
from octavo_torch.quantizers import arguments
from octavo_torch.quantizers.composed import ComposedNorm
from octavo_torch.quantizers.extras import Extras
from octavo_torch.quantizers.functional import PLAIN_LAYOUTS, Layouts, dequantize, sizes_of
from octavo_torch.quantizers.fused import Run, activation_run, norm_run
from octavo_torch.quantizers.plans import quantizer_plan

_How = dict[str, object]
"""Keywords of a bound quantizer: seed, operand, group_offset, scale."""


@without_derivative(Subject("act_quantize", GROUPS))
def act_quantize(
    x: Tensor,
    spec: QuantizerSpec,
    group_sizes: GroupSizes | None = None,
    *,
    activation: Activation,
    probs: Tensor | None = None,
    layouts: Layouts = PLAIN_LAYOUTS,
    seed: int | Tensor | None = None,
    operand: str | None = None,
    group_offset: int = 0,
    scale: Tensor | None = None,
    wanted: Sequence[str] | None = None,
    backend: BackendNames = None,
) -> tuple[GroupedTensor, Extras]:
    """`octavo_torch.activate(x, activation, probs)`, quantized.

    x            [M, F], or [M, 2 F] with the gate first where the activation is gated; bf16, fp16 or fp32
    activation   swiglu, geglu, geglu_tanh, which give act(gate) * up; clamped_swiglu; silu, gelu, gelu_tanh, relu2
    probs        fp32 [M], multiplied in row by row; None: 1
    wanted       names of the extras to return, "activated", "amax" and "dequantized" among them; None: "activated",
                 which is what was quantized, and delayed scaling's "amax"

    The other arguments are those of `octavo_torch.quantize`, and so are the errors. Returns the codes of [M, F], and
    the `Extras`. Not differentiable.
    """
    check_tensor("x", x, "[M, K]")
    name = check_activation(activation)
    arguments.check_exact("probs", probs, (x.shape[0],), torch.float32, x)
    how: _How = {"seed": seed, "operand": operand, "group_offset": group_offset, "scale": scale}
    plan, sizes = _planned(x, spec, group_sizes, features(x.shape[1], name, "x"), layouts, backend, how)
    run = activation_run("act_quantize", plan, name, backend_names(backend))
    names = _names(wanted, spec, ("activated",))
    return _called(run, (x, sizes), names, {**how, "probs": probs})


@without_derivative(Subject("dact_quantize", GROUPS))
def dact_quantize(
    dy: Tensor,
    x: Tensor,
    spec: QuantizerSpec,
    group_sizes: GroupSizes | None = None,
    *,
    activation: Activation,
    probs: Tensor | None = None,
    layouts: Layouts = PLAIN_LAYOUTS,
    seed: int | Tensor | None = None,
    operand: str | None = None,
    group_offset: int = 0,
    scale: Tensor | None = None,
    wanted: Sequence[str] | None = None,
    backend: BackendNames = None,
) -> tuple[GroupedTensor, Extras]:
    """The gradient of `act_quantize`'s x, quantized, with its column sums by group, which are a bias's gradient.

    dy       [M, F], x's dtype: the gradient of what the activation returned
    x        [M, F] or [M, 2 F], as `act_quantize` took it; what is quantized has its shape
    probs    fp32 [M], as `act_quantize` took them
    wanted   names of the extras to return, "dbias" and "dprobs" (the gradient of probs) beside those of `act_quantize`;
             None: "activated", which is the gradient, "dbias", "dprobs", and delayed scaling's "amax"

    The other arguments are those of `act_quantize`.
    """
    check_tensor("x", x, "[M, K]")
    name = check_activation(activation)
    check_tensor("dy", dy, "[M, K]")
    arguments.check_exact("dy", dy, (x.shape[0], features(x.shape[1], name, "x")), x.dtype, x)
    arguments.check_exact("probs", probs, (x.shape[0],), torch.float32, x)
    how: _How = {"seed": seed, "operand": operand, "group_offset": group_offset, "scale": scale}
    plan, sizes = _planned(x, spec, group_sizes, x.shape[1], layouts, backend, how)
    run = activation_run("dact_quantize", plan, name, backend_names(backend))
    names = _names(wanted, spec, ("activated", "dbias", "dprobs"))
    return _called(run, (dy, x, sizes), names, {**how, "probs": probs})


@without_derivative(Subject("norm_quantize", GROUPS))
def norm_quantize(
    x: Tensor,
    gamma: Tensor,
    spec: QuantizerSpec,
    group_sizes: GroupSizes | None = None,
    *,
    beta: Tensor | None = None,
    norm: Norm = "rms",
    epsilon: float = 1e-6,
    layouts: Layouts = PLAIN_LAYOUTS,
    seed: int | Tensor | None = None,
    operand: str | None = None,
    group_offset: int = 0,
    scale: Tensor | None = None,
    wanted: Sequence[str] | None = None,
    backend: BackendNames = None,
) -> tuple[GroupedTensor, Extras]:
    """RMSNorm or LayerNorm of the rows of x, quantized: (x - mean) * rstd * gamma + beta.

    x         [M, C]
    gamma     [C], x's dtype; or float32, which is multiplied as it is: then no backend fuses norm and quantizer
    beta      [C], likewise; LayerNorm's alone
    norm      "rms", which subtracts no mean, or "layer"
    epsilon   added to the mean square before the root
    wanted    as in `act_quantize`; "rstd", and "mean" of LayerNorm, are always returned

    The other arguments are those of `act_quantize`.
    """
    check_tensor("x", x, "[M, K]")
    name = arguments.check_norm(norm, epsilon, x, gamma, beta)
    how: _How = {"seed": seed, "operand": operand, "group_offset": group_offset, "scale": scale}
    plan, sizes = _planned(x, spec, group_sizes, x.shape[1], layouts, backend, how)
    exact = any(value is not None and value.dtype is not x.dtype for value in (gamma, beta))
    run = ComposedNorm(plan, name) if exact else norm_run(plan, name, backend_names(backend))
    statistics = ("mean", "rstd") if name == "layer" else ("rstd",)
    names = (*_names(wanted, spec, ("activated",), statistics), *statistics)
    return _called(run, (x, gamma, beta, sizes), names, {**how, "epsilon": float(epsilon)})


def _planned(
    x: Tensor,
    spec: QuantizerSpec,
    group_sizes: GroupSizes | None,
    columns: int,
    layouts: Layouts,
    backend: BackendNames,
    how: _How,
) -> tuple[QuantizePlan, Tensor]:
    """The plan of the quantizer alone, and the sizes; ValueError where the arguments of `quantize` do not fit."""
    arguments.check_quantize(x, spec, group_sizes, how["seed"], how["scale"])
    how["operand"] = arguments.operand_name(how["operand"]) or spec.role
    layouts = arguments.layout_names(layouts)
    sizes, at_host = sizes_of(x, group_sizes)
    assert sizes is not None  # x holds rows
    groups = sizes.shape[0]
    arguments.check_group_offset(how["group_offset"], groups)
    arguments.check_scale(how["scale"], groups, x)
    return quantizer_plan(spec, x, columns, groups, at_host, backend_names(backend), layouts), sizes


def _names(
    wanted: object, spec: QuantizerSpec, usual: tuple[str, ...], others: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """The names of the extras to return; ValueError for one that the function has not."""
    if wanted is None:
        return (*usual, "amax") if spec.scaling == "delayed" else usual
    known = (*usual, "amax", "dequantized", *others)
    if not isinstance(wanted, (list, tuple)) or not all(isinstance(name, str) for name in wanted):
        raise ValueError(f"wanted is {brief(wanted)}; give a list of names out of {', '.join(known)}")
    if not set(wanted) <= set(known):
        raise ValueError(f"wanted is {wanted!r}; give a list of names out of {', '.join(known)}")
    if "dequantized" in wanted and "rowwise" not in spec.directions:
        raise ValueError(
            f"wanted holds 'dequantized', which copies row data, and spec.orientation is {spec.orientation!r}; give "
            "'rowwise' or 'both'"
        )
    return tuple(name for name in wanted if name not in others)


def _called(
    run: Run, arrays: tuple[Tensor | None, ...], names: tuple[str, ...], how: _How
) -> tuple[GroupedTensor, Extras]:
    """What `run` returns, with every extra of `names` and no other; those that a backend leaves out are computed."""
    q, returned = run(*arrays, wanted=names, **how)
    extras = Extras(**{name: getattr(returned, name, None) for name in names})
    if "amax" in names and extras.amax is None:
        rows = returned.activated
        if rows is None:
            rows = run(*arrays, wanted=("activated",), **how)[1].activated
            assert rows is not None  # what is wanted is returned
        extras.amax = operators.group_amax_of(rows, arrays[-1])
    if "dequantized" in names and extras.dequantized is None:
        extras.dequantized = dequantize(q, dtype=torch.bfloat16)
    return q, extras
