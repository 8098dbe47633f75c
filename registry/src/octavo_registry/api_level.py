"""The contract with third parties as one JSON document; `python -m octavo_registry.api_level` prints it.

`api-levels/N.json` in the repository holds the document of level N. A test computes it again: a change to anything
in it needs a new `API_LEVEL` and a new file, because plugins that are installed were written against the old one.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from typing import Any

from octavo_registry.contract import fused, gemm, layer, quantize, recording
from octavo_registry.contract.arrays import Prepare, Prepared
from octavo_registry.contract.backend import Backend, KernelChoice
from octavo_registry.contract.bound import Bound
from octavo_registry.contract.cards import BackendCard, Op, QuantizerCard
from octavo_registry.contract.frameworks import PLANES
from octavo_registry.contract.hookspecs import API_LEVEL, HookSpecs
from octavo_registry.contract.operations import OPERATIONS
from octavo_registry.contract.request import REQUESTS, Request

PARTS = (
    Prepare, Prepared, quantize.QuantizeWithAmax, quantize.QuantizeInto, quantize.QuantizeTokens, quantize.UpdateScales,
    quantize.RecordAmax,
    quantize.Interleaved, fused.Extras, fused.ActValues, fused.DactValues, fused.GradientExtras,
    layer.MakeWholeLayer, layer.WholeLayer, layer.DelayedScales, gemm.InterleaveHalves,
    recording.MakeRecorder, recording.Recorder,
)  # fmt: skip
"""The types of what is optional in an answer, and of what it gives and takes."""

_PROSE = ("title", "description")


def _signatures(owner: type) -> dict[str, str]:
    """Methods, a call included, and the types of properties, by name."""
    members = {
        name: member.fget if isinstance(member, property) else member for name, member in sorted(vars(owner).items())
    }
    return {
        name: str(inspect.signature(member))
        for name, member in members.items()
        if inspect.isfunction(member) and (name == "__call__" or not name.startswith("_"))
    }


def _fields(owner: type[Any], *, beside: type[Any] | None = None) -> dict[str, str]:
    """Types of fields by name; of those that `beside` has not, where it is given."""
    known = () if beside is None else [field.name for field in dataclasses.fields(beside)]
    return {field.name: str(field.type) for field in dataclasses.fields(owner) if field.name not in known}


def _plain(schema: Any, *, names: bool = False) -> Any:
    """A JSON schema without prose, its sets in alphabetical order; `names`: keys are field names, kept whatever."""
    if isinstance(schema, dict):
        return {
            key: _plain(value, names=key in ("properties", "$defs") and not names)
            for key, value in sorted(schema.items())
            if names or key not in _PROSE
        }
    if isinstance(schema, list):
        items = [_plain(item) for item in schema]
        return sorted(items, key=str) if all(isinstance(item, str) for item in items) else items
    return schema


def _card(model: type[BackendCard] | type[QuantizerCard]) -> Any:
    schema = _plain(model.model_json_schema())
    schema.get("$defs", {}).pop("QuantizerSpec", None)  # octavo-core's, versioned there
    return schema


def _operation(op: Op) -> dict[str, Any]:
    operation = OPERATIONS[op]
    return {
        "request": operation.request.__name__,
        "call": _signatures(operation.run)["__call__"],
        "answer": operation.bound.__name__,
        "optional": _fields(operation.bound, beside=Bound),
    }


def contract() -> dict[str, Any]:
    """Hook and protocol signatures, card schemas, and the fields of everything that crosses the border."""
    kinds = dict.fromkeys(REQUESTS.values())
    return {
        "api_level": API_LEVEL,
        "hooks": _signatures(HookSpecs),
        "backend": _signatures(Backend),
        "cards": {"BackendCard": _card(BackendCard), "QuantizerCard": _card(QuantizerCard)},
        "request": _fields(Request),
        "requests": {kind.__name__: _fields(kind, beside=Request) for kind in kinds},
        "bound": _fields(Bound),
        "operations": {op: _operation(op) for op in OPERATIONS},
        "parts": {part.__name__: _signatures(part) for part in PARTS},
        "kernel_choice": _fields(KernelChoice),
        "grouped_tensor": [*PLANES, "group_sizes", "spec"],
    }


def document() -> str:
    """`contract` as the text of its golden file."""
    return json.dumps(contract(), indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
