"""Requests, verdicts and plans as text: plain, aligned, one line a backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from octavo.recipe_base import GEMMS
from octavo_registry.contract.weights import WEIGHT_SHAPES
from octavo_registry.dispatch.match import sm

if TYPE_CHECKING:
    from octavo_registry.contract.request import Decision, Plan, Request
    from octavo_registry.discovery.records import BackendRecord
    from octavo_registry.dispatch.compose import LayerPlan

FRONT_ENDS: Mapping[str, str] = MappingProxyType({"torch": "octavo-torch", "jax": "octavo-jax"})
"""The distribution that brings a framework's front end and its reference backend."""


def describe_request(request: Request) -> str:
    """`fprop in mxfp8 for torch on cuda (sm_90)`, with what else narrows the choice."""
    function = request.activation or request.norm
    op = f"{request.op} of {function}" if function else request.op
    words = f"{op} in {request.kind} for {request.framework} on {request.device}"
    if request.arch is not None:
        words += f" ({sm(request.arch)})"
    extras = []
    if request.op in GEMMS and request.weight != "nk":
        extras.append(f"w as {WEIGHT_SHAPES[request.weight]}")
    if request.quantizer is not None:
        extras.append(f"{request.quantizer.role} {request.quantizer.orientation}")
    if request.graph_safe:
        extras.append("graph-safe")
    if request.sharding:
        extras.append("sharded over " + ", ".join(sorted(request.sharding)))
    return f"{words}, {', '.join(extras)}" if extras else words


def table(rows: Iterable[Sequence[str]], indent: str = "  ") -> str:
    """Rows in aligned columns; the last column is left as long as it is."""
    cells = [tuple(row) for row in rows]
    if not cells:
        return ""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]) - 1)]
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append((indent + "  ".join([*padded, row[-1]])).rstrip())
    return "\n".join(lines)


def decision_table(decisions: Iterable[Decision]) -> str:
    """One line a backend: name, verdict, reason."""
    return table((d.backend, d.verdict, d.reason) for d in decisions)


def explain_failure(request: Request, decisions: Sequence[Decision], records: Iterable[BackendRecord]) -> str:
    """The message of `NoBackendError`: what was asked for, every verdict, and what to install where nothing is."""
    lines = [f"nothing here runs {describe_request(request)}."]
    if decisions:
        lines.append(decision_table(decisions))
    served = {row.framework for record in records if record.card for row in record.card.capabilities}
    if request.framework not in served:
        front_end = FRONT_ENDS.get(request.framework)
        if front_end is not None:
            lines.append(f"  No backend for {request.framework} is installed: pip install {front_end}")
        else:
            known = ", ".join(sorted(served | set(FRONT_ENDS)))
            lines.append(f"  No installed package serves framework {request.framework!r}; known ones are {known}")
    return "\n".join(lines)


def describe_plan(plan: Plan) -> str:
    """A plan for people: what runs, how its operands arrive, and the verdict on every backend."""
    lines = [f"{describe_request(plan.request)}: {plan.backend}"]
    if plan.note:
        lines[0] += f" ({plan.note})"
    layouts = ", ".join(f"{operand} {layout}" for operand, layout in sorted(plan.layouts.items()))
    if layouts:
        lines.append(f"  layouts: {layouts}")
    if plan.workspace_bytes:
        lines.append(f"  workspace: {plan.workspace_bytes} bytes")
    lines.append(decision_table(plan.decisions))
    return "\n".join(lines)


def describe_layer(layer: LayerPlan) -> str:
    """A layer plan for people: one line an operation."""
    first = layer.fprop.request
    where = f"{first.framework} on {first.device}" + (f" ({sm(first.arch)})" if first.arch else "")
    lines = [f"grouped linear in {layer.recipe.kind} ({layer.recipe.fingerprint}) for {where}{weight_words(layer)}"]
    lines.append(table(layer_rows(layer)))
    return "\n".join(lines)


def weight_words(layer: LayerPlan) -> str:
    """A clause on how w is read, where that is not as [G, N, K] and it lies so."""
    lies, taken = WEIGHT_SHAPES[layer.weight], WEIGHT_SHAPES[layer.fprop.request.weight]
    if layer.transposes:
        return f", w {lies} transposed to {taken} and dw back"
    return "" if layer.weight == "nk" else f", w read as {lies}"


def layer_rows(layer: LayerPlan) -> list[tuple[str, str, str, str]]:
    """Operation, backend, recipe kind, and layouts or note, for each operation that the layer runs."""
    rows = []
    for operand in ("x", "w", "dy"):
        plan = getattr(layer, f"quantize_{operand}")
        if plan is not None:
            spec = plan.request.quantizer
            planes = zip(("rowwise", "columnwise"), plan.request.layouts, strict=True)
            detail = ", ".join(f"{plane} {layout}" for plane, layout in planes if plane in spec.directions)
            rows.append((f"quantize {operand}", plan.backend, plan.request.kind, _with_note(detail, plan.note)))
    for gemm in ("fprop", "dgrad", "wgrad"):
        plan = getattr(layer, gemm)
        if plan is not None:
            taken = ", ".join(f"{operand} {layout}" for operand, layout in sorted(plan.layouts.items()))
            rows.append((gemm, plan.backend, plan.request.kind, _with_note(taken, plan.note)))
    return rows


def _with_note(detail: str, note: str) -> str:
    return "; ".join(part for part in (detail, note) if part)
