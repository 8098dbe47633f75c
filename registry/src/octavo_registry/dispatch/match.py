"""A capability row against a request: the refusal of the row that came closest, with both values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from octavo.recipe_base import GEMMS
from octavo_registry.contract.cards import QUANTIZERS, Arch, BackendCard, Capability
from octavo_registry.contract.request import Request, sm
from octavo_registry.contract.weights import WEIGHT_SHAPES

Rows = Sequence[Capability]


def listed(values: Iterable[str]) -> str:
    """Values in alphabetical order, for a sentence."""
    return ", ".join(sorted(values))


def _union(rows: Rows, field: str) -> str:
    return listed({value for row in rows for value in getattr(row, field)})


@dataclass(frozen=True, slots=True)
class Check:
    """One condition of a row; `sentence` speaks for all rows that failed here."""

    passes: Callable[[Capability, Request], bool]
    sentence: Callable[[Rows, Request], str]


def within_arch(row: Capability, arch: Arch | None) -> bool:
    """Whether a row's bounds admit a compute capability; None: that of a device which has none."""
    if row.min_arch is None and row.max_arch is None:
        return True
    if arch is None:
        return False
    return (row.min_arch or (0, 0)) <= arch and (row.max_arch is None or arch <= row.max_arch)


def _span(low: Arch | None, high: Arch | None) -> str:
    if low is not None and low == high:
        return sm(low)
    if low is not None and high is not None:
        return f"{sm(low)} to {sm(high)}"
    return f"{sm(low)} or newer" if low is not None else f"{sm(high)} or older" if high is not None else "any"


def _arch_sentence(rows: Rows, request: Request) -> str:
    spans = dict.fromkeys(_span(row.min_arch, row.max_arch) for row in sorted(rows, key=lambda r: r.min_arch or (0, 0)))
    device = f"this device is {sm(request.arch)}" if request.arch else "the request names no compute capability"
    return f"needs {' or '.join(spans)}, {device}"


def _sizes_sentence(rows: Rows, request: Request) -> str:
    if request.sizes == "host":
        return "sizes are on the host (a list); it takes them as a device array"
    return "sizes are on the device; it takes them on the host (a list)"


def _weights(rows: Rows) -> str:
    return " or ".join(shape for weight, shape in WEIGHT_SHAPES.items() if any(weight in row.weights for row in rows))


def _wanted_orientations(request: Request) -> frozenset[str]:
    if request.op not in QUANTIZERS or request.quantizer is None:
        return frozenset()
    return frozenset(request.quantizer.directions)


def wanted_layouts(request: Request) -> frozenset[str]:
    """The layouts of the planes that a quantizer's request asks for; empty for other operations."""
    return _layouts_of(request, _wanted_orientations(request))


def _read_layouts(request: Request) -> frozenset[str]:
    """The layouts of the planes that a request for "dequantize" reads; empty for other operations."""
    if request.op != "dequantize" or request.quantizer is None:
        return frozenset()
    return _layouts_of(request, frozenset(request.quantizer.directions))


def _layouts_of(request: Request, directions: frozenset[str]) -> frozenset[str]:
    planes = zip(("rowwise", "columnwise"), request.layouts, strict=True)
    return frozenset(layout for direction, layout in planes if direction in directions)


_FUSED = QUANTIZERS - {"quantize"}
_CHECKS: tuple[Check, ...] = (
    Check(
        lambda row, r: row.framework == r.framework,
        lambda rows, r: f"serves {listed({row.framework for row in rows})}, the framework is {r.framework}",
    ),
    Check(
        lambda row, r: row.device == r.device,
        lambda rows, r: f"serves {listed({row.device for row in rows})}, the device is {r.device}",
    ),
    Check(
        lambda row, r: r.op in row.ops,
        lambda rows, r: f"serves {_union(rows, 'ops')} on {r.device}, the operation is {r.op}",
    ),
    Check(
        lambda row, r: r.kind in row.recipes,
        lambda rows, r: f"serves {r.op} in {_union(rows, 'recipes')}, the recipe is {r.kind}",
    ),
    Check(lambda row, r: within_arch(row, r.arch), _arch_sentence),
    Check(
        lambda row, r: row.graph_safe or not r.graph_safe,
        lambda rows, r: f"graph_safe=True was asked for and its {r.op} in {r.kind} is not graph-safe",
    ),
    Check(lambda row, r: r.stacked or r.sizes in row.sizes, _sizes_sentence),
    Check(
        lambda row, r: r.op == "dequantize" or r.in_dtype in row.in_dtypes,
        lambda rows, r: f"takes {_union(rows, 'in_dtypes')}, the input is {r.in_dtype}",
    ),
    Check(
        lambda row, r: r.op in QUANTIZERS or r.out_dtype in row.out_dtypes,
        lambda rows, r: f"returns {_union(rows, 'out_dtypes')}, the result is to be {r.out_dtype}",
    ),
    Check(
        lambda row, r: _wanted_orientations(r) <= row.orientations,
        lambda rows, r: f"makes {_union(rows, 'orientations')} data, {listed(_wanted_orientations(r))} was asked for",
    ),
    Check(
        lambda row, r: wanted_layouts(r) <= row.layouts,
        lambda rows, r: f"makes layouts {_union(rows, 'layouts')}, {listed(wanted_layouts(r))} was asked for",
    ),
    Check(
        lambda row, r: _read_layouts(r) <= row.layouts,
        lambda rows, r: f"reads layouts {_union(rows, 'layouts')}, the data are in {listed(_read_layouts(r))}",
    ),
    Check(
        lambda row, r: r.op not in GEMMS or r.weight in row.weights,
        lambda rows, r: f"takes w as {_weights(rows)}, it lies in memory as {WEIGHT_SHAPES[r.weight]}",
    ),
    Check(
        lambda row, r: r.op not in _FUSED or r.quantizer is None or r.quantizer.mxfp4 is None,
        lambda rows, r: f"rounds nothing to MXFP4, which the quantizer of this {r.op} is to do",
    ),
    Check(
        lambda row, r: row.square_columns or not r.square_columns,
        lambda rows, r: (
            f"gives each column a scale in its {r.op} of {r.kind}, square_columns asks for one for 128 of them"
        ),
    ),
    Check(
        lambda row, r: r.activation is None or r.activation in row.activations,
        lambda rows, r: f"computes {_union(rows, 'activations')}, the activation is {r.activation}",
    ),
    Check(
        lambda row, r: r.norm is None or r.norm in row.norms,
        lambda rows, r: f"computes {_union(rows, 'norms')} normalization, the norm is {r.norm}",
    ),
)


def match(card: BackendCard, request: Request) -> Capability | str:
    """The first row of `card` that admits `request`; else the refusal of the rows that passed most checks."""
    furthest = -1
    closest: list[Capability] = []
    for row in card.capabilities:
        stage = next((i for i, check in enumerate(_CHECKS) if not check.passes(row, request)), None)
        if stage is None:
            return row
        if stage > furthest:
            furthest, closest = stage, []
        if stage == furthest:
            closest.append(row)
    return _CHECKS[furthest].sentence(closest, request)
