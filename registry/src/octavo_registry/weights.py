"""The path of API level 4 to `octavo_registry.contract.weights`."""

from octavo_registry.contract.weights import WEIGHT_SHAPES, as_it_lies, readers

__all__ = [
    "WEIGHT_SHAPES",
    "as_it_lies",
    "readers",
]
