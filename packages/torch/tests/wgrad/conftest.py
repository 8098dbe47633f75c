"""Weight gradients are tested on the reference alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import octavo_registry


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    """Whatever else is installed: other backends have tests of their own."""
    with octavo_registry.prefer("torch-reference"):
        yield
