"""Quantizer.run with every field as a keyword: tests replace single ones, whichever part of a call they belong to."""

from __future__ import annotations

from typing import Any

import octavo_native as native

_INPUT = (
    "x",
    "dtype",
    "rows",
    "cols",
    "row_stride",
    "groups",
    "matrix_rows",
    "plan",
    "index",
    "each",
    "count",
    "mxfp4_scales",
    "interleaved_cols",
    "interleaved_rows",
)
_PLANE = ("codes", "scales", "global", "layout")
_PROLOGUE = (
    "activation", "norm", "dy", "dy_stride", "probs", "dprobs", "forward", "gamma", "beta", "epsilon", "mean", "rstd",
)  # fmt: skip


def run_quantizer(quantizer: native.Quantizer, **arguments: Any) -> None:
    """Run with fields of InputArgs and PrologueArgs by name, `prologue` its kind, and those of planes as row_codes."""
    prologue = {name: arguments.pop(name) for name in _PROLOGUE if name in arguments}
    kind = arguments.pop("prologue", None)
    if kind is not None or prologue:
        arguments["prologue"] = native.PrologueArgs(kind=kind or native.PROLOGUES["none"], **prologue)
    for direction, prefix in (("rowwise", "row"), ("columnwise", "col")):
        parts = {name: arguments.pop(f"{prefix}_{name}") for name in _PLANE if f"{prefix}_{name}" in arguments}
        if parts:
            parts["global_"] = parts.pop("global", 0)
            arguments[direction] = native.PlaneArgs(**{"codes": 0, "scales": 0, **parts})
    fields = {name: arguments.pop(name) for name in _INPUT if name in arguments}
    quantizer.run(input=native.InputArgs(**fields), **arguments)
