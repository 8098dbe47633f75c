"""The public functions: quantize with everything that one launch can make, fused with what comes before it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo_torch.arithmetic.operations import group_amax_of
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.sizes import all_rows, as_sizes
from octavo_torch.dispatch.layer import quantizer_for
from octavo_torch.linear import arguments as front_end
from octavo_torch.plugin_api import seed_tensor
from octavo_torch_native.arrays.rows import RowPlan, plan_of, plan_rows
from octavo_torch_native.graphs import in_graph
from octavo_torch_native.plugin import NAME
from octavo_torch_native.quantizers import arguments, operators
from octavo_torch_native.quantizers.buffers import check_buffer, planes_of, write_sizes
from octavo_torch_native.quantizers.dequantizer import Dequantizer, converted
from octavo_torch_native.quantizers.kernel import Kernel, kernel_of
from octavo_torch_native.quantizers.quantized import Quantized
from octavo_torch_native.quantizers.work import Activation, Norm, Work, text_of

Layouts = tuple[str, str]
Seed = int | Tensor | None

_PLAIN: Layouts = (PLAIN, PLAIN)
_AMAX_SPEC = QuantizerSpec(scaling="current", format="e4m3", orientation="rowwise")


@in_graph
def plan(group_sizes: Any, rows: int, *, device: torch.device | str | None = None) -> RowPlan:
    """The plan of `group_sizes` [G] for operands of `rows` rows, to be given in the sizes' place to many calls.

    device   of the rows; None: that of the sizes

    Host sizes are checked (ValueError); device sizes are cut to bounds and set the flag that `check_errors` reads.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        raise ValueError(f"rows is {rows!r}; give the number of rows of the operand")
    at = group_sizes.device if isinstance(group_sizes, Tensor) and device is None else torch.device(device or "cpu")
    like = torch.empty(0, device=at)
    sizes, _ = as_sizes(group_sizes, rows, None, like)
    return plan_rows(sizes, rows, like)


@in_graph
def quantize(
    x: Tensor,
    spec: QuantizerSpec,
    group_sizes: Any = None,
    *,
    layouts: Layouts = _PLAIN,
    seed: Seed = None,
    operand: Operand | None = None,
    group_offset: int = 0,
    scale: Tensor | None = None,
    amax: bool = False,
    dequantized: bool = False,
    unchanged: Tensor | None = None,
    out: GroupedTensor | Quantized | None = None,
) -> Quantized:
    """`x` quantized by `spec`, with its amax and a bf16 dequantized copy where asked for, in one launch.

    x             [M, K] rows in group order, or [G, N, K] stacked matrices; bf16, fp16 or fp32
    group_sizes   [G] integers on the host or on x's device, or the `plan` of them; None: one group. Not with matrices
    layouts       of the rowwise and columnwise plane: "plain"; "rows" and "panels" as the kernels read them
    seed ... scale   as in octavo_torch.quantize
    unchanged     int32 [1] on x's device: where it is not 0 `out` is left as it is (weights that no step has changed)
    out           tensors to write; a GroupedTensor where nothing but codes is asked for

    Not differentiable. Raises ValueError for arguments that do not fit, NoBackendError with the reason where this
    machine cannot run the kernels.
    """
    make = {"amax": amax, "dequantized": dequantized}
    return _launch(x, spec, group_sizes, layouts, seed, operand, group_offset, scale, make, unchanged, out)


@in_graph
def act_quantize(
    x: Tensor,
    spec: QuantizerSpec,
    group_sizes: Any = None,
    *,
    activation: Activation = "swiglu",
    probs: Tensor | None = None,
    layouts: Layouts = _PLAIN,
    seed: Seed = None,
    operand: Operand | None = None,
    group_offset: int = 0,
    scale: Tensor | None = None,
    amax: bool = False,
    dequantized: bool = False,
    activated: bool = False,
    out: GroupedTensor | Quantized | None = None,
) -> Quantized:
    """act(x) quantized: computed in fp32, rounded once to x's dtype, then quantized as `quantize` would.

    x           [M, F]; [M, 2 F] with the gate first where `activation` is swiglu, geglu or geglu_tanh
    activation  those, which give act(gate) * up, or silu, gelu, gelu_tanh, relu2
    probs       fp32 [M]: multiplies each row
    activated   also return what was quantized, [M, F] in x's dtype

    Others as in `quantize`.
    """
    arguments.check_rows("x", x)
    arguments.check_activation(activation, x)
    arguments.check_beside("probs", probs, (x.shape[0],), torch.float32, x)
    make = {
        "prologue": "activation",
        "activation": activation,
        "amax": amax,
        "dequantized": dequantized,
        "activated": activated,
    }
    return _launch(x, spec, group_sizes, layouts, seed, operand, group_offset, scale, make, None, out, probs=probs)


