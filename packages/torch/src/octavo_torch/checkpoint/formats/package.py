"""The package safetensors, which checkpoints alone need."""

from __future__ import annotations

import importlib.util


def check_safetensors() -> None:
    """ModuleNotFoundError that says what to install where the package is absent."""
    if importlib.util.find_spec("safetensors") is None:
        raise ModuleNotFoundError(
            "checkpoints are safetensors files, and the package safetensors is not installed; pip install safetensors",
            name="safetensors",
        )
