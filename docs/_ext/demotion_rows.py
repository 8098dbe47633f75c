"""Which plan serves a grouped linear layer of torch, eagerly and in a CUDA graph: from the cards, on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from octavo import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    HighPrecision,
    Recipe,
    RowScaling,
)
from octavo.formats import DType
from octavo.recipe_base import GEMMS
from octavo_native.gemms import LAYOUTS_OF_GEMM
from octavo_registry import GemmRequest, Request
from octavo_registry.contract import OPERATIONS, Bound
from octavo_registry.discovery.records import BackendRecord
from octavo_registry.dispatch.candidates import Candidate, Candidates, filter_cards
from octavo_registry.dispatch.compose import Composition, compose
from octavo_torch.plugin import CARD as REFERENCE
from octavo_torch_cudagraph.plugin import CARD as CUDAGRAPH
from octavo_torch_native.plugin import CARD as NATIVE
from octavo_torch_triton.plugin import CARD as TRITON

RECIPES: tuple[Recipe, ...] = (
    HighPrecision(), DelayedScaling(), CurrentScaling(), RowScaling(), BlockScaling(), MXFP8(), NVFP4(),
)  # fmt: skip
DTYPES: tuple[DType, ...] = ("bfloat16", "float16", "float32")
DEVICES: dict[str, tuple[str, tuple[int, int] | None]] = {
    "CPU": ("cpu", None),
    "Hopper": ("cuda", (9, 0)),
    "another GPU": ("cuda", (8, 0)),
}
_RECORDS = [BackendRecord(card.name, card.name, "", "", card) for card in (CUDAGRAPH, NATIVE, TRITON, REFERENCE)]


@dataclass(frozen=True)
class Row:
    """One layer: who serves it eagerly and in a graph ("" where nobody does), and why not the first choice."""

    recipe: str
    dtype: str
    device: str
    sizes: str
    eager: str
    eager_reason: str
    graph: str
    graph_reason: str


def rows() -> Iterator[Row]:
    """Every recipe, dtype, device and place of sizes."""
    for recipe in RECIPES:
        for label, (device, arch) in DEVICES.items():
            for sizes in ("host", "device"):
                for dtype in DTYPES:
                    layer = GemmRequest(
                        op="fprop", framework="torch", device=device, arch=arch, in_dtype=dtype, out_dtype=dtype,
                        recipe=recipe, sizes=sizes,
                    )  # fmt: skip
                    eager = _served(layer, recipe, NATIVE.name)
                    graph = _served(replace(layer, graph_safe=True), recipe, CUDAGRAPH.name)
                    yield Row(recipe.kind, dtype, label, sizes, *eager, *graph)


def _served(layer: GemmRequest, recipe: Recipe, first: str) -> tuple[str, str]:
    """Who serves the layer, and the sentence against `first` where it does not serve all of it."""

    def find(request: Request) -> Candidates:
        order, others = filter_cards(_RECORDS, request, None)
        return Candidates(request, order, others, _bind)

    found = compose(layer, recipe, find)
    if isinstance(found, Candidates):
        sentences = {_against(name, found): name for name in (REFERENCE.name, first)}
        return "", "; ".join(
            f"{name}: {reason}" if len(sentences) > 1 else reason for reason, name in sentences.items()
        )
    parts = {gemm: candidates.at(place) for gemm, (candidates, place) in found.gemms.items()}
    parts |= {f"quantize {operand}": candidates.at(0) for operand, candidates in found.quantizers.items()}
    served = {name: part[0].name for name, part in parts.items()}
    names = sorted(set(served.values()))
    if names == [first]:
        emulated = parts["fprop"][0].row.emulated
        return first, f"emulated: {emulated}" if emulated else ""
    lost = next(gemm for gemm in GEMMS if served[gemm] != first)
    if len(names) == 1:
        return names[0], _against(first, _asked(found, lost))
    return ", ".join(f"{name} {served[name]}" for name in sorted(served)), _against(first, _asked(found, lost))


def _asked(found: Composition, gemm: str) -> Candidates:
    return found.gemms[gemm][0]


def _against(name: str, candidates: Candidates) -> str:
    return next(decision.reason for decision in candidates.decisions() if decision.backend == name)


def _bind(candidate: Candidate, request: Request) -> Bound:
    native = candidate.name in (NATIVE.name, CUDAGRAPH.name)
    quantized = request.op in GEMMS and request.kind != "high_precision"
    return OPERATIONS[request.op].bound(print, layouts=LAYOUTS_OF_GEMM[request.op] if native and quantized else {})


def markdown() -> str:
    """The table, dtypes of one answer in one line."""
    lines = [
        "| recipe | dtypes | device | sizes on the | eager | | in a CUDA graph | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for _, group in groupby(rows(), lambda row: (row.recipe, row.device, row.sizes)):
        same: dict[Row, list[str]] = {}
        for row in group:
            same.setdefault(replace(row, dtype=""), []).append(row.dtype)
        for row, dtypes in same.items():
            cells = (
                row.recipe, ", ".join(dtypes), row.device, row.sizes, row.eager or "refused", row.eager_reason,
                row.graph or "**refused**", row.graph_reason,
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
