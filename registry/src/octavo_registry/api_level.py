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

from octavo_registry.contract.cards import BackendCard, QuantizerCard
from octavo_registry.contract.frameworks import PLANES
from octavo_registry.contract.hookspecs import API_LEVEL, HookSpecs
from octavo_registry.contract.kernels import KernelChoice, KernelModel
from octavo_registry.contract.request import Backend, Bound, Request

_PROSE = ("title", "description")


def _signatures(owner: type) -> dict[str, str]:
    return {
        name: str(inspect.signature(member))
        for name, member in sorted(vars(owner).items())
        if inspect.isfunction(member) and not name.startswith("_")
    }


def _fields(owner: type[Any]) -> dict[str, str]:
    return {field.name: str(field.type) for field in dataclasses.fields(owner)}


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


def contract() -> dict[str, Any]:
    """Hook and protocol signatures, card schemas, and the fields of everything that crosses the border."""
    return {
        "api_level": API_LEVEL,
        "hooks": _signatures(HookSpecs),
        "backend": _signatures(Backend),
        "backend_optional": _signatures(KernelModel),
        "cards": {"BackendCard": _card(BackendCard), "QuantizerCard": _card(QuantizerCard)},
        "request": _fields(Request),
        "bound": _fields(Bound),
        "kernel_choice": _fields(KernelChoice),
        "grouped_tensor": [*PLANES, "group_sizes", "spec"],
    }


def document() -> str:
    """`contract` as the text of its golden file."""
    return json.dumps(contract(), indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
