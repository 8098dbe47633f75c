"""Faults of results: one buffer for all of a shape, codes that are kept by the array's identity, and none at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from octavo_numerics import QuantizedArray
from octavo_registry.contract import PLANES


def with_results(fault: str | None, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with the fault, if it is one of these."""
    buffers: dict[Any, Any] = {}
    codes: dict[Any, Any] = {}

    def buffered(name: str, array: Any) -> Any:
        if array is None:
            return None
        buffer = buffers.setdefault((name, array.shape, array.dtype), np.empty_like(array))
        buffer[...] = array
        return buffer

    def into_one_buffer(*operands: Any, **how: Any) -> Any:
        result = run(*operands, **how)
        if isinstance(result, QuantizedArray):
            return replace(result, **{name: buffered(name, getattr(result, name)) for name in PLANES})
        return buffered("result", result) if isinstance(result, np.ndarray) and how.get("out") is None else result

    def once(x: Any, *rest: Any, **how: Any) -> Any:
        if (kept := codes.get(id(x))) is None or kept[0] is not x:
            kept = codes[id(x)] = x, run(x, *rest, **how)
        return kept[1]

    def nothing(*operands: Any, **how: Any) -> None:
        run(*operands, **how)

    faults = {"one-buffer": into_one_buffer, "stale-codes": once, "no-result": nothing}
    return faults.get(fault or "", run)
