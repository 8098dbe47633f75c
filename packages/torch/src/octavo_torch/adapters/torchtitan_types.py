"""The attributes of torchtitan's objects that its adapter reads, as types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch.distributed.device_mesh import DeviceMesh


class OurConfig(Protocol):
    """The fields that an override adds to a configuration."""

    recipe: str
    seed: int | None
    backend: str | Sequence[str] | None


class Dispatcher(Protocol):
    """The configuration of a token dispatcher."""

    num_experts: int
    top_k: int


class RoutedConfig(Protocol):
    """The configuration of RoutedExperts."""

    inner_experts: object
    token_dispatcher: Dispatcher


class Experts(Protocol):
    """torchtitan's GroupedExperts."""

    num_experts: int


class Dims(Protocol):
    """torchtitan's ParallelDims."""

    tp: int
    tp_enabled: bool

    def get_optional_mesh(self, name: str, /) -> DeviceMesh | None: ...


def owner_of(config: object) -> type:
    """The class that a configuration builds."""
    owner: type = type(config)._owner  # type: ignore[attr-defined]
    return owner
