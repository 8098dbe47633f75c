"""The path of API level 4 to `octavo_registry.contract.frameworks`."""

from octavo_registry.contract.frameworks import PLANES, Device, Framework, LayerResult, Sharding

__all__ = [
    "PLANES",
    "Device",
    "Framework",
    "LayerResult",
    "Sharding",
]