@in_graph
def dact_quantize(
    dy: Tensor,
    x: Tensor,
    spec: QuantizerSpec,
    group_sizes: Any = None,
    *,
    activation: Activation = "swiglu",
    probs: Tensor | None = None,
    dbias: bool = False,
    dprobs: bool = False,
    layouts: Layouts = _PLAIN,
    seed: Seed = None,
    operand: Operand | None = None,
    group_offset: int = 0,
    scale: Tensor | None = None,
    amax: bool = False,
    dequantized: bool = False,
    activated: bool = False,
    out: GroupedTensor | Quantized | None = None,
) -> Quantized:
    """The gradient of act_quantize's input, quantized: computed in fp32, rounded once to x's dtype, then quantized.

    dy         [M, F], x's dtype: the gradient of act(x)
    x          [M, F] or [M, 2 F]: what `act_quantize` was given, and the shape of the result
    probs      fp32 [M]: what it was given
    dbias      also return the column sums by group, fp32 [G, columns of x], summed in a fixed order
    dprobs     also return the gradient of probs, fp32 [M]: dy times the activation, summed along rows in a fixed order
    activated  also return the gradient that was quantized, in x's dtype

    Others as in `quantize`.
    """
    arguments.check_rows("x", x)
    width = arguments.check_activation(activation, x)
    arguments.check_rows("dy", dy)
    arguments.check_beside("dy", dy, (x.shape[0], width), x.dtype, x)
    arguments.check_beside("probs", probs, (x.shape[0],), torch.float32, x)
    make = {
        "prologue": "activation_grad",
        "activation": activation,
        "amax": amax,
        "dequantized": dequantized,
        "activated": activated,
        "dbias": dbias,
        "dprobs": dprobs,
    }
    return _launch(
        x, spec, group_sizes, layouts, seed, operand, group_offset, scale, make, None, out, dy=dy, probs=probs
    )


@in_graph
def norm_quantize(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    spec: QuantizerSpec,
    group_sizes: Any = None,
    *,
    norm: Norm = "rms",
    epsilon: float = 1e-6,
    layouts: Layouts = _PLAIN,
    seed: Seed = None,
    operand: Operand | None = None,
    group_offset: int = 0,
    scale: Tensor | None = None,
    amax: bool = False,
    dequantized: bool = False,
    activated: bool = False,
    out: GroupedTensor | Quantized | None = None,
) -> Quantized:
    """RMSNorm or LayerNorm of x's rows quantized: computed in fp32, rounded once to x's dtype, then quantized.

    x      [M, C]
    gamma  [C], x's dtype
    beta   [C], x's dtype, or None; LayerNorm's alone
    norm   "rms": x * rstd * gamma; "layer": (x - mean) * rstd * gamma + beta

    Returns `rstd`, and `mean` for LayerNorm, beside the codes. Others as in `act_quantize`.
    """
    arguments.check_rows("x", x)
    arguments.check_norm(norm, epsilon, beta)
    if gamma is None:
        raise ValueError(f"gamma is None; give the weight of the normalization, [{x.shape[1]}]")
    for name, value in (("gamma", gamma), ("beta", beta)):
        arguments.check_beside(name, value, (x.shape[1],), x.dtype, x)
    make = {
        "prologue": "norm",
        "norm": norm,
        "epsilon": float(epsilon),
        "amax": amax,
        "dequantized": dequantized,
        "activated": activated,
    }
    return _launch(
        x, spec, group_sizes, layouts, seed, operand, group_offset, scale, make, None, out, gamma=gamma, beta=beta
    )


@in_graph
def group_amax(x: Tensor, group_sizes: Any = None) -> Tensor:
    """fp32 [G]: max |x| of each group of [M, K] rows or of each of [G, N, K] matrices.

    NaN where a group holds one, 0 where it has no rows; rows past the sum are not read.
    """
    front_end.check_quantize(x, _AMAX_SPEC, group_sizes, None, None, 0)
    sizes, _ = _sizes_of(x, group_sizes)
    result: Tensor = group_amax_of(x, sizes.group_sizes if isinstance(sizes, RowPlan) else sizes)
    return result


@in_graph
def dequantize(
    q: GroupedTensor,
    direction: Literal["rowwise", "columnwise"] = "rowwise",
    *,
    dtype: torch.dtype = torch.float32,
    plan: RowPlan | None = None,
) -> Tensor:
    """Values of one direction in the logical shape, rounded once to `dtype`; rows past the sum are +0. Any layout.

    Hadamard column data come back in the Hadamard domain, [block_bound(M, G, 16) * 16, K].
    plan   of q's sizes, where the caller has it
    """
    _check_quantized(q)
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype is {dtype}; give torch.float32, torch.bfloat16 or torch.float16")
    return Dequantizer(dtype)(q, front_end.direction_name(direction), plan)


