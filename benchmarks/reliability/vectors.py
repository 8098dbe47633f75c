"""The recorded vectors of octavo-numerics on every backend: each plane and each dequantized value, byte for byte."""

from __future__ import annotations

import json
from typing import Any

from record import ROOT

import octavo_registry
from octavo_numerics import QuantizedArray, quantize, vectors
from octavo_numerics.arrays import PLANES
from octavo_numerics.vectors import GROUP_SIZES, SEED

FOLDER = ROOT / "packages" / "numerics" / "tests" / "vectors"
BACKENDS = {
    "torch-reference": "torch",
    "torch-native": "torch",
    "jax-reference": "jax",
    "jax-native": "jax",
}


def _digests(bridge: Any, backend: str, x: Any, case: vectors.Case) -> dict[str, str]:
    sizes = None if case.stacked else GROUP_SIZES
    x = x.reshape(7, 40, vectors.COLS) if case.stacked else x
    like = quantize(x, case.spec, sizes, seed=SEED, scale=case.scale)
    given = {
        "seed": SEED if case.spec.stochastic else None,
        "operand": case.operand or case.spec.role,
        "group_offset": case.group_offset,
        "scale": None if case.scale is None else bridge.from_numpy(case.scale, "cpu"),
        "backend": backend,
    }
    made = bridge.quantize(bridge.from_numpy(x, "cpu"), case.spec, None if sizes is None else list(sizes), **given)
    planes = {name: getattr(made, name) for name in PLANES}
    arrays = {name: None if plane is None else bridge.to_numpy(plane) for name, plane in planes.items()}
    q = QuantizedArray(spec=like.spec, group_sizes=like.group_sizes, **arrays)
    return vectors.digests_of(q)


def measure(count: int | None) -> dict[str, Any]:
    """Equal and different cases by backend; `count` inputs of each, None: all."""
    bridges = octavo_registry.frameworks()
    installed = {record.name for record in octavo_registry.backends() if record.verdict is None}
    names = list(vectors.INPUTS)[:count]
    equal: dict[str, int] = {}
    different: dict[str, list[str]] = {}
    for backend, framework in BACKENDS.items():
        if backend not in installed or framework not in bridges:
            continue
        equal[backend], different[backend] = 0, []
        for name in names:
            recorded = json.loads((FOLDER / f"{name}.json").read_text())["cases"]
            x = vectors.make_input(name)
            for case in vectors.cases():
                same = _digests(bridges[framework], backend, x, case) == recorded[case.key]
                equal[backend] += same
                if not same:
                    different[backend].append(f"{name}: {case.key}")
    return {
        "inputs": names,
        "cases_each": len(vectors.cases()),
        "equal": equal,
        "different": different,
        "faults": sum(map(len, different.values())),
    }
