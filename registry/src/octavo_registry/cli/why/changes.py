"""The nearest change to a question that makes a backend serve which refuses it: pad a side, take another recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, get_args

import octavo_registry
from octavo import NoBackendError
from octavo.formats import DType
from octavo.presets import PRESETS
from octavo_registry.cli.why.chips import CHIPS
from octavo_registry.cli.why.question import COMPOSED, SIZES, Question
from octavo_registry.contract.plan import Decision
from octavo_registry.contract.request import sm
from octavo_registry.contract.weights import WEIGHT_SHAPES

Serves = Callable[[Question, str], bool]
"""Whether one backend would serve a question."""

_STEPS = (8, 16, 32, 64, 128, 256)
_MOST = 4


@dataclass(frozen=True, slots=True)
class Change:
    """One change, in words, and the backends that would serve then."""

    words: str
    backends: tuple[str, ...]


def serves_here(question: Question, backend: str) -> bool:
    """Whether `backend` alone would serve the operation on this machine, or compose the whole."""
    try:
        if question.op in COMPOSED:
            for layer in question.layers().values():
                octavo_registry.plan_layer(layer, backend=[backend, "*"])
        first = question.request()
        verdicts = octavo_registry.explain(first, backend=backend)
    except (NoBackendError, ValueError):
        return False
    return any(decision.verdict == "chosen" for decision in verdicts)


def serves_elsewhere(question: Question, backend: str) -> bool:
    """Whether cards and shape rules of `backend` admit the operation, on a chip that need not be here."""
    try:
        verdicts = octavo_registry.hypothesize(question.request(), backend=backend)
    except ValueError:
        return False
    return any(decision.verdict == "chosen" for decision in verdicts)


def nearest_changes(question: Question, decisions: Sequence[Decision], serves: Serves) -> list[Change]:
    """The nearest change for each backend that refuses and would come before the one that serves; the nearest first.

    Where something serves, only changes of the call are looked for; where nothing does, also another device or
    framework.
    """
    served = any(decision.verdict == "chosen" for decision in decisions)
    refusing = [decision.backend for decision in decisions if decision.verdict == "refused"]
    if served:
        refusing = _better(refusing, decisions)
    found: dict[str, list[str]] = {}
    for words, changed in _changes(question, elsewhere=not served):
        for backend in list(refusing):
            if serves(changed, backend):
                found.setdefault(words, []).append(backend)
                refusing.remove(backend)
        if not refusing or len(found) == _MOST:
            break
    return [Change(words, tuple(backends)) for words, backends in found.items()]


def _better(refusing: list[str], decisions: Sequence[Decision]) -> list[str]:
    """Those of a higher priority than the backend that serves."""
    priority = {record.name: record.card.priority for record in octavo_registry.backends() if record.card is not None}
    chosen = next(decision.backend for decision in decisions if decision.verdict == "chosen")
    return [name for name in refusing if priority.get(name, 0) > priority.get(chosen, 0)]


def _changes(question: Question, *, elsewhere: bool) -> Iterator[tuple[str, Question]]:
    """One change at a time, the smallest first."""
    layer = question.layer

    def with_(**fields: Any) -> Question:
        return replace(question, layer=replace(layer, **fields))

    for step in _STEPS:
        padded = {
            name: step * ceil(side / step) for name, side in (("k", layer.k), ("n", layer.n)) if side and side % step
        }
        if padded:
            now = {"k": layer.k, "n": layer.n}
            words = " and ".join(f"{name.upper()} = {side} (now {now[name]})" for name, side in padded.items())
            yield f"{words}, the next multiple of {step}", with_(**padded)
    for sizes in SIZES:
        if sizes != layer.sizes:
            yield f"group sizes on the {sizes}", with_(sizes=sizes)
    if layer.graph_safe:
        yield "outside of a CUDA graph", with_(graph_safe=False)
    for weight, shape in WEIGHT_SHAPES.items():
        if weight != layer.weight:
            yield f"w stored as {shape}", with_(weight=weight)
    for dtype in get_args(DType):
        if dtype != layer.in_dtype:
            yield f"{dtype} operands", with_(in_dtype=dtype, out_dtype=question.recipe.output_dtype or dtype)
    for name, recipe in PRESETS.items():
        if recipe != question.recipe:
            changed = replace(question, recipe=recipe)
            yield f"recipe {name}", replace(changed, layer=replace(layer, recipe=recipe))
    if layer.training and question.op in COMPOSED:
        yield "the forward pass alone", with_(training=False)
    if not elsewhere:
        return
    if layer.device != "cpu":
        yield "on the CPU", with_(device="cpu", arch=None, graph_safe=False)
        for chip, arch in CHIPS.items():
            if arch != layer.arch:
                yield f"on {chip.upper()} ({sm(arch)})", with_(device="cuda", arch=arch)
    for framework in octavo_registry.framework_names():
        if framework != layer.framework:
            yield f"in {framework}", with_(framework=framework)