@in_graph
def convert(q: GroupedTensor, layouts: Layouts, *, plan: RowPlan | None = None) -> GroupedTensor:
    """`q` in other (rowwise, columnwise) layouts, bit for bit; planes that have theirs already are shared with `q`.

    layouts   "plain", or "rows" for the rowwise and "panels" for the columnwise plane
    plan      of q's sizes, where the caller has it
    """
    _check_quantized(q)
    return converted(q, _checked_layouts(layouts), plan)


def _sizes_of(x: Tensor, group_sizes: Any) -> tuple[Tensor | RowPlan | None, bool]:
    """Sizes as `plan_of` takes them, and whether they come from the host."""
    if x.dim() == 3:
        return None, x.is_cpu
    if type(group_sizes) is RowPlan:
        return group_sizes, x.is_cpu
    return as_sizes(all_rows(x) if group_sizes is None else group_sizes, x.shape[0], None, x)


def _check_quantized(q: Any) -> None:
    if not isinstance(q, GroupedTensor):
        raise ValueError(f"q is a {type(q).__name__}; give the GroupedTensor that quantize returned")


def _checked_layouts(layouts: Any) -> Layouts:
    if not isinstance(layouts, (tuple, list)) or len(layouts) != 2:
        raise ValueError(f"layouts is {layouts!r}; give two names, of the rowwise and of the columnwise plane")
    return layouts[0], layouts[1]


_kernels: dict[tuple[Any, ...], tuple[QuantizerSpec, str, Kernel]] = {}
_MOST_KERNELS = 1024


def _kernel(spec: QuantizerSpec, operand: Operand, layouts: Layouts, make: dict[str, Any]) -> tuple[str, Kernel]:
    """The kernel of a call, kept by the spec's identity: to hash or write down a spec costs more than a launch."""
    key = (id(spec), operand, layouts, *make.items())
    known = _kernels.get(key)
    if known is not None and known[0] is spec:
        return known[1:]
    if len(_kernels) >= _MOST_KERNELS:
        _kernels.clear()
    work = Work(spec, operand, layouts, **make)
    arguments.check_extras(spec, work)
    text = text_of(work)
    kernel = kernel_of(text)
    _kernels[key] = (spec, text, kernel)
    return text, kernel


def _launch(
    x: Tensor,
    spec: QuantizerSpec,
    group_sizes: Any,
    layouts: Layouts,
    seed: Seed,
    operand: Operand | None,
    group_offset: int,
    scale: Tensor | None,
    make: dict[str, Any],
    unchanged: Tensor | None,
    out: GroupedTensor | Quantized | None,
    *,
    dy: Tensor | None = None,
    probs: Tensor | None = None,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
) -> Quantized:
    front_end.check_quantize(x, spec, group_sizes, seed, scale, group_offset)
    front_end.operand_name(operand)
    front_end.check_unchanged(unchanged, out, x)
    layouts = _checked_layouts(layouts)
    rows, at_host = _sizes_of(x, group_sizes)
    groups = x.shape[0] if rows is None else rows.groups if isinstance(rows, RowPlan) else rows.shape[0]
    front_end.check_scale(scale, groups, spec)
    if scale is not None and scale.device != x.device:
        raise ValueError(f"scale is on {scale.device} and x on {x.device}; move it there")
    # the registry's word on whether the kernels run here, and its sentence where they do not
    quantizer_for(spec, x, groups, at_host, NAME, layouts)
    text, kernel = _kernel(spec, operand or spec.role, layouts, make)
    made = plan_of(x.shape, rows, x)
    frame = kernel.frame(x, groups)
    key = seed_tensor(seed, x.device) if spec.stochastic else None
    words, sizes = (None, None) if made is None else (made.words, made.group_sizes)
    inputs = (x, words, groups, text, key, group_offset, scale, dy, probs, gamma, beta)
    if out is None:
        outputs = operators.quantize(*inputs)
        extras = dict(zip(kernel.extras, outputs[len(outputs) - len(kernel.extras) :], strict=True))
        return Quantized(kernel.tensor(frame, sizes, outputs), **extras)
    if isinstance(out, GroupedTensor):
        out = Quantized(out)
    if not isinstance(out, Quantized):
        raise ValueError(f"out is a {type(out).__name__}; give a GroupedTensor or what this function returned")
    outputs = planes_of(out.codes, kernel, frame, x.device)
    for name, (shape, dtype) in zip(kernel.extras, frame.outputs[len(outputs) :], strict=True):
        outputs.append(check_buffer(f"out.{name}", getattr(out, name), shape, dtype, x.device))
    operators.quantize_into(*inputs, unchanged, outputs)
    write_sizes(out.codes, sizes)
    return out
