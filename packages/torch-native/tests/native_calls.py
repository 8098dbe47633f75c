"""The quantizers of this backend for the tests: octavo_torch's functions, and what one launch makes beside codes.

Not tests. A result holds codes and extras together, and flags say which extras are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import octavo_torch
from octavo import QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo_torch import GroupedTensor
from octavo_torch.plugin_api import seed_tensor
from octavo_torch_native import GroupIndex, index_groups
from octavo_torch_native.arrays.group_index import group_index_of
from octavo_torch_native.plugin import NAME
from octavo_torch_native.quantizers import operators
from octavo_torch_native.quantizers.buffers import check_buffer, planes_of, write_sizes
from octavo_torch_native.quantizers.launches import launch_of
from octavo_torch_native.quantizers.spec import LaunchSpec, spec_from, spec_text

PLAIN_LAYOUTS = (PLAIN, PLAIN)


@dataclass(eq=False)
class Quantized:
    """Codes, and the extras that were asked for; the fields are those of octavo_torch.Extras."""

    codes: GroupedTensor
    amax: Tensor | None = None
    dequantized: Tensor | None = None
    activated: Tensor | None = None
    forward: Tensor | None = None
    dbias: Tensor | None = None
    dprobs: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None


def plan(group_sizes: Any, rows: int, device: torch.device | str = "cpu") -> GroupIndex:
    """The index of sizes in any form, on the device of tensors."""
    sizes = group_sizes if isinstance(group_sizes, Tensor) else torch.from_numpy(np.asarray(group_sizes, np.int64))
    return index_groups(sizes, rows, sizes if isinstance(group_sizes, Tensor) else torch.empty(0, device=device))


def quantize(
    x: Any,
    spec: Any,
    group_sizes: Any = None,
    *,
    amax: bool = False,
    dequantized: bool = False,
    out: Any = None,
    **how: Any,
) -> Quantized:
    """octavo_torch.quantize; with an index of the sizes or with extras, which it does not return, the launch itself."""
    if amax or dequantized or isinstance(group_sizes, GroupIndex):
        extras = [name for name, wanted in (("amax", amax), ("dequantized", dequantized)) if wanted]
        return _launched(x, spec, group_sizes, extras, out, **how)
    out = out.codes if isinstance(out, Quantized) else out
    return Quantized(octavo_torch.quantize(x, spec, group_sizes, out=out, backend=NAME, **how))


def _launched(
    x: Tensor,
    spec: QuantizerSpec,
    group_sizes: Any,
    extras: list[str],
    out: Quantized | None,
    *,
    layouts: tuple[str, str] = PLAIN_LAYOUTS,
    seed: Any = None,
    operand: Any = None,
    group_offset: int = 0,
    scale: Tensor | None = None,
    unchanged: Tensor | None = None,
) -> Quantized:
    text = spec_text(LaunchSpec(spec, operand or spec.role, layouts, **dict.fromkeys(extras, True)))
    launch = launch_of(text)
    if isinstance(group_sizes, list | np.ndarray):
        group_sizes = torch.from_numpy(np.asarray(group_sizes, np.int64))
    index = group_index_of(x.shape, group_sizes, x)
    groups, words, sizes = (x.shape[0], None, None) if index is None else (index.groups, index.words, index.group_sizes)
    key = seed_tensor(seed, x.device) if spec.stochastic else None
    inputs = (x, words, groups, text, key, group_offset, scale)
    shapes = launch.shapes(x, groups)
    if out is None:
        outputs = operators.quantize(*inputs, None, None, None, None)
        made = dict(zip(extras, outputs[len(outputs) - len(extras) :], strict=True))
        return Quantized(launch.tensor(shapes, sizes, outputs), **made)
    codes = out.codes if isinstance(out, Quantized) else out
    outputs = planes_of(codes, launch, shapes, x.device)
    for name, (shape, dtype) in zip(extras, shapes.outputs[len(outputs) :], strict=True):
        outputs.append(check_buffer(f"out.{name}", getattr(out, name, None), shape, dtype, x.device))
    operators.quantize_into(*inputs, unchanged, outputs)
    write_sizes(codes, sizes)
    return out if isinstance(out, Quantized) else Quantized(out)


def _fused(function: Any, *arrays: Any, **how: Any) -> Quantized:
    names = ("amax", "dequantized", "activated", "dbias", "dprobs")
    wanted = [name for name in names if how.pop(name, False)]
    codes, extras = function(*arrays, wanted=wanted, backend=NAME, **how)
    return Quantized(codes, **vars(extras))


def act_quantize(*arrays: Any, activation: Any = "swiglu", **how: Any) -> Quantized:
    """octavo_torch.act_quantize of x, spec and sizes."""
    return _fused(octavo_torch.act_quantize, *arrays, activation=activation, **how)


def dact_quantize(*arrays: Any, activation: Any = "swiglu", **how: Any) -> Quantized:
    """octavo_torch.dact_quantize of dy, x, spec and sizes."""
    return _fused(octavo_torch.dact_quantize, *arrays, activation=activation, **how)


def norm_quantize(x: Any, gamma: Any, beta: Any, spec: Any, group_sizes: Any = None, **how: Any) -> Quantized:
    """octavo_torch.norm_quantize."""
    return _fused(octavo_torch.norm_quantize, x, gamma, spec, group_sizes, beta=beta, **how)


dequantize = partial(octavo_torch.dequantize, backend=NAME)
convert = partial(octavo_torch.convert_layout, backend=NAME)
group_amax = octavo_torch.group_amax


def watch_quantizers(monkeypatch: pytest.MonkeyPatch) -> list[LaunchSpec]:
    """The spec of every launch of a quantizer from here on, in their order."""
    quantize, specs = operators.quantize, []

    def watched(x: Tensor, plan: Tensor, groups: int, spec: str, *rest: Any) -> list[Tensor]:
        specs.append(spec_from(spec))
        outputs: list[Tensor] = quantize(x, plan, groups, spec, *rest)
        return outputs

    monkeypatch.setattr(operators, "quantize", watched)
    return specs
