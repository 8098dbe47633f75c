"""Requests and tables as text: plain, aligned, one line per row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.recipe_base import GEMMS
from octavo_registry.contract.request import Request
from octavo_registry.contract.weights import WEIGHT_SHAPES


def sm(arch: tuple[int, int]) -> str:
    """CUDA's name of a compute capability: (9, 0) is sm_90."""
    return f"sm_{arch[0]}{arch[1]}"


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
