"""How quantizers are written down: versioned JSON of everything but arrays, and the arrays of their states by name.

The JSON of a release is read by every later one (packages/jax/tests/golden). Arrays go where a user's other arrays go:
safetensors, npz, or orbax, which restores into the tree that `from_json` gives without them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from pydantic import Field, PositiveInt

from octavo import QuantizerSpec, RecipeError
from octavo.schema import Schema
from octavo_jax.scaling.delayed_state import ScalingHistory

VERSION: Literal[1] = 1
Arrays = Mapping[str, Array | np.ndarray]


class SavedState(Schema):
    """The shape of a `ScalingHistory`: `history` steps of `groups` groups."""

    history: Annotated[int, Field(ge=2)]
    groups: PositiveInt


class SavedQuantizer(Schema):
    """A `Quantizer`."""

    schema_version: Literal[1] = VERSION
    kind: Literal["quantizer"] = "quantizer"
    spec: QuantizerSpec
    state: SavedState | None = None


class SavedSet(Schema):
    """A `QuantizerSet`."""

    schema_version: Literal[1] = VERSION
    kind: Literal["quantizer_set"] = "quantizer_set"
    x: SavedQuantizer | None
    kernel: SavedQuantizer | None
    grad: SavedQuantizer | None


def to_json(saved: SavedQuantizer | SavedSet) -> str:
    """Canonical JSON: sorted keys, no white space."""
    return json.dumps(saved.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)


def read(text: str | bytes, kind: Literal["quantizer", "quantizer_set"]) -> Any:
    """What `to_json` wrote; ValueError for anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a {kind}: this is not JSON ({error})") from None
    stored_kind = content.get("kind") if isinstance(content, dict) else type(content).__name__
    if stored_kind != kind:
        raise ValueError(f"not a {kind}: the JSON holds {stored_kind!r}; give what {kind}'s to_json wrote")
    version = content.get("schema_version")
    if version != VERSION:
        raise ValueError(
            f"schema_version is {version!r} and this octavo-jax reads {VERSION}; install the octavo-jax that wrote it, "
            "or a newer one"
        )
    schema: type[Schema] = SavedQuantizer if kind == "quantizer" else SavedSet
    try:
        return schema(**content)
    except RecipeError as error:
        raise ValueError(f"not a {kind}: {error}") from None


def saved_state(state: ScalingHistory | None) -> SavedState | None:
    """The shape of one quantizer's state; ValueError for a stack of them, which has no JSON."""
    if state is None:
        return None
    if state.history.ndim != 2:
        raise ValueError(
            f"the state's history has shape {list(state.history.shape)} and JSON describes one quantizer, [H, G]; "
            "write each of a stack alone, or the stack with orbax"
        )
    return SavedState(history=state.history.shape[0], groups=state.history.shape[1])


def state_arrays(state: ScalingHistory | None, prefix: str) -> dict[str, Array]:
    """The arrays of a state by name; {} where there is none."""
    if state is None:
        return {}
    return {f"{prefix}history": state.history, f"{prefix}scale": state.scale}


def restored_state(saved: SavedState | None, arrays: Arrays | None, prefix: str) -> ScalingHistory | None:
    """A state of that shape from `arrays`, or of `jax.ShapeDtypeStruct` where there are none."""
    if saved is None:
        return None
    shapes: dict[str, tuple[int, ...]] = {"history": (saved.history, saved.groups), "scale": (saved.groups,)}
    if arrays is None:
        abstract: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32)  # type: ignore[no-untyped-call]
            for name, shape in shapes.items()
        }
        return ScalingHistory(**abstract)
    leaves = {}
    for name, shape in shapes.items():
        array = arrays.get(prefix + name)
        if array is None or array.shape != shape or array.dtype != np.float32:
            problem = "is missing" if array is None else f"has shape {list(array.shape)} and dtype {array.dtype}"
            raise ValueError(f"arrays[{prefix + name!r}] {problem}; the quantizer's state needs float32 {list(shape)}")
        leaves[name] = jnp.asarray(array)
    return ScalingHistory(**leaves)


def check_names(arrays: Arrays | None, known: Mapping[str, Any]) -> None:
    """ValueError where `arrays` holds more than the state that the JSON describes: something would be lost."""
    extra = sorted(set(arrays or {}) - set(known))
    if extra:
        raise ValueError(
            f"arrays holds {', '.join(extra)} and the quantizers have {', '.join(known) or 'no state'}; "
            "give the arrays that were saved with this JSON"
        )
