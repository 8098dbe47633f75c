"""Doctor's self-test: each backend quantizes one small tensor, and the bits are compared with the definition.

One that quantizes nothing binds a product, so that it has been loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import octavo_registry
from octavo import NoBackendError
from octavo.presets import recipe as core_recipe
from octavo.recipe_base import GEMMS
from octavo_registry.contract.cards import BackendCard
from octavo_registry.contract.frameworks import PLANES, Device, Framework
from octavo_registry.contract.plan import Decision
from octavo_registry.contract.request import GemmRequest
from octavo_registry.discovery.guard import Fault, describe, guard

SHAPE = (128, 128)
"""One group of whole blocks in every recipe, so that no element of any plane is left undefined."""

_REFERENCE = -100
"""The priority of reference backends, which no plan falls below by itself."""

_PREFERRED = ("mxfp8", "block", "current", "row", "nvfp4")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one backend did on one device: "ok", "broken", or "skipped" where it serves nobody there."""

    backend: str
    framework: str
    device: str
    status: str
    detail: str


def definition() -> Any | None:
    """The module `octavo_numerics`, or None where it is not installed. Looked up by name: it is no dependency."""
    if importlib.util.find_spec("octavo_numerics") is None:
        return None
    return importlib.import_module("octavo_numerics")


def kinds(card: BackendCard, framework: str, device: Device) -> set[str]:
    """Recipe kinds in which `card` quantizes on a device."""
    return {
        kind
        for row in card.capabilities
        if "quantize" in row.ops and row.framework == framework and row.device == device.kind
        for kind in row.recipes
    }


def run(frameworks: Iterable[Framework]) -> list[Outcome]:
    """One outcome per backend and device; [] where the definition is not installed."""
    try:
        numerics = guard(definition)
    except Fault as fault:
        return [Outcome("octavo-numerics", "", "", "broken", str(fault))]
    if numerics is None:
        return []
    outcomes = []
    cards = [record.card for record in octavo_registry.backends() if record.card is not None and not record.verdict]
    for framework in frameworks:
        for device in framework.devices():
            for card in cards:
                served = [kind for kind in _PREFERRED if kind in kinds(card, framework.name, device)]
                if served:
                    outcomes.append(_one(numerics, framework, device, card, served[0]))
                elif (request := _product(card, framework, device)) is not None:
                    outcomes.append(_bound(framework, device, card, request))
    return outcomes


def _one(numerics: Any, framework: Framework, device: Device, card: BackendCard, kind: str) -> Outcome:
    try:
        fault = guard(_compare, numerics, framework, device, card.name, kind)
    except Fault as error:
        fault = str(error) if error.__cause__ is None else describe(error.__cause__)
        verdict = _verdict(error.__cause__, card.name)
        if verdict is not None:
            # those below the reference ones serve nobody but who names them, so that refusing is no fault
            skipped = verdict.verdict == "refused" and card.priority < _REFERENCE
            status = "skipped" if skipped else "broken"
            return Outcome(card.name, framework.name, device.label, status, verdict.reason)
    status, detail = ("broken", fault) if fault else ("ok", f"quantizes {kind}, bits equal the definition")
    return Outcome(card.name, framework.name, device.label, status, detail)


def _product(card: BackendCard, framework: Framework, device: Device) -> GemmRequest | None:
    """A product that the card has on a device, for backends that quantize nothing there; None where it has none."""
    for row in card.capabilities:
        ops = [op for op in GEMMS if op in row.ops]
        recipes = [kind for kind in (*_PREFERRED, "high_precision") if kind in row.recipes]
        if (row.framework, row.device) == (framework.name, device.kind) and ops and recipes:
            return GemmRequest(
                op=ops[0],
                framework=framework.name,
                device=device.kind,
                arch=device.arch,
                in_dtype=min(row.in_dtypes),
                out_dtype=min(row.out_dtypes),
                recipe=core_recipe(recipes[0]),
                k=SHAPE[1],
                n=SHAPE[1],
                groups=1,
                sizes=min(row.sizes),
                graph_safe=row.graph_safe,
                weight=max(row.weights),
            )
    return None


def _bound(framework: Framework, device: Device, card: BackendCard, request: GemmRequest) -> Outcome:
    """Whether the backend loads and binds a product: the definition has no bits of one."""
    verdicts = octavo_registry.explain(request, backend=card.name)
    verdict = next(one for one in verdicts if one.backend == card.name)
    status = {"broken": "broken", "refused": "skipped"}.get(verdict.verdict, "ok")
    detail = f"binds {request.op} in {request.kind}" if status == "ok" else verdict.reason
    return Outcome(card.name, framework.name, device.label, status, detail)


def _verdict(error: BaseException | None, backend: str) -> Decision | None:
    """The verdict on a backend that does not serve, which stands among those on all others; None for other errors."""
    decisions = error.decisions if isinstance(error, NoBackendError) else ()
    return next((one for one in decisions if one.backend == backend), None)


def _compare(numerics: Any, framework: Framework, device: Device, backend: str, kind: str) -> str:
    """The first difference as a sentence; "" where there is none."""
    import numpy as np

    spec = core_recipe(kind).quantizer("x")
    assert spec is not None
    rows, columns = SHAPE
    x = (np.arange(rows * columns, dtype=np.float32).reshape(SHAPE) % 251.0 - 125.0) / 16.0
    sizes = np.array([rows], dtype=np.int32)
    wanted = numerics.quantize(x, spec, sizes)
    got = framework.quantize(
        framework.from_numpy(x, device.kind), spec, framework.from_numpy(sizes, device.kind), backend=backend
    )
    for plane in PLANES:
        right, ours = getattr(wanted, plane), getattr(got, plane)
        if right is None or ours is None:
            if right is not ours:
                return f"{kind}: plane {plane} is {'missing' if ours is None else 'there and should not be'}"
            continue
        right, ours = np.asarray(right), framework.to_numpy(ours)
        if right.shape != ours.shape or right.dtype != ours.dtype:
            return f"{kind}: {plane} is {ours.dtype}{list(ours.shape)}, the definition {right.dtype}{list(right.shape)}"
        differ = np.argwhere(_bits(right) != _bits(ours))
        if len(differ):
            return f"{kind}: {plane} differs from the definition in {len(differ)} bytes, first at {differ[0].tolist()}"
    return ""


def _bits(array: Any) -> Any:
    import numpy as np

    return np.ascontiguousarray(array).view(np.uint8)
