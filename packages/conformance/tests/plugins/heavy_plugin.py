"""A backend whose card imports numpy, which a card must not."""

from __future__ import annotations

import numpy_backend
import numpy_plugin

from octavo_registry.contract.cards import BackendCard


def octavo_backends() -> list[BackendCard]:
    """One card."""
    return [numpy_plugin.card("numpy-heavy")]


def octavo_load(name: str) -> object | None:
    """The honest backend under another name."""
    return numpy_backend.NumpyBackend() if name == "numpy-heavy" else None
