"""Which backend quantizes, dequantizes or converts a tensor outside of layers; plans are remembered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import octavo_registry as registry
from octavo import QuantizerSpec
from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction
from octavo_registry.contract import DequantizeRequest, Plan, QuantizeRequest
from octavo_registry.dispatch.layer_plan import QuantizePlan
from octavo_torch.arrays.checks import BackendNames
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.dispatch.device import arch_of
from octavo_torch.memo import Memo

Layouts = tuple[str, str]

_is_compiling = torch.compiler.is_compiling
_quantizers: Memo[QuantizePlan] = Memo()
_dequantizers: Memo[Plan] = Memo()
_converters: Memo[QuantizePlan] = Memo()


def _graph_safe(x: Tensor) -> bool:
    return not _is_compiling() and wants_graph(x)


def _fields(q: GroupedTensor, graph_safe: bool) -> dict[str, Any]:
    """What requests for an operation on `q` have in common."""
    spec = q.spec
    return {
        "framework": "torch",
        "device": q.device.type,
        "in_dtype": "float32",
        "quantizer": spec.quantizer,
        "arch": arch_of(q.device),
        "k": spec.shape[-1],
        "n": None if spec.ragged_axis == 0 else spec.shape[1],
        "groups": spec.groups,
        # those of a quantized operand are on its device
        "sizes": "host" if q.device.type == "cpu" else "device",
        "graph_safe": graph_safe,
    }


def quantizer_plan(
    spec: QuantizerSpec, x: Tensor, columns: int, groups: int, at_host: bool, backend: BackendNames, layouts: Layouts
) -> QuantizePlan:
    """The plan that quantizes tensors like `x`, if with `columns` columns, to the (rowwise, columnwise) `layouts`."""
    graph_safe = _graph_safe(x)
    # under torch.compile(dynamic=True) sizes are symbols, which have no hash
    columns, groups, rows = int(columns), int(groups), int(x.shape[1]) if x.dim() == 3 else None

    def planned() -> QuantizePlan:
        name = DTYPE_NAMES[x.dtype]
        request = QuantizeRequest(
            op="quantize",
            framework="torch",
            device=x.device.type,
            in_dtype=name,
            out_dtype=name,
            quantizer=spec,
            arch=arch_of(x.device),
            k=columns,
            n=rows,
            groups=groups,
            stacked=x.dim() == 3,
            sizes="host" if at_host else "device",
            graph_safe=graph_safe,
            layouts=layouts,
        )
        return registry.plan(request, backend=backend)

    key = (id(spec), x.dtype, x.device, x.dim(), rows, columns, groups, at_host, backend, layouts, graph_safe)
    return _quantizers.get(key, planned, spec)


def dequantizer_plan(q: GroupedTensor, direction: Direction, dtype: DType, backend: BackendNames) -> Plan:
    """The plan that reads one plane of tensors like `q`, in its layout, and returns values of `dtype`."""
    spec, codes = q.spec, q.plane(direction)[0]
    graph_safe = _graph_safe(codes)

    def planned() -> Plan:
        # the other plane is not read, whatever its layout is
        layouts = (spec.rowwise_layout, PLAIN) if direction == "rowwise" else (PLAIN, spec.columnwise_layout)
        request = DequantizeRequest(op="dequantize", out_dtype=dtype, layouts=layouts, **_fields(q, graph_safe))
        return registry.plan(request, backend=backend)

    key = (id(spec), direction, codes.device, dtype, backend, graph_safe)
    return _dequantizers.get(key, planned, spec)


def converter_plan(q: GroupedTensor, layouts: Layouts, backend: BackendNames) -> QuantizePlan:
    """The plan of a quantizer to `layouts`, whose backend converts planes of tensors like `q` to them and back."""
    graph_safe = _graph_safe(next(plane for plane in (q.rowwise, q.columnwise) if plane is not None))

    def planned() -> QuantizePlan:
        stacked = q.spec.ragged_axis is None
        fields = _fields(q, graph_safe)
        request = QuantizeRequest(op="quantize", out_dtype="float32", stacked=stacked, layouts=layouts, **fields)
        return registry.plan(request, backend=backend)

    key = (id(q.spec), q.device, layouts, backend, graph_safe)
    return _converters.get(key, planned, q.spec)
