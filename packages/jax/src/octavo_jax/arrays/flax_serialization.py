"""Dataclasses of arrays in files of `flax.serialization`, which writes only types that were registered with it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any


def known_to_flax(*kinds: type[Any]) -> None:
    """Register these dataclasses with `flax.serialization`, if the program has imported it."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None:
        return
    for kind in kinds:
        if not serialization.is_serializable(kind):
            serialization.register_serialization_state(kind, _written, _restored)


def _names(one: Any) -> list[str]:
    return [field.name for field in fields(one) if not field.metadata.get("static")]


def _written(one: Any) -> dict[str, Any]:
    to_state_dict = sys.modules["flax.serialization"].to_state_dict
    return {name: to_state_dict(getattr(one, name)) for name in _names(one)}


def _restored(one: Any, state: Any) -> Any:
    names, kind = _names(one), type(one).__name__
    if not isinstance(state, Mapping) or set(state) != set(names):
        given = f"has {sorted(state)}" if isinstance(state, Mapping) else f"is a {type(state).__name__}"
        raise ValueError(
            f"the state dict of a {kind} {given}; give one that flax.serialization.to_state_dict made of "
            f"a {kind}, with {names}"
        )
    from_state_dict = sys.modules["flax.serialization"].from_state_dict
    return replace(one, **{name: from_state_dict(getattr(one, name), state[name], name) for name in names})
